"""One call after backward on a plain replicated model: gradients are averaged, clipped and stepped
in slices, and everybody gets the result.

Parameters travel in groups (`planning/groups.py` says which, and who keeps what). For each:

    gradients ──pack──> message ──reduce-scatter──> part      this rank's sums
    parameters' slices ──optimizer, on part──> the same slices, in place
    slices ──pack──> message ──all-gather──> message ──> parameters

A reduce-scatter and an all-gather send together what one all-reduce sends. The optimizer's state
exists for this rank's slices only. While a group travels the next one is packed, or stepped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardwise.engine import checks, torch_private
from shardwise.engine.collectives import Group, Handle, digest
from shardwise.engine.local_step import is_number
from shardwise.engine.parameter_runs import ELEMENTWISE
from shardwise.errors import UserError
from shardwise.planning.groups import GROUP_BYTES, Message, Piece, lay_out_messages

# Where an optimizer has its GroupedStep: on itself, so that both go in one collection.
_KEY = "_shardwise_grouped_step"
# Of a parameter's state: which of its elements the state is of (first, one past the last, of all).
ELEMENTS = "elements"
IN_FLIGHT = 2  # messages under way at a time; more would only take memory
# Calls of the optimizer in a step, at most: each costs the host as much as a message does, and a
# few are enough for messages to travel meanwhile.
UPDATES = 8


def sharded_step(
    parameters: Iterable[torch.Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    max_norm: float | None = None,
    group_bytes: int = GROUP_BYTES,
    layout: str = "rows",
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor | None:
    """Step a replicated model by its averaged gradients, each rank a slice; in the place of an
    all-reduce, `clip_grad_norm_` and `optimizer.step()`. A collective call.

    Every rank has the whole parameters and, after its backward, gradients of its own. They are
    averaged over the ranks of `group` in messages of about `group_bytes`, clipped by their global
    norm if `max_norm` is given, and the optimizer steps this rank's slice of every parameter; then
    the parameters are gathered. Returns the norm before clipping, if `max_norm` is given.

    A parameter without a gradient here counts as zeros if another rank has one; if none has, it is
    not stepped. Gradients stay as backward left them: call `zero_grad` as ever.

    `layout`: "rows" cuts every parameter by rows, "flat" the whole message; the results are the
    same. The optimizer's state is that of the slices: each rank saves its own `state_dict()` and
    loads it again, with as many ranks and, for "flat", the same groups. A plain optimizer's state
    dict can be loaded too: the next step takes its slices.
    """
    if not dist.is_initialized():
        raise UserError(
            "sharded_step needs torch.distributed: start with torchrun and call "
            "init_process_group first"
        )
    if max_norm is not None and not max_norm > 0:
        raise UserError(f"max_norm is {max_norm}, expected a number above 0, or None")
    if any(torch_private.step_hooks(optimizer)):
        raise UserError(
            "the optimizer has step hooks, which would see slices, group by group: remove them, "
            "or use sw.ShardedOptimizer"
        )
    given = list(parameters)
    for each in given:
        if not isinstance(each, torch.Tensor):
            raise UserError(
                f"parameters has a {type(each).__name__}, expected tensors: pass model.parameters()"
            )
    trained = [p for p in dict.fromkeys(given) if p.requires_grad and p.numel()]
    known: GroupedStep | None = optimizer.__dict__.get(_KEY)
    settings = _Settings(group or dist.group.WORLD, group_bytes, layout)
    if known is None or not known.fits(trained, optimizer, settings):
        _check(trained, optimizer)
        agreed = None if known is None else known.agreed
        known = optimizer.__dict__[_KEY] = GroupedStep(trained, optimizer, settings, agreed)
    return known.step(optimizer, max_norm)


class _Settings(NamedTuple):
    group: Any
    group_bytes: int
    layout: str


class _Slice:
    """What this rank steps of a parameter: `tensor` is a view of it."""

    def __init__(self, parameter: torch.Tensor, piece: Piece, by_rows: bool) -> None:
        self.parameter, self.piece = parameter, piece
        tensor = parameter.detach().view(-1)[piece.start : piece.stop]
        self.tensor = tensor.view(-1, *parameter.shape[1:]) if by_rows else tensor
        self.elements = (piece.start, piece.stop, parameter.numel())

    def gradient_in(self, part: torch.Tensor) -> torch.Tensor:
        found = part[self.piece.offset : self.piece.offset + self.piece.numel]
        return found.view_as(self.tensor)

    def find_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The state that the optimizer has of these elements; cut from a whole one."""
        state: dict[str, Any] = optimizer.state.get(self.parameter, {})
        if ELEMENTS in state:
            if tuple(state[ELEMENTS]) != self.elements:
                raise UserError(
                    f"the optimizer's state of a parameter of shape {tuple(self.parameter.shape)} "
                    f"is of its elements {tuple(state[ELEMENTS])} (first, end, of all), this "
                    f"rank's are {self.elements}: it was made with another number of ranks, or "
                    'with other groups under layout="flat"; load the state that this rank saved, '
                    "or a whole one"
                )
            return state
        cut = {
            key: value if is_number(key, value) else self._cut(key, value)
            for key, value in state.items()
        }
        return cut | {ELEMENTS: self.elements} if cut else {}

    def _cut(self, key: str, whole: torch.Tensor) -> torch.Tensor:
        if whole.shape != self.parameter.shape:
            raise UserError(
                f"the optimizer's state {key!r} has shape {tuple(whole.shape)}, its parameter "
                f"{tuple(self.parameter.shape)}: load a plain optimizer's state, or what this rank "
                "saved"
            )
        own = whole.reshape(-1)[self.piece.start : self.piece.stop]
        return own.clone().view_as(self.tensor)


class _GroupOfParameters:
    """Parameters that travel together, and this rank's slices of them."""

    def __init__(self, parameters: Sequence[torch.Tensor], message: Message, ranks: Group) -> None:
        self.parameters, self.message, self.ranks = parameters, message, ranks
        self.by_rows = message.layout == "rows"
        self.slices = [
            _Slice(p := parameters[piece.tensor], piece, self.by_rows and p.dim() > 0)
            for piece in message.pieces(ranks.rank)
        ]
        # The parameters, flat; cut by rank where all ranks keep as much.
        self._flats = [p.detach().view(-1) for p in parameters]
        self._even = self.by_rows and message.even
        if self._even:
            self._flats = [flat.view(ranks.size, -1) for flat in self._flats]

    def reduce(self) -> tuple[torch.Tensor, Handle]:
        """Pack the gradients and sum them over the ranks: this rank's part, and when it comes."""
        found = [_gradient(p) for p in self.parameters]
        message = self._empty()
        if self.by_rows:
            rows = [g if g.dim() else g.view(1) for g in found]
            torch_private.chunk_cat(rows, self.ranks.size, message.view(self.ranks.size, -1))
        else:
            end = message.new_zeros(self.message.padding)
            torch.cat([*(g.reshape(-1) for g in found), end], out=message)
        part = message.new_empty(self.message.part)
        return part, self.ranks.reduce_scatter(part, message)

    def gather(self) -> tuple[torch.Tensor, Handle]:
        """Bring everybody's slices together: the message, and when it comes."""
        message = self._empty()
        part = self.message.part
        own = message[self.ranks.rank * part : (self.ranks.rank + 1) * part]
        if self.slices:
            torch_private.foreach_copy_(
                [each.gradient_in(own) for each in self.slices],
                [each.tensor for each in self.slices],
            )
        return message, self.ranks.all_gather(message, own)

    def take(self, message: torch.Tensor) -> None:
        """Write a gathered message into the parameters."""
        if self._even:
            rows = message.view(self.ranks.size, -1)
            torch.split_with_sizes_copy(rows, list(self.message.widths), dim=1, out=self._flats)
        elif not self.by_rows:
            whole = message[: message.numel() - self.message.padding]
            torch_private.foreach_copy_(self._flats, list(whole.split(list(self.message.sizes))))
        else:
            targets, sources = [], []
            for rank in range(self.ranks.size):
                for piece in self.message.pieces(rank) if rank != self.ranks.rank else ():
                    start = rank * self.message.part + piece.offset
                    targets.append(self._flats[piece.tensor][piece.start : piece.stop])
                    sources.append(message[start : start + piece.numel])
            if targets:
                torch_private.foreach_copy_(targets, sources)

    def _empty(self) -> torch.Tensor:
        return self.parameters[0].detach().new_empty(self.message.numel)


class GroupedStep:
    """What is known of one optimizer: its parameters in groups, and this rank's slices of them."""

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        optimizer: torch.optim.Optimizer,
        settings: _Settings,
        agreed: int | None,
    ) -> None:
        self._parameters, self._settings = list(parameters), settings
        self._counted, self._pointers = _counts(optimizer), _pointers(parameters)
        shapes = [tuple(p.shape) for p in parameters]
        dtypes = [p.dtype for p in parameters]
        self.ranks = Group.of("shard", settings.group, parameters[0].device)
        size = self.ranks.size
        laid_out = lay_out_messages(
            shapes, dtypes, [p.element_size() for p in parameters], size, *settings[1:]
        )
        # Only ranks whose parameters changed ask: a check of each step would be one more message.
        self.agreed = digest((shapes, [str(each) for each in dtypes], settings[1:]))
        if self.agreed != agreed:
            _check_agreement(self.ranks, self.agreed, shapes, settings)
        self.groups = [
            _GroupOfParameters([parameters[i] for i in members], message, self.ranks)
            for members, message in laid_out
        ]
        self._group_of = {
            id(p): i for i, each in enumerate(optimizer.param_groups) for p in each["params"]
        }

    def fits(
        self,
        parameters: Sequence[torch.Tensor],
        optimizer: torch.optim.Optimizer,
        settings: _Settings,
    ) -> bool:
        """It was made for these, on this memory."""
        return (
            settings == self._settings
            and len(parameters) == len(self._parameters)
            and all(a is b for a, b in zip(parameters, self._parameters, strict=True))
            and _counts(optimizer) == self._counted
            and _pointers(parameters) == self._pointers
        )

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer, max_norm: float | None) -> torch.Tensor | None:
        if not self.groups:
            return None if max_norm is None else torch.zeros(())
        slices = chain.from_iterable(group.slices for group in self.groups)
        states = {each: each.find_state(optimizer) for each in slices}
        present, presence = self._count_gradients()
        arrived: Iterable[tuple[_GroupOfParameters, torch.Tensor]] = self._reduce()
        norm = None
        if max_norm is not None:
            arrived = list(arrived)
            norm = self._clip([part for _, part in arrived], max_norm)
        presence.wait()
        lacking = [p for p in self._parameters if p.grad is None]
        unused: set[int] = set()
        if lacking:
            pairs = zip(self._parameters, present.tolist(), strict=True)
            unused = {id(p) for p, ranks in pairs if not ranks}
        under_way: deque[tuple[_GroupOfParameters, torch.Tensor, Handle]] = deque()
        for batch in self._batch(arrived):
            for group, part in batch:
                for each in group.slices:
                    each.tensor.grad = each.gradient_in(part)
            slices = chain.from_iterable(group.slices for group, _ in batch)
            stepped = [each for each in slices if id(each.parameter) not in unused]
            self._step_slices(optimizer, stepped, states)
            for group, _ in batch:
                for each in group.slices:
                    each.tensor.grad = None
                under_way.append((group, *group.gather()))
                if len(under_way) == IN_FLIGHT:
                    _take_first(under_way)
        while under_way:
            _take_first(under_way)
        self._drop_strange_states(optimizer)
        torch_private.mark_stepped(optimizer)
        return norm

    def _drop_strange_states(self, optimizer: torch.optim.Optimizer) -> None:
        """Of parameters that this rank keeps nothing of; a whole state has them."""
        for group in self.groups:
            kept = {each.piece.tensor for each in group.slices}
            for i, parameter in enumerate(group.parameters):
                if i not in kept:
                    optimizer.state.pop(parameter, None)

    def _count_gradients(self) -> tuple[torch.Tensor, Handle]:
        """How many ranks have a gradient of each parameter, and when that is known."""
        device = self._parameters[0].device
        if all(p.grad is not None for p in self._parameters):
            present = torch.ones(len(self._parameters), device=device)
        else:
            has = [float(p.grad is not None) for p in self._parameters]
            present = torch.tensor(has, device=device)
        return present, self.ranks.all_reduce(present)

    def _reduce(self) -> Iterator[tuple[_GroupOfParameters, torch.Tensor]]:
        """Each group with this rank's part of its averaged gradients, a few groups ahead."""
        under_way: deque[tuple[_GroupOfParameters, torch.Tensor, Handle]] = deque()

        def arrive() -> tuple[_GroupOfParameters, torch.Tensor]:
            first, part, handle = under_way.popleft()
            handle.wait()
            return first, part.div_(self.ranks.size)

        for group in self.groups:
            if len(under_way) == IN_FLIGHT:
                yield arrive()
            under_way.append((group, *group.reduce()))
        while under_way:
            yield arrive()

    def _batch(
        self, arrived: Iterable[tuple[_GroupOfParameters, torch.Tensor]]
    ) -> Iterator[list[tuple[_GroupOfParameters, torch.Tensor]]]:
        """Groups whose slices step in one call of the optimizer."""
        left = iter(arrived)
        size = -(-len(self.groups) // UPDATES)
        while batch := list(islice(left, size)):
            yield batch

    def _clip(self, parts: list[torch.Tensor], max_norm: float) -> torch.Tensor:
        """Scale all parts so that the norm over all ranks is at most `max_norm`; the norm before.
        Padding is zeros, and counts nothing.
        """
        squares = [torch.linalg.vector_norm(part, dtype=_wide(part)).square() for part in parts]
        total = torch.stack([each.float() for each in squares]).sum()
        self.ranks.all_reduce(total).wait()
        norm = total.sqrt()
        torch_private.foreach_mul_(parts, (max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def _step_slices(
        self,
        optimizer: torch.optim.Optimizer,
        slices: Sequence[_Slice],
        states: dict[_Slice, dict[str, Any]],
    ) -> None:
        """The optimizer's own step over these slices, with their gradients and their state."""
        by_group: list[list[torch.Tensor]] = [[] for _ in optimizer.param_groups]
        for each in slices:
            by_group[self._group_of[id(each.parameter)]].append(each.tensor)
        groups = [
            {**settings, "params": tensors}
            for settings, tensors in zip(optimizer.param_groups, by_group, strict=True)
            if tensors
        ]
        stand_in: torch.optim.Optimizer = object.__new__(type(optimizer))
        state_of = {each.tensor: states[each] for each in slices}
        stand_in.__dict__.update(optimizer.__dict__, param_groups=groups, state=state_of)
        if groups:
            # The class's: a scheduler hangs its own `step` on the optimizer.
            type(optimizer).step(stand_in)
        for each in slices:
            if states[each]:
                states[each][ELEMENTS] = each.elements
                optimizer.state[each.parameter] = states[each]


def _take_first(under_way: deque[tuple[_GroupOfParameters, torch.Tensor, Handle]]) -> None:
    group, message, handle = under_way.popleft()
    handle.wait()
    group.take(message)


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    """Contiguous, and zeros where there is none."""
    if parameter.grad is None:
        return torch.zeros_like(parameter)
    if parameter.grad.layout != torch.strided:
        raise UserError(
            f"a parameter of shape {tuple(parameter.shape)} has a sparse gradient, expected a "
            "dense one: make its embedding with sparse=False"
        )
    return parameter.grad.contiguous()


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _counts(optimizer: torch.optim.Optimizer) -> list[int]:
    return [len(group["params"]) for group in optimizer.param_groups]


def _pointers(parameters: Sequence[torch.Tensor]) -> list[int]:
    return [p.data_ptr() for p in parameters]


def _check(parameters: Sequence[torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Errors that a step would hide, or that would come from deep inside."""
    if not issubclass(type(optimizer), ELEMENTWISE):
        names = ", ".join(each.__name__ for each in ELEMENTWISE)
        raise UserError(
            f"{type(optimizer).__name__} may need whole parameters, and sharded_step gives it "
            f"slices: expected one of {names}; sw.ShardedOptimizer gives any other class whole "
            "parameters"
        )
    given = {id(p) for p in parameters}
    optimized = [p for each in optimizer.param_groups for p in each["params"]]
    known = {id(p) for p in optimized}
    if strange := [tuple(p.shape) for p in parameters if id(p) not in known]:
        raise UserError(
            f"{len(strange)} of the parameters are not the optimizer's, the first of shape "
            f"{strange[0]}: freeze them (requires_grad_(False)), or give them to the optimizer"
        )
    trained = [p for p in optimized if p.requires_grad and p.numel()]
    if missed := [tuple(p.shape) for p in trained if id(p) not in given]:
        raise UserError(
            f"the optimizer has {len(missed)} parameters that were not given, the first of shape "
            f"{missed[0]}: give all that it trains, or make one optimizer for each call"
        )
    for p in parameters:
        if isinstance(p, DTensor) or checks.engine_training(p):
            raise UserError(
                "an engine trains these parameters already (they are sharded, or their gradients "
                "are reduced in backward): call optimizer.step() itself"
            )
        if not p.is_contiguous():
            raise UserError(
                f"a parameter of shape {tuple(p.shape)} is not contiguous (strides {p.stride()}): "
                "its slices are no runs of memory; make it contiguous before the optimizer is built"
            )
        if p.device != parameters[0].device:
            raise UserError(
                f"parameters are on {parameters[0].device} and on {p.device}, expected one device"
            )


def _check_agreement(
    ranks: Group, own: int, shapes: Sequence[tuple[int, ...]], settings: _Settings
) -> None:
    """Every rank has the same parameters, groups and layout; else messages would not match."""
    elements = sum(torch.Size(shape).numel() for shape in shapes)
    told = ranks.exchange((own, len(shapes), elements, *settings[1:]))
    for rank, (theirs, *facts) in enumerate(told):
        if theirs != own:
            raise UserError(
                "ranks called sharded_step with different parameters or settings (how many "
                f"parameters, their elements, group_bytes, layout): this is rank {ranks.rank} "
                f"with {(len(shapes), elements, *settings[1:])}, rank {rank} has {tuple(facts)}"
            )
