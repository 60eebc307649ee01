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
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.optim import optimizer as torch_optimizer

from shardwise.engine import (
    checks,
    torch_private,
)
from shardwise.engine.parameter_runs import GroupRuns

if TYPE_CHECKING:
    from shardwise.engine.engine import Engine

ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad,
    torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam,
    torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD,
)  # fmt: skip


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
            for parameter in parameters:
                _check_unmoved(parameter, optimizer)
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


class _FlatStates(dict[torch.Tensor, dict[str, Any]]):
    """The state of flat tensors. Of parameters that step as they are it is where they have it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self._public = optimizer.state

    def __missing__(self, parameter: torch.Tensor) -> dict[str, Any]:
        return cast(dict[str, Any], self._public[parameter])


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


def _stand_in(optimizer: torch.optim.Optimizer, known: LocalStep) -> torch.optim.Optimizer:
    """The same optimizer over flat tensors, for one step. The other one stays as it is."""
    made: torch.optim.Optimizer = object.__new__(type(optimizer))
    groups = _FlatGroups(optimizer, known)
    made.__dict__.update(optimizer.__dict__, param_groups=groups, state=groups.states)
    return made


# Where an optimizer has its LocalStep: on itself, so that both go in one collection. (torch pickles
# and copies nothing of an optimizer but its defaults, state and groups.)
_KEY = "_shardwise_local_step"
_installed = False


def watch_optimizers() -> None:
    """Check every optimizer at its `step` from now on, and let those over sharded parameters step
    on local rows. Installed with the first sharded model, not on import.
    """
    global _installed
    if not _installed:
        _installed = True
        torch_optimizer.register_optimizer_step_pre_hook(_Watcher(_before_step))


class _Watcher:
    """A hook of ours on every optimizer's step; those of others keep a step as torch does it."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook

    def __call__(self, *args: Any) -> Any:
        # A compiled step is the one on the parameters themselves, without a break for a hook.
        if torch.compiler.is_compiling():
            return None
        if torch_private.compiles_frames():
            torch_private.uncompiled(self.hook)(*args)
            return None
        return self.hook(*args)


def watch_steps(before: Callable[..., None], after: Callable[..., None]) -> list[Any]:
    """Call `before` each optimizer's step, also one on local rows, and `after` it with the
    optimizer as it was; for a profile, which must not change the way that a step goes.
    """
    first = torch_optimizer.register_optimizer_step_pre_hook(_Watcher(before))
    # Before all others.
    torch_private.step_hooks_of_all()[0].move_to_end(first.id, last=False)
    return [first, torch_optimizer.register_optimizer_step_post_hook(_Watcher(after))]


def _before_step(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Errors that a step would hide; then torch's `step` gets a stand-in for the optimizer."""
    known: LocalStep = optimizer.__dict__.setdefault(_KEY, LocalStep())
    engines = known.find_engines(optimizer)
    for engine in engines:
        engine.check_interrupted()
    if engines and _takes(optimizer):
        return (_stand_in(optimizer, known), *args[1:]), kwargs
    return None


def _check_unmoved(parameter: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Error if the optimizer is from before sharding."""
    moved = getattr(parameter, "_shardwise_moved", None)
    if moved is not None:
        raise RuntimeError(
            f"{type(optimizer).__name__} was built before sharding and holds the old parameter "
            f"{moved!r}, which no longer trains; build the optimizer from model.parameters() "
            "after sw.shard(model, plan) or fully_shard(model)"
        )


def _takes(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step on flat tensors would go unnoticed. Hooks would be shown the stand-in among
    the arguments of `step`, and only elementwise arithmetic is the same on rows.
    """
    return (
        type(optimizer) in ELEMENTWISE
        and not any(torch_private.step_hooks(optimizer))
        and all(map(_only_ours, torch_private.step_hooks_of_all()))
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
            if checks.engine_training(parameter) is None:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} belongs to no sharded model; "
                    "build the optimizer from model.parameters() after sw.shard(model, plan)"
                )
    return optimizer
