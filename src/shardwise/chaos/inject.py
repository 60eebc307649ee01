"""How faults are made, in the rank that is struck."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import math
import os
import random
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise import checkpoint
from shardwise.chaos.faults import SAVING, Fault
from shardwise.chaos.job import CUT
from shardwise.checkpoint import storage
from shardwise.hosts import cut_cable, throttle_cable
from shardwise.watch import rank as watch

# Longer than the watchers' patience with a rank that is stopped, or a host that is silent.
SLOW_S = 4.0
SLOW_LINK = "2mbit"
PAUSE_S = 0.8
SOON_S = 0.02
MEETING_S = 10.0
_ROOM = 32 * 2**20  # bytes that a rank may still allocate before its memory runs out
_MUCH = 2**31


class InjectedError(RuntimeError):
    """What the class `exception` raises."""


class Injector:
    """Strikes once, at the fault's place and step, if this is the rank to be struck."""

    def __init__(self, fault: Fault, rank: int, root: Path, record: Callable[..., None]) -> None:
        self.fault, self.root, self._record = fault, root, record
        self.step = 0
        self.armed = fault.rank == rank and fault.kind != "none"
        self.operation = ""  # on a file, at which it struck
        self._undo: Callable[[], None] | None = None
        self._seen = self._seen_before = 0  # operations on files, in this save and in the last
        self._saves = 0  # the step that is being saved; training may have gone on

    def strike(self) -> None:
        self.armed = False
        if self.fault.kind == "link cut" and watch.on is not None:
            watch.on.complete.wait(
                MEETING_S
            )  # before watchers have met they cannot miss each other
        self._record("fault")
        WAYS[self.fault.kind](self)

    def at(self, place: str) -> None:
        """The program is here, in `step`."""
        here = (place, self.step) == (self.fault.place, self.fault.step)
        if self.armed and here and self.fault.kind in WAYS:
            self.strike()

    # Faults that change what the program does

    def _is_due(self, kind: str) -> bool:
        due = self.armed and self.fault.kind == kind and self.step == self.fault.step
        if due:
            self.armed = False
            self._record("fault")
        return due

    def plan(self, plan: Any) -> Any:
        if not (self.armed and self.fault.kind == "plan"):
            return plan
        self.armed = False
        self._record("fault")
        other = "zero3" if plan.name != "zero3" else "zero1"
        return type(plan).of(other, mesh=self.fault.world)

    def order(self, order: list[int]) -> list[int]:
        """In which order the blocks run."""
        at = self.fault.changes_places
        if not torch.is_grad_enabled():
            return order
        if self._is_due("order") or self._is_due("first order"):
            order[at], order[at + 1] = order[at + 1], order[at]
        elif self._is_due("left out"):
            del order[at]
        return order

    def loss(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * math.inf if self._is_due("nonfinite") else loss

    # Saves and loads

    def before_save(self) -> None:
        """Strike before the save, or at an operation on a file; else count those."""
        self._seen, self._saves = 0, self.step
        storage.watchers[:] = [self._watch]
        background = self.fault.place == "asynchronous save"
        before = not background or self.fault.kind in BEFORE_SAVES
        if self._is_at_save() and before and self.fault.kind not in AT_FILES:
            self.strike()

    def during_save(self) -> None:
        """An asynchronous one is under way."""
        background = self.fault.place == "asynchronous save"
        if self._is_at_save() and background and self.fault.kind not in AT_FILES:
            self.strike()

    def after_save(self) -> None:
        """It is over: what stood in its way is put right."""
        storage.watchers.clear()
        self._seen_before, self._seen = self._seen or self._seen_before, 0
        if self._undo is not None:
            self._undo()
            self._undo = None

    def _is_at_save(self) -> bool:
        return self.armed and self.fault.place in SAVING and self._saves == self.fault.step

    def _watch(self, operation: str, path: str) -> None:
        """Called before every operation on a file."""
        operations = AT_FILES.get(self.fault.kind)
        if operations is None or (operations and operation not in operations):
            return
        if operations and "/.saving-" not in path:
            return
        self._seen += 1
        # The save before had as many operations; of the first only these are sure.
        due = 1 + int(self.fault.chance * (self._seen_before or (1 if operations else 3)))
        if self._is_at_save() and self._seen >= due:
            self.operation = operation
            self.strike()

    def before_load(self) -> None:
        """All ranks are about to load what they have saved."""
        if self.fault.place != "load":
            return
        if self.armed and self.fault.kind in DAMAGES:
            self.strike()
        dist.barrier()
        if self.armed and self.fault.kind in SUDDEN:
            self.armed = False
            threading.Thread(target=self._strike_soon, daemon=True).start()
        elif self.armed:
            self.strike()

    def _strike_soon(self) -> None:
        time.sleep(SOON_S * self.fault.chance)
        self.strike()

    def undo_later(self, undo: Callable[[], None]) -> None:
        """What is to be done when the save is over."""
        self._undo = undo


# A process ends, or does nothing for a while


def _send(number: int) -> Callable[[Injector], None]:
    def send(injector: Injector) -> None:
        os.kill(os.getpid(), number)
        time.sleep(0.01)  # until it has arrived

    return send


def _pause(injector: Injector) -> None:
    pid = os.getpid()
    if os.fork() == 0:
        time.sleep(PAUSE_S)
        os.kill(pid, signal.SIGCONT)
        os._exit(0)
    os.kill(pid, signal.SIGSTOP)


def _raise(injector: Injector) -> None:
    raise InjectedError(f"injected fault {injector.fault.number} in {injector.fault.place}")


def _run_out_of_memory(injector: Injector) -> None:
    """The system's own refusal, to torch's allocator or to Python's."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + _ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    if injector.fault.chance < 0.5:
        torch.empty(_MUCH, dtype=torch.uint8)
    else:
        bytearray(_MUCH)


def _exit(injector: Injector) -> None:
    sys.exit(3 if injector.fault.kind == "exit" else 0)


def _crash(injector: Injector) -> None:
    ctypes.string_at(0)


def _sleep(injector: Injector) -> None:
    time.sleep(SLOW_S)


def _hold_the_lock(injector: Injector) -> None:
    """No thread of this process runs Python meanwhile."""
    ctypes.PyDLL(None).usleep(int(SLOW_S * 1e6))


def _cut_power(injector: Injector) -> None:
    """The supervisor kills all ranks, and what they started, at once."""
    Path(CUT).touch()


# Connections


def _drop_store(injector: Injector) -> None:
    """Shut down this rank's connections to the store through which ranks met."""
    port, dropped = int(os.environ["MASTER_PORT"]), 0
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as each:
                if each.getpeername()[1] == port:
                    each.shutdown(socket.SHUT_RDWR)
                    dropped += 1
        except OSError:
            continue  # no socket, or not a connected one
    assert dropped, "no connection to the store was found"


def _take_port(injector: Injector) -> None:
    """Listen where rank 0 is to, if that can be done, and keep whoever comes waiting."""
    for address in ("127.0.0.1", "0.0.0.0"):
        with contextlib.suppress(OSError):
            taken.append(socket.create_server((address, int(os.environ["MASTER_PORT"]))))


taken: list[socket.socket] = []


# Files, in a save


def _fill(injector: Injector) -> None:
    """No room is left on the file system of the checkpoints, until the save is over."""
    filler = injector.root.parent / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (2**16, 2**12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
    injector.undo_later(filler.unlink)


def _forbid(injector: Injector) -> None:
    injector.root.mkdir(exist_ok=True)
    injector.root.chmod(0o555)
    injector.undo_later(lambda: injector.root.chmod(0o755))


def obey_permissions() -> None:
    """Root may write anywhere; take that from this thread and those it starts."""
    if os.geteuid() != 0:
        return
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable: low words, then high ones
    libc = ctypes.CDLL(None, use_errno=True)
    libc.capget(header, sets)
    sets[0] &= ~0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    if libc.capset(header, sets) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def _fail_with(number: int) -> Callable[[Injector], None]:
    """The operation fails; a write perhaps after half of it. At a load, the next read."""

    def fail(injector: Injector) -> None:
        if injector.fault.place == "load":
            _fail_next_read(number)
        elif injector.operation == "write" and injector.fault.chance * 8 % 1 < 0.5:
            _shorten_next_write(injector.root, number)
        else:
            raise OSError(number, os.strerror(number))

    return fail


def _shorten(injector: Injector) -> None:
    _shorten_next_write(injector.root, None)


def _shorten_next_write(root: Path, number: int | None) -> None:
    """The next write of several bytes below `root` takes half of them; the one after fails with
    the error, if one is given.
    """
    write, cut = os.write, False

    def short(descriptor: int, data: Any) -> int:
        nonlocal cut
        if not os.readlink(f"/proc/self/fd/{descriptor}").startswith(f"{root}/"):
            return write(descriptor, data)
        if cut and number is not None:
            os.write = write
            raise OSError(number, os.strerror(number))
        if len(data) < 2:
            return write(descriptor, data)
        cut = True
        if number is None:
            os.write = write
        return write(descriptor, data[: len(data) // 2])

    os.write = short


def _fail_next_read(number: int) -> None:
    read = os.preadv

    def fail(*arguments: Any) -> int:
        os.preadv = read
        raise OSError(number, os.strerror(number))

    os.preadv = fail


# What was saved


def _damage(change: Callable[[Path, float], None], pattern: str) -> Callable[[Injector], None]:
    """Change one file of the newest checkpoint."""

    def damage(injector: Injector) -> None:
        newest = checkpoint.newest(injector.root)
        assert newest is not None
        chooser = random.Random(injector.fault.chance)
        change(chooser.choice(sorted(Path(newest).glob(pattern))), chooser.random())

    return damage


def _flip(file: Path, where: float) -> None:
    data = bytearray(file.read_bytes())
    data[int(where * len(data))] ^= 1 << int(where * 1000) % 8
    file.write_bytes(data)


def _truncate(file: Path, where: float) -> None:
    os.truncate(file, int(where * file.stat().st_size))


def _delete(file: Path, where: float) -> None:
    file.unlink()


def _point(injector: Injector) -> None:
    older = checkpoint.all_of(injector.root)[1]
    name = Path(older).name if injector.fault.kind == "stale pointer" else "step-00000099"
    (injector.root / storage.LATEST).write_text(f"{name}\n")


_DATA = "*.safetensors"
DAMAGES: dict[str, Callable[[Injector], None]] = {
    "flipped byte": _damage(_flip, _DATA),
    "flipped manifest": _damage(_flip, "manifest.json"),
    "truncated": _damage(_truncate, "*"),
    "deleted shard": _damage(_delete, _DATA),
    "deleted manifest": _damage(_delete, "manifest.json"),
    "stale pointer": _point,
    "lost pointer": _point,
}
WAYS: dict[str, Callable[[Injector], None]] = {
    "kill": _send(signal.SIGKILL),
    "terminate": _send(signal.SIGTERM),
    "segfault": _crash,
    "exception": _raise,
    "memory": _run_out_of_memory,
    "exit": _exit,
    "early end": _exit,
    "stop": _send(signal.SIGSTOP),
    "pause": _pause,
    "slow": _sleep,
    "lock held": _hold_the_lock,
    "store": _drop_store,
    "link cut": lambda injector: cut_cable(),
    "link slow": lambda injector: throttle_cable(SLOW_LINK),
    "taken port": _take_port,
    "disk full": _fail_with(errno.ENOSPC),
    "full disk": _fill,
    "i/o error": _fail_with(errno.EIO),
    "short write": _shorten,
    "permission": _forbid,
    "power cut": _cut_power,
    "two jobs": lambda injector: None,  # the other one is there all the time
    **DAMAGES,
}
# Struck in a load by another thread, at some moment of it.
SUDDEN = ("kill", "terminate", "segfault", "stop")
BEFORE_SAVES = ("full disk", "permission")
# Struck at an operation on a file: at any, or at one of these on a file of the checkpoint.
AT_FILES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((*SUDDEN, "pause", "slow", "lock held", "power cut"), ()),
    "disk full": ("create", "write"),
    "i/o error": ("write", "fsync"),
    "short write": ("write",),
}
