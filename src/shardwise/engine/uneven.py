"""A loop over a step's micro-batches of which ranks run different numbers, and other models in it.

Another model that runs inside the loop (a discriminator beside the generator whose
loop it is) is its guest. A rank cannot know what the others run between two of its own
micro-batches, so what the guest's backwards leave waits for the loop's end, where all ranks meet; a
rank on which the guest left nothing joins with zeros.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from shardwise.engine.collectives import digest

if TYPE_CHECKING:
    from shardwise.engine.engine import Engine

Item = TypeVar("Item")

# Engines by the order in which this rank made them: as ranks name them to each other.
_numbers = itertools.count()
_engines: weakref.WeakValueDictionary[int, Engine] = weakref.WeakValueDictionary()
_numbers_of: weakref.WeakKeyDictionary[Engine, int] = weakref.WeakKeyDictionary()


class _Here(threading.local):
    loop: Loop | None = None


here = _Here()  # the uneven loop in which this thread is, if any


def introduce(engine: Engine) -> None:
    """Make an engine known to the loops of other models."""
    _numbers_of[engine] = number = next(_numbers)
    _engines[number] = engine


class Loop:
    """One such loop over the micro-batches of one model, from when it begins."""

    def __init__(self, engine: Engine, counts: dict[int, int], total: int) -> None:
        """`counts` are the micro-batches of the ranks in the model's groups, `total` is ours."""
        self.engine, self.counts, self.total = engine, counts, total
        self.idle = 0 in counts.values()
        self.guests: dict[int, Engine] = {}
        here.loop = self
        if self.idle:
            engine.begin_idle()

    def leave(self) -> None:
        """What runs now is outside of the loop."""
        if here.loop is self:
            here.loop = None

    def welcome(self, guest: Engine) -> None:
        """Another model begins a forward inside the loop."""
        number = _numbers_of.get(guest)
        if guest is self.engine or guest.mesh.ranks == 1 or number in self.guests:
            return
        ranks = guest.mesh.shard.members if guest.mesh.shard.size > 1 else ()
        alike = {self.counts.get(rank, -1) for rank in ranks} <= {self.total}
        if number is None or not alike or guest.mesh.ranks != self.engine.mesh.ranks:
            raise RuntimeError(
                f"{guest.title} runs inside the loop over sw.microbatches of {self.engine.title}, "
                f"of which ranks run different numbers ({_show(self.counts)}), but its parameters "
                f"are {'on other ranks' if alike else 'gathered on ranks that run other numbers'}; "
                "give those ranks as many micro-batches, or shard both models by one Plan"
            )
        if guest.stand_in is not None:
            raise RuntimeError(
                f"{guest.title}, which sw.compile compiled, runs inside the loop over "
                f"sw.microbatches of {self.engine.title}, of which ranks run different numbers "
                f"({_show(self.counts)}), and its graphs send in every backward; use sw.shard for "
                f"{guest.title}, or give all ranks as many micro-batches"
            )
        self.guests[number] = guest
        guest.schedule.waits = True

    def stay(self) -> None:
        """The loop's own model has summed over all ranks. Where some run nothing, another backward
        of it (of a second loss) is one that they do not expect, as a guest's is.
        """
        number = _numbers_of.get(self.engine)
        if self.idle and number is not None:
            self.guests[number] = self.engine
            self.engine.schedule.waits = True

    def finish(self) -> None:
        """All micro-batches ran: ranks meet over the guests."""
        self.leave()
        agreement, own = self.engine.agreement, self.engine
        for guest in self.guests.values():
            guest.schedule.waits = False
        own.idles = False
        guests = {n: g for n, g in self.guests.items() if g is not own or own.waits_for_more}
        if not any(count for (count,) in agreement.tell([len(guests)])):
            return
        mine = {n: (_outline(guest), guest.waits_for_more) for n, guest in guests.items()}
        said = agreement.everybody(mine)
        for number in sorted({number for each in said for number in each}):
            known = _engines.get(number)
            outlines = {each[number][0] for each in said if number in each}
            if known is None or outlines != {_outline(known)}:
                raise RuntimeError(
                    f"another model ran inside the loop over sw.microbatches of "
                    f"{self.engine.title} ({_show(self.counts)}) that is not the same on all "
                    "ranks; shard the same models in the same order on every rank"
                )
            known.meet(any(each[number][1] for each in said if number in each), self.idle)

    def run_guest(self, guest: Engine, items: Sequence[Item]) -> Iterator[Item]:
        """Another model's own loop inside of this one: its sums wait for this one's end."""
        self.welcome(guest)
        for i, item in enumerate(items):
            before = guest.backwards
            yield item
            guest.check_ran(before, i, len(items))

    def fail(self, message: str) -> None:
        """The loop was left early: what its models have summed is dropped."""
        self.leave()
        for engine in {self.engine, *self.guests.values()}:
            engine.schedule.waits = engine.idles = False
            engine.interrupt(message)


def _outline(engine: Engine) -> int:
    return digest([unit.name for unit in engine.units])


def _show(counts: dict[int, int]) -> str:
    return ", ".join(f"rank {rank}: {count}" for rank, count in sorted(counts.items()))
