"""Profiles on one GPU: a rank of an emulated group, under shardwise and under torch's FSDP2.

Needs no pytest where there is none: `python -m tests.gpu.test_profile [DIR]` runs the same.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

try:
    import pytest
except ImportError:  # a GPU machine without test tools
    pytest = None  # type: ignore[assignment]

ENGINES = ("plan", "fully_shard", "torch")


def run_profile(
    kind: str, directory: str, layers: int, batch: int, gigabytes: float, steps: int = 3
) -> dict:
    """Profile steps of one engine; the figures that a test asserts on."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from shardwise.description.language_model import draw_tokens, make_model
    from shardwise.description.preset import bench_size
    from shardwise.emulation.collectives import Network, emulate
    from shardwise.lab.steps import engines
    from shardwise.lab.steps.engines import Precision
    from shardwise.profiling.collect import profile
    from shardwise.profiling.footprint import free_device

    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    # cuBLAS keeps 32 MiB for every handle and stream that it has met, which nobody owns.
    torch._C._cuda_clearCublasWorkspaces()
    free_device()
    shape = bench_size(layers, 2048, 5632, 16, 32000, fused_qkv=True)
    wraps = {**engines.OURS, "torch": engines.wrap_theirs}
    wrapped = wraps[kind](make_model(shape, "cuda"), "zero3", Precision("bfloat16", "float32"))
    run = wrapped.step_on(*draw_tokens(shape, batch, 2048, "cuda"))
    network = Network(gigabytes * 1e9, 20e-6)
    with emulate(network):
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        times = []
        for _ in range(5):
            began = time.perf_counter()
            run()
            torch.cuda.synchronize()
            times.append((time.perf_counter() - began) * 1e3)
        torch.cuda.reset_peak_memory_stats()
        with profile(wrapped.model, steps, title=f"{kind} at {gigabytes:.0f} GB/s") as measured:
            for _ in range(steps):
                run()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
    measured.write(directory, cluster="h200x8")
    timeline = measured.timeline
    memory = timeline.peak()
    exposed = sorted(timeline.exposed().items(), key=lambda item: -item[1])
    return {
        "engine": timeline.labels["engine"],
        "source": timeline.labels["source"],
        "labels": dict(timeline.labels),
        "alone_ms": sorted(times)[2],
        "step_ms": timeline.step_ms,
        "parts": {k: v / 1e6 for k, v in timeline.breakdown().parts().items()},
        "exposed_ms": {" ".join(key): value / 1e6 for key, value in exposed[:6]},
        "units": sorted({s.unit for s in timeline.spans}),
        "streams": list(timeline.streams(0)),
        "gathers": len(timeline.overlaps("all_gather")),
        "hidden_forward": sum(
            o.exposed < 50_000 for o in timeline.overlaps("all_gather", "forward")
        ),
        "reduces": len(timeline.overlaps("reduce_scatter")),
        "messages": len(measured.messages),
        "wire_error": statistics.median(
            message.seconds / network.seconds(message.bytes, message.ranks) - 1
            for message in measured.messages
        ),
        "peak": memory.total,
        "allocator_peak": peak,
        "roles": dict(memory.by_role),
        "largest": measured.memory[0]["largest"],
        "reserved": max(measured.memory[0]["reserved"]),
        "active": max(measured.memory[0]["active"]),
        "spans": len(timeline.spans),
        "read_s": measured.seconds,
    }


def check(kind: str, layers: int, found: dict[str, Any], directory: Path) -> None:
    assert found["engine"] == ("torch" if kind == "torch" else "shardwise")
    assert found["source"] == "emulated"
    assert abs(sum(found["parts"].values()) - found["step_ms"]) < 1e-3
    assert {f"layers.{i}" for i in range(layers)} <= set(found["units"])
    assert abs(found["wire_error"]) < 0.05  # transfers are as long in the trace as they were
    assert found["gathers"] >= 2 * layers and found["reduces"] >= layers
    assert found["parts"]["compute"] > 0.5 * found["step_ms"]
    # With prefetch all gathers of forward but the first are hidden.
    assert found["hidden_forward"] >= layers - 1
    assert abs(found["peak"] / found["allocator_peak"] - 1) < 0.01
    assert found["roles"]["other"] < 0.01 * found["peak"]
    assert found["reserved"] >= found["active"] >= found["peak"]
    for name in ("timeline.json", "memory.json", "messages.json", "trace.json"):
        json.loads((directory / name).read_text())
    assert (directory / "memory-rank0.pickle").stat().st_size > 0


def check_host_bound(found: dict[str, Any]) -> None:
    """A short batch, where the host limits the step and tracing slows the host: what is shown is as
    long as steps were without.
    """
    from shardwise.profiling.shown_step import RETIMED

    assert found["labels"].get("note", RETIMED) == RETIMED, found["labels"]
    assert found["step_ms"] < 1.1 * float(found["labels"]["step_ms"]), found["labels"]


if pytest is not None:

    def test_a_step_that_its_host_limits(tmp_path: Path) -> None:
        check_host_bound(run_profile("plan", str(tmp_path), 16, 1, 300, steps=8))

    @pytest.mark.parametrize("kind", ENGINES)
    def test_a_profile_of_an_emulated_rank(kind: str, tmp_path: Path) -> None:
        found = run_profile(kind, str(tmp_path), layers=4, batch=2, gigabytes=300)
        check(kind, 4, found, tmp_path)


def main() -> int:
    """All engines without pytest; the exit code counts the failures."""
    root, failures = Path(sys.argv[1] if len(sys.argv) > 1 else "profiles"), 0
    for kind in ENGINES:
        found = run_profile(kind, str(root / kind), layers=16, batch=4, gigabytes=300)
        print(kind, json.dumps(found, indent=1), flush=True)
        try:
            check(kind, 16, found, root / kind)
        except AssertionError as error:
            failures += 1
            line = traceback.extract_tb(error.__traceback__)[-1].line
            print(f"{kind} FAILED {error!r}: {line}", flush=True)
    short = run_profile("plan", str(root / "short"), 16, 1, 300, steps=8)
    print("short", short["labels"], short["step_ms"], flush=True)
    try:
        check_host_bound(short)
    except AssertionError as error:
        failures += 1
        print(f"short FAILED {error!r}", flush=True)
    print(f"{len(ENGINES) + 1 - failures} passed, {failures} failed")
    return failures


if __name__ == "__main__":
    sys.exit(main())
