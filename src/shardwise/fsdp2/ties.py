"""Weights tied across groups. torch refuses them; here they go to the lowest group that covers all
their places.

Groups are made bottom-up, so when the second place of a weight is met, the group that covers both
is usually still to come. Until then the first group keeps it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from shardwise.engine import torch_private
from shardwise.engine.storage import Member
from shardwise.engine.unit import Unit
from shardwise.fsdp2.sharding import Sharding, shardings_in

Places = list[tuple[nn.Module, str]]
_HOME = "_shardwise_home"


class Home:
    """Where an original parameter went: the call that took it, and its places there. The parameter
    knows it.
    """

    def __init__(self, sharding: Sharding, member: Member, visible: nn.Parameter) -> None:
        self.sharding, self.member = weakref.ref(sharding), member
        # A call for another module meets the one in a tie, the other in a module that both share.
        # Users copy the other, and a copy would take along all that it holds.
        member.original.__dict__[_HOME] = self
        visible.__dict__[_HOME] = weakref.ref(self)
        self.elsewhere: Places = []  # places in modules of other calls

    def tie(self, places: Places, roots: list[nn.Module]) -> None:
        """Hang the sharded parameter in these places too; a group to come will cover them. Error
        where it is their own: `roots` are inside a module that was sharded before them.
        """
        sharding, unit, at = self._find()
        inside = {module for outer in sharding.modules for module in outer.modules()}
        if any(root in inside for root in roots) and set(places) & set(self.member.places):
            name = type(roots[0]).__name__
            raise ValueError(
                f"fully_shard was called on a module that contains this {name} before and took its "
                f"parameters (here {self.member.name!r}); call it bottom-up: children first"
            )
        for module, key in places:
            torch_private.parameters_of(module)[key] = unit.parameters.visible[at]
        self.elsewhere += places

    def give_up(self) -> Member:
        """Take the parameter out of its unit, for one that covers all its places."""
        sharding, unit, at = self._find()
        pairs = zip(unit.parameters.members, unit.parameters.visible, strict=True)
        # Their rows are cut already.
        rest = [replace(member, original=visible, sharded=True) for member, visible in pairs]
        mine = rest.pop(at)
        sharding.units.remove(unit)
        sharding.homes.remove(self)
        if rest:
            sharding.units.append(Unit(unit.name, unit.modules, rest, unit.mesh, unit.options))
        return replace(mine, places=list(dict.fromkeys([*mine.places, *self.elsewhere])))

    def check(self) -> None:
        """Error, as torch's, for a weight that no group covers."""
        if self.elsewhere:
            raise ValueError(
                f"Parameter '{self.member.name}' is shared with a parameter already managed by "
                "another FSDP group, and no call of fully_shard covers all modules that have it. "
                "Call fully_shard on a module that contains them, or put them into one group with "
                "fully_shard([module_a, module_b])."
            )

    def _find(self) -> tuple[Sharding, Unit, int]:
        """The call, the unit that has the parameter now, and its number in there."""
        sharding = self.sharding()
        if sharding is not None and sharding.engine is None:
            for unit in sharding.units:
                for at, member in enumerate(unit.parameters.members):
                    if member.places == self.member.places:
                        return sharding, unit, at
        raise ValueError(
            f"parameter {self.member.name!r} is shared with a module whose forward has run "
            "already; call fully_shard on every module before the first forward"
        )


def home_of(parameter: nn.Parameter) -> Home | None:
    found: Home | weakref.ref[Home] | None = parameter.__dict__.get(_HOME)
    return found() if isinstance(found, weakref.ref) else found


def collect(roots: list[nn.Module]) -> Iterator[Member]:
    """Weights of groups inside `roots` that other modules inside share."""
    inside = {id(module) for root in roots for module in root.modules()}
    for sharding in shardings_in(*roots):
        for home in list(sharding.homes):
            places = [*home.member.places, *home.elsewhere]
            if home.elsewhere and all(id(module) in inside for module, _ in places):
                yield home.give_up()
