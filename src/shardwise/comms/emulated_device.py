"""The emulated network on a GPU: every group has a stream on which its collectives follow one
another, each one kernel that takes the modelled time while it copies what arrives.

    group's stream   waits for the caller | block 0 watches the clock and the links | arrived
                                          | the other blocks copy                   |

The kernel knows which transfers move over its links at each moment (`emulated_kernels`), so sharing
needs no host. The streams have priority: a network does not queue behind matrix products.
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable
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
_FIRST = -1  # the higher of a stream's two priorities


@dataclass(frozen=True)
class Move:
    """The copy a collective makes: the flat source into each of `rows` rows of the flat target.

    A kernel that moves the whole message (`carry`) is told of it by the rest: element i of `total`
    is whole[i % len(whole)], and those in `kept` reach the target.
    """

    target: torch.Tensor
    source: torch.Tensor
    rows: int
    whole: torch.Tensor
    total: int
    kept: tuple[int, int]

    def run(self) -> None:
        """With a plain copy."""
        if self.rows:
            rows = self.target.view(self.rows, -1)
            rows.copy_(self.source.reshape(1, -1).expand_as(rows))


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
        # Seconds that events and the launch add to every collective.
        self._overhead = measure_overhead(device) if overhead is None else overhead

    def lane(self, group: Hashable) -> _Lane:
        if group not in self._lanes:
            self._lanes[group] = _Lane(self.device)
        return self._lanes[group]

    def run(
        self,
        group: Hashable,
        move: Move,
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
                self._take(move, transfer)
            else:
                self._deliver(move, NO_TIME)
                if mode == "unwaited":
                    torch.cuda.set_stream(lane.fork())
                    self._run_on(move, transfer)
        finally:
            torch.cuda.set_stream(caller)
        arrived.record(lane.stream)

    def delay(self, seconds: float) -> None:
        """Keep the current stream busy for that long, with one warp."""
        self._hold(Transfer(seconds + self._overhead, 0.0))

    def _take(self, move: Move, transfer: Transfer) -> None:
        if self.occupancy and transfer.seconds:
            self._carry(move, transfer, move.kept)
        else:
            self._deliver(move, transfer)

    def _run_on(self, move: Move, transfer: Transfer) -> None:
        """The collective's kernel without its data: who holds the buffers by then is unknown, so
        they may be read at most.
        """
        if self.occupancy and transfer.seconds:
            self._carry(move, transfer, (0, 0))
        else:
            self._hold(transfer)

    def _deliver(self, move: Move, transfer: Transfer) -> None:
        if not move.rows:
            self._hold(transfer)
            return
        fixed, moving = self._nanoseconds(transfer)
        row, block = move.source.numel(), COPY_BYTES // move.source.element_size()
        copiers = min(self._copiers, -(-row // block))
        _kernels().deliver[(1 + copiers,)](
            move.target, move.source, move.rows, row,
            self._loads, self._uses_of(transfer), fixed, moving,
            BLOCK=block, LINKS=MOST_LINKS, num_warps=1, maxnreg=32,
        )  # fmt: skip

    def _hold(self, transfer: Transfer) -> None:
        fixed, moving = self._nanoseconds(transfer)
        _kernels().hold[(1,)](
            self._loads, self._uses_of(transfer), fixed, moving,
            LINKS=MOST_LINKS, num_warps=1, maxnreg=32,
        )  # fmt: skip

    def _carry(self, move: Move, transfer: Transfer, kept: tuple[int, int]) -> None:
        fixed, moving = self._nanoseconds(transfer)
        _kernels().carry[(self.occupancy,)](
            move.target, move.whole, move.whole.numel(), move.total, *kept,
            self._loads, self._uses_of(transfer), fixed, moving,
            CHUNK=CHUNK, LINKS=MOST_LINKS, num_warps=16,
        )  # fmt: skip

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

    def __init__(self, device: torch.device) -> None:
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
            links.run("probe", move, probe, torch.cuda.Event(), began)
            ended.record(links.lane("probe").stream)
        torch.cuda.synchronize(device)
        taken = [began.elapsed_time(ended) / 1e3 for began, ended in marks]
    return max(0.0, statistics.median(taken) - PROBE_S)


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
