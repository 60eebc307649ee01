"""What a search gives: Plans with what they are predicted to cost, the fastest first, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.description.cluster import Cluster, Device
from shardwise.description.workload import Workload
from shardwise.planning.plan import Plan
from shardwise.planning.units import MIB
from shardwise.timeline import Breakdown, Timeline

GB = 1e9
# Peaks are predicted to within 3 % (docs/accuracy.md): a Plan must fit with that much to spare.
MEMORY_MARGIN = 0.03
WORTH = 0.003  # a setting that saves less than this share of the step is left at its default


# What a step took over what was predicted of it, least and most, by what the prediction rests on.
# Rates that were measured on such a device: the project's own cases and nine models of others, on
# an H200 with another host (docs/planning.md). Data sheets: published runs of Llama-3 8B on H100s.
# Rates derated by published runs: those runs' own steps (0.86 to 1.15), and a sixth to either side.
LIKE_IT, SHEETS, DERATED = (0.75, 2.6), (0.85, 1.8), (0.7, 1.35)


def basis_of(cluster: Cluster) -> tuple[str, float, float]:
    """What predictions on this cluster rest on, and the range around one."""
    sources = dict(cluster.sources)
    if sources.get("device.kernel_s", "").startswith("measured by shardwise calibrate"):
        return f"predicted from what was measured on {cluster.device.name}", *LIKE_IT
    if any(source.startswith("derated by published runs") for source in sources.values()):
        return "predicted from data sheets, derated by published runs", *DERATED
    return "predicted from data sheets", *SHEETS


@dataclass(frozen=True)
class Room:
    """A device's memory, and how much of it a Plan asks for."""

    limit_bytes: float
    beside_bytes: float  # the context, NCCL's buffers
    per_byte: float  # what the allocator takes for each byte of the peak
    floor_bytes: float = 0.0  # and for any step

    @classmethod
    def of(cls, device: Device, plan: Plan, limit: float) -> Room:
        groups = (plan.replicate > 1) + (plan.shard > 1)
        beside = device.context_bytes + groups * device.communicator_bytes
        return cls(limit, beside, 1 + device.fragmentation, device.floor_bytes)

    def allocator_bytes(self, peak: float, reserved: float = 0) -> float:
        """What torch's allocator must be able to take, with the margin to spare; `reserved` is
        what it took in a trial.
        """
        return max(peak * self.per_byte + self.floor_bytes, reserved) * (1 + MEMORY_MARGIN)

    def needed(self, peak: float, reserved: float = 0) -> float:
        """What the device must have."""
        return self.allocator_bytes(peak, reserved) + self.beside_bytes

    @property
    def most(self) -> float:
        """The largest peak that fits."""
        free = (self.limit_bytes - self.beside_bytes) / (1 + MEMORY_MARGIN)
        return max(0.0, free - self.floor_bytes) / self.per_byte


def show_gb(nbytes: float) -> str:
    """In 1e9 bytes, with a digit that is not 0."""
    return f"{nbytes / 1e9:.1f}" if nbytes >= 95e6 or nbytes <= 0 else f"{nbytes / 1e9:.1g}"


def title_of(plan: Plan, workload: Workload) -> str:
    work = f"{workload.split} {workload.of}{workload.again}"
    return f"{plan.title} on {plan.replicate}x{plan.shard}, {work}"


# Of its step, what a later run of a Plan that was tried may differ by; of one that was as quick as
# its host, which is a CPU or waits for one: on shared machines 9 of 12 and 107 of 117 later runs
# were within this (docs/log.md). A host that swings so far sets the pace from HOST_BOUND of a step.
MEASURED, BY_HOST = 0.05, 0.25
HOST_BOUND = 1 / (1 + BY_HOST)
# A captured step that takes no more of the plain one is worth a line more in a program; of one that
# may wait for its host no more than so much: it is steady where the host is not.
PAYS, STEADIES = 0.97, 1.03


@dataclass(frozen=True)
class Captured:
    """What the same step took when `sw.capture` replayed it."""

    step_ms: float
    spread_ms: float
    reserved_bytes: int  # the most, also while it was recorded

    @property
    def range_ms(self) -> tuple[float, float]:
        return _around(self.step_ms, self.spread_ms, MEASURED)


def _around(step_ms: float, spread_ms: float, share: float) -> tuple[float, float]:
    """By a factor: a busy machine's steps may spread by more than they take."""
    factor = 1 + max(share, spread_ms / step_ms)
    return step_ms / factor, step_ms * factor


@dataclass(frozen=True)
class Trial:
    """What some steps of a Plan took on this machine."""

    step_ms: float  # the median
    spread_ms: float  # interquartile
    host_ms: float  # until the host had issued the step
    peak_bytes: int
    reserved_bytes: int | None  # from the device; None on a host
    how: str  # in words
    captured: Captured | None = None  # None: not tried, or the step cannot be captured
    uncaptured: str = ""  # why it cannot

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Trial:
        """From what `dataclasses.asdict` made; TypeError from anything else."""
        captured = values.get("captured")
        return cls(**values | {"captured": captured and Captured(**captured)})

    @property
    def waits_for_host(self) -> bool:
        return self.host_ms >= HOST_BOUND * self.step_ms

    @property
    def range_ms(self) -> tuple[float, float]:
        share = BY_HOST if self.waits_for_host else MEASURED
        return _around(self.step_ms, self.spread_ms, share)

    @property
    def capture_pays(self) -> bool:
        if self.captured is None:
            return False
        most = STEADIES if self.waits_for_host else PAYS
        return self.captured.step_ms <= most * self.step_ms


@dataclass(frozen=True)
class Candidate:
    """A Plan with its workload and what it costs: as predicted, or as measured in a trial."""

    plan: Plan  # resolved
    workload: Workload
    step_ms: float
    peak_bytes: int
    room: Room
    breakdown: Breakdown  # as predicted
    tokens_per_s: float
    basis: str = ""  # what the step's time rests on
    range_ms: tuple[float, float] | None = None  # which it is said to lie in
    predicted_ms: float | None = None  # where something was measured since
    trial: Trial | None = None

    @classmethod
    def of(
        cls, plan: Plan, workload: Workload, timeline: Timeline, room: Room, cluster: Cluster
    ) -> Candidate:
        basis, low, high = basis_of(cluster)
        return cls(
            plan,
            workload,
            timeline.step_ms,
            timeline.peak().total,
            room,
            timeline.breakdown(),
            workload.tokens_on(plan.mesh) / (timeline.step_ms / 1e3),
            basis,
            (timeline.step_ms * low, timeline.step_ms * high),
        )

    def extended(self, shorter: Candidate, workload: Workload, more: int) -> Candidate:
        """For `more` micro-batches, each of which takes what this one takes over the `shorter` one.
        They hold no more than these do.
        """
        took, before = vars(self.breakdown), vars(shorter.breakdown)
        step_ms = self.step_ms + more * (self.step_ms - shorter.step_ms)
        assert self.range_ms is not None
        low, high = (bound / self.step_ms * step_ms for bound in self.range_ms)
        return dataclasses.replace(
            self,
            workload=workload,
            step_ms=step_ms,
            breakdown=Breakdown(
                **{name: took[name] + more * (took[name] - before[name]) for name in took}
            ),
            tokens_per_s=workload.tokens_on(self.plan.mesh) / (step_ms / 1e3),
            range_ms=(low, high),
        )

    @property
    def order(self) -> tuple[float, bool, int]:
        """By which candidates are ranked. Of two that take as long the one that recomputes comes
        second: what it frees was free.
        """
        return self.step_ms, self.workload.checkpoint != "none", self.peak_bytes

    @property
    def exposed_ms(self) -> float:
        return (self.breakdown.exposed_transfer + self.breakdown.waiting_for_peers) / 1e6

    @property
    def allocator_bytes(self) -> float:
        """What torch's allocator must be able to take, of which the peak is tensors."""
        taken = 0 if self.trial is None else self.trial.reserved_bytes or 0
        return self.room.allocator_bytes(self.peak_bytes, taken)

    @property
    def needed_bytes(self) -> float:
        """Of the device: the allocator's, the context and NCCL's buffers."""
        return self.allocator_bytes + self.room.beside_bytes

    @property
    def captured(self) -> Captured | None:
        """The step captured, where that was tried, pays and fits."""
        if self.trial is None or self.trial.captured is None or not self.trial.capture_pays:
            return None
        needed = self.room.needed(self.peak_bytes, self.trial.captured.reserved_bytes)
        return self.trial.captured if needed <= self.room.limit_bytes else None

    @property
    def spare_gb(self) -> float:
        return (self.room.limit_bytes - self.needed_bytes) / GB

    @property
    def peak_gb(self) -> str:
        return show_gb(self.peak_bytes)

    @property
    def rate_unit(self) -> str:
        """Of `tokens_per_s`: a sample without tokens counts as one."""
        return "tokens/s" if self.workload.of == "sequences" else "samples/s"

    @property
    def title(self) -> str:
        return title_of(self.plan, self.workload)

    def gives_way_to(self, other: Candidate) -> bool:
        """One of zero1 and zero2 where the other says the same with no more memory."""
        alike = {self.plan.name, other.plan.name} == {"zero1", "zero2"}
        if not (alike and self.workload == other.workload and self.settings() == other.settings()):
            return False
        ties = abs(self.step_ms - other.step_ms) < WORTH * self.step_ms
        if self.peak_bytes == other.peak_bytes:
            return ties and self.plan.name == "zero2"
        return ties and other.peak_bytes < self.peak_bytes

    def settings(self) -> dict[str, Any]:
        """The Plan's settings that are not the defaults."""
        plain = {f.name: f.default for f in dataclasses.fields(Plan)}
        hidden = ("name", "mesh", "units", "cut", "inner", "compute_dtype", "reduce_dtype")
        return {
            name: getattr(self.plan, name)
            for name, default in plain.items()
            if name not in hidden and getattr(self.plan, name) != default
        }

    def show_settings(self) -> str:
        """The same for people."""
        shown = self.settings()
        size = shown.pop("bucket_bytes", None)
        words = [f"{name}={value}" for name, value in shown.items()]
        if size is not None:
            large = size >= MIB
            words.append(
                f"buckets of {size / (MIB if large else 1024):.0f} {'MiB' if large else 'KiB'}"
            )
        return ", ".join(words) or "defaults"

    def show_basis(self) -> str:
        """What the time rests on, and the range that it is said to lie in."""
        words = self.basis
        if self.trial is not None:
            words += f" ({self.trial.how}, predicted {self.predicted_ms:.1f} ms)"
        if self.range_ms is not None:
            words += ", {:.1f} to {:.1f} ms".format(*self.range_ms)
        if self.captured is not None:
            words += f"; {self.show_captured()}"
        return words

    def show_captured(self) -> str:
        """The captured step, how a program gets it, and its range."""
        assert self.captured is not None
        low, high = self.captured.range_ms
        return f"as sw.capture(step) {self.captured.step_ms:.1f} ms, {low:.1f} to {high:.1f}"

    def explain(self) -> str:
        """In sentences: time, memory, and where the step goes."""
        settings = self.show_settings()
        return (
            f"{self.title}: {self.step_ms:.1f} ms a step ({self.tokens_per_s:,.0f} "
            f"{self.rate_unit}), "
            f"peak {self.peak_gb} GB, needs {show_gb(self.needed_bytes)} of the device; "
            f"{settings}.\n"
            f"  {self.breakdown}"
        )


@dataclass(frozen=True)
class Rejected:
    """A combination that does not fit, and what it would need."""

    title: str
    strategy: str
    peak_bytes: int
    needed_bytes: float  # of the device
    note: str = ""  # what takes so much of it


@dataclass(frozen=True)
class Ranking(Sequence[Candidate]):
    """Candidates, the fastest first, and what was dropped for memory."""

    candidates: tuple[Candidate, ...]
    rejected: tuple[Rejected, ...]
    limit_bytes: float
    tried: int
    notes: tuple[str, ...] = ()  # on how the model was traced, and what could not be tried

    def __len__(self) -> int:
        return len(self.candidates)

    def __getitem__(self, index: Any) -> Any:
        return self.candidates[index]

    def best_of_each(self) -> list[Candidate]:
        """The best candidate of every strategy."""
        found: dict[str, Candidate] = {}
        for candidate in self.candidates:
            found.setdefault(candidate.plan.title, candidate)
        return list(found.values())

    def distinct(self) -> list[Candidate]:
        """Without a zero1 that takes as long as the same zero2 and no less memory, or the other way
        round.
        """
        return [c for c in self.candidates if not any(map(c.gives_way_to, self.candidates))]

    def explain(self) -> str:
        """Why the winner wins, against the best of every other strategy."""
        if not self.candidates:
            least = min(self.rejected, key=lambda r: r.needed_bytes)
            padded = next((r for r in (least, *self.rejected) if r.note), None)
            return (
                f"Nothing fits in {show_gb(self.limit_bytes)} GB; the least is {least.title} with "
                f"{show_gb(least.peak_bytes)} GB, which needs a device of "
                f"{show_gb(least.needed_bytes)} GB (with {MEMORY_MARGIN:.0%} for the prediction, "
                "and what fragmentation, the context and NCCL take). Use more ranks, shorter "
                "sequences, or tensor parallelism beneath it."
                + (f" With {padded.title}, {padded.note}." if padded else "")
            )
        best = self.candidates[0]
        lines = [
            f"{best.title} is the fastest of {self.tried} tried: {best.step_ms:.1f} ms a step. It "
            f"fits with {best.spare_gb:.1f} GB to spare (a peak of {best.peak_gb} needs "
            f"{show_gb(best.needed_bytes)} of {self.limit_bytes / GB:.1f} GB)."
        ]
        lines += [
            _compare(best, other)
            for other in self.best_of_each()[1:]
            if not any(map(other.gives_way_to, self.candidates))
        ]
        fitting = {candidate.plan.title for candidate in self.candidates}
        dropped: dict[str, Rejected] = {}
        for r in sorted(self.rejected, key=lambda r: r.needed_bytes):
            if r.strategy not in fitting:
                dropped.setdefault(r.strategy, r)
        lines += [
            f"{r.strategy} does not fit: at least {r.needed_bytes / GB:.1f} GB ({r.title})."
            for r in dropped.values()
        ]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)


def _compare(best: Candidate, other: Candidate) -> str:
    more = other.step_ms - best.step_ms
    if more < WORTH * best.step_ms:
        difference = other.peak_bytes - best.peak_bytes
        amount = f"{abs(difference) / GB:.1f} GB"
        memory = f"{amount} {'more' if difference > 0 else 'less'}"
        return (
            f"{other.title} takes as long ({other.step_ms:.1f} ms) with "
            f"{'as much memory' if amount == '0.0 GB' else memory}."
        )

    def gap(*parts: str) -> float:
        return sum(getattr(other.breakdown, p) - getattr(best.breakdown, p) for p in parts) / 1e6

    again = other.workload.checkpoint != "none" and best.workload.checkpoint == "none"
    units = len(other.plan.require_units())
    exposed, compute = gap("exposed_transfer", "waiting_for_peers"), gap("compute")
    host, contention = gap("host_idle"), gap("contention", "copies")
    reasons = [
        (exposed, f"{exposed:.1f} ms more of exposed communication"),
        (compute, f"{compute:.1f} ms more of compute" + (", to recompute" if again else "")),
        (contention, f"{contention:.1f} ms more of contention and copies"),
        (host, f"the device waits {host:.1f} ms longer for the host, which issues {units} units"),
    ]
    told = [(ms, text) for ms, text in sorted(reasons, reverse=True)[:2] if ms > 0.1 * more]
    saved = sum(ms for ms, _ in told) - more
    less = f", less {saved:.1f} ms saved elsewhere" if saved > 0.1 * more else ""
    words = ", and ".join(text for _, text in told) or "many small costs"
    return f"{other.title} would add {more:.1f} ms: {words}{less}."
