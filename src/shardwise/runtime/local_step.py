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
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import optimizer as torch_optimizer

from shardwise.runtime import guard
from shardwise.runtime.stretches import Neighbours, Part, State, States, Stretch, find_parts

if TYPE_CHECKING:
    from shardwise.runtime.engine import Engine

ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad,
    torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam,
    torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD,
)  # fmt: skip


class LocalStep:
    """What is known of one optimizer: the engines of its parameters, and the parts they step as."""

    def __init__(self) -> None:
        self._engines: list[weakref.ref[Engine]] = []
        self._found_from = (0, 0)  # how many parameter groups and marks there were then
        self._layouts: list[int] = []  # of the engines, when the parts were made
        self._visible: list[list[torch.Tensor]] = []  # by param group, as the optimizer has them
        self._parts: list[list[Part]] = []  # by param group, for the step
        self._stretches: list[Stretch] = []  # those of them that are
        self._state: defaultdict[torch.Tensor, State] = defaultdict(dict)
        self._hidden: list[list[torch.Tensor]] | None = None

    def find_engines(self, optimizer: torch.optim.Optimizer) -> list[Engine]:
        """The engines of the optimizer's parameters; looked for again where there are more
        parameter groups or engines now.
        """
        found_from = len(optimizer.param_groups), guard.marked
        if self._found_from != found_from:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            for parameter in parameters:
                _check_unmoved(parameter, optimizer)
            engines = {id(e): e for e in map(guard.engine_of, parameters) if e is not None}
            self._engines = [weakref.ref(engine) for engine in engines.values()]
            self._found_from = found_from
        return [engine for reference in self._engines if (engine := reference()) is not None]

    def take(self, optimizer: torch.optim.Optimizer, engines: list[Engine]) -> None:
        """Do the optimizer's step and leave nothing for its own until `restore`, if the parameters
        make stretches.
        """
        self._follow(optimizer, [engine.relayouts for engine in engines])
        if not self._stretches:
            return
        groups, public = optimizer.param_groups, optimizer.state
        lists = [group["params"] for group in groups]
        try:
            if not self._prepare(public):
                return
            optimizer.state = self._state
            for group, parts in zip(groups, self._parts, strict=True):
                group["params"] = [part.tensor for part in parts]
            type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]
        finally:
            optimizer.state = public
            for group, parameters in zip(groups, lists, strict=True):
                group["params"] = parameters
            for stretch in self._stretches:
                stretch.tensor.grad = None
        for group, parts in zip(groups, self._parts, strict=True):
            for part in parts:
                part.show_state(self._state, public)
            group["params"] = []
        self._hidden = lists

    def restore(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the optimizer its parameters back after a step that had nothing to do."""
        if self._hidden is not None:
            for group, parameters in zip(optimizer.param_groups, self._hidden, strict=False):
                group["params"] = parameters
            self._hidden = None

    def _follow(self, optimizer: torch.optim.Optimizer, layouts: list[int]) -> None:
        """Look at the parameters again where they, or the memory under them, are others now."""
        visible = [group["params"] for group in optimizer.param_groups]
        if (
            len(visible) == len(self._visible)
            and layouts == self._layouts
            and all(map(_same, visible, self._visible))
            and all(stretch.unmoved for stretch in self._stretches)
        ):
            return
        self._visible = [list(parameters) for parameters in visible]
        self._layouts = layouts
        self._state.clear()
        self._parts = [find_parts(parameters) for parameters in visible]
        self._list_stretches()

    def _list_stretches(self) -> None:
        parts = [part for group in self._parts for part in group]
        self._stretches = [part for part in parts if isinstance(part, Stretch)]

    def _prepare(self, public: States) -> bool:
        """Gradients and state for the step. Neighbours that no longer go together, because some
        have no gradient or another state, part for good. False if torch has to do the step.
        """
        for parts in self._parts:
            at = 0
            while at < len(parts):
                part = parts[at]
                if part.hang_gradient() and part.take_state(public, self._state):
                    at += 1
                elif isinstance(part, Neighbours):
                    parts[at : at + 1] = part.split(public, self._state)
                    self._list_stretches()
                else:
                    return False
        return True


_steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, LocalStep] = weakref.WeakKeyDictionary()
_installed = False


def watch_optimizers() -> None:
    """Check every optimizer at its `step` from now on, and let those over sharded parameters step
    on local rows. Installed with the first sharded model, not on import.
    """
    global _installed
    if not _installed:
        _installed = True
        torch_optimizer.register_optimizer_step_pre_hook(_Watcher(_before_step))
        after = torch_optimizer.register_optimizer_step_post_hook(_Watcher(_after_step))
        _first(torch_optimizer._global_optimizer_post_hooks, after)


class _Watcher:
    """A hook of ours on every optimizer's step; those of others keep a step as torch does it."""

    def __init__(self, hook: Callable[..., None]) -> None:
        self.hook = hook

    def __call__(self, *args: Any) -> None:
        self.hook(*args)


def watch_steps(before: Callable[..., None], after: Callable[..., None]) -> list[Any]:
    """Call `before` each optimizer's step, also one on local rows, and `after` it with the
    optimizer as it was; for a profile, which must not change the way that a step goes.
    """
    first = torch_optimizer.register_optimizer_step_pre_hook(_Watcher(before))
    _first(torch_optimizer._global_optimizer_pre_hooks, first)
    return [first, torch_optimizer.register_optimizer_step_post_hook(_Watcher(after))]


def _first(hooks: Any, handle: Any) -> None:
    """Let one of them be called before all others."""
    hooks.move_to_end(handle.id, last=False)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    known = _steps.get(optimizer)
    if known is None:
        known = _steps[optimizer] = LocalStep()
    known.restore(optimizer)  # its last step ended in an error
    engines = known.find_engines(optimizer)
    for engine in engines:
        engine.check_interrupted()
    if engines and _takes(optimizer, args, kwargs):
        known.take(optimizer, engines)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    known = _steps.get(optimizer)
    if known is not None:
        known.restore(optimizer)


def _check_unmoved(parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Error if the optimizer is from before sharding."""
    moved = getattr(parameter, "_shardwise_moved", None)
    if moved is not None:
        raise RuntimeError(
            f"{type(optimizer).__name__} was built before sharding and holds the old parameter "
            f"{moved!r}, which no longer trains; build the optimizer from model.parameters() "
            "after sw.shard(model, plan) or fully_shard(model)"
        )


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
        and _only_ours(torch_optimizer._global_optimizer_pre_hooks)
        and _only_ours(torch_optimizer._global_optimizer_post_hooks)
        and not torch.compiler.is_compiling()
        and not any(group.get("differentiable") for group in optimizer.param_groups)
    )


def _only_ours(hooks: Mapping[int, Any]) -> bool:
    return all(type(hook) is _Watcher for hook in hooks.values())


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
            if guard.engine_of(parameter) is None:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} belongs to no sharded model; "
                    "build the optimizer from model.parameters() after sw.shard(model, plan)"
                )
    return optimizer


def _same(now: list[torch.Tensor], then: list[torch.Tensor]) -> bool:
    return len(now) == len(then) and all(a is b for a, b in zip(now, then, strict=True))
