"""Fewer bytes on the wire, on real gloo ranks: gradients that travel as 16 bits and are added in
32, parameters that travel as codes; against one process that rounds as often.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.engine.engine import engine_of
from shardwise.engine.quantised import decode, encode
from shardwise.planning.blocks import CODES
from tests.parity.models import build, token_batch
from tests.parity.oracle import MAX_NORM, OPTIMIZERS, STEPS, add_gradients, difference, indices
from tests.parity.test_parity import BOUND
from tests.parity.training import train_sharded
from tests.ranks import Ranks

BF16 = torch.bfloat16
SUMS: dict[str, Any] = {"reduce_dtype": "bfloat16", "sum_dtype": "float32"}


def _rounded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(BF16).to(tensor.dtype)


def train_rounding(
    kind: str, counts: tuple[int, ...], shard: int, last: bool, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """One process that adds what every rank would send: the gradients of each of its micro-batches,
    or their sum if it reduces at the `last`, rounded; then, among replicas of `shard` ranks, the
    sums of each rounded, and the sum of all rounded.
    """
    model = build(kind)
    opt = OPTIMIZERS["sgd"](model.parameters())
    parameters = [p for p in model.parameters() if p.requires_grad]
    for step in range(STEPS):
        total = sum(token_batch(step, i).numel() for i in indices(counts))
        groups: list[list[Any]] = [[None] * len(parameters) for _ in range(len(counts) // shard)]
        for rank in range(len(counts)):
            mine = [token_batch(step, i) for i in indices(counts, rank)]
            for batches in [mine] if last else [[tokens] for tokens in mine]:
                opt.zero_grad()
                for tokens in batches:
                    add_gradients(model, tokens, total, dtype)
                sums = groups[rank // shard]
                for i, p in enumerate(parameters):
                    if p.grad is not None:
                        # Replicas of one rank send nothing before the exchange of replicas.
                        sent = p.grad if shard == 1 else _rounded(p.grad)
                        sums[i] = sent if sums[i] is None else sums[i] + sent
        for i, p in enumerate(parameters):
            each = [sums[i] for sums in groups if sums[i] is not None]
            if len(groups) > 1 and each:
                p.grad = _rounded(torch.stack([_rounded(g) for g in each]).sum(0))
            else:
                p.grad = each[0] if each else None
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        opt.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


# What runs on so many ranks: strategy, sync, compute dtype.
CASES = {
    2: [
        ("zero3", "each", "bfloat16"),
        ("zero2", "last", "float32"),
        ("zero1", "each", "float32"),
        ("ddp", "last", "float32"),
    ],
    4: [
        ("zero3", "each", "float32"),
        ("ddp", "each", "bfloat16"),
        ("hsdp", "scatter_each_reduce_last", "float32"),
    ],
}


def _compare_sums() -> dict[str, float]:
    """How far each strategy is from one process that rounds as often."""
    kind, world, found = "odd", dist.get_world_size(), {}
    for i, (name, sync, dtype) in enumerate(CASES[world]):
        mesh = (2, world // 2) if name == "hsdp" else world
        shard = {"ddp": 1, "hsdp": world // 2}.get(name, world)
        # All-reduces of every micro-batch would be rounded so often.
        micro = 1 if (name, sync) == ("ddp", "each") else 2
        settings = {**SUMS, "sync": sync, "compute_dtype": dtype}
        if i % 2:
            settings["memory"] = "arena"
        counts = (micro,) * world
        got = train_sharded(kind, name, mesh, "sgd", counts, settings)
        alone = train_rounding(kind, counts, shard, sync == "last", getattr(torch, dtype))
        found[f"{name} {sync} {dtype}"] = difference(got, alone)
        gathered: list[Any] = [None] * world
        dist.all_gather_object(gathered, {k: v.double().sum().item() for k, v in got.items()})
        assert all(each == gathered[0] for each in gathered), f"{name}: ranks differ"
    return found


def test_16_bit_gradients_are_added_in_32_on_two_ranks(two: Ranks) -> None:
    for found in two.run(_compare_sums):
        assert max(found.values()) < BOUND, found


def test_16_bit_gradients_are_added_in_32_on_four_ranks(four: Ranks) -> None:
    for found in four.run(_compare_sums):
        assert max(found.values()) < BOUND, found


# Quantised gathers


def _as_codes(parameter: torch.Tensor, ranks: int, code: str) -> torch.Tensor:
    """A parameter as ranks that gather codes compute with it, block after block."""
    if parameter.ndim < 2:
        return parameter
    most, rows = (448.0 if code == "float8_e4m3fn" else 127.0), -(-len(parameter) // ranks)
    found = []
    for part in parameter.split(rows):
        for block in part.flatten().split(256):
            scale = block.abs().max() / most
            scaled = block / (scale if scale > 0 else 1.0)
            if code == "int8":
                found.append((scaled + 0.5).floor().to(torch.int8).float() * scale)
            else:
                found.append(scaled.to(torch.float8_e4m3fn).float() * scale)
    return torch.cat(found).view_as(parameter)


def train_coded(kind: str, counts: tuple[int, ...], ranks: int, code: str) -> dict[str, Any]:
    """One process whose forward sees codes, and whose gradients go to the parameters themselves."""
    model = build(kind)
    opt = OPTIMIZERS["sgd"](model.parameters())
    for step in range(STEPS):
        batches = [token_batch(step, i) for i in indices(counts)]
        masters = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                if p.is_floating_point():
                    p.copy_(_as_codes(p, ranks, code))
        opt.zero_grad()
        total = sum(tokens.numel() for tokens in batches)
        for tokens in batches:
            add_gradients(model, tokens, total, torch.float32)
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters, strict=True):
                p.copy_(master)
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        opt.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _compare_codes(codes: tuple[str, ...]) -> dict[str, float]:
    world, found = dist.get_world_size(), {}
    counts = (2,) * world
    names = ["zero3", *(["hsdp"] if world == 4 else [])]
    for i, (code, name) in enumerate((code, name) for code in codes for name in names):
        mesh = (2, world // 2) if name == "hsdp" else world
        settings: dict[str, Any] = {"gather_dtype": code}
        settings["keep_last"] = 2 - i % 2
        if i % 2:
            settings |= {"memory": "arena", "keep_after_forward": False}
        if name == "zero3" and world == 4:
            settings |= {"keep_after_forward": 2, "keep_last": 0}
        got = train_sharded("odd", name, mesh, "sgd", counts, settings)
        shard = world // 2 if name == "hsdp" else world
        found[f"{name} {code}"] = difference(got, train_coded("odd", counts, shard, code))
    return found


def test_ranks_that_gather_codes_train_as_one_process_that_computes_with_them(
    two: Ranks, four: Ranks
) -> None:
    for ranks, codes in ((two, tuple(CODES)), (four, ("int8",))):
        for found in ranks.run(_compare_codes, codes):
            assert max(found.values()) < BOUND, found


class Seen(nn.Linear):
    """A root unit that notes what it computed with."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.weight.detach().clone()
        return super().forward(x)


def _look_at_masters() -> tuple[bool, bool, bool, int]:
    """Whether ranks compute with the same values, whether those are not the masters', whether what
    is saved and written back is exact; and the bytes of a gather.
    """
    torch.manual_seed(0)
    model = Seen(64, 40)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sw.shard(model, sw.Plan.of("zero3", 2, gather_dtype="int8"))
    with torch.no_grad(), sw.record() as log:
        model(torch.ones(2, 64))
    both: list[Any] = [None, None]
    dist.all_gather_object(both, model.seen)
    coded = not torch.equal(model.seen, before["weight"])
    # The root stays gathered: what is written there reaches the masters, and only that.
    model(torch.ones(2, 64))
    unit = engine_of(model).units[0]
    assert unit.is_current
    model.weight.data[33, 3] = 7.0
    unit.next_gather.take_back()
    unit.free()
    after = sw.full_state_dict(model)
    before["weight"][33, 3] = 7.0
    exact = all(torch.equal(after[name], before[name]) for name in before)
    return torch.equal(*both), coded, exact, int(log.calls[0].nbytes)


def test_codes_are_alike_on_all_ranks_and_masters_stay_exact(two: Ranks) -> None:
    for alike, coded, exact, nbytes in two.run(_look_at_masters):
        assert alike and coded and exact
        # 1,280 codes in 5 blocks and 20 biases on each rank, every section on 16 bytes.
        assert nbytes == 2 * (32 + 80 + 1280)


@pytest.mark.parametrize("code", list(CODES))
def test_codes_of_strange_values(code: str) -> None:
    values = torch.randn(700) * torch.logspace(-9, 9, 700)
    values[256:512] = 0.0
    values[10], values[690] = float("nan"), float("inf")
    codes, scales = encode(values, getattr(torch, code))
    back = decode(codes.view(1, -1), scales.view(1, -1))[0]
    assert back[:256].isnan().all() and back[512:].isnan().all()
    assert (back[256:512] == 0).all()
    good = torch.randn(1000).where(torch.rand(1000) > 0.2, 0.0)
    codes, scales = encode(good, getattr(torch, code))
    back = decode(codes.view(1, -1), scales.view(1, -1))[0]
    largest = torch.stack([block.abs().max() for block in good.split(256)]).repeat_interleave(256)
    step = largest[:1000] / 127 if code == "int8" else good.abs() / 8 + largest[:1000] / 448 / 64
    assert ((back - good).abs() <= step / 2 * 1.001).all()


KERNELS = """
import torch
from shardwise.engine.quantised import QuantisedGather
from shardwise.engine.quantised_kernels import Kernels
from shardwise.planning.rows import lay_out

class Three:
    size, rank = 3, 1

layout = lay_out([(10, 33), (17,), (100, 64), (), (7, 3)], 3)
full = torch.zeros(layout.full_numel)
gather = QuantisedGather(torch.int8, Three, layout, torch.zeros(layout.shard_numel), full)
found = []
for kernels in (None, Kernels(gather.message, torch.int8, torch.device("cpu"))):
    gather._kernels = kernels
    messages = torch.zeros(3, gather.message.nbytes, dtype=torch.uint8)
    for rank in range(3):
        gather.source.copy_(torch.arange(layout.shard_numel).add(rank).sin())
        gather.source[rank::400] = float("nan")
        gather._write(messages[rank])
    gather._read(messages, full.zero_(), gather.parts, whole=True)
    found.append((messages.clone(), full.nan_to_num(9.0), *gather._pieces_as_gathered()[:1]))
print(all(map(lambda a, b: torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0)), *found)))
"""


def test_kernels_write_and_read_what_the_host_does() -> None:
    """Interpreted: a GPU's tests run them as they are."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("no Triton here")
    told = subprocess.run(
        [sys.executable, "-c", KERNELS],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert told.stdout.strip() == "True", told.stderr
