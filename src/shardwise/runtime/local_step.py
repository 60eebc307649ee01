"""An optimizer over sharded parameters steps on flat local tensors, behind its own `step`.

The program keeps its optimizer: the parameters, gradients and state that it sees stay what they
are. Optimizers that treat every element alike run on `stretches` over the same memory: no DTensor
dispatch, little work per parameter, and torch chooses its multi-tensor kernels, which it does not
for DTensors. Whatever does not fit (a closure, step hooks of the user, another optimizer) takes
torch's own way, on the same state.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer

from shardwise.runtime.stretches import (
    Neighbours,
    State,
    States,
    Stretch,
    engine_of,
    find_stretches,
)

ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad,
    torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam,
    torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD,
)  # fmt: skip


class LocalStep:
    """One optimizer's parameters as stretches."""

    def __init__(self) -> None:
        self._visible: list[list[torch.Tensor]] = []  # by param group, as the optimizer has them
        self._groups: list[list[Stretch | torch.Tensor]] = []  # by param group, for the step
        self._stretches: list[Stretch] = []
        self._others: list[torch.Tensor] = []  # parameters that step as they are
        self._engines: list[Any] = []
        self._layouts: list[int] = []
        self._state: defaultdict[torch.Tensor, State] = defaultdict(dict)
        self._hidden: list[list[torch.Tensor]] | None = None

    def take(self, optimizer: torch.optim.Optimizer) -> bool:
        """Do the optimizer's step and leave nothing for its own; False if it has to do it itself.
        `restore` ends what a True began.
        """
        self.restore(optimizer)
        self._follow(optimizer)
        groups, public = optimizer.param_groups, optimizer.state
        lists = [group["params"] for group in groups]
        try:
            if not self._stretches or not self._prepare(public):
                return False
            optimizer.state = self._state
            for group, parts in zip(groups, self._groups, strict=True):
                group["params"] = [p.tensor if isinstance(p, Stretch) else p for p in parts]
            type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]
        finally:
            optimizer.state = public
            for group, parameters in zip(groups, lists, strict=True):
                group["params"] = parameters
            for stretch in self._stretches:
                stretch.tensor.grad = None
        self._show_state(public)
        self._hidden = lists
        for group in groups:
            group["params"] = []
        return True

    def restore(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the optimizer its parameters back after a step that had nothing to do."""
        if self._hidden is not None:
            for group, parameters in zip(optimizer.param_groups, self._hidden, strict=False):
                group["params"] = parameters
            self._hidden = None

    def _follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at the parameters again where they, or the memory under them, are others now."""
        visible = [group["params"] for group in optimizer.param_groups]
        layouts = [engine.relayouts for engine in map(_call, self._engines) if engine is not None]
        if (
            len(visible) == len(self._visible)
            and layouts == self._layouts
            and all(map(_same, visible, self._visible))
            and all(stretch.unmoved for stretch in self._stretches)
        ):
            return
        self._visible = [list(parameters) for parameters in visible]
        engines = {id(e): e for parameters in visible for e in map(engine_of, parameters) if e}
        self._engines = [weakref.ref(engine) for engine in engines.values()]
        self._layouts = [engine.relayouts for engine in engines.values()]
        self._state.clear()
        self._groups = [find_stretches(parameters) for parameters in visible]
        self._list_parts()

    def _list_parts(self) -> None:
        parts = [part for group in self._groups for part in group]
        self._stretches = [part for part in parts if isinstance(part, Stretch)]
        self._others = [part for part in parts if not isinstance(part, Stretch)]

    def _prepare(self, public: States) -> bool:
        """Gradients and state for the step. Neighbours that no longer go together, because some
        have no gradient or another state, part for good.
        """
        for group in self._groups:
            for part in list(group):
                if isinstance(part, Stretch) and not self._ready(part, public):
                    if not isinstance(part, Neighbours):
                        return False
                    at = group.index(part)
                    self._state.pop(part.tensor, None)
                    part.tensor.grad = None
                    group[at : at + 1] = part.part(public)
                    self._list_parts()
                    return self._prepare(public)
        for parameter in self._others:
            self._state.pop(parameter, None)
            if parameter in public:
                self._state[parameter] = public[parameter]
        return True

    def _ready(self, stretch: Stretch, public: States) -> bool:
        return stretch.hang_gradient() and stretch.take_state(public, self._state)

    def _show_state(self, public: States) -> None:
        for stretch in self._stretches:
            stretch.show_state(self._state, public)
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


def local(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """`optimizer` itself, once it is sure that it steps on flat local buffers: an error if it is of
    a kind that cannot, or has no parameter of a sharded model.
    """
    if type(optimizer) not in ELEMENTWISE:
        kinds = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        raise TypeError(
            f"sw.local takes optimizers that treat every element alike ({kinds}), got "
            f"{type(optimizer).__name__}; use it directly: it works on the sharded parameters"
        )
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if engine_of(parameter) is None:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} belongs to no sharded model; "
                    "build the optimizer from model.parameters() after sw.shard(model, plan)"
                )
    return optimizer


def _call(reference: Any) -> Any:
    return reference()


def _same(now: list[torch.Tensor], then: list[torch.Tensor]) -> bool:
    return len(now) == len(then) and all(a is b for a, b in zip(now, then, strict=True))
