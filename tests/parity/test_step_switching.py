"""An optimizer whose steps go now on flat rows, now torch's way: nobody can tell, at any step."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import optimizer as torch_optimizer

import shardwise as sw
from shardwise.engine.local_step import GroupRuns
from tests.parity.test_local_step import same_everywhere, same_state, shard_by
from tests.ranks import Ranks

Make = Callable[[Any], torch.optim.Optimizer]
KINDS: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, foreach=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01, foreach=True),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01, t0=1, foreach=True),
}


def make() -> nn.Module:
    """On two ranks the first units' parameters step as one each, the last unit's by themselves."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 128), nn.Linear(128, 5))


def by_plan(model: nn.Module) -> nn.Module:
    return sw.shard(model, sw.Plan.of("zero3", mesh=dist.get_world_size()))


class Run:
    """One model and optimizer. A seed counts the gradients, so that two runs see the same."""

    def __init__(self, model: nn.Module, kind: str, average: float) -> None:
        self.model, self.average = model, average
        self.optimizer = KINDS[kind](model.parameters())
        self.parameters = list(model.parameters())
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.95)
        self.held: list[Any] = []
        self.seed = 0

    def backward(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        draw = torch.Generator().manual_seed(10 * self.seed + dist.get_rank())
        self.seed += 1
        loss = self.model(torch.randn(4, 64, generator=draw)).pow(2).mean() * self.average
        loss.backward()
        return loss

    def step(self, *args: Any, **kwargs: Any) -> None:
        self.backward()
        self.optimizer.step(*args, **kwargs)
        self.schedule.step()

    def looks_intact(self, *_: Any) -> None:
        """As every hook sees it: parameters as the model has them, each with a count of its own."""
        found = self.optimizer.param_groups[0]["params"]
        assert all(a is b for a, b in zip(found, self.parameters, strict=True))
        counts = [s["step"] for s in self.optimizer.state.values() if "step" in s]
        assert len({count.data_ptr() for count in counts}) == len(counts)
        assert all(count.shape == () and type(count) is torch.Tensor for count in counts)

    # What may come between two steps, and how a step may go.

    def plain(self) -> None:
        self.step()

    def none(self) -> None:
        self.step(None)
        self.step(closure=None)

    def closure(self) -> None:
        loss = self.optimizer.step(self.backward)
        assert isinstance(loss, torch.Tensor)
        self.schedule.step()

    def hooked(self) -> None:
        seen: list[Any] = []

        def look(optimizer: Any, args: Any, kwargs: Any) -> None:
            self.looks_intact()
            seen.append((optimizer is self.optimizer, args[0] is optimizer, args[1:], kwargs))

        handles = [
            self.optimizer.register_step_pre_hook(look),
            self.optimizer.register_step_post_hook(look),
        ]
        self.step()
        self.step(None)
        for handle in handles:
            handle.remove()
        assert seen == [(True, True, (), {})] * 2 + [(True, True, (None,), {})] * 2

    def hooked_globally(self) -> None:
        handle = torch_optimizer.register_optimizer_step_post_hook(self.looks_intact)
        self.step()
        handle.remove()

    def hook_that_raises(self) -> None:
        def fail(*_: Any) -> None:
            raise KeyError("hook")

        for register in (
            self.optimizer.register_step_pre_hook,
            self.optimizer.register_step_post_hook,
        ):
            handle = register(fail)
            with pytest.raises(KeyError, match="hook"):
                self.step()
            handle.remove()
            self.looks_intact()
        self.optimizer.step()

    def step_that_raises(self) -> None:
        group, saved = self.optimizer.param_groups[0], copy.deepcopy(self.optimizer.state_dict())
        rate, group["lr"] = group["lr"], "nonsense"
        self.backward()
        with pytest.raises(Exception):  # noqa: B017, each kind of optimizer has its own
            self.optimizer.step()
        self.looks_intact()
        if not (group.get("foreach") or group.get("fused")):
            self.held.clear()  # how far it came, parameter after parameter, nobody knows
        group["lr"] = rate
        self.optimizer.load_state_dict(saved)

    def profiled(self) -> None:
        with torch.profiler.profile(with_stack=True, profile_memory=True):
            self.step()

    def missing_gradient(self) -> None:
        self.backward()
        self.model[0].bias.grad = None
        self.optimizer.step()

    def own_gradients(self) -> None:
        self.backward()
        self.model[0].bias.grad = self.model[0].bias.grad * 2
        self.optimizer.step()
        for parameter in self.parameters:
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()

    def counts_edited(self) -> None:
        for parameter in self.parameters:
            if "step" in self.optimizer.state[parameter]:
                self.optimizer.state[parameter]["step"] += 2
        self.step()
        for parameter in self.parameters:
            if "step" in self.optimizer.state[parameter]:
                self.optimizer.state[parameter]["step"].data.fill_(5)
        self.step()

    def one_count_edited(self) -> None:
        state = self.optimizer.state[self.model[1].weight]
        if "step" in state:
            state["step"].add_(3)
        self.step()

    def loaded(self) -> None:
        """From a file, and what was saved stays what it was."""
        before = self.optimizer.state_dict()
        self.held.append((before, copy.deepcopy(before)))
        file = io.BytesIO()
        torch.save(before, file)
        file.seek(0)
        self.optimizer.load_state_dict(torch.load(file, weights_only=False))
        self.step()

    def cleared(self) -> None:
        self.held.append((self.optimizer.state_dict(), None))
        self.optimizer.state.clear()
        if type(self.optimizer) is torch.optim.Adagrad:  # it begins its state only when it is made
            self.optimizer.__init__(self.parameters, lr=0.01, foreach=True)  # type: ignore[misc]
        self.step()

    def copied(self) -> None:
        """A copy of the optimizer has parameters and state of its own."""
        self.backward()
        twin = copy.deepcopy(self.optimizer)
        same_state(twin.state_dict(), self.optimizer.state_dict())
        twin.step()

    def scaled(self) -> None:
        """torch.amp's scaler, which hands a fused optimizer what it needs through attributes; its
        second gradients are not finite.
        """
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        for factor in (1.0, torch.inf):
            self.backward()
            for parameter in self.parameters:
                parameter.grad.mul_(factor)  # type: ignore[union-attr]
            scaler.step(self.optimizer)
            scaler.update()

    def checkpointed(self) -> None:
        options = StateDictOptions(full_state_dict=True)
        state = get_optimizer_state_dict(self.model, self.optimizer, options=options)
        set_optimizer_state_dict(self.model, self.optimizer, state, options=options)
        self.step()

    def kept(self) -> None:
        """Tensors of the state that a program holds go on with the optimizer; but for those that
        it loaded, or that torch began, which the next flat step replaces.
        """
        self.held += [dict(self.optimizer.state[p]) for p in self.parameters]

    def grouped(self) -> None:
        last = self.optimizer.param_groups[0]["params"].pop()
        self.parameters.pop()
        self.optimizer.add_param_group({"params": [last], "lr": 0.05})
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.95)
        self.step()


SEQUENCES = [
    "plain kept plain hooked plain closure none hook_that_raises plain step_that_raises plain "
    "profiled counts_edited hooked_globally plain loaded own_gradients plain kept plain cleared "
    "copied plain scaled plain",
    "closure none kept hooked loaded hooked closure one_count_edited plain missing_gradient plain "
    "hooked plain checkpointed plain grouped plain hooked plain",
    "hooked plain missing_gradient kept plain plain closure loaded none step_that_raises plain",
]


def _same(ours: Run, theirs: Run, where: str) -> None:
    ours.looks_intact()
    same_state(ours.optimizer.state_dict(), theirs.optimizer.state_dict())
    _same_held(ours.held, theirs.held, where)
    for i, (p, q) in enumerate(zip(ours.parameters, theirs.parameters, strict=True)):
        same_everywhere(p.detach(), q.detach(), f"{where}: parameter {i}")


def _same_held(ours: Any, theirs: Any, where: str) -> None:
    if isinstance(theirs, dict):
        assert list(ours) == list(theirs), where
        ours, theirs = list(ours.values()), list(theirs.values())
    if isinstance(theirs, list | tuple):
        for a, b in zip(ours, theirs, strict=True):
            _same_held(a, b, where)
    elif isinstance(theirs, torch.Tensor):
        same_everywhere(ours, theirs, where)


def _switches(kind: str, engine: str) -> None:
    for sequence in SEQUENCES:
        ours, theirs = make(), shard_by(fsdp, make())
        world = dist.get_world_size()
        if engine == "plan":  # which sums
            run = Run(by_plan(ours), kind, 1 / world)
        else:
            run = Run(shard_by(sw, ours), kind, 1.0)
        oracle = Run(theirs, kind, 1.0)
        flat = _count_flat_steps()
        for at, event in enumerate(sequence.split()):
            where, before = f"{kind} {engine}: {at} {event}", len(flat)
            for each in (run, oracle):
                getattr(each, event)()
            _same(run, oracle, where)
            expected = {"hooked": 0, "hooked_globally": 0, "kept": 0, "none": 2, "closure": 1}
            if event == "own_gradients":
                assert flat[-1] == flat[before - 1], where
            if event in expected and at:  # the engine is formed in the first step, by a closure
                assert len(flat) - before == expected[event], where
        assert flat


def _count_flat_steps() -> list[int]:
    """Grows by one with each step on flat rows from now on."""
    found: list[int] = []
    original = getattr(GroupRuns.prepare, "original", GroupRuns.prepare)

    def prepare(self: GroupRuns, *args: Any) -> Any:
        flat, others = original(self, *args)
        if flat:
            found.append(len(flat))
        return flat, others

    prepare.original = original  # type: ignore[attr-defined]
    GroupRuns.prepare = prepare  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize(
    ("kind", "engine"),
    [*zip(KINDS, ["dropin", "plan"] * 4, strict=True), ("adamw", "plan"), ("foreach", "dropin")],
)
def test_switches_at_any_step(kind: str, engine: str, two: Ranks) -> None:
    two.run(_switches, kind, engine)
