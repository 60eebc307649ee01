"""What every rank of a job runs: train, evaluate, save, load into a fresh model, train again.

The steps of a job, and where a fault may strike:

    shard  1 2* 3 evaluation 4* 5  |  load  5 (again)  save*        * a save
    `---- one run -----------------'  `---- resumed ---------'

What a rank sees it writes to its record, one line of JSON for each: the hash of the whole state
before each save and at the end, what it loaded, the errors that it caught. The supervisor and the
judge read nothing else of the program but its exit code and what it printed.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise import checkpoint
from shardwise.chaos.faults import BLOCKS, BY_NAME, EVALUATED, LAST, REFUSED, SAVES, Fault
from shardwise.chaos.inject import Injector, obey_permissions
from shardwise.trainer.group import open_group

WIDTH, BATCH = 12, 3


class Record:
    """What a rank tells: lines of JSON, each written whole."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = os.open(
            folder / f"rank-{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644
        )

    def __call__(self, what: str, **facts: Any) -> None:
        line = json.dumps({"what": what, "time": time.monotonic(), **facts})
        os.write(self._file, (line + "\n").encode())


def read_record(folder: Path, rank: int) -> list[dict[str, Any]]:
    path = folder / f"rank-{rank}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Block(nn.Module):
    def __init__(self, injector: Injector | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.injector = injector  # of the block in the middle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.injector is not None:
            self.injector.at("forward" if self.training else "evaluation")
            if x.requires_grad:
                x.register_hook(self._backward)
        out: torch.Tensor = x + nn.functional.gelu(self.linear(self.norm(x)))
        return out

    def _backward(self, gradient: torch.Tensor) -> None:
        assert self.injector is not None
        self.injector.at("backward")


class Net(nn.Module):
    """A stack of equal blocks: units that could be taken for one another."""

    def __init__(self, injector: Injector | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        middle = BLOCKS // 2
        self.blocks = nn.ModuleList(Block(injector if i == middle else None) for i in range(BLOCKS))
        self.last = nn.Linear(WIDTH, 1)
        self.injector = injector

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        order = list(range(BLOCKS))
        if self.injector is not None:
            order = self.injector.order(order)
        for i in order:
            x = self.blocks[i](x)
        out: torch.Tensor = self.last(x)
        return out


def build(
    seed: int, plan: sw.Plan | None = None, injector: Injector | None = None
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net: nn.Module = Net(injector)
    if plan is not None:
        net = sw.shard(net, plan)
    return net, torch.optim.AdamW(net.parameters(), lr=0.01)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    """Every value of the training's state by a name that no sharding changes."""
    yield from model.state_dict().items()
    for name, parameter in model.named_parameters():
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            yield f"{name}/{key}", value


def hash_state(model: nn.Module, optimizer: torch.optim.Optimizer, *, whole: bool = True) -> str:
    """Of the whole state, a collective call; or of what this rank holds."""
    state = {name: _bytes_of(value) for name, value in sorted(state_of(model, optimizer))}
    group = _shard_group(model) if whole else None
    if group is not None:
        cut = {name for name, value in state_of(model, optimizer) if _is_cut(value)}
        parts: list[dict[str, bytes]] = [{}] * dist.get_world_size(group)
        dist.all_gather_object(parts, {name: state[name] for name in cut}, group)
        # Rows of a contiguous tensor, one rank's after the other's.
        state |= {name: b"".join(part[name] for part in parts) for name in cut}
    digest = hashlib.blake2b(digest_size=12)
    for name, value in state.items():
        digest.update(f"{name}:{len(value)}:".encode() + value)
    return digest.hexdigest()


def _bytes_of(value: Any) -> bytes:
    value = value.to_local() if isinstance(value, DTensor) else value
    if not isinstance(value, torch.Tensor):
        return repr(value).encode()
    return value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _is_cut(value: Any) -> bool:
    return isinstance(value, DTensor) and any(each.is_shard() for each in value.placements)


def _shard_group(model: nn.Module) -> dist.ProcessGroup | None:
    """Of the ranks that together hold the model, each its rows; None if each holds all of it."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            for axis, placement in enumerate(parameter.placements):
                if placement.is_shard():
                    return parameter.device_mesh.get_group(axis)
    return None


class Training:
    """One rank's model, and the steps and saves that it makes of it."""

    def __init__(self, fault: Fault, rank: int, root: Path, record: Record) -> None:
        self.fault, self.rank, self.root, self.record = fault, rank, root, record
        self.injector = Injector(fault, rank, root, record)
        self.plan = make_plan(fault.strategy, fault.world)
        self.pending: Any = None

    def begin(self, seed: int) -> None:
        self.model, self.optimizer = build(seed, self.plan, self.injector)

    def run(self, first: int) -> None:
        """The steps from `first` on, with what belongs to them."""
        for step in range(first, LAST + 1):
            self.step(step)
            if step == EVALUATED:
                self.evaluate()
            if step in SAVES:
                self.save(step)
        self.wait()
        self.record("state", step=LAST, hash=self.hash())

    def step(self, step: int) -> None:
        self.injector.step = step
        generator = torch.Generator().manual_seed(1000 * self.fault.seed + 10 * step + self.rank)
        batch = torch.randn(BATCH, WIDTH, generator=generator)
        loss = self.model(batch).square().mean() / self.fault.world
        self.injector.loss(loss).backward()
        sw.clip_grad_norm(self.model, 1.0)
        self.injector.at("step")
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def evaluate(self) -> None:
        self.model.eval()
        self.model(torch.ones(BATCH, WIDTH))
        self.model.train()

    def hash(self) -> str:
        return hash_state(self.model, self.optimizer)

    def save(self, step: int) -> None:
        """Tell what is saved, then save it. A save that is refused leaves the training whole."""
        self.wait()
        self.record("saving", step=step, hash=self.hash())
        self.injector.step = step
        self.injector.before_save()
        with self._refusing("save"):
            saving = sw.save(
                str(self.root),
                self.model,
                self.optimizer,
                step=step,
                asynchronous=self.fault.place == "asynchronous save",
                keep_latest_k=self.fault.keep,
            )
            self.pending = step, saving
            self.injector.during_save()
        if self.fault.place != "asynchronous save":
            self.wait()

    def wait(self) -> None:
        """Until a save is over, if one is under way."""
        if self.pending is not None:
            (step, saving), self.pending = self.pending, None
            with self._refusing("save"):
                saving.wait()
                self.record("saved", step=step)
        self.injector.after_save()

    def load(self) -> int:
        """Into what is there; the newest that is not refused. The step that it was saved after."""
        with self._refusing("load"):
            return self._load(self.root)
        return self._load(checkpoint.all_of(self.root)[1])

    def _load(self, path: Path) -> int:
        loaded = sw.load(str(path), self.model, self.optimizer)
        self.record("loaded", step=loaded.step, hash=self.hash())
        return loaded.step

    @contextmanager
    def _refusing(self, call: str) -> Iterator[None]:
        """An error that the class brings is told, and whether it changed anything."""
        before = hash_state(self.model, self.optimizer, whole=False)
        try:
            yield
        except sw.CheckpointError as error:
            if BY_NAME[self.fault.kind].expected != REFUSED:
                raise
            after = hash_state(self.model, self.optimizer, whole=False)
            self.record("refused", call=call, text=str(error), unchanged=before == after)


def make_plan(strategy: str, world: int) -> sw.Plan:
    return sw.Plan.of(strategy, mesh=(2, world // 2) if strategy == "hsdp" else world)


def main(fault: Fault, folder: Path, root: Path, rank: int, process: int) -> None:
    """The program of one rank."""
    record = Record(folder, process)
    obey_permissions()
    torch.set_num_threads(1)
    training = Training(fault, rank, root, record)
    training.injector.at("start")
    open_group("gloo")
    record("joined")
    training.plan = training.injector.plan(training.plan)
    training.begin(fault.seed)
    training.run(1)
    dist.barrier()
    training.begin(fault.seed + 100)
    training.injector.before_load()
    training.run(training.load() + 1)
    training.save(LAST)
    training.wait()
    record("end")
    dist.destroy_process_group()


def read_disk(root: Path, answer: Path) -> None:
    """What a new program of one rank finds: which checkpoint loads, to which state, what was
    refused before it, and whether it can save there.
    """
    torch.set_num_threads(1)
    found: dict[str, Any] = {"step": None, "hash": None, "refused": [], "problems": {}}
    paths = checkpoint.all_of(root) if root.exists() else []
    for path in [root, *paths] if paths else []:
        model, optimizer = build(seed=99)
        try:
            loaded = sw.load(str(path), model, optimizer)
        except sw.CheckpointError as error:
            found["refused"].append(str(error))
            continue
        found |= {"step": loaded.step, "hash": hash_state(model, optimizer)}
        break
    for path in paths:
        if problems := checkpoint.verify(path):
            found["problems"][Path(path).name] = problems
        elif checkpoint.Manifest.read(path).finite:
            found["finite"] = True
    model, optimizer = build(seed=98)
    sw.save(str(root), model, optimizer, step=99)
    again, optimizer_again = build(seed=97)
    loaded = sw.load(str(root), again, optimizer_again)
    found["next"] = loaded.step == 99 and (
        hash_state(model, optimizer) == hash_state(again, optimizer_again)
    )
    found["left"] = sorted(p.name for p in root.iterdir() if p.name.startswith("."))
    answer.write_text(json.dumps(found))
