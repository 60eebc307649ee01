"""The event loop of the simulator: ranks, their streams, collectives, shares and links."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shardwise.description.collectives import slowdown
from shardwise.predict.program import Program
from shardwise.timeline import COMPUTE, MEMORY_ROLES, MemoryCurve, Span, Timeline


@dataclass(frozen=True)
class Rank:
    """One rank (class) to simulate. `slowness` multiplies its kernels' times."""

    number: int
    program: Program
    groups: Mapping[str, tuple[int, ...]]
    slowness: float = 1.0
    stands_for: int = 1


@dataclass
class _State:
    """A rank while it runs."""

    rank: Rank
    shape: _Shape
    missing: list[int]  # dependencies that have not ended, by operation
    started: list[float]
    ended: list[float]
    shares: float = 0.0  # of the compute, taken now
    running: int = -1  # the compute operation that runs
    left: float = 0.0  # its seconds of work left, as of `since`
    since: float = 0.0
    version: int = 0
    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    @property
    def rate(self) -> float:
        """What is left of the device for compute; two that fill it do not fill it twice."""
        return min(1.0, max(0.0, 1.0 - self.shares))


@dataclass
class _Collective:
    """A collective under way: who has arrived, and how much is left."""

    seconds: float
    link: str
    members: tuple[int, ...]
    arrived: dict[int, tuple[int, float]] = field(default_factory=dict)  # rank -> (op, when)
    left: float = 0.0
    since: float = 0.0
    rate: float = 1.0
    version: int = 0
    begun: float = -1.0


def run(ranks: Sequence[Rank]) -> Timeline:
    """Simulate; gives spans and memory of every rank given."""
    loop = _Loop(ranks)
    loop.run()
    return loop.timeline()


class _Loop:
    def __init__(self, ranks: Sequence[Rank]) -> None:
        shapes: dict[int, _Shape] = {}
        self.states: dict[int, _State] = {}
        for rank in ranks:
            key, count = id(rank.program), len(rank.program.ops)
            if key not in shapes:
                shapes[key] = _shape_of(rank.program)
            shape = shapes[key]
            self.states[rank.number] = _State(
                rank, shape, list(shape.missing), [-1.0] * count, [-1.0] * count
            )
        self.events: list[tuple[float, int, Callable[..., None], tuple]] = []
        self.order = itertools.count()
        self.transfers: dict[tuple[str, tuple[int, ...], int], _Collective] = {}
        self.on_link: dict[tuple[int, str], list[_Collective]] = defaultdict(list)
        self.spans: list[Span] = []

    def run(self) -> None:
        for number, state in self.states.items():
            for i, missing in enumerate(state.missing):
                if missing == 0:
                    self._at(state.shape.issued[i], self._begin, number, i)
        events = self.events
        while events:
            time, _, action, arguments = heapq.heappop(events)
            action(time, *arguments)
        for state in self.states.values():
            for i, end in enumerate(state.ended):
                if end < 0:
                    op = state.rank.program.ops[i]
                    raise RuntimeError(
                        f"rank {state.rank.number} never ends {op.name} of {op.unit!r} "
                        f"({op.phase}): its peers {state.rank.groups.get(op.group)} do not issue "
                        "the same collectives in the same order"
                    )

    def _at(self, time: float, action: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self.events, (time, next(self.order), action, arguments))

    def _begin(self, now: float, number: int, i: int) -> None:
        """Everything the operation waited for is there."""
        state = self.states[number]
        op = state.rank.program.ops[i]
        state.started[i] = now
        if op.group:
            self._take_share(now, state, op.share)
            self._arrive(now, number, i)
            return
        seconds = op.seconds * (state.rank.slowness if op.role in ("compute", "copy") else 1.0)
        if op.stream == COMPUTE:
            state.running, state.left, state.since = i, seconds, now
            self._schedule_compute(now, state)
            return
        self._take_share(now, state, op.share)
        self._at(max(now + seconds, state.shape.issue_end[i]), self._end, number, i)

    def _schedule_compute(self, now: float, state: _State) -> None:
        state.version += 1
        rate = state.rate
        if state.left <= 1e-15:
            self._at(now, self._computed, state.rank.number, state.version)
        elif rate > 1e-9:
            done = now + state.left / rate
            self._at(done, self._computed, state.rank.number, state.version)

    def _computed(self, now: float, number: int, version: int) -> None:
        state = self.states[number]
        if version != state.version or state.running < 0:
            return
        i, state.running = state.running, -1
        self._span(state, i, state.started[i], now)
        end = max(now, state.shape.issue_end[i])
        if end > now:
            self._at(end, self._end, number, i)
        else:
            self._end(now, number, i)

    def _take_share(self, now: float, state: _State, share: float) -> None:
        """Compute on this rank goes on at another rate."""
        if not share:
            return
        if state.running >= 0:
            state.left -= (now - state.since) * state.rate
            state.since = now
        state.shares += share
        if state.running >= 0:
            self._schedule_compute(now, state)

    def _end(self, now: float, number: int, i: int) -> None:
        state = self.states[number]
        op = state.rank.program.ops[i]
        state.ended[i] = now
        if op.stream != COMPUTE and not op.group:
            self._take_share(now, state, -op.share)
            self._span(state, i, state.started[i], now)
        for follower in state.shape.followers[i]:
            state.missing[follower] -= 1
            if state.missing[follower] == 0:
                ready = max(now, state.shape.issued[follower])
                if ready > now:
                    self._at(ready, self._begin, number, follower)
                else:
                    self._begin(now, number, follower)

    # Collectives

    def _arrive(self, now: float, number: int, i: int) -> None:
        state = self.states[number]
        op = state.rank.program.ops[i]
        members = state.rank.groups[op.group]
        key = (op.group, members, state.calls[op.group])
        state.calls[op.group] += 1
        transfer = self.transfers.get(key)
        if transfer is None:
            transfer = self.transfers[key] = _Collective(op.seconds, op.link, members)
        transfer.arrived[number] = (i, now)
        if len(transfer.arrived) < len(members):
            return
        transfer.begun = transfer.since = now
        transfer.left = transfer.seconds
        if transfer.link:
            for member in members:
                self.on_link[member, transfer.link].append(transfer)
            self._share_links(now, transfer)
        self._schedule_transfer(now, transfer)

    def _share_links(self, now: float, changed: _Collective) -> None:
        """Transfers of the same ranks over the same link, each of which fills it, share it."""
        touched = {
            id(t): t for member in changed.members for t in self.on_link[member, changed.link]
        }
        for transfer in touched.values():
            in_use = (len(self.on_link[m, transfer.link]) for m in transfer.members)
            rate = 1.0 / slowdown(in_use)
            if rate != transfer.rate:
                transfer.left -= (now - transfer.since) * transfer.rate
                transfer.since, transfer.rate = now, rate
                if transfer is not changed:
                    self._schedule_transfer(now, transfer)

    def _schedule_transfer(self, now: float, transfer: _Collective) -> None:
        transfer.version += 1
        done = now + max(0.0, transfer.left) / transfer.rate
        self._at(done, self._transferred, transfer, transfer.version)

    def _transferred(self, now: float, transfer: _Collective, version: int) -> None:
        if version != transfer.version:
            return
        transfer.version += 1
        if transfer.link:
            for member in transfer.members:
                self.on_link[member, transfer.link].remove(transfer)
            self._share_links(now, transfer)
        for number, (i, arrived) in transfer.arrived.items():
            state = self.states[number]
            op = state.rank.program.ops[i]
            self._take_share(now, state, -op.share)
            if transfer.begun > arrived:
                self._span(state, i, arrived, transfer.begun, role="waiting")
            self._span(state, i, transfer.begun, now)
        for number, (i, _) in transfer.arrived.items():
            self._end(now, number, i)

    # The result

    def _span(
        self, state: _State, i: int, start: float, end: float, role: str | None = None
    ) -> None:
        op = state.rank.program.ops[i]
        begin, finish = _ns(start), _ns(end)
        if finish == begin:
            return
        alone = None
        if op.role == "compute":
            alone = min(finish - begin, _ns(op.seconds * state.rank.slowness))
        self.spans.append(
            Span(
                op.name,
                op.unit,
                op.phase,
                role or op.role,
                state.rank.number,
                op.stream,
                begin,
                finish,
                alone,
            )
        )

    def timeline(self) -> Timeline:
        memory = tuple(_memory_of(state) for state in self.states.values())
        stands_for = {number: state.rank.stands_for for number, state in self.states.items()}
        return Timeline(tuple(self.spans), memory, stands_for)


@dataclass(frozen=True)
class _Shape:
    """What is the same for all ranks that run one Program."""

    missing: tuple[int, ...]
    followers: list[list[int]]
    issued: list[float]
    issue_end: list[float]
    curve: dict[str, tuple[int, ...]]  # bytes by role after each change


def _shape_of(program: Program) -> _Shape:
    ops = program.ops
    followers: list[list[int]] = [[] for _ in ops]
    missing = [0] * len(ops)
    last: dict[str, int] = {}
    issued, issue_end, clock = [], [], 0.0
    for i, op in enumerate(ops):
        needs: Iterable[int] = op.after
        before = last.get(op.stream)
        if before is not None:
            needs = {before, *op.after} if op.after else (before,)
        elif len(op.after) > 1:
            needs = set(op.after)
        last[op.stream] = i
        for need in needs:
            missing[i] += 1
            followers[need].append(i)
        issued.append(clock)
        clock += op.host
        issue_end.append(clock)
    held = dict.fromkeys(MEMORY_ROLES, 0)
    rows = []
    for change in program.changes:
        held[change.role] += change.nbytes
        rows.append(tuple(held.values()))
    columns = zip(*rows, strict=True) if rows else [()] * len(held)
    return _Shape(
        tuple(missing), followers, issued, issue_end, dict(zip(held, columns, strict=True))
    )


def _memory_of(state: _State) -> MemoryCurve:
    """Bytes by role at every change, in the compute stream's order."""
    times: list[int] = []
    at = 0
    for change in state.rank.program.changes:
        if change.at >= 0:
            moment = (state.ended if change.ends else state.started)[change.at]
            at = max(at, _ns(moment))
        times.append(at)
    return MemoryCurve(state.rank.number, tuple(times), state.shape.curve)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
