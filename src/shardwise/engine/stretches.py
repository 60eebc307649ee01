"""What an optimizer steps: stretches, which are parameters as one plain tensor, and parameters as
they are.

Optimizers that treat every element alike may see neighbouring parameters of a unit as one flat
tensor over the unit's buffers: a handful of kernels per step, and no work per parameter. The
program sees none of it: parameters, gradients and state stay what they are, over the same memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardwise.engine.checks import (
    engine_of,
)
from shardwise.engine.forms import Form
from shardwise.engine.gradients import Gradients
from shardwise.engine.numbers import Numbers, is_number
from shardwise.engine.torch_private import local_of
from shardwise.engine.unit import Unit

State = dict[str, Any]
States = dict[torch.Tensor, State]
# A CPU's kernels end with another arithmetic for what fills no vector. Parameters whose rows fill
# whole ones meet the same arithmetic, to the last bit, alone and side by side.
_VECTOR = 64


class Stretch:
    """Parameters that step together: `tensor` is the memory of all of them."""

    def __init__(self, members: Sequence[torch.Tensor], tensor: torch.Tensor) -> None:
        # An alias, so that the gradient it carries is not seen on what `to_local` gives.
        self.members, self.tensor = list(members), tensor.detach()
        self.sources = [local_of(member) for member in members]
        pairs = zip(self.members, self.sources, strict=True)
        self._standing = [(m, source) for m, source in pairs if isinstance(m, DTensor)]
        self._public: States = {}  # the optimizer's own, in the last step
        self._forget()

    def _forget(self) -> None:
        self.state = FlatState(self)
        self._seen: list[State] = [{} for _ in self.members]  # what the program last saw of it

    @property
    def unmoved(self) -> bool:
        """The parameters stand on the memory that they stood on."""
        for member, source in self._standing:  # noqa: SIM110, a generator takes twice as long
            if member._local_tensor is not source:
                return False
        return True

    def with_gradient(self) -> torch.Tensor | None:
        """`tensor` with this step's gradient, until the step is done; None if the parameters'
        gradients do not make one.
        """
        raise NotImplementedError

    def take_state(self, public: States) -> bool:
        """Take over what the program loaded, changed or dropped of the state since the last step.
        False if the parameters' states do not make one.
        """
        self._public = public
        states = [public.get(member) for member in self.members]
        if all(map(_unchanged, states, self._seen)):
            return True
        self._forget()
        return not any(states) or self._join([state or {} for state in states])

    def _join(self, states: list[State]) -> bool:
        """Make `state` of all parameters' states; False if they do not go together."""
        raise NotImplementedError

    def cut_state(self, key: str, value: Any) -> tuple[Any, list[Any]]:
        """A value of the state as the optimizer works on it, and what each parameter has of it."""
        raise NotImplementedError

    def show(self, key: str, parts: Sequence[Any]) -> None:
        for member, seen, part in zip(self.members, self._seen, parts, strict=True):
            seen[key] = self._public[member][key] = part


class FlatState(dict[str, Any]):
    """The state of a stretch. What an optimizer puts in, the program sees at once, as the state of
    each parameter.
    """

    def __init__(self, stretch: Stretch) -> None:
        super().__init__()
        self._stretch = weakref.proxy(stretch)

    def __setitem__(self, key: str, value: Any) -> None:
        if self.get(key, self) is not value:
            own, parts = self._stretch.cut_state(key, value)
            super().__setitem__(key, own)
            self._stretch.show(key, parts)


class Alone(Stretch):
    """One sharded parameter: this rank's rows of it. It steps on the very state that the program
    sees.
    """

    def __init__(self, member: torch.Tensor) -> None:
        super().__init__([member], local_of(member))
        self._spec: Any = None  # of the last gradient, which was laid out as the parameter is

    def with_gradient(self) -> torch.Tensor | None:
        parameter = self.members[0]
        tensor, gradient = self.tensor, parameter.grad
        if gradient is not None:
            spec = getattr(gradient, "_spec", None)
            if spec is None or spec is not self._spec:
                if spec is None or spec.placements != parameter._spec.placements:  # type: ignore[attr-defined]
                    return None
                self._spec = spec
            tensor.grad = gradient._local_tensor  # type: ignore[attr-defined]
        return tensor

    def _join(self, states: list[State]) -> bool:
        (state,) = states
        if not all(_fits(key, value, self.members[0]) for key, value in state.items()):
            return False
        self.state.update({key: _local_of(value) for key, value in state.items()})
        self._seen = [dict(state)]
        return True

    def cut_state(self, key: str, value: Any) -> tuple[Any, list[Any]]:
        if is_number(key, value):
            return value, [value]
        return value, _wrap(self.members, [value])


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
        self._place = slice(start, start + size)
        self._offsets = [offset - start for offset in layout.offsets[these]]
        self.numbers: dict[str, Numbers] = {}
        self.group: Group  # a weak reference
        super().__init__(gradients.visible[these], master[at : at + size])

    def _forget(self) -> None:
        super()._forget()
        for numbers in self.numbers.values():
            numbers.remove(self)
        self.numbers = {}

    def with_gradient(self) -> torch.Tensor | None:
        summed, flat, missing = self._gradients.summed, self._gradients.flat, 0
        own = flat is not None
        for i, member in enumerate(self.members, self._first):
            gradient = member.grad
            if gradient is None:
                missing += 1
            elif own and gradient is not summed[i]:
                own = False
        tensor = self.tensor
        if missing:
            return tensor if missing == len(self.members) else None
        tensor.grad = flat[self._place] if own and flat is not None else self._gathered()
        return tensor if tensor.grad is not None else None

    def _gathered(self) -> torch.Tensor | None:
        """A copy of gradients that the program made."""
        gradients: list[Any] = [member.grad for member in self.members]
        for gradient, member in zip(gradients, self.members, strict=True):
            if gradient.dtype != member.dtype or not _is_laid_out_as(gradient, member):
                return None
        flat = torch.zeros_like(self.tensor)
        torch._foreach_copy_(self._cut(flat), list(map(local_of, gradients)))
        return flat

    def _join(self, states: list[State]) -> bool:
        joined: State = {}
        if any(state.keys() != states[0].keys() for state in states):
            return False
        for key, first in states[0].items():
            values = [state[key] for state in states]
            if is_number(key, first):
                if not all(_equal(value, first) for value in values):
                    return False
                joined[key] = first
                continue
            dtype = first.dtype
            for value, member in zip(values, self.members, strict=True):
                if not _fits(key, value, member) or value.dtype != dtype:
                    return False
            joined[key] = torch.zeros_like(self.tensor, dtype=dtype)
            torch._foreach_copy_(self._cut(joined[key]), list(map(local_of, values)))
        for key, value in joined.items():
            self.state[key] = value
        return True

    def cut_state(self, key: str, value: Any) -> tuple[Any, list[Any]]:
        if not isinstance(value, torch.Tensor):
            return value, [value] * len(self.members)
        if is_number(key, value):
            self.numbers[key] = self.group.make_numbers(key, value)
            return self.numbers[key].add(self, value)
        return value, _wrap(self.members, self._cut(value))

    def _cut(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter's part of a tensor that is laid out as `self.tensor` is."""
        return [
            tensor[start : start + source.numel()].view(source.shape)
            for start, source in zip(self._offsets, self.sources, strict=True)
        ]

    def split(self) -> list[Stretch]:
        """Each parameter by itself from now on, on the state that it has."""
        self._forget()
        return [Alone(member) for member in self.members]


class Group:
    """The parameters of one group of an optimizer, as they step: stretches of those that shardwise
    shards, the longest that lie side by side, and all others as they are.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.stretches, self._others = find_stretches(parameters)
        self._numbers: list[Numbers] = []
        self._made: dict[Any, Numbers] = {}  # in this step
        for stretch in self.stretches:
            if isinstance(stretch, Neighbours):
                stretch.group = weakref.proxy(self)

    def prepare(self, public: States, states: States) -> tuple[list[torch.Tensor], list[Any]]:
        """The flat tensors to step, with their gradients, and parameters to step as they are. Where
        the state of the former is goes into `states`.

        Neighbours that no longer go together, because some have no gradient or another state, part
        for good.
        """
        self._made.clear()
        for numbers in self._numbers:
            for apart in numbers.follow():
                at = self.stretches.index(apart)
                self.stretches[at : at + 1] = apart.split()
        flat: list[torch.Tensor] = []
        as_they_are = list(self._others)
        at = 0
        while at < len(self.stretches):
            stretch = self.stretches[at]
            tensor = stretch.with_gradient()
            fits = tensor is not None and (tensor.grad is None or stretch.take_state(public))
            if not fits and isinstance(stretch, Neighbours):
                self.stretches[at : at + 1] = stretch.split()
                continue
            at += 1
            if tensor is None or not fits:
                as_they_are += stretch.members
            elif tensor.grad is not None:
                flat.append(tensor)
                states[tensor] = stretch.state
        return flat, as_they_are

    def finish(self) -> None:
        """Let go of the gradients, and let the program see the numbers that the step made."""
        for stretch in self.stretches:
            stretch.tensor.grad = None
        neighbours = [s for s in self.stretches if isinstance(s, Neighbours)]
        found = {id(n): n for stretch in neighbours for n in stretch.numbers.values()}
        self._numbers = list(found.values())
        for numbers in self._numbers:
            numbers.show()

    def doubt(self) -> None:
        """Somebody else did a step: look at the numbers again."""
        for numbers in self._numbers:
            numbers.doubt()

    def make_numbers(self, key: str, like: torch.Tensor) -> Numbers:
        """For one of the stretches whose state begins in this step."""
        kind = key, like.dtype, like.device
        if kind not in self._made:
            stretches = [s for s in self.stretches if isinstance(s, Neighbours)]
            self._made[kind] = Numbers(like, stretches)
        return self._made[kind]


def find_stretches(
    parameters: Sequence[torch.Tensor],
) -> tuple[list[Stretch], list[torch.Tensor]]:
    members = {id(parameter): parameter for parameter in parameters}
    engines = {id(engine): engine for engine in map(engine_of, parameters) if engine is not None}
    found: list[Stretch] = []
    for unit in (unit for engine in engines.values() for unit in engine.units):
        gradients = unit.gradients
        if gradients is None:
            continue
        for at, first, count in _runs(unit, gradients, members):
            these = gradients.visible[first : first + count]
            if count > 1:
                found.append(Neighbours(unit.parameters.master, at, gradients, first, count))
            elif isinstance(these[0], DTensor):
                found.append(Alone(these[0]))
            else:
                continue
            for parameter in these:
                members.pop(id(parameter), None)
    return found, list(members.values())


def _runs(
    unit: Unit, gradients: Gradients, members: dict[int, torch.Tensor]
) -> list[tuple[int, int, int]]:
    """Those of a unit's trained parameters that are members and lie side by side in the master:
    where they start there, the number of the first among the gradients, how many they are.
    """
    p = unit.parameters
    places = zip(p.visible, p.layout.offsets, strict=True)
    starts = {id(each): at for i, (each, at) in enumerate(places) if i not in p.echoes}
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
    if not state or len(state) != len(seen):
        return not state and not seen
    for key, value in state.items():  # noqa: SIM110, a generator takes twice as long
        if seen.get(key, seen) is not value:
            return False
    return True


def _fits(key: str, value: Any, member: torch.Tensor) -> bool:
    """Whether a value of a parameter's state is a number, or laid out as the parameter is."""
    return is_number(key, value) or _is_laid_out_as(value, member)


def _is_laid_out_as(tensor: torch.Tensor, member: torch.Tensor) -> bool:
    if isinstance(tensor, DTensor) and isinstance(member, DTensor):
        return tensor.placements == member.placements and tensor.shape == member.shape
    return type(tensor) is not DTensor and tensor.shape == local_of(member).shape


def _wrap(members: Sequence[torch.Tensor], rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [
        Form.of(member).wrap(part) if isinstance(member, DTensor) else part
        for member, part in zip(members, rows, strict=True)
    ]


def _local_of(value: Any) -> Any:
    return local_of(value) if isinstance(value, torch.Tensor) else value


def _equal(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        same = value.dtype == other.dtype and value.device == other.device
        return same and value.shape == other.shape and torch.equal(value, other)
    return type(value) is type(other) and bool(value == other)
