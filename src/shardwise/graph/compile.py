"""`sw.compile`: a sharded model whose forward and backward are whole graphs with the collectives in
them.

The engine shards the model and keeps its parts, its optimizer and its state dict. A step that runs
as graphs passes its hooks by; what the graphs sum lands where the engine's own sums land. A model
that cannot be traced, and a step in which some replica has nothing to run, goes by the hooks.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph

from shardwise.engine import torch_private as engine_private
from shardwise.engine.api import shard
from shardwise.engine.engine import Engine, engine_of
from shardwise.engine.executor import lent
from shardwise.engine.hooks import Node, cast_to, node_of, tensors_in
from shardwise.engine.unit import Unit
from shardwise.errors import nearest
from shardwise.graph import torch_private
from shardwise.graph.backend import Backend
from shardwise.graph.executor import GraphParameter
from shardwise.graph.lower import Lowering
from shardwise.graph.parts import Parts, facts_of
from shardwise.graph.passes.run import PASSES, PassOptions, PassSummary, run_passes
from shardwise.graph.runtime import Gathering, Shelf, forget_early, know, note_gathers
from shardwise.graph.trace import Guards, Inputs, Whole, traceable
from shardwise.planning.plan import Plan
from shardwise.planning.rows import Rows

BACKENDS = ("inductor", "graph")


def compile(
    model: nn.Module,
    plan: Plan,
    *,
    fullgraph: bool = True,
    passes: PassOptions | Sequence[str] | None = None,
    backend: str = "inductor",
    **options: Any,
) -> nn.Module:
    """Shard `model` in place as `plan` says, and run its steps as compiled graphs; return it.

    Used like a model of `sw.shard`: build the optimizer afterwards, accumulate by
    `sw.microbatches`, save its state dict. The first call traces; a model that cannot be traced
    whole is run by the engine's hooks instead, with a warning that names the line.

    fullgraph: False compiles the modules of the Plan's units one by one under the engine's hooks,
        for models that torch.compile breaks into several graphs.
    passes: None: messages and their places are those of the Plan's units. Else each parameter is a
        message, and passes (docs/graph.md) join and move them: options for all of them, or the
        names of those to run with their defaults.
    backend: inductor, torch's compiler; graph runs the nodes as they are.
    options: of torch.compile (dynamic, mode is not among them).
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}, expected one of {BACKENDS}")
    for name in passes if passes is not None and not isinstance(passes, PassOptions) else ():
        if name not in PASSES:
            raise ValueError(f"passes has {name!r}{nearest(name, PASSES)}")
    if not fullgraph:
        for name in {name for unit in plan.resolve(model).require_units() for name in unit.modules}:
            if name:
                model.get_submodule(name).compile(**options)
        return shard(model, plan)
    shard(model, plan)
    CompiledModel(model, engine_of(model), backend == "inductor", passes, options).hang()
    return model


class CompiledModel:
    """One model's graphs. Stands in the place of the engine's outermost node."""

    def __init__(
        self,
        model: nn.Module,
        engine: Engine,
        inductor: bool,
        passes: PassOptions | Sequence[str] | None,
        options: dict[str, Any],
    ) -> None:
        assert engine.plan is not None
        self.model, self.engine, self.plan = model, engine, engine.plan
        self.inductor, self.passes = inductor, passes
        self._whole_model = Whole(model)
        self._nodes = [n for n in map(node_of, model.modules()) if n is not None]
        self._casts: list[Any] = []
        self._parts: list[Parts] = []
        self._facts: list[GraphParameter] = []
        self._held: list[Tensor | None] | None = None  # sums of this step's earlier micro-batches
        self._forwards = 0  # of this micro-batch, that a backward may follow
        self._sums_late = False  # some micro-batch had several: graphs leave all sums to the end
        self._whole: list[Tensor] | None = None  # parameters that stay whole over the step
        self._shelf: Shelf | None = None  # of the parts
        self._given_parts: list[Tensor | None] = []  # those that graphs are given
        self._place: Tensor | None = None  # where they find the others
        self._sink: Tensor | None = None  # what the gradients of all parameters are said to be of
        self._is_hidden = False  # nothing hangs where the parameters do
        self._guards = Guards(self._whole_model, [])
        self._agreed = False  # all ranks run graphs
        self._asked = False  # and have asked each other, in the call that runs
        self._first: tuple[Parts, Gathering] | None = None  # what every forward gathers first
        self.summaries: list[PassSummary] = []  # what the passes did to the last graphs
        self._options = options
        # Compiled, by what the micro-batch is: torch keeps few variants of one function.
        self._runs: dict[Any, Callable[..., Any]] = {}

    # From the hooks to the graphs, and back

    def hang(self) -> None:
        """Take the engine's hooks off, and stand in the place of the model's call."""
        self.engine.stand_in = self
        for node in self._nodes:
            node.unhang()
            if node.input_dtype is not None and not node.is_root:
                self._casts.append(
                    node.module.register_forward_pre_hook(
                        _caster(node), prepend=True, with_kwargs=True
                    )
                )
        engine_private.set_compiled_call(self.model, self._call)
        self._copy = self.model.__dict__["__deepcopy__"]
        self.model.__dict__["__deepcopy__"] = self._deepcopy

    def unhang(self) -> None:
        """Let the engine's hooks run the model again."""
        engine_private.set_compiled_call(self.model, None)
        self.model.__dict__["__deepcopy__"] = self._copy
        while self._casts:
            self._casts.pop().remove()
        for node in self._nodes:
            node.hang()

    def _deepcopy(self, memo: dict[int, Any]) -> nn.Module:
        """The engine's copy, compiled as this one is."""
        self.unhang()
        try:
            twin: nn.Module = self._copy(memo)
        finally:
            self.hang()
        CompiledModel(twin, engine_of(twin), self.inductor, self.passes, self._options).hang()
        return twin

    def _fall_back(self, why: str) -> None:
        self.unhang()
        self.engine.stand_in = None
        warnings.warn(
            f"{type(self.model).__name__} is run by the engine's hooks, not as graphs: {why}",
            stacklevel=4,
        )

    # A pass

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        for rehearsed in (False, True):
            self._asked = False
            self.engine.begin_forward(self)  # type: ignore[arg-type]
            self._follow()
            never = self._why_not()
            why = never or ""
            try:
                if never is None:
                    return self._forward(args, kwargs)
            except torch_private.trace_errors() as error:
                if self._agreed:
                    raise
                place = torch_private.place_of(error)
                why = f"torch.compile cannot trace {place or 'it'} ({_first_line(error)})"
            except BaseException:
                self.engine.reset()
                raise
            finally:
                forget_early()
                self.engine.forward_root = self.engine.hold = None
            if not self._asked:
                self.engine.agreement.everybody(why)
            if never is not None or rehearsed:
                break
            self._rehearse(args, kwargs)
        self._fall_back(why)
        return self.model(*args, **kwargs)

    def _rehearse(self, args: Any, kwargs: Any) -> None:
        """Run the model once by the hooks: what happens in a first call only, a warning that is
        said once, a table that is made when it is needed, is over then.
        """
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        device = self.engine.mesh.device
        self.unhang()
        try:
            with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
                self.model(*args, **kwargs)
                for buffer, before in buffers:
                    buffer.copy_(before)
        finally:
            self.hang()

    def _forward(self, args: Any, kwargs: Any) -> Any:
        root = next(node for node in self._nodes if node.is_root)
        if root.input_dtype is not None:
            args, kwargs = cast_to((args, kwargs), root.input_dtype)
        schedule = self.engine.schedule
        trains = torch.is_grad_enabled()
        if trains:
            self._count_forward()
        ends = not trains or all(self._sync_now)
        keeps = trains and self._keeps_over_step and not schedule.last_micro and self._whole is None
        given = Inputs(
            self._given_parts,
            self._place,
            self._whole,
            self._sink if trains else None,
            [trained for parts in self._parts for trained in parts.trainable],
            self._held if ends and trains else None,
        )
        run = self._variant(given, keeps, ends)
        with self._ready_to_trace():
            if self._first is None:
                with note_gathers() as gathers:
                    output, whole = run(given, args, kwargs)
                self._note_first(gathers)
            else:
                output, whole = run(given, args, kwargs)
        if keeps:
            self._whole = whole
        if root.output_dtype is not None:
            output = cast_to(output, root.output_dtype)
        watched = [t for t in tensors_in(output) if t.requires_grad] if trains else []
        if watched:
            begins = _Begins(self)
            for tensor in watched:
                tensor.register_hook(begins)
        return output

    @property
    def _sync_now(self) -> tuple[bool, bool]:
        """Whether graphs scatter, and all-reduce, the gradients of the pass that runs now."""
        late = self.plan.sync != "last", False
        return late if self._sums_late else self.engine.schedule.sync_now

    def _count_forward(self) -> None:
        """What earlier micro-batches have left is added by one graph of the last one: if several
        of them are to run, by none.
        """
        schedule = self.engine.schedule
        if schedule.micro is None:
            return
        self._forwards += 1
        if self._forwards > 1 and not self._sums_late:
            if self._held is not None and all(schedule.sync_now):
                raise RuntimeError(
                    f"{type(self.model).__name__} ran {self._forwards} times with gradients in a "
                    "step's last micro-batch, and once in those before, and its graphs have begun "
                    "to sum; run it as often in every micro-batch, or use sync='each'"
                )
            self._sums_late = not all(schedule.sync_now)

    @property
    def units(self) -> Sequence[Unit]:
        """What is sent for when a step begins, as an outermost node's units are."""
        return [self._first[0].unit] if self._first is not None and self._first[0].current else []

    def bring(self, unit: Unit) -> None:
        assert self._first is not None
        self._first[1].send_early()

    def _note_first(self, gathers: Sequence[Gathering]) -> None:
        """Remember the first message, if it is of parameters as they stand."""
        for first in gathers[:1]:
            given = [part.detach() for part in first.parts]
            for parts in self._parts:
                own = {leaf.data_ptr() for leaf in parts.leaves}
                if own.issuperset(part.data_ptr() for part in given):
                    self._first = parts, dataclasses.replace(first, parts=given)

    @property
    def _keeps_over_step(self) -> bool:
        """Full parameters stay from the first micro-batch to the last."""
        policy = self.engine.policy
        return not policy.frees_in_pass

    def _variant(self, given: Inputs, keeps: bool, ends: bool) -> Callable[..., Any]:
        kind = (torch.is_grad_enabled(), given.whole is None, ends, given.held is None, keeps,
                tuple(given.trained))  # fmt: skip
        if kind not in self._runs:
            traced = traceable(self._whole_model, self._facts, keeps)
            backend = Backend(self)
            given_options = self._options.get("options") or {}
            keep = self._guards.filter(given_options.get("guard_filter_fn"))
            options = self._options | {"options": given_options | {"guard_filter_fn": keep}}
            self._runs[kind] = torch.compile(traced, backend=backend, fullgraph=True, **options)
        return self._runs[kind]

    @contextmanager
    def _ready_to_trace(self) -> Iterator[None]:
        """Whatever is traced inside is traced without parameters, and as torch has to be set."""
        with ExitStack() as stack:

            def begin() -> None:
                if not self._is_hidden:
                    stack.enter_context(self._hidden())
                    stack.enter_context(torch_private.tracing_settings())

            if self._guards.see_places:
                begin()
            with torch_private.before_tracing(begin):
                yield

    @contextmanager
    def _hidden(self) -> Iterator[None]:
        """Nothing hangs where the parameters do: tracing would look at what it does not use."""
        hung = [place for unit in self.engine.units for place in unit.places]
        for own, key, _, _ in hung:
            own[key] = None
        self._is_hidden = True
        try:
            yield
        finally:
            self._is_hidden = False
            for own, key, _, visible in hung:
                own[key] = visible

    def end_backward(self) -> None:
        """Backward is over: hang complete sums on the parameters, or hold them."""
        engine = self.engine
        engine.backwards += 1
        assert self._shelf is not None and self._sink is not None
        found = self._shelf.take()
        # What asks for gradients of other tensors only leaves none on leaves.
        if self._sink.grad is None:
            found = [None] * len(found)
        self._sink.grad = None
        self._forwards = 0
        left = self._held or [None] * len(found)
        if not all(self._sync_now):
            left, found = list(map(_add, left, found)), [None] * len(found)
        if not all(engine.schedule.sync_now):
            self._held = left
            return
        self._sum_left(left, found)
        rest = iter(found)
        for parts in self._parts:
            parts.hand_over([next(rest) for _ in parts.leaves])
        self.forget_step()
        engine.end_step(ran=True)

    def _sum_left(self, left: list[Tensor | None], found: list[Tensor | None]) -> None:
        """Sum over the ranks, one by one, what the last graph has not taken along: gradients of
        parameters that it did not use.
        """
        meshes = [parts.unit.mesh for parts in self._parts for _ in parts.leaves]
        for number, (gradient, p, mesh) in enumerate(zip(left, self._facts, meshes, strict=True)):
            if gradient is None or found[number] is not None:
                continue
            rows = gradient.new_empty(p.rows.part)
            if self.plan.sync != "last":
                rows.copy_(gradient)
            else:
                flat = _rank_after_rank(gradient / p.divide_before, p.rows)
                if p.moves:
                    mesh.shard.reduce_scatter(rows, flat).wait()
                else:
                    rows = flat
            mesh.replicate.all_reduce(rows).wait()
            found[number] = (rows / p.divide_after).to(p.master)

    def forget_step(self) -> None:
        self._held = self._whole = None
        self._sums_late = False

    # What is traced with

    def _follow(self) -> None:
        """Parts of the parameters as they stand now."""
        if self.engine.schedule.first_micro:
            self.forget_step()
        units = self.engine.units
        if len(self._parts) != len(units) or not all(parts.current for parts in self._parts):
            self._parts = [Parts(unit) for unit in units]
            self._facts = [fact for unit in units for fact in facts_of(unit)]
            know(self.engine)
            self._runs, self._first = {}, None
            hung = [(own, key) for unit in units for own, key, _, _ in unit.places]
            self._guards = Guards(self._whole_model, hung)
            leaves = [leaf for parts in self._parts for leaf in parts.leaves]
            self._shelf = Shelf(leaves)
            self._place, self._sink = self._shelf.make_inputs(self.engine.mesh.device)
            together = self.passes is None
            self._given_parts = [
                None if together and p.moves else leaf
                for p, leaf in zip(self._facts, leaves, strict=True)
            ]
        for parts in self._parts:
            parts.trainable = parts.unit.trainable
        if self._shelf is not None:
            self._shelf.take()  # of a backward that has not come to its end

    def _why_not(self) -> str | None:
        """A reason why this model cannot run as graphs."""
        keep = self.plan.keep_after_forward
        if keep is not None and not isinstance(keep, bool):
            return f"keep_after_forward={keep} keeps pieces, which graphs do not"
        if self.plan.sum_dtype is not None:
            return f"sum_dtype={self.plan.sum_dtype!r} adds gradients here, which graphs do not"
        if self.plan.keep_last:
            return f"keep_last={self.plan.keep_last} keeps some units, which graphs do not"
        if self.plan.gather_dtype is not None:
            return f"gather_dtype={self.plan.gather_dtype!r} gathers codes, which graphs do not"
        for unit in self.engine.units:
            if unit.parameters.tied:
                return f"parameters of unit {unit.name!r} were tied after sharding"
            if any(lent(own.get(key), visible) for own, key, _, visible in unit.places):
                return f"tensors hang in the places of parameters of unit {unit.name!r}"
        return None

    # What the backend asks

    def lowering(self) -> Lowering:
        trains = torch.is_grad_enabled()
        scatters, all_reduces = self._sync_now if trains else (True, True)
        return Lowering(self._facts, self.plan, scatters, all_reduces, self.passes is None)

    def improve(self, forward: Graph, backward: Graph) -> tuple[Graph, Graph]:
        if not self.passes:
            return forward, backward
        options = self.passes if isinstance(self.passes, PassOptions) else PassOptions()
        names = PASSES if isinstance(self.passes, PassOptions) else self.passes
        forward, backward, self.summaries = run_passes(forward, backward, options, passes=names)
        return forward, backward

    def agree(self) -> None:
        """Before the first graph runs: if some rank cannot trace its model, none runs graphs."""
        if self._agreed:
            return
        self._asked = True
        said = [why for why in self.engine.agreement.everybody(None) if why is not None]
        if said:
            raise RuntimeError(f"on another rank: {said[0]}")
        self._agreed = True


def _caster(node: Node) -> Callable[..., Any]:
    """A hook that casts a unit's inputs, as the engine's does."""
    dtype = node.input_dtype
    assert dtype is not None

    def cast(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return cast_to((args, kwargs), dtype)

    return cast


class _Begins:
    """A hook on an output: its gradient has come, so backward begins. Keeps the model until then,
    whose last reference may be the loss.
    """

    def __init__(self, compiled: CompiledModel) -> None:
        self._compiled: CompiledModel | None = compiled

    def __call__(self, gradient: Any) -> None:
        compiled, self._compiled = self._compiled, None
        if compiled is not None:
            engine_private.call_after_backward(compiled.end_backward)
            compiled.engine.open_backward()


def _rank_after_rank(gradient: Tensor, rows: Rows) -> Tensor:
    """A gradient, flat, with every rank's rows padded to the same number."""
    flat = gradient.new_zeros(rows.part * rows.ranks)
    into = flat if rows.replicated else flat[: rows.numel]
    into.copy_(gradient.reshape(-1))
    return flat


def _add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Not into the memory of one: gradients may share it."""
    return a + b if a is not None and b is not None else a if b is None else b


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
