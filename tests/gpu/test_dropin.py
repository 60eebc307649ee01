"""The drop-in on one GPU, against torch's own engine from the same weights: gloo ranks with CUDA
tensors.

Needs no pytest where there is none: `python -m tests.gpu.test_dropin` runs the same cases.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as theirs
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise as ours
from tests.parity.models import Block
from tests.ranks import Ranks

try:
    import pytest
except ImportError:  # a GPU machine without test tools
    pytest = None  # type: ignore[assignment]

WIDTH, STEPS = 64, 4
BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
# Settings of a case: arguments of fully_shard, and what the loop does.
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "bf16": {"precision": BF16},
    "fp16": {"precision": {"param_dtype": torch.float16}},
    "kept": {"reshard_after_forward": False},
    "hsdp": {"mesh": (2, 1)},
    "hsdp-delayed": {"mesh": (2, 1), "micro": 3, "delays": True},
    "accumulated": {"micro": 3, "syncs_last": True},
    "accumulated-kept": {"micro": 3, "syncs_last": True, "keeps": True, "precision": BF16},
    "offloaded": {"offload": True},
    "offloaded-bf16": {"offload": True, "precision": BF16, "micro": 2},
    "prefetched": {"prefetch": True},
    "clipped": {"clip": 0.1},
    "buffers": {"buffers": 3, "precision": BF16},
}


class Net(nn.Module):
    """Blocks and a head, from one seed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(WIDTH, 2 * WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build(api: Any, settings: dict[str, Any]) -> Any:
    """A model on the GPU, wrapped by one engine."""
    model: Any = Net()
    shape = settings.get("mesh", (2,))
    mesh = init_device_mesh("cuda", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    arguments: dict[str, Any] = {"mesh": mesh}
    if "reshard_after_forward" in settings:
        arguments["reshard_after_forward"] = settings["reshard_after_forward"]
    if "precision" in settings:
        arguments["mp_policy"] = api.MixedPrecisionPolicy(**settings["precision"])
    if settings.get("offload"):
        arguments["offload_policy"] = api.CPUOffloadPolicy()
    for module in (*model.layers, model):
        api.fully_shard(module, **arguments)
    if settings.get("prefetch"):
        layers = list(model.layers)
        for i, layer in enumerate(layers):
            layer.set_modules_to_forward_prefetch(layers[i + 1 : i + 3])
            layer.set_modules_to_backward_prefetch(layers[max(0, i - 2) : i][::-1])
    if "buffers" in settings and hasattr(model, "set_reduce_scatter_max_input_buffers"):
        model.set_reduce_scatter_max_input_buffers(settings["buffers"])
    return model


def train(api: Any, settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The whole parameters after a few steps."""
    model = build(api, settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    micro = settings.get("micro", 1)
    for step in range(STEPS):
        for i in range(micro):
            last = i == micro - 1
            if settings.get("syncs_last"):
                model.set_requires_gradient_sync(last)
            if settings.get("delays"):
                model.set_requires_all_reduce(last)
            if settings.get("keeps"):
                model.set_reshard_after_backward(last)
            draw = torch.Generator().manual_seed(100 * step + 10 * i + dist.get_rank())
            x = torch.randn(8, WIDTH, generator=draw).cuda()
            model(x).float().square().mean().backward()
        if "clip" in settings:
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings["clip"])
        optimizer.step()
        optimizer.zero_grad()
    if api is ours:
        return {n: t.float().cpu() for n, t in ours.full_state_dict(model).items()}
    return {n: p.detach().full_tensor().float().cpu() for n, p in model.named_parameters()}


def run_case(settings: dict[str, Any]) -> float:
    """The largest difference between the engines, relative to each tensor's largest value."""
    torch.cuda.set_device(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    # torch 2.11 dies on a gloo group that shards CUDA tensors (and so does tensor parallel there);
    # replicas of one rank give the same numbers.
    expected = train(theirs, {**settings, "mesh": (2, 1)})
    found = train(ours, settings)
    assert found.keys() == expected.keys()
    return max(
        float((found[n] - e).abs().max() / e.abs().max().clamp(min=1e-12))
        for n, e in expected.items()
    )


# Both engines do the same arithmetic in the same order but for the division around sums in 16 bits.
BOUND, ROUNDED = 2e-6, 2e-2


def bound_of(settings: dict[str, Any]) -> float:
    return ROUNDED if "precision" in settings else BOUND


if pytest is not None:

    @pytest.mark.parametrize("name", CASES)
    def test_dropin_on_a_gpu(two: Ranks, name: str) -> None:
        assert max(two.run(run_case, CASES[name])) <= bound_of(CASES[name])


def main() -> int:
    ranks, failed = Ranks(2), 0
    for name, settings in CASES.items():
        began = time.perf_counter()
        try:
            worst = max(ranks.run(run_case, settings))
            good, said = worst <= bound_of(settings), f"{worst:.1e}"
        except Exception as error:
            good, said = False, str(error)[-1500:]
        failed += not good
        seconds = time.perf_counter() - began
        print(f"{'ok  ' if good else 'FAIL'} {name:20} {said} ({seconds:.1f} s)", flush=True)
    ranks.stop()
    print(f"{len(CASES) - failed} of {len(CASES)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
