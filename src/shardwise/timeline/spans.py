"""What a timeline is made of: spans of time on streams, and curves of memory by role."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

SPAN_ROLES = ("compute", "copy", "transfer", "waiting", "host")
MEMORY_ROLES = (
    "parameters", "full", "gradients", "slots", "state", "activations", "temporary", "other",
)  # fmt: skip
COMPUTE = "compute"  # the stream's name, and the role's
HOST = "host"


@dataclass(frozen=True)
class Span:
    """Something that ran on one stream of one rank, from `start` to `end` nanoseconds."""

    name: str  # what: forward, gather, reduce_scatter, pack, ...
    unit: str
    phase: str  # forward, backward, optimizer
    role: str  # one of SPAN_ROLES
    rank: int
    stream: str  # "compute", "host", or the lane or group it ran on
    start: int
    end: int
    # Nanoseconds it would take with the device to itself; None where that is not known.
    alone: int | None = None

    def __post_init__(self) -> None:
        if self.role not in SPAN_ROLES:
            raise ValueError(
                f"span {self.name!r} has role {self.role!r}, expected one of {SPAN_ROLES}"
            )
        if self.end < self.start:
            raise ValueError(
                f"span {self.name!r} of rank {self.rank} ends at {self.end} ns, before its start "
                f"at {self.start} ns"
            )

    @property
    def duration(self) -> int:
        return self.end - self.start

    @property
    def contention(self) -> int:
        """Nanoseconds that others on the device cost it."""
        return 0 if self.alone is None else max(0, self.duration - self.alone)


@dataclass(frozen=True)
class MemoryPeak:
    """The moment at which one rank held the most."""

    rank: int
    time: int
    total: int
    by_role: Mapping[str, int]


@dataclass(frozen=True)
class MemoryCurve:
    """Bytes by role on one rank: `roles[r][i]` holds from `times[i]` until `times[i + 1]`."""

    rank: int
    times: tuple[int, ...]
    roles: Mapping[str, tuple[int, ...]]

    def __post_init__(self) -> None:
        unknown = sorted(set(self.roles) - set(MEMORY_ROLES))
        if unknown:
            raise ValueError(f"memory roles {unknown} are unknown, expected some of {MEMORY_ROLES}")
        lengths = {role: len(values) for role, values in self.roles.items()}
        if any(length != len(self.times) for length in lengths.values()):
            raise ValueError(
                f"rank {self.rank} has {len(self.times)} moments but {lengths} values: one each"
            )
        if list(self.times) != sorted(self.times):
            raise ValueError(f"the memory curve of rank {self.rank} goes back in time")

    @cached_property
    def totals(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(*self.roles.values(), strict=True))) if self.roles else ()

    def peak(self) -> MemoryPeak:
        if not self.totals:
            return MemoryPeak(self.rank, 0, 0, {})
        at = max(range(len(self.totals)), key=self.totals.__getitem__)
        by_role = {role: values[at] for role, values in self.roles.items()}
        return MemoryPeak(self.rank, self.times[at], self.totals[at], by_role)
