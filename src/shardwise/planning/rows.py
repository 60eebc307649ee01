"""Rows: how a parameter is cut over the ranks of a shard group, and where its rows lie in a flat
buffer.

A parameter is cut along dim 0 by torch.chunk's rule, which is also what DTensor's `Shard(0)` says:
every rank keeps `ceil(rows / ranks)` rows, the last ones fewer or none. In a flat buffer each
rank's part is padded to that same number of rows, so that one all-gather or reduce-scatter of equal
pieces moves the whole unit.

A 0-d parameter has no rows. Every rank keeps it whole (one element each), and the gradient is
written once for each rank before the reduce-scatter, which then does for it what an all-reduce
would.

Another dim than 0 can be cut too, evenly. A rank's part is then its slice, contiguous; the whole
parameter has to be put together from the slices by a copy of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

# Elements. 8 keeps every bf16 row start on 16 bytes, which vectorised kernels and matrix products
# want.
ALIGNMENT = 8


@dataclass(frozen=True)
class Rows:
    """The cut of one parameter of `shape` over `ranks`, along `dim`."""

    shape: tuple[int, ...]
    ranks: int
    dim: int = 0

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"a shard group has at least 1 rank, got ranks={self.ranks}")
        if self.dim and not 0 < self.dim < len(self.shape):
            raise ValueError(f"a parameter of shape {self.shape} has no dim {self.dim} to cut")
        if self.dim and self.shape[self.dim] % self.ranks:
            raise ValueError(
                f"dim {self.dim} of shape {self.shape} does not divide evenly among {self.ranks} "
                "ranks; only dim 0 may be cut unevenly"
            )

    @property
    def replicated(self) -> bool:
        """0-d: kept whole by every rank."""
        return self.shape == ()

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def width(self) -> int:
        """Elements of one row."""
        return math.prod(self.shape[: self.dim]) * math.prod(self.shape[self.dim + 1 :])

    @cached_property
    def rows(self) -> int:
        """Rows in each rank's part of a flat buffer, padding included."""
        return 1 if self.replicated else -(-self.shape[self.dim] // self.ranks)

    @cached_property
    def part(self) -> int:
        """Elements of each rank's part of a flat buffer, padding included."""
        return self.rows * self.width

    @property
    def even(self) -> bool:
        """No padding: every rank keeps the same number of rows."""
        return not self.replicated and self.rows * self.ranks == self.shape[self.dim]

    @property
    def holders(self) -> int:
        """Ranks that keep any of it: fewer than `ranks` where there are fewer rows."""
        if self.replicated:
            return self.ranks
        return -(-self.shape[self.dim] // self.rows) if self.part else 0

    def span(self, rank: int) -> tuple[int, int]:
        """First row and one past the last row that `rank` keeps. Empty when there are fewer rows
        than ranks.
        """
        if self.replicated:
            return 0, 1
        total = self.shape[self.dim]
        return min(rank * self.rows, total), min((rank + 1) * self.rows, total)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of the rows that `rank` keeps."""
        if self.replicated:
            return ()
        start, stop = self.span(rank)
        return (*self.shape[: self.dim], stop - start, *self.shape[self.dim + 1 :])


@dataclass(frozen=True)
class Layout:
    """Where the parameters of one unit lie in its flat buffers. Made by `lay_out`, in the buffers'
    own order.

    `order[i]` is the index, in the caller's list, of the i-th parameter of the buffer.
    """

    rows: tuple[Rows, ...]
    order: tuple[int, ...]
    ranks: int

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Start of each parameter's part in a shard; times `ranks`, its start in the full one."""
        starts, at = [], 0
        for rows in self.rows:
            starts.append(at)
            at += rows.part
        return tuple(starts)

    @cached_property
    def shard_numel(self) -> int:
        """Elements of one rank's shard."""
        return sum(rows.part for rows in self.rows)

    @property
    def full_numel(self) -> int:
        """Elements of the gathered unit, padding included."""
        return self.shard_numel * self.ranks

    @property
    def mostly_padding(self) -> bool:
        """Less than half of the gathered unit is parameters: they have far fewer rows than there
        are ranks.
        """
        held = sum(rows.holders * rows.part for rows in self.rows)
        return 2 * held < self.full_numel

    @property
    def counts(self) -> int:
        """Elements behind each rank's part of a reduce, one for every parameter: how many ranks
        produced a gradient of it. Rounded up, so that every rank's part starts aligned.
        """
        return -(-len(self.rows) // ALIGNMENT) * ALIGNMENT

    @cached_property
    def counted_numel(self) -> int:
        """Elements of a shard before the replicated (0-d) ones, which lie last: a norm counts those
        on one rank.
        """
        return sum(rows.part for rows in self.rows if not rows.replicated)


def lay_out(
    shapes: Sequence[tuple[int, ...]], ranks: int, dims: Sequence[int] | None = None
) -> Layout:
    """Order the parameters so that no padding is needed between them, and say where each lies.

    Parts that are a multiple of ALIGNMENT come first (each then starts aligned), the odd ones
    after, 0-d ones last. `dims` are the dims to cut; all 0 if None.
    """
    cuts = [
        Rows(tuple(shape), ranks, dim)
        for shape, dim in zip(shapes, dims or [0] * len(shapes), strict=True)
    ]
    order = sorted(
        range(len(cuts)), key=lambda i: (cuts[i].replicated, cuts[i].part % ALIGNMENT != 0, i)
    )
    return Layout(tuple(cuts[i] for i in order), tuple(order), ranks)
