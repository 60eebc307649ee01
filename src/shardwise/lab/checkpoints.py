"""`shardwise bench checkpoint`: saving and loading against torch.distributed.checkpoint.

Both save and load the same model and optimizer, on the same ranks and disk, in turn: a model that
torch's own `fully_shard` shards, with AdamW's state. What each loads is first compared with what
was there, bit for bit; if it differs nothing is timed. A save ends when all of it is on the disk
(both call fsync), a load finds the files in the host's page cache. `stall` is how long an
asynchronous save keeps the caller.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.lab.charts import draw_bars
from shardwise.lab.processes import ask_ranks, time_on_ranks
from shardwise.lab.rows import RowFile, say
from shardwise.profiling.results import Row, print_table
from shardwise.profiling.timing import spread

WAYS = {"shardwise": "shardwise", "torch": "torch DCP"}
TIMES = ("save", "load", "stall", "behind")  # behind: an asynchronous save, to its end
WIDTH, QUICK_WIDTH = 1024, 64


def run(arguments: argparse.Namespace) -> None:
    """Measure, write the JSON, draw the picture, print the table."""
    file = RowFile.of(arguments, ranks=arguments.ranks)
    width = QUICK_WIDTH if arguments.quick else WIDTH
    layers = 2 if arguments.quick else max(1, round(arguments.megabytes * 1e6 / 12 / WIDTH**2))
    rounds = 2 if arguments.quick else arguments.steps
    base = f"{layers}x{width}/{arguments.ranks}"
    if not all(f"{base}/{way}" in file for way in WAYS):
        say(f"{arguments.ranks} gloo ranks: shardwise and torch DCP in turn")
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            found = ask_ranks(measure, folder, width, layers, rounds, world=arguments.ranks)
        for way, row in found.items():
            file.add({"key": f"{base}/{way}", "way": WAYS[way], **row})
    file.tell(arguments.plot, draw, show)


class Trial:
    """One way to save and load a model and its optimizer."""

    def __init__(self, way: str, folder: str, model: nn.Module, optimizer: Any) -> None:
        self.way, self.model, self.optimizer = way, model, optimizer
        self._folder, self._number = Path(folder) / way, 0
        # torch's thread needs a group of its own: its collectives would meet those of training.
        self._beside = dist.new_group(backend="gloo") if way == "torch" else None

    @property
    def path(self) -> str:
        return str(self._folder / str(self._number))

    def clear(self) -> None:
        """Remove what was saved last; the next goes to another folder."""
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(self.path, ignore_errors=True)
        self._number += 1
        dist.barrier()

    def save(self) -> None:
        if self.way == "shardwise":
            sw.save(self.path, self.model, self.optimizer)
        else:
            dcp.save(self._state(), checkpoint_id=self.path)

    def load(self) -> None:
        if self.way == "shardwise":
            sw.load(self.path, self.model, self.optimizer)
            return
        state = self._state()
        dcp.load(state, checkpoint_id=self.path)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def save_behind(self) -> Callable[[], Any]:
        """Begin an asynchronous save; what waits for its end."""
        if self.way == "shardwise":
            return sw.save(self.path, self.model, self.optimizer, asynchronous=True).wait
        future: Any = dcp.async_save(
            self._state(), checkpoint_id=self.path, process_group=self._beside
        )
        return future.result

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}


def measure(folder: str, width: int, layers: int, rounds: int) -> dict[str, Row]:
    """What each rank runs: parity of both ways, then all of both in turn."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(2, width)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    trials = {way: Trial(way, folder, model, optimizer) for way in WAYS}
    for trial in trials.values():
        _check_parity(trial)
    times: dict[str, dict[str, list[float]]] = {way: {t: [] for t in TIMES} for way in WAYS}
    for i in range(rounds):
        for way in list(WAYS)[:: 1 if i % 2 else -1]:
            for name, value in _time(trials[way]).items():
                times[way][name].append(value)
    total = sum(tensor.nbytes for tensor in _values(trials["torch"], whole=True))
    found: dict[str, Row] = {}
    for way, taken in times.items():
        row: Row = {"bytes": total, "rounds": rounds, "parity": "bit for bit"}
        for name, values in taken.items():
            row[f"{name}_ms"] = statistics.median(values)
            row[f"{name}_spread_ms"] = spread(values)
        found[way] = row
    return found


def _time(trial: Trial) -> dict[str, float]:
    """One round: a save, a load of it, an asynchronous save. In milliseconds."""
    taken = {"save": time_on_ranks(trial.save).step_ms, "load": time_on_ranks(trial.load).step_ms}
    trial.clear()
    waits: list[Callable[[], Any]] = []
    stall = time_on_ranks(lambda: waits.append(trial.save_behind())).step_ms
    rest = time_on_ranks(lambda: waits[0]()).step_ms
    trial.clear()
    return taken | {"stall": stall, "behind": stall + rest}


def _values(trial: Trial, whole: bool = False) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for parameter in trial.model.parameters():
        state = trial.optimizer.state[parameter]
        found += [parameter.detach(), *(v for v in state.values() if isinstance(v, torch.Tensor))]
    return found if whole else [t.to_local() if isinstance(t, DTensor) else t for t in found]


def _check_parity(trial: Trial) -> None:
    """What it loads is what it saved, also into other values; an error on every rank if not."""
    before = [value.clone() for value in _values(trial)]
    trial.save()
    with torch.no_grad():
        for value in _values(trial):
            value.zero_()
    trial.load()
    if not all(map(torch.equal, before, _values(trial))):
        raise RuntimeError(f"{WAYS[trial.way]} loads other values than it saved; nothing was timed")
    trial.clear()


def draw(rows: list[Row]) -> str:
    groups = {name: {row["way"]: row[f"{name}_ms"] for row in rows} for name in TIMES}
    return draw_bars("saving and loading a checkpoint", groups, "ms")


def show(rows: list[Row], facts: dict[str, Any]) -> None:
    lines = []
    for row in rows:
        cells = [f"{row[f'{n}_ms']:.0f} +- {row[f'{n}_spread_ms']:.0f}" for n in TIMES]
        rates = [f"{row['bytes'] / 1e6 / row[f'{n}_ms']:.2f}" for n in ("save", "load")]
        lines.append([row["way"], *cells, " / ".join(rates)])
    heads = ["way", "save", "load", "stall", "behind", "GB/s"]
    title = f"a checkpoint of {rows[0]['bytes'] / 1e6:.0f} MB, {facts['ranks']} ranks, ms"
    print_table(title, heads, lines, facts["environment"], ("way",), width=80)
    print(
        "stall: how long an asynchronous save keeps the caller; behind: until it is on\n"
        "the disk; GB/s: of save / of load, which finds the files in the page cache.\n"
        "Medians and interquartile ranges."
    )
