"""The emulated network on a GPU: every group has a stream on which its collectives follow one
another. Nothing of a transfer but its copies takes a multiprocessor:

    group's stream   waits for the caller | begun | copies what arrives | waits till it is over
    the clock                                 the transfer's time, alone or in company

The clock is a process (`clock.py`); a block that waited for the time on the GPU would keep large
matrix products off its multiprocessor, which slows them by 8 %. Streams and clock tell each other
by words of host memory, which streams write and wait for by the driver's own calls: those take no
multiprocessor either. The streams have priority: a network does not queue behind matrix products.
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch

from shardwise.emulation.clock import COPIED, DONE, SILENT, STEP, WORDS_BYTES, Clock, Page
from shardwise.emulation.networks import NO_TIME, Transfer
from shardwise.engine import marks
from shardwise.engine.torch_private import current_stream
from shardwise.kernels.launches import Launch, Pointer

# What a step meets: the network; a free one; or `unwaited`, where data arrives at once and kernels
# that occupy the device run on for their time beside it, so that only the waiting is gone.
Mode = Literal["network", "unwaited", "free"]

COPY_BYTES = 1024  # that one warp copies at a time
COPIERS = 32  # warps for each multiprocessor, so that all find work when a product makes room
CHUNK = 16384  # elements that a block of the occupying kernel moves at a time
PROBE_S = 200e-6  # modelled time of the collectives that show what stream and launch add
_FIRST = -1  # the higher of a stream's two priorities
_MAPPED = 3  # host memory: portable, and mapped into the device's addresses
_AT_LEAST = 0  # a stream waits for a word of this value or above


@dataclass(frozen=True)
class Move:
    """A copy that a collective makes: the flat source into each of `rows` rows of the flat target.

    The rest is for the kernel that moves the whole message (`move_evenly`): element i of `total` is
    whole[i % len(whole)], and those from `written[0]` to `written[1]` reach the target.
    """

    target: torch.Tensor
    source: torch.Tensor
    rows: int
    whole: torch.Tensor
    total: int
    written: tuple[int, int]

    @property
    def nbytes(self) -> int:
        """Of the message: what a gather gives, what the others take."""
        return max(self.target.nbytes, self.whole.nbytes)

    def run(self) -> None:
        """With a plain copy."""
        if self.rows:
            rows = self.target.view(self.rows, -1)
            rows.copy_(self.source.reshape(1, -1).expand_as(rows))


Offsets = tuple[tuple[int, int, int], ...]


def offsets_of(moves: Sequence[Move]) -> Offsets:
    """Where each move writes and reads, in elements from where the first one does, and how many."""
    size = moves[0].source.element_size()
    target, source = moves[0].target.data_ptr(), moves[0].source.data_ptr()
    return tuple(
        (
            (move.target.data_ptr() - target) // size,
            (move.source.data_ptr() - source) // size,
            move.source.numel(),
        )
        for move in moves
    )


def deal(offsets: Offsets, block: int, workers: int) -> list[tuple[int, int, int, int]]:
    """The copies in jobs of about as many blocks of elements as each worker gets: where one writes
    in the first row, where it reads, how many elements, and how far apart its rows are.
    """
    blocks = sum(-(-count // block) for _, _, count in offsets)
    most = -(-blocks // workers) * block
    return [
        (to + done, read + done, min(most, count - done), count)
        for to, read, count in offsets
        for done in range(0, count, most)
    ]


class DeviceLinks:
    """The links of one rank on one device. `occupancy`: how many blocks of a GPU a collective takes
    to move its data itself, at the modelled rate; 0: small blocks copy as soon as they can.
    `added`: what streams and launches add to every collective; measured if not given.
    """

    def __init__(
        self, device: torch.device, occupancy: int = 0, added: Added | None = None
    ) -> None:
        self.device = device
        self.occupancy = occupancy
        self._copiers = COPIERS * torch.cuda.get_device_properties(device).multi_processor_count
        self._clock = Clock()
        self._words = _StreamWords(self._clock.page.memory, WORDS_BYTES)
        self._lanes: dict[Hashable, _Lane] = {}
        self._copies: dict[Hashable, _Copy] = {}
        self._shown = torch.zeros(1, dtype=torch.int32, device=device)
        self._seen = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._added = measure_added(device, occupancy) if added is None else added
        self._clock.page.early, self._clock.page.unseen = self._added.early, self._added.unseen
        _kernels().stay[(1,)](0.0, num_warps=1)  # built here: a recording can build nothing

    def close(self) -> None:
        """All that is under way ends first."""
        torch.cuda.synchronize(self.device)
        self._clock.close()
        self._words.close()

    def lane(self, group: Hashable) -> _Lane:
        if group not in self._lanes:
            self._lanes[group] = _Lane(self.device, self._clock.add_lane())
        return self._lanes[group]

    def run(
        self,
        group: Hashable,
        moves: Sequence[Move],
        transfer: Transfer,
        arrived: torch.cuda.Event,
        began: torch.cuda.Event | None = None,
        mode: Mode = "network",
    ) -> None:
        """Queue one collective behind the current stream; mark `arrived` at its end and, if given,
        `began` at its start.
        """
        lane = self.lane(group)
        lane.wait_for(current_stream(self.device))
        if began is not None:
            began.record(lane.stream)
        timed = transfer.seconds > 0
        if timed and mode == "network":
            # What a trace gets to see stands beside the transfer, and is not part of its time.
            shows = not self.occupancy and marks.on is not None and marks.on.traced
            if shows:
                self._show(lane.stream)
            self._take(lane, moves, transfer)
            arrived.record(lane.stream)
            if shows:
                self._show(lane.stream)
            return
        self._deliver(lane.stream, moves)
        if timed and mode == "unwaited" and self.occupancy:
            # Who holds the buffers by then is unknown, so they may be read at most.
            self._occupy(lane, lane.fork(), moves, transfer, writes=False)
        arrived.record(lane.stream)

    def begin_step(self) -> None:
        """Here the current stream begins a step, from which the peers' arrivals count."""
        self._begin(self.lane("step"), current_stream(self.device), NO_TIME, STEP)

    def delay(self, seconds: float) -> None:
        """Keep the current stream waiting for that long."""
        stream, lane = current_stream(self.device), self.lane("delay")
        number = self._begin(lane, stream, Transfer(seconds, 0.0))
        self._words.wait(stream.cuda_stream, Page.over(lane.number), number)

    def _take_recorded(self, lane: _Lane, moves: Sequence[Move], transfer: Transfer) -> None:
        """In a graph no clock on the host can be asked, whose answer would be that of the recording
        ever after: a kernel stays for the transfer's time, alone on its links, beside the copies.
        """
        if transfer.joins:
            raise RuntimeError("ranks that come late cannot be emulated in a recorded graph")
        if self.occupancy:
            self._move(lane.stream, moves, transfer)
            return
        beside = lane.fork()
        with torch.cuda.stream(beside):
            _kernels().stay[(1,)](transfer.seconds * 1e9, num_warps=1)
        self._deliver(lane.stream, moves)
        lane.stream.wait_stream(beside)

    def _take(self, lane: _Lane, moves: Sequence[Move], transfer: Transfer) -> None:
        if torch.cuda.is_current_stream_capturing():
            self._take_recorded(lane, moves, transfer)
            return
        if self.occupancy:
            self._occupy(lane, lane.stream, moves, transfer.less(self._added.early))
            return
        copies, stream = moves[0].rows > 0, lane.stream.cuda_stream
        number = self._begin(lane, lane.stream, transfer, COPIED if copies else DONE)
        if copies:
            self._deliver(lane.stream, moves)
            self._words.write(stream, Page.copied(lane.number), number)
        self._words.wait(stream, Page.over(lane.number), number)
        self._words.write(stream, Page.done(lane.number), number)

    def _begin(
        self, lane: _Lane, stream: torch.cuda.Stream, transfer: Transfer, answers: int = SILENT
    ) -> int:
        number = self._clock.issue(lane.number, transfer, answers)
        self._words.write(stream.cuda_stream, Page.begun(lane.number), number)
        return number

    def _show(self, stream: torch.cuda.Stream) -> None:
        """Something that a trace shows, at this point of the stream; of writes and waits it has
        nothing. A copy engine takes a word to the host. By torch: of the driver's own copies a
        profiler does not say who asked for them.
        """
        caller = current_stream(self.device)
        torch.cuda.set_stream(stream)
        try:
            self._seen.copy_(self._shown, non_blocking=True)
        finally:
            torch.cuda.set_stream(caller)

    def _deliver(self, stream: torch.cuda.Stream, moves: Sequence[Move]) -> None:
        first = moves[0]
        if not first.rows:
            return
        offsets = offsets_of(moves)
        target, source = first.target.data_ptr(), first.source.data_ptr()
        key = (first.source.dtype, first.rows, target % 16, source % 16, offsets)
        copy = self._copies.get(key)
        if copy is None:
            copy = self._copies[key] = _Copy(moves, offsets, self._copiers)
        copy.run(stream, first, target, source)

    def _occupy(
        self,
        lane: _Lane,
        stream: torch.cuda.Stream,
        moves: Sequence[Move],
        transfer: Transfer,
        writes: bool = True,
    ) -> None:
        """Each of the moves in its part of the time, for which its blocks are there. What company
        on the links adds is waited for after that.
        """
        number = self._begin(lane, stream, transfer)
        self._move(stream, moves, transfer, writes)
        self._words.wait(stream.cuda_stream, Page.over(lane.number), number)

    def _move(
        self,
        stream: torch.cuda.Stream,
        moves: Sequence[Move],
        transfer: Transfer,
        writes: bool = True,
    ) -> None:
        total = sum(move.total for move in moves)
        after, moving = transfer.fixed * 1e9, transfer.moving * 1e9
        with torch.cuda.stream(stream):
            for move in moves:
                _kernels().move_evenly[(self.occupancy,)](
                    move.target, move.whole, move.whole.numel(), move.total,
                    *(move.written if writes else (0, 0)),
                    after, moving * (move.total / total), CHUNK=CHUNK, num_warps=16,
                )  # fmt: skip
                after = 0.0


class _Copy:
    """The kernel that copies moves of these offsets, as its first launch made it."""

    def __init__(self, moves: Sequence[Move], offsets: Offsets, copiers: int) -> None:
        first = moves[0]
        block = COPY_BYTES // first.source.element_size()
        jobs = deal(offsets, block, copiers)
        self._jobs = torch.tensor(jobs, dtype=torch.int64).to(first.source.device)
        self._launch = Launch(
            _kernels().deliver,
            (len(jobs),),
            [Pointer(0), Pointer(1), Pointer(2), first.rows],
            BLOCK=block,
            ALIGNED=all(i % 16 == 0 for job in jobs for i in job),
            num_warps=1,
            maxnreg=32,
        )

    def run(self, stream: torch.cuda.Stream, first: Move, target: int, source: int) -> None:
        if self._launch.run is None:
            with torch.cuda.stream(stream):
                self._launch.first((first.target, first.source, self._jobs))
        else:
            self._launch.again((target, source, self._jobs.data_ptr()), stream.cuda_stream)


class _Lane:
    """The streams of one group, and the events that order them; made once."""

    def __init__(self, device: torch.device, number: int) -> None:
        self.number = number  # the clock's
        self.stream = torch.cuda.Stream(device, priority=_FIRST)
        self._beside = torch.cuda.Stream(device, priority=_FIRST)
        self._moment, self._begin = torch.cuda.Event(), torch.cuda.Event()

    def wait_for(self, caller: torch.cuda.Stream) -> None:
        self._moment.record(caller)
        self.stream.wait_event(self._moment)

    def fork(self) -> torch.cuda.Stream:
        """A stream for what nobody waits for, from this moment of the group's on."""
        self._begin.record(self.stream)
        self._beside.wait_event(self._begin)
        return self._beside


@dataclass(frozen=True)
class Added:
    """Seconds that streams and launches add to a collective's time on the device."""

    early: float = 0.0  # the clock ends a transfer so long before its time, to make up for it
    unseen: float = 0.0  # what is added by the device's clock beyond what the clock process sees


@cache
def measure_added(device: torch.device, occupancy: int) -> Added:
    """Beside small matrix products and with the host ahead: as in a step."""
    links = DeviceLinks(device, occupancy, Added())
    small, large = torch.zeros(2**10, device=device), torch.zeros(2**13, device=device)
    matrix = torch.zeros((2048, 2048), device=device, dtype=torch.bfloat16)
    move = Move(large, small, 8, small, large.numel(), (0, large.numel()))
    probe = Transfer(PROBE_S, 0.0)
    caller, lane = torch.cuda.Stream(device), links.lane("probe")
    taken: list[float] = []
    for _ in range(4):  # the first builds the kernels, the last counts
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(16)]
        torch.cuda.synchronize(device)
        for _ in range(400):
            torch.mm(matrix, matrix)
        with torch.cuda.stream(caller):
            links.delay(3e-3)
            for began, ended in events:
                lane.wait_for(caller)
                began.record(lane.stream)
                links._take(lane, [move], probe)
                ended.record(lane.stream)
                caller.wait_event(ended)
        torch.cuda.synchronize(device)
        taken = [began.elapsed_time(ended) / 1e3 for began, ended in events]
    learned = links._clock.page.early
    links.close()
    over = statistics.median(taken) - PROBE_S
    return Added(max(0.0, over)) if occupancy else Added(learned, over)


class _StreamWords:
    """The words of a page of host memory, by their number; `memory` is any writable buffer."""

    def __init__(self, memory: Any, nbytes: int) -> None:
        self._memory = (ctypes.c_char * nbytes).from_buffer(memory)
        self._address = ctypes.addressof(self._memory)
        _check(int(torch.cuda.cudart().cudaHostRegister(self._address, nbytes, _MAPPED)), "map")
        self._driver = _driver()

    def write(self, stream: int, word: int, value: int) -> None:
        """When the stream comes to this point. `stream` is the driver's handle."""
        call = self._driver.cuStreamWriteValue32_v2
        _check(call(stream, self._address + 4 * word, value, 0), "write")

    def wait(self, stream: int, word: int, value: int) -> None:
        """The stream goes on when the word has reached the value."""
        call = self._driver.cuStreamWaitValue32_v2
        _check(call(stream, self._address + 4 * word, value, _AT_LEAST), "wait for")

    def close(self) -> None:
        torch.cuda.cudart().cudaHostUnregister(self._address)


@cache
def _driver() -> Any:
    driver = ctypes.CDLL("libcuda.so.1")
    for call in (driver.cuStreamWriteValue32_v2, driver.cuStreamWaitValue32_v2):
        call.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
    return driver


def _check(code: int, what: str) -> None:
    if code != 0:
        raise RuntimeError(
            f"CUDA could not {what} a word of host memory (error {code}); an emulated network on a "
            "GPU needs stream memory operations"
        )


@cache
def _kernels() -> Any:
    try:
        from shardwise.emulation import kernels
    except ImportError as error:
        raise RuntimeError(
            f"an emulated network on a GPU needs Triton, which could not be imported ({error}); "
            "install triton"
        ) from error
    return kernels
