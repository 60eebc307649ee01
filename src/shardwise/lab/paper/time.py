"""Paper exercises about time: when communication hides behind compute, and how to cut it.

Letters as in the scaling book: B tokens in the whole batch, D d_model, F d_ff, C FLOP/s of a chip,
W bytes/s of one torus axis, X and Y chips of the FSDP and the tensor-parallel axis with M_X and M_Y
torus axes, N = X Y, alpha = C / W.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from shardwise.description.cluster import Cluster


@dataclass(frozen=True)
class Chip:
    """What the rooflines need of a chip."""

    flops_per_s: float  # C
    link_bytes_per_s: float  # W
    memory_bytes_per_s: float

    @classmethod
    def of(cls, cluster: Cluster, dtype: str = "bfloat16") -> Chip:
        return cls(
            cluster.device.rate_of(dtype).peak,
            cluster.levels[0].bandwidth_bytes_per_s,
            cluster.device.bandwidth_bytes_per_s,
        )

    @property
    def alpha(self) -> float:
        return self.flops_per_s / self.link_bytes_per_s


@dataclass(frozen=True)
class Layer:
    """One block of two products, [B, D] x [D, F] and [B, F] x [F, D], on an X x Y mesh. Both
    weights and activations travel in `itemsize` bytes.
    """

    d_model: int
    d_ff: int
    x: int
    y: int
    axes_x: int
    axes_y: int
    itemsize: int = 2

    def math_s(self, chip: Chip, batch: float) -> float:
        """4 B D F / (N C): both products, shared by all chips."""
        flops = 4 * batch * self.d_model * self.d_ff
        return flops / (self.x * self.y * chip.flops_per_s)

    def gather_s(self, chip: Chip) -> float:
        """4 D F / (Y W M_X) in 16 bit: both weights, gathered over X."""
        moved = self.itemsize * 2 * self.d_model * self.d_ff / self.y
        return moved / (chip.link_bytes_per_s * self.axes_x)

    def exchange_s(self, chip: Chip, batch: float) -> float:
        """4 B D / (X W M_Y) in 16 bit: activations in and out, over Y."""
        moved = self.itemsize * 2 * batch * self.d_model / self.x
        return moved / (chip.link_bytes_per_s * self.axes_y)


def critical_batch(layer: Layer, chip: Chip, overlap_axes: bool = False) -> float:
    """The batch, in tokens over all chips, from which the forward pass is compute-bound.

    math >= gather + exchange; where the two axes overlap each other, math >= the larger of them.
    Infinite where tensor parallelism alone takes longer than the math, at any batch.
    """
    per_token_math = layer.math_s(chip, 1.0)
    per_token_exchange = layer.exchange_s(chip, 1.0)
    gather = layer.gather_s(chip)
    if overlap_axes:
        return gather / per_token_math if per_token_math >= per_token_exchange else math.inf
    spare = per_token_math - per_token_exchange
    return gather / spare if spare > 0 else math.inf


def best_split(
    layer: Layer, chip: Chip, chips: int, overlap_axes: bool = False
) -> tuple[int, int, float]:
    """(X, Y, batch) with the smallest critical batch over all X Y = chips."""
    splits = [(x, chips // x) for x in range(1, chips + 1) if chips % x == 0]
    rated = []
    for x, y in splits:
        rated.append((critical_batch(replace(layer, x=x, y=y), chip, overlap_axes), x, y))
    batch, x, y = min(rated)
    return x, y, batch


def document_batch(layer: Layer, chip: Chip) -> float:
    """Seed 004's own equation: one product instead of two, and not shared by the chips."""
    per_token_math = 2 * layer.d_model * layer.d_ff / chip.flops_per_s
    return layer.gather_s(chip) / (per_token_math - layer.exchange_s(chip, 1.0))


def memory_bound_below(chip: Chip) -> float:
    """C / memory bandwidth: tokens below which a 16-bit product reads its weights for longer than
    it computes.
    """
    return chip.flops_per_s / chip.memory_bytes_per_s


def data_parallel_tokens(chip: Chip, axes: int) -> float:
    """alpha / M_X: tokens for each chip from which data parallel or FSDP is compute-bound."""
    return chip.alpha / axes


def tensor_parallel_limit(chip: Chip, d_ff: int, axes: int) -> float:
    """M_Y F / alpha: the most chips of tensor parallelism that stay compute-bound."""
    return axes * d_ff / chip.alpha


def combined_tokens(
    chip: Chip, d_ff: int, axes_x: int, axes_y: int, overlap_axes: bool = True
) -> float:
    """alpha**2 / (M_X M_Y F), the tokens for each chip of FSDP x TP at the best split; four times
    that where the two axes do not overlap each other.
    """
    return (1 if overlap_axes else 4) * chip.alpha**2 / (axes_x * axes_y * d_ff)


# Data parallel with buckets: s bytes of gradients, w bytes/s of all-reduce, o seconds for each
# call, T seconds of backward, nb buckets.


def bucket_overhead(
    size: float, bandwidth: float, call_s: float, buckets: int, backward_s: float | None = None
) -> float:
    """Seconds that communication runs on after backward has ended.

    A bucket is computed in c = T / nb and sent in m = s / (nb w) + o, one after the other, so the
    last one ends m + (nb - 1) max(0, m - c) after backward. With the exercise's assumption (T None:
    computing a bucket takes as long as its transfer) that is nb o + s / (nb w).
    """
    if buckets < 1:
        raise ValueError(f"buckets is {buckets}, expected at least 1")
    transfer = size / (buckets * bandwidth)
    compute = transfer if backward_s is None else backward_s / buckets
    message = transfer + call_s
    return message + (buckets - 1) * max(0.0, message - compute)


def optimal_buckets(size: float, bandwidth: float, call_s: float) -> float:
    """sqrt(s / (w o)), under the assumption."""
    return math.sqrt(size / (bandwidth * call_s))


def optimal_bucket_bytes(size: float, bandwidth: float, call_s: float) -> float:
    """s / nb = sqrt(s w o), under the assumption."""
    return math.sqrt(size * bandwidth * call_s)


def optimal_buckets_in_general(
    size: float, bandwidth: float, call_s: float, backward_s: float
) -> int:
    """The whole number of buckets with the least overhead, without the assumption.

    Where transfers take longer than backward it is near sqrt(T / o). Where they take less, more
    buckets help until their calls fill the spare time: (T - s / w) / o of them; past that the
    overhead rises again.
    """
    wire = size / bandwidth
    guesses = [math.sqrt(max(backward_s, 0.0) / call_s), optimal_buckets(size, bandwidth, call_s)]
    if backward_s > wire:
        guesses.append((backward_s - wire) / call_s)
    candidates = {max(1, math.floor(g) + d) for g in guesses for d in (-1, 0, 1)} | {1}
    return min(
        sorted(candidates),
        key=lambda nb: bucket_overhead(size, bandwidth, call_s, nb, backward_s),
    )
