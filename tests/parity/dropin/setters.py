"""The setters of a wrapped module: what each changes, and what it leaves alone."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.tensor import DTensor

from shardwise.engine.torch_private import ALL_GATHER, REDUCE_SCATTER
from tests.parity.dropin.catalog import Api, case
from tests.parity.dropin.common import (
    WIDTH,
    assert_same_gradients,
    assert_trains_alike,
    average_backward,
    batch,
    counting,
    grid,
    line,
    optimizers_of,
    raises,
    square_loss,
    twins,
)
from tests.parity.dropin.models import Stack, wrap

NEUTRAL: dict[str, Callable[[Any], Any]] = {
    "is_last_backward": lambda m: m.set_is_last_backward(True),
    "requires_gradient_sync": lambda m: m.set_requires_gradient_sync(True, recurse=False),
    "requires_all_reduce": lambda m: m.set_requires_all_reduce(True),
    "reshard_after_forward": lambda m: m.set_reshard_after_forward(True, recurse=False),
    "no_reshard_after_forward": lambda m: m.set_reshard_after_forward(False),
    "reshard_after_backward": lambda m: m.set_reshard_after_backward(True, recurse=True),
    "forward_prefetch_none": lambda m: m.set_modules_to_forward_prefetch([]),
    "backward_prefetch_none": lambda m: m.set_modules_to_backward_prefetch([]),
    "forward_prefetch_all": lambda m: m.set_modules_to_forward_prefetch(list(m.layers)),
    "divide_by_world": lambda m: m.set_gradient_divide_factor(2.0),
    "force_sum": lambda m: m.set_force_sum_reduction_for_comms(True),
    "unused": lambda m: m.set_reduce_scatter_unused_params(True, recurse=False),
    "buffers": lambda m: m.set_reduce_scatter_max_input_buffers(3),
    "unshard_in_backward": lambda m: m.set_unshard_in_backward(True),
    "allocate": lambda m: m.set_allocate_memory_from_process_group_for_comm(True),
    "do_not_allocate": lambda m: m.set_allocate_memory_from_process_group_for_comm(False),
}


@case(2, setter=tuple(NEUTRAL))
def neutral_values_change_nothing(api: Api, setter: str) -> None:
    """Settings that concern time and memory: set before the first step, the numbers stay."""
    alone, model = twins(Stack)
    wrap(api, model, mesh=line())
    assert NEUTRAL[setter](model) is None
    assert_trains_alike(model, alone)


@case(2)
def everything_is_set_between_steps(api: Api) -> None:
    alone, model = twins(Stack)
    wrap(api, model, mesh=line())
    opts = optimizers_of("sgd", model, alone)
    assert_trains_alike(model, alone, steps=1, optimizer=opts)
    for setter in NEUTRAL.values():
        setter(model)
    assert_trains_alike(model, alone, steps=2, optimizer=opts)


@case(2, factor=(1.0, 3.0, 8.0), recurse=(True, False))
def divide_factor(api: Api, factor: float, recurse: bool) -> None:
    """Only the module it is called on; sums are divided by it instead of the number of ranks."""
    alone, model = twins(Stack)
    wrap(api, model, mesh=line())
    parts = [model, *model.layers] if recurse else [model]
    for part in parts:
        part.set_force_sum_reduction_for_comms(True)
        part.set_gradient_divide_factor(factor)
    batches = [batch(0, i) for i in range(2)]
    average_backward(alone, batches)
    square_loss(model, batches[dist.get_rank()]).backward()
    for name, parameter in alone.named_parameters():
        if recurse or name.startswith("head"):
            parameter.grad *= 2 / factor
    assert_same_gradients(model, alone)


@case(4)
def divide_factor_of_replicas(api: Api) -> None:
    alone, model = twins(Stack)
    api.fully_shard(model, mesh=grid())
    model.set_force_sum_reduction_for_comms(True)
    model.set_gradient_divide_factor(1.0)
    batches = [batch(0, i) for i in range(4)]
    average_backward(alone, batches, share=1)
    square_loss(model, batches[dist.get_rank()]).backward()
    assert_same_gradients(model, alone)


@case(2)
def deprecated_divide_factor(api: Api) -> None:
    model = api.fully_shard(nn.Linear(WIDTH, WIDTH), mesh=line())
    model.set_force_sum_reduction_for_comms(True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.set_reduce_scatter_divide_factor(1.0)
    assert any("set_gradient_divide_factor" in str(w.message) for w in caught), caught
    model(torch.ones(2, WIDTH)).sum().backward()
    assert (model.weight.grad.to_local() == 4).all()


@case(2)
def sums_only_on_the_wire(api: Api) -> None:
    """`set_force_sum_reduction_for_comms`: no other operation is asked of the backend."""
    model = wrap(api, Stack(), mesh=line())
    for part in (model, *model.layers):
        part.set_force_sum_reduction_for_comms(True)
    asked: list[Any] = []
    original = getattr(dist, REDUCE_SCATTER)

    def watch(*args: Any, **kwargs: Any) -> Any:
        asked.append(kwargs.get("op", dist.ReduceOp.SUM))
        return original(*args, **kwargs)

    setattr(dist, REDUCE_SCATTER, watch)
    try:
        square_loss(model, batch(0, 0)).backward()
    finally:
        setattr(dist, REDUCE_SCATTER, original)
    assert len(asked) == 3 and all(op == dist.ReduceOp.SUM for op in asked), asked


@case(2, recurse=(True, False))
def reshard_after_forward_at_run_time(api: Api, recurse: bool) -> None:
    model = wrap(api, Stack(), mesh=line(), reshard_after_forward=True)
    model.set_reshard_after_forward(False, recurse=recurse)
    loss = square_loss(model, batch(0, 0))
    assert not isinstance(model.head.weight, DTensor)
    assert isinstance(model.layers[0].up.weight, DTensor) is not recurse
    loss.backward()
    model.set_reshard_after_forward(True)
    square_loss(model, batch(0, 0)).backward()
    square_loss(model, batch(0, 0))
    assert all(isinstance(p, DTensor) for p in model.parameters())


@case(2, shape=("line",))
@case(4, shape=("grid",))
def all_reduce_hook(api: Api, shape: str) -> None:
    """Called once per synced backward with the flat reduced gradient, which it may change."""
    alone, model = twins(Stack)
    on = line() if shape == "line" else grid()
    wrap(api, model, mesh=on)
    sizes: list[int] = []

    streams: list[Any] = []
    stream = torch.cpu.Stream() if shape == "line" else None

    def double(reduced: torch.Tensor) -> None:
        sizes.append(reduced.numel())
        streams.append(torch.cpu.current_stream())
        reduced.mul_(2)

    model.set_all_reduce_hook(double, stream=stream)
    world = dist.get_world_size()
    average_backward(alone, [batch(0, i) for i in range(world)])
    square_loss(model, batch(0, dist.get_rank())).backward()
    assert sizes == [sum(p.numel() for p in alone.head.parameters()) // 2], sizes
    assert stream is None or streams == [stream], streams
    assert torch.cpu.current_stream() is not stream or stream is None
    for parameter in alone.head.parameters():
        parameter.grad *= 2
    assert_same_gradients(model, alone)


class CountingGather(AllGather):
    def __init__(self) -> None:
        self.allocated = self.called = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.allocated += 1
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False
    ) -> Any:
        self.called += 1
        assert output_tensor.numel() == input_tensor.numel() * group.size()
        return getattr(dist, ALL_GATHER)(
            output_tensor, input_tensor, group=group, async_op=async_op
        )


class CountingScatter(ReduceScatter):
    def __init__(self) -> None:
        self.allocated = self.called = 0

    allocate = CountingGather.allocate

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        self.called += 1
        assert input_tensor.numel() == output_tensor.numel() * group.size()
        return getattr(dist, REDUCE_SCATTER)(
            output_tensor, input_tensor, group=group, op=op, async_op=async_op
        )


@case(2, low=(False, True))
def custom_communication(api: Api, low: bool) -> None:
    """The user's own calls are made, with memory the user allocated, and nothing besides."""
    alone, model = twins(Stack)
    policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16 if low else None)
    wrap(api, model, mesh=line(), mp_policy=policy, reshard_after_forward=True)
    gather, scatter = CountingGather(), CountingScatter()
    block = model.layers[0]
    block.set_custom_all_gather(gather)
    block.set_custom_reduce_scatter(scatter)
    for step in range(1, 3):
        with counting() as counted:
            square_loss(model, batch(0, 0)).backward()
        assert (gather.called, scatter.called) == (2 * step, step)
        assert counted.all == (6, 3, 0)
    assert gather.allocated >= 1 and scatter.allocated >= 1
    model.zero_grad()
    if not low:
        assert_trains_alike(model, alone)


@case(2, which=("set_custom_all_gather", "set_custom_reduce_scatter"))
def custom_communication_and_allocation(api: Api, which: str) -> None:
    model = api.fully_shard(nn.Linear(WIDTH, WIDTH), mesh=line())
    comm = CountingGather() if which == "set_custom_all_gather" else CountingScatter()
    getattr(model, which)(comm)
    with raises(AssertionError, "custom"):
        model.set_allocate_memory_from_process_group_for_comm(True)


@case(2)
def event_after_the_optimizer(api: Api) -> None:
    """A new event each iteration; gathers wait for it instead of for all work so far."""
    alone, model = twins(Stack)
    wrap(api, model, mesh=line())
    opts = optimizers_of("adamw", model, alone)
    for _ in range(2):
        assert_trains_alike(model, alone, steps=1, optimizer=opts)
        assert model.set_post_optim_event(torch.Event(device="cpu")) is None


@case(2)
def symmetric_memory_where_there_is_none(api: Api) -> None:
    """gloo on CPU has none: an error at once, not a setting without effect."""
    model = api.fully_shard(nn.Linear(WIDTH, WIDTH), mesh=line())
    with raises(RuntimeError, "(?i)symm"):
        model.set_symm_mem_for_comm()
