"""The unit: parameters that are gathered and reduced together, on this rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.engine.bits import fingerprint
from shardwise.engine.collectives import DONE, Handle
from shardwise.engine.executor import TensorExecutor
from shardwise.engine.extended import ExtendedParameters, is_extended
from shardwise.engine.gradients import Gradients
from shardwise.engine.kept import Kept
from shardwise.engine.mesh import Mesh
from shardwise.engine.route import Route, Unpack, Way, nothing_to_unpack
from shardwise.engine.storage import Member, Offload, Parameters
from shardwise.schedule.policy import UnitPolicy
from shardwise.schedule.unit import ScheduledUnit, State


@dataclass
class Options(UnitPolicy):
    """What one unit does; from the Plan, or from one call of `fully_shard`, whose setters may
    change it between passes.
    """

    compute_dtype: torch.dtype | None = None  # None: the parameters' own
    reduce_dtype: torch.dtype | None = None  # None: the parameters' own
    gather: str = "auto"
    precision: Any = None  # handed to parameters that bring their own all-gather
    plain: bool = False  # users see plain tensors (ddp)
    offload: Offload | None = None
    zeroes_unused: bool = False  # parameters that no rank used get zeros, not None
    divide_before: float = 1.0  # gradients, before and after they are summed
    divide_after: float = 1.0
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


class Unit(ScheduledUnit):
    """One unit on this rank: its tensors, and where they hang."""

    executor: TensorExecutor
    options: Options

    def __init__(
        self,
        name: str,
        modules: Sequence[nn.Module],
        members: Sequence[Member],
        mesh: Mesh,
        options: Options,
        is_root: bool = False,
    ) -> None:
        super().__init__(
            name,
            options,
            is_root=is_root,
            module_count=len(modules),
            shard=mesh.shard.size,
            replicate=mesh.replicate.size,
        )
        self.modules, self.mesh = list(modules), mesh
        self.parameters = (
            ExtendedParameters(members[0], mesh, options.precision)
            if len(members) == 1 and is_extended(members[0].original)
            else Parameters(members, mesh, options.plain, options.offload)
        )
        self.register()
        self.prepared = False
        self.gradients: Gradients | None = None
        self.gathered_version = -1  # of the masters, when they were last gathered
        self.attached_version = -1  # and when gradients were last hung on
        self.arriving: tuple[Handle, Unpack] = DONE, nothing_to_unpack  # the gather under way
        self._noted: torch.Tensor | None = None
        self.trainable: tuple[bool, ...] = ()

    @property
    def sums_take_reduces(self) -> bool:
        gradients = self.gradients
        assert gradients is not None
        return gradients.sums_as_reduced and self.options.custom_scatter is None

    def register(self) -> None:
        """Hang the visible parameters in their modules."""
        for member, visible in zip(self.parameters.members, self.parameters.visible, strict=True):
            for module, key in member.places:
                module._parameters[key] = visible

    def prepare(self, executor: TensorExecutor) -> None:
        """Make all that only a running unit needs: full parameters, routes, gradients."""
        p, options = self.parameters, self.options
        p.prepare(options.dtypes(p.dtype)[0])
        self.executor = executor
        self.arrived = executor.make_event()  # a gather's end, recorded anew each time
        self.packed = executor.make_event()
        self._home: Way | None = None
        self.kept_buffer: Kept | None = None
        if not p.aliased:
            self._home = p.make_route(options.gather, options.custom_gather)
            if self.mesh.keep is not None and isinstance(self._home, Route):
                mesh = self.mesh.keep_mesh if options.stays_shown else None
                self.kept_buffer = Kept(p, self.mesh.keep, mesh, options.gather)
            p.buffer.release()  # every view is made; the bytes come with the first gather
        self.keeps_piece = self.kept_buffer is not None
        # Where each parameter hangs: the module's own dict, the key in it, and the two it swaps.
        self.places = [
            (module._parameters, key, shown, visible)
            for member, shown, visible in zip(p.members, p.shown, p.visible, strict=True)
            for module, key in member.places
        ]
        # With n = 1 and no cast the full parameters are the master: always there, nothing to move.
        self.aliased = p.aliased
        self.state = State.READY if p.aliased else State.FREE
        self.stale = self.piece = False
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
        self.gradient_count, self.trains_all = len(trained), all(trainable)
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
    def way(self) -> Way:
        """How the next gather goes: from the shards, or from pieces that a smaller group keeps."""
        way = self.kept_buffer.route if self.piece and self.kept_buffer is not None else self._home
        assert way is not None
        return way

    def gather(self) -> None:
        if self.parameters.echoes:
            self.parameters.copy_echoes()
        super().gather()

    def shrink(self) -> None:
        super().shrink()
        if self.piece and self.kept_buffer is not None:
            for places, key, parameter in self.kept_buffer.places:
                places[key] = parameter
            self.is_shown = bool(self.kept_buffer.places)

    def take_over(self, placeholder: nn.Parameter | None) -> None:
        """What stood in for an extended parameter's whole, which its first gather made, gives it
        its hooks and its places.
        """
        if placeholder is None:
            return
        shown = self.parameters.shown[0]
        shown.__dict__.update(placeholder.__dict__)
        for hook in (placeholder._post_accumulate_grad_hooks or {}).values():
            shown.register_post_accumulate_grad_hook(hook)
        self.places = [(places, key, shown, visible) for places, key, _, visible in self.places]
        if self.gradients is not None:
            self.gradients.shown = [shown]
