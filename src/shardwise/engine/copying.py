"""Deep copies of sharded modules: the same units over copied modules, without communication."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.engine import torch_private
from shardwise.engine.forms import Form
from shardwise.engine.storage import Member
from shardwise.engine.unit import Unit

Copies = dict[int, nn.Module]  # by the identity of the module that was copied


def copy_module(
    module: nn.Module, units: Iterable[Unit], memo: dict[int, Any]
) -> tuple[nn.Module, Copies]:
    """A deep copy with this rank's rows of every parameter, sharded by nobody yet, and which module
    became which. The hooks of `module` have to be off.
    """
    for unit in units:
        for parameter in unit.parameters.visible:
            if isinstance(parameter.data, DTensor):
                memo[id(parameter)] = _copy_parameter(parameter)
    twin = copy.deepcopy(module, memo)
    pairs = zip(module.modules(), twin.modules(), strict=True)
    return twin, {id(ours): theirs for ours, theirs in pairs}


def _copy_parameter(parameter: nn.Parameter) -> nn.Parameter:
    """A sharded parameter with its gradient; torch's own deep copy knows no DTensors."""
    data, grad = cast(DTensor, parameter.data), parameter.grad
    with torch.no_grad():
        form = Form.of(data)
        twin = nn.Parameter(
            form.wrap(torch_private.local_of(data).clone()), requires_grad=parameter.requires_grad
        )
        if grad is not None:
            twin.grad = form.wrap(torch_private.local_of(grad).clone())
    return twin


def repeat_unit(unit: Unit, copies: Copies) -> Unit:
    """The same unit over the copied modules, whose parameters are sharded already."""
    members = []
    for member in unit.parameters.members:
        places = [(copies[id(m)], key) for m, key in member.places]
        here = places[0][0]._parameters[places[0][1]]
        assert here is not None
        shape = member.shape
        members.append(
            Member(list(member.names), places, here, member.dim, member.nested, True, shape)
        )
    modules = [copies[id(module)] for module in unit.modules]
    options = replace(unit.options, gather_ahead=None, gather_ahead_backward=None)
    return Unit(unit.name, modules, members, unit.mesh, options, unit.is_root)
