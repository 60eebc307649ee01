"""The clock of a network that is emulated on a GPU: a process of its own that ends each transfer
when its time is over.

    group's stream   "k has begun" | copies what arrives | "copied" | waits for "k is over" | "done"
    the clock            sees it, waits for the time of transfer k ........... writes it      learns

A stream takes some microseconds to see a word, more if the device computes. The clock learns how
many from when it sees "done", and is that much early the next time. It learns nothing where the
data came late.

A stream's writes and waits take nothing of the GPU's multiprocessors, and a process that only
watches the time is not held up by the one that trains. What a transfer takes, alone or beside
others, `links.py` says, as on a CPU.

Both sides share one page of memory, and beside it the times of the transfers that were issued.
"""

from __future__ import annotations

import gc
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from shardwise.children import describe_end
from shardwise.emulation.links import Flow, HostLinks
from shardwise.emulation.networks import Transfer

LANES = 32
MOST_LINKS = 4  # different links of one emulation
ISSUED = 1024  # transfers of a lane that may be issued and not over
WORDS_BYTES = 20480  # what the GPU sees: four words of a lane, far apart from all others
_APART = 32  # words, more than a cache line
# Of a transfer: fixed, moving, when its last rank joins, who answers, its share of each link.
_FIELDS = 4 + MOST_LINKS
_HEAD = 2  # numbers before them: `early` and `unseen`
_BYTES = WORDS_BYTES + (_HEAD + LANES * ISSUED * _FIELDS) * 8
_STATE, _LANES_IN_USE = 0, 1  # words of the head
_READY, _STOP = 1, 2  # states; 0: it starts
_FOR_EVER = 2**30  # transfers
_LOOKS = 2**14  # between two looks whether the parent is still there
# After so long without a transfer, the process looks less often.
_REST_S, _NAP_S = 0.2, 50e-6
START_S = 30.0

# What a lane's stream writes of a transfer: nothing but its beginning, also that it is done, also
# that data was copied. STEP is no transfer: a step begins, and ranks join from then on.
SILENT, DONE, COPIED, STEP = 0, 1, 2, 3
_LEARN = 0.3  # of an error, for the next time
_SURPRISE_S = 10e-6  # the most of it that is believed
_MOST_EARLY_S = 50e-6


def _word_of(kind: int) -> staticmethod[[int], int]:
    """From a lane's number to the number of its word of this kind."""
    return staticmethod(lambda lane: (4 * lane + kind) * _APART)


def _head_number(index: int) -> Any:
    """A number before the transfers, as an attribute of the page."""
    return property(
        lambda page: page._numbers[index],
        lambda page, number: page._numbers.__setitem__(index, number),
    )


class Page:
    """The memory of both sides."""

    def __init__(self, file: int) -> None:
        self.memory = mmap.mmap(file, _BYTES)
        view = memoryview(self.memory)
        self.words = view[:WORDS_BYTES].cast("I")
        self._numbers = view[WORDS_BYTES:].cast("d")

    # Words of a lane, each with the number of the last transfer that ...
    begun = _word_of(2)  # ... has begun: the lane's stream writes it
    over = _word_of(3)  # ... is over: the clock writes it
    copied = _word_of(4)  # ... has its data copied: the stream writes it
    done = _word_of(5)  # ... the stream has waited for: it goes on, and writes this

    # Seconds by which the clock ends a transfer before its time, as it has learned.
    early = _head_number(0)
    # Seconds that a transfer takes by the device's clock beyond what this one sees of it.
    unseen = _head_number(1)

    def write_transfer(self, lane: int, number: int, fields: list[float]) -> None:
        at = self._offset(lane, number)
        for i, value in enumerate(fields):
            self._numbers[at + i] = value

    def read_transfer(self, lane: int, number: int) -> tuple[Transfer, int]:
        """The transfer, and what its stream writes of it."""
        at = self._offset(lane, number)
        fixed, moving, joins, answers, *shares = self._numbers[at : at + _FIELDS].tolist()
        uses = tuple((str(i), s) for i, s in enumerate(shares) if s)
        return Transfer(fixed, moving, uses, joins), int(answers)

    def _offset(self, lane: int, number: int) -> int:
        return _HEAD + (lane * ISSUED + number % ISSUED) * _FIELDS


class Clock:
    """The side that trains: starts the process, and tells it what it issues."""

    def __init__(self) -> None:
        folder = "/dev/shm" if os.path.isdir("/dev/shm") else None
        with tempfile.NamedTemporaryFile(prefix="shardwise-clock-", dir=folder) as file:
            file.truncate(_BYTES)
            self.page = Page(file.fileno())
            self._issued = [0] * LANES
            self._links: list[str] = []
            command = [sys.executable, "-m", __name__, file.name]
            self._process = subprocess.Popen(
                command,
                env=os.environ | {"PYTHONPATH": _import_path()},
                stdin=subprocess.DEVNULL,
            )
            self._wait_until_ready(command)
        self.failed = False
        threading.Thread(target=self._watch, daemon=True).start()

    def add_lane(self) -> int:
        """A lane's transfers follow one another."""
        lane = self.page.words[_LANES_IN_USE]
        if lane == LANES:
            raise ValueError(f"an emulation on a GPU knows at most {LANES} groups of ranks")
        self.page.words[_LANES_IN_USE] = lane + 1
        return lane

    def issue(self, lane: int, transfer: Transfer, answers: int = SILENT) -> int:
        """The number under which the lane's stream is to announce the transfer, and to wait for.
        `answers`: what else it writes.
        """
        if self.failed:
            raise RuntimeError("the clock process of the emulated network has ended")
        self._issued[lane] += 1
        number = self._issued[lane]
        while number - self.page.words[Page.over(lane)] >= ISSUED:
            time.sleep(1e-4)
        self.page.write_transfer(lane, number, self._fields(transfer, answers))
        return number

    def close(self) -> None:
        """Nothing may be under way any more."""
        self.page.words[_STATE] = _STOP
        self._process.wait()

    def _fields(self, transfer: Transfer, answers: int) -> list[float]:
        shares = [0.0] * MOST_LINKS
        for name, share in transfer.uses:
            if name not in self._links:
                self._links.append(name)
            if len(self._links) > MOST_LINKS:
                raise ValueError(
                    f"the network has more than {MOST_LINKS} links: {self._links}; an emulation on "
                    "a GPU knows no more"
                )
            shares[self._links.index(name)] = share
        return [transfer.fixed, transfer.moving, transfer.joins, float(answers), *shares]

    def _wait_until_ready(self, command: list[str]) -> None:
        until = time.perf_counter() + START_S
        while self.page.words[_STATE] != _READY:
            code = self._process.poll()
            if code is not None or time.perf_counter() > until:
                self._process.kill()
                late = f"did not start within {START_S:.0f} s"
                raise RuntimeError(
                    "the clock process of the emulated network "
                    f"{late if code is None else describe_end(code)}: run it by hand to see why "
                    f"({' '.join(command)})"
                )
            time.sleep(1e-3)

    def _watch(self) -> None:
        """Streams that wait for a clock that is gone would wait for ever, also in transfers that
        are being issued right now.
        """
        code = self._process.wait()
        if self.page.words[_STATE] == _STOP:
            return
        self.failed = True
        for lane, issued in enumerate(self._issued):
            self.page.words[Page.over(lane)] = issued + _FOR_EVER
        told = f"the clock process of the emulated network {describe_end(code)}"
        print(told, file=sys.stderr, flush=True)


class _Times:
    """When the transfers under way end. One that has its links to itself needs no reckoning, which
    takes as long as a short transfer does.
    """

    def __init__(self, page: Page) -> None:
        self._page = page
        self._links = HostLinks()
        self._flows: dict[int, Flow] = {}  # by lane, of those that share
        self._alone: tuple[int, float, Transfer] | None = None  # the only one that could
        self._numbers: dict[int, tuple[int, int, float]] = {}  # with answers, and how early
        self.ends: dict[int, float] = {}
        self.awaited: dict[int, tuple[int, float]] = {}  # the numbers of those to be done, and when
        self._step_began = 0.0

    def begin(self, now: float, lane: int, number: int) -> None:
        transfer, answers = self._page.read_transfer(lane, number)
        if answers == STEP:
            self._step_began, self._page.words[Page.over(lane)] = now, number
            return
        transfer = transfer.after(now - self._step_began)
        early = self._page.early if answers else 0.0
        if early:
            transfer = transfer.less(early)
        self._numbers[lane] = number, answers, early
        self.ends[lane] = now + transfer.seconds
        if not transfer.uses:
            return
        if self._alone is None and not self._flows:
            self._alone = lane, now, transfer
            return
        if self._alone is not None:
            other, since, its = self._alone
            self._flows[other], self._alone = self._links.add(since, other, its), None
        self._flows[lane] = self._links.add(now, lane, transfer)
        for shares, flow in self._flows.items():
            self.ends[shares] = self._links.end_of(now, flow)

    def end(self, now: float, lane: int) -> None:
        number, answers, early = self._numbers.pop(lane)
        words = self._page.words
        late = answers == COPIED and words[Page.copied(lane)] != number
        words[Page.over(lane)] = number
        end = self.ends.pop(lane)
        if answers and not late:
            self.awaited[lane] = number, end + early
        if self._alone is not None and self._alone[0] == lane:
            self._alone = None
        self._flows.pop(lane, None)  # that it ends now is in the others' ends already

    def learn(self, now: float) -> None:
        """From those that are done: when they were, and when they should have been."""
        page = self._page
        for lane, (number, due) in list(self.awaited.items()):
            if page.words[Page.done(lane)] == number:
                del self.awaited[lane]
                late = now + page.unseen - due
                late = min(max(late, -_SURPRISE_S), _SURPRISE_S)
                page.early = min(max(page.early + _LEARN * late, 0.0), _MOST_EARLY_S)


def serve(page: Page, parent: int) -> None:
    """Until told to stop, or the parent is gone."""
    words, times = page.words, _Times(page)
    begun = [Page.begun(lane) for lane in range(LANES)]
    seen = [0] * LANES
    words[_STATE] = _READY
    looks, last = 0, time.perf_counter()
    while words[_STATE] != _STOP:
        for lane in range(words[_LANES_IN_USE]):
            number = words[begun[lane]]
            if number != seen[lane]:
                seen[lane] = number
                times.begin(time.perf_counter(), lane, number)
        now = time.perf_counter()
        if times.awaited:
            times.learn(now)
        if times.ends:
            last = now
            for lane in [lane for lane, end in times.ends.items() if end <= now]:
                times.end(now, lane)
        elif now - last > _REST_S:
            time.sleep(_NAP_S)
        looks += 1
        if looks % _LOOKS == 0 and os.getppid() != parent:
            return


def _import_path() -> str:
    mine = str(Path(__file__).parents[2])
    return os.pathsep.join(filter(None, (mine, os.environ.get("PYTHONPATH"))))


def main() -> None:
    # A keyboard's interrupt is for the parent, whose streams still wait for this clock.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()
    with open(sys.argv[1], "r+b") as file:
        page = Page(file.fileno())
    serve(page, os.getppid())


if __name__ == "__main__":
    main()
