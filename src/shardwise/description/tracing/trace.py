"""Running a module once on the meta device, forward and backward, and writing down what happens.

Nothing is computed and nothing is allocated: the meta device knows shapes only. A model that reads
values runs for real instead (`real_run.py`). What is written down, in order: every kernel, every
storage that comes and goes, every tensor that autograd keeps, and in which module each happened.
`segments.py` makes a description of it for any choice of units.

A backward operator belongs where its forward was: autograd numbers its nodes as forward makes
them, so a node's number tells the moment of forward that it came from.
"""

from __future__ import annotations

import bisect
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from shardwise.description.model import KernelFact
from shardwise.description.parameters import dtype_name
from shardwise.description.tracing.device_kernels import DeviceKernels
from shardwise.description.tracing.host_scratch import scratch_of
from shardwise.description.tracing.known_results import KnownResults
from shardwise.description.tracing.meta_copy import (
    copy_to_meta,
    find_owners,
    hook,
    input_to_meta,
    stop_caching,
)
from shardwise.description.tracing.real_run import (
    check_fits,
    choose_device,
    copy_with_values,
    staying,
    tell,
    with_values,
)
from shardwise.description.tracing.torch_private import (
    TorchDispatchMode,
    current_node,
    is_compiled,
    loaded_compilers,
    next_node_number,
    node_number,
    parts_of,
    pytree,
    run_backward,
    storage_id,
    uncompiled,
    unwrapped,
    whole_sequences,
    without_functions,
)
from shardwise.description.workload import Recomputing
from shardwise.errors import UserError

TRACE_ON = ("auto", "meta", "cpu", "cuda")
_SCRATCH = -2  # the storage of what an operator takes inside
_SLOW = 300_000  # events: some seconds
Phase = Literal["forward", "recompute", "backward"]
What = Literal["kernel", "alloc", "free", "save", "gradient", "enter", "leave"]


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One thing that happened: in which phase, in which modules (outermost first).

    origin: of a backward event, the index of the forward (or recompute) event it goes back to.
    storage: the number of the storage; for gradient, of a parameter's that has come. nbytes: its
    size; for leave, the bytes of what the module gives. parameter: whose gradient has come.
    """

    what: What
    phase: Phase
    stack: tuple[str, ...]
    kernel: KernelFact | None = None
    storage: int = -1
    nbytes: int = 0
    origin: int = -1
    parameter: str = ""


@dataclass(frozen=True)
class ModelTrace:
    """One micro-batch's forward and backward, event by event."""

    events: tuple[TraceEvent, ...]
    gradients: frozenset[int]  # storages that became a parameter's gradient
    without_gradient: tuple[str, ...]  # trained parameters that got none
    inputs: frozenset[int]  # storages that were there before: parameters, buffers, inputs
    owners: Mapping[str, tuple[str, ...]]  # module name -> first names of its own parameters
    input_bytes: int
    buffer_bytes: int
    notes: tuple[str, ...] = ()  # what the reader should know of how it was made
    real: bool = False  # made while the model ran for real


@dataclass(frozen=True)
class _Setting:
    """How a module is run; see `trace_module`."""

    loss: Callable[..., Tensor] | None
    device: str
    autocast: torch.dtype | None
    dtype: torch.dtype | None
    casts: tuple[str, ...]
    checkpoint: tuple[str, ...]
    recomputing: Recomputing


def trace_module(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Callable[..., Tensor] | None = None,
    device: str = "cuda",
    autocast: str | None = None,
    compute_dtype: str | None = None,
    casts: tuple[str, ...] = (),
    checkpoint: tuple[str, ...] = (),
    recomputing: Recomputing | None = None,
    trace_on: str = "auto",
    build: Callable[[], nn.Module] | None = None,
) -> ModelTrace:
    """Copy the model to the meta device, run forward, the loss and backward there, and tell.

    loss: `loss(model, *args, **kwargs)` gives the scalar to start backward from; without it, it is
        the model's output if that is a scalar, its `.loss` if it has one, else the mean of its
        float tensors.
    device: whose fused kernels to take, "cuda" or "cpu". autocast: the name of a dtype.
    compute_dtype: parameters are cast to it, and the inputs of the modules `casts` too, as the
        engine does.
    checkpoint: modules to run under activation checkpointing, beside what the model does itself;
        `recomputing` says how; default: each of them whole.
    trace_on: "meta"; "cpu" or "cuda" to run a copy there for real; "auto": for real only if the
        meta device will not do, on a GPU if there is one. build: gives the model with values,
        for such a run of a model that has none.
    """
    if device not in ("cuda", "cpu"):
        raise ValueError(f"device is {device!r}, expected 'cuda' or 'cpu'")
    if trace_on not in TRACE_ON:
        raise ValueError(f"trace_on is {trace_on!r}, expected one of {TRACE_ON}")
    dtype = _dtype_named(compute_dtype, "compute_dtype")
    setting = _Setting(
        loss,
        device,
        _dtype_named(autocast, "autocast"),
        dtype,
        casts,
        checkpoint,
        recomputing or Recomputing(),
    )
    _run_first_operator()
    name, given = type(model).__name__, (tuple(args), dict(kwargs or {}))
    if loss is None:
        check_arguments(model, *given)
    notes: tuple[str, ...] = ()
    if trace_on in ("auto", "meta"):
        try:
            return _trace_on_meta(model, given, setting)
        except UserError:
            raise
        except Exception as error:
            if trace_on == "meta":
                raise UserError(
                    f"{name} cannot be described on the meta device: {tell(error)}. Its forward "
                    "reads values (.item(), a branch on a tensor, nonzero, numpy) or makes tensors "
                    "on a fixed device: let it run for real (trace_on='auto', --trace-on auto)"
                ) from error
            notes = (f"{name} cannot run on the meta device ({tell(error)}).",)
    where = choose_device(trace_on)
    try:
        valued = model
        if build is not None and any(p.is_meta for p in model.parameters()):
            check_fits(model, dtype, where)
            valued = build()
        copied = copy_with_values(valued, dtype, where)
        real = pytree.tree_map(lambda value: with_values(value, where), given)
        notes += (f"{name} was traced in a real run of one micro-batch on {where}.",)
        return replace(_trace(model, copied, real, setting, notes), real=True)
    except UserError as error:
        raise UserError(" ".join((*notes[:1], str(error)))) from error
    except Exception as error:
        raise UserError(
            f"{name} does not run on the example inputs ({_show_inputs(given)}): {tell(error)}"
            + _told_of_dtype(dtype)
        ) from error


def _run_first_operator() -> None:
    """At the first operator that a mode sees torch imports its compiler, which keeps the frames it
    was imported from, with all their tensors: a model's would seem to be kept.
    """
    with Recorder("cpu"):
        torch.empty(0, device="meta")


def _told_of_dtype(dtype: torch.dtype | None) -> str:
    """What to try for a model that may not bear a Plan's dtype of 16 bits."""
    if dtype is None or dtype.itemsize > 2:
        return ""
    return (
        f". Its parameters and inputs were in {dtype_name(dtype)}, which the Plan computes in: if "
        "it needs 32 bits, ask for them (compute_dtype='float32', --compute-dtype float32)"
    )


def _trace_on_meta(
    model: nn.Module, given: tuple[tuple[Any, ...], dict[str, Any]], setting: _Setting
) -> ModelTrace:
    """Once more if forward has just imported the compiler, which `uncompiled` knew nothing of."""
    before = loaded_compilers()

    def attempt() -> ModelTrace:
        copied = copy_to_meta(model, setting.dtype)
        return _trace(model, copied, pytree.tree_map(input_to_meta, given), setting)

    try:
        return attempt()
    except Exception:
        if loaded_compilers() == before:
            raise
    return attempt()


def _trace(
    model: nn.Module,
    copied: nn.Module,
    given: tuple[tuple[Any, ...], dict[str, Any]],
    setting: _Setting,
    notes: tuple[str, ...] = (),
) -> ModelTrace:
    """Run `copied`, which nobody else uses, and write it down by the names of `model`."""
    notes += stop_caching(copied)
    recorder = Recorder(setting.device)
    tensors = [*copied.parameters(), *copied.buffers()]
    inputs = [t for t in pytree.tree_leaves(given) if isinstance(t, Tensor)]
    recorder.know([*tensors, *inputs])
    kernels = DeviceKernels(setting.device, setting.autocast, recorder.note_kernel)
    hook(copied, recorder, setting.casts, setting.dtype, setting.checkpoint, setting.recomputing)
    args, kwargs = given
    with uncompiled(), whole_sequences(), recorder.recording(), kernels.active():
        with saved_tensors_hooks(recorder.note_saved, lambda tensor: tensor), staying():
            if setting.loss is not None:
                scalar = _check_loss(setting.loss(copied, *args, **kwargs))
            else:
                scalar, said = find_loss(copied(*args, **kwargs))
                notes += said
        kernels.forget_casts()
        recorder.in_backward, recorder.after_recompute = True, kernels.forget_casts
        run_backward(scalar)
    return ModelTrace(
        events=_as_compiled(recorder.events, model),
        gradients=frozenset(recorder.gradients),
        without_gradient=tuple(
            name
            for name, p in copied.named_parameters()
            if p.requires_grad and id(p) not in recorder.received
        ),
        inputs=frozenset(recorder.known),
        owners=find_owners(model),
        input_bytes=_bytes_of(inputs),
        buffer_bytes=_bytes_of(copied.buffers()),
        notes=notes + kernels.notes,
    )


def _as_compiled(events: list[TraceEvent], model: nn.Module) -> tuple[TraceEvent, ...]:
    """The kernels of modules that are compiled, and of their backward, as the compiler makes them;
    they ran as they were written.
    """
    compiled = {name for name, module in model.named_modules() if is_compiled(module)}
    if not compiled:
        return tuple(events)

    def fuse(event: TraceEvent) -> TraceEvent:
        stack = events[event.origin].stack if event.origin >= 0 else event.stack
        if event.kernel is None or compiled.isdisjoint(stack):
            return event
        return replace(event, kernel=event.kernel.compiled)

    return tuple(map(fuse, events))


def check_arguments(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Error if forward does not take these arguments."""
    try:
        inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise UserError(
            f"the forward of {type(model).__name__} takes {inspect.signature(model.forward)}, and "
            f"the example inputs are {_show_inputs((args, kwargs))}: {error}. What only the loss "
            "needs is made in the loss"
        ) from error
    except ValueError:
        return  # a forward without a signature


def _show_inputs(given: tuple[tuple[Any, ...], dict[str, Any]]) -> str:
    def show(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"{dtype_name(value.dtype)}{list(value.shape)}".replace(" ", "")
        return f"{value!r:.40}"

    args, kwargs = given
    return ", ".join([*map(show, args), *(f"{key}={show(v)}" for key, v in kwargs.items())])


class Recorder(TorchDispatchMode):
    """Writes down every operator below autograd, and what modules and autograd tell it."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._on_host = device == "cpu"
        self.events: list[TraceEvent] = []
        self.known: set[int] = set()
        self.gradients: set[int] = set()
        self.received: set[int] = set()  # parameters that got one
        self.stack: list[str] = []
        self._names: tuple[str, ...] = ()
        self._storages: dict[int, int] = {}  # address of a live storage -> its number
        self._watched: dict[int, weakref.ref[Any]] = {}
        self._numbers: list[int] = []  # autograd's node numbers at which the stack changed ...
        self._moments: list[int] = []  # ... and the index of the first event after that
        self._count = 0
        self._results = KnownResults()
        self.in_backward = False  # a module that runs then is recomputed
        self.after_recompute: Callable[[], None] | None = None
        self._on = False

    @contextmanager
    def recording(self) -> Iterator[None]:
        self._on = True
        self._mark()
        try:
            with self:
                yield
        finally:
            self._on = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with without_functions():
            out, kernel = self._results.run(func, args, kwargs or {})
            beside = scratch_of(func, args, out) if self._on_host else 0
            if beside:
                self._write("alloc", storage=_SCRATCH, nbytes=beside)
            for tensor in pytree.tree_leaves(out):
                if isinstance(tensor, Tensor):
                    for held in _strided(tensor):
                        self._meet(held)
            if beside:
                self._write("free", storage=_SCRATCH, nbytes=beside)
            if kernel is not None:
                self.note_kernel(kernel)
            return out

    def know(self, tensors: list[Tensor]) -> None:
        """These were there before the step: never an activation."""
        for tensor in tensors:
            for held in _strided(tensor):
                self.known.add(self._number(held))

    def note_kernel(self, kernel: KernelFact) -> None:
        self._write("kernel", kernel=kernel)

    def note_saved(self, tensor: Tensor) -> Tensor:
        """Autograd keeps `tensor` for backward."""
        for held in _strided(unwrapped(tensor)):
            self._write("save", storage=self._meet(held), nbytes=held.untyped_storage().nbytes())
        return tensor

    def note_gradient(self, name: str, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        if parameter.grad.layout != torch.strided:
            raise UserError(
                f"the gradient of a parameter of {list(parameter.shape)} is sparse, and shardwise "
                "reduces dense ones: build its module with sparse=False (nn.Embedding, "
                "nn.EmbeddingBag)"
            )
        storage = self._meet(parameter.grad)
        self.gradients.add(storage)
        self._write("gradient", storage=storage, parameter=name)
        self.received.add(id(parameter))

    def enter(self, name: str) -> None:
        self.stack.append(name)
        self._names = tuple(self.stack)
        self._mark()
        self._write("enter")

    def leave(self, name: str, result: Any) -> None:
        # A recomputation may be stopped inside: what it was in has ended too.
        while self.stack and self.stack[-1] != name:
            self.stack.pop()
        self._write("leave", nbytes=_total_bytes(result))
        if self.stack:
            self.stack.pop()
        self._names = tuple(self.stack)
        self._mark()
        if self.after_recompute is not None and not self.stack:
            self.after_recompute()

    def _mark(self) -> None:
        self._numbers.append(next_node_number())
        self._moments.append(len(self.events))

    def _write(self, what: What, **facts: Any) -> None:
        if not self._on:
            return
        phase: Phase = "forward"
        origin = -1
        if self.in_backward:
            phase = "recompute" if self._names else "backward"
            if phase == "backward":
                origin = self._find_origin()
        self.events.append(TraceEvent(what, phase, self._names, origin=origin, **facts))
        if len(self.events) == _SLOW:
            warnings.warn(
                "the model issues very many operators, as a loop over positions does, and a trace "
                "takes time for each: a shorter sequence or fewer layers are planned for sooner",
                stacklevel=2,
            )

    def _find_origin(self) -> int:
        node = current_node()
        if node is None:
            return -1
        number = node_number(node)
        if number >= 2**62:  # accumulating a gradient: wherever that happens
            return -1
        at = bisect.bisect_right(self._numbers, number) - 1
        return self._moments[at] if at >= 0 else -1

    def _meet(self, tensor: Tensor) -> int:
        """The number of the tensor's storage; written down as allocated if it is new."""
        before = self._count
        number = self._number(tensor)
        if number >= before:
            self._write("alloc", storage=number, nbytes=tensor.untyped_storage().nbytes())
        return number

    def _number(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        address = storage_id(storage)
        if address not in self._storages:
            number = self._storages[address] = self._count
            self._count += 1
            nbytes = storage.nbytes()
            self._watched[number] = weakref.ref(
                storage, lambda _: self._forget(address, number, nbytes)
            )
        return self._storages[address]

    def _forget(self, address: int, number: int, nbytes: int) -> None:
        self._storages.pop(address, None)
        self._watched.pop(number, None)
        self._write("free", storage=number, nbytes=nbytes)


def _strided(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensors whose memory it is: itself, or what a sparse one is made of."""
    if tensor.is_nested:
        raise UserError(
            "the model makes nested tensors, whose sizes are values: they cannot be described. Pad "
            "them in the model that is planned"
        )
    return parts_of(tensor)


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(held.nbytes for tensor in tensors for held in _strided(tensor))


def _dtype_named(name: str | None, argument: str) -> torch.dtype | None:
    dtype = None if name is None else getattr(torch, name, None)
    if name is not None and not isinstance(dtype, torch.dtype):
        raise ValueError(f"{argument} is {name!r}, expected the name of a torch dtype")
    return dtype


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in what a module gives, also in dataclasses."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            for each in fields(leaf):
                yield from _tensors_in(getattr(leaf, each.name))


def _total_bytes(value: Any) -> int:
    """Bytes of the distinct storages in what a module gives."""
    sizes = {}
    for found in _tensors_in(value):
        for tensor in _strided(unwrapped(found)):
            sizes[storage_id(tensor.untyped_storage())] = min(
                tensor.untyped_storage().nbytes(), tensor.numel() * tensor.element_size()
            )
    return sum(sizes.values())


def _check_loss(loss: Any) -> Tensor:
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
        return loss
    got = f"a {type(loss).__name__}"
    if isinstance(loss, Tensor):
        got = f"a tensor of shape {tuple(loss.shape)}" + " without gradient" * (
            not loss.requires_grad
        )
    raise UserError(f"the loss gave {got}, expected one number with a gradient")


def find_loss(output: Any) -> tuple[Tensor, tuple[str, ...]]:
    """What to start backward from, see `trace_module`; and a word on it where it was guessed."""
    named = getattr(output, "loss", None)
    if named is None and isinstance(output, Mapping):
        named = output.get("loss")
    if isinstance(named, Tensor) and named.numel() == 1 and named.requires_grad:
        return named, ()
    leaves = [tensor for tensor in _tensors_in(output) if tensor.requires_grad]
    if not leaves:
        raise UserError(
            "the model's output carries no gradient, so it has no backward to describe: is every "
            "parameter frozen, or does forward run under no_grad?"
        )
    if len(leaves) == 1 and leaves[0].dim() == 0:
        return leaves[0], ()
    total = leaves[0].mean()
    for tensor in leaves[1:]:
        total = total + tensor.mean()
    return total, ("The loss is taken to be the mean of the output: loss=, --loss gives another.",)
