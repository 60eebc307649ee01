"""An optimizer on flat local buffers: a handful of kernels per step instead of DTensor dispatch per
parameter.

Works for optimizers that treat every element alike (Adam, SGD and their kin). Each stretch of a
unit's master buffer whose parameters share a param group is one flat parameter, a `Segment`; the
state it grows is flat too, and `state_dict` cuts it back into what the plain optimizer would have
given, so the two are interchangeable.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardwise.runtime.api import engine_of_parameter
from shardwise.runtime.local_step import ELEMENTWISE
from shardwise.sharding.gradients import Gradients
from shardwise.sharding.unit import Unit


class Segment:
    """Neighbouring parameters of one unit as one flat parameter over the unit's master buffer."""

    def __init__(self, unit: Unit, gradients: Gradients, first: int, count: int) -> None:
        self.unit, self.gradients, self.first, self.count = unit, gradients, first, count
        layout = gradients.layout
        start = layout.offsets[first]
        stop = start + sum(rows.part for rows in layout.rows[first : first + count])
        at = _master_offset(unit, gradients.visible[first])
        self.start = start
        self.flat = nn.Parameter(unit.parameters.master[at : at + stop - start])
        self.flat.__dict__.update(_shardwise_engine=gradients.visible[first]._shardwise_engine)  # type: ignore[attr-defined]
        with gradients.buffer.present():
            self.gradient = gradients.flat[start:stop]

    @property
    def visible(self) -> list[nn.Parameter]:
        return self.gradients.visible[self.first : self.first + self.count]

    def split(self, at: int) -> list[Segment]:
        """The same stretch cut before and after its parameter number `at`."""
        cuts = [(0, at), (at, 1), (at + 1, self.count - at - 1)]
        return [
            Segment(self.unit, self.gradients, self.first + start, count)
            for start, count in cuts
            if count
        ]

    def rows_of(self, i: int, flat_state: torch.Tensor) -> torch.Tensor:
        """The rows of the i-th parameter in a state tensor of this segment, as the plain optimizer
        would hold them.
        """
        index = self.first + i
        rows, mesh = self.gradients.layout.rows[index], self.unit.parameters.mesh
        start = self.gradients.layout.offsets[index] - self.start
        shape = rows.local_shape(mesh.shard.rank)
        local = flat_state[start : start + torch.Size(shape).numel()].view(shape)
        if self.unit.options.plain:
            return local
        return self.gradients.members[index].form(rows, mesh).wrap(local)


class LocalOptimizer(torch.optim.Optimizer):
    """`local(optimizer)`: the same optimizer on flat buffers."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if not isinstance(optimizer, ELEMENTWISE):
            raise TypeError(
                f"sw.local takes optimizers that treat every element alike "
                f"({', '.join(kind.__name__ for kind in ELEMENTWISE)}), got "
                f"{type(optimizer).__name__}; "
                "use it directly: it works on the sharded parameters"
            )
        self._indices: dict[int, int] = {}
        self._plain_groups = [list(group["params"]) for group in optimizer.param_groups]
        for parameters in self._plain_groups:
            for parameter in parameters:
                self._indices[id(parameter)] = len(self._indices)
        everything = [p for parameters in self._plain_groups for p in parameters]
        self._engines = list({id(e): e for e in map(engine_of_parameter, everything)}.values())
        self._known_layout = self._layout()
        self.segments = [_find_segments(group) for group in self._plain_groups]
        groups = [
            {**group, "params": [segment.flat for segment in segments]}
            for group, segments in zip(optimizer.param_groups, self.segments, strict=True)
        ]
        self.inner = type(optimizer)(groups, **_constructor_arguments(optimizer))
        super().__init__(self.inner.param_groups, optimizer.defaults)
        self.state = self.inner.state
        if optimizer.state:
            self.load_state_dict(optimizer.state_dict())

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Hang the flat gradients on the flat parameters and step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._follow_layout()
        self._split(lambda parameter: parameter.grad is None)
        for segments in self.segments:
            for segment in segments:
                segment.flat.grad = None if segment.visible[0].grad is None else segment.gradient
        self.inner.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the visible parameters' gradients; their memory goes with the next forward."""
        for segments in self.segments:
            for segment in segments:
                segment.flat.grad = None
        for parameters in self._plain_groups:
            for parameter in parameters:
                if set_to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.zero_()

    def _follow_layout(self) -> None:
        """Parameters were frozen or thawed: cut the segments anew and carry the state over."""
        layout = self._layout()
        if layout == self._known_layout:
            return
        saved = self.state_dict()
        self.state.clear()
        self.segments = [_find_segments(parameters) for parameters in self._plain_groups]
        for group, segments in zip(self.inner.param_groups, self.segments, strict=True):
            group["params"] = [segment.flat for segment in segments]
        self.load_state_dict(saved)
        self._known_layout = layout

    def _layout(self) -> list[int]:
        return [engine.relayouts for engine in self._engines]

    def _split(self, lacks: Callable[[nn.Parameter], bool]) -> None:
        """Parameters that lack what their neighbours have (a gradient, a state) must not be stepped
        with them: each gets a segment of its own, with its part of the state.
        """
        for group, segments in zip(self.inner.param_groups, self.segments, strict=True):
            i = 0
            while i < len(segments):
                lacking = [lacks(parameter) for parameter in segments[i].visible]
                if any(lacking) and not all(lacking):
                    segments[i : i + 1] = self._cut(segments[i], lacking.index(True))
                    group["params"] = [segment.flat for segment in segments]
                i += 1

    def _cut(self, segment: Segment, at: int) -> list[Segment]:
        """The segment's parameter number `at`, what lies before and after it, and their state."""
        parts = segment.split(at)
        state = self.state.pop(segment.flat, None)
        for part in parts:
            if state is not None:
                start = part.start - segment.start
                self.state[part.flat] = {
                    key: value[start : start + part.flat.numel()].clone()
                    if _is_flat(value, segment.flat)
                    else _copy(value)
                    for key, value in state.items()
                }
        return parts

    def state_dict(self) -> dict[str, Any]:
        """What the plain optimizer would give: state by parameter, sharded parameters' state as
        DTensors.
        """
        state: dict[int, dict[str, Any]] = {}
        for segments in self.segments:
            for segment in segments:
                for i, parameter in enumerate(segment.visible):
                    if segment.flat in self.state:
                        state[self._indices[id(parameter)]] = {
                            key: segment.rows_of(i, value)
                            if _is_flat(value, segment.flat)
                            else _copy(value)
                            for key, value in self.state[segment.flat].items()
                        }
        groups = [
            {
                **{key: value for key, value in group.items() if key != "params"},
                "params": [self._indices[id(parameter)] for parameter in parameters],
            }
            for group, parameters in zip(self.inner.param_groups, self._plain_groups, strict=True)
        ]
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse of `state_dict`; takes a plain optimizer's as well."""
        counts = [len(group["params"]) for group in state_dict["param_groups"]]
        expected = [len(parameters) for parameters in self._plain_groups]
        if counts != expected:
            raise ValueError(
                f"the optimizer state has param groups of {counts} parameters, expected {expected}"
            )
        for group, saved in zip(self.inner.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})
        self._split(lambda parameter: self._indices[id(parameter)] not in state_dict["state"])
        for segments in self.segments:
            for segment in segments:
                for i, parameter in enumerate(segment.visible):
                    saved = state_dict["state"].get(self._indices[id(parameter)])
                    if saved is not None:
                        self._load_one(segment, i, saved)

    def _load_one(self, segment: Segment, i: int, saved: dict[str, Any]) -> None:
        state = self.state[segment.flat]
        shape = segment.visible[i].shape
        for key, value in saved.items():
            # torch's optimizers count steps in a 0-d tensor, like a 0-d parameter's own state.
            if isinstance(value, torch.Tensor) and value.shape == shape and key != "step":
                if key not in state:
                    state[key] = torch.zeros_like(segment.flat, dtype=value.dtype)
                target = segment.rows_of(i, state[key])
                target.copy_(value)
            else:
                state[key] = _copy(value)


def local(optimizer: torch.optim.Optimizer) -> LocalOptimizer:
    """Run `optimizer`, built on a sharded model's parameters, on the flat local buffers instead."""
    return LocalOptimizer(optimizer)


def _find_segments(parameters: list[nn.Parameter]) -> list[Segment]:
    """Cut each unit's trainable parameters into stretches that belong to this param group and lie
    side by side.
    """
    members = {id(parameter) for parameter in parameters}
    units: dict[int, Unit] = {}
    for parameter in parameters:
        engine = engine_of_parameter(parameter)
        for unit in engine.units:
            units[id(unit)] = unit
    segments: list[Segment] = []
    for unit in units.values():
        gradients = unit.gradients
        if gradients is None:
            continue
        offset_of = {
            id(visible): (offset, offset + rows.part)
            for visible, offset, rows in zip(
                unit.parameters.visible,
                unit.parameters.layout.offsets,
                unit.parameters.layout.rows,
                strict=True,
            )
        }
        first, end = None, -1
        for i, visible in enumerate(gradients.visible):
            start, stop = offset_of[id(visible)]
            if first is not None and (id(visible) not in members or start != end):
                segments.append(Segment(unit, gradients, first, i - first))
                first = None
            if id(visible) in members:
                first, end = (i if first is None else first), stop
        if first is not None:
            segments.append(Segment(unit, gradients, first, len(gradients.visible) - first))
    return segments


def _master_offset(unit: Unit, visible: nn.Parameter) -> int:
    pairs = zip(unit.parameters.visible, unit.parameters.layout.offsets, strict=True)
    return next(offset for parameter, offset in pairs if parameter is visible)


def _constructor_arguments(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The defaults that this optimizer's constructor takes (some, like AdamW, keep more than they
    take).
    """
    accepted = inspect.signature(type(optimizer).__init__).parameters
    return {key: value for key, value in optimizer.defaults.items() if key in accepted}


def _is_flat(value: Any, flat: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 1 and value.numel() == flat.numel()


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
