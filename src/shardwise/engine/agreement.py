"""What the ranks agree on: the Plan, the order of units, micro-batches, values."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from itertools import chain, zip_longest
from typing import Any

import torch.distributed as dist

from shardwise.engine.collectives import digest
from shardwise.engine.mesh import Mesh
from shardwise.engine.unit import Unit
from shardwise.engine.words import control_of
from shardwise.planning.plan import Plan
from shardwise.schedule.policy import Policy

_NOTHING = "nothing more"


class Agreement:
    """Keeps what the ranks have agreed on."""

    def __init__(self, policy: Policy, mesh: Mesh) -> None:
        self.policy, self.mesh = policy, mesh
        self.first = True  # no step has shown the order of backward yet
        self.first_pass = True  # units are compared as they run
        self.compared_values = False

    def check_orders(self, order: tuple[str, ...]) -> None:
        """Error on every rank of a shard group whose ranks ran their units in different orders in
        the last step.
        """
        orders = self.mesh.shard.exchange(order)
        for at, units in enumerate(zip_longest(*orders, fillvalue=_NOTHING)):
            self._check_same(units, at)

    def check_counts(self, per_replica: list[list[int]]) -> None:
        """Error on every rank when ranks that must move together run different numbers of
        micro-batches.
        """
        for replica, counts in enumerate(per_replica):
            if len(set(counts)) > 1:
                raise RuntimeError(
                    "ranks of one shard group run different numbers of micro-batches "
                    f"({self._list(counts, replica)}); they gather and scatter together, so give "
                    "each the same number (sizes may differ). Only replicas may differ, with "
                    "sync='scatter_each_reduce_last' or 'last'"
                )
        totals = [counts[0] for counts in per_replica]
        if self.policy.sync == "each" and len(set(totals)) > 1:
            raise RuntimeError(
                f"sync='each' all-reduces after every micro-batch, but replicas run {totals} of "
                "them; use sync='scatter_each_reduce_last' or 'last' for uneven work"
            )

    def check_values(self, units: Sequence[Unit]) -> None:
        """Once, before the first pass: error if ranks were given different models; error (under a
        Plan) if they train other parameters; error (under a Plan) or warning if different initial
        values. Names the first parameter that differs.
        """
        self.compared_values = True
        sums = [unit.parameters.checksums for unit in units]
        changed = None in sums
        mine = {name: value for own in sums for name, value in (own or {}).items()}
        # Names, and shapes where these ranks hold a parameter together: on a mesh of its own it may
        # have another on each.
        model = {
            member.name: member.shape if unit.mesh is self.mesh else None
            for unit in units
            for member in unit.parameters.members
        }
        trained = {
            member.name: visible.requires_grad
            for unit in units
            if self.policy.needs_equal_values
            for member, visible in zip(
                unit.parameters.members, unit.parameters.visible, strict=True
            )
        }
        mine_said = digest(model), digest(trained), None if changed else digest(mine)
        said = self.everybody(mine_said)
        if len({of_model for of_model, *_ in said}) > 1:
            self._check_models(self.everybody(model))
        if len({of_trained for _, of_trained, _ in said}) > 1:
            self._check_trained(self.everybody(trained))
        values = {of_values for *_, of_values in said}
        if None in values or len(values) <= 1:
            return
        name = _first_difference(self.everybody(mine))
        message = (
            f"ranks start from different values: {name!r} is not the same on all of them, so "
            "the sharded model is a mixture. Seed all ranks alike before building the model, or "
            "call shardwise.broadcast(model), before or after sharding"
        )
        if self.policy.needs_equal_values:
            raise RuntimeError(message)
        warnings.warn(message, stacklevel=2)

    def find_stale(self, units: Sequence[Unit]) -> None:
        """Before a step: which units that stay gathered have to be gathered anew. Writes to a
        parameter may pass every version counter by (`p.data.mul_`), and a rank without rows of it
        sees none, so each looks at its own rows and all of a shard group do as one of them must.
        """
        groups = {id(unit.mesh.shard): unit.mesh.shard for unit in units}
        for key, group in groups.items():
            here = [unit for unit in units if id(unit.mesh.shard) == key]
            for unit in here:
                unit.take_writes()
            said = group.tell([unit.changed or not unit.is_current for unit in here])
            for unit, flags in zip(here, zip(*said, strict=True), strict=True):
                unit.stale = any(flags)

    def everybody(self, value: object) -> list[Any]:
        """Every rank's value, in the order of ranks."""
        inside = self.mesh.shard.exchange(value)
        return [value for values in self.mesh.replicate.exchange(inside) for value in values]

    def tell(self, numbers: list[int]) -> list[list[int]]:
        """Every rank's numbers, as many on each: `everybody` for every step."""
        count = len(numbers)
        inside = list(chain.from_iterable(self.mesh.shard.tell(numbers)))
        per_replica = self.mesh.replicate.tell(inside)
        return [told[i : i + count] for told in per_replica for i in range(0, len(told), count)]

    def _list(self, values: Sequence[object], replica: int) -> str:
        """What each rank of a replica said, for a message."""
        first = replica * self.mesh.shard.size
        return ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values, first))

    @staticmethod
    def _check_models(models: list[dict[str, Any]]) -> None:
        """Error on every rank that names a parameter which is not the same on all of them."""
        name = _first_difference(models)
        listed = ", ".join(f"rank {r}: {m.get(name, 'none')}" for r, m in enumerate(models))
        counts = ", ".join(str(len(model)) for model in models)
        raise RuntimeError(
            f"ranks have different models: {name!r} is not of the same shape on all of them "
            f"({listed}; parameters in all: {counts}). They gather and reduce together, so build "
            "the same layers on every rank"
        )

    @staticmethod
    def _check_trained(trained: list[dict[str, bool]]) -> None:
        """Error on every rank that names a parameter which only some of them train."""
        name = _first_difference(trained)
        ranks = [rank for rank, each in enumerate(trained) if not each[name]]
        raise RuntimeError(
            f"parameter {name!r} has requires_grad=False on some ranks only ({ranks}); ranks "
            "reduce together, so freeze the same parameters on all of them"
        )

    def check_unit(self, name: str, at: int) -> None:
        """Before each gather of the first pass: error on every rank of a shard group that is about
        to gather another unit than the others, which would wait for ever or read wrong rows.
        """
        self._check_same(self.mesh.shard.exchange(name), at)

    def end_first_pass(self, order: tuple[str, ...]) -> None:
        """A rank that runs fewer units than the others has nothing more to gather."""
        self.first_pass = False
        self._check_same(self.mesh.shard.exchange(_NOTHING), len(order))

    def _check_same(self, units: Sequence[str], at: int) -> None:
        """Error that names the unit at which a shard group's ranks parted."""
        if len(set(units)) <= 1:
            return
        raise RuntimeError(
            f"ranks of one shard group ran different units as number {at + 1} of a forward pass "
            f"({self._list(units, self.mesh.replicate.rank)}); they gather together, so what was "
            "gathered is not what was asked for. Let every rank run the same modules in the same "
            "order"
        )

    def settle(
        self, ran: bool, unused: frozenset[str], ready: Sequence[str]
    ) -> tuple[str, ...] | None:
        """At a step's end: error if the Plan wants every parameter used on all ranks or none; after
        the first step the order of units to reduce in (None: keep the present one).
        """
        compares = self.policy.needs_equal_use
        mine = (ran, unused if compares else None, tuple(ready) if self.first else ())
        said = self.everybody(mine)
        orders = {order if did_run else None for did_run, _, order in said}
        order = orders.pop() if self.first and len(orders) == 1 else None
        self.first = False
        if compares:
            self._check_use([names for did_run, names, _ in said if did_run])
        return order

    @staticmethod
    def _check_use(unused: list[frozenset[str]]) -> None:
        """Error on every rank that names a parameter which only some ranks used."""
        if not unused or len(set(unused)) == 1:
            return
        everywhere = frozenset.intersection(*unused)
        name = min(frozenset.union(*unused) - everywhere)
        ranks = [i for i, names in enumerate(unused) if name in names]
        raise RuntimeError(
            f"parameter {name!r} was used on some ranks only (not on {ranks} of those that ran); "
            "let every rank use it, or allow zeros in its place with Plan.of(..., unused='zeros')"
        )


def check_plan(plan: Plan) -> None:
    """Error on every rank if ranks shard by different plans, naming the setting and who differs.
    Units come from the models, which are compared with the first pass.
    """
    control = control_of(dist.group.WORLD) if dist.is_initialized() else None
    if control is None or plan.device_mesh is not None:  # on a mesh of theirs, parts may differ
        return
    fields = [each.name for each in dataclasses.fields(plan) if each.compare]
    fields.remove("units")
    plans = control.exchange({name: getattr(plan, name) for name in fields})
    for name in fields:
        values = [each[name] for each in plans]
        usual = max(values, key=values.count)
        if any(value != usual for value in values):
            rank = next(rank for rank, value in enumerate(values) if value != usual)
            first = values.index(usual)
            raise RuntimeError(
                f"rank {rank} shards by another plan than rank {first}: Plan.{name} is "
                f"{_shorten(values[rank])} there, {_shorten(usual)} on rank {first}. Give every "
                "rank the same plan"
            )


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _first_difference(said: list[dict[str, Any]]) -> str:
    """The first name under which not everybody has the same."""
    names = sorted({name for each in said for name in each})
    return next(name for name in names if len({each.get(name, "none") for each in said}) > 1)
