"""Memory in an arena on one GPU: bit for bit as with the allocator, in as many bytes as `explain`
says, captured too. Two gloo ranks that share the GPU, and one rank of an emulated eight.

Needs no pytest where there is none: `python -m tests.gpu.test_arena` runs the same tests.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import shardwise as sw
from shardwise.engine.engine import engine_of
from shardwise.engine.quantised import QuantisedGather
from shardwise.planning.memory import lay_out_arena
from shardwise.planning.rows import lay_out
from tests.gpu.standalone import run_all
from tests.gpu.test_capture import DEVICE, Block, Net, draw, emulated
from tests.ranks import Ranks

PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "zero3": ("zero3", {}),
    "zero3, bf16": ("zero3", {"compute_dtype": "bfloat16"}),
    "zero3, packed, last": ("zero3", {"gather": "packed", "sync": "last"}),
    "zero3, deep": ("zero3", {"forward_prefetch": 2, "reduce_depth": 3}),
    "zero3, whole": ("zero3", {"whole_below": 300, "reduce_dtype": "bfloat16"}),
    "zero2": ("zero2", {}),
    "zero1, last": ("zero1", {"sync": "last"}),
    "ddp, bf16": ("ddp", {"compute_dtype": "bfloat16"}),
    "hsdp, bf16": ("hsdp", {"compute_dtype": "bfloat16"}),
    "zero3, sums": ("zero3", {"reduce_dtype": "bfloat16", "sum_dtype": "float32"}),
    "zero2, sums, last": (
        "zero2", {"reduce_dtype": "bfloat16", "sum_dtype": "float32", "sync": "last"},
    ),
    "ddp, sums": ("ddp", {"reduce_dtype": "bfloat16", "sum_dtype": "float32"}),
    "hsdp, sums": ("hsdp", {"reduce_dtype": "bfloat16", "sum_dtype": "float32"}),
    "zero3, fp8": ("zero3", {"gather_dtype": "float8_e4m3fn", "compute_dtype": "bfloat16"}),
    "zero3, int8, one kept": ("zero3", {"gather_dtype": "int8", "keep_last": 1}),
}  # fmt: skip


def _make(name: str, memory: str, checkpointed: bool = False) -> Any:
    torch.manual_seed(0)
    strategy, settings = PLANS[name]
    world = dist.get_world_size()
    mesh = (2, world // 2) if strategy == "hsdp" else world
    plan = sw.Plan.of(strategy, mesh, units=[Block], memory=memory, **settings)
    net = Net(checkpointed=checkpointed).to(DEVICE)
    if name == "hsdp, sums" and dist.get_backend() == "fake":
        # What an emulated gather brings is this rank's part again, for the numbers of ranks that
        # used a parameter too: one that nobody used would come and go.
        for block in net.blocks:
            del block.spare
    return sw.shard(net, plan)


def _step(model: Any, captured: bool) -> Callable[..., Tensor]:
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=torch.tensor(1e-2, device=DEVICE), capturable=True
    )

    def step(*batches: Tensor) -> Tensor:
        optimizer.zero_grad()
        total = torch.zeros((), device=DEVICE)
        for batch in sw.microbatches(model, batches):
            loss = model(batch).float().square().mean() / len(batches)
            loss.backward()
            total += loss.detach()
        sw.clip_grad_norm(model, 0.5)
        optimizer.step()
        return total

    return sw.capture(step) if captured else step


def _compare(name: str, micro: int, captured: bool, checkpointed: bool = False) -> list[str]:
    """What of a training in an arena is not as with the allocator."""
    values, wrong = [], []
    for memory in ("allocator", "arena"):
        model = _make(name, memory, checkpointed)
        step = _step(model, captured and memory == "arena")
        losses = [step(*[draw(10 * i + j) for j in range(micro)]) for i in range(9)]
        values.append([*losses, *(p.detach().to_local() if hasattr(p, "to_local") else p.detach()
                                  for p in model.parameters())])  # fmt: skip
        if memory == "arena":
            engine = engine_of(model)
            arena = engine.executor.arena
            if arena is None or arena.block is None:
                return ["the arena was left" if arena is None else "there is no block"]
            assert engine.plan is not None
            said = lay_out_arena(engine.plan, micro, streams=True).nbytes
            if said != arena.block.nbytes:
                wrong.append(f"{arena.block.nbytes} bytes, explain says {said}")
            if captured and not step.recordings:  # type: ignore[attr-defined]
                wrong.append(f"not captured: {step.reason}")  # type: ignore[attr-defined]
    if not all(map(torch.equal, *values)):
        wrong.append("losses or parameters differ")
    return wrong


def _all(captured: bool) -> dict[str, list[str]]:
    """Every plan, on this rank."""
    torch.cuda.set_device(DEVICE)
    found = {}
    for i, name in enumerate(PLANS):
        for micro in (1 + i % 2,):
            where = f"{name}, {micro} micro-batches"
            try:
                found[where] = _compare(name, micro, captured, checkpointed=i % 3 == 0)
            except Exception:
                found[where] = traceback.format_exc().strip().splitlines()[-4:]
                if dist.get_backend() == "gloo":  # the other rank may wait for this one
                    return found
    return found


def _fail(found: dict[str, list[str]]) -> None:
    bad = {where: said for where, said in found.items() if said}
    assert not bad, "\n".join(f"{where}: {line}" for where, said in bad.items() for line in said)


def test_codes_are_those_of_the_host() -> None:
    """Up to a rounding of the quotient: the kernels divide as GPUs do."""
    layout = lay_out([(1000, 300), (17,), (64, 7)], 1)
    values = torch.randn(layout.shard_numel)
    for code in (torch.int8, torch.float8_e4m3fn):
        found = []
        for device in ("cpu", DEVICE):
            full = torch.zeros(layout.full_numel, device=device)
            gather = QuantisedGather(code, Alone, layout, values.to(device), full)
            found.append(torch.cat(gather._pieces_as_gathered()).cpu())
        host, gpu = found
        largest = values.abs().max()
        assert (host != gpu).float().mean() < 1e-3, f"{code}: many differ"
        assert (host - gpu).abs().max() <= largest / 8, f"{code}: some differ by much"


class Alone:
    size, rank = 1, 0


def test_two_ranks_on_one_gpu() -> None:
    """gloo packs where NCCL groups its calls, so bytes are compared among eight only."""
    ranks = Ranks(2)
    try:
        for found in ranks.run(_all, False):
            kept = {k: [s for s in said if "explain says" not in s] for k, said in found.items()}
            _fail(kept)
    finally:
        ranks.stop()


def test_one_rank_of_eight() -> None:
    with emulated():
        _fail(_all(False))


def test_one_rank_of_eight_captured() -> None:
    with emulated():
        _fail(_all(True))


if __name__ == "__main__":
    run_all(globals())
