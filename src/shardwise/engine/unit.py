"""The unit: parameters that are gathered and reduced together, and the states they pass through.

        gather            wait              free
    FREE ----> GATHERING ----> READY ------------> FREE

`show` puts the full parameters into their modules' places, `hide` puts the visible ones back. Both
only swap references; `hide` never frees, `free` always hides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from shardwise.engine import marks
from shardwise.engine.bits import fingerprint
from shardwise.engine.collectives import DONE, Handle
from shardwise.engine.extended import ExtendedParameters, is_extended
from shardwise.engine.gradients import Gradients
from shardwise.engine.kept import Kept
from shardwise.engine.lanes import Lane
from shardwise.engine.mesh import Mesh
from shardwise.engine.route import Route, Way, nothing_to_unpack
from shardwise.engine.storage import Member, Offload, Parameters


class State(Enum):
    FREE = "free"
    GATHERING = "gathering"
    READY = "ready"


@dataclass
class Options:
    """What one unit does; from the Plan, or from one call of the compat surface, whose setters may
    change it between passes.
    """

    compute_dtype: torch.dtype | None = None  # None: the parameters' own
    reduce_dtype: torch.dtype | None = None  # None: the parameters' own
    gather: str = "auto"
    precision: Any = None  # handed to parameters that bring their own all-gather
    plain: bool = False  # users see plain tensors (ddp)
    offload: Offload | None = None
    keep: bool | int = False  # full parameters from forward to backward: all, none, or 1/k
    stays_shown: bool = False  # kept parameters also stay in their modules' places
    keep_after_backward: bool = False
    gathers_in_backward: bool = True
    zeroes_unused: bool = False  # parameters that no rank used get zeros, not None
    scatters: bool = True  # reduce-scatter at the next backward, else only add up here
    all_reduces: bool = True  # and all-reduce over the replicas
    divide_before: float = 1.0  # gradients, before and after they are summed
    divide_after: float = 1.0
    gather_ahead: list[Unit] | None = None  # instead of the recorded order, in forward
    gather_ahead_backward: list[Unit] | None = None
    custom_gather: Any = None  # objects with `allocate` and a call, as torch's AllGather
    custom_scatter: Any = None
    after_reduce: Callable[[torch.Tensor], None] | None = None
    after_reduce_stream: torch.cuda.Stream | None = None

    def dtypes(self, own: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
        """Compute and reduce dtype of parameters whose own dtype is `own`. Integers stay."""
        if not own.is_floating_point:
            return own, own
        return self.compute_dtype or own, self.reduce_dtype or own


def divide(options: Options, reduce_dtype: torch.dtype, factor: float) -> None:
    """Divide gradients by `factor` in all. A dtype of small range takes about the square root of it
    before the sum and the rest after, so that neither end of the range is left.
    """
    before = 1.0
    if reduce_dtype not in (torch.float32, torch.bfloat16):
        while factor % before == 0 and factor / before > before:
            before *= 2
    options.divide_before, options.divide_after = before, factor / before


class Unit:
    """One unit on this rank."""

    def __init__(
        self,
        name: str,
        modules: Sequence[nn.Module],
        members: Sequence[Member],
        mesh: Mesh,
        options: Options,
        is_root: bool = False,
    ) -> None:
        self.name, self.modules, self.is_root = name, list(modules), is_root
        self.mesh, self.options = mesh, options
        self.parameters = (
            ExtendedParameters(members[0], mesh, options.precision)
            if len(members) == 1 and is_extended(members[0].original)
            else Parameters(members, mesh, options.plain, options.offload)
        )
        self.register()
        self.state = State.FREE
        self.prepared = False
        self.is_shown = False
        # Whether full is older than master: true from an optimizer step to the next gather.
        self.stale = False
        self.remaining = len(self.modules)  # modules of the unit still to run in this forward
        # The reduce's state over the micro-batches of a step.
        self.opened = False  # a reduce of this step has looked at the gradient buffer
        self.overwrite = False  # what the buffer holds is worth nothing: the next sum overwrites it
        self.accumulator: torch.Tensor | None = None  # local gradients not yet scattered
        self.partial: torch.Tensor | None = None  # scattered sums not yet all-reduced
        # Backward's state: gradients still to come, inputs whose gradient is still to come, reduced
        # already, summed over all ranks already.
        self.left = 0
        self.open_inputs = 0
        self.untracked = 0  # calls whose inputs carry no gradient, so that nothing tells their end
        self.issued = False
        self.complete = False
        self.gradients: Gradients | None = None
        self.attached_version = -1  # of the masters, when gradients were last hung on
        self._noted: torch.Tensor | None = None
        self.trainable: tuple[bool, ...] = ()

    def register(self) -> None:
        """Hang the visible parameters in their modules."""
        for member, visible in zip(self.parameters.members, self.parameters.visible, strict=True):
            for module, key in member.places:
                module._parameters[key] = visible

    def prepare(self, lane: Lane) -> None:
        """Make all that only a running unit needs: full parameters, routes, gradients."""
        p, options = self.parameters, self.options
        p.prepare(options.dtypes(p.dtype)[0])
        self.lane = lane
        self._arrived = lane.make_event()  # a gather's end, recorded anew each time
        self.packed = lane.make_event()
        self._handle: Handle = DONE
        self._unpack = nothing_to_unpack
        self._home: Way | None = None
        self.kept_buffer: Kept | None = None
        if not p.aliased:
            self._home = p.make_route(options.gather, options.custom_gather)
            if self.mesh.keep is not None and isinstance(self._home, Route):
                mesh = self.mesh.keep_mesh if options.stays_shown else None
                self.kept_buffer = Kept(p, self.mesh.keep, mesh, options.gather)
            p.buffer.release()  # every view is made; the bytes come with the first gather
        self._route = self._home
        # Where each parameter hangs: the module's own dict, the key in it, and the two it swaps.
        self._places = [
            (module._parameters, key, shown, visible)
            for member, shown, visible in zip(p.members, p.shown, p.visible, strict=True)
            for module, key in member.places
        ]
        # With n = 1 and no cast the full parameters are the master: always there, nothing to move.
        self.state = State.READY if p.aliased else State.FREE
        self.stale = False
        self.gathered_version = -1
        self.trainable = ()
        self.prepared = True
        self.follow_requires_grad()

    def reroute(self) -> None:
        """Gather by the options as they are now."""
        if self.prepared and self._home is not None:
            self.free()
            options = self.options
            self._home = self.parameters.make_route(options.gather, options.custom_gather)
            self._route = self._home

    def follow(self) -> bool:
        """Take over parameters that were cast, moved or replaced since; true if they were, and the
        unit has to be prepared again.
        """
        shown = self.is_shown and self.state is not State.FREE  # else a kept piece is
        self.hide()
        if self.parameters.unmoved:
            if shown:
                self.show()
            return False
        self.free()
        self.parameters.follow()
        self.register()
        self.prepared = False
        return True

    def follow_requires_grad(self) -> bool:
        """Take over which visible parameters are trainable now; true if that changed."""
        p = self.parameters
        trainable = tuple([visible.requires_grad for visible in p.visible])
        if trainable == self.trainable:
            return False
        self.trainable = trainable
        for shown, trains in zip(p.shown, trainable, strict=True):
            shown.requires_grad_(trains)
        trained = [i for i, trains in enumerate(trainable) if trains]
        reduce_dtype = self.options.dtypes(p.dtype)[1]
        self.gradients = Gradients(p, trained, reduce_dtype) if trained else None
        return True

    @property
    def changed(self) -> bool:
        """The masters were written since the last gather."""
        return self.parameters.version != self.gathered_version

    @property
    def is_current(self) -> bool:
        """This rank's own rows, as they were gathered, are those of the masters now."""
        self.wait()
        self.parameters.copy_echoes()
        return self._home is not None and self._home.is_current

    def keep_evaluated(self) -> None:
        """After an evaluation: stay gathered, and shown unless the optimizer's step is still to
        come, before which a program asks the parameters for their gradients. Remember the masters:
        what it writes to them until the next pass is told so from what it writes to the shown ones.
        """
        p, gradients = self.parameters, self.gradients
        stepped = self.attached_version != p.version
        if gradients is not None and not stepped and not gradients.cleared:
            self.hide()
        elif self.is_shown and self._home is not None and not isinstance(p, ExtendedParameters):
            self._noted = fingerprint(p.master)

    def take_writes(self) -> None:
        """Carry what was written to the shown parameters since an evaluation to the masters."""
        noted, self._noted = self._noted, None
        if noted is None or self._home is None:
            return
        self.wait()
        self.parameters.restore_shown()
        if not self.is_current and torch.equal(noted, fingerprint(self.parameters.master)):
            self._home.take_back()

    @property
    def adds_up(self) -> bool:
        """Gradients of this step wait for those of a later pass."""
        return self.accumulator is not None or self.partial is not None

    @property
    def frees_early(self) -> bool:
        """Complete gradients prove that backward needs the unit no more. Not so for the root, whose
        modules are everywhere, nor for several modules of which some weights are frozen.
        """
        return not self.is_root and (len(self.modules) == 1 or all(self.trainable))

    @property
    def has_gradients(self) -> bool:
        """Some of the gradients that this backward owes have arrived and are not reduced."""
        return self.gradients is not None and self.left != len(self.gradients.shown)

    def expect_gradients(self) -> None:
        """From now on every trainable parameter owes a gradient."""
        self.left = len(self.gradients.shown) if self.gradients is not None else 0

    def gather(self) -> None:
        """Start bringing the full parameters together, unless they are there or on their way."""
        p = self.parameters
        if p.echoes:
            p.copy_echoes()
        if self.state is not State.FREE:
            if not self.stale:
                return
            self.wait()
        self.stale = False
        if p.aliased:
            return
        self.gathered_version = p.version
        route = self._route
        assert route is not None
        # On a host the copy-out runs in `wait`: until then the staging alone is enough.
        if self.lane.ordered or not route.stages:
            p.buffer.allocate()
        with marks.range("gather", self.name), self.lane.behind_compute():
            handle, unpack = route.start()
            if self.lane.ordered:
                handle.wait()
                unpack()
                handle, unpack = self.lane.mark(self._arrived), nothing_to_unpack
        self._handle, self._unpack = handle, unpack
        self.state = State.GATHERING

    def wait(self) -> None:
        """Let compute wait for the gather under way, if any."""
        if self.state is not State.GATHERING:
            return
        self.lane.join(self._handle)
        with marks.range("copy-out", self.name):
            self.parameters.buffer.allocate()
            self._unpack()
        self._handle, self._unpack = DONE, nothing_to_unpack
        if isinstance(self.parameters, ExtendedParameters):
            self._take_over(self.parameters.take_placeholder())
        if self._route is not self._home:
            self.forget_kept()
        self.state = State.READY

    def _take_over(self, placeholder: nn.Parameter | None) -> None:
        """What stood in for an extended parameter's whole, which its first gather made, gives it
        its hooks and its places.
        """
        if placeholder is None:
            return
        shown = self.parameters.shown[0]
        shown.__dict__.update(placeholder.__dict__)
        for hook in (placeholder._post_accumulate_grad_hooks or {}).values():
            shown.register_post_accumulate_grad_hook(hook)
        self._places = [(places, key, shown, visible) for places, key, _, visible in self._places]
        if self.gradients is not None:
            self.gradients.shown = [shown]

    def show(self) -> None:
        if not self.is_shown or self.kept_buffer is not None:
            for places, key, shown, _ in self._places:
                places[key] = shown
            self.is_shown = True

    def hide(self) -> None:
        if self.is_shown:
            for places, key, _, visible in self._places:
                places[key] = visible
            self.is_shown = False

    def free(self) -> None:
        """Give the full parameters' memory back."""
        self.hide()
        if self.state is State.FREE or self.parameters.aliased:
            return
        self.wait()
        self.parameters.buffer.release()
        self.state = State.FREE

    def shrink(self) -> None:
        """Free all but this rank's piece in the smaller group of keep_after_forward = k."""
        kept = self.kept_buffer
        if self.state is not State.READY or kept is None:
            self.free()
            return
        kept.fill()
        self._route = kept.route
        self.free()
        for places, key, parameter in kept.places:
            places[key] = parameter
        self.is_shown = bool(kept.places)

    def forget_kept(self) -> None:
        """What a smaller group kept is worth nothing: it is gathered, or of another step."""
        if self.kept_buffer is not None:
            self.kept_buffer.release()
            self._route = self._home
