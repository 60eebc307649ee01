"""The grouped step for MLX: `sharded_step` in the place of `nn.average_gradients` and
`optimizer.update`, with a slice of the optimizer's state on each rank.

    import shardwise.mlx as swm

    loss, gradients = loss_and_gradients(model, x)      # of this rank's x
    swm.sharded_step(model, gradients, optimizer, max_norm=1.0)
    mx.eval(model.parameters(), optimizer.state)

Groups and slices are those of `sw.sharded_step` (`planning/groups.py`). MLX is lazy: a step is a
graph until somebody evaluates it. Ranks keep different slices, so their graphs differ, and MLX
would be free to run their collectives in different orders: each one is made to depend on the last.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from itertools import accumulate
from typing import Any, cast

try:
    import mlx.core as mx
    import mlx.nn as nn
    import mlx.optimizers as optim
    from mlx.utils import tree_flatten, tree_unflatten
except ImportError as error:
    raise ImportError(
        "shardwise.mlx needs MLX, which is not installed (or does not run here): "
        "pip install 'shardwise[mlx]'"
    ) from error

from shardwise.errors import UserError
from shardwise.planning.groups import GROUP_BYTES, Message, lay_out_messages

__all__ = ["has_sum_scatter", "sharded_step"]

# Treat every element alike, so that slices step as whole arrays do; so do their subclasses.
ELEMENTWISE: tuple[type[optim.Optimizer], ...] = (
    optim.SGD, optim.RMSprop, optim.Adagrad, optim.AdaDelta, optim.Adam, optim.Lion,
)  # fmt: skip

# On an optimizer: whether its group's backend has sum_scatter.
_SCATTERS = "_shardwise_scatters"


def sharded_step(
    model: nn.Module,
    gradients: Any,
    optimizer: optim.Optimizer,
    *,
    max_norm: float | None = None,
    group_bytes: int = GROUP_BYTES,
    layout: str = "rows",
    group: mx.distributed.Group | None = None,
) -> mx.array | None:
    """Update a replicated model by its averaged gradients, each rank a slice of every parameter.
    All ranks call it.

    Sums the gradients over the ranks of `group` in messages of about `group_bytes` and keeps this
    rank's part, clips by the global norm if `max_norm` is given, updates the slices, gathers the
    parameters, and puts them into the model. Returns the norm before clipping, if `max_norm` is
    given. `layout` is "rows" or "flat", as in `sw.sharded_step`.

    The optimizer has to be fresh: its state is made for the slices. Each rank saves and loads its
    own.
    """
    if max_norm is not None and not max_norm > 0:
        raise UserError(f"max_norm is {max_norm}, expected a number above 0, or None")
    group = group or mx.distributed.init()
    found = [(name, gradient) for name, gradient in _flatten(gradients) if gradient.size]
    parameters = dict(_flatten(model.trainable_parameters()))
    _check_gradients(found, parameters)
    messages = lay_out_messages(
        [gradient.shape for _, gradient in found],
        [(str(gradient.dtype), str(parameters[name].dtype)) for name, gradient in found],
        [gradient.itemsize for _, gradient in found],
        group.size(),
        group_bytes,
        layout,
    )
    if _SCATTERS not in optimizer.__dict__:
        _check_optimizer(optimizer, messages, [name for name, _ in found], group.rank())
        optimizer.__dict__[_SCATTERS] = has_sum_scatter(group, warn=True)
    wire = _Wire(group, optimizer.__dict__[_SCATTERS])
    parts = [
        wire.scatter(_pack(message, [found[i][1] for i in members])) / group.size()
        for members, message in messages
    ]
    norm = None
    if max_norm is not None and parts:
        squares = [mx.square(part.astype(mx.float32)).sum() for part in parts]
        norm = mx.sqrt(wire.sum(mx.stack(squares).sum()))
        scale = mx.minimum(max_norm / (norm + 1e-6), 1.0)
        parts = [(part * scale).astype(part.dtype) for part in parts]
    slices = _update_slices(messages, parts, found, parameters, optimizer, group.rank())
    updated: list[tuple[str, mx.array]] = []
    for members, message in messages:
        names = [found[i][0] for i in members]
        dtype = parameters[names[0]].dtype
        own = _pack_own(message, [slices.get(name) for name in names], group.rank(), dtype)
        updated += zip(names, _unpack(message, wire.gather(own)), strict=True)
    model.update(tree_unflatten(updated))
    return norm


def _flatten(tree: Any) -> list[tuple[str, mx.array]]:
    return cast("list[tuple[str, mx.array]]", tree_flatten(tree))


class _Wire:
    """The collectives of one step, each behind the last."""

    def __init__(self, group: mx.distributed.Group, scatters: bool) -> None:
        self.group, self.scatters = group, scatters
        self._last: mx.array | None = None

    def scatter(self, message: mx.array) -> mx.array:
        """The sum of everybody's message; this rank's equal part of it."""
        message = self._behind(message)
        if self.scatters:
            self._last = mx.distributed.sum_scatter(message, group=self.group)
            return self._last
        summed = self._last = mx.distributed.all_sum(message, group=self.group)
        part = summed.size // self.group.size()
        return summed[self.group.rank() * part : (self.group.rank() + 1) * part]

    def sum(self, number: mx.array) -> mx.array:
        self._last = mx.distributed.all_sum(self._behind(number), group=self.group)
        return self._last

    def gather(self, part: mx.array) -> mx.array:
        """Everybody's part, one after the other."""
        self._last = mx.distributed.all_gather(self._behind(part), group=self.group)
        return self._last

    def _behind(self, array: mx.array) -> mx.array:
        return array if self._last is None else mx.depends([array], [self._last])[0]


def has_sum_scatter(group: mx.distributed.Group, warn: bool = False) -> bool:
    """Whether the backend of a group can; all ranks ask together. The first may `warn` if not."""
    try:
        mx.eval(mx.distributed.sum_scatter(mx.zeros(group.size()), group=group))
    except RuntimeError as error:
        if warn and group.rank() == 0:
            warnings.warn(
                f"MLX says: {error}. Gradients are summed whole (all_sum) and each rank takes its "
                "slice: that sends half as much again as an all-reduce, the memory saved is the "
                "same",
                stacklevel=3,
            )
        return False
    return True


def _pack(message: Message, arrays: list[mx.array]) -> mx.array:
    """The arrays as the message has them, flat."""
    if message.layout == "flat":
        return _pad([array.reshape(-1) for array in arrays], message.padding)
    blocks = []
    for array, rows, size in zip(arrays, message.rows, message.sizes, strict=True):
        whole = _pad([array.reshape(-1)], rows.part * message.ranks - size)
        blocks.append(whole.reshape(message.ranks, -1))
    return mx.concatenate(blocks, axis=1).reshape(-1)


def _pack_own(
    message: Message, slices: list[mx.array | None], rank: int, dtype: mx.Dtype
) -> mx.array:
    """This rank's part, from its slices of the message's arrays."""
    found: list[mx.array] = []
    at = 0
    for piece in message.pieces(rank):
        own = slices[piece.tensor]
        assert own is not None
        found += [mx.zeros(piece.offset - at, dtype), own.reshape(-1).astype(dtype)]
        at = piece.offset + piece.numel
    return _pad(found, message.part - at, dtype)


def _unpack(message: Message, gathered: mx.array) -> Iterable[mx.array]:
    """The arrays of a gathered message, whole."""
    if message.layout == "flat":
        blocks = mx.split(gathered, list(accumulate(message.sizes))[:-1])
    else:
        ends = list(accumulate(message.widths))
        blocks = mx.split(gathered.reshape(message.ranks, -1), ends[:-1], axis=1)
    # Padding is at the end: ranks keep rows in order.
    for block, size, shape in zip(blocks, message.sizes, message.shapes, strict=True):
        yield block.reshape(-1)[:size].reshape(shape)


def _pad(arrays: list[mx.array], zeros: int, dtype: mx.Dtype | None = None) -> mx.array:
    dtype = dtype or arrays[0].dtype
    return mx.concatenate([*arrays, mx.zeros(zeros, dtype)])


def _update_slices(
    messages: list[tuple[list[int], Message]],
    parts: list[mx.array],
    found: list[tuple[str, mx.array]],
    parameters: dict[str, mx.array],
    optimizer: optim.Optimizer,
    rank: int,
) -> dict[str, mx.array]:
    """This rank's slice of each parameter, by its name, after one step of the optimizer."""
    own_gradients, own_parameters = [], []
    for (members, message), part in zip(messages, parts, strict=True):
        for piece in message.pieces(rank):
            name = found[members[piece.tensor]][0]
            whole = parameters[name]
            shape = (-1, *whole.shape[1:]) if message.layout == "rows" else (-1,)
            gradient = part[piece.offset : piece.offset + piece.numel]
            own_gradients.append((name, gradient.reshape(shape)))
            own = whole.reshape(-1)[piece.start : piece.stop]
            own_parameters.append((name, own.reshape(shape)))
    if not own_gradients:
        optimizer.apply_gradients({}, {})  # it still counts the step
        return {}
    updated = optimizer.apply_gradients(
        tree_unflatten(own_gradients), tree_unflatten(own_parameters)
    )
    return dict(_flatten(updated))


def _check_gradients(found: list[tuple[str, mx.array]], parameters: dict[str, mx.array]) -> None:
    for name, gradient in found:
        if name not in parameters:
            raise UserError(
                f"the gradients have {name!r}, which is no trainable parameter of the model: take "
                "them from nn.value_and_grad(model, ...)"
            )
        if gradient.shape != parameters[name].shape:
            raise UserError(
                f"the gradient of {name!r} has shape {gradient.shape}, its parameter "
                f"{parameters[name].shape}"
            )


def _check_optimizer(
    optimizer: optim.Optimizer,
    messages: list[tuple[list[int], Message]],
    names: list[str],
    rank: int,
) -> None:
    """It can step slices, and whatever state it has is of this rank's."""
    if not isinstance(optimizer, ELEMENTWISE):
        known = ", ".join(each.__name__ for each in ELEMENTWISE)
        raise UserError(
            f"{type(optimizer).__name__} may need whole arrays, and sharded_step gives it slices: "
            f"expected one of {known}"
        )
    kept = {names[m[piece.tensor]]: piece.numel for m, x in messages for piece in x.pieces(rank)}
    for path, array in _flatten(optimizer.state):
        name = path.rpartition(".")[0]
        if name in names and array.ndim and array.size != kept.get(name, 0):
            raise UserError(
                f"the optimizer's state of {name!r} has {array.size} elements, this rank keeps "
                f"{kept.get(name, 0)}: it was made for whole arrays (do not call its init), or "
                "with another number of ranks or layout; give a fresh optimizer, or load what "
                "this rank saved"
            )
