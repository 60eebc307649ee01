"""Weights tied across groups. torch refuses them; here they go to the lowest group that covers all
their places.

Groups are made bottom-up, so when the second place of a weight is met, the group that covers both
is usually still to come. Until then the first group keeps it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator

from torch import nn

from shardwise.engine.storage import Member
from shardwise.engine.unit import Unit
from shardwise.fsdp2.state import State, states_in

Places = list[tuple[nn.Module, str]]


class Home:
    """Where an original parameter went."""

    def __init__(self, unit: Unit, state: State, member: Member) -> None:
        self.unit, self.state, self.member = weakref.ref(unit), weakref.ref(state), member
        self.elsewhere: Places = []  # places outside the unit's modules

    def is_inside(self, roots: Iterable[nn.Module]) -> bool:
        """Whether all places known so far are in `roots`."""
        inside = {id(module) for root in roots for module in root.modules()}
        return all(id(m) in inside for m, _ in (*self.member.places, *self.elsewhere))

    def tie(self, places: Places) -> None:
        """Hang the sharded parameter in these places too; a group to come will cover them."""
        unit = self._find_unit()
        visible = unit.parameters.visible[unit.parameters.members.index(self.member)]
        for module, key in places:
            module._parameters[key] = visible
        self.elsewhere += places

    def give_up(self, places: Places = []) -> Member:  # noqa: B006
        """Take the parameter out of its unit, for one that covers `places` too."""
        unit, state = self._find_unit(), self.state()
        assert state is not None
        members, visible = unit.parameters.members, unit.parameters.visible
        at = members.index(self.member)
        state.units.remove(unit)
        rest = [
            _again(member, parameter, member.places)
            for i, (member, parameter) in enumerate(zip(members, visible, strict=True))
            if i != at
        ]
        if rest:
            smaller = Unit(unit.name, unit.modules, rest, unit.mesh, unit.options)
            state.units.append(smaller)
            _move_homes(unit, smaller, state)
        return _again(self.member, visible[at], [*self.member.places, *self.elsewhere, *places])

    def check(self) -> None:
        """Error, as torch's, for a weight that no group covers."""
        if self.elsewhere:
            raise ValueError(
                f"Parameter '{self.member.name}' is shared with a parameter already managed by "
                "another FSDP group, and no call of fully_shard covers all modules that have it. "
                "Call fully_shard on a module that contains them, or put them into one group with "
                "fully_shard([module_a, module_b])."
            )

    def _find_unit(self) -> Unit:
        unit, state = self.unit(), self.state()
        if unit is None or state is None or state.engine is not None:
            raise ValueError(
                f"parameter {self.member.name!r} is shared with a module whose forward has run "
                "already; call fully_shard on every module before the first forward"
            )
        return unit


def home_of(parameter: nn.Parameter) -> Home | None:
    home = parameter.__dict__.get("_shardwise_home")
    return home if isinstance(home, Home) else None


def note_homes(unit: Unit, state: State) -> None:
    """Let the original parameters know where they went."""
    state.homes += [Home(unit, state, member) for member in unit.parameters.members]
    for home in state.homes:
        home.member.original.__dict__["_shardwise_home"] = home


def collect(roots: list[nn.Module]) -> Iterator[Member]:
    """Weights that groups inside `roots` share with each other."""
    states = dict.fromkeys(state for root in roots for _, state in states_in(root))
    for state in states:
        for home in list(state.homes):
            if home.elsewhere and home.is_inside(roots):
                state.homes.remove(home)
                yield home.give_up()


def _again(member: Member, visible: nn.Parameter, places: Places) -> Member:
    """The member for another unit: its rows are cut already."""
    return Member(
        member.names, places, visible, member.dim, member.nested, sharded=True, shape=member.shape
    )


def _move_homes(old: Unit, new: Unit, state: State) -> None:
    """The rest of a unit lives in another one now; ties that it waits for stay."""
    for home in state.homes:
        if home.unit() is old:
            kept = [m for m in new.parameters.members if m.places == home.member.places]
            if kept:
                home.unit, home.member = weakref.ref(new), kept[0]
