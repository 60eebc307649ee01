"""Weights tied across groups. torch refuses them; here they go to the lowest group that covers all
their places.

Groups are made bottom-up, so when the second place of a weight is met, the group that covers both
is usually still to come. Until then the first group keeps it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import replace

from torch import nn

from shardwise.engine.storage import Member
from shardwise.engine.unit import Unit
from shardwise.fsdp2.sharding import Sharding, shardings_in

Places = list[tuple[nn.Module, str]]


class Home:
    """Where an original parameter went: the call that took it, and its places there."""

    def __init__(self, sharding: Sharding, member: Member) -> None:
        self.sharding, self.member = weakref.ref(sharding), member
        self.elsewhere: Places = []  # places outside the call's modules

    def is_inside(self, roots: Iterable[nn.Module]) -> bool:
        """Whether all places known so far are in `roots`."""
        inside = {id(module) for root in roots for module in root.modules()}
        return all(id(m) in inside for m, _ in (*self.member.places, *self.elsewhere))

    def tie(self, places: Places) -> None:
        """Hang the sharded parameter in these places too; a group to come will cover them."""
        _, unit, at = self._find()
        for module, key in places:
            module._parameters[key] = unit.parameters.visible[at]
        self.elsewhere += places

    def give_up(self, places: Places = []) -> Member:  # noqa: B006
        """Take the parameter out of its unit, for one that covers `places` too."""
        sharding, unit, at = self._find()
        pairs = zip(unit.parameters.members, unit.parameters.visible, strict=True)
        # Their rows are cut already.
        rest = [replace(member, original=visible, sharded=True) for member, visible in pairs]
        mine = rest.pop(at)
        sharding.units.remove(unit)
        if rest:
            smaller = Unit(unit.name, unit.modules, rest, unit.mesh, unit.options)
            sharding.units.append(smaller)
        return replace(mine, places=[*mine.places, *self.elsewhere, *places])

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
    home = parameter.__dict__.get("_shardwise_home")
    return home if isinstance(home, Home) else None


def note_homes(sharding: Sharding) -> None:
    """Let the original parameters know where they went."""
    for unit in sharding.units:
        for member in unit.parameters.members:
            home = Home(sharding, member)
            sharding.homes.append(home)
            member.original.__dict__["_shardwise_home"] = home


def collect(roots: list[nn.Module]) -> Iterator[Member]:
    """Weights that groups inside `roots` share with each other."""
    for sharding in shardings_in(*roots):
        for home in list(sharding.homes):
            if home.elsewhere and home.is_inside(roots):
                sharding.homes.remove(home)
                yield home.give_up()
