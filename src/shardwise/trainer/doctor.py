"""What can be wrong with a machine, or with the ranks of a job, before a run: found, judged, and
what to do about it.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import combinations
from pathlib import Path
from typing import Any, Literal

from shardwise import processor
from shardwise.children import ChildFailed
from shardwise.description.preset import parameter_count
from shardwise.description.tracing.real_run import free_memory
from shardwise.errors import UserError
from shardwise.planning.memory import count_kept, show_bytes
from shardwise.trainer import launch

_MIB = 1 << 20
_SHM = Path("/dev/shm")
_MESSAGE = 4 * _MIB  # of each measured collective
_PAIR = 2 * _MIB
_MEET_S = 30.0
_SLOW_PAIR = 4.0  # times slower than the middle one
_SKEW_S = 1.0
_FILES_PER_RANK = 64  # sockets and pipes that one rank takes, roughly


@dataclass(frozen=True)
class Check:
    """One line of the table."""

    name: str
    found: str
    verdict: Literal["ok", "warn", "fail"] = "ok"
    do: str = ""


def examine(
    nproc: int, out: Path, config: Any, port: int | None, progress: Callable[[str], None]
) -> Iterator[Check]:
    """Every check in turn; those of the machine first, then those of the ranks. Under torchrun
    every rank calls it, and rank 0's are the answers.
    """
    machine = []
    for check in _machine(nproc, out, config, port, progress):
        machine.append(check)
        yield check
    world = int(os.environ["WORLD_SIZE"]) if launch.joined() else nproc
    if world > 1:
        progress(f"{world} ranks: reach, bandwidth, clocks")
        yield from _ranks(world, [check for check in machine if check.verdict != "ok"])


# The machine


def _machine(
    nproc: int, out: Path, config: Any, port: int | None, progress: Callable[[str], None]
) -> Iterator[Check]:
    progress("versions and devices")
    yield from _versions()
    yield from _devices(config)
    yield _processor()
    progress("memory, disk and limits")
    yield _shared_memory(_SHM)
    yield _disk(out, config)
    yield _open_files(nproc)
    yield _processes(nproc)
    yield _memory(nproc, config)
    if port is not None:
        yield _port(port)


def _versions() -> Iterator[Check]:
    python = platform.python_version()
    old = sys.version_info < (3, 11)
    do = "install Python 3.11 or newer" if old else ""
    yield Check("python", python, "fail" if old else "ok", do)
    import torch

    from shardwise.engine.torch_private import TESTED

    running = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    oldest, newest = (tuple(int(part) for part in version.split(".")) for version in TESTED)
    verdict: Literal["ok", "warn", "fail"] = "ok"
    do = ""
    if running < oldest:
        verdict, do = "fail", f"install torch {TESTED[0]} to {TESTED[1]}"
    elif running > newest:
        verdict = "warn"
        do = f"tested with {TESTED[0]} to {TESTED[1]}: compare a few steps with one process"
    yield Check("torch", torch.__version__, verdict, do)
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "none"
    missing = triton == "none" and torch.cuda.is_available()
    do = "pip install triton: its kernels fall back to torch's without it" if missing else ""
    yield Check("triton", triton, "warn" if missing else "ok", do)


def _devices(config: Any) -> Iterator[Check]:
    import torch
    import torch.distributed as dist

    count = torch.cuda.device_count()
    wanted = config.run.device if config is not None else "auto"
    if count:
        names = sorted({torch.cuda.get_device_name(i) for i in range(count)})
        yield Check("device", f"{count} x {', '.join(names)}")
        yield _driver()
    elif torch.version.cuda and Path("/dev/nvidia0").exists():
        do = "torch sees no GPU though the machine has one: does the driver suit this torch?"
        yield Check("device", "cpu; /dev/nvidia0 exists", "fail", do)
    elif wanted == "cuda":
        yield Check("device", "cpu", "fail", "run.device is cuda: set it to cpu, or use a GPU node")
    else:
        yield Check("device", f"cpu, {os.cpu_count()} cores")
    backend = (config.run.backend if config is not None else "") or ("nccl" if count else "gloo")
    if not dist.is_backend_available(backend):
        do = f"this build of torch has no {backend}: gloo is for cpu, nccl for cuda"
        yield Check("backend", backend, "fail", do)
    elif backend == "nccl" and not count:
        yield Check("backend", backend, "fail", "nccl moves CUDA tensors only: use gloo")
    else:
        version = ""
        if backend == "nccl":
            version = " " + ".".join(str(part) for part in torch.cuda.nccl.version())
        yield Check("backend", backend + version)


def _driver() -> Check:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return Check("driver", answer.stdout.split()[0])
    except (OSError, subprocess.SubprocessError, IndexError):
        do = "nvidia-smi does not answer: is the driver's user part installed?"
        return Check("driver", "unknown", "warn", do)


def _processor() -> Check:
    """AMX that is announced and refused ends torch's bf16 products by SIGILL."""
    processor.settle()
    answer = os.environ.get(processor.ANSWER)
    if answer == "refused":
        do = (
            f"set {processor.LIMIT}={processor.WITHOUT_AMX} for programs that do not start by "
            "shardwise"
        )
        return Check("processor", "announces AMX and refuses it", "warn", do)
    return Check("processor", f"AMX {answer}" if answer else "no AMX")


def _free(path: Path) -> int:
    return shutil.disk_usage(path).free


def _shared_memory(path: Path) -> Check:
    if not path.is_dir():
        return Check("shared memory", "no /dev/shm", "warn", "data loaders and NCCL want it")
    free = _free(path)
    verdict: Literal["ok", "warn", "fail"] = "ok"
    if free < 256 * _MIB:
        verdict = "warn" if free >= 16 * _MIB else "fail"
    do = "make /dev/shm larger (docker run --shm-size 8g), or remove what lies there"
    return Check(
        "shared memory", f"{show_bytes(free)} free", verdict, do if verdict != "ok" else ""
    )


def _disk(out: Path, config: Any) -> Check:
    """Room for a run's files; with a configuration, for two checkpoints of its model."""
    folder = out
    while not folder.exists():
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        do = f"nothing can be written there ({error.strerror}): choose another --out"
        return Check("disk", str(folder), "fail", do)
    # Parameters and the two moments of AdamW in 32 bits; while one is written the last one stays.
    need = 2 * 12 * parameter_count(config.model.resolve()) if config is not None else 64 * _MIB
    free = _free(folder)
    found = f"{show_bytes(free)} free at {folder}"
    if free < need:
        do = (
            f"two checkpoints take {show_bytes(need)}"
            if config
            else f"less than {show_bytes(need)}"
        )
        return Check("disk", found, "fail", f"{do}: free some, or choose another --out")
    if free < 2 * need:
        return Check(
            "disk", found, "warn", f"a few more files fill it ({show_bytes(need)} are needed)"
        )
    return Check("disk", found)


def _open_files(nproc: int) -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = _FILES_PER_RANK + 8 * nproc  # every rank has connections to all others
    found = f"{soft} (at most {hard})"
    if soft < need:
        return Check("open files", found, "fail", f"{need} are needed: ulimit -n {max(need, 4096)}")
    if soft < 1024:
        return Check("open files", found, "warn", "data loaders want more: ulimit -n 4096")
    return Check("open files", found)


def _processes(nproc: int) -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft == resource.RLIM_INFINITY:
        return Check("processes", "no limit")
    need = 64 * nproc  # threads count too
    do = f"{need} are needed, threads included: ulimit -u {max(need, 4096)}" if soft < need else ""
    return Check("processes", str(soft), "fail" if soft < need else "ok", do)


def _memory(nproc: int, config: Any) -> Check:
    free = free_memory()
    if free is None:
        return Check("memory", "unknown", "warn", "this system does not tell how much is free")
    found, need = f"{show_bytes(free)} free", 512 * _MIB * nproc  # torch itself, in each rank
    if config is not None:
        need += nproc * _kept_by_rank(config, nproc)
        found += f"; {nproc} ranks keep at least {show_bytes(need)}"
    import torch

    if config is not None and torch.cuda.is_available() and config.run.device != "cpu":
        free, need = torch.cuda.mem_get_info()[0], _kept_by_rank(config, nproc)
        found = f"{show_bytes(free)} free on the GPU; a rank keeps at least {show_bytes(need)}"
    if free < need:
        do = "fewer ranks, a smaller model, --plan zero3, or more memory"
        return Check("memory", found, "fail", do)
    return Check("memory", found)


def _kept_by_rank(config: Any, nproc: int) -> int:
    """What one rank holds of the model at the worst moment, as the plan cuts it; activations come
    on top.
    """
    import torch

    from shardwise.description.language_model import LM
    from shardwise.trainer.loop import build_plan

    with torch.device("meta"):
        model = LM(config.model.resolve(), config.data.seq, config.model.checkpoint)
    # Of auto the least: it takes what fits.
    plan = type(config.plan)("zero3") if config.plan.is_auto else config.plan
    kept = count_kept(build_plan(plan, model, nproc))
    return kept.at_once if torch.cuda.is_available() else kept.host_at_once


def _port(port: int) -> Check:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            do = f"{error.strerror}: choose another MASTER_PORT, or end who has it"
            return Check("port", str(port), "fail", do)
    return Check("port", f"{port} is free")


# The ranks


def _ranks(world: int, here: list[Check]) -> Iterator[Check]:
    """`here` is what is wrong on this machine; of others rank 0 learns it from their ranks."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "ranks.json"
        try:
            if launch.joined():
                meet(str(file), here)
            else:
                launch.start_ranks("shardwise.trainer.doctor:meet", (str(file),), world)
        except (ChildFailed, UserError, RuntimeError, OSError) as error:
            last = str(error).strip().splitlines()[-1]
            do = f"the ranks do not meet, or one fails: {last}"
            yield Check("ranks", f"{world} started", "fail", do)
            return
        if not file.exists():  # rank 0 has the answers
            return
        found = json.loads(file.read_text(encoding="utf-8"))
    for host, checks in found["elsewhere"].items():
        for check in checks:
            yield Check(**{**check, "name": f"{check['name']} on {host}"})
    yield Check("ranks", f"{world} on {len(set(found['hosts']))} host(s) reach each other")
    yield _bandwidth(found)
    yield _clocks(found)


def _bandwidth(found: dict[str, Any]) -> Check:
    pairs = {tuple(pair): rate for pair, rate in found["pairs"]}
    middle = sorted(pairs.values())[len(pairs) // 2]
    (one, other), worst = min(pairs.items(), key=lambda item: item[1])
    hosts = found["hosts"]
    text = (
        f"all-gather {found['all_gather']:.0f}, all-reduce {found['all_reduce']:.0f} MiB/s; worst "
        f"pair: ranks {one} and {other}, {worst:.0f} MiB/s (middle: {middle:.0f})"
    )
    if worst * _SLOW_PAIR < middle:
        do = f"look at the link between {hosts[one]} and {hosts[other]}, and at who else uses it"
        return Check("bandwidth", text, "warn", do)
    return Check("bandwidth", text)


def _clocks(found: dict[str, Any]) -> Check:
    skews = found["clocks"]
    worst = max(range(len(skews)), key=lambda rank: abs(skews[rank]))
    text = f"at most {abs(skews[worst]):.3f} s apart"
    if abs(skews[worst]) > _SKEW_S:
        do = f"rank {worst} ({found['hosts'][worst]}) is off by {skews[worst]:+.1f} s: is NTP on?"
        return Check("clocks", text, "warn", do)
    return Check("clocks", text)


def meet(file: str, here: list[Check] | None = None) -> None:
    """On each rank: join the others, measure; rank 0 writes what was found, and what is wrong
    `here` on other hosts.
    """
    import torch
    import torch.distributed as dist

    from shardwise.trainer.group import open_group

    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= int(
        os.environ["LOCAL_WORLD_SIZE"]
    )
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    open_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=_MEET_S))
    rank, world = dist.get_rank(), dist.get_world_size()

    def rate(nbytes: int, call: Callable[[], Any]) -> float:
        """MiB/s; the best of a few."""
        best = float("inf")
        for _ in range(4):
            dist.barrier()
            began = time.perf_counter()
            call()
            if cuda:
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - began)
        return nbytes / _MIB / max(best, 1e-9)

    whole = torch.zeros(_MESSAGE // 4 // world * world, device=device)
    part = whole.view(world, -1)[rank].clone()
    outputs = list(whole.view(world, -1).unbind())
    gather = rate(_MESSAGE, lambda: dist.all_gather(outputs, part))
    reduce = rate(_MESSAGE, lambda: dist.all_reduce(whole))
    message = torch.zeros(_PAIR // 4, device=device)
    pairs = []
    for one, other in _some_pairs(world):

        def send(one: int = one, other: int = other) -> None:
            if rank == one:
                dist.send(message, other)
                dist.recv(message, other)
            elif rank == other:
                dist.recv(message, one)
                dist.send(message, one)

        mine = torch.tensor([rate(2 * _PAIR, send)], device=device)
        dist.broadcast(mine, one)
        pairs.append(((one, other), float(mine)))
    skews = _skews(device)
    said: list[Any] = [None] * world
    wrong = [asdict(check) for check in here or ()]
    dist.all_gather_object(said, (socket.gethostname(), wrong))
    if rank == 0:
        hosts = [host for host, _ in said]
        found = {
            "all_gather": gather,
            "all_reduce": reduce,
            "pairs": pairs,
            "clocks": skews,
            "hosts": hosts,
            "elsewhere": {host: checks for host, checks in said if host != hosts[0]},
        }
        Path(file).write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _some_pairs(world: int) -> list[tuple[int, int]]:
    """All pairs of few ranks; of many, each rank with the next: as many as ranks."""
    if world <= 6:
        return list(combinations(range(world), 2))
    return [(rank, (rank + 1) % world) for rank in range(world)]


def _skews(device: Any) -> list[float]:
    """How far each rank's clock is from rank 0's: the least of several looks after a barrier, so
    that what a message takes counts little.
    """
    import torch
    import torch.distributed as dist

    looks = []
    for _ in range(5):
        dist.barrier()
        now = torch.tensor([time.time()], dtype=torch.float64, device=device)
        clocks = [torch.zeros_like(now) for _ in range(dist.get_world_size())]
        dist.all_gather(clocks, now)
        looks.append([float(clock - clocks[0]) for clock in clocks])
    return [min(each, key=abs) for each in zip(*looks, strict=True)]
