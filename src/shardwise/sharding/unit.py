"""The unit: parameters that are gathered and reduced together, and the states they pass through.

        gather            wait              free
    FREE ----> GATHERING ----> READY ------------> FREE

`show` puts the full parameters into their modules' places, `hide` puts the visible ones back. Both
only swap references; `hide` never frees, `free` always hides.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch
from torch import nn

from shardwise.comms.lanes import Lane
from shardwise.comms.real import DONE, Handle
from shardwise.planning.plan import Plan
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.route import Route, nothing_to_unpack
from shardwise.sharding.storage import Buffer, Gradients, Member, Parameters


class State(Enum):
    FREE = "free"
    GATHERING = "gathering"
    READY = "ready"


class Unit:
    """One unit on this rank."""

    def __init__(
        self,
        name: str,
        modules: Sequence[nn.Module],
        members: Sequence[Member],
        plan: Plan,
        mesh: Mesh,
        lane: Lane,
        is_root: bool,
    ) -> None:
        self.name, self.modules, self.is_root = name, list(modules), is_root
        own = str(members[0].original.dtype).removeprefix("torch.")
        _, compute_dtype, self.reduce_dtype = plan.dtypes(own)
        self.plain = plan.strategy.state == "replicate"
        self.parameters = Parameters(members, mesh, compute_dtype, self.plain)
        p = self.parameters
        self.casts_inputs = compute_dtype if compute_dtype.is_floating_point else None
        self.lane = lane
        self.home = (
            None if p.aliased else Route(mesh.shard, p.layout, p.master, p.full_bytes, plan.gather)
        )
        self.kept_buffer: Buffer | None = None
        self.kept_route: Route | None = None
        if mesh.keep is not None:
            pieces = p.layout.full_numel // mesh.keep.size
            self.kept_buffer = Buffer(pieces, compute_dtype, p.master.device)
            self.kept_route = Route(
                mesh.keep, p.layout, self.kept_buffer.flat, p.full_bytes, plan.gather
            )
            self.kept_buffer.release()
        if not p.aliased:
            p.buffer.release()  # every view is made; the bytes come with the first gather
        # Where each parameter hangs: the module's own dict, the key in it, and the two it swaps.
        self._places = [
            (module._parameters, key, shown, visible)
            for member, shown, visible in zip(p.members, p.shown, p.visible, strict=True)
            for module, key in member.places
        ]
        for places, key, _, visible in self._places:
            places[key] = visible
        # With n = 1 and no cast the full parameters are the master: always there, nothing to move.
        self.state = State.READY if p.aliased else State.FREE
        self.stale = (
            False  # full is older than master; true from an optimizer step to the next gather
        )
        self.is_shown = False
        self._handle: Handle = DONE
        self._arrived, self.packed = lane.make_event(), lane.make_event()
        self._unpack = nothing_to_unpack
        self._route = self.home
        # The reduce's state over the micro-batches of a step.
        self.opened = False  # a reduce of this step has looked at the gradient buffer
        self.overwrite = False  # what the buffer holds is worth nothing: the next sum overwrites it
        self.accumulator: torch.Tensor | None = (
            None  # local gradients not yet scattered (sync "last")
        )
        self.partial: torch.Tensor | None = (
            None  # scattered sums not yet all-reduced (the delayed sync)
        )
        # Backward's state: gradients still to come, inputs whose gradient is still to come, reduced
        # already.
        self.left = 0
        self.open_inputs = 0
        self.issued = False
        self.remaining = 0  # modules of the unit still to run in this forward
        self.gradients: Gradients | None = None
        self.trainable: tuple[bool, ...] = ()
        self.follow_requires_grad()

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
        self.gradients = self._make_gradients(trained)
        if self.gradients is not None:
            self.gradients.adopt()
        return True

    def _make_gradients(self, trained: list[int]) -> Gradients | None:
        if not trained:
            return None
        return Gradients(self.parameters, trained, self.plain, self.reduce_dtype)

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
        if self.state is not State.FREE:
            if not self.stale:
                return
            self.wait()
        p = self.parameters
        self.stale = False
        if p.aliased:
            return
        route = self._route
        assert route is not None
        # On a host the copy-out runs in `wait`: until then the staging alone is enough.
        if self.lane.ordered or not route.stages:
            p.buffer.allocate()
        with self.lane.behind_compute():
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
        self.parameters.buffer.allocate()
        self._unpack()
        self._handle, self._unpack = DONE, nothing_to_unpack
        if self._route is self.kept_route and self.kept_buffer is not None:
            self.kept_buffer.release()
            self._route = self.home
        self.state = State.READY

    def show(self) -> None:
        if not self.is_shown:
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
        kept, route = self.kept_buffer, self.kept_route
        if self.state is State.READY and kept is not None and route is not None:
            kept.allocate()
            torch._foreach_copy_(route.pieces, route.own)
            self._route = route
        self.free()

    def forget_kept(self) -> None:
        """A new step: what a smaller group kept of the last one is worth nothing."""
        if self.kept_buffer is not None:
            self.kept_buffer.release()
            self._route = self.home
