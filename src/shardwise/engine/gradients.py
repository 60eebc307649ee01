"""The gradients of one unit: what backward leaves, what a reduce reads, where the sums land, and
what hangs on the parameters. `storage.py` opens with the note that names these tensors.

Whoever reads a gradient may keep it, or a view of it, for as long as they like. So the sums of a
step get memory of their own, taken anew at the step's first reduce; once `zero_grad` has let go of
them the engine does too, and writes to them never again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.engine import marks, static, torch_private
from shardwise.engine.collectives import Buffer
from shardwise.engine.storage import Parameters, Take
from shardwise.engine.torch_private import local_of
from shardwise.planning.rows import Rows, lay_out

# A host copies a gradient of at least so many bytes to its place as it comes; smaller ones go
# together.
PLACED_FROM_BYTES = 2**15

_PRESENTS = 64  # which of its parameters a rank lacked: so many answers are kept


class GradientsPast:
    """A hook on a parameter that replicas keep whole and plain. Autograd comes to it only where a
    program computes with it outside of the model's forward, and no message is made of that.
    """

    def __init__(self) -> None:
        self.came = False

    def __call__(self, parameter: torch.Tensor) -> None:
        self.came = True


class Gradients:
    """The gradients of one unit's trainable parameters.

    From a step's first reduce on, `sums` holds this rank's rows of every sum, which are `flat`,
    and behind them one number for each parameter: not zero if any rank produced a gradient of it.
    `summed` are the gradients that users see, over `flat`.
    """

    def __init__(
        self,
        parameters: Parameters,
        trainable: Sequence[int],
        reduce_dtype: torch.dtype,
        sum_dtype: torch.dtype,
        take: Take,
    ) -> None:
        """They travel in `reduce_dtype` and are added in `sum_dtype`. `take` gives memory for a
        permanent slot.
        """
        mesh = self.mesh = parameters.mesh
        self.offload = parameters.offload
        self.reduce_dtype, self.sum_dtype = reduce_dtype, sum_dtype
        self.exchanges = reduce_dtype != sum_dtype  # no backend adds in another dtype than it sends
        self._dtype = parameters.dtype
        # The sums have the dtype and device of what a reduce gives.
        self.sums_as_reduced = sum_dtype == self._dtype and self.offload is None
        rows = [parameters.layout.rows[i] for i in trainable]
        shapes, dims = [r.shape for r in rows], [r.dim for r in rows]
        self.layout = layout = lay_out(shapes, mesh.shard.size, dims)
        order = [trainable[i] for i in layout.order]
        self.members = [parameters.members[i] for i in order]
        self.visible = [parameters.visible[i] for i in order]
        self.shown = [parameters.shown[i] for i in order]
        # Those that are tied to one of another unit, whose gradient theirs is added to.
        self.tied = frozenset(at for at, i in enumerate(order) if i in parameters.tied)
        # Some parameters have no rows to cut (0-d), nothing in them, or another dim cut.
        self._odd = any(r.replicated or r.part == 0 or r.dim for r in layout.rows)
        self.has_dtensors = any(member.dtensor for member in self.members)
        # A rank alone knows who produced what.
        self.counts = layout.counts if mesh.ranks > 1 else 0
        self.shard_numel = layout.shard_numel + self.counts
        # Packed with the gradients, so of their dtype.
        shape, dtype = (layout.ranks, self.counts), self.shown[0].dtype
        self._ones = torch.ones(shape, dtype=dtype, device=mesh.device)
        # Permanent, where one multi-tensor copy can pack it: on a GPU, with every gradient cut
        # evenly among several ranks.
        even = all(r.even and r.part and not r.dim for r in layout.rows)
        few = Slot.pays(len(layout.rows) + 1, layout.ranks)
        self._has_slot = mesh.device.type == "cuda" and even and few
        self.slot: Slot | None = None
        self.make_slot(take)
        # On a host, the slot of a unit that only replicas reduce is filled as gradients come.
        whole = mesh.device.type == "cpu" and layout.ranks == 1
        self.fills_early = whole and self.offload is None and not self.has_dtensors
        self._filling: Filling | None = None
        self._numbers = {id(shown): i for i, shown in enumerate(self.shown)}
        # A host writes the rows that are there; one kernel of a GPU writes the padding too.
        self._sparse = layout.mostly_padding and mesh.device.type == "cpu"
        self.sums: torch.Tensor | None = None
        self.flat: torch.Tensor | None = None
        self.locals: list[torch.Tensor] = []
        self.summed: list[torch.Tensor] = []
        self._parts = [r.part for r in layout.rows]
        shapes_here = [r.local_shape(mesh.shard.rank) for r in layout.rows]
        self._like = [torch.empty(shape, device="meta") for shape in shapes_here]
        self._padded = any(t.numel() != n for t, n in zip(self._like, self._parts, strict=True))
        # What the DTensors of every step are made with; none where users see plain gradients.
        self._specs = [
            member.placement(rows, mesh).spec(self._dtype)
            for member, rows in zip(self.members, layout.rows, strict=True)
            if not parameters.plain
        ]
        # Parameters, by number: without a gradient of this rank so far in this step, and those that
        # the last `attach` left without one.
        self._missing = set(range(len(self.visible)))
        self._absent: frozenset[int] = frozenset()
        # By what this rank lacks: its part of the counts, and what the last step found nobody has.
        self._presents: dict[frozenset[int], torch.Tensor] = {}
        self._last_unused: tuple[frozenset[int], frozenset[int]] | None = None

    def make_slot(self, take: Take) -> None:
        """The permanent slot, where there is to be one, in memory that `take` gives."""
        if self._has_slot:
            layout = self.layout
            starts = [*layout.offsets, layout.shard_numel]
            sizes = [*(r.part for r in layout.rows), self.counts]
            taken = take(self.shard_numel * layout.ranks, self.reduce_dtype, self.mesh.device)
            self.slot = Slot(starts, sizes, layout.ranks, *taken)

    def _take_memory(self) -> None:
        """`sums`, `flat` and `locals`: beside the master, so on the host where that is offloaded.
        (torch keeps pinned memory that is given back, so that taking it again costs nothing.)
        """
        filling = self._filling if self.sums_as_reduced else None
        if self.offload is None:
            sums = self._empty(self._dtype) if filling is None else filling.slot
        else:
            pin = self.offload.pin_memory
            sums = torch.empty(self.shard_numel, dtype=self._dtype, pin_memory=pin)
        if marks.on is not None:
            marks.on.buffer(self, sums.data_ptr(), sums.nbytes)
        self.sums = sums
        self.flat = sums[: self.layout.shard_numel] if self.counts else sums
        self.locals = self._views_of(self.flat) if filling is None else filling.views

    def _empty(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(self.shard_numel, dtype=dtype, device=self.mesh.device)

    def _views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """This rank's rows of each parameter in `flat`."""
        if not self._padded:
            return torch_private.views_of(flat, self._like)
        pairs = zip(flat.split(self._parts), self._like, strict=True)
        return [part[: like.numel()].view(like.shape) for part, like in pairs]

    @property
    def nbytes(self) -> int:
        """Of `sums`, whether they are there or not."""
        return self.shard_numel * self._dtype.itemsize

    def open(self) -> bool:
        """At a step's first reduce: true if what is there is worth nothing, and the sum overwrites
        it; false if the gradients that hang on the parameters are all ours, and the sum adds.
        """
        self._missing = set(range(len(self.visible)))
        # A tensor hook is shown what this step adds, so that must not be in one sum with the rest.
        hooked = any(map(torch_private.gradient_hooks, self.visible))
        if self.sums is not None and self._hangs_as_left and not hooked:
            return False
        self._make_sums()
        self._absent = frozenset()
        return True

    def _make_sums(self) -> None:
        self._take_memory()
        self.summed = self.locals
        if self._specs:
            self.summed = list(map(torch_private.make_dtensor, self.locals, self._specs))

    @property
    def _hangs_as_left(self) -> bool:
        """What hangs on the parameters is what the last step put there, all of it."""
        return all(
            parameter.grad is summed or (parameter.grad is None and i in self._absent)
            for i, (parameter, summed) in enumerate(zip(self.visible, self.summed, strict=True))
        )

    def is_own(self, i: int) -> bool:
        """What hangs on the i-th parameter is a sum of ours."""
        return bool(self.summed) and self.visible[i].grad is self.summed[i]

    @property
    def complete(self) -> bool:
        """Every parameter has a gradient, and they are all ours."""
        return bool(self.summed) and not (self.tied or self._absent) and self._hangs_as_left

    @property
    def cleared(self) -> bool:
        """No parameter of the unit has a gradient."""
        return all(parameter.grad is None for parameter in self.visible)

    def drop(self) -> None:
        """Let go of the sums: they are those of whoever kept one, or nobody's."""
        if marks.on is not None and self.sums is not None:
            marks.on.buffer(self, self.sums.data_ptr(), -self.sums.nbytes)
        self.sums = self.flat = None
        self.locals, self.summed = [], []

    def left(self) -> tuple[Any, ...]:
        """What a step has left here, to be put back by `put_back`."""
        memory = self.sums, self.flat, self.locals, self.summed
        return *memory, set(self._missing), self._absent

    def put_back(self, left: tuple[Any, ...]) -> None:
        """Be as when `left` was asked for."""
        self.sums, self.flat, self.locals, self.summed, missing, self._absent = left
        self._missing = set(missing)

    def set_aside(self) -> tuple[torch.Tensor | None, set[int], frozenset[int]]:
        """What a step has left here, on the host: a copy, which keeps no memory of the device."""
        sums = None if self.sums is None else self.sums.to("cpu")
        return sums, set(self._missing), self._absent

    def take_back(self, aside: tuple[torch.Tensor | None, set[int], frozenset[int]]) -> None:
        """Be as when it was set aside, with sums in new memory. What still hangs on the parameters
        and is not one of these is not ours any more.
        """
        sums, missing, absent = aside
        self.drop()
        if sums is not None:
            self._make_sums()
            assert self.sums is not None
            self.sums.copy_(sums)
        self._missing, self._absent = set(missing), absent

    def clear(self) -> None:
        """Take the sums off the parameters again."""
        for parameter, summed in zip(self.visible, self.summed, strict=False):
            if parameter.grad is summed:
                parameter.grad = None
        self.drop()

    def attach_tied(self) -> None:
        """Before any `attach`: add the gradients of tied parameters to what hangs there, so that
        the sum is complete when its own unit hangs up the rest.
        """
        for i in self.tied - self._unused() if self.tied else ():
            self._hang(i)

    def attach(self, zeroes_unused: bool) -> None:
        """Hang the sums on the visible parameters, but for those of which no rank produced a
        gradient. What hangs there and is not ours is added to.
        """
        unused = frozenset() if zeroes_unused else self._unused()
        absent = []
        for i, parameter in enumerate(self.visible):
            if i in self.tied:
                continue
            if i in unused:
                if parameter.grad is None:
                    absent.append(i)
                continue
            hooks = torch_private.gradient_hooks(parameter)
            for hook in list(hooks.values()) if hooks else ():
                self._run_hook(hook, i)
            self._hang(i)
            hooks = torch_private.accumulated_hooks(parameter)
            for hook in hooks.values() if hooks else ():
                if type(hook) is GradientsPast:
                    continue
                hook(parameter)
        self._absent = frozenset(absent)

    def _hang(self, i: int) -> None:
        parameter, summed = self.visible[i], self.summed[i]
        if parameter.grad is None:
            parameter.grad = summed
        elif parameter.grad is not summed:
            local_of(parameter.grad).add_(self.locals[i])

    @torch.no_grad()
    def _run_hook(self, hook: Callable[[torch.Tensor], Any], i: int) -> None:
        """Show the i-th sum to a hook of `parameter.register_hook`, which autograd does not meet
        (the graph has the shown parameter). What it returns takes the sum's place.
        """
        returned, local = hook(self.summed[i]), self.locals[i]
        if returned is None or returned is self.summed[i]:
            return
        replacement = local_of(returned)
        if replacement.shape != local.shape:
            raise RuntimeError(
                f"a hook on parameter {self.members[i].name!r} returned a "
                f"{type(returned).__name__} whose local shape is {tuple(replacement.shape)}, "
                f"expected {tuple(local.shape)}, as the gradient it was given"
            )
        local.copy_(replacement)

    def _unused(self) -> frozenset[int]:
        """Parameters, by number, of which no rank produced a gradient. Only a rank that produced
        none itself has to look at what the reduce brought.
        """
        if not self._missing or not self.counts:
            return frozenset(self._missing)
        assert self.sums is not None
        missing, last = frozenset(self._missing), self._last_unused
        if last is not None and last[0] == missing and torch_private.is_recording(static.fixed):
            return last[1]
        counts = self.sums[self.layout.shard_numel :].tolist()
        unused = frozenset(i for i in missing if counts[i] == 0)
        self._last_unused = missing, unused
        return unused

    @property
    def missing(self) -> list[str]:
        """Names of the parameters of which this rank produced no gradient in this step."""
        return [self.members[i].name for i in sorted(self._missing)]

    def take(self) -> list[torch.Tensor]:
        """Take the gradients off the shown parameters; a parameter without one counts as zeros.
        The last tensor, where ranks count, is this rank's part of the counts. Where the slot is
        filled early there is nothing to take: `pack` brings the rest there.
        """
        if self.fills_early:
            return []
        found, missing = [], set()
        for i, shown in enumerate(self.shown):
            grad = shown.grad
            if grad is None:
                missing.add(i)
                grad = torch.zeros_like(shown)
            elif grad.is_sparse:
                raise self._refuse_sparse(i)
            found.append(grad)
            shown.grad = None
        self._missing &= missing
        if self.has_dtensors:
            found = [
                member.dtensor.local_gradient(grad) if member.dtensor is not None else grad
                for member, grad in zip(self.members, found, strict=True)
            ]
        if self.counts:
            found.append(self._present(frozenset(missing)))
        return found

    def _refuse_sparse(self, i: int) -> RuntimeError:
        """A gradient that is no plain tensor of rows to sum and cut."""
        return RuntimeError(
            f"the gradient of parameter {self.members[i].name!r} is sparse, and shardwise reduces "
            "dense ones; build its module with sparse=False (nn.Embedding, nn.EmbeddingBag)"
        )

    def place(self, shown: torch.Tensor) -> None:
        """A gradient has come: where the slot is filled early, copy it there, while it is in the
        processor's caches, and let go of it. So a backward holds few gradients beside the slot.
        """
        grad = shown.grad if self.fills_early else None
        if grad is None or grad.is_sparse or grad.nbytes < PLACED_FROM_BYTES:
            return
        if self._filling is None:
            self._filling = self._make_filling(self._empty(self.sum_dtype))
        self._filling.put(self._numbers[id(shown)], grad)
        shown.grad = None

    def _make_filling(self, slot: torch.Tensor) -> Filling:
        return Filling(slot, self._views_of(slot[: self.layout.shard_numel]))

    def _fill_rest(self, into: torch.Tensor | None) -> torch.Tensor:
        """The slot, with what is not there yet: small gradients, zeros for those that never came,
        and who produced one.
        """
        filling, self._filling = self._filling, None
        if filling is None:
            filling = self._make_filling(self._empty(self.sum_dtype) if into is None else into)
        rest = {i: shown.grad for i, shown in enumerate(self.shown) if shown.grad is not None}
        for i, grad in rest.items():
            if grad.is_sparse:
                raise self._refuse_sparse(i)
        filling.put_all(rest)
        for i in rest:
            self.shown[i].grad = None
        missing = frozenset(range(len(self.shown))) - filling.placed
        for i in missing:
            filling.views[i].zero_()
        self._missing &= missing
        if self.counts:
            filling.slot[self.layout.shard_numel :].copy_(self._present(missing)[0])
        return filling.slot

    def forget_placed(self) -> None:
        """The backward that filled the slot has ended in an exception."""
        self._filling = None

    def take_rows(self, found: Sequence[torch.Tensor | None]) -> None:
        """Sums over all ranks that somebody else has made: this rank's rows of each parameter,
        padded; None for one of which no rank produced a gradient.
        """
        overwrites = self.open()
        assert self.sums is not None and self.flat is not None
        missing = {i for i, rows in enumerate(found) if rows is None}
        self._missing &= missing
        if missing and overwrites:
            self.sums.zero_()
        pieces = self.flat.split(self._parts)
        pairs = [(p, rows) for p, rows in zip(pieces, found, strict=True) if rows is not None]
        if pairs:
            into, rows = (list(each) for each in zip(*pairs, strict=True))
            (torch_private.foreach_copy_ if overwrites else torch_private.foreach_add_)(into, rows)

    def _present(self, missing: frozenset[int]) -> torch.Tensor:
        """For every rank a row: one for each parameter with a gradient, zero for one without."""
        if not missing:
            return self._ones
        found = self._presents.get(missing)
        if found is None:
            row = [float(i not in missing) for i in range(self.counts)]
            rows = torch.tensor([row] * self.layout.ranks, dtype=self._ones.dtype)
            found = rows.to(self.mesh.device)
            if len(self._presents) < _PRESENTS:  # for good: a recorded graph may read it
                self._presents[missing] = found
        return found

    def slot_dtype(self, passes: bool) -> torch.dtype:
        """Of a slot: as gradients travel where it is scattered at once, else as they are added."""
        return self.reduce_dtype if passes and self.layout.ranks > 1 else self.sum_dtype

    def pack(
        self, found: list[torch.Tensor], into: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """Lay what was taken rank after rank in a slot of this dtype: one kernel for the unit."""
        if self.fills_early:
            return self._fill_rest(into)
        ranks, slot = self.layout.ranks, into
        if slot is None:
            numel, device = ranks * self.shard_numel, self.mesh.device
            make = torch.zeros if self._sparse else torch.empty
            slot = make(numel, dtype=dtype, device=device)
        elif self._sparse:
            slot.zero_()
        if self._odd:
            rows = self.layout.rows
            pairs = zip(found, rows, strict=False)
            cut = [_rank_after_rank(grad, each) for grad, each in pairs if each.part]
            found = [*cut, *found[len(rows) :]]
        if found and ranks == 1:
            torch.cat([grad.reshape(-1) for grad in found], out=slot)
        elif found and self._sparse:
            _lay_rows(found, slot.view(ranks, -1))
        elif found:
            torch_private.chunk_cat(found, ranks, slot.view(ranks, -1))
        return slot


def _lay_rows(tensors: Sequence[torch.Tensor], by_rank: torch.Tensor) -> None:
    """What `chunk_cat` writes, but for the zeros, which are there: it takes time for every rank."""
    into, rows, at = [], [], 0
    for tensor in tensors:
        per_rank = -(-len(tensor) // len(by_rank))
        ranks, rest = divmod(len(tensor), per_rank)
        flat = tensor.reshape(len(tensor), -1)
        part = per_rank * flat.shape[1]
        into.append(by_rank[:ranks, at : at + part])
        rows.append(flat[: ranks * per_rank].reshape(ranks, part))
        if rest:
            into.append(by_rank[ranks, at : at + rest * flat.shape[1]])
            rows.append(flat[ranks * per_rank :].reshape(-1))
        at += part
    torch_private.foreach_copy_(into, rows)


def _rank_after_rank(grad: torch.Tensor, rows: Rows) -> torch.Tensor:
    """A gradient whose rows of dim 0 are what the ranks get."""
    if rows.replicated:
        return grad.expand(rows.ranks)
    return slices_of(grad, rows).flatten(1) if rows.dim else grad


def slices_of(whole: torch.Tensor, rows: Rows) -> torch.Tensor:
    """A tensor that is cut along another dim than 0 as (ranks, *slice)."""
    return whole.unflatten(rows.dim, (rows.ranks, -1)).movedim(rows.dim, 0)


class Filling:
    """A slot that is being filled: the places of all parameters in it, and which are taken."""

    def __init__(self, slot: torch.Tensor, views: list[torch.Tensor]) -> None:
        self.slot, self.views = slot, views
        self.placed: set[int] = set()

    def put(self, number: int, gradient: torch.Tensor) -> None:
        """Copy a gradient to its place; one that comes again is added."""
        place, found = self.views[number], gradient.detach()
        if number in self.placed:
            place.add_(found)
        else:
            place.copy_(found)
            self.placed.add(number)

    def put_all(self, gradients: dict[int, torch.Tensor]) -> None:
        """The same of many: those that are new by one call."""
        new = gradients.keys() - self.placed
        for number in gradients.keys() - new:
            self.put(number, gradients[number])
        if new:
            found = [gradients[number].detach() for number in new]
            torch_private.foreach_copy_([self.views[number] for number in new], found)
            self.placed |= new


class Slot:
    """A reduce's input whose pieces, one for every tensor and rank, are made once. A rank has
    tensor after tensor, from `starts` on.
    """

    # Each piece costs the host about a microsecond in every step, and some memory for good;
    # `chunk_cat` costs the device more, but the host the same for any number of ranks.
    MOST_PIECES = 2048

    @classmethod
    def pays(cls, tensors: int, ranks: int) -> bool:
        """Whether so few pieces are better copied one by one."""
        return ranks > 1 and tensors * ranks <= cls.MOST_PIECES

    def __init__(
        self,
        starts: Sequence[int],
        sizes: Sequence[int],
        ranks: int,
        flat: torch.Tensor,
        buffer: Buffer,
    ) -> None:
        self.flat, self.buffer = flat, buffer
        by_rank = self.flat.view(ranks, -1)
        self.pieces = [
            by_rank[rank, start : start + size]
            for start, size in zip(starts, sizes, strict=True)
            for rank in range(ranks)
        ]
        self.ranks = ranks
        self.buffer.release()

    def pack(self, found: Sequence[torch.Tensor]) -> torch.Tensor:
        """Copy the rows of all that was taken to their ranks' places, cast on the way."""
        self.buffer.allocate()
        cut = [piece for grad in found for piece in grad.reshape(self.ranks, -1).unbind(0)]
        torch_private.foreach_copy_(self.pieces, cut)
        return self.flat
