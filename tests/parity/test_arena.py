"""An engine whose memory is an arena, on two gloo ranks: bit for bit as with the allocator, in as
many bytes as `explain` says, and out of it with a message when a step is another.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.engine.engine import engine_of
from shardwise.planning.memory import lay_out_arena
from tests.parity.models import Block
from tests.parity.test_one_schedule import Net
from tests.ranks import Ranks

TOKENS = torch.arange(6).view(2, 3)
PLANS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "zero3": ("zero3", 2, {}),
    "zero3, bf16": ("zero3", 2, {"compute_dtype": "bfloat16"}),
    "zero3, in place, last": ("zero3", 2, {"gather": "each", "sync": "last"}),
    "zero3, whole": ("zero3", 2, {"whole_below": 200, "reduce_dtype": "bfloat16"}),
    "zero2": ("zero2", 2, {}),
    "zero1, last": ("zero1", 2, {"sync": "last"}),
    "ddp, bf16": ("ddp", 2, {"compute_dtype": "bfloat16"}),
    "hsdp, bf16": ("hsdp", (2, 1), {"compute_dtype": "bfloat16"}),
    "zero3, sums": ("zero3", 2, {"reduce_dtype": "bfloat16", "sum_dtype": "float32"}),
    "zero2, sums, last": (
        "zero2", 2, {"reduce_dtype": "bfloat16", "sum_dtype": "float32", "sync": "last"},
    ),
    "zero3, codes": ("zero3", 2, {"gather_dtype": "int8", "compute_dtype": "bfloat16"}),
    "ddp, sums": ("ddp", 2, {"reduce_dtype": "bfloat16", "sum_dtype": "float32"}),
}  # fmt: skip
KINDS = ("plain", "checkpointed", "tied", "frozen", "unused")


def train(model: nn.Module, micro: int, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for i in range(steps):
        batches = [(TOKENS + i + j) % 7 for j in range(micro)]
        for tokens in sw.microbatches(model, batches):
            (model(tokens) / micro).backward()
        sw.clip_grad_norm(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()


def _cases(kind: str) -> list[str]:
    """What of one kind of model is not as it should be, over all plans; on this rank."""
    wrong = []
    for i, (name, (strategy, mesh, settings)) in enumerate(PLANS.items()):
        # Half of the plans for each kind, so that each plan meets accumulation and none.
        at = i + KINDS.index(kind)
        for micro in (1 + at // 2 % 2,) if at % 2 or name == "zero3, whole" else ():
            states, blocks, said = [], [], 0
            for memory in ("allocator", "arena"):
                torch.manual_seed(0)
                plan = sw.Plan.of(strategy, mesh, memory=memory, **settings)
                model = sw.shard(Net(kind), plan)
                train(model, micro, 4)
                states.append(sw.full_state_dict(model))
                engine = engine_of(model)
                arena = engine.executor.arena
                if arena is not None and arena.block is not None:
                    blocks.append(arena.block.nbytes)
                    assert engine.plan is not None
                    said = lay_out_arena(engine.plan, micro, streams=False).nbytes
            where = f"{kind}, {name}, {micro} micro-batches"
            if not all(torch.equal(states[0][key], states[1][key]) for key in states[0]):
                wrong.append(f"{where}: parameters differ")
            # What is frozen or not run, explain counts as if it ran.
            runs_all = kind not in ("frozen", "unused")
            if not blocks or blocks[0] > said or (runs_all and blocks[0] != said):
                wrong.append(f"{where}: {blocks} bytes in the arena, explain says {said}")
    return wrong


@pytest.mark.parametrize("kind", KINDS)
def test_trains_bit_for_bit_in_the_bytes_that_were_said(two: Ranks, kind: str) -> None:
    for wrong in two.run(_cases, kind):
        assert not wrong, "\n".join(wrong)


class Odd(nn.Module):
    """Blocks in an order that a step may change; `nested`: the first calls the last."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(8, 12) for _ in range(5))
        self.order, self.nested = [0, 1, 2, 3, 4], False
        for i, block in enumerate(self.blocks):
            block.register_forward_hook(self._nest if i == 0 else lambda *_: None)

    def _nest(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return self.blocks[4](output) if self.nested else output

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in self.order:
            x = self.blocks[i](x)
        return x.float().square().sum()


def _deviate(how: str) -> tuple[bool, int, bool]:
    """Train alike with and without an arena, with some steps in another order; whether they agree,
    how often it was said, and whether the arena is left.
    """
    states, messages = [], []
    model: nn.Module = nn.Identity()
    for memory in ("allocator", "arena"):
        torch.manual_seed(0)
        odd = Odd()
        model = sw.shard(odd, sw.Plan.of("zero3", 2, units=[Block], memory=memory))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for i in range(8):
                if i >= 4 and i % 2 == 0:
                    odd.order = [3, 1, 4, 0, 2] if how == "order" else [0, 3]
                    odd.nested = how == "nested"
                    if how == "two forwards":
                        odd.order = [0, 1, 2, 3, 4]  # in one step, and never before
                x = torch.ones(2, 8) + i
                loss = model(x)
                if how == "two forwards" and i == 4:
                    loss = _twice(model, x, loss, memory)
                if how == "evaluation":
                    odd.order = [4, 3, 2, 1, 0]
                    with torch.no_grad():
                        model(x)
                    odd.order = [0, 1, 2, 3, 4]
                    loss = model(x)
                if how == "error" and i == 5:
                    model(x)  # whose backward never comes
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        states.append(sw.full_state_dict(model))
        messages += [w for w in caught if "memory='arena'" in str(w.message)]
    same = all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    return same, len(messages), engine_of(model).executor.arena is None


def _twice(model: nn.Module, x: torch.Tensor, loss: torch.Tensor, memory: str) -> torch.Tensor:
    """Two forwards for one backward need blocks at once that share memory: an error before
    anything is computed, and the next step goes on with the allocator.
    """
    both = loss + model(x + 1)
    if memory == "arena":
        with pytest.raises(RuntimeError, match="use memory='allocator'"):
            both.backward()
    return model(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "how", ["order", "skipped", "nested", "two forwards", "evaluation", "error"]
)
def test_a_step_in_another_order_computes_the_same(two: Ranks, how: str) -> None:
    for same, said, left in two.run(_deviate, how):
        assert same
        assert said <= 1 and left == (said == 1)
