"""Hooks: what a module's forward, the gradients of its inputs and outputs, and the steps of
optimizers tell the engine.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, cast

import numpy
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from shardwise.engine import marks, static, torch_private
from shardwise.engine.aside import Aside
from shardwise.engine.checks import explain, tell_written
from shardwise.engine.unit import Unit
from shardwise.schedule.unit import State

if TYPE_CHECKING:
    from shardwise.engine.engine import Engine


_ATTRIBUTE = "_shardwise_node"


class Node:
    """A module's hooks: which units run with it, and what its inputs and outputs tell."""

    def __init__(
        self,
        module: nn.Module,
        units: list[Unit],
        find_engine: Callable[[], Engine] | None = None,
        input_dtype: torch.dtype | None = None,
        output_dtype: torch.dtype | None = None,
    ) -> None:
        """`find_engine` is asked at the first forward, where the engine is not known before."""
        self.module, self.units = module, units
        self._engine: Engine | None = None
        self._find_engine = find_engine
        self.is_root = False
        self.input_dtype, self.output_dtype = input_dtype, output_dtype
        self.input_device: torch.device | None = None  # where the root's inputs are moved to
        self._runs = 0  # forwards of the module that are under way
        # While its forward runs: inputs that carry a gradient, and what made them.
        self._entered: dict[int, tuple[weakref.ref[torch.Tensor], Any]] = {}
        self.aside = Aside(module, is_part=lambda child: node_of(child) is None)
        if any(unit.options.compute_dtype is not None for unit in units):
            _let_norms_compute_as_their_statistics(module)
        self.hang()

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{type(self.module).__name__} is sharded and cannot be pickled (torch.save(model), "
            "another process): it holds this rank's rows and process groups. Save "
            "sw.full_state_dict(model) or model.state_dict(), or call sw.save on all ranks"
        )

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            assert self._find_engine is not None
            return self._find_engine()
        return self._engine

    def join(self, engine: Engine, is_root: bool) -> None:
        self._engine, self.is_root = engine, is_root
        # Freeing inside backward waits for the gradient of the unit's input: only then is every
        # weight used up.
        self.tracks_inputs = engine.policy.frees_in_pass and not is_root

    def bring(self, unit: Unit) -> None:
        """Send for a unit that the module needs at once, before the step's others are looked at."""
        unit.gather()

    def hang(self) -> None:
        """Put the hooks on the module."""
        module = self.module
        module.__dict__[_ATTRIBUTE] = weakref.ref(self)
        self._handles: list[Any] = []
        self._compiled = compiled = torch_private.compiled_call(module)
        if compiled is None:
            self._handles = [
                module.register_forward_pre_hook(self.before, prepend=True, with_kwargs=True),
                module.register_forward_hook(self.after),
                module.register_forward_hook(self._explain, always_call=True),
            ]
            return

        # `module.compile()` compiles the hooks too; these must run outside the compiled code.
        call = functools.partial(self.run, compiled)
        torch_private.set_compiled_call(module, call)

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call `function` as the module's forward."""
        args, kwargs = self.before(self.module, args, kwargs)
        try:
            output = function(*args, **kwargs)
        except BaseException:
            self._entered = {}
            self._end_aside()
            self._leave()
            raise
        return self.after(self.module, args, output)

    def _end_aside(self) -> None:
        if self.aside.entered:
            self.aside.end()

    def unhang(self) -> None:
        """Take them off again."""
        del self.module.__dict__[_ATTRIBUTE]
        for handle in self._handles:
            handle.remove()
        torch_private.set_compiled_call(self.module, self._compiled)

    @torch_private.never_compiled
    def before(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Before forward: bring the units together; cast and watch the inputs."""
        begins, device = self._bring_units(), self.input_device
        if begins and device is not None:
            moved = transform((args, kwargs), lambda t: t if t.device == device else t.to(device))
            args, kwargs = moved
        if self.input_dtype is not None:
            args, kwargs = cast_to((args, kwargs), self.input_dtype)
        if torch.is_grad_enabled():
            self._note_inputs(args, kwargs)
            if self.tracks_inputs:
                self._watch_inputs(args, kwargs)
            aside = self.aside
            if not (aside.is_idle and list(map(len, aside.hooks)) == aside.seen):
                aside.begin(self.engine, (args, kwargs))
        if marks.on is not None:
            marks.on.enter(
                self._unit_name, "backward" if torch_private.inside_backward() else "forward"
            )
        return args, kwargs

    @torch_private.outside_transforms
    def _bring_units(self) -> bool:
        """Gather and show what the module runs with; true where a pass begins with it."""
        engine = self.engine
        outermost = engine.forward_root is None or engine.forward_root is self or self.is_root
        begins = outermost and not torch_private.inside_backward()
        if begins:
            engine.begin_forward(self)
        progress = engine.schedule.current.of
        for unit in self.units:
            if not progress[unit].ran or unit.state is not State.READY or not unit.is_shown:
                engine.before_forward(unit)
        for unit in self.units:
            unit.running += 1
        self._runs += 1
        return begins

    def _leave(self) -> None:
        """A forward of the module is over, well or not."""
        if self._runs:
            self._runs -= 1
            for unit in self.units:
                unit.running -= 1

    @property
    def _unit_name(self) -> str:
        return self.units[-1].name if self.units else ""

    def _note_inputs(self, args: Any, kwargs: Any) -> None:
        found = (t for t in tensors_in((args, kwargs)) if t.requires_grad)
        self._entered = {id(t): (weakref.ref(t), t.grad_fn) for t in found}

    def _made_here(self, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Outputs that are not inputs as they came: the gradient of one that is only passed through
        (T5 hands a bias from block to block) is complete long after this module's backward.
        """
        entered, self._entered = self._entered, {}
        if not entered:
            return outputs
        own = []
        for tensor in outputs:
            reference, made_by = entered.get(id(tensor), (None, None))
            passed = reference is not None and reference() is tensor
            if not passed or made_by is not tensor.grad_fn:
                own.append(tensor)
        return own or outputs

    def _watch_inputs(self, args: Any, kwargs: Any) -> None:
        """When the gradient of an input is complete, this module's backward is over."""
        units = [unit for unit in self.units if unit.module_count == 1]
        if not units:
            return
        progress = self.engine.schedule.current.of
        # The first input tells.
        first = next((t for t in tensors_in((args, kwargs)) if t.requires_grad), None)
        if first is None:
            for unit in units:
                progress[unit].untracked += 1
            return
        for unit in units:
            progress[unit].open_inputs += 1
        if first.grad_fn is None:
            return  # a leaf may come again in every step and would gather hooks: free at the end
        watch = getattr(first, "_shardwise_watch", None)
        if watch is None:
            watch = self._watch()
            first.register_hook(watch)
        watch.consumers += [(weakref.ref(self), weakref.ref(unit)) for unit in units]

    def _watch(self, producer: weakref.ref[Node] | None = None) -> Watch:
        # `hold` is None in a backward that runs the forward again: then it has begun.
        return Watch(self.engine.hold, producer)

    @torch_private.outside_transforms
    def input_done(self, unit: Unit) -> None:
        """The gradient of an input of `unit`'s module is complete."""
        progress = self.engine.schedule.current.of[unit]
        progress.open_inputs -= 1
        if progress.open_inputs <= 0:
            self.engine.inputs_done(unit)

    @torch_private.never_compiled
    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """After forward: watch the outputs for backward's arrival; let the units go."""
        if marks.on is not None:
            marks.on.leave()
        self._end_aside()
        if self.output_dtype is not None:
            output = cast_to(output, self.output_dtype)
        watched = (
            [t for t in tensors_in(output) if t.requires_grad] if torch.is_grad_enabled() else []
        )
        for tensor in self._made_here(watched):
            watch = self._watch(weakref.ref(self))
            origin = torch_private.made_by(tensor)
            if origin is not None:  # the tensor and its hooks may leave the graph, that node stays
                origin.register_prehook(watch)
                watch = self._watch()
            tensor.register_hook(watch)
            tensor._shardwise_watch = watch  # type: ignore[attr-defined]
        if torch_private.inside_transform() and torch.is_grad_enabled():
            output = transform(output, self._announce)
            watched = [t for t in tensors_in(output) if t.is_floating_point()]
        hides = not watched and torch.is_grad_enabled() and _may_hide_tensors(output)
        if hides:
            self.aside.miss()
        self._let_units_go(bool(watched) or hides)
        return output

    @torch_private.outside_transforms
    def _let_units_go(self, awaits_backward: bool) -> None:
        engine = self.engine
        recomputes = torch_private.inside_backward()
        self._leave()
        for unit in self.units:
            unit.needed_on |= self.aside.was_missed
            ran = engine.schedule.current.of[unit].ran
            ran.add(id(self))
            looks = awaits_backward and not recomputes
            if looks and unit.is_written(len(ran) >= unit.module_count):
                tell_written(unit, self.module, engine.plan is not None)
            # An outer module of the unit may still read parameters of its own.
            if len(ran) >= unit.module_count and not unit.running:
                ran.clear()
                if not recomputes:  # else the backward that asked for it still needs the unit
                    engine.schedule.after_forward(unit)
        if engine.forward_root is self and not recomputes:
            # A loss may be kept beside the output: what backward needs of the root stays for it.
            engine.end_forward(awaits_backward or (self._trains and not engine.ran_backward))

    def _announce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Watch an output for which a transform of torch.func does not say whether a gradient will
        come to it.
        """
        if tensor.requires_grad or not tensor.is_floating_point():
            return tensor
        watch = self._watch(weakref.ref(self))
        return cast(torch.Tensor, Announced.apply(lambda: watch(None), tensor))

    @property
    def _trains(self) -> bool:
        return torch.is_grad_enabled() and self.module.training

    @torch_private.never_compiled
    def _explain(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward may have ended in an error that we can say more about; the pass ends with it."""
        error, engine = sys.exc_info()[1], self._engine
        if error is None:
            return
        self._entered = {}
        self._end_aside()
        self._leave()
        recomputes = torch_private.inside_backward()
        # While a graph is recorded no event may be waited for; who records it puts all back.
        ends = engine is not None and engine.forward_root is self and not recomputes
        if engine is not None and ends and not torch_private.is_recording(static.fixed):
            engine.fail_forward()
        explain(
            error,
            "Read parameters inside the forward of the module that was sharded with them, or "
            "shard the modules that share them as one unit (fully_shard([a, b]), or units= of "
            "the Plan)",
        )

    @torch_private.outside_transforms
    def before_backward(self, makes_graph: bool | None) -> None:
        """The gradient of an output of this module is complete."""
        engine = self.engine
        engine.open_backward(makes_graph)
        if marks.on is not None:
            marks.on.turn(self._unit_name, "backward")
        for unit in self.units:
            engine.before_backward(unit)


_AS_SHOWN = "_shardwise_as_shown"
_WITH_STATISTICS = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm,
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip


def _let_norms_compute_as_their_statistics(module: nn.Module) -> None:
    """torch's kernels want the scale and shift of a norm in the dtype of its running statistics, so
    they are cast for the call. (Under autocast they are never cast to 16 bits.)
    """
    for norm in module.modules():
        if isinstance(norm, _WITH_STATISTICS) and _AS_SHOWN not in norm.__dict__:
            norm.__dict__[_AS_SHOWN] = {}
            norm.register_forward_pre_hook(_cast_norm)
            # Before the engine's own, which may take the unit's parameters off the module.
            norm.register_forward_hook(_restore_norm, prepend=True, always_call=True)


@torch_private.never_compiled
def _cast_norm(norm: Any, args: Any) -> None:
    own: dict[str, Any] = torch_private.parameters_of(norm)
    wanted = norm.running_mean.dtype if norm.running_mean is not None else None
    for name, parameter in own.items() if wanted is not None else ():
        if parameter is not None and parameter.dtype != wanted:
            norm.__dict__[_AS_SHOWN][name] = parameter
            own[name] = parameter.to(wanted)


@torch_private.never_compiled
def _restore_norm(norm: Any, args: Any, output: Any) -> None:
    torch_private.parameters_of(norm).update(norm.__dict__[_AS_SHOWN])
    norm.__dict__[_AS_SHOWN].clear()


def node_of(module: nn.Module) -> Node | None:
    """The hooks on a module, if units run with it."""
    found = module.__dict__.get(_ATTRIBUTE)
    node = found() if found is not None else None
    # A copy of the module brings the original's along.
    return node if node is not None and node.module is module else None


class Announced(torch.autograd.Function):
    """A tensor as it is; `arrives` is called when its gradient comes, or that of its tangent."""

    generate_vmap_rule = True

    @staticmethod
    def forward(arrives: Callable[[], None], tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.arrives = inputs[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.arrives()
        return None, gradient

    @staticmethod
    def jvp(ctx: Any, _: Any, tangent: torch.Tensor | None) -> Any:
        return None if tangent is None else Announced.apply(ctx.arrives, tangent)


class Hold:
    """Keeps an engine alive for the backward of one forward, whose graph may outlive the model.
    When that backward begins it lets go: a loss that somebody keeps does not keep the model.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine: Engine | None = engine


class Watch:
    """A tensor's or a node's hook: its gradient is complete, so those who consumed it are done and
    its producer is next. torch keeps hooks where Python's collector cannot look, for as long as the
    graph is there, so they keep nothing but the `Hold`.
    """

    def __init__(self, hold: Hold | None, producer: weakref.ref[Node] | None) -> None:
        self.hold, self.producer = hold, producer
        self.makes_graph = torch_private.transforms_go_on()
        self.consumers: list[tuple[weakref.ref[Node], weakref.ref[Unit]]] = []

    def __call__(self, gradient: Any) -> None:
        for node_of, unit_of in self.consumers:
            node, unit = node_of(), unit_of()
            if node is not None and unit is not None:
                node.input_done(unit)
        node = self.producer() if self.producer is not None else None
        if node is not None:
            node.before_backward(self.makes_graph)
        if self.hold is not None:  # what the running backward needs is kept by its end's callback
            self.hold.engine = None


class Watcher:
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
    first = torch_optimizer.register_optimizer_step_pre_hook(Watcher(before))
    # Before all others.
    torch_private.step_hooks_of_all()[0].move_to_end(first.id, last=False)
    return [first, torch_optimizer.register_optimizer_step_post_hook(Watcher(after))]


# What holds no tensor that `leaves` would not find.
_PLAIN = (
    torch.Tensor, str, bytes, int, float, complex, type(None), numpy.ndarray, numpy.generic
)  # fmt: skip


def leaves(value: Any) -> Iterator[Any]:
    """Everything in `value` that is no tuple, list, set, mapping or dataclass."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from leaves(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from leaves(getattr(value, field.name))
    else:
        yield value


def _may_hide_tensors(output: Any) -> bool:
    """Whether something in it is no container that `leaves` knows: an object of a user's class, a
    generator.
    """
    return any(not isinstance(leaf, _PLAIN) for leaf in leaves(output))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in `value`."""
    return (leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor))


def cast_to(value: Any, dtype: torch.dtype) -> Any:
    """`value` with every floating-point tensor in `dtype`; the same object if none changes."""
    return transform(value, lambda t: t.to(dtype) if t.is_floating_point() else t)


def transform(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with every tensor that `tensors_in` finds replaced by `change(tensor)`, in its order;
    containers are copied only where something changed, with all else that they hold.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list | tuple | set):
        items = [transform(item, change) for item in value]
        if all(a is b for a, b in zip(items, value, strict=True)):
            return value
        if isinstance(value, list):
            twin: Any = copy.copy(value)
            twin[:] = items
            return twin
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping):
        pairs = {key: transform(item, change) for key, item in value.items()}
        if all(pairs[key] is value[key] for key in pairs):
            return value
        if not isinstance(value, MutableMapping):
            return type(value)(pairs)  # type: ignore[call-arg]
        twin = copy.copy(value)  # a class may take other arguments, as defaultdict does
        for key, item in pairs.items():
            twin[key] = item
        return twin
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        changed = {name: transform(getattr(value, name), change) for name in names}
        if all(changed[name] is getattr(value, name) for name in names):
            return value
        twin = copy.copy(value)
        for name, item in changed.items():
            object.__setattr__(twin, name, item)  # a frozen one too
        return twin
    return value
