"""The class that a sharded module gets: torch's FSDPModule, every method on our engine."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import UnshardHandle as TorchUnshardHandle

from shardwise.engine.attach import divide
from shardwise.engine.checks import explain
from shardwise.engine.unit import Unit
from shardwise.fsdp2 import memory
from shardwise.fsdp2.sharding import Sharding, copy_sharded, sharding_of, shardings_in


class UnshardHandle(TorchUnshardHandle):
    """Waits for an `unshard`, after which the module holds its full parameters."""

    def __init__(self, units: list[Unit] | None = None) -> None:
        self._units = units or []

    def wait(self) -> None:
        for unit in self._units:
            unit.wait()
            unit.show()
        self._units = []


class FSDPModule(TorchFSDPModule):
    """What torch's FSDPModule promises. A module's class is replaced by one of this and its own.

    torch's own `set_force_sum_reduction_for_comms` and `_set_unshard_async_op` stay: they go over
    the groups of torch's state, of which ours has none, and there is nothing to change. Only sums
    travel, and buffers are allocated in the current stream's order in any case.
    """

    # torch finds the unsharded class here: [this module's, ours, torch's, the original].
    _orig_cls_mro_index: int = 3

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Slices of a sharded container are plain containers."""
        original = cast(Any, cls.__mro__[cls._orig_cls_mro_index])
        made = original.__new__(original, *args, **kwargs)
        made.__init__(*args, **kwargs)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy_sharded(cast(nn.Module, self), memo)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters, also of those in whose places the gathered ones
        hang now: after an evaluation they are what `parameters()` gives, as in torch.
        """
        cast(Any, super()).zero_grad(set_to_none)
        here = set(cast(nn.Module, self).modules())
        for p in (unit.parameters for unit in _units(self, recurse=True) if unit.is_shown):
            for member, parameter in zip(p.members, p.visible, strict=True):
                if parameter.grad is not None and any(m in here for m, _ in member.places):
                    if set_to_none:
                        parameter.grad = None
                    else:
                        parameter.grad.zero_()

    # Gathering and freeing

    def reshard(self) -> None:
        """Free this module's full parameters, not those of modules in it."""
        for unit in _units(self):
            unit.free()

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this module's full parameters, not those of modules in it."""
        sharding = self._get_fsdp_state()
        sharding.prepare()
        for unit in sharding.units:
            unit.gather()
        handle = UnshardHandle(sharding.units)
        if async_op:
            return handle
        handle.wait()
        return None

    def reset_iter_state(self) -> None:
        """Start anew after an exception in forward or backward; what had been summed is lost."""
        self._get_fsdp_state()._reset_iter_state()

    # When to communicate

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether the end of the next backward waits for the sums."""
        sharding = self._get_fsdp_state()
        sharding.is_last_backward = is_last_backward
        if sharding.engine is not None:
            sharding.engine.schedule.last_backward = is_last_backward

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Whether backward reduces gradients, or only adds them up on this rank."""
        for unit in _units(self, recurse):
            unit.options.scatters = unit.options.all_reduces = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward also all-reduces over the replicas (HSDP)."""
        for unit in _units(self, recurse):
            unit.options.all_reduces = requires_all_reduce

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether full parameters are freed after forward."""
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                "reshard_after_forward should be a bool, got "
                f"{type(reshard_after_forward).__name__}: {reshard_after_forward!r}"
            )
        for sharding in _shardings(self, recurse):
            sharding.auto_keep = False
            for unit in sharding.units:
                unit.options.keep = not reshard_after_forward

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Whether full parameters are freed after backward."""
        for unit in _units(self, recurse):
            unit.options.keep_after_backward = not reshard_after_backward

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether backward needs this module's parameters at all (an embedding's does not)."""
        for unit in _units(self):
            unit.options.gathers_in_backward = unshard_in_backward

    def set_modules_to_forward_prefetch(self, modules: list[TorchFSDPModule]) -> None:
        """Gather these when this module's forward begins, instead of what ran next last time."""
        ahead = _units_of(modules)
        for unit in _units(self):
            unit.options.gather_ahead = ahead

    def set_modules_to_backward_prefetch(self, modules: list[TorchFSDPModule]) -> None:
        """Gather these when this module's backward begins, instead of what ran next last time."""
        ahead = _units_of(modules)
        for unit in _units(self):
            unit.options.gather_ahead_backward = ahead or None

    def set_post_optim_event(self, event: Any) -> None:
        """Let the next forward's gathers also wait for `event`. They follow the current stream in
        any case: full parameters take memory in its order.
        """
        stream = self._get_fsdp_state().get_executor().gathers.stream
        if stream is not None:
            stream.wait_event(event)

    # How gradients are summed

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of gradients by `factor` instead of the number of ranks."""
        for unit in _units(self):
            divide(unit, factor)

    def set_all_reduce_hook(
        self,
        hook: Callable[[torch.Tensor], None],
        *,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        """Call `hook` on the reduced gradients of this module, before they are divided."""
        units = _one_group(self, "set_all_reduce_hook")
        if stream is not None and any(unit.mesh.replicate.size > 1 for unit in units):
            raise ValueError("stream cannot be set when using native HSDP")
        for unit in units:
            unit.options.after_reduce, unit.options.after_reduce_stream = hook, stream

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Whether parameters that no rank used get zeros or no gradient. Where some ranks did use
        them, the others' count as zeros in any case.
        """
        for unit in _units(self, recurse):
            unit.options.zeroes_unused = reduce_scatter_unused_params

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """How many reduces may be under way before backward waits for the oldest."""
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(
                f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}"
            )
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be a positive int, got {max_input_buffers}")
        for sharding in _shardings(self, recurse):
            sharding.reduce_depth = max_input_buffers
            if sharding.engine is not None:
                root = cast(nn.Module, sharding.engine.structure.model())
                depths = [other.reduce_depth for other in shardings_in(root)]
                sharding.engine.schedule.reduces.depth = max(depths)

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Give reduce-scatters a process group of their own, so that they pass gathers by."""
        for unit in _units(self, recurse):
            unit.mesh.separate_scatters(enable)

    # With what memory and calls

    def set_custom_all_gather(self, comm: Any) -> None:
        """Gather this module by `comm` (torch's AllGather: `allocate`, and a call)."""
        for unit in _one_group(self, "set_custom_all_gather"):
            unit.options.custom_gather = comm
            unit.remake_gather()

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Reduce-scatter this module by `comm` (torch's ReduceScatter)."""
        for unit in _one_group(self, "set_custom_reduce_scatter"):
            unit.options.custom_scatter = comm

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Take the buffers of collectives from the process group's allocator, if it has one."""
        for unit in _units(self):
            memory.allocate_from_group(unit, enable)
            unit.remake_gather()

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """Take the gathers' buffers from symmetric memory (NCCL only)."""
        for unit in _units(self):
            memory.allocate_symmetric(unit, backend)
            unit.remake_gather()

    def _get_fsdp_state(self) -> Sharding:
        sharding = sharding_of(cast(nn.Module, self))
        if sharding is None:
            raise AssertionError(f"No FSDP state found on {self}")
        return sharding

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """Cast or move the sharded parameters, then take over what they became; those of several
        modules sharded as one group once the last of these is done.
        """
        self.reshard()
        result = super(TorchFSDPModule, self)._apply(fn, recurse)  # type: ignore[misc]
        for unit in _units(self):
            if unit.parameters.are_alike():
                unit.adopt_changes()
        return result


def _shardings(module: Any, recurse: bool) -> list[Sharding]:
    return shardings_in(module) if recurse else [module._get_fsdp_state()]


def _units(module: Any, recurse: bool = False) -> list[Unit]:
    return [unit for sharding in _shardings(module, recurse) for unit in sharding.units]


def _units_of(modules: Iterable[Any]) -> list[Unit]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"Expects FSDPModule but got {type(module)}: {module}")
    return [unit for module in modules for unit in _units(module)]


def _one_group(module: Any, method: str) -> list[Unit]:
    """The module's units, which must all move in the same groups."""
    units = _units(module)
    if len({id(unit.mesh) for unit in units}) > 1:
        raise ValueError(
            f"{method} is not supported with multiple param groups (from per-param mesh via "
            "shard_placement_fn): it would be ambiguous across groups with different meshes."
        )
    return units


_classes: dict[type, type] = {}


def become_sharded(module: nn.Module) -> None:
    """Swap the module's class for one that is also an FSDPModule. The methods that it and its bases
    add to nn.Module's, but for `forward`, explain an error for reading sharded parameters.
    """
    original = type(module)
    if original not in _classes:
        known = {*dir(nn.Module), *dir(FSDPModule)}
        sharded = type(f"FSDP{original.__name__}", (FSDPModule, original), {})
        for name in dir(original):
            home = next((base for base in original.__mro__ if name in vars(base)), object)
            method = vars(home).get(name)
            is_own = issubclass(home, nn.Module) and name not in known and name[:2] != "__"
            if is_own and isinstance(method, FunctionType):
                setattr(sharded, name, _explained(sharded, method, name))
        _classes[original] = sharded
    module.__class__ = _classes[original]


def _explained(sharded: type, method: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A method whose error for reading sharded parameters names the call that makes it work. It
    calls what the original class has under that name by then.
    """

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return getattr(super(sharded, self), name)(*args, **kwargs)
        except RuntimeError as error:
            explain(
                error,
                f"Call register_fsdp_forward_method(module, {name!r}) before `{name}`, so that it "
                "gathers the module's parameters as forward does",
            )
            raise

    return call
