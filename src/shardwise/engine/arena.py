"""The memory of an engine's steps as one block (`Plan.memory="arena"`).

The first step finds the order, the second one is noted: what it takes and gives back, and when
(`schedule/arena.py`). From the third on everything has its place in one block. Full parameters and
reduce slots are views of it for good; staging and rows are views for as long as they are needed.

Whoever takes a place looks whether something else stands there now, so a step in another order is
found out before anything is written: what can be gathered again gives way, what has no views yet
comes from torch's allocator. The engine then moves out of the arena with the next step.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from shardwise.engine import torch_private
from shardwise.engine.collectives import Buffer
from shardwise.schedule.arena import Key, Layout, Lives, lay_out

if TYPE_CHECKING:
    from shardwise.engine.engine import Engine
    from shardwise.engine.unit import Unit

# In whose order a piece comes and goes: a lane's, compute's, or a unit's own from forward on.
COMPUTE, GATHERS, SCATTERS, REPLICAS = "compute", "gather", "scatter", "replica"
KEPT = "kept"
# What reduces and gathers have, and give back when an exception ends a step.
_PASSING = (
    "slot", "rows", "staging", "sent", "received", "copies sent", "copies received",
)  # fmt: skip
Loan = Callable[[], None]


class Occupied(Exception):
    """Something else stands in a place."""

    def __init__(self, key: Key) -> None:
        super().__init__(f"{key[0]} of unit {key[1]!r}")
        self.key = key


class Arena:
    """One engine's block: noted, laid out, then lent from."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.block: torch.Tensor | None = None
        self.layout: Layout | None = None
        self.deviated: str | None = None  # what was not as in the step that was noted
        self._lives = Lives()
        self._sharing: dict[Key, tuple[Key, ...]] = {}
        self._steps = self._backwards = 0  # that were noted; that had ended when the last began
        self.units: dict[str, Unit] = {}

    def take(self, role: str, unit: str, nbytes: int, stream: str) -> Key:
        """A piece comes; an error, once there is a block, if it has no free place there."""
        key = self._lives.take(role, unit, nbytes, stream)
        if self.layout is None:
            return key
        size, there = self.layout.sizes.get(key), self._lives.there
        standing = next((other for other in self._sharing.get(key, ()) if other in there), None)
        if size is None or size < nbytes or standing is not None:
            self._lives.give(key)
            raise Occupied(key if standing is None else standing)
        return key

    def give(self, key: Key) -> None:
        self._lives.give(key)

    def view(self, key: Key, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A piece's memory."""
        assert self.block is not None and self.layout is not None
        start = self.layout.offsets[key]
        return self.block[start : start + numel * dtype.itemsize].view(dtype)

    def borrow(
        self, role: str, unit: str, stream: str, numel: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, Loan | None]:
        """Memory for a while, and what gives it back: of the block, or where that has no place for
        it, the allocator's.
        """
        try:
            key = self.take(role, unit, numel * dtype.itemsize, stream)
        except Occupied as error:
            self.deviate(f"{role} of unit {unit!r} is needed while {error} is there")
            return torch.empty(numel, dtype=dtype, device=self.device), None
        give = functools.partial(self.give, key)
        if self.block is None:
            return torch.empty(numel, dtype=dtype, device=self.device), give
        return self.view(key, numel, dtype), give

    def deviate(self, what: str) -> None:
        self.deviated = self.deviated or what

    def standing(self, role: str, unit: str, nbytes: int) -> Key | None:
        """What keeps a piece, of which a unit has one at most, from its place; None if nothing."""
        key = role, unit, 0
        if self.layout is None:
            return None
        if self.layout.sizes.get(key, 0) < nbytes:
            return key
        there = self._lives.there
        return next((other for other in self._sharing[key] if other in there), None)

    def forget(self) -> None:
        """An exception ended a step: what its reduces and gathers had is given back."""
        for key in [key for key in self._lives.there if key[0] in _PASSING]:
            self._lives.give(key)

    # Between steps

    def begin_step(self, engine: Engine) -> None:
        """Before a step's first gather, with no backward to come: lay out after the second step
        that trained, move out after one that deviated.
        """
        trained, self._backwards = engine.backwards > self._backwards, engine.backwards
        for unit in engine.units:
            unit.touched = False
        if self.deviated is not None:
            self._move_out(engine)
        elif self.layout is None and not torch_private.is_recording():
            self._steps += trained
            if self._steps < 2 or not trained:
                self._lives.begin_step()
            else:
                self._move_in(engine)

    def _move_in(self, engine: Engine) -> None:
        self.units = {unit.name: unit for unit in engine.units}
        layout = lay_out(self._lives.end_step())
        for unit in engine.units:
            unit.free()
        self._lives.noting = False
        self.layout, self._sharing = layout, layout.sharing()
        if self.device.type == "cuda":
            # What lanes had for themselves has its place in the block now; no other stream could
            # take it.
            torch.cuda.empty_cache()
        self.block = torch.empty(layout.nbytes, dtype=torch.uint8, device=self.device)
        for unit in engine.units:
            unit.move()

    def _move_out(self, engine: Engine) -> None:
        warnings.warn(
            f"Plan.memory='arena': a step was not as those before it ({self.deviated}); memory "
            "comes from the allocator from now on",
            stacklevel=4,
        )
        for unit in engine.units:
            unit.free()
        engine.executor.arena = None
        for unit in engine.units:
            unit.move()

    def make_room(self, unit: Unit, standing: Key) -> None:
        """A unit is needed while something stands in its place: what can be gathered again goes,
        or the unit, if nothing has seen its memory yet, moves to some of its own.
        """
        role, name, _ = standing
        self.deviate(f"unit {unit.name!r} is needed while {role} of unit {name!r} is there")
        other = self.units[name]
        if role == "full" and other is not unit and not other.is_shown:
            other.free()
        elif not unit.touched:
            unit.move(alone=True)
        else:
            raise RuntimeError(
                f"Plan.memory='arena': unit {unit.name!r} is needed at once with {role} of unit "
                f"{name!r}, as it was not in the steps before; use memory='allocator' for a model "
                "whose order changes"
            )


class Placed(Buffer):
    """A buffer whose comings and goings an arena notes; `stays`: it is a place in its block."""

    def __init__(
        self, arena: Arena, role: str, unit: str, stream: str, flat: torch.Tensor, stays: bool
    ) -> None:
        super().__init__(flat)
        self._arena, self._what, self.stays = arena, (role, unit, flat.nbytes, stream), stays
        self.allocated = not stays
        self._key = None if stays else arena.take(*self._what)

    @property
    def standing(self) -> Key | None:
        """What keeps it from being allocated now."""
        return None if self.allocated else self._arena.standing(*self._what[:3])

    @property
    def waits_for_place(self) -> bool:
        """It is a place in the block that nothing has been written to yet."""
        return self.stays and not self.allocated

    def allocate(self) -> None:
        if not self.allocated:
            self._key = self._arena.take(*self._what)
            if self.stays:
                self.allocated = True
            else:
                super().allocate()

    def release(self) -> None:
        if not self.allocated:
            return
        if self.stays:
            self.allocated = False
        else:
            super().release()
        if not self.allocated and self._key is not None:
            self._arena.give(self._key)
            self._key = None


def place(
    arena: Arena | None,
    role: str,
    unit: str,
    stream: str,
    numel: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[torch.Tensor, Buffer]:
    """Memory that comes and goes, and views that stay: in the arena's block, if it has a place for
    it; noted, while there is no block.
    """
    layout = None if arena is None else arena.layout
    room = 0 if layout is None else layout.sizes.get((role, unit, 0), 0)
    if arena is not None and room >= numel * dtype.itemsize:
        flat = arena.view((role, unit, 0), numel, dtype)
        return flat, Placed(arena, role, unit, stream, flat, stays=True)
    flat = torch.empty(numel, dtype=dtype, device=device)
    if arena is None or layout is not None:
        return flat, Buffer(flat)
    return flat, Placed(arena, role, unit, stream, flat, stays=False)
