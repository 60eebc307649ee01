"""Mixed precision: what is computed, reduced and kept in which dtype."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

from tests.parity.dropin.catalog import Api, case
from tests.parity.dropin.common import (
    BOUND,
    WIDTH,
    assert_close,
    assert_same_gradients,
    assert_same_parameters,
    assert_trains_alike,
    batch,
    grid,
    line,
    lowered_backward,
    optimizers_of,
    square_loss,
    twins,
)
from tests.parity.dropin.models import Stack, wrap

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def _train_lowered(
    model: Any, alone: Any, dtype: torch.dtype, reduce: torch.dtype, micro: int = 1
) -> None:
    """Against the same arithmetic in one process; the last of `micro` backwards syncs."""
    rank, world = dist.get_rank(), dist.get_world_size()
    opts = optimizers_of("momentum", model, alone)
    for step in range(2):
        batches = [batch(step, i) for i in range(micro * world)]
        for first in range(micro):
            lowered_backward(alone, batches[first::micro], dtype, reduce)
        for index, x in enumerate(batches[rank * micro : (rank + 1) * micro]):
            model.set_requires_gradient_sync(index == micro - 1)
            square_loss(model, x).backward()
        assert all(p.dtype == p.grad.dtype == FP32 for p in model.parameters())
        assert_same_gradients(model, alone)
        for opt in opts:
            opt.step()
            opt.zero_grad()
    assert_same_parameters(model, alone)


@case(2, dtype=(BF16,), reduce=(FP32, None), reshard=(True, False))
@case(2, dtype=(FP16,), reduce=(FP32,), reshard=(True,))
def mixed(api: Api, dtype: torch.dtype, reduce: Any, reshard: bool) -> None:
    """Two ranks: also sums in 16 bits are the oracle's, bit for bit."""
    alone, model = twins(Stack)
    policy = api.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce)
    wrap(api, model, mesh=line(), mp_policy=policy, reshard_after_forward=reshard)
    _train_lowered(model, alone, dtype, reduce or dtype)


@case(4)
def mixed_on_replicas(api: Api) -> None:
    alone, model = twins(Stack)
    policy = api.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    wrap(api, model, mesh=grid(), mp_policy=policy)
    _train_lowered(model, alone, BF16, FP32)


@case(2)
def mixed_accumulation(api: Api) -> None:
    """Unsynced gradients are added up in the reduce dtype, not in 16 bits."""
    alone, model = twins(Stack)
    policy = api.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    wrap(api, model, mesh=line(), mp_policy=policy)
    _train_lowered(model, alone, BF16, FP32, micro=3)


@case(2)
def reduced_lower_than_computed(api: Api) -> None:
    """fp32 compute, bf16 reduce: only the sum on the wire loses bits."""
    alone, model = twins(Stack)
    wrap(api, model, mesh=line(), mp_policy=api.MixedPrecisionPolicy(reduce_dtype=BF16))
    lowered_backward(alone, [batch(0, i) for i in range(2)], FP32, BF16)
    square_loss(model, batch(0, dist.get_rank())).backward()
    assert_same_gradients(model, alone)


@case(2, output=(FP32, BF16, None))
def output_dtype(api: Api, output: Any) -> None:
    model = twins(Stack)[0]
    policy = api.MixedPrecisionPolicy(param_dtype=BF16, output_dtype=output)
    api.fully_shard(model, mesh=line(), mp_policy=policy)
    assert model(batch(0, 0)).dtype == (output or BF16)
    with torch.no_grad():
        assert model(batch(0, 0)).dtype == (output or BF16)


class Structured(nn.Module):
    """Returns what it was given and what it made of it, in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, *, more: dict[str, Any]) -> dict[str, Any]:
        seen = [x.dtype, more["float"].dtype, more["int"].dtype, self.fc.weight.dtype]
        y = self.fc(x.to(self.fc.weight.dtype))
        return {"y": y, "list": [y * 2, more["int"]], "seen": seen}


@case(2, casting=(True, False))
def inputs_are_cast_or_not(api: Api, casting: bool) -> None:
    """Floating tensors in args and kwargs are cast before forward, integers never."""
    model = Structured()
    policy = api.MixedPrecisionPolicy(
        param_dtype=BF16, output_dtype=FP32, cast_forward_inputs=casting
    )
    api.fully_shard(model, mesh=line(), mp_policy=policy)
    out = model(batch(0, 0), more={"float": torch.ones(2), "int": torch.ones(2, dtype=torch.long)})
    expected = BF16 if casting else FP32
    assert out["seen"] == [expected, expected, torch.long, BF16], out["seen"]
    assert out["y"].dtype == out["list"][0].dtype == FP32
    assert out["list"][1].dtype == torch.long


@case(2)
def policies_per_module(api: Api) -> None:
    """The first block in bf16, the rest in fp32; the block's output comes back in fp32."""
    alone, model = twins(Stack)
    low = api.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32, output_dtype=FP32)
    api.fully_shard(model.layers[0], mesh=line(), mp_policy=low)
    api.fully_shard(model, mesh=line())
    seen: list[torch.dtype] = []
    model.layers[0].up.register_forward_hook(lambda m, i, o: seen.append(o.dtype))
    model.layers[1].up.register_forward_hook(lambda m, i, o: seen.append(o.dtype))

    def run(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if m is model:
            return m(x).square().mean()
        lowered = {n: p.to(BF16) for n, p in alone.layers[0].named_parameters()}
        x = functional_call(alone.layers[0], lowered, (x.to(BF16),)).float()
        return alone.head(alone.layers[1](x)).square().mean()

    assert_trains_alike(model, alone, loss=run, optimizer="momentum")
    assert seen == [BF16, FP32] * 2, seen


@case(2)
def parameters_are_low_only_inside_forward(api: Api) -> None:
    model = twins(Stack)[0]
    wrap(api, model, "root", mesh=line(), mp_policy=api.MixedPrecisionPolicy(param_dtype=BF16))
    inside: list[torch.dtype] = []
    model.head.register_forward_pre_hook(lambda m, args: inside.append(m.weight.dtype))
    assert {p.dtype for p in model.parameters()} == {FP32}
    square_loss(model, batch(0, 0)).backward()
    assert inside == [BF16]
    assert {p.dtype for p in model.parameters()} == {FP32}
    assert {p.grad.dtype for p in model.parameters()} == {FP32}


@case(2)
def low_parameters_from_the_start(api: Api) -> None:
    """A bf16 model without a policy: bf16 everywhere."""
    alone, model = twins(lambda: Stack().to(BF16))
    wrap(api, model, mesh=line())
    lowered_backward(alone, [batch(0, i) for i in range(2)], BF16, BF16)
    square_loss(model, batch(0, dist.get_rank()).to(BF16)).backward()
    assert {p.grad.dtype for p in model.parameters()} == {BF16}
    assert_same_gradients(model, alone)


@case(2)
def frozen_and_mixed(api: Api) -> None:
    alone, model = twins(Stack)
    for each in (alone, model):
        each.layers[0].requires_grad_(False)
    policy = api.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    wrap(api, model, mesh=line(), mp_policy=policy)
    square_loss(model, batch(0, dist.get_rank())).backward()
    assert all(p.grad is None for p in model.layers[0].parameters())
    assert {p.grad.dtype for p in model.head.parameters()} == {FP32}
    with torch.no_grad():
        low = {n: p.to(BF16) for n, p in alone.named_parameters()}
        expected = functional_call(alone, low, (batch(0, 0).to(BF16),))
    assert_close(model(batch(0, 0)).detach(), expected, "output", BOUND)


@case(2)
def buffers_keep_their_dtype(api: Api) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, affine=False))
    api.fully_shard(model, mesh=line(), mp_policy=api.MixedPrecisionPolicy(param_dtype=BF16))
    with torch.no_grad():
        model(batch(0, 0))
    assert model[1].running_mean.dtype == FP32


@case(2)
def policies_are_values(api: Api) -> None:
    """Defaults, equality and immutability of the policy classes."""
    policy = api.MixedPrecisionPolicy()
    assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == (None, None, None)
    assert policy.cast_forward_inputs is True
    assert policy == api.MixedPrecisionPolicy() != api.MixedPrecisionPolicy(param_dtype=BF16)
    try:
        policy.param_dtype = BF16
    except AttributeError:
        pass
    else:
        raise AssertionError("MixedPrecisionPolicy can be changed")
    assert api.CPUOffloadPolicy().pin_memory is True
    assert isinstance(api.CPUOffloadPolicy(), api.OffloadPolicy)
