"""The tensor-parallel model that graphs are traced of computes what the whole model does."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist

from shardwise.description.preset import Preset
from shardwise.graph.tensor_parallel import TensorParallelLM
from tests.ranks import Ranks

SIZE = Preset("sample", "lm", d_model=32, d_ff=64, layers=2, heads=4, kv_heads=2, vocab=64)


def build(preset: Preset) -> torch.nn.Module:
    """With the same weights and rotary tables on every rank."""
    model = preset.build(16).to_empty(device="cpu")
    torch.manual_seed(3)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.copy_(torch.randn_like(tensor) * 0.3)
    return model


def compare(tied: bool) -> tuple[float, float, dict[str, float]]:
    preset = dataclasses.replace(SIZE, tied=tied)
    torch.manual_seed(5)
    tokens, targets = torch.randint(0, 64, (2, 2, 16))
    whole = build(preset)
    loss = whole(tokens, targets)
    loss.backward()
    ranks, rank = dist.get_world_size(), dist.get_rank()
    assert dist.group.WORLD is not None
    cut = TensorParallelLM(build(preset), ranks, dist.group.WORLD.group_name, rank)
    own = cut(tokens, targets)
    own.backward()
    wrong = {}
    expected = {name: p.grad for name, p in whole.named_parameters()}
    for name, p in cut.named_parameters():
        assert p.grad is not None
        full = expected[name.replace(".inner", "")]
        assert full is not None
        if p.shape == full.shape:  # a norm: each rank has its slice of the sequence
            dist.all_reduce(p.grad)
        else:
            dim = next(i for i in range(p.dim()) if p.shape[i] != full.shape[i])
            full = full.chunk(ranks, dim)[rank]
        wrong[name] = float((p.grad - full).norm() / full.norm())
    return float(loss.detach()), float(own.detach()), wrong


def test_loss_and_gradients_are_the_whole_model_s(two: Ranks) -> None:
    for tied in (False, True):
        for loss, own, wrong in two.run(compare, tied):
            assert abs(own / loss - 1) < 1e-5
            assert max(wrong.values()) < 1e-4, wrong
