"""The parts that an optimizer steps: stretches, which are parameters as one plain tensor, and
parameters as they are.

Optimizers that treat every element alike may see neighbouring parameters of a unit as one flat
tensor over the unit's buffers: a handful of kernels per step, and no work per parameter. The
program sees none of it: parameters, gradients and state stay what they are, over the same memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardwise.comms.versions import local_of
from shardwise.runtime.guard import engine_of
from shardwise.sharding.forms import Form
from shardwise.sharding.gradients import Gradients
from shardwise.sharding.unit import Unit

State = dict[str, Any]
States = dict[torch.Tensor, State]
# State that is one number for the whole parameter: a plain tensor whatever the parameter is.
_NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})
# A CPU's kernels end with another arithmetic for what fills no vector. Parameters whose rows fill
# whole ones meet the same arithmetic, to the last bit, alone and side by side.
_VECTOR = 64


class Part:
    """A parameter that steps as it is, on its own gradient and state."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor  # what the optimizer steps

    def hang_gradient(self) -> bool:
        """Give the tensor its gradient; False if the parameters' own do not make one."""
        return True

    def take_state(self, public: States, own: States) -> bool:
        """Bring the state into `own`; the program may have loaded, changed or dropped any of it.
        False if the parameters' states do not make one.
        """
        own.pop(self.tensor, None)
        if self.tensor in public:
            own[self.tensor] = public[self.tensor]
        return True

    def show_state(self, own: States, public: States) -> None:
        """Let the program see what the step made, as the optimizer would have of its parameters."""
        if self.tensor in own:
            public[self.tensor] = own[self.tensor]


class Stretch(Part):
    """Parameters that step together: `tensor` is the memory of all of them."""

    def __init__(self, members: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        super().__init__(tensor)
        self.members = list(members)
        self.sources = [local_of(member) for member in members]
        pairs = zip(self.members, self.sources, strict=True)
        self._standing = [(m, source) for m, source in pairs if isinstance(m, DTensor)]
        self._forget()

    def _forget(self) -> None:
        # The state as the step has it (to look it up takes longer), as the program last saw it, by
        # parameter, and what that was made of.
        self._behind: State | None = None
        self._seen: list[State] = [{} for _ in self.members]
        self._shown: State = {}

    @property
    def unmoved(self) -> bool:
        """The parameters stand on the memory that they stood on."""
        for member, source in self._standing:  # noqa: SIM110, a generator takes twice as long
            if member._local_tensor is not source:
                return False
        return True

    def cut(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter's part of a tensor that is laid out as `self.tensor` is."""
        raise NotImplementedError

    def take_state(self, public: States, own: States) -> bool:
        states = [public.get(member) for member in self.members]
        if self._behind is not None and all(map(_unchanged, states, self._seen)):
            return True
        own.pop(self.tensor, None)
        self._forget()
        if all(state is None for state in states):
            return True
        joined = self._join([state or {} for state in states])
        if joined is None:
            return False
        own[self.tensor] = joined
        self.show_state(own, public)
        return True

    def _join(self, states: list[State]) -> State | None:
        """One state of all parameters'; None if they differ where one number serves all."""
        if any(state.keys() != states[0].keys() for state in states):
            return None
        joined: State = {}
        for key in states[0]:
            values = [_local_of(state[key]) for state in states]
            if key not in _NUMBERS and self._are_rows(values):
                joined[key] = torch.zeros_like(self.tensor, dtype=values[0].dtype)
                torch._foreach_copy_(self.cut(joined[key]), values)
            elif all(_equal(value, values[0]) for value in values):
                joined[key] = _copy(values[0])
            else:
                return None
        return joined

    def _are_rows(self, values: list[Any]) -> bool:
        return all(
            isinstance(value, torch.Tensor) and value.shape == source.shape
            for value, source in zip(values, self.sources, strict=True)
        )

    def show_state(self, own: States, public: States) -> None:
        if self._behind is None:
            self._behind = own.get(self.tensor)
        for key, value in (self._behind or {}).items():
            if self._shown.get(key, self) is value:
                continue
            self._shown[key] = value
            parts = self._wrap(key, value)
            for member, seen, part in zip(self.members, self._seen, parts, strict=True):
                seen[key] = public[member][key] = part

    def _wrap(self, key: str, value: Any) -> list[Any]:
        rows = isinstance(value, torch.Tensor) and value.shape == self.tensor.shape
        if key in _NUMBERS or not rows:
            return [value] * len(self.members)
        return [
            Form.of(member).wrap(part) if isinstance(member, DTensor) else part
            for member, part in zip(self.members, self.cut(value), strict=True)
        ]


class Alone(Stretch):
    """One sharded parameter: this rank's rows of it."""

    def __init__(self, member: torch.Tensor) -> None:
        # An alias, so that the gradient it carries is not seen on what `to_local` gives.
        super().__init__([member], local_of(member).detach())
        self._spec: Any = None  # of the last gradient, which was laid out as the parameter is

    def hang_gradient(self) -> bool:
        parameter = self.members[0]
        gradient = parameter.grad
        if gradient is not None:
            spec = getattr(gradient, "_spec", None)
            if spec is None or spec is not self._spec:
                if spec is None or spec.placements != parameter._spec.placements:  # type: ignore[attr-defined]
                    return False
                self._spec = spec
            self.tensor.grad = gradient._local_tensor  # type: ignore[attr-defined]
        return True

    def cut(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor]


class Neighbours(Stretch):
    """Several parameters of a unit that lie side by side in its master and in its gradients, where
    they are those from number `first` on.
    """

    def __init__(
        self, master: torch.Tensor, at: int, gradients: Gradients, first: int, count: int
    ) -> None:
        """In `master` they start at `at`."""
        self._gradients, self._first = gradients, first
        layout, these = gradients.layout, slice(first, first + count)
        start, size = layout.offsets[first], sum(rows.part for rows in layout.rows[these])
        super().__init__(gradients.visible[these], master[at : at + size])
        self._offsets = [offset - start for offset in layout.offsets[these]]
        self._start, self._size = start, size

    def hang_gradient(self) -> bool:
        gradients, missing = self._gradients, 0
        summed = gradients.summed
        for i, member in enumerate(self.members, self._first):
            gradient = member.grad
            if gradient is None:
                missing += 1
            elif not summed or gradient is not summed[i]:
                return False
        if 0 < missing < len(self.members):
            return False
        self.tensor.grad = None
        if not missing:
            assert gradients.flat is not None
            self.tensor.grad = gradients.flat[self._start : self._start + self._size]
        return True

    def cut(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [
            tensor[start : start + source.numel()].view(source.shape)
            for start, source in zip(self._offsets, self.sources, strict=True)
        ]

    def split(self, public: States, own: States) -> list[Part]:
        """Each parameter by itself from now on."""
        own.pop(self.tensor, None)
        self.tensor.grad = None
        for member in self.members:
            state = public.get(member, {})
            state.update({key: _copy(state[key]) for key in state.keys() & _NUMBERS})
        return [_by_itself(member) for member in self.members]


def _by_itself(parameter: torch.Tensor) -> Part:
    return Alone(parameter) if isinstance(parameter, DTensor) else Part(parameter)


def find_parts(parameters: Sequence[torch.Tensor]) -> list[Part]:
    """What to step for the parameters of one group: stretches of those that shardwise shards, the
    longest that lie side by side, and all others as they are.
    """
    members = {id(parameter): parameter for parameter in parameters}
    engines = {id(engine): engine for engine in map(engine_of, parameters) if engine is not None}
    found: list[Part] = []
    for unit in (unit for engine in engines.values() for unit in engine.units):
        gradients = unit.gradients
        if gradients is None:
            continue
        for at, first, count in _runs(unit, gradients, members):
            if count > 1:
                found.append(Neighbours(unit.parameters.master, at, gradients, first, count))
            else:
                found.append(_by_itself(gradients.visible[first]))
            for parameter in gradients.visible[first : first + count]:
                members.pop(id(parameter), None)
    return found + [Part(parameter) for parameter in members.values()]


def _runs(
    unit: Unit, gradients: Gradients, members: dict[int, torch.Tensor]
) -> list[tuple[int, int, int]]:
    """Those of a unit's trained parameters that are members and lie side by side in the master:
    where they start there, the number of the first among the gradients, how many they are.
    """
    visible, layout = unit.parameters.visible, unit.parameters.layout
    starts = dict(zip(map(id, visible), layout.offsets, strict=True))
    runs: list[tuple[int, int, int]] = []
    end = -1  # where the next one would have to start
    for i, (parameter, rows) in enumerate(
        zip(gradients.visible, gradients.layout.rows, strict=True)
    ):
        if id(parameter) not in members or i in gradients.echoes:
            end = -1
            continue
        start = starts[id(parameter)]
        fills = parameter.device.type != "cpu" or local_of(parameter).numel() % _VECTOR == 0
        if start == end and fills:
            at, first, count = runs[-1]
            runs[-1] = at, first, count + 1
        else:
            runs.append((start, i, 1))
        end = start + rows.part if fills else -1
    return runs


def _unchanged(state: State | None, seen: State) -> bool:
    if state is None or len(state) != len(seen):
        return False
    for key, value in state.items():  # noqa: SIM110, a generator takes twice as long
        if seen.get(key, seen) is not value:
            return False
    return True


def _local_of(value: Any) -> Any:
    return local_of(value) if isinstance(value, torch.Tensor) else value


def _equal(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        return value.shape == other.shape and torch.equal(value, other)
    return type(value) is type(other) and bool(value == other)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
