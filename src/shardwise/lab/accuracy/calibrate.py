"""Timing a device outside of any training step: copies, the smallest kernel, and its host."""

from __future__ import annotations

import dataclasses
import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.description.cluster import Cluster, Level, Protocol
from shardwise.description.language_model import OPTIMIZER, compute_loss, make_model
from shardwise.description.preset import bench_size
from shardwise.emulation.collectives import Network, emulate
from shardwise.lab.accuracy.cases import describe_model
from shardwise.lab.accuracy.kernels import Run, time_on
from shardwise.profiling import footprint
from shardwise.profiling.timing import foreach_copy_, time_passes

TINY = bench_size(layers=8, d_model=64, d_ff=128, heads=4, vocab=128, fused_qkv=True)
UNBOUND = 1e18  # bytes/s of a network that costs nothing


@dataclass(frozen=True)
class Calibration:
    """What was measured of the device and its host, outside of any training step."""

    kernel_s: float  # the least time of a kernel
    stream_bytes_per_s: float  # a large elementwise kernel, read plus written
    copy_rates: dict[str, float]  # the engine's own copies, and the optimizer's update
    op_s: float  # host seconds for one operator of a model, forward or backward
    unit_s: float  # host seconds of the engine to gather or reduce one unit
    # Where nothing is sharded: to cast one. All are cast before the first kernel can be issued, so
    # this shows in the step; reducing one takes longer, but beside backward, where it does not.
    whole_unit_s: float
    library_bytes: int  # what libraries hold on the device

    def apply(self, base: Cluster, network: Network, whole: bool = False) -> Cluster:
        """The cluster of this device and an emulated network; `whole`: for a Plan that shards
        nothing.
        """
        device = dataclasses.replace(
            base.device,
            bandwidth_bytes_per_s=self.stream_bytes_per_s,
            bandwidth_fraction=1.0,
            kernel_s=self.kernel_s,
        )
        unit_s = self.whole_unit_s if whole else self.unit_s
        host = dataclasses.replace(
            base.host,
            op_s=self.op_s,
            unit_s=unit_s,
            collective_s=0.0,
            cast_s=self.whole_unit_s,
        )
        return dataclasses.replace(
            base,
            name="emulated",
            device=device,
            levels=(emulated_level(network),),
            host=host,
            communication_share_of_compute=0.0,
        )


def emulated_level(network: Network) -> Level:
    """The one link of an emulated cluster."""
    bandwidth = min(network.bandwidth, UNBOUND)
    return Level("emulated", None, bandwidth, (Protocol("emulated", network.latency, 0.0),))


def calibrate_device(device: str, rounds: int = 15) -> Calibration:
    """Time copies, the smallest kernel and, in so many rounds, the host."""
    on = torch.device(device)
    if on.type == "cuda":
        _warm_up(on)
    size = 2**26 if on.type == "cuda" else 2**20
    stream = _stream_rate(on, size)
    small = torch.zeros(1, device=on)
    kernel = time_on(lambda: small.add_(1), on)
    rates = _copy_rates(on, size)
    op_s, unit_s, whole_unit_s = _host_seconds(device, rounds)
    library = footprint.free_device() if on.type == "cuda" else 0
    return Calibration(kernel, stream, rates, op_s, unit_s, whole_unit_s, library)


def _stream_rate(device: torch.device, size: int) -> float:
    """Bytes read plus written per second by a large elementwise kernel."""
    first, second, out = (torch.randn(size, device=device) for _ in range(3))
    return 3 * out.nbytes / time_on(lambda: torch.add(first, second, out=out), device)


def _warm_up(device: torch.device) -> None:
    """Bring the clocks to what they are under load, and let the libraries allocate."""
    a = torch.randn((8192, 8192), device=device, dtype=torch.bfloat16)
    began = time.perf_counter()
    while time.perf_counter() - began < 1.0:
        for _ in range(20):
            a @ a
        torch.cuda.synchronize()


def _copy_rates(device: torch.device, size: int) -> dict[str, float]:
    """Bytes read plus written per second of the engine's copies, on tensors like a block's."""
    ranks, count = 8, 6
    width = size // (ranks * count)
    sizes = [width] * count
    staging = torch.randn((ranks, width * count), device=device).bfloat16()
    full = torch.empty(ranks * width * count, device=device, dtype=torch.bfloat16)
    parts = [part.view(ranks, width) for part in full.split([ranks * width] * count)]
    own = torch.randn(width * count, device=device)
    row = own.bfloat16()
    slot = torch.empty(ranks * width * count, device=device)
    pieces = list(slot.split(width))
    grads = [g for part in parts for g in part.unbind(0)]
    flat = torch.nn.Parameter(torch.randn(size, device=device))
    flat.grad = torch.randn_like(flat)
    update = torch.optim.AdamW([flat], **OPTIMIZER)
    # What is called, and the bytes that it moves.
    copies: dict[str, tuple[Run, int]] = {
        "copy-out": (
            lambda: torch.split_with_sizes_copy(staging, sizes, dim=1, out=parts),
            2 * staging.nbytes,
        ),
        "all_gather copy": (
            lambda: staging.copy_(row.reshape(1, -1).expand_as(staging)),
            2 * staging.nbytes,
        ),
        "cast": (lambda: row.copy_(own), own.nbytes + row.nbytes),
        "pack": (lambda: foreach_copy_(pieces, grads), full.nbytes + slot.nbytes),
        "update": (update.step, 7 * flat.nbytes),
    }
    with torch.no_grad():
        return {name: moved / time_on(call, device) for name, (call, moved) in copies.items()}


def _host_seconds(device: str, rounds: int) -> tuple[float, float, float]:
    """Host seconds per operator; per move of a unit (gathered for forward and for backward,
    reduced); and per cast of one where nothing is sharded. On a model too small for the device to
    matter.
    """
    tokens = torch.zeros((1, 32), dtype=torch.int64, device=device)
    world = dist.get_world_size()
    plan = sw.Plan.of("zero3", world, compute_dtype="bfloat16", reduce_dtype="float32")
    _, described = describe_model(TINY, 1, 32, plan, device)
    launches = sum(s.forward.launches + s.backward.launches for _, s in described.segments)
    bare = _time_host(make_model(TINY, device).to(torch.bfloat16), tokens, rounds)

    def beyond(plan: sw.Plan) -> tuple[float, float]:
        """The engine's own seconds, per unit."""
        model = make_model(TINY, device)
        units = len(plan.resolve(model).require_units())
        sw.shard(model, plan)
        with emulate(Network()):
            taken = _time_host(model, tokens, rounds)
        forward, step = (max(0.0, t - b) / units for t, b in zip(taken, bare, strict=True))
        return forward, step

    whole = dataclasses.replace(plan, name="ddp", mesh=(plan.world, 1), bucket_bytes=2**16)
    return bare[1] / launches, beyond(plan)[1] / 3, beyond(whole)[0]


def _time_host(model: nn.Module, tokens: Tensor, rounds: int) -> tuple[float, float]:
    """Seconds until the calls of a forward, and of it and its backward, return: medians."""
    forwards, steps = time_passes(
        model, lambda: compute_loss(model, tokens, tokens), rounds, warmup=rounds // 3
    )
    return statistics.median(forwards), statistics.median(steps)
