"""What changes between the steps of a compiled model is noticed, and what a backward leaves is what
the engine's hooks would leave. Parts and gradients are no inputs and outputs of the graphs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.graph import backend as graph_backend
from tests.ranks import Ranks

WIDTH, BLOCKS = 6, 3


class Scaled(nn.Module):
    """A block that reads attributes of its own, of a list and of its class."""

    gain = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.factor = 1.0
        self.table = [1.0, 2.0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x).tanh() if self.training else self.up(x)
        return x + self.down(hidden) * self.factor * self.table[0] * self.gain


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scaled() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def make(compiled: bool) -> Any:
    torch.manual_seed(0)
    model, plan = Stack(), sw.Plan.of("zero3", mesh=2, units=("layers.*",))
    return sw.compile(model, plan, backend="graph") if compiled else sw.shard(model, plan) or model


def attribute(model: Any) -> None:
    model.layers[1].factor = 3.0


def inside_a_list(model: Any) -> None:
    model.layers[1].table[0] = 0.5


def of_the_class(model: Any) -> None:
    Scaled.gain = 2.0


def evaluates(model: Any) -> None:
    model.eval()


def another_module(model: Any) -> None:
    model.layers[0].up.forward = lambda x: x.new_ones(*x.shape[:-1], 8) * x.sum()


def freezes(model: Any) -> None:
    model.layers[1].up.weight.requires_grad_(False)


def writes(model: Any) -> None:
    with torch.no_grad():
        model.layers[2].down.bias.add_(1.0)


CHANGES = (attribute, inside_a_list, of_the_class, evaluates, another_module, freezes, writes)


def gradients(model: Any, loss: Callable[[], torch.Tensor]) -> list[torch.Tensor | None]:
    model.zero_grad()
    loss().backward()
    found = [p.grad for p in model.parameters()]
    return [None if grad is None else grad.to_local().clone() for grad in found]


def after_changes(compiled: bool) -> list[Any]:
    """Gradients before and after each change, of a batch of another shape, of one backward of two
    forwards, and what is left when only the input's gradient is asked for.
    """
    Scaled.gain = 1.0
    model = make(compiled)
    x, other = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH), torch.ones(3, WIDTH)

    def square(*inputs: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: sum(model(each).square().sum() for each in inputs)

    found: list[Any] = [gradients(model, square(x)), gradients(model, square(x))]
    for change in CHANGES:
        change(model)
        found.append(gradients(model, square(x)))
    model.train()
    found += [gradients(model, square(x)), gradients(model, square(other))]
    found.append(gradients(model, square(x, x.flip(0))))
    model.zero_grad()
    asked = x.clone().requires_grad_()
    found.append([*torch.autograd.grad(model(asked).sum(), asked)])
    found.append([p.grad for p in model.parameters()])
    found.append(gradients(model, square(x)))
    Scaled.gain = 1.0
    return found


def compare() -> list[int]:
    """Which of them differ."""
    torch.compiler.reset()
    expected = after_changes(compiled=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # falling back is one
        found = after_changes(compiled=True)

    def same(a: Any, b: Any) -> bool:
        if a is None or b is None:
            return a is b
        return bool(torch.allclose(a, b, rtol=1e-5, atol=1e-6))

    assert len(found) == len(expected)
    return [
        i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if not all(map(same, a, b))
    ]


def test_what_changes_between_steps_is_noticed(two: Ranks) -> None:
    assert two.run(compare) == [[], []]


def inputs_of_graphs() -> list[int]:
    """How many inputs the forward graph of a step has, and how many outputs the backward one."""
    torch.compiler.reset()
    counts = []
    plain = graph_backend.send_by_groups

    def count(graph: Any) -> Any:
        outputs = next(node for node in graph.nodes if node.op == "output").args[0]
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        counts.append((len(inputs), len([out for out in outputs if out is not None])))
        return plain(graph)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(graph_backend, "send_by_groups", count)
        make(compiled=True)(torch.ones(2, WIDTH)).sum().backward()
    (forward, _), (_, backward) = counts
    return [forward, backward]


def test_parts_and_gradients_are_no_inputs_and_outputs_of_graphs(two: Ranks) -> None:
    """A place, a sink and the batch come in; what autograd is told goes out."""
    assert two.run(inputs_of_graphs) == [[3, 1], [3, 1]]
