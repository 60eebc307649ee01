"""Tensors that travel in one message, and which of their elements each rank keeps.

Numbers only, no tensor: torch's grouped step (`engine/grouped_step.py`) and MLX's (`mlx.py`) lay
their messages out by this. A message has `ranks` equal parts; one reduce-scatter gives each rank
its part, one all-gather brings all parts to everybody. Two layouts, drawn for two ranks (a and b
are tensors, a0 the first half of a's rows, a1 the second):

    rows   | a0 b0 | a1 b1 |     every rank keeps rows of every tensor
    flat   | a0 a1 | b0 b1 |     tensor after tensor, cut horizontally

With `rows` a rank's slice of a tensor depends on that tensor alone, whatever it travels with. With
`flat` it depends on the whole message, but there is one padding in all.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from shardwise.errors import UserError, nearest
from shardwise.planning.rows import ALIGNMENT, Rows

LAYOUTS = ("rows", "flat")
GROUP_BYTES = 32 * 2**20

Item = TypeVar("Item")


def group_by_bytes(
    items: Iterable[Item], size: Callable[[Item], int], limit: int
) -> list[list[Item]]:
    """Cut `items`, in order, into runs of at most `limit` bytes. An item above the limit is a run
    of its own.
    """
    groups: list[list[Item]] = []
    held = 0
    for item in items:
        nbytes = size(item)
        if groups and held + nbytes <= limit:
            groups[-1].append(item)
            held += nbytes
        else:
            groups.append([item])
            held = nbytes
    return groups


@dataclass(frozen=True)
class Piece:
    """What a rank keeps of one tensor of a message."""

    tensor: int  # its number in the message
    start: int  # the first element, of the flattened tensor
    stop: int  # one past the last
    offset: int  # where they lie in the rank's part

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Message:
    """Tensors of these shapes in one message over `ranks`. A 0-d tensor counts as one row."""

    shapes: tuple[tuple[int, ...], ...]
    ranks: int
    layout: str = "rows"

    @cached_property
    def rows(self) -> tuple[Rows, ...]:
        """How the layout `rows` cuts each tensor."""
        return tuple(Rows(shape or (1,), self.ranks) for shape in self.shapes)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each tensor."""
        return tuple(math.prod(shape) for shape in self.shapes)

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Elements of each tensor in a part, padding included; of the layout `rows`."""
        return tuple(rows.part for rows in self.rows)

    @cached_property
    def part(self) -> int:
        """Elements of each rank's part, padding included."""
        if self.layout == "rows":
            return sum(self.widths)
        return -(-sum(self.sizes) // (self.ranks * ALIGNMENT)) * ALIGNMENT

    @property
    def numel(self) -> int:
        """Elements of the message, padding included."""
        return self.part * self.ranks

    @property
    def padding(self) -> int:
        """Elements of the message that belong to no tensor."""
        return self.numel - sum(self.sizes)

    @property
    def even(self) -> bool:
        """Every rank keeps as many rows of each tensor as the others."""
        return all(rows.even for rows in self.rows)

    def pieces(self, rank: int) -> list[Piece]:
        """What `rank` keeps, in the order of its part; nothing of a tensor that it has none of."""
        cut = self._pieces_of_rows(rank) if self.layout == "rows" else self._pieces_of_flat(rank)
        return [piece for piece in cut if piece.numel > 0]

    def _pieces_of_rows(self, rank: int) -> Iterable[Piece]:
        offset = 0
        for i, rows in enumerate(self.rows):
            first, last = rows.span(rank)
            yield Piece(i, first * rows.width, last * rows.width, offset)
            offset += rows.part

    def _pieces_of_flat(self, rank: int) -> Iterable[Piece]:
        begin, end = rank * self.part, (rank + 1) * self.part
        at = 0  # where the tensor starts in the message
        for i, size in enumerate(self.sizes):
            start, stop = max(begin - at, 0), min(end - at, size)
            yield Piece(i, start, stop, at + start - begin)
            at += size


def lay_out_messages(
    shapes: Sequence[tuple[int, ...]],
    kinds: Sequence[Hashable],
    item_bytes: Sequence[int],
    ranks: int,
    group_bytes: int,
    layout: str,
) -> list[tuple[list[int], Message]]:
    """Tensors of one kind (a dtype) go together, in order, up to `group_bytes`: the numbers of each
    message's tensors, and its layout.
    """
    if layout not in LAYOUTS:
        raise UserError(f"unknown layout {layout!r}{nearest(layout, LAYOUTS)}")
    if group_bytes < 1:
        raise UserError(f"group_bytes is {group_bytes}, expected at least 1")
    alike: defaultdict[Hashable, list[int]] = defaultdict(list)
    for i, kind in enumerate(kinds):
        alike[kind].append(i)

    def nbytes(i: int) -> int:
        return math.prod(shapes[i]) * item_bytes[i]

    return [
        (members, Message(tuple(tuple(shapes[i]) for i in members), ranks, layout))
        for numbers in alike.values()
        for members in group_by_bytes(numbers, nbytes, group_bytes)
    ]
