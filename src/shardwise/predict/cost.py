"""From an operation to seconds: kernels, copies, collectives and the host's own work."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shardwise.description.cluster import Cluster
from shardwise.description.collectives import Members, collective_time, find_hops
from shardwise.description.model import KernelFact, PassFacts


@dataclass(frozen=True)
class Costs:
    """What operations take on one cluster.

    `streams`: communication and copies run on queues of their own beside compute (CUDA); without
    them the host computes, copies and waits (gloo). `emulated`: as `emulation/` does it, a
    collective copies what would arrive and then waits for the rest of the modelled time, and groups
    do not share a link.
    """

    cluster: Cluster
    streams: bool = True
    emulated: bool = False
    # Bytes per second of copies by name (copy-out, pack, update, ...), where they were measured.
    copy_rates: Mapping[str, float] = field(default_factory=dict)
    # Without streams: (bytes, seconds) that the call itself keeps the host, by collective.
    call_points: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict)
    _collectives: dict[tuple[str, float, Members], float] = field(
        default_factory=dict, compare=False, repr=False
    )
    _links: dict[Members, str] = field(default_factory=dict, compare=False, repr=False)
    _passes: dict[int, tuple[PassFacts, float]] = field(
        default_factory=dict, compare=False, repr=False
    )

    @classmethod
    def of(cls, cluster: Cluster) -> Costs:
        """The costs of a real cluster: a host that moves the data itself has no streams."""
        return cls(cluster, streams=not cluster.host.communicates)

    # Compute

    def kernel(self, kernel: KernelFact) -> float:
        """Seconds of one of the kernels: its arithmetic or its memory traffic, whichever takes
        longer, and at least the shortest kernel; before and after it images are laid anew.
        """
        device = self.cluster.device
        copied = kernel.bytes / device.copy_bytes_per_s
        traffic = device.traffic_of.get(kernel.kind)
        moved = copied if traffic is None else traffic.start_s + traffic.times * copied
        in_turn = kernel.batch if kernel.kind == "recurrent" else 1
        seconds = max(device.kernel_s * in_turn, moved)
        if kernel.shape:
            seconds = max(seconds, kernel.flops / self.flops_per_s(kernel))
        if kernel.plain:
            seconds += device.plain_image_traffic * copied
        return seconds

    def flops_per_s(self, kernel: KernelFact) -> float:
        """The rate of a kernel that has FLOPs."""
        device = self.cluster.device
        rates, share = device.product_rate_of(kernel.dtype)
        if kernel.kind == "attention":
            *_, keys, width = kernel.shape
            seen = max(1.0, keys * width / (2 if kernel.causal else 1))
            reached = device.attention_fraction * seen / (seen + device.attention_half)
            return share * rates.peak * reached
        m, n, k = kernel.shape
        rows = m if kernel.kind == "recurrent" else m * kernel.batch
        rate = share * rates.rate(max(1, rows), max(1, n), max(1, k))
        if kernel.kind == "convolution":
            return rate * (
                rates.depthwise_fraction if kernel.is_depthwise else rates.convolution_fraction
            )
        return rate * rates.aligned_fraction(kernel.alignment)

    def compute(self, part: PassFacts) -> float:
        """Seconds of all kernels of a pass, one after the other."""
        known = self._passes.get(id(part))
        if known is None:
            total = sum(self.kernel(kernel) * kernel.count for kernel in part.kernels)
            if not self.streams:
                # The host is the device; the shortest kernel has its dispatch in it.
                host, device = self.cluster.host, self.cluster.device
                total += part.launches * max(0.0, host.op_s - device.kernel_s)
            known = self._passes[id(part)] = (part, total)
        return known[1]

    def set_passes(self, passes: Iterable[tuple[PassFacts, float]]) -> None:
        """Take measured seconds for whole passes."""
        for part, seconds in passes:
            self._passes[id(part)] = (part, seconds)

    def issue(self, part: PassFacts) -> float:
        """Host seconds to issue a pass's kernels."""
        return part.launches * self.cluster.host.op_s if self.streams else 0.0

    def copy(self, nbytes: float, name: str = "") -> float:
        """Seconds of a kernel that reads and writes `nbytes` together; none for nothing."""
        if nbytes <= 0:
            return 0.0
        device = self.cluster.device
        rate = self.copy_rates.get(name, device.copy_bytes_per_s)
        return max(device.kernel_s, nbytes / rate)

    # Communication

    def collective(self, kind: str, nbytes: float, members: Members) -> float:
        key = (kind, nbytes, members)
        if key not in self._collectives:
            self._collectives[key] = collective_time(self.cluster, kind, nbytes, members)
        return self._collectives[key]

    def call(self, kind: str, nbytes: float) -> float:
        """Host seconds of the call that starts a collective (gloo copies its input there): between
        measured sizes a straight line.
        """
        points = self.call_points.get(kind, ())
        if not points:
            return 0.0 if self.streams else self.cluster.host.collective_s
        for (low, low_s), (high, high_s) in itertools.pairwise(points):
            if nbytes <= high:
                return low_s + (high_s - low_s) * max(0.0, nbytes - low) / (high - low)
        largest, seconds = points[-1]
        return seconds * nbytes / largest

    def link(self, members: Members) -> str:
        """What transfers of other groups of the same rank share the bandwidth of, if any do."""
        if self.emulated or members.ranks == 1:
            return ""
        if members not in self._links:
            hops = find_hops(self.cluster, members)
            self._links[members] = "+".join(hop.level.name for hop in hops)
        return self._links[members]

    def is_near(self, members: Members) -> bool:
        """Whether a group of ranks is on one host, which moves the data itself."""
        if not self.cluster.host.communicates or self.streams or self.emulated:
            return False
        hops = find_hops(self.cluster, members)
        return len(hops) == 1 and hops[0].level is self.cluster.levels[0]

    @property
    def share(self) -> float:
        """Of the compute, that a collective takes from its arrival to its end."""
        return 0.0 if self.emulated else self.cluster.communication_share_of_compute

    @property
    def copy_share(self) -> float:
        """Of the compute, that a copy on another stream takes: it fills the device, so a matrix
        product beside it stands still. A host's copies are on its one stream anyway.
        """
        return 1.0 if self.streams else 0.0
