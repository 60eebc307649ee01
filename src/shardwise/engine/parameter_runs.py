"""Runs of neighbouring parameters, each of which an optimizer steps as one plain tensor.

Optimizers that treat every element alike may see neighbouring parameters of a unit as one flat
tensor over the unit's buffers: a handful of kernels per step, and little work per parameter. The
program sees none of it. Parameters, gradients and state stay what they are, over the same memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from itertools import accumulate, chain, pairwise
from operator import is_
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardwise.engine.checks import (
    engines_training,
)
from shardwise.engine.gradients import Gradients
from shardwise.engine.placements import MeshPlacement
from shardwise.engine.torch_private import (
    foreach_copy_,
    is_wrapper,
    local_of,
    local_tensor,
    writes_of,
)

StateOfOne = dict[str, Any]
StateByParameter = dict[torch.Tensor, StateOfOne]

# State that is one number for a whole parameter: a plain tensor, whatever the parameter is.
_NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})
_NOTHING: StateOfOne = {}
# A CPU's kernels end with another arithmetic for what fills no vector. Parameters whose rows fill
# whole ones meet the same arithmetic, to the last bit, alone and side by side.
_VECTOR = 64


class ParameterRun:
    """Parameters of a unit that lie side by side in its master and in its gradients, where they are
    those from number `first` on. `tensor` is the memory of all of them, `state` what the optimizer
    keeps for it.

    What the optimizer puts into `state` the program sees after the step, as views, one for each
    parameter. One parameter by itself steps on the very state that the program sees.
    """

    def __init__(self, gradients: Gradients, first: int, count: int) -> None:
        self._gradients, self._indices = gradients, slice(first, first + count)
        self.members = gradients.visible[self._indices]
        self._locals = list(map(local_of, self.members))
        self._sharded = [each for each in self.members if isinstance(each, DTensor)]  # all, or none
        layout = gradients.layout
        start, size = layout.offsets[first], sum(r.part for r in layout.rows[self._indices])
        self._span = slice(start, start + size)
        self._offsets = [offset - start for offset in layout.offsets[self._indices]]
        # An alias, so that the gradient it carries is not seen on what `to_local` gives.
        alias = self._locals[0].detach()
        self.tensor = alias if count == 1 else alias.as_strided((size,), (1,))
        # By key in `state`: where each parameter has its own.
        self.shared: dict[str, tuple[SharedNumbers, slice]] = {}
        self.looked_up: list[StateOfOne] = []  # what the program has as the state of each
        self._forget_state()

    def _forget_state(self) -> None:
        """From now on the program, or torch, has the parameters' state for itself."""
        for numbers, places in self.shared.values():
            numbers.release(places)
        self.shared.clear()
        self.state: StateOfOne = {}
        self._shown: list[Any] = []  # what of `state` the program has seen, ...
        self._seen: list[Any] = []  # ... and as what, parameter after parameter

    @property
    def unmoved(self) -> bool:
        """The parameters stand on the memory that they stood on."""
        return all(map(is_, map(local_tensor, self._sharded), self._locals))

    def begin(self, public: StateByParameter) -> bool:
        """Take over the parameters' gradients for this step (`tensor` has none if they have none),
        and what the program loaded, changed or dropped of their state since the last one. False if
        they cannot step as one tensor.
        """
        gradients = [member.grad for member in self.members]
        self.tensor.grad = self._join_gradients(gradients)
        if self.tensor.grad is None:
            return all(gradient is None for gradient in gradients)
        if not self.looked_up:
            self.looked_up = [public.get(member, _NOTHING) for member in self.members]
        if _same([*chain.from_iterable(map(dict.values, self.looked_up))], self._seen):
            return True
        self._forget_state()
        return not any(self.looked_up) or self._join_states(self.looked_up)

    def _join_gradients(self, gradients: Sequence[Any]) -> torch.Tensor | None:
        flat, summed = self._gradients.flat, self._gradients.summed
        own = flat is not None and all(map(is_, gradients, summed[self._indices]))
        if not own and not self._fit(gradients, self.tensor.dtype):
            return None
        if len(gradients) == 1:  # a plain one by itself torch steps as well as it can be
            return local_of(gradients[0]) if self._sharded else None
        return flat[self._span] if own and flat is not None else self._join(gradients)

    def _join_states(self, states: list[StateOfOne]) -> bool:
        """Make `state` of all parameters' states; False if they do not go together."""
        if any(state.keys() != states[0].keys() for state in states):
            return False
        alone, joined = len(states) == 1, {}
        for key, first in states[0].items():
            each = [state[key] for state in states]
            if _is_number(key, first):
                if not all(_equal(number, first) for number in each):
                    return False
                # What the program loaded stays as it is.
                copied = isinstance(first, torch.Tensor) and not alone
                joined[key] = first.clone() if copied else first
            elif self._fit(each, first.dtype):
                joined[key] = local_of(first) if alone else self._join(each)
            else:
                return False
        self.state = joined
        if alone:
            self._shown, self._seen = list(joined.values()), list(states[0].values())
        return True

    def _fit(self, tensors: Sequence[Any], dtype: torch.dtype) -> bool:
        """They are of this dtype, and laid out as the parameters are."""
        return all(
            isinstance(tensor, torch.Tensor)
            and tensor.dtype == dtype
            and _is_laid_out_as(tensor, member)
            for tensor, member in zip(tensors, self.members, strict=True)
        )

    def _join(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """A copy of the parameters' tensors, laid out as `tensor` is."""
        flat = torch.zeros_like(self.tensor, dtype=tensors[0].dtype)
        foreach_copy_(self._cut(flat), list(map(local_of, tensors)))
        return flat

    def _cut(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter's part of a tensor that is laid out as `tensor` is."""
        if len(self.members) == 1:
            return [flat]
        return [
            flat[start : start + local.numel()].view(local.shape)
            for start, local in zip(self._offsets, self._locals, strict=True)
        ]

    @property
    def changed(self) -> bool:
        """The optimizer put into `state` what the program has not seen."""
        return not _same(self.state.values(), self._shown)

    def show_state(self, public: StateByParameter) -> None:
        """Let the program see `state`, as the state of each parameter."""
        parts = {key: self._parts(key, value) for key, value in self.state.items()}
        for i, member in enumerate(self.members):
            public[member].update({key: each[i] for key, each in parts.items()})
        self._shown = list(self.state.values())
        self._seen = [value for member in self.members for value in public[member].values()]

    def _parts(self, key: str, value: Any) -> Sequence[Any]:
        """What each parameter has of a value of `state`."""
        if key in self.shared:
            numbers, places = self.shared[key]
            return list(numbers.all[places])
        if _is_number(key, value):
            return [value] * len(self.members)
        rows = self._cut(value)
        return list(map(_wrap, rows, self._sharded)) if self._sharded else rows

    @property
    def differs(self) -> bool:
        """Its parameters have different numbers."""
        return not all(numbers.agree(places) for numbers, places in self.shared.values())

    def split(self) -> list[ParameterRun]:
        """Each parameter by itself from now on, on the state that it has."""
        self._forget_state()
        first = self._indices.start
        return [ParameterRun(self._gradients, first + i, 1) for i in range(len(self.members))]


class SharedNumbers:
    """A number of the state, such as the count of steps, for runs whose state began together.

    The program sees one number for each parameter and may keep it, so a place is never used for
    another parameter, nor for a later state. The optimizer works on the first of each run; `spread`
    gives it to the others. All are places of one tensor, so that this takes one copy, and the
    tensor's version tells whether somebody else changed one.
    """

    def __init__(self, key: str, runs: Sequence[ParameterRun]) -> None:
        ends = list(accumulate((len(run.members) for run in runs), initial=0))
        of_run = [i for i, run in enumerate(runs) for _ in run.members]
        numbers = torch.stack([run.state[key] for run in runs])
        self.all = numbers[torch.tensor(of_run, device=numbers.device)]
        # For every place the one that it is a copy of.
        self._sources = torch.tensor([ends[i] for i in of_run], device=numbers.device)
        self._writes = writes_of(self.all)
        for run, (start, end) in zip(runs, pairwise(ends), strict=True):
            run.shared[key] = self, slice(start, end)
            run.state[key] = self.all[start]

    def release(self, places: slice) -> None:
        """These are copies of no other place from now on."""
        self._sources[places] = torch.arange(places.start, places.stop, device=self.all.device)

    @property
    def untouched(self) -> bool:
        """Surely nobody but the optimizer changed one. On the host a look at the numbers costs less
        than to miss what `.data` or numpy changed.
        """
        return self.all.device.type != "cpu" and writes_of(self.all) == self._writes

    def agree(self, places: slice = slice(None)) -> bool:
        return torch.equal(self.all[places], self.all.index_select(0, self._sources[places]))

    def spread(self) -> None:
        self.all.copy_(self.all.index_select(0, self._sources))
        self._writes = writes_of(self.all)


class GroupRuns:
    """The parameters of one group of an optimizer as they step: the longest runs of those that
    shardwise shards, and all others as they are.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = list(parameters)
        others = {id(parameter): parameter for parameter in parameters}
        self.runs: list[ParameterRun] = []
        for unit in chain.from_iterable(engine.units for engine in engines_training(parameters)):
            if unit.gradients is not None:
                for first, count in _find_runs(unit.gradients, others):
                    self.runs.append(ParameterRun(unit.gradients, first, count))
        for member in chain.from_iterable(run.members for run in self.runs):
            others.pop(id(member), None)
        self._others = list(others.values())
        self._shared: list[SharedNumbers] = []  # those that the runs have
        self._looked_up: list[StateOfOne] = []  # of all parameters, when the runs did

    def still_fits(self, parameters: Sequence[torch.Tensor]) -> bool:
        """The group has these parameters, on the memory that they stood on."""
        return _same(parameters, self._parameters) and all(run.unmoved for run in self.runs)

    def prepare(
        self, public: StateByParameter, states: StateByParameter
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The flat tensors to step, with their gradients, and parameters to step as they are. Where
        the state of the former is goes into `states`; `public` is what the program sees.

        A run whose parameters no longer go together, because some have no gradient or another
        state, is split for good.
        """
        apart = any(not numbers.untouched and not numbers.agree() for numbers in self._shared)
        # To look every parameter up takes longer than all else here.
        if not _same(public.values(), self._looked_up):
            self._looked_up = list(public.values())
            for run in self.runs:
                run.looked_up = []
        flat: list[torch.Tensor] = []
        as_they_are = list(self._others)
        at = 0
        while at < len(self.runs):
            run = self.runs[at]
            fits = run.begin(public) and not (apart and run.differs)
            if not fits and len(run.members) > 1:
                self.runs[at : at + 1] = run.split()
                continue
            at += 1
            if not fits:
                as_they_are += run.members
            elif run.tensor.grad is not None:
                flat.append(run.tensor)
                states[run.tensor] = run.state
        return flat, as_they_are

    def finish(self, public: StateByParameter) -> None:
        """Let go of the gradients, and let the program see the state that the step made."""
        for run in self.runs:
            run.tensor.grad = None
        changed = [run for run in self.runs if run.changed]
        if changed:
            _share_numbers([run for run in changed if len(run.members) > 1])
            for run in changed:
                run.show_state(public)
            shared = (numbers for run in self.runs for numbers, _ in run.shared.values())
            self._shared = list(dict.fromkeys(shared))
        for numbers in self._shared:
            numbers.spread()


def _share_numbers(runs: Sequence[ParameterRun]) -> None:
    """Give each parameter a place for every number that is new in the state of its run."""
    together: defaultdict[Any, list[ParameterRun]] = defaultdict(list)
    for run in runs:
        for key, value in run.state.items():
            if _is_number(key, value) and isinstance(value, torch.Tensor) and key not in run.shared:
                together[key, value.dtype, value.device].append(run)
    for (key, *_), these in together.items():
        SharedNumbers(key, these)


def _find_runs(gradients: Gradients, wanted: dict[int, torch.Tensor]) -> list[tuple[int, int]]:
    """Those of a unit's trained parameters that are wanted, by id, and lie side by side in its
    master: the number of the first among the gradients, and how many they are.
    """
    runs: list[tuple[int, int]] = []
    end: tuple[Any, ...] | None = None  # where the next one would have to start
    pairs = zip(gradients.visible, gradients.layout.rows, strict=True)
    for i, (parameter, rows) in enumerate(pairs):
        if id(parameter) not in wanted or i in gradients.tied:
            end = None
            continue
        local = local_of(parameter)
        if is_wrapper(local):  # of a class of its own: nothing lies beside it
            runs.append((i, 1))
            end = None
            continue
        memory, start = local.untyped_storage().data_ptr(), local.storage_offset()
        whole_vectors = local.numel() % _VECTOR == 0 and rows.part % _VECTOR == 0
        joins = whole_vectors or local.device.type != "cpu"
        if joins and end == (memory, start):
            first, count = runs[-1]
            runs[-1] = first, count + 1
        else:
            runs.append((i, 1))
        end = (memory, start + rows.part) if joins else None
    return runs


def _same(now: Collection[Any], then: Collection[Any]) -> bool:
    """The very same objects, in the same order."""
    return len(now) == len(then) and all(map(is_, now, then))


def _is_number(key: str, value: Any) -> bool:
    """Not a tensor with an element for each of the parameter."""
    return key in _NUMBERS or not isinstance(value, torch.Tensor)


def _is_laid_out_as(tensor: torch.Tensor, member: torch.Tensor) -> bool:
    if isinstance(tensor, DTensor) and isinstance(member, DTensor):
        return tensor.placements == member.placements and tensor.shape == member.shape
    return type(tensor) is not DTensor and tensor.shape == local_of(member).shape


def _wrap(rows: torch.Tensor, like: DTensor) -> DTensor:
    return MeshPlacement.of(like).wrap(rows)


def _equal(number: Any, other: Any) -> bool:
    if not (isinstance(number, torch.Tensor) and isinstance(other, torch.Tensor)):
        return type(number) is type(other) and bool(number == other)
    same = number.dtype == other.dtype and number.device == other.device
    return same and torch.equal(number, other)
