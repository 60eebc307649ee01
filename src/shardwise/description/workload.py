"""What one optimizer step is asked to do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from shardwise.checked import check_bounds, whole
from shardwise.errors import UserError, nearest

T = TypeVar("T")
# Optimizer state tensors for each parameter, in the master's dtype.
STATE_TENSORS = {"adamw": 2, "adam": 2, "sgd": 0, "sgd_momentum": 1}
Whole = Annotated[int, whole(1)]
AUTOCAST_DTYPES = ("bfloat16", "float16")
Sizes = tuple[tuple[int, ...], ...]
MICRO_BATCHES_HELP = "how many; or sequences of each, as 1,2; of uneven replicas, as 1,2/2,1"


def parse_micro_batches(text: str, batch: int = 1) -> Sizes:
    """Sequences of every micro-batch, in a row for each kind of replica: from their number, each of
    `batch` sequences (`2`), from the sizes (`1,2`), or from those of replicas in turn (`1,2/2,1`).
    """
    rows = [row.split(",") for row in text.split("/")]
    digits = all(word.strip().isdigit() for row in rows for word in row)
    if digits and len(rows) == len(rows[0]) == 1 and int(text) >= 1:
        return ((batch,) * int(text),)
    sizes = tuple(tuple(int(word) for word in row) for row in rows) if digits else ()
    if not digits or len({len(row) for row in sizes}) != 1 or min(map(min, sizes)) < 1:
        raise UserError(
            f"micro-batches are {text!r}, expected how many (2), or the sequences of each (1,2), "
            "or those of uneven replicas, as many for each (1,2/2,1); all at least 1"
        )
    return sizes


def show_sizes(sizes: Sizes | None) -> str:
    """As `parse_micro_batches` reads them."""
    return "/".join(",".join(map(str, row)) for row in sizes or ())


def row_of(rank: int, mesh: tuple[int, int], rows: int) -> int:
    """Which of the rows of uneven sizes a rank of a mesh (replicate, shard) has: its replica's, in
    turn. The ranks of a single shard group have those of the replicas that they would be in.
    """
    replicate, shard = mesh
    return rank // shard % rows if replicate > 1 else rank * rows // shard


RECOMPUTE_HELP = "none nonreentrant reentrant first-N every-K op op-first-N op-every-K"
_RECOMPUTES = re.compile(r"(op)?(?:(?:^|(?<=op)-)(first|every)-([1-9]\d*))?")


@dataclass(frozen=True)
class Recomputing:
    """What backward computes once more, from the word that says it:

    nonreentrant, reentrant    every block whole, by torch's two ways of doing it
    first-8, every-2           the first eight blocks; every second one
    op, op-first-8, ...        of those blocks all but attention and every other product: their
                               results are kept
    """

    reentrant: bool = False
    keeps_products: bool = False
    first: int | None = None
    every: int = 1

    @classmethod
    def parse(cls, text: str) -> Recomputing | None:
        """None: nothing is."""
        if text in ("none", "nonreentrant", "reentrant"):
            return None if text == "none" else cls(reentrant=text == "reentrant")
        found = _RECOMPUTES.fullmatch(text) if text else None
        if found is None:
            raise UserError(
                f"recomputing is {text!r}, expected one of {RECOMPUTE_HELP}, with numbers of at "
                "least 1: the first N blocks, or every K-th"
            )
        op, which, number = found.groups()
        return cls(
            keeps_products=op is not None,
            first=int(number) if which == "first" else None,
            every=int(number) if which == "every" else 1,
        )

    def choose(self, blocks: Sequence[T]) -> tuple[T, ...]:
        """The blocks that it is about."""
        asked = self.first or self.every
        if asked > max(len(blocks), 1):
            word = "first" if self.first else "every"
            raise UserError(
                f"recomputing is {word}-{asked}, and the model has {len(blocks)} blocks"
            )
        return tuple(blocks[: self.first] if self.first else blocks[self.every - 1 :: self.every])


@dataclass(frozen=True)
class Workload:
    """One step of one rank: `micro_batches` times `micro_batch` sequences of `sequence` tokens.

    `sizes` is for uneven work: row g, column i is the number of sequences of micro-batch i on the
    ranks of replica group g (both repeat when there are more groups or micro-batches than rows or
    columns); `micro_batch` is then the largest of them.
    """

    sequence: Whole
    micro_batch: Whole = 1
    micro_batches: Whole = 1
    optimizer: str = "adamw"
    autocast: str | None = None  # None: the parameters' dtype, or the Plan's compute_dtype
    checkpoint: str = "none"  # what backward computes once more: `Recomputing`
    sizes: Sizes | None = None
    of: str = "sequences"  # or "samples", which have no tokens: `sequence` is 1 then

    def __post_init__(self) -> None:
        check_bounds(self, "Workload.")
        for name, valid in (
            ("of", ("sequences", "samples")),
            ("optimizer", tuple(STATE_TENSORS)),
            ("autocast", AUTOCAST_DTYPES),
        ):
            value = getattr(self, name)
            if value not in valid and not (name == "autocast" and value is None):
                raise ValueError(f"Workload.{name} is {value!r}{nearest(str(value), valid)}")
        Recomputing.parse(self.checkpoint)
        if self.sizes is not None:
            self._check_sizes(self.sizes)

    def _check_sizes(self, sizes: Sizes) -> None:
        widths = {len(row) for row in sizes}
        if len(widths) != 1 or 0 in widths:
            raise ValueError(f"Workload.sizes is {sizes!r}, expected rows of one length")
        largest = max(max(row) for row in sizes)
        if min(min(row) for row in sizes) < 0 or largest != self.micro_batch:
            raise ValueError(
                f"Workload.sizes go up to {largest} and micro_batch is {self.micro_batch}; every "
                "size must be at least 0 (no micro-batch there), and the largest of them must be "
                "micro_batch"
            )

    @classmethod
    def alternating(cls, sequence: int, ratio: int, micro_batches: int) -> Workload:
        """Uneven work between two replica groups: while one has a micro-batch of 1, the other has
        one of `ratio`, and they take turns.
        """
        return cls(sequence, ratio, micro_batches, sizes=((1, ratio), (ratio, 1)))

    @classmethod
    def uneven(cls, sequence: int, sizes: Sizes, **more: Any) -> Workload:
        """With the micro-batches of `sizes`, all of them once."""
        return cls(sequence, max(map(max, sizes)), len(sizes[0]), sizes=sizes, **more)

    @property
    def split(self) -> str:
        """The micro-batches of a rank in few signs: 2 x 4, or, where they are uneven, 1,4/4,1."""
        if self.uneven_sizes:
            return show_sizes(self.sizes)
        return f"{self.micro_batches} x {self.micro_batch}"

    @property
    def again(self) -> str:
        """What is recomputed, for people, behind other words."""
        if self.checkpoint == "none":
            return ""
        which = "" if self.checkpoint.endswith("reentrant") else f" {self.checkpoint}"
        return f", recomputing{which}"

    @property
    def uneven_sizes(self) -> bool:
        """Micro-batches that were given, and differ."""
        return len({size for row in self.sizes or () for size in row}) > 1

    def size_of(self, group: int, index: int) -> int:
        """Sequences of micro-batch `index` on the ranks of replica group `group`."""
        if self.sizes is None:
            return self.micro_batch
        row = self.sizes[group % len(self.sizes)]
        return row[index % len(row)]

    def tokens_on(self, mesh: tuple[int, int]) -> int:
        """Tokens of one step over all ranks of a mesh (replicate, shard)."""
        world, rows = mesh[0] * mesh[1], len(self.sizes or ((),))
        if self.sizes is None:
            return world * self.micro_batch * self.micro_batches * self.sequence
        sequences = (
            self.size_of(row_of(rank, mesh, rows), index)
            for rank in range(world)
            for index in range(self.micro_batches)
        )
        return sum(sequences) * self.sequence

    @property
    def state_tensors(self) -> int:
        """Optimizer state tensors for each trained parameter."""
        return STATE_TENSORS[self.optimizer]
