"""A deep copy of a sharded module: its own shards, hooks and settings, no communication."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.comms import versions
from shardwise.compat.state import State, states_in
from shardwise.sharding.forms import Form
from shardwise.sharding.storage import Member
from shardwise.sharding.unit import Unit


def copy_sharded(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copy `module` without its sharding, then give the copy the same.

    The copy starts as a model that has not run: its first forward forms an engine of its own.
    """
    states = list(dict.fromkeys(state for _, state in states_in(module)))
    classes = {id(m): type(m) for state in states for m in state.modules}
    for state in states:
        for unit in state.units:
            if unit.prepared:
                unit.free()
        state.detach()
        for m in state.modules:
            m.__class__ = type(m).__mro__[3]
    for state in states:
        for unit in state.units:
            for parameter in unit.parameters.visible:
                memo[id(parameter)] = _copy_parameter(parameter)
    try:
        twin = copy.deepcopy(module, memo)
    finally:
        for state in states:
            state.attach()
            for m in state.modules:
                m.__class__ = classes[id(m)]
    copies = {
        id(ours): theirs for ours, theirs in zip(module.modules(), twin.modules(), strict=True)
    }
    for state in states:
        _repeat(state, copies)
        for m in state.modules:
            copies[id(m)].__class__ = classes[id(m)]
    return twin


def _copy_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """A sharded parameter with its gradient; torch's own deep copy knows no DTensors."""
    data, grad = cast(DTensor, parameter.data), parameter.grad
    with torch.no_grad():
        form = Form.of(data)
        twin = nn.Parameter(
            form.wrap(versions.local_of(data).clone()), requires_grad=parameter.requires_grad
        )
        if grad is not None:
            twin.grad = form.wrap(versions.local_of(grad).clone())
    return twin


def _repeat(state: State, copies: dict[int, nn.Module]) -> None:
    """The same call's state over the copied modules, whose parameters are sharded already."""
    modules = [copies[id(module)] for module in state.modules]
    units = []
    for unit in state.units:
        members = []
        for member in unit.parameters.members:
            places = [(copies[id(m)], key) for m, key in member.places]
            here = places[0][0]._parameters[places[0][1]]
            assert here is not None
            shape = member.shape
            members.append(
                Member(list(member.names), places, here, member.dim, member.nested, True, shape)
            )
        options = replace(unit.options, gather_ahead=None, gather_ahead_backward=None)
        units.append(Unit(unit.name, modules, members, unit.mesh, options))
    State(modules, units, state.mesh, state.precision, state.auto_keep)
