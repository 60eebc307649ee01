"""Case 28: a save that is killed before any of its writes, fsyncs, renames and removals leaves
exactly the old or exactly the new checkpoint, and the next save works.

The points are not chosen: a save is run once to count them, then killed at each.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint import storage


def program(value: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer with this value everywhere."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=value, momentum=0.9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
            optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, value)
    return model, optimizer


def save(root: Path, value: int, asynchronous: bool = False, keep: int | None = None) -> None:
    model, optimizer = program(float(value))
    saving = sw.save(
        root,
        model,
        optimizer,
        step=value,
        extra={"value": value, "table": torch.full((9,), value)},
        asynchronous=asynchronous,
        keep_latest_k=keep,
    )
    saving.wait()


def load(root: Path) -> int:
    """Which checkpoint is the newest; all of it has that one's values."""
    model, optimizer = program(77.0)
    loaded = sw.load(root, model, optimizer)
    value = loaded.step
    assert loaded.extra["value"] == value and (loaded.extra["table"] == value).all()
    assert optimizer.param_groups[0]["lr"] == value
    for parameter in model.parameters():
        assert (parameter == value).all()
        assert (optimizer.state[parameter]["momentum_buffer"] == value).all()
    assert checkpoint.verify(loaded.path) == []
    return value


def run_forked(action: Callable[[], None]) -> int:
    """The wait status of a child that runs `action`."""
    child = os.fork()
    if child == 0:
        try:
            action()
            os._exit(0)
        except BaseException as error:
            os.write(2, f"{error}\n".encode())
            os._exit(1)
    return os.waitpid(child, 0)[1]


class Killer:
    """Counts what a save does, and kills the process before the operation of a number."""

    def __init__(self, at: int) -> None:
        self.at, self.seen = at, 0

    def __call__(self, operation: str, path: str) -> None:
        self.seen += 1
        if self.seen == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def operations(root: Path, asynchronous: bool, keep: int | None) -> list[tuple[str, str]]:
    seen: list[tuple[str, str]] = []
    watcher = lambda operation, path: seen.append((operation, path))  # noqa: E731
    storage.watchers.append(watcher)
    try:
        save(root, 2, asynchronous, keep)
    finally:
        storage.watchers.remove(watcher)
    return seen


@pytest.mark.parametrize("asynchronous", (False, True))
def test_every_crash_point_leaves_the_old_or_the_new(
    tmp_path: Path, asynchronous: bool, no_group: None
) -> None:
    save(tmp_path / "counted", 1)
    count = len(operations(tmp_path / "counted", asynchronous, keep=1))
    assert count >= 20
    outcomes = []
    for at in range(1, count + 1):
        root = tmp_path / str(at)
        save(root, 1)

        def killed(root: Path = root, at: int = at) -> None:
            storage.watchers.append(Killer(at))
            save(root, 2, asynchronous, keep=1)

        assert os.WTERMSIG(run_forked(killed)) == signal.SIGKILL, at
        outcomes.append(load(root))
        save(root, 3, keep=1)
        assert load(root) == 3
        assert sorted(os.listdir(root)) == ["latest", "step-00000003"], at
    # The old one up to the rename, the new one after it: one change, at the commit.
    assert outcomes == sorted(outcomes) and set(outcomes) == {1, 2}


def test_the_order_of_writes_survives_a_power_cut(tmp_path: Path, no_group: None) -> None:
    """Nothing is renamed into sight before it, and the folder that names it, is on the disk."""
    save(tmp_path, 1)
    seen = operations(tmp_path, False, keep=1)
    commit = seen.index(("rename", str(tmp_path / "step-00000002")))
    before, after = seen[:commit], seen[commit + 1 :]
    files = {path for operation, path in before if operation == "create"}
    assert len(files) == 2  # data, manifest
    temporary = str(next(iter(map(Path, files))).parent)
    for file in files:
        last_write = max(i for i, each in enumerate(before) if each == ("write", file))
        assert before.index(("fsync", file)) > last_write
        assert before.index(("fsync", temporary)) > before.index(("fsync", file))
    assert "manifest.json" in [each for each in before if each[0] == "create"][-1][1]
    assert after[0] == ("fsync", str(tmp_path))
    kinds = [(operation, Path(path).name.split("-")[0]) for operation, path in after[1:6]]
    assert kinds == [
        ("create", ".latest"), ("write", ".latest"), ("fsync", ".latest"), ("rename", "latest"),
        ("fsync", tmp_path.name.split("-")[0]),
    ]  # fmt: skip
    assert after[6][0] == "rename" and ".removing-" in after[6][1]


def _rank(root: Path, store: dist.Store, rank: int, at: int, asynchronous: bool) -> None:
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    if at:
        storage.watchers.append(Killer(at))
    save(root, 2, asynchronous, keep=1)


@pytest.mark.parametrize("victim", (0, 1))
def test_a_killed_rank_of_two_leaves_the_old_or_the_new(
    tmp_path: Path, victim: int, no_group: None
) -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    outcomes = []
    for at in range(1, 100):
        root = tmp_path / str(at)
        save(root, 1)
        children = []
        for rank in range(2):
            child = os.fork()
            if child == 0:
                client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
                store = dist.PrefixStore(f"{victim}/{at}", client)
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                try:
                    _rank(root, store, rank, at if rank == victim else 0, at % 2 == 0)
                finally:
                    os._exit(0)
            children.append(child)
        status = os.waitpid(children[victim], 0)[1]
        if os.WIFSIGNALED(status):
            os.kill(children[1 - victim], signal.SIGKILL)  # it waits for the dead one
        os.waitpid(children[1 - victim], 0)
        outcomes.append(load(root))
        save(root, 3)
        assert load(root) == 3
        if not os.WIFSIGNALED(status):  # the save had fewer operations than this
            break
    assert len(outcomes) > (20 if victim == 0 else 3)
    assert outcomes == sorted(outcomes) and outcomes[0] == 1 and outcomes[-1] == 2
