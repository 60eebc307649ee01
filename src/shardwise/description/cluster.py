"""What a cluster can do: its devices, its links, its hosts.

    Cluster.load("h100x8")            a file of this package: `known_clusters()` lists them
    Cluster.load("mine.toml")         one that `shardwise calibrate --out mine.toml` wrote

A cluster is a tree of equal groups. Its levels go from the inside out: the devices of a node first
(NVLink), then the nodes (InfiniBand). The last level has no limit, so any number of ranks fits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Annotated

from shardwise.checked import ABOVE_0, Bound, Count, NotNegative, Share, check_bounds, finite
from shardwise.description.model import KERNEL_KINDS
from shardwise.description.parameters import ITEMSIZES

FOLDER = resources.files("shardwise.description") / "clusters"
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")

# Of a device's memory, what a step's tensors cannot have.
BESIDE = ("context_bytes", "communicator_bytes", "fragmentation", "floor_bytes")

Positive = Annotated[float, finite(1)]  # bytes and FLOPs, and those per second
Factor = Annotated[float, ABOVE_0]


@dataclass(frozen=True)
class MatmulPoint:
    """A measured matrix product (m, k) x (k, n): FLOP/s, and the interquartile range of that."""

    m: Count
    n: Count
    k: Count
    flops_per_s: Positive
    spread: NotNegative = 0.0

    def __post_init__(self) -> None:
        check_bounds(self)


@dataclass(frozen=True)
class MatmulRate:
    """FLOP/s of matrix products in one dtype: the data sheet's peak, the share of it that large
    products reach, and measured points where there are some.
    """

    dtype: str
    peak: Positive
    fraction: float
    points: tuple[MatmulPoint, ...] = ()
    # Of the rate of the product that it is, what a convolution reaches. Above 1 in fp32 where cuDNN
    # may round to TF32, as it may by torch's default, and products may not.
    convolution_fraction: Factor = 1.0
    depthwise_fraction: Factor = 1.0  # of a channel each: no tensor core does these
    # And a product whose matrices have rows that lie apart by a multiple of 8, 4 or 2 bytes only.
    aligned_8_fraction: Factor = 1.0
    aligned_4_fraction: Factor = 1.0
    aligned_2_fraction: Factor = 1.0

    def __post_init__(self) -> None:
        if self.dtype not in ITEMSIZES:
            raise ValueError(
                f"matmul rate for dtype {self.dtype!r}, expected one of {', '.join(ITEMSIZES)}"
            )
        check_bounds(self)
        if not 0 < self.fraction <= 1:
            raise ValueError(
                f"the achievable fraction of {self.dtype} is {self.fraction}, expected a share in "
                "(0, 1]"
            )

    @property
    def achievable(self) -> float:
        """FLOP/s of a large product."""
        return self.peak * self.fraction

    def aligned_fraction(self, alignment: int) -> float:
        """What rows that lie apart by a multiple of so many bytes leave of a product's rate."""
        return {
            8: self.aligned_8_fraction,
            4: self.aligned_4_fraction,
            2: self.aligned_2_fraction,
            1: self.aligned_2_fraction,
        }.get(alignment, 1.0)

    def rate(self, m: int, n: int, k: int) -> float:
        """FLOP/s of one product of this shape: interpolated in the logarithms of the measured
        sizes, weighted by nearness; the achievable rate without points.
        """
        if not self.points:
            return self.achievable
        total = value = 0.0
        for point in self.points:
            distance = math.dist(
                (math.log2(m), math.log2(n), math.log2(k)),
                (math.log2(point.m), math.log2(point.n), math.log2(point.k)),
            )
            if distance < 1e-9:
                return point.flops_per_s
            weight = distance**-4  # steep: the nearest measured shapes decide
            total += weight
            value += weight * math.log(point.flops_per_s)
        return math.exp(value / total)


def fastest_dtype(peaks: Mapping[str, float]) -> str:
    """bf16 or fp32, whichever has the quicker products."""
    return max(("bfloat16", "float32"), key=lambda dtype: peaks.get(dtype, 0.0))


@dataclass(frozen=True)
class Traffic:
    """How well kernels of one kind move memory: how many times as long as a large copy they take
    for the bytes that they read and write once each, and what they take beside.
    """

    kind: str
    times: Factor
    start_s: NotNegative = 0.0

    def __post_init__(self) -> None:
        check_bounds(self, f"traffic of {self.kind}: ")
        if self.kind not in KERNEL_KINDS:
            raise ValueError(f"traffic of {self.kind!r}, expected one of {', '.join(KERNEL_KINDS)}")


_PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


@dataclass(frozen=True)
class Device:
    """One accelerator (or, for gloo, one rank's share of a CPU)."""

    name: str
    memory_bytes: Positive  # all that a program can have
    bandwidth_bytes_per_s: Positive  # of its memory, by the data sheet
    bandwidth_fraction: Share  # the share that a large copy reaches
    kernel_s: NotNegative  # the least time of any kernel
    matmul: tuple[MatmulRate, ...]
    # Of the matmul peak, what fused attention reaches on a long sequence; half of it where the keys
    # that a query sees, on average, times a head's width are `attention_half`.
    attention_fraction: Share = 0.5
    attention_half: NotNegative = 0.0
    # Bytes that a convolution moves beside each of its own where images are not channels-last: its
    # libraries lay them and the weight anew, and the result back.
    plain_image_traffic: NotNegative = 0.0
    # BESIDE: the driver's context with the kernels that were loaded; NCCL's buffers for each group
    # that a rank is in; as a share of allocated bytes, what the allocator took and cannot lend; and
    # what it takes for any step: pages of every stream, libraries' workspaces.
    context_bytes: NotNegative = 0.0
    communicator_bytes: NotNegative = 0.0
    fragmentation: NotNegative = 0.0
    floor_bytes: NotNegative = 0.0
    traffic: tuple[Traffic, ...] = ()  # of the kinds that are slower than a copy

    def __post_init__(self) -> None:
        check_bounds(self, f"device {self.name}: ")
        if not self.matmul:
            raise ValueError(f"device {self.name} has no matmul rate for any dtype")

    @property
    def compute_dtype(self) -> str:
        """What models compute in here: bf16 where its products are the quicker ones."""
        return fastest_dtype({rate.dtype: rate.peak for rate in self.matmul})

    def rate_of(self, dtype: str) -> MatmulRate:
        for rate in self.matmul:
            if rate.dtype == dtype:
                return rate
        raise ValueError(
            f"device {self.name} has no matmul rate for {dtype}; it has "
            f"{', '.join(rate.dtype for rate in self.matmul)}. "
            "Add one to the cluster's file, or choose another compute dtype"
        )

    def product_rate_of(self, dtype: str) -> tuple[MatmulRate, float]:
        """The rate that products of a dtype are reckoned by, and the share of it that they reach: a
        model may multiply in one that no file has. A complex product is four real ones; 64 bits are
        taken for half as quick as 32, and all else for the slowest that is known. An error for a
        dtype that Plans compute in.
        """
        known = {rate.dtype: rate for rate in self.matmul}
        if dtype in known or dtype in ("bfloat16", "float16"):
            return self.rate_of(dtype), 1.0
        if dtype in _PARTS:
            rate, share = self.product_rate_of(_PARTS[dtype])
            return rate, share / 4
        slowest = known.get("float32") or min(self.matmul, key=lambda rate: rate.peak)
        return slowest, 0.5 if dtype == "float64" else 1.0

    @cached_property
    def traffic_of(self) -> dict[str, Traffic]:
        return {traffic.kind: traffic for traffic in self.traffic}

    @property
    def copy_bytes_per_s(self) -> float:
        """Bytes read plus written per second by a large elementwise kernel."""
        return self.bandwidth_bytes_per_s * self.bandwidth_fraction


@dataclass(frozen=True)
class CollectivePoint:
    """A measured collective: seconds for `nbytes` (the whole buffer: what an all-gather gives, a
    reduce-scatter takes, an all-reduce changes) over `ranks` ranks, and their interquartile range.
    Of those ranks, `inside` are neighbours in each group of the level below: 1 where a replica has
    one rank on each host, 2 where a group is all ranks of hosts with two.
    """

    kind: str
    ranks: Annotated[int, finite(2)]
    nbytes: Count
    seconds: float
    spread: NotNegative = 0.0
    inside: Count = 1

    def __post_init__(self) -> None:
        if self.kind not in COLLECTIVES:
            raise ValueError(f"collective {self.kind!r}, expected one of {COLLECTIVES}")
        check_bounds(self)
        if not self.seconds > 0:
            raise ValueError(f"a measured {self.kind} took {self.seconds} s, expected more than 0")


@dataclass(frozen=True)
class Protocol:
    """One way to send: its start-up time, the time of one ring step over this level, the share of
    the link's bandwidth that is data, and the most bytes/s it can reach at all.
    """

    name: str
    start_s: NotNegative
    step_s: NotNegative
    share: Share = 1.0
    limit_bytes_per_s: Annotated[float, ABOVE_0] = math.inf

    def __post_init__(self) -> None:
        check_bounds(self, f"protocol {self.name}: ")


@dataclass(frozen=True)
class Level:
    """One kind of link. `ranks` is how many ranks one group of this level holds: 8 for the devices
    of a node; None, for the outermost level, is no limit.

    `bandwidth_bytes_per_s` is per rank and direction, as a ring reaches it (NCCL's "bus
    bandwidth").
    """

    name: str
    ranks: Count | None
    bandwidth_bytes_per_s: Positive
    protocols: tuple[Protocol, ...] = field(metadata={"key": "protocol"})
    points: tuple[CollectivePoint, ...] = ()

    def __post_init__(self) -> None:
        check_bounds(self)
        if not self.protocols:
            raise ValueError(f"level {self.name} has no protocol: give at least one latency")

    @property
    def latency_s(self) -> float:
        """Of one ring step with the quickest protocol."""
        return min(protocol.step_s for protocol in self.protocols)


# Where a file does not say it, what a cast of a unit takes of `unit_s`: an H200's host took 0.097
# ms for the one and 0.655 for the other (benchmarks/results/accuracy-h200.json, calibration).
CAST_SHARE_OF_UNIT = 0.15


@dataclass(frozen=True)
class Host:
    """CPU seconds that the host needs to issue work; what the device does meanwhile is its own."""

    op_s: NotNegative  # one operator of the model, forward or backward
    unit_s: NotNegative  # the engine's own work for one unit: gather, free or reduce it
    collective_s: NotNegative  # one call of a collective
    # gloo: the host itself moves the data, so communication and compute share its cores.
    communicates: bool = False
    # To cast a unit that is not sharded. Much less than a gather, and it shows more: ddp casts all
    # of its units before the first kernel can be issued. None: a share of `unit_s`.
    cast_s: NotNegative | None = None

    def __post_init__(self) -> None:
        check_bounds(self)

    @property
    def seconds_to_cast(self) -> float:
        return CAST_SHARE_OF_UNIT * self.unit_s if self.cast_s is None else self.cast_s


@dataclass(frozen=True)
class Cluster:
    """Equal devices on equal nodes, and what their links and hosts can do."""

    name: str
    device: Device
    levels: tuple[Level, ...]  # from the inside out
    host: Host
    # The share of the device's compute that a collective takes while it runs, also while it waits
    # for a late peer (its kernel spins).
    communication_share_of_compute: Annotated[
        float, Bound("a share in [0, 1)", lambda n: 0 <= n < 1)
    ] = 0.0
    # (dotted key of the file, where its number comes from)
    sources: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if not self.levels:
            raise ValueError(f"cluster {self.name} has no level: describe at least one link")
        for inner, outer in zip(self.levels, self.levels[1:], strict=False):
            if inner.ranks is None or (outer.ranks is not None and outer.ranks % inner.ranks):
                raise ValueError(
                    f"cluster {self.name}: level {outer.name} ({outer.ranks} ranks) must hold a "
                    f"whole number of groups of level {inner.name} ({inner.ranks} ranks)"
                )
        check_bounds(self, f"cluster {self.name}: ")

    @property
    def ranks_per_node(self) -> int | None:
        """Ranks of one group of the innermost level; None: all of them."""
        return self.levels[0].ranks

    @classmethod
    def load(cls, name_or_path: str | Path) -> Cluster:
        """A cluster of this package by name, or one from a TOML file."""
        from shardwise.description.cluster_toml import load_cluster

        return load_cluster(name_or_path)


def known_clusters() -> tuple[str, ...]:
    """Names of the clusters that come with the package."""
    return tuple(sorted(f.name[:-5] for f in FOLDER.iterdir() if f.name.endswith(".toml")))
