"""Quantised gathers: what one rank's rows of a unit are as a message of bytes.

    | scales, float32 | parameters of fewer than 2 dims, as computed | codes, a byte an element |

A parameter of two dims and more is cut into blocks of BLOCK elements of a rank's rows; each block
has one scale, its largest value over the largest code. Norms and biases are a small share of the
bytes and a large one of what a model feels: they travel as they are computed with.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from shardwise.planning.rows import Layout, Rows

BLOCK = 256  # elements
CODES = {"float8_e4m3fn": 448.0, "int8": 127.0}  # the largest value of each
SCALE_BYTES = 4
ALIGNMENT = 16  # bytes: every section, and so every rank's message, starts aligned


def is_quantised(rows: Rows) -> bool:
    return len(rows.shape) > 1 and rows.part > 0


@dataclass(frozen=True)
class Message:
    """Where things lie in a message, in bytes."""

    layout: Layout
    itemsize: int  # of an element that travels as it is

    @cached_property
    def coded(self) -> tuple[int, ...]:
        """Parameters that travel as codes, by their number in the layout."""
        return tuple(i for i, rows in enumerate(self.layout.rows) if is_quantised(rows))

    @cached_property
    def plain(self) -> tuple[int, ...]:
        """And those that travel as they are."""
        rows = self.layout.rows
        return tuple(i for i, each in enumerate(rows) if each.part and not is_quantised(each))

    def blocks(self, i: int) -> int:
        return -(-self.layout.rows[i].part // BLOCK)

    @cached_property
    def scales(self) -> int:
        """How many."""
        return sum(map(self.blocks, self.coded))

    @cached_property
    def plain_start(self) -> int:
        return _aligned(self.scales * SCALE_BYTES)

    @cached_property
    def codes_start(self) -> int:
        numel = sum(self.layout.rows[i].part for i in self.plain)
        return self.plain_start + _aligned(numel * self.itemsize)

    @cached_property
    def nbytes(self) -> int:
        return self.codes_start + _aligned(sum(self.layout.rows[i].part for i in self.coded))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
