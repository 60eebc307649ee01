"""The emulated network on a GPU: every group has a stream on which its collectives follow one
another, each a kernel that takes the modelled time while it copies what arrives.

    group's stream   waits for the caller | block 0 watches the clock and the links | arrived
                                          | the other blocks copy                   |

The kernel knows which transfers move over its links at each moment (`emulated_kernels`), so sharing
needs no host. The streams have priority: a network does not queue behind matrix products.

A block that only waits still keeps large matrix products off its multiprocessor. So a long transfer
that shares no link waits by a copy to the host for most of its time, which takes none:

    group's stream   waits | block 0 notes the time, the others copy | to the host | the last bit
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch

from shardwise.comms.emulated_links import MOST_LINKS, NO_TIME, Transfer
from shardwise.comms.versions import current_stream

# What a step meets: the network; a free one; or `unwaited`, where data arrives at once and the
# collectives' kernels run on for their time beside it, so that only the waiting is gone.
Mode = Literal["network", "unwaited", "free"]

COPY_BYTES = 1024  # that one warp copies at a time
COPIERS = 4  # warps for each multiprocessor
CHUNK = 4096  # elements that a block of the occupying kernel moves at a time
PROBE_S = 200e-6  # modelled time of the collectives that show what stream and launch add
LONG_S = 150e-6  # transfers from here on wait by a copy to the host
LAST_S, LAST_PART = 20e-6, 0.04  # of a long transfer that a kernel waits: the copy is not exact
HOST_BYTES = 2**26  # that one copy to the host takes
_FIRST = -1  # the higher of a stream's two priorities


@dataclass(frozen=True)
class Move:
    """A copy that a collective makes: the flat source into each of `rows` rows of the flat target.

    A kernel that moves the whole message (`carry`) is told of it by the rest: element i of `total`
    is whole[i % len(whole)], and those in `kept` reach the target.
    """

    target: torch.Tensor
    source: torch.Tensor
    rows: int
    whole: torch.Tensor
    total: int
    kept: tuple[int, int]

    @property
    def nbytes(self) -> int:
        """Of the message: what a gather gives, what the others take."""
        return max(self.target.nbytes, self.whole.nbytes)

    def run(self) -> None:
        """With a plain copy."""
        if self.rows:
            rows = self.target.view(self.rows, -1)
            rows.copy_(self.source.reshape(1, -1).expand_as(rows))


Places = tuple[tuple[int, int, int], ...]


def places_of(moves: Sequence[Move]) -> Places:
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


class DeviceLinks:
    """The links of one rank on one device. `occupancy`: how many blocks of a GPU a collective takes
    to move its data itself, at the modelled rate; 0: small blocks copy as soon as they can.
    """

    def __init__(
        self, device: torch.device, occupancy: int = 0, overhead: float | None = None
    ) -> None:
        self.device = device
        self.occupancy = occupancy
        self._copiers = COPIERS * torch.cuda.get_device_properties(device).multi_processor_count
        self._loads = torch.zeros(MOST_LINKS, dtype=torch.int32, device=device)
        self._names: list[str] = []
        self._uses: dict[tuple[tuple[str, float], ...], torch.Tensor] = {}
        self._lanes: dict[Hashable, _Lane] = {}
        self._places: dict[Places, tuple[torch.Tensor, bool]] = {}
        self._host: torch.Tensor | None = None
        # Seconds that events and the launch add to every collective, and bytes per second to the
        # host; 0: no transfer waits by a copy.
        self._overhead = measure_overhead(device) if overhead is None else overhead
        self.host_rate = measure_host_rate(device) if overhead is None else 0.0

    def lane(self, group: Hashable) -> _Lane:
        if group not in self._lanes:
            self._lanes[group] = _Lane(self.device, len(self._lanes))
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
        caller, lane = current_stream(self.device), self.lane(group)
        lane.follow(caller)
        if began is not None:
            began.record(lane.stream)
        torch.cuda.set_stream(lane.stream)
        try:
            if mode == "network":
                self._take(lane, moves, transfer)
            else:
                self._deliver(moves, NO_TIME)
                if mode == "unwaited":
                    torch.cuda.set_stream(lane.fork())
                    self._run_on(lane, moves, transfer)
        finally:
            torch.cuda.set_stream(caller)
        arrived.record(lane.stream)

    def delay(self, seconds: float) -> None:
        """Keep the current stream busy for that long, with one warp."""
        self._hold(Transfer(seconds + self._overhead, 0.0))

    def _take(self, lane: _Lane, moves: Sequence[Move], transfer: Transfer) -> None:
        if self.occupancy and transfer.seconds:
            self._carry(moves, transfer)
        elif self._waits_by_copy(lane, transfer):
            self._deliver(moves, transfer, lane.began)
            self._wait_by_copy(lane, moves, transfer)
        else:
            self._deliver(moves, transfer)

    def _run_on(self, lane: _Lane, moves: Sequence[Move], transfer: Transfer) -> None:
        """The collective without its data: who holds the buffers by then is unknown, so they may be
        read at most.
        """
        if self.occupancy and transfer.seconds:
            self._carry(moves, transfer, keeps=False)
        elif self._waits_by_copy(lane, transfer):
            self._note(lane.began)
            self._wait_by_copy(lane, moves, transfer)
        else:
            self._hold(transfer)

    def _deliver(
        self, moves: Sequence[Move], transfer: Transfer, began: torch.Tensor | None = None
    ) -> None:
        """Copy, and take the transfer's time or note in `began` when it began."""
        first = moves[0]
        if not first.rows:
            if began is None:
                self._hold(transfer)
            else:
                self._note(began)
            return
        fixed, moving = self._nanoseconds(transfer)
        places, aligned = self._places_of(moves)
        block = COPY_BYTES // first.source.element_size()
        longest = max(move.source.numel() for move in moves)
        copiers = min(self._copiers, -(-longest // block))
        _kernels().deliver[(1 + copiers,)](
            first.target, first.source, places, len(moves), first.rows,
            self._loads, self._uses_of(transfer), self._loads if began is None else began,
            fixed, moving, BLOCK=block, LINKS=MOST_LINKS, NOTES=began is not None, ALIGNED=aligned,
            num_warps=1, maxnreg=32,
        )  # fmt: skip

    def _hold(self, transfer: Transfer) -> None:
        fixed, moving = self._nanoseconds(transfer)
        _kernels().hold[(1,)](
            self._loads, self._uses_of(transfer), fixed, moving,
            LINKS=MOST_LINKS, num_warps=1, maxnreg=32,
        )  # fmt: skip

    def _carry(self, moves: Sequence[Move], transfer: Transfer, keeps: bool = True) -> None:
        """Each of the moves in its part of the time."""
        fixed, moving = self._nanoseconds(transfer)
        total = sum(move.total for move in moves)
        for move in moves:
            _kernels().carry[(self.occupancy,)](
                move.target, move.whole, move.whole.numel(), move.total,
                *(move.kept if keeps else (0, 0)),
                self._loads, self._uses_of(transfer), fixed, moving * (move.total / total),
                CHUNK=CHUNK, LINKS=MOST_LINKS, num_warps=16,
            )  # fmt: skip
            fixed = 0.0

    def _waits_by_copy(self, lane: _Lane, transfer: Transfer) -> bool:
        """One group's may: two copies at once would slow each other."""
        alone = lane.index == 0 and not transfer.uses
        return alone and self.host_rate > 0 and transfer.seconds >= LONG_S

    def _wait_by_copy(self, lane: _Lane, moves: Sequence[Move], transfer: Transfer) -> None:
        """Until the time since `began` is over, most of it by copying the message to the host."""
        if self._host is None:
            self._host = torch.empty(HOST_BYTES, dtype=torch.uint8, pin_memory=True)
        seconds = transfer.seconds - self._overhead
        left = bytes_to_host(seconds, self.host_rate)
        message = max(moves[0].target, moves[0].whole, key=torch.Tensor.numel)
        message = message.view(-1).view(torch.uint8)
        while left > 0:
            count = min(left, message.numel(), HOST_BYTES)
            self._host[:count].copy_(message[:count], non_blocking=True)
            left -= count
        _kernels().hold_until[(1,)](lane.began, seconds * 1e9, num_warps=1, maxnreg=32)

    def _note(self, began: torch.Tensor) -> None:
        _kernels().note[(1,)](began, num_warps=1)

    def _places_of(self, moves: Sequence[Move]) -> tuple[torch.Tensor, bool]:
        """The places on the device, and whether all are multiples of 16 elements."""
        places = places_of(moves)
        if places not in self._places:
            table = torch.tensor(places, dtype=torch.int64).to(self.device)
            self._places[places] = table, all(i % 16 == 0 for place in places for i in place)
        return self._places[places]

    def _nanoseconds(self, transfer: Transfer) -> tuple[float, float]:
        """What the kernel is to take: the modelled time less what the stream adds to it."""
        fixed = transfer.fixed - self._overhead
        moving = max(0.0, transfer.moving + min(0.0, fixed))
        return max(0.0, fixed) * 1e9, moving * 1e9

    def _uses_of(self, transfer: Transfer) -> torch.Tensor:
        """The shares of a transfer, one number per link of this emulation, on the device."""
        if transfer.uses not in self._uses:
            whole = _kernels().WHOLE
            shares = [0] * MOST_LINKS
            for name, share in transfer.uses:
                if name not in self._names:
                    self._names.append(name)
                if len(self._names) > MOST_LINKS:
                    raise ValueError(
                        f"the network has more than {MOST_LINKS} links: {self._names}; an "
                        "emulation on a GPU knows no more"
                    )
                shares[self._names.index(name)] = max(1, round(share * whole))
            self._uses[transfer.uses] = torch.tensor(shares, dtype=torch.int32).to(self.device)
        return self._uses[transfer.uses]


class _Lane:
    """The streams of one group, and the events that order them; made once."""

    def __init__(self, device: torch.device, index: int) -> None:
        self.index = index
        self.began = torch.zeros(1, dtype=torch.int64, device=device)  # of the transfer under way
        self.stream = torch.cuda.Stream(device, priority=_FIRST)
        self._beside = torch.cuda.Stream(device, priority=_FIRST)
        self._moment, self._begin = torch.cuda.Event(), torch.cuda.Event()

    def follow(self, caller: torch.cuda.Stream) -> None:
        self._moment.record(caller)
        self.stream.wait_event(self._moment)

    def fork(self) -> torch.cuda.Stream:
        """A stream for what nobody waits for, from this moment of the group's on."""
        self._begin.record(self.stream)
        self._beside.wait_event(self._begin)
        return self._beside


@cache
def measure_overhead(device: torch.device) -> float:
    """Seconds that a collective takes on the device beyond its time: small ones are queued while
    the device is kept busy, so that the host is not in the figure.
    """
    links = DeviceLinks(device, overhead=0.0)
    small, large = torch.zeros(2**10, device=device), torch.zeros(2**13, device=device)
    move = Move(large, small, 8, small, large.numel(), (0, large.numel()))
    probe = Transfer(PROBE_S, 0.0)
    taken: list[float] = []
    for _ in range(3):  # the first builds the kernels, the last counts
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(16)]
        torch.cuda.synchronize(device)
        links.delay(3e-3)
        for began, ended in marks:
            # As in a step: the caller waits for one before it issues the next.
            arrived = torch.cuda.Event()
            links.run("probe", [move], probe, arrived, began)
            ended.record(links.lane("probe").stream)
            current_stream(device).wait_event(arrived)
        torch.cuda.synchronize(device)
        taken = [began.elapsed_time(ended) / 1e3 for began, ended in marks]
    return max(0.0, statistics.median(taken) - PROBE_S)


@cache
def measure_host_rate(device: torch.device) -> float:
    """Bytes per second that a copy to pinned memory moves."""
    host = torch.empty(HOST_BYTES, dtype=torch.uint8, pin_memory=True)
    source = torch.zeros(HOST_BYTES, dtype=torch.uint8, device=device)
    rates = []
    for _ in range(5):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for _ in range(4):
            host.copy_(source, non_blocking=True)
        ended.record()
        torch.cuda.synchronize(device)
        rates.append(4 * HOST_BYTES / (began.elapsed_time(ended) / 1e3))
    return statistics.median(rates)


def bytes_to_host(seconds: float, rate: float) -> int:
    """How many take all of `seconds` but the last bit, which a kernel waits by the clock."""
    return max(0, int(rate * (seconds * (1 - LAST_PART) - LAST_S)))


@cache
def _kernels() -> Any:
    try:
        from shardwise.comms import emulated_kernels
    except ImportError as error:
        raise RuntimeError(
            f"an emulated network on a GPU needs Triton, which could not be imported ({error}); "
            "install triton"
        ) from error
    return emulated_kernels
