"""A plain optimizer over sharded parameters steps on this rank's rows, without DTensor dispatch.

The program keeps its optimizer: parameters, gradients and state that it sees stay DTensors. Behind
its `step`, optimizers that treat every element alike run on plain tensors over the same memory,
which takes a fraction of the time and lets torch choose its multi-tensor kernels (it does not for
DTensors). Whatever does not fit (a closure, step hooks of the user, another optimizer) takes
torch's own way, on the same state.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import optimizer as torch_optimizer

from shardwise.comms.versions import local_of
from shardwise.sharding.forms import Form

ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad,
    torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam,
    torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD,
)  # fmt: skip
# State that is one number for the whole parameter: a plain tensor whatever the parameter is.
_NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})

State = dict[str, Any]
States = dict[torch.Tensor, State]


class Rows:
    """This rank's rows of one sharded parameter as a plain tensor, with what belongs to it."""

    __slots__ = ("behind", "parameter", "seen", "shown", "source", "spec", "tensor")

    def __init__(self, parameter: torch.Tensor, source: torch.Tensor) -> None:
        self.parameter, self.source = parameter, source
        # An alias, so that the gradient it carries is not seen on what `to_local` gives.
        self.tensor = source.detach()
        self.spec: Any = None  # of the last gradient, which was laid out as the parameter is
        # The state as the program sees it, and the same memory as the step has it.
        self.seen: State = {}
        self.behind: State | None = None
        self.shown: State = {}  # what was `behind` when the program saw it

    def hang_gradient(self) -> bool:
        """Give the rows their gradient; False if it is laid out otherwise."""
        gradient = self.parameter.grad
        if gradient is not None:
            spec = getattr(gradient, "_spec", None)
            if spec is None or spec is not self.spec:
                if spec is None or spec.placements != self.parameter._spec.placements:  # type: ignore[attr-defined]
                    return False
                self.spec = spec
            self.tensor.grad = gradient._local_tensor  # type: ignore[attr-defined]
        return True

    def take_state(self, public: States, own: States) -> None:
        """Bring the state into `own`; the program may have loaded, changed or dropped any of it."""
        state = public.get(self.parameter)
        if state is None:
            if self.behind is not None:
                self.seen, self.shown, self.behind = {}, {}, None
                del own[self.tensor]
            return
        seen = self.seen
        if (
            self.behind is None
            or len(seen) != len(state)
            or any(seen.get(key) is not value for key, value in state.items())
        ):
            self.seen = dict(state)
            self.behind = {key: _local_of(value) for key, value in state.items()}
            self.shown = dict(self.behind)
            own[self.tensor] = self.behind

    def show_state(self, own: States, public: States) -> None:
        """Let the program see what the step made, as the optimizer would have of a DTensor."""
        if self.behind is None:
            self.behind = own.get(self.tensor)
        for key, value in (self.behind or {}).items():
            if self.shown.get(key, self) is not value:
                self.shown[key] = value
                self.seen[key] = public[self.parameter][key] = self._wrap(key, value)

    def _wrap(self, key: str, value: Any) -> Any:
        rows = isinstance(value, torch.Tensor) and value.shape == self.tensor.shape
        if not rows or key in _NUMBERS or not isinstance(self.parameter, DTensor):
            return value
        return Form.of(self.parameter).wrap(value)


class LocalStep:
    """One optimizer's sharded parameters as plain tensors over the same memory."""

    def __init__(self) -> None:
        self._visible: list[list[torch.Tensor]] = []  # by param group, as the optimizer has them
        self._tensors: list[list[torch.Tensor]] = []  # by param group, for the step
        self._rows: list[Rows] = []
        self._others: list[torch.Tensor] = []  # parameters that step as they are
        self._state: defaultdict[torch.Tensor, State] = defaultdict(dict)
        self._hidden: list[list[torch.Tensor]] | None = None

    def take(self, optimizer: torch.optim.Optimizer) -> bool:
        """Do the optimizer's step and leave nothing for its own; False if it has to do it itself.
        `restore` ends what a True began.
        """
        self.restore(optimizer)
        self._follow(optimizer)
        if not self._rows:
            return False
        groups, public = optimizer.param_groups, optimizer.state
        lists = [group["params"] for group in groups]
        try:
            if not all(rows.hang_gradient() for rows in self._rows):
                return False
            self._take_state(public)
            optimizer.state = self._state
            for group, tensors in zip(groups, self._tensors, strict=True):
                group["params"] = tensors
            type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]
        finally:
            optimizer.state = public
            for group, tensors in zip(groups, lists, strict=True):
                group["params"] = tensors
            for rows in self._rows:
                rows.tensor.grad = None
        self._show_state(public)
        self._hidden = lists
        for group in groups:
            group["params"] = []
        return True

    def restore(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the optimizer its parameters back after a step that had nothing to do."""
        if self._hidden is not None:
            for group, tensors in zip(optimizer.param_groups, self._hidden, strict=False):
                group["params"] = tensors
            self._hidden = None

    def _follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at the parameters again where they, or the memory under them, are others now."""
        visible = [group["params"] for group in optimizer.param_groups]
        if (
            len(visible) == len(self._visible)
            and all(map(_same, visible, self._visible))
            and all(local_of(rows.parameter) is rows.source for rows in self._rows)
        ):
            return
        self._visible = [list(parameters) for parameters in visible]
        self._rows, self._tensors, self._others = [], [], []
        self._state.clear()
        for parameters in visible:
            tensors = []
            for parameter in parameters:
                source = _source(parameter)
                if source is parameter:
                    self._others.append(parameter)
                    tensors.append(parameter)
                else:
                    self._rows.append(Rows(parameter, source))
                    tensors.append(self._rows[-1].tensor)
            self._tensors.append(tensors)

    def _take_state(self, public: States) -> None:
        for rows in self._rows:
            rows.take_state(public, self._state)
        for parameter in self._others:
            self._state.pop(parameter, None)
            if parameter in public:
                self._state[parameter] = public[parameter]

    def _show_state(self, public: States) -> None:
        for rows in self._rows:
            rows.show_state(self._state, public)
        for parameter in self._others:
            if parameter in self._state:
                public[parameter] = self._state[parameter]


_steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, LocalStep] = weakref.WeakKeyDictionary()


def step_locally(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Before an optimizer's step: do it on local tensors, where that gives the same."""
    if not _takes(optimizer, args, kwargs):
        return
    if optimizer not in _steps:
        _steps[optimizer] = LocalStep()
    _steps[optimizer].take(optimizer)


def end_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """After an optimizer's step."""
    known = _steps.get(optimizer)
    if known is not None:
        known.restore(optimizer)


def _takes(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> bool:
    """Whether nothing could tell: hooks would meet an optimizer without parameters, a closure comes
    after them, and only elementwise arithmetic is the same on rows.
    """
    return (
        type(optimizer) in ELEMENTWISE
        and len(args) == 1
        and not any(value is not None for value in kwargs.values())
        and not optimizer._optimizer_step_pre_hooks
        and not optimizer._optimizer_step_post_hooks
        and len(torch_optimizer._global_optimizer_pre_hooks) == 1
        and len(torch_optimizer._global_optimizer_post_hooks) == 1
        and not torch.compiler.is_compiling()
        and not any(group.get("differentiable") for group in optimizer.param_groups)
    )


def _same(now: list[torch.Tensor], then: list[torch.Tensor]) -> bool:
    return len(now) == len(then) and all(a is b for a, b in zip(now, then, strict=True))


def _source(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's rows of a parameter that shardwise shards; any other parameter itself."""
    return local_of(parameter) if "_shardwise_engine" in parameter.__dict__ else parameter


def _local_of(value: Any) -> Any:
    return local_of(value) if isinstance(value, torch.Tensor) else value
