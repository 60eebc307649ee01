"""Faults in a running job (cases 8, 10 and 27): real ranks, one of which fails in the midst of a
step, end on all ranks within five seconds with one message; what is no fault ends nobody.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.hosts import ADDRESSES, Hosts, refusal, two_hosts
from shardwise.watch import rank as watched
from shardwise.watch.rank import ENDED
from tests.ranks import PRELOADED

WITHIN_S = 5.0
FAULT_STEP = 5


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear, self.number = nn.Linear(16, 16), number
        self.before: Callable[[int], None] = lambda number: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.before(self.number)
        return x + self.linear(x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(i) for i in range(4))
        self.order = [0, 1, 2, 3]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in self.order:
            x = self.blocks[i](x)
        return x


@dataclass
class Job:
    """The ranks of one case, as a launcher would see them."""

    processes: list[Any]
    folder: Path

    def wait(self, seconds: float = 20.0) -> list[int]:
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        assert None not in self.codes, f"ranks are still there: {self.codes} {self.said}"
        return self.codes

    @property
    def codes(self) -> list[Any]:
        return [process.exitcode for process in self.processes]

    @property
    def said(self) -> str:
        """What all ranks and their watchers wrote to their standard error."""
        files = sorted(self.folder.glob("err*"))
        return "".join(file.read_text() for file in files)

    @property
    def took(self) -> float:
        """Seconds from the fault to the end of the last rank."""
        return time.monotonic() - float((self.folder / "fault").read_text())

    def signal(self, number: int, *ranks: int) -> None:
        for rank in ranks:
            os.kill(self.processes[rank].pid, number)

    def wait_for(self, name: str, count: int = 1) -> None:
        deadline = time.monotonic() + 20
        while len(list(self.folder.glob(name))) < count:
            assert time.monotonic() < deadline, f"no {name}: {self.codes} {self.said}"
            time.sleep(0.02)


@contextmanager
def start(
    folder: Path,
    program: Callable[..., None],
    *args: Any,
    world: int = 2,
    hosts: Hosts | None = None,
) -> Iterator[Job]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [
        context.Process(target=_run, args=(rank, world, port, folder, program, args, hosts))
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    try:
        yield Job(processes, folder)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _run(
    rank: int, world: int, port: int, folder: Path, program: Any, args: Any, hosts: Hosts | None
) -> None:
    """A rank as a script of its own would be: uncaught exceptions go to `sys.excepthook`. The first
    half of the ranks is on the first host.
    """
    address = "127.0.0.1"
    if hosts is not None:
        hosts.enter(2 * rank // world)
        address = ADDRESSES[0]
    file = os.open(folder / f"err{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 2)
    os.close(file)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://{address}:{port}", rank=rank, world_size=world
    )
    try:
        program(folder, *args)
    except SystemExit as stop:
        import atexit

        atexit._run_exitfuncs()
        os._exit(stop.code)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    import atexit

    atexit._run_exitfuncs()
    os._exit(0)


def note_fault(folder: Path) -> None:
    (folder / "fault").write_text(str(time.monotonic()))


def train(folder: Path, fault: str = "", who: int = 1, steps: int = 8, pause: float = 0.0) -> None:
    """A zero3 training in which rank `who` does something in step 5."""
    torch.manual_seed(0)
    rank, world = dist.get_rank(), dist.get_world_size()
    where, _, what = fault.partition(":")
    settings = {"forward_prefetch": 0, "backward_prefetch": 0} if where == "order" else {}
    model = sw.shard(Net(), sw.Plan.of("zero3", mesh=world, whole_below=0, **settings))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    assert watched.on is None or watched.on.complete.wait(20)
    for step in range(1, steps + 1):
        if step == 2:
            (folder / f"trains{rank}").touch()
        now = step == FAULT_STEP and rank == who
        if now and where == "between":
            do(folder, what)
        if now and where == "order":
            note_fault(folder)
            model.order = [int(digit) for digit in what]
        in_forward = now and where == "forward"
        model.blocks[1].before = lambda n, go=in_forward: do(folder, what) if go else None
        out = model(torch.ones(2, 16))
        if now and where == "backward":
            out.register_hook(lambda grad: do(folder, what))
        out.sum().backward()
        if now and where == "step":
            optimizer.register_step_pre_hook(lambda *_: do(folder, what))
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(pause)


def do(folder: Path, what: str) -> None:
    note_fault(folder)
    if what == "raise":
        raise ZeroDivisionError("the fault that began it")
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if what == "hold the interpreter":
        ctypes.PyDLL(None).usleep(3_500_000)
    if what.startswith("exit"):
        sys.exit(int(what.removeprefix("exit ")))


def one_message(job: Job) -> str:
    """What was said of the fault: once, by one of all."""
    lines = [line for line in job.said.splitlines() if line.startswith("shardwise: ")]
    assert len(lines) == 1, job.said
    return lines[0]


@pytest.mark.parametrize(("where", "who"), [("forward", 1), ("backward", 0), ("step", 1)])
def test_a_rank_that_raises(tmp_path: Path, where: str, who: int) -> None:
    with start(tmp_path, train, f"{where}:raise", who) as job:
        codes = job.wait()
        assert job.took < WITHIN_S
        place = {
            "forward": "in step 5, forward of unit blocks.1",
            "backward": "in step 5",
            "step": "after step 5",
        }
        assert f"shardwise: rank {who} of 2 failed {place[where]}" in one_message(job)
        assert job.said.count("Traceback (most recent call last)") == 1, job.said
        assert job.said.count("ZeroDivisionError: the fault that began it") == 1
        assert "in do\n" in job.said and codes[who] == 1 and codes[1 - who] == ENDED


@pytest.mark.parametrize("who", [0, 2])
def test_a_rank_that_is_killed(tmp_path: Path, who: int) -> None:
    with start(tmp_path, train, "forward:kill", who, world=3) as job:
        codes = job.wait()
        assert job.took < WITHIN_S
        told = f"shardwise: rank {who} of 3 was killed by SIGKILL (most often that is the system "
        assert one_message(job).startswith(told)
        assert "in step 5, forward of unit blocks.1; the other ranks were ended" in job.said
        assert "Traceback" not in job.said  # of peers that lost it
        assert codes == [-signal.SIGKILL if rank == who else ENDED for rank in range(3)]


@pytest.mark.quiet  # three of the five seconds are spent on making sure
def test_a_rank_that_is_stopped(tmp_path: Path, who: int = 0) -> None:
    with start(tmp_path, train, "forward:stop", who) as job:
        codes = job.wait()
        assert job.took < WITHIN_S
        told = f"shardwise: rank {who} of 2 was stopped (SIGSTOP or SIGTSTP"
        assert one_message(job).startswith(told) and "forward of unit blocks.1" in job.said
        assert codes[who] == -signal.SIGKILL and codes[1 - who] == ENDED


@pytest.mark.parametrize("order", ["0213", "023"])
def test_units_in_another_order_in_a_later_step(tmp_path: Path, order: str) -> None:
    """Cases 10 and 8: blocks of one shape, so nothing but the order tells."""
    with start(tmp_path, train, f"order:{order}", 1, 10_000) as job:
        codes = job.wait()
        assert job.took < WITHIN_S
        told = (
            "shardwise: rank 1 of 2 runs another order than rank 0 in step 5: forward of unit "
            "blocks.2 where rank 0 has forward of unit blocks.1. "
        )
        assert one_message(job).startswith(told), job.said
        assert codes == [ENDED, ENDED]


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_ends_while_others_go_on(tmp_path: Path, who: int) -> None:
    with start(tmp_path, train, "between:exit 0", who) as job:
        codes = job.wait()
        assert job.took < WITHIN_S
        told = f"shardwise: rank {who} of 2 ended (its program was over) while rank {1 - who} "
        assert one_message(job).startswith(told) and codes[who] == 0 and codes[1 - who] == ENDED


def test_a_rank_that_exits_with_a_code(tmp_path: Path) -> None:
    with start(tmp_path, train, "between:exit 7") as job:
        assert job.wait() == [ENDED, 7]
        assert job.took < WITHIN_S
        assert one_message(job).startswith("shardwise: rank 1 of 2 exited with code 7 ")


def test_the_verdict_for_a_launcher(tmp_path: Path) -> None:
    with start(tmp_path, _with_verdict, "forward:kill") as job:
        job.wait()
        verdict = json.loads((tmp_path / "verdict").read_text())
        assert (verdict["kind"], verdict["rank"]) == ("killed", 1)
        assert (
            verdict["place"] == "in step 5, forward of unit blocks.1"
            and "shardwise: " not in job.said
        )


def _with_verdict(folder: Path, fault: str) -> None:
    os.environ["SHARDWISE_VERDICT"] = str(folder / "verdict")
    train(folder, fault)


@pytest.mark.skipif(refusal() != "", reason=refusal())
@pytest.mark.quiet  # so here
def test_a_link_that_is_cut(tmp_path: Path) -> None:
    """Both sides end, and each says what it has lost."""
    with two_hosts() as hosts, start(tmp_path, train, "", 1, 10_000, world=4, hosts=hosts) as job:
        job.wait_for("trains*", 4)
        note_fault(tmp_path)
        hosts.cut()
        assert job.wait() == [ENDED] * 4, job.said
        assert job.took < WITHIN_S
        told = [line for line in job.said.splitlines() if line.startswith("shardwise: ")]
        assert len(told) == 2, job.said
        assert " is lost: its watcher has been silent for 3" in told[0]
        assert "shardwise: rank 0 of 4" in told[1] and "cannot be reached" in told[1]


# What is no fault


def test_a_held_interpreter_is_no_fault(tmp_path: Path) -> None:
    with start(tmp_path, train, "forward:hold the interpreter") as job:
        assert job.wait() == [0, 0]
        assert job.took > 3.4 and job.said == ""


def test_a_job_that_is_stopped_and_continued_is_no_fault(tmp_path: Path) -> None:
    with start(tmp_path, train, "", 1, 30, 0.02) as job:
        job.wait_for("trains*", 2)
        job.signal(signal.SIGSTOP, 0, 1)  # SIGTSTP stops nobody who has no terminal
        time.sleep(2.8)
        job.signal(signal.SIGCONT, 0, 1)
        assert job.wait() == [0, 0]
        assert job.said == ""


def test_a_job_that_is_ended_by_its_launcher_says_nothing(tmp_path: Path) -> None:
    with start(tmp_path, train, "", 1, 10_000) as job:
        job.wait_for("trains*", 2)
        job.signal(signal.SIGTERM, 0, 1)
        assert job.wait() == [-signal.SIGTERM] * 2
        time.sleep(0.5)
        assert [line for line in job.said.splitlines() if line.startswith("shardwise")] == []


def _end_later(folder: Path) -> None:
    train(folder)
    rank = dist.get_rank()
    dist.barrier()
    time.sleep(1.5 * rank)
    (folder / f"over{rank}").touch()


def test_ranks_may_end_at_different_times(tmp_path: Path) -> None:
    with start(tmp_path, _end_later) as job:
        assert job.wait() == [0, 0]
        assert job.said == "" and (tmp_path / "over1").exists()


def _catch(folder: Path) -> None:
    """All ranks catch the same exception in the midst of a forward, and go on."""
    model = sw.shard(Net(), sw.Plan.of("zero3", mesh=2, whole_below=0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def fail(number: int) -> None:
        raise ZeroDivisionError

    for step in range(40):
        model.blocks[2].before = fail if step == 5 else lambda number: None
        try:
            model(torch.ones(2, 16)).sum().backward()
        except ZeroDivisionError:
            continue
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)


def test_an_exception_that_all_ranks_catch_is_no_fault(tmp_path: Path) -> None:
    with start(tmp_path, _catch) as job:
        assert job.wait() == [0, 0]
        assert job.said == ""


def _retry_alone(folder: Path) -> None:
    """Rank 1 catches its own exception and begins the step again, while rank 0 is in the midst of
    it: they have parted, and what they would move from here on is not what was asked for.
    """
    model = sw.shard(Net(), sw.Plan.of("zero3", mesh=2, whole_below=0))
    tries = iter([True])
    assert watched.on is not None and watched.on.complete.wait(20)

    def fail_once(number: int) -> None:
        if dist.get_rank() == 1 and next(tries, False):
            note_fault(folder)
            raise ZeroDivisionError

    for step in range(400):
        model.blocks[2].before = fail_once if step >= 5 else lambda number: None
        while True:
            try:
                model(torch.ones(2, 16)).sum().backward()
                break
            except ZeroDivisionError:
                continue
        model.zero_grad()


def test_a_rank_that_tries_a_step_again_alone(tmp_path: Path) -> None:
    with start(tmp_path, _retry_alone) as job:
        assert job.wait() == [ENDED, ENDED]
        assert job.took < WITHIN_S
        assert "rank 1 of 2 runs another order than rank 0 in step 6" in one_message(job)


def _off(folder: Path) -> None:
    os.environ["SHARDWISE_WATCH"] = "0"
    train(folder)
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    assert children.read_text() == ""


def test_it_can_be_turned_off(tmp_path: Path) -> None:
    with start(tmp_path, _off) as job:
        assert job.wait() == [0, 0], job.said


# What it leaves behind


def watchers_of(job: Job) -> list[int]:
    """Processes that this job's ranks started."""
    found = []
    for process in job.processes:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        found += [int(pid) for pid in children.read_text().split()]
    return found


def runs(pid: int) -> bool:
    """Not if whoever has to reap it has not yet."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


@pytest.mark.parametrize("end", ["", "forward:kill"])
def test_no_watcher_outlives_its_job(tmp_path: Path, end: str) -> None:
    with start(tmp_path, train, end, 0, 60, 0.02) as job:
        job.wait_for("trains*", 2)
        watchers = watchers_of(job)
        assert len(watchers) == 2
        job.wait()
        deadline = time.monotonic() + 2
        while any(map(runs, watchers)):
            assert time.monotonic() < deadline, "a watcher is still there"
            time.sleep(0.02)


def _write_to_pipe(folder: Path, writer: int) -> None:
    os.dup2(os.open(folder / f"pipe{dist.get_rank()}", os.O_WRONLY), 1)
    os.dup2(1, 2)
    train(folder)
    os.write(1, b"done")


def test_who_reads_a_rank_to_its_end_comes_to_it(tmp_path: Path) -> None:
    for rank in range(2):
        os.mkfifo(tmp_path / f"pipe{rank}")
    with start(tmp_path, _write_to_pipe, 0) as job:
        readers = [os.open(tmp_path / f"pipe{rank}", os.O_RDONLY) for rank in range(2)]
        for reader in readers:
            said = b""
            while part := os.read(reader, 1 << 16):
                said += part
            os.close(reader)
            assert said == b"done"
        assert job.wait(1.0) == [0, 0]
