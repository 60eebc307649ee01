"""Uneven micro-batches: as they are typed, who has which, late peers, and the commands."""

from __future__ import annotations

import json
import time

import pytest
import torch
import torch.distributed as dist

from shardwise.cli import main
from shardwise.description.workload import Workload, parse_micro_batches, row_of, show_sizes
from shardwise.emulation.clock import STEP, Clock, Page
from shardwise.emulation.collectives import Network, emulate
from shardwise.emulation.links import HostLinks
from shardwise.emulation.networks import NO_TIME, Transfer
from shardwise.emulation.peers import Peers
from shardwise.emulation.run import joined
from shardwise.errors import UserError
from shardwise.planning.plan import Plan
from shardwise.trainer.config import TrainConfig, load_config

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("text", "sizes"),
    [("3", ((4, 4, 4),)), ("1,2", ((1, 2),)), ("1,2/2,1", ((1, 2), (2, 1))), ("1/5", ((1,), (5,)))],
)
def test_micro_batches_are_read(text, sizes) -> None:
    assert parse_micro_batches(text, 4) == sizes
    if text != "3":
        assert show_sizes(sizes) == text


@pytest.mark.parametrize("text", ["", "0", "1,0", "two", "1,2/1", "-1", "1,,2"])
def test_what_is_no_micro_batches_is_said(text) -> None:
    with pytest.raises(UserError, match="expected how many"):
        parse_micro_batches(text, 4)


def test_every_rank_has_a_row() -> None:
    assert [row_of(rank, (2, 2), 2) for rank in range(4)] == [0, 0, 1, 1]
    assert [row_of(rank, (1, 4), 2) for rank in range(4)] == [0, 0, 1, 1]
    assert [row_of(rank, (4, 1), 2) for rank in range(4)] == [0, 1, 0, 1]
    work = Workload.uneven(8, ((1, 3), (2, 2)))
    assert work.tokens_on((2, 2)) == 8 * (4 + 4) * 2 and work.split == "1,3/2,2"
    assert (
        Workload(8, 3, 2).tokens_on((2, 2)) == 8 * 3 * 2 * 4 and Workload(8, 3, 2).split == "2 x 3"
    )


# Late peers


def test_a_transfer_begins_when_its_last_rank_is_there() -> None:
    links = HostLinks()
    first = links.add(10.0, "a", Transfer(0.0, 1.0, joins=5.0), step_began=10.0)
    behind = links.add(10.0, "a", Transfer(0.0, 1.0, joins=2.0), step_began=10.0)
    other = links.add(10.0, "b", Transfer(0.0, 1.0))
    assert links.end_of(10.0, other) == pytest.approx(11.0)
    assert links.end_of(10.0, first) == pytest.approx(16.0)
    assert links.end_of(10.0, behind) == pytest.approx(17.0)  # its own ranks were there by then


def test_the_clock_process_waits_for_the_last_rank() -> None:
    clock = Clock()
    try:
        steps, lane = clock.add_lane(), clock.add_lane()
        began = time.perf_counter()
        clock.page.words[Page.begun(steps)] = clock.issue(steps, NO_TIME, STEP)
        while clock.page.words[Page.over(steps)] != 1:
            assert time.perf_counter() - began < 20
        number = clock.issue(lane, Transfer(0.01, 0.0, joins=0.2))
        clock.page.words[Page.begun(lane)] = number
        while clock.page.words[Page.over(lane)] != number:
            assert time.perf_counter() - began < 20
        assert time.perf_counter() - began >= 0.2
    finally:
        clock.close()


@pytest.mark.parametrize("delayed", [False, True])
def test_a_replica_waits_for_the_other_only_where_they_meet(delayed: bool) -> None:
    """Compute of 20 and 60 ms in turn, by sleeping: 120 ms if they meet each time, else 80."""
    plan = Plan.of("hsdp", (2, 2))
    with joined(0, 4), emulate(Network()) as emulation:
        group, tensor = dist.new_group([0, 2]), torch.zeros(8)

        def step(*seconds: float) -> None:
            for i, each in enumerate(seconds):
                time.sleep(each)
                if not delayed or i == len(seconds) - 1:
                    dist.all_reduce(tensor, group=group)

        peers = Peers(emulation, CPU, plan, [lambda: step(0.02, 0.06), lambda: step(0.06, 0.02)])
        peers.settle(rounds=3)
        joins = peers.joins_of(0)[0, 2]
        began = time.perf_counter()
        peers.run(0)
        taken = time.perf_counter() - began
    assert len(joins) == (1 if delayed else 2)
    assert taken >= (0.08 if delayed else 0.119)
    if not delayed:
        # The other one is late in the first by its large one, and there with us in the second.
        assert joins[0] >= 0.06 and joins[1] >= 0.12 - 0.04


def test_groups_of_one_replica_wait_for_nobody() -> None:
    plan = Plan.of("hsdp", (2, 2))
    with joined(0, 4), emulate(Network()) as emulation:
        group, tensor = dist.new_group([0, 1]), torch.zeros(8)
        peers = Peers(emulation, CPU, plan, [lambda: dist.all_reduce(tensor, group=group)] * 2)
        peers.settle(rounds=1)
        assert peers.joins_of(0) == {}


# The commands


def test_emulate_takes_uneven_micro_batches(tmp_path) -> None:
    path = tmp_path / "rows.json"
    words = ["emulate", "--mesh", "2x2", "--model", "tiny", "--seq", "8", "--steps", "2"]
    words += ["--micro-batches", "1,2/2,1", "--network", "1e9", "--engine", "shardwise"]
    counts = {}
    for sync in ("each", "scatter_each_reduce_last", "last"):
        assert main([*words, "--sync", sync, "--json", str(path)]) == 0
        rows = json.loads(path.read_text())["rows"]
        assert all(row["micro_batches"] == [[1, 2], [2, 1]] for row in rows)
        counts[sync] = [row["calls"].get("all_reduce", 0) for row in rows]
    each, delayed, last = counts["each"], counts["scatter_each_reduce_last"], counts["last"]
    assert each == [2 * n for n in delayed] and delayed == last and delayed[0] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--micro-batches", "1,x"], "expected how many"),
        (["--micro-batches", "1,2", "--batch", "4"], "both give sequences"),
        (["--sync", "never"], "Plan.sync"),
    ],
)
def test_emulate_says_what_it_cannot_read(words, message, capsys) -> None:
    assert main(["emulate", "--mesh", "2x2", "--model", "tiny", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_plan_is_made_for_uneven_micro_batches(tmp_path, capsys) -> None:
    out = ["--out", str(tmp_path / "plan.json"), "--cluster", "h100x8", "--world", "4"]
    ask = ["plan", "--model", "tiny", "--sequence", "64", "--strategies", "hsdp,zero3", *out]
    assert main([*ask, "--micro-batches", "1,4/4,1"]) == 0
    said = capsys.readouterr().out
    assert "1,4/4,1 sequences" in said and "--set data.sizes=1,4/4,1" in said
    assert main([*ask, "--micro-batches", "2", "--tokens", "1024"]) == 0
    assert "2 x 2" in capsys.readouterr().out
    for words, message in (
        (["--micro-batches", "1,4/4,1", "--tokens", "64"], "leave --tokens out"),
        (["--micro-batches", "3", "--tokens", "1024"], "do not divide the 4 sequences"),
        (["--micro-batches", "1/2/3"], "do not divide 4 ranks"),
        ([], "--tokens is needed"),
    ):
        assert main([*ask, *words]) == 2
        assert message in capsys.readouterr().err


def test_a_training_run_s_sizes_say_how_many_there_are() -> None:
    config = load_config(None, [("data.sizes", "1,3/3,1"), ("data.seq", "16")])
    assert (config.data.batch, config.run.micro_batches) == (3, 2)
    assert TrainConfig.from_toml(config.to_toml()) == config
    assert config.workload.tokens_on((2, 1)) == 16 * 8
    with pytest.raises(UserError, match=r"leave run\.micro_batches out"):
        load_config(None, [("data.sizes", "1,3"), ("run.micro_batches", "3")])
    with pytest.raises(UserError, match=r"run.micro_batches"):
        load_config(None, [("data.sizes", '"3"')])


def test_uneven_replicas_train_to_the_same_loss_whenever_they_meet(tmp_path) -> None:
    losses = {}
    for sync in ("each", "scatter_each_reduce_last"):
        out = tmp_path / sync
        words = ["--plan", "hsdp", "--nproc", "2", "--set", "plan.mesh=2x1", "--steps", "2"]
        words += ["--micro-batches", "1,2/2,1", "--set", f"plan.sync={sync}", "--out", str(out)]
        assert main(["train", *words, "--set", "data.seq=16"]) == 0
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        assert rows[-1]["tokens"] == 2 * 16 * 6
        losses[sync] = [row["loss"] for row in rows]
    assert losses["each"] == pytest.approx(losses["scatter_each_reduce_last"], rel=1e-5)
