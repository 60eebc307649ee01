"""What one micro-batch of a model computes and keeps: the facts that a simulator costs.

A `ModelDescription` has one `UnitDescription` for each unit of a Plan, in the Plan's order, and
each unit has its `UnitSegment`s: the stretches of time during which it runs. Most units have one. A
unit that holds both the embedding and the output projection has two, one at each end of the model.

    forward order:   root:embedding | layers.0 | layers.1 | ... | root:head (with the loss)
    segment             0               1          2                 n - 1
    backward order: n - 1, ..., 1, 0

Everything is per micro-batch and per rank, and was traced, not derived from an architecture.
Activation bytes are everything that is allocated and is not a parameter, a buffer, an input of the
model or a parameter's gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal, get_args

from shardwise.checked import Count, Natural, NotNegative, check_bounds
from shardwise.description.parameters import ParameterSpec, UnitSpec

if TYPE_CHECKING:
    from torch import nn

KernelKind = Literal[
    "matmul", "convolution", "recurrent", "attention",
    "elementwise", "strided", "cast", "reduction",
    "layer_norm", "rms_norm", "batch_norm", "group_norm",
    "softmax", "pool", "lookup_gradient", "other",
]  # fmt: skip
KERNEL_KINDS: tuple[str, ...] = get_args(KernelKind)
ALIGNED = 16  # bytes: what rows of a product's matrices lie apart by, where nothing is lost
PRODUCTS = ("matmul", "convolution", "recurrent")


@dataclass(frozen=True)
class KernelFact:
    """`count` equal kernels: the work of one of them, and its shape where its speed depends on it.

    matmul: `shape` is (m, n, k) of a product (m, k) x (k, n), done `batch` times in one kernel.
    convolution: the same of the product that it is, a row for every place of the smaller image;
        `batch` is its groups. It is `plain` where neither image nor weight is channels-last; not
        if it is depthwise, as no layout is better for those.
    recurrent: as matmul, but the `batch` products follow one another.
    attention: (batch, query heads, queries, keys, head width); a causal one counts half its FLOPs.
    all others: () ; what counts is the bytes read and written, and how well a kind moves them.
        elementwise: everything lies alike; strided: something is broadcast or lies otherwise;
        cast: alike, in dtypes of several sizes; softmax: of rows that are read more than once;
        norms in training, where statistics are another pass; lookup_gradient: the gradient of an
        embedding, sorted by its rows.

    `alignment`: the most bytes, up to 16, of which the rows of a product's matrices lie apart by a
    multiple. Where it is less, tensor cores are fed by smaller loads.
    """

    kind: KernelKind
    flops: NotNegative
    bytes: NotNegative
    dtype: str
    shape: tuple[int, ...] = ()
    batch: Count = 1
    count: Count = 1
    op: str = ""  # the operator's name, for people
    plain: bool = False
    causal: bool = False
    alignment: Count = ALIGNED

    def __post_init__(self) -> None:
        if self.kind not in KERNEL_KINDS:
            raise ValueError(f"kernel kind {self.kind!r}, expected one of {KERNEL_KINDS}")
        check_bounds(self)
        lengths = {**dict.fromkeys(PRODUCTS, 3), "attention": 5}
        if self.kind in lengths and len(self.shape) != lengths[self.kind]:
            raise ValueError(
                f"a {self.kind} kernel has {lengths[self.kind]} sizes, got shape {self.shape}"
            )

    @property
    def is_depthwise(self) -> bool:
        """A convolution whose filters see one channel each."""
        return self.kind == "convolution" and self.batch > 1 and self.shape[1] == 1

    @property
    def compiled(self) -> KernelFact:
        """As torch's compiler makes it: what moves memory is fused and reads everything once, and
        images are laid channels-last by themselves. Sorting for an embedding stays what it is.
        """
        if self.shape or self.kind == "lookup_gradient":
            return replace(self, plain=False)
        return replace(self, kind="elementwise")

    @property
    def total_flops(self) -> float:
        return self.flops * self.count

    @property
    def total_bytes(self) -> float:
        return self.bytes * self.count


@dataclass(frozen=True)
class PassFacts:
    """One direction of a segment: its kernels, and its activation bytes relative to its start.

    `peak_bytes` is the most activation bytes at any moment inside, above those at its start;
    `net_bytes` is the change from start to end: what forward leaves for backward, or, negative,
    what backward gives back. The parameters' own gradients are not in either.

    Of backward three peaks more, with these gradients: `keeping_bytes` where they stay as they
    come; `before_bytes` until the first has come, and `passing_bytes` from then on, where each goes
    as soon as it has come. The first two are 0 where that is not known.
    """

    kernels: tuple[KernelFact, ...] = ()
    peak_bytes: int = 0
    net_bytes: int = 0
    keeping_bytes: int = 0
    before_bytes: int = 0
    passing_bytes: int = 0

    def __post_init__(self) -> None:
        if self.peak_bytes < max(0, self.net_bytes):
            raise ValueError(
                f"peak_bytes {self.peak_bytes} is below net_bytes {self.net_bytes} or below 0"
            )

    @property
    def flops(self) -> float:
        return sum(kernel.total_flops for kernel in self.kernels)

    @property
    def bytes(self) -> float:
        """Bytes read and written by all kernels."""
        return sum(kernel.total_bytes for kernel in self.kernels)

    @cached_property
    def launches(self) -> int:
        """How many kernels the host issues."""
        return sum(kernel.count for kernel in self.kernels)


@dataclass(frozen=True)
class UnitSegment:
    """One stretch of the forward pass that belongs to one unit, and its share of the backward pass.

    saved_bytes: storages that autograd keeps and that no earlier segment has kept already.
    checkpointed: the trace ran it under activation checkpointing; `recompute` then holds its second
        forward, which happens at the start of its backward, and `backward` only what follows.
    gradients: parameters whose gradient its backward completes: of one that is used in several
        places, the first of these in forward order. None: those of its unit, in the unit's last.
    """

    position: Natural  # in the forward order of the model's segments
    forward: PassFacts
    backward: PassFacts
    saved_bytes: Natural
    output_bytes: Natural
    checkpointed: bool = False
    recompute: PassFacts = field(default_factory=PassFacts)
    gradients: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True)
class UnitDescription(UnitSpec):
    """A unit of the Plan with its segments. The figures below are their sums."""

    segments: tuple[UnitSegment, ...]

    @property
    def forward_flops(self) -> float:
        return sum(s.forward.flops for s in self.segments)

    @property
    def backward_flops(self) -> float:
        """Of the backward pass proper; without recomputation."""
        return sum(s.backward.flops for s in self.segments)

    @property
    def kernels(self) -> tuple[KernelFact, ...]:
        """Of forward, recomputation and backward."""
        return tuple(
            kernel
            for s in self.segments
            for part in (s.forward, s.recompute, s.backward)
            for kernel in part.kernels
        )

    @property
    def saved_bytes(self) -> int:
        return sum(s.saved_bytes for s in self.segments)


@dataclass(frozen=True)
class ModelDescription:
    """A model's units with what each computes and keeps for one micro-batch."""

    name: str
    units: tuple[UnitDescription, ...]
    input_bytes: int = 0  # of the micro-batch itself: tokens and targets
    buffer_bytes: int = 0  # of the module's buffers
    without_gradient: tuple[str, ...] = ()  # trained parameters that get none
    notes: tuple[str, ...] = ()  # what the reader should know of how it was traced
    # The model itself, on the meta device: units of other Plans are cut from it. None if the
    # description was made by hand.
    outline: nn.Module | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        names = [unit.name for unit in self.units]
        if len(set(names)) != len(names):
            raise ValueError(f"two units of {self.name!r} have one name: {sorted(names)}")
        places = sorted(s.position for unit in self.units for s in unit.segments)
        if places != list(range(len(places))):
            raise ValueError(
                f"the segments of {self.name!r} have the positions {places}, expected each of "
                f"0 to {len(places) - 1} once"
            )

    @property
    def segments(self) -> tuple[tuple[UnitDescription, UnitSegment], ...]:
        """Every segment with its unit, in forward order. Backward runs them in reverse."""
        pairs = [(unit, segment) for unit in self.units for segment in unit.segments]
        return tuple(sorted(pairs, key=lambda pair: pair[1].position))

    @property
    def compute_dtype(self) -> str | None:
        """What most of its products are in; None without any."""
        flops: dict[str, float] = {}
        for _, segment in self.segments:
            for kernel in segment.forward.kernels:
                if kernel.kind in PRODUCTS:
                    flops[kernel.dtype] = flops.get(kernel.dtype, 0.0) + kernel.flops * kernel.count
        return max(flops, key=lambda dtype: flops[dtype], default=None)

    def unit(self, name: str) -> UnitDescription:
        for unit in self.units:
            if unit.name == name:
                return unit
        raise KeyError(f"{self.name} has no unit {name!r}; it has {[u.name for u in self.units]}")

    def parameters(self) -> Iterator[ParameterSpec]:
        for unit in self.units:
            yield from unit.parameters

    @property
    def parameter_count(self) -> int:
        return sum(unit.numel for unit in self.units)

    @property
    def forward_flops(self) -> float:
        return sum(unit.forward_flops for unit in self.units)

    @property
    def backward_flops(self) -> float:
        return sum(unit.backward_flops for unit in self.units)

    @property
    def saved_bytes(self) -> int:
        return sum(unit.saved_bytes for unit in self.units)
