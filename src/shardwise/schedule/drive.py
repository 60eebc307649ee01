"""A step without a model: the moments in the order in which a model's parts would call them.

The engine hears of them from hooks. Whoever predicts calls these two instead, and says between
them what a part costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic

from shardwise.schedule.moments import Schedule, U


@dataclass(frozen=True)
class Part(Generic[U]):
    """A part of a model that runs at once, with the units whose parameters it needs."""

    units: tuple[U, ...]
    lacking: tuple[U, ...] = ()  # of these units, some trained parameter gets no gradient
    checkpointed: bool = False
    has_backward: bool = True  # something in it, or before it, is trained


def settle(schedule: Schedule[U], parts: Sequence[Part[U]], agreed: bool = True) -> None:
    """Let the schedule know what a first step would have shown it. `agreed`: every rank ran one, so
    that reduces follow the order of that backward.
    """
    roots = [unit for unit in schedule.units if unit.is_root]
    inner = [[unit for unit in part.units if not unit.is_root] for part in parts]
    first, _ = _uses(parts)
    forward = [unit for i, units in enumerate(inner) for unit in units if first[unit] == i]
    schedule.forward_order.expected = roots + forward
    backward, ready = list(roots), []
    ended = _ended(schedule, parts)
    for i in _backward(parts):
        backward += inner[i] * (2 if parts[i].checkpointed else 1)
        ready += [unit.name for unit in ended[i]]
    schedule.backward_order.expected = backward
    if agreed:
        schedule.reduce_in(ready)


def run_forward(
    schedule: Schedule[U], parts: Sequence[Part[U]], compute: Callable[[int], None]
) -> None:
    roots = [unit for unit in schedule.units if unit.is_root]
    first, last = _uses(parts)
    schedule.forward_order.begin()
    for unit in roots:
        schedule.before_forward(unit)
    for i, part in enumerate(parts):
        for unit in part.units:
            if not unit.is_root and first[unit] == i:
                schedule.before_forward(unit)
        compute(i)
        for unit in part.units:
            if not unit.is_root and last[unit] == i:
                schedule.after_forward(unit)
    for unit in roots:
        schedule.after_forward(unit)
    schedule.end_forward()


def run_backward(
    schedule: Schedule[U], parts: Sequence[Part[U]], compute: Callable[[int], None]
) -> None:
    schedule.open_backward()
    for unit in schedule.units:
        if unit.is_root:
            schedule.before_backward(unit)
    ended = _ended(schedule, parts)
    for i in _backward(parts):
        mine = [unit for unit in parts[i].units if not unit.is_root]
        for unit in mine:
            schedule.before_backward(unit)
        if parts[i].checkpointed:
            for unit in mine:
                schedule.before_forward(unit, recomputes=True)
        compute(i)
        for unit in ended[i]:
            schedule.after_backward(unit)
    schedule.end_backward()
    schedule.complete_units()
    schedule.close_backward()


def _backward(parts: Sequence[Part[U]]) -> list[int]:
    """The parts that have a backward, in its order."""
    return [i for i in reversed(range(len(parts))) if parts[i].has_backward]


def _ended(schedule: Schedule[U], parts: Sequence[Part[U]]) -> list[list[U]]:
    """For each part, the units whose backward is over with it: no earlier part needs them, and
    either all their gradients are complete, or those of their inputs are, where that is watched.
    """
    before: set[U] = set()
    watched = False
    ended = []
    for part in parts:
        ended.append(
            [
                unit
                for unit in part.units
                if unit not in before
                and (
                    unit not in part.lacking
                    or (watched and not unit.is_root and unit.module_count == 1)
                )
            ]
        )
        if part.has_backward:
            before.update(part.units)
            watched = schedule.policy.frees_in_pass
    return ended


def _uses(parts: Sequence[Part[U]]) -> tuple[dict[U, int], dict[U, int]]:
    """The first and the last part, in forward order, of each unit."""
    first: dict[U, int] = {}
    last: dict[U, int] = {}
    for i, part in enumerate(parts):
        for unit in part.units:
            first.setdefault(unit, i)
            last[unit] = i
    return first, last
