"""Runs of neighbouring parameters, which an optimizer steps as one plain tensor each.

Optimizers that treat every element alike may see neighbouring parameters of a unit as one flat
tensor over the unit's buffers: a handful of kernels per step, and little work per parameter. The
program sees none of it. Parameters, gradients and state stay what they are, over the same memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate, chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardwise.engine.forms import Form
from shardwise.engine.gradients import Gradients
from shardwise.engine.guard import engines_of
from shardwise.engine.torch_private import local_of

StateOfOne = dict[str, Any]
StateByParameter = dict[torch.Tensor, StateOfOne]

# State that is one number for a whole parameter: a plain tensor, whatever the parameter is.
_NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})
# A CPU's kernels end with another arithmetic for what fills no vector. Parameters whose rows fill
# whole ones meet the same arithmetic, to the last bit, alone and side by side.
_VECTOR = 64
_LOCAL = attrgetter("_local_tensor")


class ParameterRun:
    """Parameters of a unit, by number `first` and on, that lie side by side in its master and in
    its gradients. `tensor` is the memory of all of them, `state` what the optimizer keeps for it.

    What the optimizer puts into `state` the program sees after the step, as views, one for each
    parameter. One parameter by itself steps on the very state that the program sees.
    """

    def __init__(self, gradients: Gradients, first: int, count: int) -> None:
        self._gradients, self._numbers = gradients, slice(first, first + count)
        self.members = gradients.visible[self._numbers]
        self._locals = list(map(local_of, self.members))
        self._sharded = [each for each in self.members if isinstance(each, DTensor)]  # all, or none
        layout = gradients.layout
        start, size = layout.offsets[first], sum(r.part for r in layout.rows[self._numbers])
        self._place = slice(start, start + size)
        self._offsets = [offset - start for offset in layout.offsets[self._numbers]]
        # An alias, so that the gradient it carries is not seen on what `to_local` gives.
        self.tensor = self._locals[0].detach()
        if count > 1:
            self.tensor = self.tensor.as_strided((size,), (1,))
        # By key in `state`; with each the place where this run's start.
        self.shared: dict[str, tuple[SharedNumbers, int]] = {}
        self._forget_state()

    def _forget_state(self) -> None:
        """From now on the program, or torch, has the parameters' state for itself."""
        for numbers, start in self.shared.values():
            numbers.release(start, len(self.members))
        self.shared.clear()
        self.state: StateOfOne = {}
        self._shown: StateOfOne = {}  # what of `state` the program has seen, ...
        self._seen: list[StateOfOne] = [{} for _ in self.members]  # ... as the state of each

    @property
    def unmoved(self) -> bool:
        """The parameters stand on the memory that they stood on."""
        return all(map(is_, map(_LOCAL, self._sharded), self._locals))

    def begin(self, gradients: Sequence[torch.Tensor | None], public: StateByParameter) -> bool:
        """Take over the parameters' gradients for this step, and what the program loaded, changed
        or dropped of their state since the last one. False if they cannot step as one tensor.
        """
        self.tensor.grad = self._join_gradients(gradients)
        if self.tensor.grad is None:
            return False
        states = [public.get(member) for member in self.members]
        if all(map(_unchanged, states, self._seen)):
            return True
        self._forget_state()
        return not any(states) or self._join_state([state or {} for state in states])

    def _join_gradients(self, gradients: Sequence[Any]) -> torch.Tensor | None:
        flat, summed = self._gradients.flat, self._gradients.summed[self._numbers]
        own = flat is not None and all(map(is_, gradients, summed))
        if not own and not all(map(_goes_with, gradients, self.members)):
            return None
        if len(self.members) == 1:  # a plain one is what torch steps best already
            return local_of(gradients[0]) if self._sharded else None
        return flat[self._place] if own and flat is not None else self._join(gradients)

    def _join_state(self, states: list[StateOfOne]) -> bool:
        """Make `state` of all parameters' states; False if they do not go together."""
        if any(state.keys() != states[0].keys() for state in states):
            return False
        alone, joined = len(states) == 1, {}
        for key, first in states[0].items():
            each = [state[key] for state in states]
            if _is_number(key, first):
                if not all(_equal(number, first) for number in each):
                    return False
                # What the program loaded does not count on by itself.
                copied = isinstance(first, torch.Tensor) and not alone
                joined[key] = first.clone() if copied else first
            elif all(map(_is_laid_out_as, each, self.members)) and _of_one_dtype(each):
                joined[key] = local_of(first) if alone else self._join(each)
            else:
                return False
        self.state = joined
        if alone:
            self._shown, self._seen = dict(joined), [dict(states[0])]
        return True

    def _join(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """A copy of the parameters' tensors, laid out as `tensor` is."""
        flat = torch.zeros_like(self.tensor, dtype=tensors[0].dtype)
        torch._foreach_copy_(self._cut(flat), list(map(local_of, tensors)))
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
        return not _unchanged(self.state, self._shown)

    def numbers_to_share(self) -> list[str]:
        """Keys of new numbers in `state`, which every parameter is to have for itself."""
        if len(self.members) == 1:
            return []
        new = {k: n for k, n in self.state.items() if self._shown.get(k, self) is not n}
        return [k for k, n in new.items() if isinstance(n, torch.Tensor) and _is_number(k, n)]

    def share_number(self, key: str, numbers: SharedNumbers, start: int) -> None:
        self.shared[key] = numbers, start
        self.state[key] = numbers.places[start]

    def show_state(self, public: StateByParameter) -> None:
        """Let the program see what the optimizer put into `state`, as the state of each."""
        for key, value in self.state.items():
            if self._shown.get(key, self) is value:
                continue
            parts = self._parts_of(key, value)
            for member, seen, part in zip(self.members, self._seen, parts, strict=True):
                seen[key] = public[member][key] = part
        self._shown = dict(self.state)

    def _parts_of(self, key: str, value: Any) -> list[Any]:
        """What each parameter has of a value of `state`."""
        if key in self.shared:
            numbers, start = self.shared[key]
            return [numbers.places[start + i] for i in range(len(self.members))]
        if _is_number(key, value):
            return [value] * len(self.members)
        return list(map(_wrap, self.members, self._cut(value)))

    @property
    def differs(self) -> bool:
        """Its parameters have different numbers."""
        places = (n.places[at : at + len(self.members)] for n, at in self.shared.values())
        return any(bool((each != each[0]).any()) for each in places)

    def split(self) -> list[ParameterRun]:
        """Each parameter by itself from now on, on the state that it has."""
        self._forget_state()
        first = self._numbers.start
        return [ParameterRun(self._gradients, first + i, 1) for i in range(len(self.members))]


class SharedNumbers:
    """A number of the state, such as the count of steps, for all runs of a group whose state began
    in the same step.

    The program sees one number for each parameter and may keep it, so a place is never used for
    another parameter, nor for a later state. The optimizer works on the first one of each run;
    `spread` gives the run's others the same. All are places of one tensor, so that this takes one
    copy, and the tensor's version tells whether somebody else changed one.
    """

    def __init__(self, numbers: Sequence[torch.Tensor], counts: Sequence[int]) -> None:
        """The number of each run, and how many parameters that has."""
        self.starts = list(accumulate(counts, initial=0))[:-1]
        of_run = [run for run, count in enumerate(counts) for _ in range(count)]
        together = torch.stack(list(numbers))
        index = torch.tensor(of_run, device=together.device)
        self.places = together.index_select(0, index)
        # For every place the one that it follows.
        self._firsts = torch.tensor(self.starts, device=together.device).index_select(0, index)
        self._version = self.places._version

    def release(self, start: int, count: int) -> None:
        """These places follow no other from now on."""
        own = torch.arange(start, start + count, device=self._firsts.device)
        self._firsts[start : start + count] = own

    @property
    def agree(self) -> bool:
        """Nobody gave one of a run's parameters another number since the last step."""
        # On the host a look costs less than to miss what `.data` or numpy changed.
        if self.places.device.type != "cpu" and self.places._version == self._version:
            return True
        return torch.equal(self.places, self.places.index_select(0, self._firsts))

    def spread(self) -> None:
        self.places.copy_(self.places.index_select(0, self._firsts))
        self._version = self.places._version


class GroupRuns:
    """The parameters of one group of an optimizer as they step: the longest runs of those that
    shardwise shards, and all others as they are.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = list(parameters)
        others = {id(parameter): parameter for parameter in parameters}
        self.runs: list[ParameterRun] = []
        for unit in (unit for engine in engines_of(parameters) for unit in engine.units):
            if unit.gradients is not None:
                found = _find_runs(unit.gradients, frozenset(others))
                self.runs += [ParameterRun(unit.gradients, *place) for place in found]
        for run in self.runs:
            for member in run.members:
                others.pop(id(member), None)
        self._others = list(others.values())
        self._shared: list[SharedNumbers] = []  # those that the runs have

    def still_fits(self, parameters: Sequence[torch.Tensor]) -> bool:
        """The group has these parameters, on the memory that they stood on."""
        return (
            len(parameters) == len(self._parameters)
            and all(map(is_, parameters, self._parameters))
            and all(run.unmoved for run in self.runs)
        )

    def prepare(
        self, public: StateByParameter, states: StateByParameter
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The flat tensors to step, with their gradients, and parameters to step as they are. Where
        the state of the former is goes into `states`; `public` is what the program sees.

        A run whose parameters no longer go together, because some have no gradient or another
        state, is split for good.
        """
        if not all(numbers.agree for numbers in self._shared):
            parts = [run.split() if run.differs else [run] for run in self.runs]
            self.runs = list(chain.from_iterable(parts))
        flat: list[torch.Tensor] = []
        as_they_are = list(self._others)
        at = 0
        while at < len(self.runs):
            run = self.runs[at]
            gradients = [member.grad for member in run.members]
            stepped = any(gradient is not None for gradient in gradients)
            fits = not stepped or run.begin(gradients, public)
            if not fits and len(run.members) > 1:
                self.runs[at : at + 1] = run.split()
                continue
            at += 1
            if not fits:
                as_they_are += run.members
            elif stepped:
                flat.append(run.tensor)
                states[run.tensor] = run.state
        return flat, as_they_are

    def finish(self, public: StateByParameter) -> None:
        """Let go of the gradients, and let the program see the state that the step made."""
        for run in self.runs:
            run.tensor.grad = None
        changed = [run for run in self.runs if run.changed]
        self._share_numbers(changed)
        for run in changed:
            run.show_state(public)
        shared = [numbers for run in self.runs for numbers, _ in run.shared.values()]
        self._shared = list(dict.fromkeys(shared))
        for numbers in self._shared:
            numbers.spread()

    def _share_numbers(self, runs: Sequence[ParameterRun]) -> None:
        """Give every parameter of these runs places for the numbers that are new in their state."""
        began: defaultdict[Any, list[ParameterRun]] = defaultdict(list)
        for run in runs:
            for key in run.numbers_to_share():
                began[key, run.state[key].dtype, run.state[key].device].append(run)
        for (key, *_), together in began.items():
            counts = [len(run.members) for run in together]
            numbers = SharedNumbers([run.state[key] for run in together], counts)
            for run, start in zip(together, numbers.starts, strict=True):
                run.share_number(key, numbers, start)


def _find_runs(gradients: Gradients, wanted: frozenset[int]) -> list[tuple[int, int]]:
    """Those of a unit's trained parameters whose ids are wanted and that lie side by side in its
    master: the number of the first among the gradients, and how many they are.
    """
    runs: list[tuple[int, int]] = []
    end: tuple[Any, ...] | None = None  # where the next one would have to start
    pairs = zip(gradients.visible, gradients.layout.rows, strict=True)
    for i, (parameter, rows) in enumerate(pairs):
        if id(parameter) not in wanted or i in gradients.echoes:
            end = None
            continue
        local = local_of(parameter)
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


def _unchanged(state: StateOfOne | None, seen: StateOfOne) -> bool:
    if not state or len(state) != len(seen):
        return not state and not seen
    for key, value in state.items():  # noqa: SIM110, a generator takes twice as long
        if seen.get(key, seen) is not value:
            return False
    return True


def _is_number(key: str, value: Any) -> bool:
    """Not a tensor with an element for each of the parameter."""
    return key in _NUMBERS or not isinstance(value, torch.Tensor)


def _is_laid_out_as(tensor: torch.Tensor, member: torch.Tensor) -> bool:
    if isinstance(tensor, DTensor) and isinstance(member, DTensor):
        return tensor.placements == member.placements and tensor.shape == member.shape
    return type(tensor) is not DTensor and tensor.shape == local_of(member).shape


def _goes_with(gradient: torch.Tensor | None, member: torch.Tensor) -> bool:
    if gradient is None or gradient.dtype != member.dtype:
        return False
    return _is_laid_out_as(gradient, member)


def _of_one_dtype(tensors: Sequence[torch.Tensor]) -> bool:
    return len({tensor.dtype for tensor in tensors}) == 1


def _wrap(member: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """A tensor of the state as the program sees it."""
    return Form.of(member).wrap(rows) if isinstance(member, DTensor) else rows


def _equal(number: Any, other: Any) -> bool:
    if not (isinstance(number, torch.Tensor) and isinstance(other, torch.Tensor)):
        return type(number) is type(other) and bool(number == other)
    same = number.dtype == other.dtype and number.device == other.device
    return same and torch.equal(number, other)
