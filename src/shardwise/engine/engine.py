"""The engine: one sharded model on this rank, its schedule and what is checked around it.

`schedule/moments.py` says when things happen; `hooks.Node` calls it from modules and gradients.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Protocol, TypeVar

import torch
from torch import nn

from shardwise.engine import checks, marks, static, torch_private, uneven
from shardwise.engine.agreement import Agreement
from shardwise.engine.collectives import digest
from shardwise.engine.executor import TensorExecutor
from shardwise.engine.gradients import GradientsPast
from shardwise.engine.hooks import Hold, Node
from shardwise.engine.mesh import Mesh
from shardwise.engine.unit import Unit
from shardwise.planning.plan import Plan
from shardwise.schedule.moments import Schedule
from shardwise.schedule.policy import Policy
from shardwise.schedule.unit import State
from shardwise.watch import rank as watched
from shardwise.watch.page import BACKWARD, FORWARD

ENGINE_KEY = "_shardwise"  # on a sharded module: its engine, or what gives it
Item = TypeVar("Item")


class Structure:
    """The modules and parameters of a model when it was sharded. A look at the counts and at the
    modules tells whether there is something to check.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = weakref.ref(model)
        self._record(model)

    def _record(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self._children = list(map(torch_private.children_of, modules))
        self._parameters = list(map(torch_private.parameters_of, modules))
        self.seen = self.look()
        self.owners = checks.find_owners(modules)
        self.names = {name for name, _ in model.named_parameters(remove_duplicate=False)}

    def look(self) -> tuple[int, list[int], list[nn.Module | None]]:
        """How many parameters all modules have, how many children each has, and which."""
        children = self._children
        modules = list(chain.from_iterable(map(dict.values, children)))
        return sum(map(len, self._parameters)), list(map(len, children)), modules

    def check(self, may_grow: bool = True) -> None:
        """Error if the model is another one now; what it `may_grow` by is recorded."""
        if self.look() != self.seen:
            checks.check_structure(self, may_grow)
            model = self.model()
            assert model is not None
            self._record(model)


class StandIn(Protocol):
    """Runs a model in the place of the engine's hooks."""

    def hang(self) -> None:
        """From now on, again."""

    def unhang(self) -> None:
        """No longer: the hooks do."""


class Engine:
    """One sharded model on this rank."""

    def __init__(
        self,
        model: nn.Module,
        units: list[Unit],
        mesh: Mesh,
        policy: Policy,
        executor: TensorExecutor,
    ) -> None:
        """`mesh` is the one that ranks agree on things over; units may move on others."""
        self.units, self.mesh, self.policy, self.executor = units, mesh, policy, executor
        self.schedule: Schedule[Unit] = Schedule(units, policy, executor)
        self.plan: Plan | None = None  # where the units come from a Plan
        self.agreement = Agreement(policy, mesh)
        self.structure = Structure(model)
        # The node whose forward is the outermost now; None between forwards.
        self.forward_root: Node | None = None
        self.hold: Hold | None = None  # of the forward that runs
        self._held: weakref.WeakSet[Hold] = weakref.WeakSet()  # of forwards whose graph is there
        self.ran_backward = False  # inside of the forward that runs
        self.idles = False  # some replicas run nothing in this step
        self.failed = False  # a forward of this step ended in an exception
        self.interrupted: str | None = None  # the last step was left early, and nobody was told
        self.skips = False  # it left what earlier passes of the step had summed
        self.loop: object | None = None  # over `microbatches`, the one that runs
        self.backwards = 0  # backward passes that ended
        self.relayouts = 0  # times that the gradient buffers became others
        self._past = GradientsPast()
        self._stepped_at = 0  # how many backwards had ended when an optimizer stepped
        self.stand_in: StandIn | None = None  # compiled graphs, where they run the model
        checks.mark(self)
        if not any(unit.parameters.master.is_meta for unit in units):
            self._prepare()

    def _prepare(self) -> None:
        """Make ready the units that are new, or whose parameters became others."""
        checks.check_memory(self.units)
        for unit in self.units:
            if not unit.prepared:
                unit.prepare(self.executor)
        checks.mark(self)
        self._lay_out_gradients()

    def share(self, executor: TensorExecutor) -> None:
        """Move on other lanes from now on."""
        self.schedule.reduces.finish()
        self.executor = self.schedule.executor = self.schedule.reduces.executor = executor
        for unit in self.units:
            unit.wait()
            unit.executor = executor

    def interrupt(self, message: str) -> None:
        """A micro-batch loop was left early: drop what its step has summed. Whoever then wants to
        use it gets `message`, unless an exception of the model's own told already.
        """
        if not self.is_in_pass:
            self.interrupted = message
        self.reset()
        self._drop_gradients()

    def check_interrupted(self) -> None:
        """Error, once, if the last micro-batch loop was left early."""
        message, self.interrupted = self.interrupted, None
        if message is not None:
            raise RuntimeError(message)

    def check_reduced(self) -> None:
        """Error if all gradients of a step came past the engine: each rank has its own."""
        past, self._past.came = self._past.came, False
        ran, self._stepped_at = self.backwards != self._stepped_at, self.backwards
        if past and not ran:
            model = self.structure.model()
            raise RuntimeError(
                f"gradients came to parameters of {type(model).__name__}, but not by its forward, "
                "so they were not summed over the ranks, which would train apart. Call the model "
                "itself, not its parts; or shard every part that is called by itself (a Plan for "
                "each, or fully_shard)"
            )

    def forget_interrupted(self) -> None:
        """A new step begins: what is left of one left early is a warning."""
        message, self.interrupted = self.interrupted, None
        if message is not None:
            warnings.warn(message, stacklevel=3)

    @property
    def title(self) -> str:
        """The model's, for messages."""
        return type(self.structure.model()).__name__

    @property
    def is_in_pass(self) -> bool:
        """A forward or backward has begun, and did not end well."""
        return self.failed or self.schedule.current.in_backward

    def compare_counts(self, count: int) -> dict[int, int]:
        """Before a step's micro-batches: ranks compare how many each runs, and the order of their
        last forward. Gives the numbers of the ranks in this one's groups.
        """
        shard, replicate = self.mesh.shard, self.mesh.replicate
        # Compared when it was rehearsed, and whoever records asks nobody.
        if torch_private.is_recording(static.fixed):
            return {}
        order, agreement = self.schedule.forward_order.names, self.agreement
        inside = shard.tell((count, digest(order)))
        if len({of_order for _, of_order in inside}) > 1:
            agreement.check_orders(order)
        per_replica = replicate.tell([count for count, _ in inside])
        if len(set(chain.from_iterable(per_replica))) > 1:
            agreement.check_counts(per_replica)
        self._compare_values()
        of_row = dict.fromkeys(shard.members if shard.size > 1 else (), count)
        if replicate.size > 1:
            totals = (counts[0] for counts in per_replica)
            of_row.update(zip(replicate.members, totals, strict=True))
        return of_row

    def _compare_values(self) -> None:
        if not self.agreement.compared_values:
            self.agreement.check_values(self.units)

    # Forward

    def begin_forward(self, node: Node) -> None:
        """An outermost module starts a pass, maybe the first of a step."""
        self.forward_root = node
        if marks.on is not None:
            marks.on.begin_forward()
        if static.on is not None:
            static.on.meet_engine(self)
        self.forget_interrupted()
        self.failed = self.skips = False
        if uneven.here.loop is not None:
            uneven.here.loop.welcome(self)
        if self.schedule.current.in_backward:
            self._abandon_step()
        # Ranks gather together, so they do alike whatever is left of a graph on each.
        kept = self.schedule.keeps_graph
        if kept and not any(chain.from_iterable(self.mesh.shard.tell([bool(len(self._held))]))):
            self.schedule.forget_graph()
        if self.schedule.first_micro:
            self.structure.check(self.policy.may_grow)
            self._begin_step(node)
        self.schedule.forward_order.begin()
        self.ran_backward = False
        self._make_hold()

    def _make_hold(self) -> None:
        """Of the graph that is made from now on."""
        self.hold = Hold(self)
        self._held.add(self.hold)

    @property
    def awaits_backward(self) -> bool:
        """The graph of an earlier forward is still there, and its backward has not begun."""
        return any(hold.engine is not None for hold in self._held if hold is not self.hold)

    def _begin_step(self, node: Node) -> None:
        """Look after all units. What the outermost module needs at once is sent for before the
        others are looked at, so that the host does that while it travels.
        """
        if self.executor.arena is not None and not self.awaits_backward:
            self.executor.arena.begin_step(self)
        known = node is self.stand_in or not self.agreement.first_pass
        early = [u for u in node.units[:1] if known and u.prepared and not u.adopt_changes()]
        self._renew(early)
        for unit in early:
            node.bring(unit)
        others = [unit for unit in self.units if unit not in early]
        if any([unit.adopt_changes() or not unit.prepared for unit in others]):
            self._prepare()
        if not self.schedule.waits:  # else at the loop's end
            self._compare_values()
        self._adopt_requires_grad()
        self._renew(others)

    def _adopt_requires_grad(self) -> None:
        """Parameters may be frozen or unfrozen since the last pass."""
        # What waits for more is laid out for those that were trained until now.
        waiting = [unit for unit in self.units if unit.sums.wait_for_more and unit.trains_others]
        if waiting:
            self.schedule.complete(waiting)
            self._hang_sums()
        if any([unit.adopt_requires_grad() for unit in self.units]):
            self._lay_out_gradients()

    def _renew(self, units: Sequence[Unit]) -> None:
        """What is gathered of the last step may be stale; cleared gradients are let go."""
        self.schedule.renew(units)
        for unit in units:
            sums = unit.sums
            if unit.gradients is not None and not sums.opened and unit.gradients.cleared:
                unit.gradients.drop()
        # Gathered anew, whatever they hold.
        if self.policy.refreshes or torch_private.is_recording(static.fixed):
            return
        kept = []
        for unit in [unit for unit in units if unit.stale]:
            if self.awaits_backward or unit.sums.wait_for_more:
                unit.stale = unit.changed  # its step is under way
            else:
                kept.append(unit)
        if kept:
            self.agreement.find_stale(kept)

    def end_forward(self, awaits_backward: bool) -> None:
        """The outermost module has run. Without a backward, all is freed."""
        self.forward_root = self.hold = None
        if awaits_backward:
            self.schedule.end_forward()
        else:
            self._end_evaluation()
        if self.agreement.first_pass:
            self.agreement.end_first_pass(self.schedule.forward_order.names)

    def _end_evaluation(self) -> None:
        self.schedule.forget_forward()
        for unit in self.units:
            options = unit.options
            if options.stays_shown and options.keep is True and not self.policy.refreshes:
                unit.keep_evaluated()  # the next forward finds it there
                continue
            if self.policy.frees_after_step and not self.schedule.keeps_graph:
                unit.free()
            unit.hide()
            unit.wait()  # gathered ahead in vain

    def before_forward(self, unit: Unit) -> None:
        recomputes = torch_private.inside_backward()
        if watched.on is not None:
            verb = BACKWARD if recomputes else FORWARD
            watched.on.page.enter(verb, unit.name, self.mesh.shard.runs)
        if self.agreement.first_pass and not recomputes:
            self.agreement.check_unit(unit.name, len(self.schedule.forward_order.current))
        self.schedule.before_forward(unit, recomputes)
        unit.note_writes()

    # Backward

    def before_backward(self, unit: Unit) -> None:
        if watched.on is not None:
            watched.on.page.enter(BACKWARD, unit.name, self.mesh.shard.runs)
        self.schedule.before_backward(unit)

    def bring_in_backward(self, unit: Unit) -> None:
        """Backward reads a parameter of the unit, whether or not it came by an output."""
        if unit.state is not State.READY:
            self.open_backward()
            self.before_backward(unit)

    def owner_of(self, tensor: torch.Tensor) -> weakref.ref[Unit] | None:
        """The unit of a shown parameter, or of a view of one; None for any other tensor."""
        base = torch_private.base_of(tensor)
        full: bool = getattr(base, "_shardwise_full", False)
        return self._owners.get(base._shardwise_moved) if full else None  # type: ignore[attr-defined]

    @functools.cached_property
    def _owners(self) -> dict[str, weakref.ref[Unit]]:
        """By the names of their parameters."""
        units = [(unit, weakref.ref(unit)) for unit in self.units]
        return {member.name: of for unit, of in units for member in unit.parameters.members}

    def open_backward(self, makes_graph: bool | None = None) -> None:
        """`makes_graph`: another backward may go through this one."""
        makes = torch.is_grad_enabled() if makes_graph is None else makes_graph
        if self.schedule.open_backward(makes):
            torch_private.call_after_backward(self.end_backward)

    def gradient_arrived(self, unit: Unit, shown: torch.Tensor) -> None:
        """One more gradient is complete. With the last one the unit's backward is over, unless
        those of its inputs are still to come.
        """
        self.open_backward()  # the first sign of one whose loss is not made of the model's output
        if unit.gradients is not None:
            unit.gradients.place(shown)
        progress = self.schedule.current.of[unit]
        progress.gradients_left -= 1
        # Frozen weights may lead to another unit's parameters, and no input tells: to the end.
        lasts = progress.untracked > 0 and unit.leads_to_others
        if progress.gradients_left == 0 and progress.open_inputs <= 0 and not lasts:
            self._after_backward(unit)

    def inputs_done(self, unit: Unit) -> None:
        """The gradients of the unit's inputs are complete: its backward is over. Parameters without
        a gradient by now were not used on this rank; the others reduce at this same moment, and
        collectives must keep their order.
        """
        progress = self.schedule.current.of[unit]
        if not progress.issued and (progress.gradients_left == 0 or not progress.untracked):
            self._after_backward(unit)

    def _after_backward(self, unit: Unit) -> None:
        self.open_backward()
        self.schedule.after_backward(unit)

    def end_backward(self) -> None:
        """Backward is over: reduce what is left, wait for the sums, hang them on the visible
        parameters, give back what only backward needed.
        """
        schedule = self.schedule
        if schedule.accumulated:
            schedule.end_backward()
            self.backwards += 1
            if any(unit.sums.complete for unit in schedule.reduce_order):
                schedule.hide()
                self.end_step(ran=True)
        if marks.on is not None:
            marks.on.turn("", "optimizer")
        schedule.close_backward()
        if self.forward_root is not None:
            self.ran_backward = True
            self._make_hold()

    def end_step(self, ran: bool) -> None:
        """The sums are complete: hang them on the parameters."""
        if watched.on is not None:
            watched.on.page.end_step()
        schedule = self.schedule
        # A rank that ran nothing knows less than the others.
        learns = self.agreement.first and not self.idles
        if learns or self.policy.needs_equal_use:
            ready = [unit.name for unit in schedule.current.ready]
            trained = [unit.gradients for unit in self.units if unit.gradients is not None]
            # Parameters of which this rank produced no gradient in this step.
            unused = frozenset(name for gradients in trained for name in gradients.missing)
            order = self.agreement.settle(ran, unused, ready)
            if order is not None:
                schedule.reduce_in(order)
        self._hang_sums()
        if isinstance(self.loop, uneven.Loop):
            self.loop.stay()

    def _hang_sums(self) -> None:
        try:
            complete = self.schedule.complete_units()
            for unit in complete:
                if unit.parameters.tied:
                    assert unit.gradients is not None
                    unit.gradients.attach_tied()
            for unit in complete:
                assert unit.gradients is not None
                unit.gradients.attach(unit.options.zeroes_unused)
                unit.attached_version = unit.version
        except BaseException:  # of a hook on a parameter
            self._drop_gradients()
            raise

    def _drop_gradients(self) -> None:
        """Take our sums off the parameters: they are not those of a whole step."""
        for unit in self.schedule.reduce_order:
            assert unit.gradients is not None
            unit.gradients.clear()

    def check_ran(self, before: int, i: int, total: int) -> None:
        """Error if a micro-batch had no backward; `before` counts those that had."""
        if self.backwards == before:
            raise RuntimeError(
                f"micro-batch {i + 1} of {total} ran no backward; every micro-batch needs one "
                "(a loss of zero is fine), or its peers wait for this rank's gradients"
            )

    def begin_idle(self) -> None:
        """A step of which some replicas run nothing. They do not see what is frozen and thawed
        inside, so all reduce in the order that needs no pass to be known, and learn one later.
        """
        self.agreement.first = self.idles = True
        self.schedule.forget_reduce_order()

    def run_nothing(self) -> None:
        """A step without micro-batches on this rank's shard group."""
        self._adopt_requires_grad()
        self.schedule.run_nothing()
        self.end_step(ran=False)

    @property
    def waits_for_more(self) -> bool:
        """Backwards of this step have left sums that are not those of all ranks."""
        return any(unit.sums.wait_for_more for unit in self.units)

    def meet(self, some: bool, idle: bool) -> None:
        """At the end of a loop in which this model was a guest, on all ranks: sum what it has left
        on some of them.
        """
        self._compare_values()
        if idle:
            self.begin_idle()
        if some and self.waits_for_more:
            self.reduce_accumulated()
        elif some:
            self.run_nothing()
        self.idles = False

    def reduce_accumulated(self) -> None:
        """Reduce what backwards without sync have added up."""
        self.schedule.current.ready = list(self.schedule.reduce_order)
        self.end_backward()

    def fail_forward(self) -> None:
        """A forward raised: forget its pass. What earlier passes of the step have summed stays."""
        if self.schedule.current.in_backward or self.executor.arena is not None:
            self.reset()
            return
        self.failed = self.skips = True
        self.forward_root = self.hold = None
        self._abandon_pass()

    def reset(self) -> None:
        """Forget the pass that an exception ended, with all that its step had summed."""
        self.failed, self.skips = self.forward_root is not None, False
        self.forward_root = self.hold = None
        self._abandon_step()

    def _abandon_step(self) -> None:
        """The last backward may have ended in an exception that the caller caught: forget it, and
        the sums, of which it has made a part.
        """
        self.schedule.forget_sums()
        self._abandon_pass()

    def _abandon_pass(self) -> None:
        for unit in self.units:
            for shown in unit.parameters.shown:
                shown.grad = None
            if unit.gradients is not None:
                unit.gradients.forget_placed()
            if self.executor.arena is not None:  # none is needed: each may give way to another
                unit.hide()
        if marks.on is not None:
            marks.on.turn("", "optimizer")
        self.schedule.abandon()
        if self.executor.arena is not None:
            for unit in self.units:
                if unit.gradients is not None and unit.gradients.slot is not None:
                    unit.gradients.slot.buffer.release()
            self.executor.arena.forget()

    # What is trained

    def _lay_out_gradients(self) -> None:
        """Other parameters are trained than before, or they stand in other memory."""
        self.relayouts += 1
        self.agreement.first = True
        self.schedule.set_gradients()
        for unit in self.schedule.reduce_order:
            unit.leads_to_others = not unit.trains_all and any(
                other is not unit and other.is_inside(unit) for other in self.schedule.reduce_order
            )
            self._count_gradients(unit)

    def _count_gradients(self, unit: Unit) -> None:
        # torch holds hooks where Python's garbage collector cannot look: hold nothing by them.
        engine_of, unit_of = weakref.ref(self), weakref.ref(unit)

        def arrived(shown: torch.Tensor) -> None:
            unit, engine = unit_of(), engine_of()
            if unit is not None and engine is not None:
                engine.gradient_arrived(unit, shown)

        assert unit.gradients is not None
        if unit.parameters.plain and self.mesh.ranks > 1:
            for visible in unit.gradients.visible:
                hooks = torch_private.accumulated_hooks(visible) or {}
                if self._past not in hooks.values():
                    visible.register_post_accumulate_grad_hook(self._past)
        for shown in unit.gradients.shown:
            if not shown.__dict__.get("_shardwise_counted"):
                shown.__dict__["_shardwise_counted"] = True
                shown.register_post_accumulate_grad_hook(arrived)


def is_sharded(model: nn.Module) -> bool:
    return ENGINE_KEY in model.__dict__


def engine_of(model: nn.Module) -> Engine:
    found = model.__dict__.get(ENGINE_KEY)
    if found is None:
        raise ValueError(
            f"{type(model).__name__} is not sharded; call sw.shard(model, plan) or "
            "fully_shard(model) first"
        )
    engine = found if isinstance(found, Engine) else found()
    assert isinstance(engine, Engine)
    return engine


def microbatches(model: nn.Module, batches: Iterable[Item]) -> Iterator[Item]:
    """Yield each micro-batch of a step; run one forward and one backward for each.

    First the ranks compare how many they run: ranks of one shard group must agree, replicas may
    differ (also zero) unless sync is 'each'. A rank without micro-batches joins the others with
    zeros. So it does for other models that run inside the loop where ranks run different numbers:
    their gradients are summed at the loop's end. Leaving the loop early drops the step's gradients,
    and clipping or stepping with them is an error; after an exception in a forward or backward they
    are dropped without one. A micro-batch whose forward raised, and where the program caught that,
    adds nothing.
    """
    engine = engine_of(model)
    engine.forget_interrupted()
    if engine.loop is not None:  # left by an exception that somebody keeps, and the loop with it
        if isinstance(engine.loop, uneven.Loop):
            engine.loop.leave()
        engine.loop = engine.schedule.micro = None
        engine.interrupt("")
        engine.interrupted = None
    items = list(batches)
    total, outer = len(items), uneven.here.loop
    if outer is not None and outer.engine is not engine:
        yield from outer.run_guest(engine, items)
        return
    counts = engine.compare_counts(total)
    differs = uneven.Loop(engine, counts, total) if len(set(counts.values())) > 1 else None
    if total == 0:
        try:
            engine.run_nothing()
        finally:
            if differs is not None:
                differs.leave()
        if differs is not None:
            differs.finish()
        return
    # Nothing can be added to the messages of a graph by who runs none: all go by the hooks.
    stand_in = engine.stand_in if differs is not None and differs.idle else None
    ran = 0
    loop = engine.loop = differs or object()
    if stand_in is not None:
        stand_in.unhang()
    try:
        for i, item in enumerate(items):
            engine.schedule.micro = (i, total)
            before = engine.backwards
            yield item
            if engine.loop is not loop:
                raise RuntimeError(
                    f"another loop over sw.microbatches of this model began in micro-batch {i + 1} "
                    f"of {total}; its gradients are another step's. End one loop before the next"
                )
            if engine.backwards == before and engine.skips:
                engine.reduce_accumulated()  # nothing, but its peers wait for it
            engine.check_ran(before, i, total)
            ran += 1
    finally:
        if stand_in is not None:
            stand_in.hang()
        if mine := engine.loop is loop:
            # Whoever takes no more than the last (zip, break) does not come back here for an end.
            ran += ran == total - 1 and engine.backwards != before and not engine.is_in_pass
            engine.loop = engine.schedule.micro = None
        if mine and ran < total:
            message = (
                f"{ran} of {total} micro-batches ran; gradients are not reduced, and were dropped. "
                "The loop over sw.microbatches was left early (break, return or an exception); run "
                "every micro-batch, or begin the step again"
            )
            if differs is None:
                engine.interrupt(message)
            else:
                differs.fail(message)
        elif differs is not None:
            differs.finish() if mine else differs.leave()
