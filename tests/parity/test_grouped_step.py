"""sw.sharded_step on a plain replicated model, against averaged gradients in one process."""

from __future__ import annotations

import copy
import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.errors import UserError
from shardwise.planning.groups import LAYOUTS
from tests.ranks import Ranks

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "plain-sgd": (torch.optim.SGD, {"lr": 0.05}),
    "adamw": (torch.optim.AdamW, {"lr": 1e-2}),
    "fused": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),  # makes its state when it is built
}


class Uneven(nn.Module):
    """Shapes that no number of ranks divides, a number, nothing, a frozen and an unused one."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)

        def made(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, dtype=dtype) / 3)

        self.a, self.b, self.c = made(5, 7), made(7), made(3, 7)
        self.scale, self.nothing = made(), made(0, 4)
        self.frozen = nn.Parameter(torch.ones(7, dtype=dtype), requires_grad=False)
        self.unused, self.single = made(9), made(1, 11)

    def forward(self, x: torch.Tensor, with_c: bool = True) -> torch.Tensor:
        y = torch.tanh(x @ self.a + self.b) * self.frozen * self.scale
        if with_c:
            y = torch.tanh(y @ self.c.T)
        return y.square().mean() + (self.single**2).mean()


def groups_of(model: Uneven) -> list[dict[str, Any]]:
    """Two parameter groups, the frozen and the empty parameter among them."""
    parameters = list(model.parameters())
    return [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.02}]


def inputs(step: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    draw = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 5, generator=draw).to(dtype)


def uses_c(step: int, rank: int) -> bool:
    """Sometimes all ranks, sometimes some of them, and in step 3 none."""
    return step != 3 and (step + rank) % 3 != 0


def step_alone(
    model: Uneven, optimizer: torch.optim.Optimizer, step: int, world: int, max_norm: float | None
) -> torch.Tensor | None:
    """What all ranks do together, in one process."""
    dtype = model.a.dtype
    optimizer.zero_grad()
    for rank in range(world):
        (model(inputs(step, rank, dtype), uses_c(step, rank)) / world).backward()
    norm = None
    if max_norm is not None:
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    return norm


def difference(model: nn.Module, other: nn.Module) -> float:
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs if a.numel())


def compare(kind: str, layout: str, dtype: torch.dtype, max_norm: float | None) -> list[float]:
    """Differences of parameters and norms after steps with a scheduler and a reload."""
    cls, settings = OPTIMIZERS[kind]
    rank, world = dist.get_rank(), dist.get_world_size()
    model, alone = Uneven(dtype), Uneven(dtype)
    ours, plain = cls(groups_of(model), **settings), cls(groups_of(alone), **settings)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (ours, plain)]
    call = {"max_norm": max_norm, "group_bytes": 160, "layout": layout}
    found = []
    for step in range(5):
        ours.zero_grad()
        model(inputs(step, rank, dtype), uses_c(step, rank)).backward()
        norm = sw.sharded_step(model.parameters(), ours, **call)
        expected = step_alone(alone, plain, step, world, max_norm)
        with warnings.catch_warnings(action="error"):  # that the optimizer did not step
            for scheduler in schedulers:
                scheduler.step()
        if norm is not None and expected is not None:
            found.append(abs(float(norm) - float(expected)) / float(expected))
        if step == 2:  # what this rank saves it loads, into an optimizer of its own
            saved = copy.deepcopy(ours.state_dict())
            ours = cls(groups_of(model), **settings)
            ours.load_state_dict(saved)
            schedulers[0].optimizer = ours
    return [*found, difference(model, alone)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_equals_averaged_gradients_in_one_process(two: Ranks, kind: str, layout: str) -> None:
    for max_norm in (None, 0.05):
        for found in two.run(compare, kind, layout, torch.float32, max_norm):
            assert max(found) < 2e-6


@pytest.mark.parametrize("layout", LAYOUTS)
def test_four_ranks_and_bfloat16(four: Ranks, layout: str) -> None:
    for found in four.run(compare, "adamw", layout, torch.float32, 0.05):
        assert max(found) < 2e-6
    for found in four.run(compare, "sgd", layout, torch.bfloat16, 0.05):
        assert max(found) < 0.02


def count_bytes(layout: str, max_norm: float | None) -> tuple[float, float, int, int]:
    """Bytes that a step sends, those of an all-reduce, the state's bytes and the parameters'."""
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 64)).sum().backward()
    with sw.record() as log:
        sw.sharded_step(
            model.parameters(), optimizer, max_norm=max_norm, group_bytes=2**15, layout=layout
        )
    size = sum(p.nbytes for p in model.parameters())
    world = dist.get_world_size()
    tensors = itertools.chain(*(state.values() for state in optimizer.state.values()))
    held = sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor) and t.dim())
    moved = log.sent("reduce_scatter") + log.sent("all_gather")
    # What else travels: a number for each parameter, and one for the norm.
    small = 4 * (len(list(model.parameters())) + (max_norm is not None))
    assert log.sent("all_reduce") == small * 2 * (world - 1) / world
    assert log.counts()["reduce_scatter"] == log.counts()["all_gather"] == 6
    return moved, size * 2 * (world - 1) / world, held, size


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sends_what_one_all_reduce_sends_and_keeps_a_share_of_the_state(
    two: Ranks, layout: str
) -> None:
    found = two.run(count_bytes, layout, 1.0)
    for sent, all_reduced, _, _ in found:
        assert sent == all_reduced
    assert sum(held for _, _, held, _ in found) == 2 * found[0][3]


def take_a_whole_state() -> float:
    """Begin with a plain optimizer, go on with slices of its state."""
    model, alone = Uneven(), Uneven()
    ours, plain = torch.optim.AdamW(groups_of(model)), torch.optim.AdamW(groups_of(alone))
    world, rank = dist.get_world_size(), dist.get_rank()
    step_alone(alone, plain, 0, world, None)
    model.load_state_dict(alone.state_dict())
    ours.load_state_dict(copy.deepcopy(plain.state_dict()))
    for step in (1, 2):
        ours.zero_grad()
        model(inputs(step, rank, torch.float32), uses_c(step, rank)).backward()
        sw.sharded_step(model.parameters(), ours, layout="flat", group_bytes=160)
        step_alone(alone, plain, step, world, None)
    return difference(model, alone)


def test_a_plain_optimizers_state_is_taken_over(two: Ranks) -> None:
    assert max(two.run(take_a_whole_state)) < 2e-6


def change_parameters() -> float:
    """Unfreeze a parameter, move another, and give the optimizer a third, between steps."""
    model, alone = Uneven(), Uneven()
    extra = [nn.Parameter(torch.ones(6)) for _ in range(2)]
    ours = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plain = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    rank, world = dist.get_rank(), dist.get_world_size()

    def loss(net: Uneven, more: nn.Parameter, step: int, who: int) -> torch.Tensor:
        return net(inputs(step, who, torch.float32)) + (more * (who + 1)).sum()

    for step in range(3):
        given = [*model.parameters()]
        if step == 1:
            model.frozen.requires_grad_(), alone.frozen.requires_grad_()
            model.a.data = model.a.data.clone()
        if step == 2:
            ours.add_param_group({"params": [extra[0]]})
            plain.add_param_group({"params": [extra[1]]})
            given.append(extra[0])
        ours.zero_grad(), plain.zero_grad()
        loss(model, extra[0], step, rank).backward()
        sw.sharded_step(given, ours)
        for who in range(world):
            (loss(alone, extra[1], step, who) / world).backward()
        plain.step()
    return max(difference(model, alone), float((extra[0] - extra[1]).detach().abs().max()))


def test_parameters_may_come_and_move_between_steps(two: Ranks) -> None:
    assert max(two.run(change_parameters)) < 2e-6


class Strange(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})


def find_errors() -> list[str]:
    """The messages of what a program may get wrong; no rank is left waiting."""
    model = nn.Linear(4, 4)
    other = nn.Linear(4, 2)
    model(torch.ones(1, 4)).sum().backward()
    said = []

    def fails(parameters: Any, optimizer: torch.optim.Optimizer, **settings: Any) -> None:
        with pytest.raises(UserError) as caught:
            sw.sharded_step(parameters, optimizer, **settings)
        said.append(str(caught.value))

    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    fails(model.parameters(), Strange(model.parameters()))
    fails([*model.parameters(), *other.parameters()], sgd)
    fails([model.weight], sgd)
    fails(model.parameters(), sgd, layout="row")
    fails(model.parameters(), sgd, group_bytes=0)
    fails(model.parameters(), sgd, max_norm=-1.0)
    turned = nn.Parameter(torch.ones(3, 4).T)
    fails([turned], torch.optim.SGD([turned], lr=0.1))
    table = nn.Embedding(4, 4, sparse=True)
    table(torch.tensor([1])).sum().backward()
    fails(table.parameters(), torch.optim.SGD(table.parameters(), lr=0.1))
    sw.sharded_step(model.parameters(), sgd, layout="flat")
    fails(model.parameters(), sgd, layout="rows")
    sgd.register_step_post_hook(lambda *_: None)
    fails(model.parameters(), sgd, layout="rows")
    # Ranks that disagree are told, each of them.
    size = 4 + dist.get_rank()
    uneven = nn.Linear(size, 2)
    uneven(torch.ones(1, size)).sum().backward()
    fails(uneven.parameters(), torch.optim.SGD(uneven.parameters(), lr=0.1))
    return said


def test_misuse_is_named(two: Ranks) -> None:
    expected = (
        "Strange may need whole parameters", "2 of the parameters are not the optimizer's",
        "1 parameters that were not given", "did you mean 'rows'", "group_bytes is 0",
        "max_norm is -1.0", "is not contiguous", "sparse gradient", "state of a parameter",
        "step hooks", "ranks called sharded_step with different parameters",
    )  # fmt: skip
    for said in two.run(find_errors):
        for part, message in zip(expected, said, strict=True):
            assert part in message


def test_one_rank_is_the_same_path_and_no_group_an_error(no_group: None) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(UserError, match="init_process_group"):
        sw.sharded_step(model.parameters(), optimizer)
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        alone = copy.deepcopy(model)
        plain = torch.optim.AdamW(alone.parameters())
        for _ in range(2):
            for each in (model, alone):
                each.zero_grad()
                each(torch.ones(1, 3)).square().sum().backward()
            norm = sw.sharded_step(model.parameters(), optimizer, max_norm=0.1)
            torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(alone.parameters(), 0.1))
            plain.step()
        torch.testing.assert_close(model.weight, alone.weight)
    finally:
        dist.destroy_process_group()
