"""A run: faults drawn by a seed, in slots that each do one job after the other."""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path

from shardwise.chaos import program
from shardwise.chaos.faults import BY_NAME, KINDS, SAVES, Fault, Kind
from shardwise.chaos.job import become_supervisor, run_alone, run_ranks
from shardwise.chaos.judge import Row, judge
from shardwise.children import ChildFailed
from shardwise.hosts import Hosts, refusal

_NEW_MOUNTS, _PRIVATE = 0x00020000, 1 << 18 | 1 << 14  # CLONE_NEWNS; MS_PRIVATE, MS_REC
_DISK_BYTES = 2**20
# What every rank would import by itself when it first needs it.
_PRELOADED = ("torch._dynamo", "shardwise.fsdp2", "shardwise.engine.clip")


class Slot:
    """A process that runs jobs, one after the other, and has their hosts and their small disk."""

    def __init__(self, base: Path, number: int) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        self.fault: Fault | None = None
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                self.pipe.close()
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                signal.signal(signal.SIGTERM, lambda *_: sys.exit())
                become_supervisor()
                _serve(theirs, base / f"slot-{number}")
                code = 0
            except BaseException as error:
                if not isinstance(error, SystemExit):
                    traceback.print_exc()
            finally:
                os._exit(code)
        theirs.close()

    def send(self, fault: Fault) -> None:
        self.fault = fault
        self.pipe.send(fault)

    def receive(self) -> Row:
        try:
            return dict(self.pipe.recv())
        except EOFError:
            raise ChildFailed(f"what supervises jobs failed at {self.fault}") from None

    def end(self) -> None:
        """Now, whatever it does: what it has started ends with it."""
        os.kill(self.pid, signal.SIGTERM)
        os.waitpid(self.pid, 0)


def _serve(pipe: Connection, base: Path) -> None:
    base.mkdir()
    disk = base / "disk"
    disk.mkdir()
    if may_mount():
        _mount(disk)
    hosts = Hosts()
    try:
        while True:
            pipe.send(run_fault(pipe.recv(), base, hosts, disk))
    finally:
        hosts.remove()


def run_fault(fault: Fault, base: Path, hosts: Hosts, disk: Path) -> Row:
    """The job, then what a new program finds on the disk, then the verdict."""
    began = time.monotonic()
    kind = BY_NAME[fault.kind]
    folder = base / str(fault.number)
    folder.mkdir()
    root = (disk if kind.disk else folder) / "checkpoints"
    if fault.step != SAVES[0]:  # so that later saves have as many operations as the first
        root.mkdir()
    if kind.hosts:
        hosts.plug()

    def main(process: int) -> None:
        job, rank = divmod(process, fault.world)
        program.main(replace(fault, seed=fault.seed + job), folder, root, rank, process)

    ended = run_ranks(main, fault.world, folder, hosts if kind.hosts else None, kind.jobs)
    ended.records = [program.read_record(folder, each) for each in range(len(ended.codes))]
    answer = folder / "disk.json"
    code, said = run_alone(lambda: program.read_disk(root, answer), folder, "disk")
    found = json.loads(answer.read_text()) if code == 0 else {"failed": said or f"code {code}"}
    row = judge(fault, ended, found)
    row["wall"] = round(time.monotonic() - began, 2)
    shutil.rmtree(folder)
    shutil.rmtree(root, ignore_errors=True)
    return row


def run_faults(faults: Sequence[Fault], slots: int) -> Iterator[Row]:
    """The rows, as they come."""
    for name in _PRELOADED:
        importlib.import_module(name)
    may_mount()  # asked once, for all slots
    base = Path(tempfile.mkdtemp(prefix="shardwise-chaos-", dir=_memory()))
    gc.freeze()
    pool = [Slot(base, number) for number in range(min(slots, len(faults)))]
    try:
        waiting = iter(faults)
        busy = {slot.pipe: slot for slot in pool}
        for slot in pool:
            slot.send(next(waiting))
        while busy:
            for pipe in wait(list(busy)):
                slot = busy[pipe]  # type: ignore[index]
                yield slot.receive()
                fault = next(waiting, None)
                if fault is None:
                    del busy[slot.pipe]
                else:
                    slot.send(fault)
    finally:
        for slot in pool:
            slot.end()
        gc.unfreeze()
        shutil.rmtree(base, ignore_errors=True)


def _memory() -> str | None:
    """A folder in memory, where the machine has one."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


# What this machine permits


def usable_kinds() -> tuple[list[Kind], dict[str, str]]:
    """The classes that can be injected here, and why the others cannot."""
    left_out: dict[str, str] = {}
    if why := refusal():
        left_out |= {kind.name: f"needs two hosts: {why}" for kind in KINDS if kind.hosts}
    if not may_mount():
        left_out |= {kind.name: "needs a file system of its own" for kind in KINDS if kind.disk}
    return [kind for kind in KINDS if kind.name not in left_out], left_out


@cache
def may_mount() -> bool:
    """Tried in a child, since a mount is for good."""
    folder = Path(tempfile.mkdtemp())
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            _mount(folder)
            code = 0
        except OSError:
            pass
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    folder.rmdir()
    return status == 0


def _mount(folder: Path) -> None:
    """A small file system in memory, which only this process and its children see."""
    libc = ctypes.CDLL(None, use_errno=True)
    if (
        libc.unshare(_NEW_MOUNTS) != 0
        or libc.mount(b"none", b"/", None, _PRIVATE, None) != 0
        or libc.mount(b"none", os.fsencode(folder), b"tmpfs", 0, b"size=%d" % _DISK_BYTES) != 0
    ):
        raise OSError(ctypes.get_errno(), "cannot mount a file system")
