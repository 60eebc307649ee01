"""A profile looks on: an optimizer's step goes the way it goes without one."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

import shardwise as sw
from shardwise.emulation.run import joined

pytestmark = pytest.mark.usefixtures("no_group")


@pytest.fixture(name="stepped")
def _stepped(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each step of AdamW that is taken, whether it ran on plain tensors."""
    found: list[bool] = []
    home = importlib.import_module("torch.optim.adam")
    adam: Callable[..., None] = home.adam

    def note(parameters: list[torch.Tensor], *args: Any, **kwargs: Any) -> None:
        if parameters:
            found.append(not any(isinstance(p, DTensor) for p in parameters))
        adam(parameters, *args, **kwargs)

    monkeypatch.setattr(home, "adam", note)
    return found


def test_local_steps_stay_local_under_a_profile(stepped: list[bool]) -> None:
    with joined(0, 2):
        model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
        sw.shard(model, sw.Plan.of("zero3", 2))
        optimizer = torch.optim.AdamW(model.parameters())

        def step() -> None:
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        with sw.profile(model, steps=2) as measured:
            step()
            step()
        assert stepped == [True] * 3
        assert all(p.numel() for group in optimizer.param_groups for p in group["params"])
        # A hook of somebody else's may want the parameters as they are.
        handle = register_optimizer_step_pre_hook(lambda *_: None)
        step()
        handle.remove()
        assert stepped == [True] * 3 + [False]
    spans = [span for span in measured.timeline.spans if span.phase == "optimizer"]
    assert spans, "the optimizer's work is in a phase of its own"
