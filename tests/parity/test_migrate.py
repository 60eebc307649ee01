"""docs/migrate.md: every snippet runs on two ranks and ends where one process does."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.ranks import Ranks

PAGE = (Path(__file__).parents[2] / "docs" / "migrate.md").read_text()
SETUP, *BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
UNEVEN = BLOCKS.pop()  # the last one takes a gradient, not three steps


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train_alone(names: dict[str, Any], world: int) -> nn.Module:
    """The snippets' training in one process, on everybody's micro-batches."""
    torch.manual_seed(0)
    model = names["Net"]()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        for rank in range(world):
            for x in names["micro_batches"](step, rank):
                (names["mean_loss"](model, x) / (2 * world)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
    return model


def _run(block: str, world: int) -> tuple[float, str]:
    """One rank: the largest difference of any parameter from one process, and whose class the
    model is of.
    """
    names: dict[str, Any] = {"__name__": "snippet"}
    exec(compile(SETUP + block, "docs/migrate.md", "exec"), names)
    model, found = names["model"], {}
    if "FullyShardedDataParallel(" in block:
        with type(model).summon_full_params(model):
            found = {n: p.detach().clone() for n, p in model.named_parameters()}
    else:
        found = {n: whole(p).detach() for n, p in model.named_parameters()}
    found = {n.replace("_fsdp_wrapped_module.", ""): p for n, p in found.items()}
    worst = 0.0
    for name, expected in train_alone(names, world).named_parameters():
        worst = max(worst, float((found.pop(name) - expected.detach()).abs().max()))
    assert not found, f"more parameters than one process has: {list(found)}"
    return worst, type(model).__mro__[1].__module__


def _title(block: str) -> str:
    """The heading above a snippet."""
    return re.findall(r"^## (.*)$", PAGE[: PAGE.index(block)], re.MULTILINE)[-1]


PLAIN = [b for b in BLOCKS if "import Accelerator" not in b]


@pytest.mark.parametrize("block", PLAIN, ids=[f"{_title(b)} {i}" for i, b in enumerate(PLAIN)])
def test_a_snippet_trains_as_one_process(two: Ranks, block: str) -> None:
    for error, _ in two.run(_run, block, 2):
        assert error < 1e-4


def test_every_origin_has_a_snippet() -> None:
    told = {_title(block) for block in BLOCKS}
    assert told == {f"From {name}" for name in ("FSDP2", "FSDP1", "DDP", "DeepSpeed", "Accelerate")}


def _run_accelerate(block: str, port: int) -> tuple[float, str]:
    """Accelerate keeps its plugin from CPU ranks; all that follows its choice is as on GPUs."""
    import accelerate
    from accelerate.utils import DistributedType
    from torch import distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), ACCELERATE_USE_CPU="true")

    class OnCpu(accelerate.Accelerator):
        def __init__(self, fsdp_plugin: Any, **more: Any) -> None:
            super().__init__(fsdp_plugin=fsdp_plugin, cpu=True, **more)
            self.state.distributed_type = DistributedType.FSDP
            self.state.fsdp_plugin = fsdp_plugin

    accelerate.Accelerator = OnCpu
    return _run(block, world)


def test_accelerate_trains_as_one_process() -> None:
    """In processes of its own: Accelerate and the replaced names are global."""
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed (pip install shardwise[test])")
    (block,) = set(BLOCKS) - set(PLAIN)
    ranks = Ranks(2)
    try:
        for error, home in ranks.run(_run_accelerate, block, 29500):
            assert error < 1e-4
            assert home.startswith("shardwise.")
    finally:
        ranks.stop()


def _run_uneven() -> float:
    names: dict[str, Any] = {"__name__": "snippet"}
    exec(compile(SETUP + UNEVEN, "docs/migrate.md", "exec"), names)
    torch.manual_seed(0)
    alone = names["Net"]()
    rows = torch.randn(10, 16, generator=torch.Generator().manual_seed(7))
    names["mean_loss"](alone, rows).backward()
    pairs = zip(names["model"].parameters(), alone.parameters(), strict=True)
    return max(float((whole(p.grad) - q.grad).abs().max()) for p, q in pairs)


def test_uneven_tokens_weigh_as_in_one_process(two: Ranks) -> None:
    assert max(two.run(_run_uneven)) < 1e-6
