"""This rank's membership in the process group: its number, its device, the backend."""

import os
import secrets
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from shardwise.errors import UserError
from shardwise.trainer import launch
from shardwise.trainer.config import RunConfig

_MEET_S = 300.0  # for all ranks to come, once the first has


@dataclass(frozen=True)
class Member:
    rank: int
    world: int
    device: torch.device
    backend: str

    @property
    def device_name(self) -> str:
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        return self.device.type


def join_group(run: RunConfig) -> Member:
    """Join the default process group with the device and backend the configuration asks for."""
    rank, world, local = (int(os.environ[n]) for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    device = _choose_device(run.device, local)
    backend = run.backend or ("nccl" if device.type == "cuda" else "gloo")
    if not dist.is_backend_available(backend):
        raise UserError(
            f"run.backend {backend!r} is not in this build of torch: use gloo on cpu, nccl on cuda"
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    bound = device if backend == "nccl" else None
    open_group(backend, device_id=bound)
    return Member(rank, world, device, backend)


def open_group(
    backend: str, device_id: torch.device | None = None, timeout: timedelta | None = None
) -> None:
    """Join the default process group. torch's own store listens on all interfaces, whatever its
    address; ranks that `start_ranks` started meet on loopback only, at a port that is theirs.
    """
    at, store = launch.meeting, None
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if at is None:
        store = meet_through_agent(rank, world)
    else:
        fd = at.listener.detach() if at.listener is not None else None
        store = dist.TCPStore(
            "127.0.0.1", at.port, world, rank == 0, wait_for_workers=False, master_listen_fd=fd
        )
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world, device_id=device_id, timeout=timeout
    )


def use_deterministic_kernels() -> None:
    """Before the device's first product, for cuBLAS reads its setting then."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)


def meet_through_agent(rank: int, world: int) -> dist.Store | None:
    """Where ranks meet that torchrun's agent has started; None: as torch does by itself.

    The agent keeps one store for all its starts of the ranks, and torch reads there where peers
    listened that are dead now. So rank 0 names a place for this start and tells each rank that
    asks, by that rank's own word: nobody else's answer, nor an old one, is taken for it.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, world, is_master=False)
    place = secrets.token_hex(8)
    if rank == 0:
        asked, missing = dist.PrefixStore("shardwise/asked", store), set(range(1, world))
        deadline = time.monotonic() + _MEET_S
        while missing:
            for other in sorted(missing):
                if asked.check([str(other)]):
                    store.set(f"shardwise/told/{asked.get(str(other)).decode()}", place)
                if store.check([f"shardwise/heard/{place}/{other}"]):
                    missing.discard(other)
            if missing and time.monotonic() > deadline:
                raise UserError(
                    f"ranks {sorted(missing)} did not come: is torchrun still up there?"
                )
            time.sleep(0.01 * bool(missing))
    else:
        word = secrets.token_hex(8)
        store.set(f"shardwise/asked/{rank}", word)
        place = store.get(f"shardwise/told/{word}").decode()
        store.set(f"shardwise/heard/{place}/{rank}", "")
    return dist.PrefixStore(f"shardwise/start/{place}", store)


def _choose_device(wanted: str, local: int) -> torch.device:
    count = torch.cuda.device_count()
    if wanted == "cpu" or (wanted == "auto" and count == 0):
        return torch.device("cpu")
    if local >= count:
        raise UserError(
            f"local rank {local} has no GPU of its own: this machine has {count}; lower --nproc, "
            f"or set run.device=cpu"
        )
    return torch.device("cuda", local)


def memory_in_use(device: torch.device) -> int:
    """Give bytes: on cuda the peak allocated since the last call, on cpu what is resident."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import resource

    # Without /proc only the peak is known: in bytes on macOS, in KiB elsewhere.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
