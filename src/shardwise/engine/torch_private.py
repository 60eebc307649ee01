"""Where torch versions differ (2.11 to 2.13), and names that torch keeps private and may move: each
wrapped once, with why it is used and what would not work without it.
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import functools
import importlib.util
import os
import re
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _composable_state
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim import optimizer as torch_optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from shardwise.kernels.torch_private import backward_pass

# torch's own, from here.
__all__ = [
    "REGISTRY_KEY",
    "STATE_KEY",
    "DTensorSpec",
    "DataParallelMeshDims",
    "FSDPState",
    "RegistryItem",
]

Call = TypeVar("Call", bound=Callable[..., Any])

# The versions that the tests pass on; README.md and pyproject.toml say the same.
TESTED = ("2.11", "2.13")


@functools.cache  # once in a process
def warn_if_untested() -> None:
    """A newer torch may have changed what this project relies on."""
    newest = tuple(int(part) for part in TESTED[1].split("."))
    running = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if running and tuple(map(int, running.groups())) > newest:
        warnings.warn(
            f"shardwise is tested with torch {TESTED[0]} to {TESTED[1]}, this is "
            f"{torch.__version__}: compare a few steps with one process before you rely on it",
            stacklevel=2,
        )


# Collectives and copies

# 2.13 renamed the two calls that take one flat tensor; the old names warn there. Looked up in
# `dist` at each call, so that whatever wraps them there (an emulated network, a recorder) is met by
# torch's engines and by ours alike.
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
REDUCE_SCATTER = (
    "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
)
_GROUPED = (
    "all_gather_single_coalesced"
    if hasattr(dist.ProcessGroup, "all_gather_single_coalesced")
    else "allgather_into_tensor_coalesced"
)


def all_gather(output: torch.Tensor, input: torch.Tensor, group: Any) -> Any:
    return getattr(dist, ALL_GATHER)(output, input, group=group, async_op=True)


def reduce_scatter(output: torch.Tensor, input: torch.Tensor, group: Any) -> Any:
    return getattr(dist, REDUCE_SCATTER)(output, input, group=group, async_op=True)


def all_to_all(output: torch.Tensor, input: torch.Tensor, group: Any) -> Any:
    return dist.all_to_all_single(output, input, group=group, async_op=True)


# A stand-in for torch's collectives is to be met by every message, on all ranks (`emulation/`).
emulated = False
_OWN = {name: getattr(dist, name) for name in (ALL_GATHER, REDUCE_SCATTER, "all_reduce")}


def calls_are_torchs() -> bool:
    """Whether nothing stands in the place of torch's own collectives."""
    return all(getattr(dist, name) is own for name, own in _OWN.items())


def timeout_of(group: Any, device: torch.device) -> float:
    """How many seconds a group's backend waits for other ranks. Without it messages that pass the
    backend by would wait for another time than the program has asked for.
    """
    options = getattr(group._get_backend(device), "options", None)
    wait: datetime.timedelta = getattr(options, "_timeout", dist.default_pg_timeout)
    return wait.total_seconds()


@functools.cache
def has_triton() -> bool:
    """Whether kernels can be built here that convert to 8-bit floats, as GPUs do from 8.9 on."""
    if importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


def is_recording(rehearsed: bool = False) -> bool:
    """The device runs nothing of what is called now, a CUDA graph takes it; or that is `rehearsed`.
    torch would start the device to answer.
    """
    started = torch.cuda.is_initialized()
    return rehearsed or (started and torch.cuda.is_current_stream_capturing())


# Who asks whether a graph is being recorded to do its own part of it rightly.
_TAKES_PART = (
    "shardwise.",
    "torch.cuda",
    "torch.distributed.",
    "torch.optim.",
    "torch._",
    "triton.",
)


@contextlib.contextmanager
def answers_about_recording(denied: bool) -> Iterator[set[str]]:
    """The modules of the program and its libraries that ask torch whether a graph is being
    recorded, to take another way then. `denied`: they hear no, and record the way that they
    rehearsed. Without it Transformers masks in a graph what it leaves out elsewhere, and attention
    takes twice as long.
    """
    asked: set[str] = set()
    ask = torch.cuda.is_current_stream_capturing

    def answer() -> bool:
        asker = sys._getframe(1).f_globals.get("__name__", "")
        if asker.startswith(_TAKES_PART):
            return ask()
        asked.add(asker)
        return not denied and ask()

    torch.cuda.is_current_stream_capturing = answer
    try:
        yield asked
    finally:
        torch.cuda.is_current_stream_capturing = ask


def all_gather_grouped(
    outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], group: Any
) -> Any:
    """Many gathers in one call of the backend, each into its own place. Without the options it
    blocks the host, and large parameters would have to travel one call each.
    """
    options = torch._C._distributed_c10d.AllgatherOptions()
    options.asyncOp = True
    return getattr(group, _GROUPED)(outputs, inputs, options)


def chunk_cat(tensors: list[torch.Tensor], ranks: int, output: torch.Tensor) -> None:
    """Cut each tensor into `ranks` equal row blocks (zero-padded) and lay them side by side,
    casting: one kernel. Without it a reduce is packed by several for each gradient.
    """
    torch._chunk_cat(tensors, 0, ranks, out=output)


# Many tensors copied in one call; one by one costs a launch each, which small parameters feel.
foreach_copy_ = torch._foreach_copy_
foreach_add_, foreach_mul_ = torch._foreach_add_, torch._foreach_mul_
foreach_norm = torch._foreach_norm


# Modules


def _as_dict(get: Callable[[nn.Module], Any]) -> Callable[[nn.Module], dict[str, Any]]:
    """`get`, and of a scripted module a copy of what it has in the place of a dict."""

    def own(module: nn.Module) -> dict[str, Any]:
        found = get(module)
        return found if isinstance(found, dict) else dict(found.items())

    return own


# A module's own dicts. Hanging a parameter up is one dict write, many times a step: `setattr` takes
# microseconds for it, and passes through whatever the module's class does there. Without them ties
# cannot be made or seen: `named_parameters` skips what it has met.
parameters_of: Callable[[nn.Module], dict[str, nn.Parameter | None]] = _as_dict(
    attrgetter("_parameters")
)
buffers_of: Callable[[nn.Module], dict[str, torch.Tensor | None]] = _as_dict(attrgetter("_buffers"))
forward_hooks: Callable[[nn.Module], dict[int, Callable[..., Any]]] = attrgetter("_forward_hooks")
children_of: Callable[[nn.Module], dict[str, nn.Module | None]] = _as_dict(attrgetter("_modules"))


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """What `module.compile()` left to be called instead of the module. It has compiled the hooks,
    too; without the name they could not run outside the compiled code.
    """
    return module._compiled_call_impl


def set_compiled_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    module._compiled_call_impl = call


def compiled_modules(model: nn.Module) -> tuple[str, ...]:
    """Names of those whose call `nn.Module.compile` has replaced. torch drops that when it copies
    or pickles a module; without this a copy would run as it was written.
    """
    return tuple(n for n, m in model.named_modules() if m._compiled_call_impl is not None)


def call_hooked(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module with its hooks, past what stands in its call's place."""
    return module._call_impl(*args, **kwargs)


# Compilation and transforms


def never_compiled(function: Call) -> Call:
    """`function`, run as it is also when what calls it is compiled. (torch.compiler.disable would
    load the compiler for everybody.)
    """
    frame_callback = torch._C._dynamo.eval_frame.get_eval_frame_callback

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or frame_callback() is not None:
            return torch._dynamo.disable(function, recursive=True)(*args, **kwargs)
        return function(*args, **kwargs)

    _skip_frames(cast(FunctionType, call))
    return cast(Call, call)


def _skip_frames(function: FunctionType) -> None:
    """Let the compiler leave the function's own code as it is. With `fullgraph=True` what cannot be
    compiled would be an error.
    """
    skip = torch._C._dynamo.eval_frame._FrameAction.SKIP
    default = torch._C._dynamo.eval_frame._FrameAction.DEFAULT
    strategy = torch._C._dynamo.eval_frame._FrameExecStrategy(skip, default)
    torch._C._dynamo.eval_frame.set_code_exec_strategy(function.__code__, strategy)


def compiles_frames() -> bool:
    """Whether every function that is called now would be compiled: inside torch.compile, where it
    gave up on the caller. Without it an optimizer's hook would be compiled, too.
    """
    return torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of a class that holds other tensors and acts for them. Without it float8
    and its kin would be packed as if their bytes were one tensor's.
    """
    return is_traceable_wrapper_subclass(tensor)


def inside_transform() -> bool:
    """Whether a transform of torch.func (jvp, grad, vmap) is under way. Without it the model does
    not train under one.
    """
    return bool(torch._C._are_functorch_transforms_active())


def transforms_go_on() -> bool | None:
    """In a forward under a transform of torch.func: whether a backward may go through the one that
    the innermost will run. None: torch itself knows. Without the names it may always: each runs so
    that one could, and all would stay gathered for one that never comes.
    """
    if not inside_transform():
        return None
    functorch: Any = torch._C._functorch
    levels = functorch.get_interpreter_stack()
    grads = [level for level in levels if level.key() == functorch.TransformType.Grad]
    if len(grads) != 1:
        return True if grads else None
    return bool(functorch.CGradInterpreterPtr(grads[0]).prevGradMode())


def outside_transforms(function: Call) -> Call:
    """`function`, for which tensors are plain, not wrapped for the transforms under way; which
    selective checkpointing does not see: it counts operations, and a recomputing forward has others
    (it gathers ahead); and whose own tensors outlive an inference mode that it is called in.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        dispatched = torch._C._len_torch_dispatch_stack()
        if not (dispatched or torch.is_inference_mode_enabled() or inside_transform()):
            return function(*args, **kwargs)
        with contextlib.ExitStack() as stack:
            if dispatched:
                stack.enter_context(_outside_selective_checkpoints())
            if torch.is_inference_mode_enabled():
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.no_grad())
            if inside_transform():
                from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

                stack.enter_context(temporarily_clear_interpreter_stack())
            return function(*args, **kwargs)

    return cast(Call, call)


@contextlib.contextmanager
def _outside_selective_checkpoints() -> Iterator[None]:
    """Take the modes of selective checkpointing off the stack, and put all back as it was."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as current_modes
    from torch.utils._python_dispatch import _pop_mode, _push_mode
    from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

    selective = (_CachedTorchDispatchMode, _CachingTorchDispatchMode)
    modes = current_modes()
    first = next((i for i, mode in enumerate(modes) if isinstance(mode, selective)), len(modes))
    taken = [_pop_mode() for _ in modes[first:]]
    others = [mode for mode in reversed(taken) if not isinstance(mode, selective)]
    for mode in others:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in others:
            _pop_mode()
        for mode in reversed(taken):
            _push_mode(mode)


# Autograd


def call_after_backward(callback: Callable[[], None]) -> None:
    """Run `callback` when the backward pass that is running now has ended. Without it nobody knows
    when the gradients of unused parameters will not come any more.
    """
    torch.autograd.Variable._execution_engine.queue_callback(outside_transforms(callback))


def inside_backward() -> bool:
    """Whether a backward pass runs now: a forward in it recomputes, and begins no pass."""
    return backward_pass() != -1


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor of which this one is a view, or itself. A product saves a weight as its transpose,
    and without the name nobody knows whose it is.
    """
    return tensor if tensor._base is None else tensor._base


def saves_by_itself() -> bool:
    """Whether autograd saves tensors as they are: nobody's hooks are there, and they may be.
    Without the names ours would take the place of a checkpoint's, or of an offload's.
    """
    if not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
        return False
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def made_by(view: torch.Tensor) -> Any:
    """The autograd node that made the tensor of which `view` is a view; None for no view. A view
    that is changed in place leaves the graph with its hooks; that node stays in it.
    """
    base = view._base
    return None if base is None else base.grad_fn


# Hooks that users hung on a sharded parameter, by `register_hook` and by
# `register_post_accumulate_grad_hook`; None or empty if there are none. Autograd meets the full
# parameter only, so without these names nobody would call them.
Hooks = dict[int, Callable[[torch.Tensor], Any]] | None
gradient_hooks: Callable[[torch.Tensor], Hooks] = attrgetter("_backward_hooks")
accumulated_hooks: Callable[[torch.Tensor], Hooks] = attrgetter("_post_accumulate_grad_hooks")

# The hooks around the steps of one optimizer, and of all: a step that others watch is torch's own,
# and a profile has to hear of a step before the engine does.
step_hooks: Callable[[torch.optim.Optimizer], tuple[Any, Any]] = attrgetter(
    "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
)


def expect_capture(optimizer: torch.optim.Optimizer) -> None:
    """Keep torch from advising against `capturable` in the eager steps before a recording."""
    optimizer._warned_capturable_if_run_uncaptured = True


def mark_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Tell a scheduler that the optimizer stepped: it looks for this, and without it warns that it
    was called too early.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]


def step_hooks_of_all() -> tuple[Any, Any]:
    before: Any = torch_optimizer._global_optimizer_pre_hooks
    return before, torch_optimizer._global_optimizer_post_hooks


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, run as it is where torch.compile compiles whatever is called."""
    return cast(Callable[..., Any], torch._dynamo.disable(function))


# A DTensor's local tensor itself; `to_local` makes another one each time.
local_tensor: Callable[[torch.Tensor], torch.Tensor] = attrgetter("_local_tensor")

# How often a tensor was written: what tells gathered parameters that went stale.
writes_of: Callable[[torch.Tensor], int] = attrgetter("_version")


def set_writes(tensor: torch.Tensor, writes: int) -> None:
    """Let autograd count so many writes to a tensor and its views. Without it a backward that comes
    to freed parameters by a way that nobody watches reads where no memory is.
    """
    torch._C._autograd._unsafe_set_version_counter((tensor,), (writes,))


def count_writes(master: torch.Tensor, visible: Sequence[torch.Tensor]) -> int:
    """Grows with every write to the masters of a unit: through the flat buffer, its views (the
    local tensors) or the parameters (a DTensor counts for itself).
    """
    return writes_of(master) + sum(map(writes_of, visible))


# Devices and process groups


_streams: dict[tuple[int, int, int], torch.cuda.Stream] = {}


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """torch.cuda.current_stream without making a new object each time (8 us of it, measured)."""
    key = torch._C._cuda_getCurrentStream(device.index or 0)
    stream = _streams.get(key)
    if stream is None:
        stream = _streams[key] = torch.cuda.current_stream(device)
    return stream


def backend_name(group: Any, device: torch.device) -> str:
    """Which backend moves a group's tensors on a device; empty where none is declared."""
    for pair in dist.get_backend_config(group).split(","):
        kind, _, backend = pair.partition(":")
        if kind == device.type:
            return backend
    return ""


def end_recorded_memory(device: torch.device, pool: Any) -> None:
    """Let the allocator leave a graph's pool. Without it memory that several streams have used is
    never given back after a recording that failed.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    with contextlib.suppress(RuntimeError):  # it has left it
        torch._C._cuda_endAllocateToPool(index, pool)


def let_segments_grow() -> None:
    """Let the allocator map memory page by page (`expandable_segments`), so that it reserves little
    beyond what is allocated. Whoever configures it in the environment is left alone.
    """
    if any(os.environ.get(name) for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")):
        return
    try:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    except AttributeError:
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")


def clear_workspaces() -> None:
    """Give back what cuBLAS keeps for every stream that it has met (on an H200 32 MiB for each
    thread and stream). Not while a graph is alive: it writes there when it is replayed.
    """
    torch._C._cuda_clearCublasWorkspaces()


@contextlib.contextmanager
def checkpoints_without_random_state(leave_out: bool) -> Iterator[None]:
    """Activation checkpointing without the device's random state, which cannot be read while a
    graph is recorded; for a step that draws no random numbers there. Without it such a step could
    not be recorded.
    """
    from torch.utils import checkpoint

    original = checkpoint.get_device_states
    if leave_out:
        checkpoint.get_device_states = lambda *args: ([], [])
    try:
        yield
    finally:
        checkpoint.get_device_states = original


def supported_devices(group: Any) -> set[str]:
    """Device types that a process group can move: those it was made for. (torch's `_device_types`
    knows the backends inside a group only, so none for a group that is written in Python.)
    """
    declared = dist.get_backend_config(group).split(",")
    return {device.type for device in group._device_types} | {
        pair.partition(":")[0] for pair in declared
    }


def default_store() -> Any:
    """The store through which the ranks of this world met. Without it what ranks compare would go
    through the user's groups, among their collectives.
    """
    world = dist.group.WORLD
    return _stores.get(world) or dist.distributed_c10d._get_default_store()


_stores: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def set_world(group: Any, store: Any = None) -> None:
    """Let this group, of all ranks, be the one that torch.distributed's functions default to;
    `store` is what ranks compare through there, if not the one that they meet through.
    """
    dist.distributed_c10d._update_default_pg(group)
    if store is not None:
        _stores[group] = store


def open_groups() -> list[Any]:
    """All process groups of this process, in the order in which they were made."""
    return list(dist.distributed_c10d._world.pg_map)


def in_process(store: Any) -> bool:
    """Whether the ranks that met through this store are threads of one process."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return isinstance(store, dist.HashStore)


# DTensors


class MemoryIdentity:
    """Which memory a parameter stands on: a DTensor on its local tensor, beside which `p.data = `
    exchanges a storage that has nothing in it; a plain parameter on an address in its storage. What
    is compared is held, so that nothing new can be taken for it.
    """

    def __init__(self, parameter: torch.Tensor) -> None:
        self._local, self._storage = local_of(parameter), parameter.untyped_storage()
        self._identity = self._storage._cdata
        self._address = parameter.data_ptr() if self._local is parameter else 0

    def is_of(self, parameter: torch.Tensor) -> bool:
        return (
            local_of(parameter) is self._local
            and parameter.untyped_storage()._cdata == self._identity
            and (self._local is not parameter or parameter.data_ptr() == self._address)
        )

    def lost_data(self, parameter: torch.Tensor) -> bool:
        """The `data` of a DTensor was set, which left its local tensor as it was."""
        stands = local_of(parameter) is self._local is not parameter
        return stands and not self.is_of(parameter)


def make_spec(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: torch.Size, dtype: torch.dtype
) -> DTensorSpec:
    """What a DTensor keeps beside its local tensor; one will do for any number of them. Without it
    every gradient would be described anew in every step.
    """
    _teach_dtensors()
    stride = torch.empty(shape, device="meta").stride()
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, stride, dtype))


def make_dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor that stands on `local` itself. (What DTensor.from_local makes of a host tensor is a
    copy on the mesh's device.)
    """
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


def views_of(flat: torch.Tensor, like: list[torch.Tensor]) -> list[torch.Tensor]:
    """A flat tensor as views of the given shapes, one after the other, in one call instead of two
    for each.
    """
    return list(torch._C._nn.unflatten_dense_tensors(flat, like))


@functools.cache
def _teach_dtensors() -> None:
    """Let copy.deepcopy, torch.save and what stages an asynchronous checkpoint take a DTensor that
    stands on a part of a storage. torch takes one that does not start there for a tensor with
    memory of its own, and fails. (A DTensor that claims to start there is no way out: torch.compile
    rejects it.)
    """
    methods = {"__deepcopy__": _deepcopy, "__reduce_ex__": _reduce, "data_ptr": _address}
    for name, method in methods.items():
        setattr(DTensor, name, method)


def _address(tensor: DTensor) -> int:
    """0, as of any DTensor that starts where its storage does: it has no memory of its own."""
    return int(torch.Tensor.data_ptr(tensor) - tensor.storage_offset() * tensor.itemsize)


def _deepcopy(tensor: DTensor, memo: dict[int, Any]) -> Any:
    local = tensor._local_tensor
    part = local.untyped_storage().nbytes() != local.nbytes
    if id(tensor) in memo or not part or local.is_meta or not tensor.is_leaf:
        return torch.Tensor.__deepcopy__(tensor, memo)
    copied = DTensor(local.detach().clone(), tensor._spec, requires_grad=tensor.requires_grad)
    copied.__dict__.update(copy.deepcopy(tensor.__dict__, memo))
    if tensor.grad is not None:
        copied.grad = copy.deepcopy(tensor.grad, memo)
    memo[id(tensor)] = copied
    return copied


def _reduce(tensor: DTensor, protocol: Any) -> Any:
    if not tensor.storage_offset():
        return torch.Tensor.__reduce_ex__(tensor, protocol)
    local = tensor._local_tensor.detach()
    start = local.as_strided(local.size(), local.stride(), 0)
    same = DTensor(start, tensor._spec, requires_grad=tensor.requires_grad)
    same.__dict__.update(tensor.__dict__)
    set_local(same, local)
    return torch.Tensor.__reduce_ex__(same, protocol)


_whole_numbers: weakref.WeakSet[DeviceMesh] = weakref.WeakSet()


def ask_for_whole_numbers(mesh: DeviceMesh) -> None:
    """From now on `item()`, `float()` and `bool()` of DTensors on `mesh` are errors where a rank
    has a part of the number only (`p.grad.norm()`): torch takes that part for the number.
    """
    _whole_numbers.add(mesh)
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers[torch.ops.aten._local_scalar_dense.default] = _number


def _number(item: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    mesh, placements = tensor.device_mesh, tensor.placements
    parts = [at for at, of in enumerate(placements) if mesh.size(at) > 1 and not of.is_replicate()]
    if parts and mesh in _whole_numbers:
        raise RuntimeError(
            "a number (item(), float(), bool(), if) was asked of a DTensor of which each rank has "
            f"its own part (placements {tuple(placements)}), so ranks would get different ones. "
            "Ask for the whole on all ranks first: value.full_tensor().item()"
        )
    return item(local_tensor(tensor))


class Standing:
    """Where many parameters hang, and on which memory, for whoever looks at all of them before
    every step: without the storage that a DTensor has beside its values.
    """

    def __init__(
        self, hung: Sequence[tuple[dict[str, Any], str, nn.Parameter, MemoryIdentity]]
    ) -> None:
        self._dicts, self._keys = [own for own, *_ in hung], [key for _, key, *_ in hung]
        self._parameters = [parameter for _, _, parameter, _ in hung]
        self._sharded = [p for p in self._parameters if isinstance(p, DTensor)]
        self._locals = list(map(local_tensor, self._sharded))
        self._plain = [p for p in self._parameters if not isinstance(p, DTensor)]
        self._addresses = list(map(torch.Tensor.data_ptr, self._plain))

    @property
    def is_same(self) -> bool:
        return (
            all(map(is_, map(dict.get, self._dicts, self._keys), self._parameters))
            and all(map(is_, map(local_tensor, self._sharded), self._locals))
            and list(map(torch.Tensor.data_ptr, self._plain)) == self._addresses
        )


def make_parameter(tensor: DTensor, requires_grad: bool) -> nn.Parameter:
    """The DTensor itself as a parameter. (nn.Parameter would detach it and so give it another local
    tensor.)
    """
    tensor.requires_grad_(requires_grad)
    tensor._is_param = True
    return cast(nn.Parameter, tensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, itself and outside autograd; any other tensor as it is.
    (`to_local` gives another tensor each time, through autograd.)
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def set_local(tensor: DTensor, local: torch.Tensor) -> None:
    """Let a DTensor stand on other memory of the same shape and dtype. Without it a model that was
    moved or loaded would have other parameters than its optimizer.
    """
    tensor._local_tensor = local


def give_memory(tensor: torch.Tensor, device: torch.device) -> None:
    """Let a tensor on the meta device become one with memory of its own, under everybody who holds
    it. Without it an optimizer that was made before would train nothing.
    """
    made = torch.empty_like(tensor, device=device)
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, requires_grad=tensor.requires_grad)
    made.__dict__.update(tensor.__dict__)
    torch.utils.swap_tensors(tensor, made)


def completed(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor whose functional collective, if any, has ended. Without it tensor parallel gradients
    would be packed before they are there.
    """
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


# What torch's FSDP2 and DeviceMesh have


def insert_module_state(module: nn.Module, state: FSDPState) -> None:
    """Let torch find the state of a module. Without it torch's functions beside `fully_shard` take
    the module for one that is not sharded.
    """
    _composable_state._insert_module_state(module, state)


def remove_module_state(module: nn.Module) -> None:
    """Take it away again: a copy of the module is to have its own."""
    del _composable_state._module_state_mapping[module]


try:
    from torch.distributed.fsdp import DataParallelMeshDims
except ImportError:  # 2.11

    @dataclass
    class DataParallelMeshDims:  # type: ignore[no-redef]
        """Which dims of a full mesh are data parallel: sharded over, or replicated over."""

        shard: str | tuple[str, ...] | None = None
        replicate: str | tuple[str, ...] | None = None

        def __post_init__(self) -> None:
            if self.shard is None and self.replicate is None:
                raise ValueError(
                    "At least one of shard or replicate must be set in DataParallelMeshDims"
                )

        shard_names = property(lambda self: _names(self.shard))
        replicate_names = property(lambda self: _names(self.replicate))


def _names(given: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given or ())


def concatenate(meshes: list[DeviceMesh]) -> DeviceMesh:
    """One mesh with the axes of all of them, in order. Without it tensor parallel parameters cannot
    be DTensors on both meshes.
    """
    return DeviceMesh._concatenate(meshes)


def strided_shard(dim: int, split_factor: int) -> Placement:
    """The placement of a tensor that a later axis of its mesh had already cut along `dim`. Without
    it such a DTensor would put its rows together in a wrong order.
    """
    return _StridedShard(dim, split_factor=split_factor)


def shard_dim(placement: Placement) -> int | None:
    """The dim that a placement cuts, if it cuts one."""
    return placement.dim if isinstance(placement, Shard | _StridedShard) else None


def local_indices(tensor: DTensor) -> list[range | list[int]] | None:
    """Which indices of each dim of the whole the local tensor has; None outside of the mesh. Torch
    tells where a shard begins, which is not all of a strided one that lies apart.
    """
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    found: list[range | list[int]] = [range(size) for size in tensor.shape]
    for axis, placement in enumerate(tensor.placements):
        if placement.is_partial():
            raise ValueError(f"a DTensor of placements {tensor.placements} holds parts of sums")
        dim = shard_dim(placement)
        if dim is None:
            continue
        dim, ranks, own = dim % tensor.dim(), mesh.size(axis), found[dim]
        if type(placement) is Shard:
            rows = -(-len(own) // ranks)
            found[dim] = own[rows * coordinate[axis] : rows * (coordinate[axis] + 1)]
        else:
            split, _ = placement._split_tensor(  # type: ignore[attr-defined]
                torch.tensor(list(own)), ranks, with_padding=False, contiguous=False
            )
            found[dim] = split[coordinate[axis]].tolist()
    return found


def separate_store(store: Any) -> Any:
    """Another connection to the same store, for another thread: a call that waits holds a
    connection for itself. A store within this process has none to share.
    """
    try:
        return store.clone()
    except (RuntimeError, AttributeError, NotImplementedError):
        return store


def symmetric_all_gather(group: Any, backend: str) -> Any:
    """torch's all-gather with buffers of symmetric memory; None where torch has none."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives

    made = getattr(_fsdp_collectives, "SymmMemAllGather", None)
    return None if made is None else made(group, backend)


_RUNTIME = re.compile(r"cu(da)?[A-Z]")


def activity_of(event: Any) -> str:
    """What an event of torch's profiler is. 2.11 does not say: there the name tells."""
    if hasattr(event, "activity_type"):
        return str(event.activity_type())
    name = event.name()
    if event.is_user_annotation():
        return "user_annotation" if event.device_type().name == "CPU" else "gpu_user_annotation"
    if event.device_type().name == "CPU":
        return "cuda_runtime" if _RUNTIME.match(name) else "cpu_op"
    copies = {"Memcpy": "gpu_memcpy", "Memset": "gpu_memset"}
    return copies.get(name[:6], "kernel")


def flatten(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """All axes of a mesh as one, with a group of its own. Without it `fully_shard` takes no
    `dp_mesh_dims` of several axes.
    """
    return mesh._flatten(name)


def backend_of(group: Any, device: torch.device) -> Any:
    """What moves a group's tensors on a device. Without it buffers cannot come from its allocator
    (`set_allocate_memory_from_process_group_for_comm`).
    """
    return group._get_backend(device)


def join_states(root: FSDPState, states: Sequence[FSDPState]) -> None:
    """Let all states under a root share its context, as torch's do from the first forward on.
    Without it pipeline schedules find none of them.
    """
    root._state_ctx.all_states = list(states)
    for state in states:
        state._state_ctx, state._is_root = root._state_ctx, state is root


def load_older_home() -> None:
    """Import the module in which older versions had `fully_shard`. Without it a program that later
    imports it from there would keep shardwise's after torch's is put back.
    """
    import torch.distributed._composable.fsdp  # noqa: F401


def dcp_place(file: str, offset: int, length: int) -> Any:
    """Where DCP's reader finds an item. Without it only its own writer, which wants all tensors in
    memory at once, could write what it reads.
    """
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, offset, length)
