"""What a rank issued while somebody counted: `sw.record()`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from shardwise.planning.memory import sent_bytes


@dataclass(frozen=True)
class Call:
    """One collective as one rank issued it. `nbytes` is the whole message: a gather's output, a
    scatter's input.
    """

    name: str  # all_gather, reduce_scatter, all_reduce, all_to_all
    axis: str  # the mesh axis it ran over
    nbytes: int
    ranks: int

    @property
    def sent(self) -> float:
        """Bytes this rank sends: S(n-1)/n, twice that for an all-reduce."""
        return sent_bytes(self.name, self.nbytes, self.ranks)


@dataclass(eq=False)  # two that counted the same are still two
class Record:
    """What was issued while it was open."""

    calls: list[Call] = field(default_factory=list)
    # Whose: ranks may be threads of one process, each in a world of its own.
    world: Any = field(default_factory=lambda: dist.group.WORLD, repr=False)

    def counts(self) -> dict[str, int]:
        return dict(Counter(call.name for call in self.calls))

    def sent(self, name: str | None = None) -> float:
        return sum(call.sent for call in self.calls if name in (None, call.name))


# Open records; empty almost always, so that a collective pays one truth test for it.
open_records: list[Record] = []


@contextmanager
def record() -> Iterator[Record]:
    """Count every collective of the engine on this rank: `with sw.record() as log: step()`."""
    log = Record()
    open_records.append(log)
    try:
        yield log
    finally:
        open_records.remove(log)
