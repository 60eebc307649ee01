"""Runs that end early, by a kill, by SIGTERM or by numbers that are not finite, and go on."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import shardwise as sw
from shardwise.checkpoint import all_of
from shardwise.children import ChildFailed
from shardwise.cli import main
from shardwise.lab.resuming.job import Kill, run_job
from shardwise.lab.resuming.pairs import STEPS, Pair, _compare, _rows, try_pair
from shardwise.trainer.config import TrainConfig

PLAIN = dataclasses.replace(
    Pair.draw(0, "cpu"), world=2, resumed_world=2, plan="zero3", dtype="float32", save_every=2,
    keep=0, asynchronous=False, micro_batches=1, recompute="none",
)  # fmt: skip


@pytest.mark.parametrize("seed", range(500, 512))
def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path, seed: int) -> None:
    row = try_pair(Pair.draw(seed, "cpu"), tmp_path)
    assert row["differing"] == [], row


def train(out: Path, world: int = 2, kill: Kill | None = None, **changes: object) -> None:
    """One job of the plain pair, with other keys of the configuration, as run__steps=4."""
    tokens = out.parent / "tokens.txt"
    if not tokens.exists():
        tokens.write_bytes(bytes(range(256)) * 64)
    config = TrainConfig.from_toml(PLAIN.config(out, world))
    for name, value in changes.items():
        section, _, key = name.partition("__")
        changed = dataclasses.replace(getattr(config, section), **{key: value})
        config = dataclasses.replace(config, **{section: changed})
    run_job(config.to_toml(), world, out, kill)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("resume") / "whole"
    train(out)
    return out


def copied(whole: Path, name: str) -> Path:
    """A copy of the finished run, beside it."""
    out = whole.parent / name
    subprocess.run(["cp", "-r", str(whole), str(out)], check=True)
    return out


def said(run: Path, rank: int = 0) -> str:
    return (run / f"said-{rank}").read_text()


def test_what_differs_is_found(whole: Path) -> None:
    other = whole.parent / "other"
    train(other, run__seed=1, data__seed=1)
    found = "; ".join(_compare(PLAIN, whole, other, 0))
    for what in ("differ in tensors", "rank-00001.safetensors", "another loss", "other batches"):
        assert what in found
    assert "step 1 logged" in found
    assert list(_compare(PLAIN, whole, whole, 0)) == []


def test_sigterm_to_one_rank_saves_on_all_and_the_run_goes_on_bit_for_bit(whole: Path) -> None:
    """The save is between two that the configuration asks for; the row of every step is there."""
    out = whole.parent / "stopped"
    train(out, kill=Kill(1, 5, after_s=0.0, signal=signal.SIGTERM))
    told = {(out / f"stopped-{rank}").read_text() for rank in range(2)}
    step = _rows(out)[-1]["step"]
    assert 5 <= step < STEPS
    newest = all_of(out / "checkpoints")[0]
    ended = f"stopped by SIGTERM after step {step} of {STEPS}"
    assert told == {f"{ended}, saved as {newest}; --resume goes on there"}
    assert newest.endswith(f"step-{step:08d}")
    assert "rank 1 was told by SIGTERM" in said(out, 1) and "SIGTERM" not in said(out)
    train(out, run__resume="auto")
    assert list(_compare(PLAIN, whole, out, step)) == []


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(whole: Path) -> None:
    out = copied(whole, "damaged")
    newest, before = (Path(path) for path in all_of(out / "checkpoints")[:2])
    damaged = newest / "rank-00001.safetensors"
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    (before / "rank-00000.safetensors").unlink()
    train(out, run__resume="auto")
    first, second, third = (line for line in said(out).splitlines() if "shardwise: " in line)
    assert str(damaged) in first and "checksum" in first and "an older" in first
    assert str(before / "rank-00000.safetensors") in second and "is not there" in second
    assert "step-00000004, after step 4" in third
    assert list(_compare(PLAIN, whole, out, 4)) == []
    assert json.loads((out / "run.json").read_text())["resumed_after"] == [4]


def test_without_a_whole_checkpoint_nothing_starts_anew_by_itself(whole: Path) -> None:
    out = copied(whole, "ruined")
    for path in all_of(out / "checkpoints"):
        (Path(path) / "manifest.json").write_text("{")
    with pytest.raises(ChildFailed, match=r"none of the 4 checkpoints .* is whole"):
        train(out, run__resume="auto")
    assert len(_rows(out)) == STEPS


def test_another_model_or_other_data_is_an_error_with_their_keys(whole: Path) -> None:
    with pytest.raises(ChildFailed) as caught:
        train(whole, run__resume="auto", model__d_ff=96, data__seed=7)
    told = str(caught.value)
    assert "model.d_ff (was 64, is 96), data.seed (was 0, is 7)" in told
    assert "UserError" in told and "without --resume" in told


def test_another_plan_world_batch_and_number_of_steps_go_on(whole: Path) -> None:
    out = copied(whole, "longer")
    more = {"run__steps": 10, "data__batch": 3, "run__log_every": 5}
    train(out, world=1, run__resume=str(whole), **more)
    rows = _rows(out)
    assert rows[:STEPS] == _rows(whole) and [row["step"] for row in rows[STEPS:]] == [10]
    assert rows[-1]["tokens"] == rows[-2]["tokens"] + 2 * 3 * 16


def test_steps_that_diverge_name_the_last_finite_checkpoint(whole: Path) -> None:
    out = whole.parent / "diverged"
    with pytest.raises(ChildFailed) as caught:
        train(out, optim__lr=1e30, optim__warmup=0, optim__clip=0.0, run__save_every=1)
    finite = all_of(out / "checkpoints")
    assert "training has diverged" in str(caught.value)
    assert f"The last finite checkpoint is {finite[0]}: --resume" in str(caught.value)
    skipping = {"optim__nonfinite": "skip", "optim__nonfinite_limit": 2, "optim__lr": 1e30}
    with pytest.raises(ChildFailed, match="not finite in 2 steps in a row"):
        train(out, run__resume="auto", optim__clip=0.0, optim__warmup=0, **skipping)


def train_and_be_killed(config: str) -> None:
    """A worker of torchrun's agent: the first time its second rank is killed in step 6."""
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if first and os.environ["RANK"] == "1":
        clip, calls = sw.clip_grad_norm, itertools.count(1)

        def clip_or_die(*arguments: object) -> object:
            if next(calls) == 6:
                os.kill(os.getpid(), signal.SIGKILL)
            return clip(*arguments)

        setattr(sw, "clip_grad_norm", clip_or_die)  # noqa: B010
    code = main(["train", config, "--overwrite"])
    if code:
        sys.exit(code)


@pytest.fixture
def signals() -> Iterator[None]:
    """torchrun's agent leaves its handlers in the process."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("signals")
def test_ranks_that_torchrun_starts_again_go_on(tmp_path: Path) -> None:
    """The command is the same in both attempts, and even says --overwrite."""
    (tmp_path / "tokens.txt").write_bytes(bytes(range(256)) * 64)
    config = tmp_path / "config.toml"
    config.write_text(PLAIN.config(tmp_path / "run", 2))
    how = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, max_restarts=1, monitor_interval=0.1,
        rdzv_backend="c10d", rdzv_endpoint="localhost:0", run_id="resume",
        start_method="forkserver",
    )  # fmt: skip
    elastic_launch(how, train_and_be_killed)(str(config))
    assert json.loads((tmp_path / "run" / "run.json").read_text())["resumed_after"] == [4]
    assert [row["step"] for row in _rows(tmp_path / "run")] == list(range(1, STEPS + 1))
