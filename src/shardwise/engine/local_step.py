"""An optimizer over sharded parameters steps on flat local tensors, behind its own `step`.

The program keeps its optimizer: the parameters, gradients and state that it sees stay what they
are. Optimizers that treat every element alike run on `parameter_runs` over the same memory: no
DTensor dispatch, little work per parameter, and torch chooses its multi-tensor kernels, which it
does not for DTensors. A hook before the step hands torch's `step` a stand-in: an optimizer of the
same class over the flat tensors. The optimizer itself is not touched. Whatever does not fit (step
hooks of the user, another optimizer, a compiled step) takes torch's own way, on the same state.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate, chain, pairwise
from operator import is_
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.optim import optimizer as torch_optimizer

from shardwise.engine import checks, static, torch_private
from shardwise.engine.gradients import Gradients
from shardwise.engine.hooks import Watcher
from shardwise.engine.parameter_runs import ELEMENTWISE, ParameterRun, find_runs
from shardwise.engine.torch_private import local_of, local_tensor, writes_of

if TYPE_CHECKING:
    from shardwise.engine.engine import Engine

StateOfOne = dict[str, Any]
StateByParameter = dict[torch.Tensor, StateOfOne]

# State that is one number for a whole parameter: a plain tensor, whatever the parameter is.
_NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})
_NOTHING: StateOfOne = {}

# Where an optimizer has its LocalStep: on itself, so that both go in one collection. (torch pickles
# and copies nothing of an optimizer but its defaults, state and groups.)
_KEY = "_shardwise_local_step"


_installed = False


def watch_optimizers() -> None:
    """Check every optimizer at its `step` from now on, and let those over sharded parameters step
    on local rows. Installed with the first sharded model, not on import.
    """
    global _installed
    if _installed:
        return
    _installed = True
    torch_optimizer.register_optimizer_step_pre_hook(Watcher(_before_step))


def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Errors that a step would hide; then torch's `step` gets a stand-in for the optimizer: the
    same over flat tensors, for one step. The other one stays as it is.
    """
    known: LocalStep = optimizer.__dict__.setdefault(_KEY, LocalStep())
    engines = known.find_engines(optimizer)
    for engine in engines:
        engine.check_interrupted()
        engine.check_reduced()
    if static.on is not None:
        static.on.meet_optimizer(optimizer)
    if isinstance(optimizer, torch.optim.LBFGS):
        return _with_common_loss(known, args, kwargs)
    if not engines:
        return None
    if not optimizer.state and engines[0].mesh.device.type == "cuda":
        _make_room_for_state()
    if not _takes(optimizer):
        return None
    stand_in: torch.optim.Optimizer = object.__new__(type(optimizer))
    groups = _FlatGroups(optimizer, known)
    stand_in.__dict__.update(optimizer.__dict__, param_groups=groups, state=groups.states)
    return (stand_in, *args[1:]), kwargs


def _make_room_for_state() -> None:
    """What comes and goes in a step has left gaps all over the allocator's memory. State that stays
    would lie in them, and keep the pages around it: so the gaps go back to the device first.
    """
    if not torch_private.is_recording():
        torch.cuda.empty_cache()


def _with_common_loss(
    known: LocalStep, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """LBFGS decides by the loss that its closure returns, and ranks must decide alike. So it gets
    what the summed gradients are those of: the sum of the ranks' losses, or their average. One that
    all ranks return alike stays as it is.
    """
    optimizer, closure = args[0], args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        return None  # torch's own error

    def of_all_ranks() -> Any:
        loss = closure()
        engines = known.find_engines(optimizer)  # some are known after the first forward only
        losses = engines[0].agreement.everybody(float(loss)) if engines else []
        if len(set(losses)) < 2:
            return loss
        averages = engines[0].plan is None or engines[0].plan.average
        common = sum(losses) / (len(losses) if averages else 1)
        return torch.full_like(loss.detach(), common) if torch.is_tensor(loss) else common

    return (optimizer, of_all_ranks), {}


def _takes(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step on flat tensors would go unnoticed. Hooks would be shown the stand-in among
    the arguments of `step`, and only elementwise arithmetic is the same on rows.
    """
    hooks_of_all = chain.from_iterable(map(dict.values, torch_private.step_hooks_of_all()))
    return (
        type(optimizer) in ELEMENTWISE
        and not any(torch_private.step_hooks(optimizer))
        and all(type(hook) is Watcher for hook in hooks_of_all)
        and not any(group.get("differentiable") for group in optimizer.param_groups)
    )


class LocalStep:
    """What is known of one optimizer: the engines of its parameters, and what they step as."""

    def __init__(self) -> None:
        self._engines: list[weakref.ref[Engine]] = []
        self._found_from = (0, 0)  # how many parameter groups and marks there were then
        self._layouts: list[int] = []  # of the engines, when the groups were made
        self.groups: list[GroupRuns] = []

    def find_engines(self, optimizer: torch.optim.Optimizer) -> list[Engine]:
        """The engines of the optimizer's parameters; looked for again where there are more
        parameter groups or engines now.
        """
        found_from = len(optimizer.param_groups), checks.marked
        if self._found_from != found_from:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            checks.check_unmoved(parameters, optimizer)
            self._engines = list(map(weakref.ref, checks.engines_training(parameters)))
            self._found_from = found_from
        return [engine for reference in self._engines if (engine := reference()) is not None]

    def find_runs(self, optimizer: torch.optim.Optimizer) -> list[GroupRuns]:
        """The parameter groups as they step; looked at again where the parameters, or the memory
        under them, are others now.
        """
        layouts = [engine.relayouts for engine in self.find_engines(optimizer)]
        visible = [group["params"] for group in optimizer.param_groups]
        if (
            len(visible) != len(self.groups)
            or layouts != self._layouts
            or not all(map(GroupRuns.still_fits, self.groups, visible))
        ):
            self._layouts = layouts
            self.groups = list(map(GroupRuns, visible))
        return self.groups


class _FlatStates(dict[torch.Tensor, StateOfOne]):
    """The state of flat tensors. Of parameters that step as they are it is where they have it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self._public = optimizer.state

    def __missing__(self, parameter: torch.Tensor) -> StateOfOne:
        return cast(StateOfOne, self._public[parameter])


class _FlatGroups(list[dict[str, Any]]):
    """An optimizer's groups, over flat tensors as soon as its step comes to them: a closure has
    made the gradients then.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, known: LocalStep) -> None:
        super().__init__(optimizer.param_groups)
        self._optimizer, self._known = optimizer, known
        self.states = _FlatStates(optimizer)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        optimizer = self._optimizer
        runs_of_groups = self._known.find_runs(optimizer)
        for group, runs in zip(optimizer.param_groups, runs_of_groups, strict=True):
            try:
                # Not in one: torch's multi-tensor calls take no DTensors among others.
                for parameters in runs.prepare(optimizer.state, self.states):
                    if parameters:
                        yield {**group, "params": parameters}
            finally:
                runs.finish(optimizer.state)  # also where the step ends in an error


class GroupRuns:
    """The parameters of one group of an optimizer as they step: the longest runs of those that
    shardwise shards, and all others as they are.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = list(parameters)
        others = {id(parameter): parameter for parameter in parameters}
        self.runs: list[SteppedRun] = []
        for unit in chain.from_iterable(e.units for e in checks.engines_training(parameters)):
            if unit.gradients is not None:
                for first, count in find_runs(unit.gradients, others):
                    self.runs.append(SteppedRun(unit.gradients, first, count))
        for member in chain.from_iterable(run.members for run in self.runs):
            others.pop(id(member), None)
        self._others = list(others.values())
        self._shared: list[SharedNumbers] = []  # those that the runs have
        self._looked_up: list[StateOfOne] = []  # of all parameters, when the runs did

    def still_fits(self, parameters: Sequence[torch.Tensor]) -> bool:
        """The group has these parameters, on the memory that they stood on."""
        return _same(parameters, self._parameters) and all(
            all(map(is_, map(local_tensor, run.sharded), run.locals)) for run in self.runs
        )

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
            stepped = {id(member) for run in changed for member in run.members}
            for parameter in self._parameters:  # in this order, as a step without runs enters them
                if id(parameter) in stepped:
                    public[parameter]
            for run in changed:
                run.show_state(public)
            shared = (numbers for run in self.runs for numbers, _ in run.shared.values())
            self._shared = list(dict.fromkeys(shared))
        for numbers in self._shared:
            numbers.spread()


class SteppedRun(ParameterRun):
    """A run with the `state` that the optimizer keeps for it.

    What the optimizer puts into `state` the program sees after the step, as views, one for each
    parameter. One parameter by itself steps on the very state that the program sees.
    """

    def __init__(self, gradients: Gradients, first: int, count: int) -> None:
        super().__init__(gradients, first, count)
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
        flat, summed = self.gradients.flat, self.gradients.summed
        own = flat is not None and all(map(is_, gradients, summed[self.indices]))
        if not own and not self.fit(gradients, self.tensor.dtype):
            return None
        if len(gradients) == 1:  # a plain one by itself torch steps as well as it can be
            return local_of(gradients[0]) if self.sharded else None
        return flat[self.span] if own and flat is not None else self.join(gradients)

    def _join_states(self, states: list[StateOfOne]) -> bool:
        """Make `state` of all parameters' states; False if they do not go together."""
        if any(state.keys() != states[0].keys() for state in states):
            return False
        alone, joined = len(states) == 1, {}
        for key, first in states[0].items():
            each = [state[key] for state in states]
            if is_number(key, first):
                if not all(_equal(number, first) for number in each):
                    return False
                # What the program loaded stays as it is.
                copied = isinstance(first, torch.Tensor) and not alone
                joined[key] = first.clone() if copied else first
            elif self.fit(each, first.dtype):
                joined[key] = local_of(first) if alone else self.join(each)
            else:
                return False
        self.state = joined
        if alone:
            self._shown, self._seen = list(joined.values()), list(states[0].values())
        return True

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
        return [value] * len(self.members) if is_number(key, value) else self.parts_of(value)

    @property
    def differs(self) -> bool:
        """Its parameters have different numbers."""
        return not all(numbers.agree(places) for numbers, places in self.shared.values())

    def split(self) -> list[SteppedRun]:
        """Each parameter by itself from now on, on the state that it has."""
        self._forget_state()
        first = self.indices.start
        return [SteppedRun(self.gradients, first + i, 1) for i in range(len(self.members))]


class SharedNumbers:
    """A number of the state, such as the count of steps, for runs whose state began together.

    The program sees one number for each parameter and may keep it, so a place is never used for
    another parameter, nor for a later state. The optimizer works on the first of each run; `spread`
    gives it to the others. All are places of one tensor, so that this takes one copy, and the
    tensor's version tells whether somebody else changed one.
    """

    def __init__(self, key: str, runs: Sequence[SteppedRun]) -> None:
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


def _share_numbers(runs: Sequence[SteppedRun]) -> None:
    """Give each parameter a place for every number that is new in the state of its run."""
    together: defaultdict[Any, list[SteppedRun]] = defaultdict(list)
    for run in runs:
        for key, value in run.state.items():
            if is_number(key, value) and isinstance(value, torch.Tensor) and key not in run.shared:
                together[key, value.dtype, value.device].append(run)
    for (key, *_), these in together.items():
        SharedNumbers(key, these)


def _same(now: Collection[Any], then: Collection[Any]) -> bool:
    """The very same objects, in the same order."""
    return len(now) == len(then) and all(map(is_, now, then))


def is_number(key: str, value: Any) -> bool:
    """Not a tensor with an element for each of the parameter."""
    return key in _NUMBERS or not isinstance(value, torch.Tensor)


def _equal(number: Any, other: Any) -> bool:
    if not (isinstance(number, torch.Tensor) and isinstance(other, torch.Tensor)):
        return type(number) is type(other) and bool(number == other)
    same = number.dtype == other.dtype and number.device == other.device
    return same and torch.equal(number, other)
