"""The candidates in torch: the same parameters and gradients, averaged or stepped in slices."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.emulation.collectives import Network, emulate
from shardwise.lab.grouped.cases import ADAMW, CANDIDATES, GroupedCase
from shardwise.lab.processes import time_on_ranks
from shardwise.planning.groups import group_by_bytes
from shardwise.profiling import footprint, timing
from shardwise.profiling.timing import Sample, Side, Step

WARMUP, BLOCKS, IN_FLIGHT = 2, 2, 2
# Of the largest value of a parameter, after two steps. AdamW's first ones move everything by about
# the rate, whatever the gradient's size, so bf16 has a bit or two less than it looks.
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def make_parameters(case: GroupedCase) -> list[nn.Parameter]:
    """The same weights on every rank, and gradients of this rank's own."""
    dtype = DTYPES[case.precision]
    draw = torch.Generator(case.device).manual_seed(0)
    made = [
        nn.Parameter(torch.empty(shape, dtype=dtype, device=case.device).normal_(generator=draw))
        for shape in case.shapes
    ]
    draw.manual_seed(1 + dist.get_rank())
    for parameter in made:
        parameter.grad = torch.empty_like(parameter).normal_(generator=draw)
    return made


def average_gradients(groups: Sequence[Sequence[nn.Parameter]]) -> None:
    """Each group's gradients in one all-reduce, a few under way."""
    under_way: deque[tuple[Sequence[nn.Parameter], Tensor, Any]] = deque()

    def finish() -> None:
        members, flat, handle = under_way.popleft()
        handle.wait()
        flat.div_(dist.get_world_size())
        gradients = [_gradient(p).view(-1) for p in members]
        timing.foreach_copy_(gradients, list(flat.split([g.numel() for g in gradients])))

    for members in groups:
        if len(under_way) == IN_FLIGHT:
            finish()
        flat = torch.cat([_gradient(p).view(-1) for p in members])
        under_way.append((members, flat, dist.all_reduce(flat, async_op=True)))
    while under_way:
        finish()


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def build(case: GroupedCase, candidate: str) -> tuple[list[nn.Parameter], Step]:
    """Parameters with gradients, and the step of a candidate on them."""
    parameters = make_parameters(case)
    optimizer = torch.optim.AdamW(parameters, fused=True, **ADAMW)
    if candidate == "ddp":
        groups = group_by_bytes(parameters, lambda p: p.nbytes, case.group_bytes)

        def averaged() -> None:
            average_gradients(groups)
            optimizer.step()

        return parameters, averaged

    def sharded() -> None:
        sw.sharded_step(parameters, optimizer, group_bytes=case.group_bytes, layout=candidate)

    return parameters, sharded


def _build_step(case: GroupedCase, candidate: str) -> Step:
    return build(case, candidate)[1]


def measure(case: GroupedCase, network: Network) -> dict[str, Any]:
    """A row's figures, on every rank of the group."""
    if case.device == "cuda":
        return _measure_on_gpu(case, network)
    return _measure_on_ranks(case)


def _measure_on_ranks(case: GroupedCase) -> dict[str, Any]:
    """The candidates live side by side and step in turn; memory is taken from others of them."""
    built = {name: build(case, name) for name in CANDIDATES}
    for _, step in built.values():
        for _ in range(2):
            step()
    parity = _compare([parameters for parameters, _ in built.values()])
    if parity > TOLERANCE[case.precision]:
        return {"failure": f"candidates differ by {parity:.1e}; nothing was timed"}
    sent = {name: _count_sent(case, step) for name, (_, step) in built.items() if name != "ddp"}
    steps = {name: step for name, (_, step) in built.items()}
    samples = timing.alternate(steps, case.steps, 0, time_on_ranks)
    del built, steps
    sides = {
        name: Side.of(samples[name], footprint.peak_on_cpu(partial(_build_step, case, name), 1))
        for name in CANDIDATES
    }
    return _row(sides, sent) | {"parity": parity, "network": "gloo"}


def _measure_on_gpu(case: GroupedCase, network: Network) -> dict[str, Any]:
    """Each candidate is built, timed and freed, in turn: two of the largest do not fit at once."""
    samples: dict[str, list[Sample]] = {name: [] for name in CANDIDATES}
    peaks: dict[str, list[int]] = {name: [] for name in CANDIDATES}
    alone: dict[str, list[float]] = {name: [] for name in CANDIDATES}
    sent: dict[str, float] = {}
    with emulate(network) as emulation:
        hold = emulation.links_of(torch.device("cuda", 0)).delay
        for _ in range(BLOCKS):
            for name in CANDIDATES:
                left = footprint.free_device()
                parameters, step = build(case, name)
                rounds = math.ceil(case.steps / BLOCKS)
                timed = timing.alternate({name: step}, rounds, WARMUP, timing.time_on_cuda)
                samples[name] += timed[name]
                for _ in range(rounds):
                    took, _ = timing.time_ahead(step, hold, timed[name], nullcontext())
                    alone[name].append(took)
                peaks[name].append(footprint.peaks_on_cuda(step)[0] - left)
                if name != "ddp":
                    sent[name] = _count_sent(case, step)
                del parameters, step
    footprint.free_device()
    sides = {
        name: Side.of(samples[name], min(peaks[name]), device=alone[name]) for name in CANDIDATES
    }
    gigabytes, micros = network.bandwidth / 1e9, network.latency * 1e6
    told = f"emulated: {gigabytes:g} GB/s per rank, {micros:g} us per collective"
    return _row(sides, sent) | {"parity": None, "network": told}


def _row(sides: dict[str, Side], sent: dict[str, float]) -> dict[str, Any]:
    found = {
        name: {
            "step_ms": side.step_ms, "spread_ms": side.step_spread_ms,
            "device_ms": side.device_ms, "peak_bytes": side.peak_bytes,
        }
        for name, side in sides.items()
    }  # fmt: skip
    return {"candidates": found, "sent_over_all_reduce": sent}


def _count_sent(case: GroupedCase, step: Step) -> float:
    """Bytes that this rank sends in a step, over those of an all-reduce of all gradients."""
    with sw.record() as log:
        step()
    whole = case.parameters * case.item_bytes
    return log.sent() / (2 * whole * (case.ranks - 1) / case.ranks)


def _compare(sides: Sequence[Sequence[nn.Parameter]]) -> float:
    """The largest difference from the first side, relative to the tensor's largest value, over all
    ranks.
    """
    worst = 0.0
    with torch.no_grad():
        for other in sides[1:]:
            for a, b in zip(sides[0], other, strict=True):
                gap = (a.float() - b.float()).abs().max()
                worst = max(worst, float(gap / a.abs().max()))
    everybody = torch.tensor(worst)
    dist.all_reduce(everybody, op=dist.ReduceOp.MAX)
    return float(everybody)
