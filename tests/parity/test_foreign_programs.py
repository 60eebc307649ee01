"""Training programs as others write them, under every strategy and through the drop-in, beside one
process that has all ranks' rows in one batch.
"""

from __future__ import annotations

import copy
import dataclasses
import io
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import shardwise as sw
from tests.ranks import Ranks

WIDTH = 12
Wrap = Callable[[nn.Module], nn.Module]
Program = Callable[[Wrap, list[int]], tuple[nn.Module, list[torch.Tensor]]]
PROGRAMS: dict[str, Program] = {}


def program(function: Program) -> Program:
    """`function(wrap, ranks)` trains on the rows of these ranks; the model, and what it gave."""
    PROGRAMS[function.__name__] = function
    return function


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def rows(step: int, ranks: list[int], width: int = WIDTH) -> torch.Tensor:
    seeds = (torch.Generator().manual_seed(1000 * step + rank + 1) for rank in ranks)
    return torch.cat([torch.randn(3, width, generator=seed) for seed in seeds])


def tokens(step: int, ranks: list[int]) -> torch.Tensor:
    seeds = (torch.Generator().manual_seed(1000 * step + rank + 1) for rank in ranks)
    return torch.cat([torch.randint(0, 16, (3, 6), generator=seed) for seed in seeds])


def blocks() -> Any:
    return nn.Sequential(Block(), Block(), Block(), nn.Linear(WIDTH, 4))


def train(
    optimizer: torch.optim.Optimizer,
    loss: Callable[[int], torch.Tensor],
    after: Callable[[int], object] = lambda step: None,
    steps: int = 4,
) -> None:
    for step in range(steps):
        loss(step).backward()
        optimizer.step()
        optimizer.zero_grad()
        after(step)


@program
def weight_and_spectral_norm(wrap: Wrap, ranks: list[int]) -> Any:
    model = blocks()
    nn.utils.parametrizations.weight_norm(model[0].up)
    nn.utils.parametrizations.spectral_norm(model[1].up)
    nn.utils.parametrizations.orthogonal(model[2].up)
    model = wrap(model)
    opt = torch.optim.Adam(model.parameters(), 1e-2)
    train(opt, lambda step: model(rows(step, ranks)).square().mean())
    return model, []


class Adapter(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down.t() @ self.up.t()


@program
def adapters_merged_between_steps(wrap: Wrap, ranks: list[int]) -> Any:
    model = blocks().requires_grad_(False)
    for block in model[:3]:
        block.up = Adapter(block.up)
    model = wrap(model)
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)

    @torch.no_grad()
    def merge(step: int) -> None:
        for block in model[:3] if step == 1 else ():  # type: ignore[index]
            block.up.base.weight.add_(block.up.up @ block.up.down)
            block.up.up.zero_()

    train(opt, lambda step: model(rows(step, ranks)).square().mean(), merge)
    return model, []


@program
def an_average_that_teaches(wrap: Wrap, ranks: list[int]) -> Any:
    model = wrap(blocks())
    teacher = copy.deepcopy(model).eval().requires_grad_(False)
    opt = torch.optim.SGD(model.parameters(), 0.1)
    seen: list[torch.Tensor] = []

    @torch.no_grad()
    def follow(step: int) -> None:
        for theirs, ours in zip(teacher.parameters(), model.parameters(), strict=True):
            theirs.lerp_(ours.detach(), 0.3)
        seen.append(teacher(rows(99, [0])))

    def loss(step: int) -> torch.Tensor:
        x = rows(step, ranks)
        return (model(x) - teacher(x)).square().mean() + model(x).mean()

    train(opt, loss, follow)
    return model, seen


@program
def groups_that_thaw_with_schedulers(wrap: Wrap, ranks: list[int]) -> Any:
    model: Any = blocks()
    model[:2].requires_grad_(False)
    model = wrap(model)
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    warm_up = torch.optim.lr_scheduler.LinearLR(opt, 0.1, 1, 2)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 4)
    scheduler = torch.optim.lr_scheduler.SequentialLR(opt, [warm_up, cosine], [2])

    def after(step: int) -> None:
        scheduler.step()
        if step in (1, 3):
            part = model[2 - (step + 1) // 2]
            part.requires_grad_(True)
            opt.add_param_group({"params": list(part.parameters()), "lr": 1e-3, "initial_lr": 1e-3})
            scheduler._schedulers[1].base_lrs.append(1e-3)
            scheduler._schedulers[0].base_lrs.append(1e-3)
        if step == 3:
            model[3].requires_grad_(False)
        if step == 4:
            opt.param_groups[0]["lr"] = 5e-3

    train(opt, lambda step: model(rows(step, ranks)).square().mean(), after, steps=6)
    return model, []


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight = ctx.saved_tensors
        return gradients[0] @ weight, gradients[0].t() @ x


class Multiplied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.eye(WIDTH) * 0.3), nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Product.apply(x, self.weight) * self.scale


@program
def a_function_that_saves_parameters(wrap: Wrap, ranks: list[int]) -> Any:
    model = wrap(nn.Sequential(Multiplied(), nn.Tanh(), Multiplied(), Block()))
    opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True)
    train(opt, lambda step: model(rows(step, ranks)).square().mean())
    return model, []


class Both(NamedTuple):
    hidden: torch.Tensor
    twice: torch.Tensor


@dataclasses.dataclass
class Found:
    logits: torch.Tensor
    both: Both
    extra: dict[str, torch.Tensor]


class GivesBoth(Block):
    def forward(self, x: Any) -> Any:
        hidden = super().forward(x.hidden if isinstance(x, Both) else x)
        return Both(hidden, hidden * 2)


class GivesMuch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = GivesBoth(), GivesBoth(), nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> Found:
        both = self.second(self.first(x))
        return Found(self.head(both.hidden), both, {"size": both.hidden.square().mean()})


@program
def outputs_with_names(wrap: Wrap, ranks: list[int]) -> Any:
    model = wrap(GivesMuch())

    def loss(step: int) -> torch.Tensor:
        found = model(rows(step, ranks))
        return found.logits.square().mean() + found.both.twice.mean() / 9 + found.extra["size"]

    train(torch.optim.Adam(model.parameters(), 1e-2), loss)
    return model, []


class Counting(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
            self.scale = 0.9 * self.scale + 0.05
        return super().forward(x) * self.scale / self.calls.clamp(min=1)


@program
def buffers_that_forward_changes(wrap: Wrap, ranks: list[int]) -> Any:
    model = wrap(nn.Sequential(Counting(), Counting(), nn.Linear(WIDTH, 2)))
    opt = torch.optim.Adam(model.parameters(), 1e-2)
    train(opt, lambda step: model(rows(step, ranks)).square().mean())
    return model, []


class Tied(nn.Module):
    """The head is the embedding, and two blocks share a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first, self.second = nn.Embedding(16, WIDTH), Block(), Block()
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.head.weight, self.second.up = self.embed.weight, self.first.up

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(self.embed(ids))))


@program
def generation_between_steps(wrap: Wrap, ranks: list[int]) -> Any:
    model, seen = wrap(Tied()), []

    def generate(step: int) -> None:
        model.eval()
        with torch.inference_mode() if step % 2 else torch.no_grad():
            ids = tokens(77, [0])
            for _ in range(3):
                ids = torch.cat([ids, model(ids)[:, -1].argmax(-1, keepdim=True)], 1)
        seen.append(ids.float())
        model.train()

    def loss(step: int) -> torch.Tensor:
        ids = tokens(step, ranks)
        return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())

    train(torch.optim.AdamW(model.parameters(), 1e-2), loss, generate)
    return model, seen


@program
def states_put_back_in_the_run(wrap: Wrap, ranks: list[int]) -> Any:
    model = wrap(blocks())
    opt = torch.optim.AdamW(model.parameters(), 1e-2)
    kept: dict[str, Any] = {}

    def after(step: int) -> None:
        if step == 1:
            kept["model"], kept["opt"] = copy.deepcopy(model.state_dict()), io.BytesIO()
            torch.save(opt.state_dict(), kept["opt"])
        if step == 3:
            kept["opt"].seek(0)
            model.load_state_dict(kept["model"])
            opt.load_state_dict(torch.load(kept["opt"], weights_only=False))
            opt.param_groups[0]["lr"] = 3e-3

    train(opt, lambda step: model(rows(step, ranks)).square().mean(), after, steps=6)
    return model, []


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sums = nn.EmbeddingBag(16, WIDTH, mode="sum")
        self.most = nn.EmbeddingBag(16, WIDTH, mode="max")
        self.block, self.head = Block(), nn.Linear(WIDTH, 3)

    def forward(self, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        starts = torch.arange(0, ids.numel(), ids.shape[1])
        summed = self.sums(ids.flatten(), starts, per_sample_weights=weights.flatten())
        return self.head(self.block(summed + self.most(ids)))


@program
def bags_of_embeddings(wrap: Wrap, ranks: list[int]) -> Any:
    model = wrap(Bags())

    def loss(step: int) -> torch.Tensor:
        return model(tokens(step, ranks), torch.sigmoid(rows(step, ranks, 6))).square().mean()

    train(torch.optim.Adagrad(model.parameters(), 0.1), loss)
    return model, []


class Packed(nn.Module):
    """Keeps what its inner module saves as numpy arrays."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def pack(saved: torch.Tensor) -> Any:
            whole = isinstance(saved, nn.Parameter) or saved.dtype != torch.float32
            return saved if whole else saved.detach().clone().numpy()

        def unpack(packed: Any) -> torch.Tensor:
            return packed if isinstance(packed, torch.Tensor) else torch.from_numpy(packed)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return self.inner(x)


@program
def activations_put_aside(wrap: Wrap, ranks: list[int]) -> Any:
    model = wrap(nn.Sequential(Packed(Block()), Packed(Block()), Block()))

    def loss(step: int) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            return model(rows(step, ranks)).square().mean()

    train(torch.optim.Adam(model.parameters(), 1e-2), loss)
    return model, []


@program
def sharpness_aware_steps(wrap: Wrap, ranks: list[int]) -> Any:
    model = wrap(blocks())
    opt = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        model(rows(step, ranks)).square().mean().backward()
        with torch.no_grad():
            moved = [p.grad * 0.5 for p in model.parameters()]  # type: ignore[operator]
            for parameter, by in zip(model.parameters(), moved, strict=True):
                parameter.add_(by)
        opt.zero_grad()
        model(rows(step, ranks)).square().mean().backward()
        with torch.no_grad():
            for parameter, by in zip(model.parameters(), moved, strict=True):
                parameter.sub_(by)
        opt.step()
        opt.zero_grad()
    return model, []


class Momentum(nn.Module):
    """A student, and a slow copy of it that teaches."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(Block(), Block())
        self.slow = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wanted = self.slow(x) / 2
        found = self.student(x)
        return (found - wanted).square().mean() + found.mean()

    @torch.no_grad()
    def follow(self) -> None:
        for slow, quick in zip(self.slow.parameters(), self.student.parameters(), strict=True):
            slow.mul_(0.7).add_(quick, alpha=0.3)


@program
def a_slow_copy_inside(wrap: Wrap, ranks: list[int]) -> Any:
    model: Any = wrap(Momentum())
    opt = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    train(opt, lambda step: model(rows(step, ranks)), lambda step: model.follow())
    return model, []


@program
def two_optimizers_in_their_own_time(wrap: Wrap, ranks: list[int]) -> Any:
    """Gradients are clipped by value, scaled, dropped; weights are bounded between steps."""
    model = wrap(blocks())
    matrices = torch.optim.SGD([p for p in model.parameters() if p.ndim > 1], 0.1, momentum=0.5)
    others = torch.optim.Adam([p for p in model.parameters() if p.ndim < 2], 1e-2)
    for step in range(6):
        model(rows(step, ranks)).square().mean().backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        for name, parameter in model.named_parameters():
            if "norm" in name and parameter.grad is not None:
                parameter.grad.mul_(0.5)
            if name.endswith("down.bias"):
                parameter.grad = None
        for opt in (others, matrices) if step % 2 == 0 else (others,):
            opt.step()
            opt.zero_grad()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.25, 0.25)
    return model, []


class Empty(nn.Module):
    """Its own parameter has no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.empty = nn.Linear(WIDTH, 1), nn.Parameter(torch.zeros(2, 0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.empty.sum()


@program
def parameters_without_elements(wrap: Wrap, ranks: list[int]) -> Any:
    model = wrap(Empty())
    opt = torch.optim.SGD(model.parameters(), 0.1)
    train(opt, lambda step: model(rows(step, ranks)).square().mean())
    return model, []


@program
def a_line_search(wrap: Wrap, ranks: list[int]) -> Any:
    """Decided by the loss, of which each rank has its own."""
    model, seen = wrap(blocks()), list[torch.Tensor]()
    opt = torch.optim.LBFGS(model.parameters(), 0.1, 4, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss = model(rows(len(seen), ranks)).square().mean()
        loss.backward()
        return loss

    for _ in range(3):
        seen.append(opt.step(closure).detach())  # type: ignore[arg-type]
    return model, seen


def _compare(name: str, way: str) -> None:
    def wrap(model: nn.Module) -> nn.Module:
        if way != "fully_shard":
            return sw.shard(model, sw.Plan.of(way, mesh=dist.get_world_size(), average=True))
        # A layer that two blocks share is the root's.
        for child in model.children() if not isinstance(model, Tied) else ():
            if any(True for _ in child.parameters()):
                sw.fully_shard(child)
        return sw.fully_shard(model)

    torch.manual_seed(0)
    expected, shown = PROGRAMS[name](lambda model: model, list(range(dist.get_world_size())))
    torch.manual_seed(0)
    model, seen = PROGRAMS[name](wrap, [dist.get_rank()])
    found = sw.full_state_dict(model)
    assert list(found) == list(expected.state_dict())
    for key, value in expected.state_dict().items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5, msg=f"{name}: {key}")
    for ours, theirs in zip(seen, shown, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, msg=name)


def _compare_all(way: str) -> None:
    for name in PROGRAMS:
        _compare(name, way)


@pytest.mark.parametrize("way", ["ddp", "zero1", "zero2", "zero3", "fully_shard"])
def test_programs_train_as_in_one_process(two: Ranks, way: str) -> None:
    two.run(_compare_all, way)
