"""Four real gloo ranks: every mode under both engines, on the same inputs, in turn."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise as sw
from shardwise.description.workload import row_of
from shardwise.emulation.engines import AXES, fully_shard_blocks
from shardwise.lab.hybrid.case import MESH, HybridCase, plan_of, summarize
from shardwise.lab.processes import time_on_ranks
from shardwise.lab.rows import say
from shardwise.lab.steps.engines import whole_tensors
from shardwise.profiling.timing import Step, alternate

CPU = torch.device("cpu")
TOLERANCE = 1e-5


def measure(
    case: HybridCase, candidates: list[tuple[str, str]], warmup: int, steps: int
) -> dict[str, Any]:
    """Figures by engine and mode, once all gradients agree; on every rank of a group."""
    found = time_steps(case, candidates, warmup, steps)
    if "error" in found:
        return found
    parity = {"parity": found["parity"]}
    return {key: summarize(ms, case.tokens) | parity for key, ms in found["steps_ms"].items()}


def time_steps(
    case: HybridCase, candidates: list[tuple[str, str]], warmup: int, steps: int
) -> dict[str, Any]:
    """Milliseconds of every step by engine and mode, and how far gradients differ; in words, and
    nothing timed, where they differ too much.
    """
    models: dict[str, nn.Module] = {}
    runs: dict[str, Step] = {}
    meshes = {
        "hsdp": init_device_mesh("cpu", MESH, mesh_dim_names=AXES),
        "fsdp": init_device_mesh("cpu", (dist.get_world_size(),)),
    }
    replica = row_of(dist.get_rank(), MESH, MESH[0])
    for engine, mode in candidates:
        plan, key = plan_of(mode), f"{engine}/{mode}"
        models[key] = _build(case, engine, plan, meshes["fsdp" if mode == "fsdp" else "hsdp"])
        runs[key] = case.step(engine, models[key], plan, replica, CPU)
    parity = _compare(models, runs)
    if isinstance(parity, str):
        return {"error": parity}
    say(
        f"4 gloo ranks: gradients agree to {parity:.0e}; {len(runs)} candidates, {steps} steps each"
    )
    torch.manual_seed(dist.get_rank())
    taken = alternate(runs, steps, warmup, time_on_ranks)
    steps_ms = {key: [sample.step_ms for sample in samples] for key, samples in taken.items()}
    return {"parity": parity, "steps_ms": steps_ms}


def _build(case: HybridCase, engine: str, plan: sw.Plan, mesh: Any) -> nn.Module:
    model = case.stack.build(case.sequence).to_empty(device=CPU)
    torch.manual_seed(0)  # of every candidate and rank
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    if engine == "shardwise":
        sw.shard(model, plan)
    else:
        fully_shard_blocks(model, plan, mesh, fsdp.fully_shard)
    return model


def _compare(models: dict[str, nn.Module], runs: dict[str, Step]) -> float | str:
    """The largest difference of a gradient after one step on the same inputs, of its tensor's
    largest value; in words where it is too much.
    """
    first: dict[str, torch.Tensor] = {}
    worst, where = 0.0, ""
    for key, run in runs.items():
        torch.manual_seed(100 + dist.get_rank())
        run()
        found = whole_tensors(models[key])
        models[key].zero_grad()
        if not first:
            first = found
        for name, expected in first.items():
            if name.endswith("gradient"):
                if name not in found:
                    return f"{key}: {name} is missing; nothing was timed"
                off = float((found[name] - expected).abs().max() / expected.abs().max())
                if not off <= worst:
                    worst, where = off, f"{key}: {name}"
    if not worst <= TOLERANCE:
        return (
            f"{where} differs from {next(iter(runs))}'s by {worst:.1e} of its largest value "
            f"(allowed {TOLERANCE:.0e}); nothing was timed"
        )
    return worst
