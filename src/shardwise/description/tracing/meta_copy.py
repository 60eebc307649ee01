"""A module's copy on the meta device, with hooks that tell a `Recorder` what runs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardwise.description.parameters import places
from shardwise.description.recompute import run_again
from shardwise.description.tracing.torch_private import pytree
from shardwise.description.workload import Recomputing
from shardwise.errors import UserError

if TYPE_CHECKING:
    from shardwise.description.tracing.trace import Recorder


def copy_to_meta(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """A copy of `model` without data, its floating-point parameters in `dtype`.

    The copy's tensors are put in deepcopy's memory beforehand, so no data is copied, whatever the
    model's size and device.
    """
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        if type(parameter.data).__name__ == "DTensor" or type(parameter).__name__ == "DTensor":
            raise UserError(
                f"parameter {name} is sharded already: describe the model before sharding it"
            )
        cast = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
        empty = torch.empty_like(parameter, device="meta", dtype=cast)
        memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for module in model.modules():
        values = [*module.buffers(recurse=False), *vars(module).values()]
        for value in pytree.tree_leaves(values):
            if isinstance(value, Tensor) and id(value) not in memo:
                memo[id(value)] = torch.empty_like(value, device="meta")
    try:
        return copy.deepcopy(model, memo)
    except (TypeError, RuntimeError) as error:
        raise UserError(
            f"{type(model).__name__} cannot be copied ({error}); describe a freshly built one, "
            'made under `with torch.device("meta")`'
        ) from error


def input_to_meta(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    copied = torch.empty_like(value, device="meta")
    return copied.requires_grad_() if value.requires_grad else copied


def stop_caching(copied: nn.Module) -> tuple[str, ...]:
    """Training keeps no cache of keys and values, and a recomputed block would fill it twice."""
    config: Any = getattr(copied, "config", None)
    if getattr(config, "use_cache", False) is not True:
        return ()
    config.use_cache = False
    return ("The model's config says use_cache: training is described without that cache.",)


def find_owners(model: nn.Module) -> Mapping[str, tuple[str, ...]]:
    """Each module's own parameters, by their first names."""
    names = {id(parameter): names for names, parameter in places(model)}
    return {
        name: tuple(names[id(p)][0] for p in module.parameters(recurse=False))
        for name, module in model.named_modules()
    }


def hook(
    copied: nn.Module,
    recorder: Recorder,
    casts: tuple[str, ...],
    dtype: torch.dtype | None,
    checkpoint: tuple[str, ...],
    recomputing: Recomputing,
) -> None:
    """Hook the copy: modules tell when they run, parameters when they have a gradient; the inputs
    of `casts` are cast to `dtype`, and `checkpoint` run under activation checkpointing.
    """
    modules = dict(copied.named_modules())
    for name in (*checkpoint, *casts):
        if name not in modules:
            raise ValueError(f"the model has no module {name!r}")
    for name, module in modules.items():
        if dtype is not None and name in casts:
            module.register_forward_pre_hook(_caster(dtype), prepend=True, with_kwargs=True)
        if name:
            _tell_when_run(module, name, recorder)
        if name in checkpoint:
            _checkpoint(module, name, recorder, recomputing)
    for name, parameter in copied.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(partial(recorder.note_gradient, name))


def _tell_when_run(module: nn.Module, name: str, recorder: Recorder) -> None:
    def before(_: nn.Module, args: Any) -> None:
        recorder.enter(name)

    def after(_: nn.Module, args: Any, output: Any) -> None:
        recorder.leave(name, output)

    module.register_forward_pre_hook(before, prepend=True)
    # Also when forward is left by an exception: a recomputation stops as soon as it has enough.
    module.register_forward_hook(after, always_call=True)


def _caster(dtype: torch.dtype) -> Callable[..., Any]:
    def cast(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return pytree.tree_map(
            lambda t: t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t,
            (args, kwargs),
        )

    return cast


def _checkpoint(module: nn.Module, name: str, recorder: Recorder, how: Recomputing) -> None:
    """Run the module's forward under activation checkpointing."""
    plain = module.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        if not recorder.in_backward:
            return plain(*args, **kwargs)
        # The second run does not pass through the module's call, which would have told.
        recorder.enter(name)
        result = None
        try:
            result = plain(*args, **kwargs)
        finally:
            recorder.leave(name, result)
        return result

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        return run_again(how, False, run, *args, **kwargs)

    module.forward = forward
