"""Parameters that are tensor subclasses and say themselves what travels in the all-gather."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map

from tests.parity.dropin.catalog import Api, case
from tests.parity.dropin.common import (
    WIDTH,
    assert_close,
    batch,
    counting,
    grid,
    line,
    square_loss,
    twins,
)

ROWS = 16


class Bare(torch.Tensor):
    """A tensor inside another; every operation is done on the inner one."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Bare:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=inner.device,
            requires_grad=inner.requires_grad,
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.inner})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict, meta: None, size: Any, stride: Any) -> Bare:
        return cls(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_map(lambda x: x.inner if isinstance(x, Bare) else x, (args, kwargs or {}))
        out = func(*given[0], **given[1])
        if func._schema.name.endswith("_"):
            return args[0]
        return tree_map(lambda x: cls(x) if isinstance(x, torch.Tensor) else x, out)


class Wrapped(Bare):
    """One that says what it is whole."""

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        assert metadata == "a note", metadata
        whole = self.restore(*outputs).to(param_dtype)
        if out is None:
            return whole, (whole,)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(whole)
        return None


class Rounded(Wrapped):
    """Travels as bf16."""

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        assert isinstance(module, nn.Linear) and mesh.ndim == 1
        assert tuple(outer_size) == (ROWS, WIDTH) and tuple(outer_stride) == (WIDTH, 1)
        assert hasattr(mp_policy, "param_dtype")
        return (self.inner.to(torch.bfloat16),), "a note"

    @staticmethod
    def restore(data: torch.Tensor) -> torch.Tensor:
        assert data.dtype == torch.bfloat16
        return data


class Scaled(Wrapped):
    """Travels as 8-bit integers and one scale per row: two tensors of different dtypes."""

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        scale = self.inner.abs().amax(dim=1, keepdim=True) / 127
        return ((self.inner / scale).round().to(torch.int8), scale), "a note"

    @staticmethod
    def restore(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        assert data.dtype == torch.int8 and scale.shape == (data.shape[0], 1)
        return data.float() * scale


def _seen_by_compute(kind: type[Wrapped], value: torch.Tensor) -> torch.Tensor:
    if kind is Rounded:
        return value.to(torch.bfloat16).float()
    scale = value.abs().amax(dim=1, keepdim=True) / 127
    return (value / scale).round() * scale


KINDS = {"rounded": Rounded, "scaled": Scaled}
WIRE = {"rounded": ROWS * WIDTH * 2, "scaled": ROWS * WIDTH + ROWS * 4}


@case(2, kind=tuple(KINDS), reshard=(True, False), shape=("line",))
@case(4, kind=("rounded",), reshard=(True,), shape=("grid",))
def extended_parameters(api: Api, kind: str, reshard: bool, shape: str) -> None:
    """The wire carries what the parameter says; gradients and the optimizer see fp32."""
    alone, model = twins(nn.Linear, WIDTH, ROWS, bias=False)
    model.weight = nn.Parameter(KINDS[kind](model.weight.detach().clone()))
    root = nn.Sequential(nn.Linear(WIDTH, WIDTH), model)
    root[0].requires_grad_(False)
    nn.init.eye_(root[0].weight)
    nn.init.zeros_(root[0].bias)
    on = line() if shape == "line" else grid()
    api.fully_shard(model, mesh=on, reshard_after_forward=reshard)
    api.fully_shard(root, mesh=on)
    assert isinstance(model.weight, DTensor) and model.weight.placements[-1] == Shard(0)
    assert isinstance(model.weight.to_local(), KINDS[kind])
    value = alone.weight.detach().clone()
    world = dist.get_world_size()
    opt = torch.optim.SGD([model.weight], lr=0.1)
    for step in range(3):
        batches = [batch(step, i) for i in range(world)]
        leaf = _seen_by_compute(KINDS[kind], value).requires_grad_()
        for x in batches:
            ((x @ leaf.t()).square().mean() / world).backward()
        with counting() as counted:
            square_loss(root, batches[dist.get_rank()]).backward()
        assert any(n == WIRE[kind] for _, _, n in counted.of("gather")), counted.calls
        grad = model.weight.grad
        assert isinstance(grad, DTensor) and grad.dtype == torch.float32
        index = dist.get_rank() % 2
        got = grad.to_local()
        got = got.inner if isinstance(got, Wrapped) else got
        assert_close(got, leaf.grad.chunk(2)[index], f"gradient in step {step}")
        opt.step()
        opt.zero_grad()
        value -= 0.1 * leaf.grad
        assert_close(model.weight.to_local().inner, value.chunk(2)[index], "value")


class Cropped(Wrapped):
    """Travels as fp16, and leaves out the rows that only fill up."""

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        return (self.inner.half(),), "a note"

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        whole = outputs[0].to(param_dtype)
        if out is None:
            return whole, (whole,)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(whole[: out.shape[0]])
        return None


@case(2, engines=("shardwise",))
def uneven_rows_cast_after_sharding(api: Api) -> None:
    """The second rank's rows are filled up before a cast and after it. (torch's extension has to
    do that itself.)
    """
    alone, model = twins(nn.Linear, WIDTH, 5, bias=False)
    model.weight = nn.Parameter(Cropped(model.weight.detach().clone()))
    api.fully_shard(model, mesh=line())
    for dtype in (torch.float32, torch.float64):
        model.to(dtype)
        alone.to(dtype)
        x = batch(0, 0).to(dtype)
        expected = x @ alone.weight.detach().half().to(dtype).t()
        assert_close(model(x), expected, f"output in {dtype}")
        model(x).sum().backward()
        assert model.weight.dtype == model.weight.grad.dtype == dtype
        model.zero_grad()


@case(2)
def one_half_of_an_extension(api: Api) -> None:
    """Both functions, or none."""

    class Half(Rounded):
        fsdp_post_all_gather = property()  # looks absent

    module = nn.Linear(WIDTH, ROWS, bias=False)
    module.weight = nn.Parameter(Half(module.weight.detach().clone()))
    try:
        api.fully_shard(module, mesh=line())
    except AssertionError as error:
        assert "fsdp_pre_all_gather and fsdp_post_all_gather" in str(error), error
    else:
        raise AssertionError("half an extension was accepted")


@case(2, rows=(ROWS, 5), reshard=(True, False))
def hooks_attached_after_wrapping(api: Api, rows: int, reshard: bool) -> None:
    """To the local tensor that users see: they are called from the first gather on, the second of
    them first without `out`. The parameters that an optimizer has already are those it trains.
    """
    alone, model = twins(lambda: nn.Sequential(nn.Linear(WIDTH, rows), nn.Linear(rows, 3)))
    api.fully_shard(model[0], mesh=line(), reshard_after_forward=reshard)
    api.fully_shard(model, mesh=line())
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    called: list[Any] = []

    def before(
        self: torch.Tensor, on: Any, size: Any, stride: Any, module: Any, policy: Any
    ) -> Any:
        assert not torch.is_grad_enabled() and module is model[0]
        assert tuple(size) == (rows, WIDTH) and tuple(stride) == (WIDTH, 1)
        called.append("before")
        sent = torch.zeros((rows + 1) // 2, WIDTH, dtype=torch.bfloat16)
        sent[: self.shape[0]].copy_(self)
        return (sent,), "a note"

    def after(self: torch.Tensor, outputs: Any, note: Any, dtype: Any, *, out: Any = None) -> Any:
        assert note == "a note" and outputs[0].dtype == torch.bfloat16
        called.append("after" if out is None else "after, out")
        if out is None:
            whole = outputs[0].to(dtype)
            return whole, (outputs[0], whole)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(outputs[0][:rows])
        return None

    local = model[0].weight._local_tensor
    local.fsdp_pre_all_gather = before.__get__(local)
    local.fsdp_post_all_gather = after.__get__(local)
    leaves = dict(alone.named_parameters())
    world, again = dist.get_world_size(), ["before", "after, out"]
    for step in range(3):
        seen = {n: p.detach().clone().requires_grad_() for n, p in leaves.items()}
        with torch.no_grad():
            seen["0.weight"].copy_(leaves["0.weight"].to(torch.bfloat16))
        batches = [batch(step, i) for i in range(world)]
        for x in batches:
            out = torch.func.functional_call(alone, seen, (x,))
            (out.float().square().mean() / world).backward()
        square_loss(model, batches[dist.get_rank()]).backward()
        forward = ["before", "after"] if step == 0 else again
        assert called == (forward + again if reshard else forward), called
        called.clear()
        for name, parameter in model.named_parameters():
            assert_close(parameter.grad, seen[name].grad, f"gradient of {name} in step {step}")
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            for name, leaf in leaves.items():
                leaf -= 0.1 * seen[name].grad
    for name, parameter in model.named_parameters():
        assert_close(parameter, leaves[name], name)


@case(2)
def a_tensor_class_without_hooks(api: Api) -> None:
    """Its local tensor keeps its class; what the class is given later counts."""
    alone, model = twins(nn.Linear, WIDTH, ROWS, bias=False)
    alone.weight.data = alone.weight.data.to(torch.bfloat16).float()

    class Later(Bare):
        pass

    model.weight = nn.Parameter(Later(model.weight.detach().clone()))
    api.fully_shard(model, mesh=line())
    assert isinstance(model.weight.to_local(), Later)
    Later.fsdp_pre_all_gather = lambda self, on: ((self.inner.to(torch.bfloat16),), "a note")
    Later.fsdp_post_all_gather = Rounded.fsdp_post_all_gather
    Later.restore = staticmethod(Rounded.restore)
    assert_close(model(batch(0, 0)), alone(batch(0, 0)), "output")
    model(batch(0, 0)).sum().backward()
    assert model.weight.grad is not None
