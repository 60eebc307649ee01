"""The emulated cluster on a CPU: times by level, shared links, every engine on it, exposure."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from multiprocessing import get_context
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardwise.cli import main
from shardwise.description.cluster import Cluster
from shardwise.description.collectives import Members, collective_time
from shardwise.emulation.collectives import emulate
from shardwise.emulation.device import Move, deal, offsets_of
from shardwise.emulation.engines import Subject, build
from shardwise.emulation.exposure import Exposure, Message
from shardwise.emulation.links import HostLinks
from shardwise.emulation.networks import ClusterNetwork, Network, Transfer
from shardwise.emulation.run import Job, joined, run, ways_to_keep_less
from shardwise.engine import torch_private
from shardwise.engine.engine import (
    engine_of,
)
from shardwise.planning.memory import count_sent
from shardwise.planning.plan import Plan

CPU = torch.device("cpu")
SUBJECT = Subject("tiny", batch=1, length=8)


pytestmark = pytest.mark.usefixtures("no_group")


def test_a_network_changes_between_steps() -> None:
    """Then collectives of known sizes and groups take the new one's time."""
    whole, part = torch.empty(800), torch.ones(100)
    modelled = []
    with joined(0, 8), emulate(Network(latency=1e-3)) as emulation:
        for latency in (1e-3, 5e-3, 1e-3):
            emulation.change_network(Network(latency=latency))
            with emulation.measure(CPU) as exposure:
                torch_private.all_gather(whole, part, None).wait()
            (message,) = exposure.messages
            modelled.append(message.modelled_s)
    assert modelled == [1e-3, 5e-3, 1e-3]


# Links by a clock that the tests move


def test_transfers_of_one_group_follow_one_another() -> None:
    links = HostLinks()
    first = links.add(0.0, "a", Transfer(1.0, 2.0, (("wire", 1.0),)))
    second = links.add(0.5, "a", Transfer(1.0, 4.0, (("wire", 1.0),)))
    assert links.end_of(0.5, first) == pytest.approx(3.0)
    assert links.end_of(0.5, second) == pytest.approx(8.0)
    assert second.started is None and links.end_of(8.0, second) == pytest.approx(8.0)
    assert second.started == pytest.approx(3.0)


def test_two_groups_on_one_link_get_half_each_and_end_with_the_sum_of_their_bytes() -> None:
    links = HostLinks()
    long = links.add(0.0, "a", Transfer(0.0, 10.0, (("wire", 1.0),)))
    short = links.add(1.0, "b", Transfer(0.0, 1.0, (("wire", 1.0),)))
    elsewhere = links.add(1.0, "c", Transfer(0.0, 1.0, (("other", 1.0),)))
    assert links.end_of(1.0, short) == pytest.approx(3.0)  # its second of bytes at half the rate
    assert links.end_of(1.0, long) == pytest.approx(11.0)  # all bytes have gone by then
    assert links.end_of(1.0, elsewhere) == pytest.approx(2.0)


def test_the_fixed_part_of_a_transfer_does_not_use_the_link() -> None:
    links = HostLinks()
    waiting = links.add(0.0, "a", Transfer(5.0, 1.0, (("wire", 1.0),)))
    moving = links.add(0.0, "b", Transfer(0.0, 4.0, (("wire", 1.0),)))
    assert links.end_of(0.0, moving) == pytest.approx(4.0)
    assert links.end_of(0.0, waiting) == pytest.approx(6.0)


def test_shares_that_fit_beside_each_other_slow_nobody() -> None:
    links = HostLinks()
    uses = (("wire", 0.5),)
    flows = [links.add(0.0, name, Transfer(0.0, 2.0, uses)) for name in "abc"]
    # Three halves: all slow by 1.5 until the last bit of them has gone.
    assert [links.end_of(0.0, flow) for flow in flows] == pytest.approx([3.0] * 3)
    links = HostLinks()
    flows = [links.add(0.0, name, Transfer(0.0, 2.0, uses)) for name in "ab"]
    assert [links.end_of(0.0, flow) for flow in flows] == pytest.approx([2.0] * 2)


def test_a_long_uptime_does_not_stop_the_clock() -> None:
    links = HostLinks()
    flow = links.add(3e7, "a", Transfer(1e-5, 1 / 3e5, (("wire", 1.0),)))
    other = links.add(3e7, "b", Transfer(1e-5, 1 / 7e5, (("wire", 1.0),)))
    assert links.end_of(3e7, flow) >= links.end_of(3e7, other) > 3e7


def test_a_wait_exposes_what_it_waited_for_and_a_moment_counts_once() -> None:
    hidden, late, behind, next_one = (0.0, 2.0), (3.0, 6.0), (4.0, 6.5), (5.0, 9.0)
    intervals = (hidden, late, behind, next_one)
    measured = Exposure()
    messages = [Message("all_gather", 8, 1, 1.0, *interval) for interval in intervals]
    measured.fill(messages, [(2.5, 2.6), (4.5, 6.5), (7.0, 7.5)])
    # The wait to 6.5 was for the second and the third; the fourth went on, also after the last.
    assert [message.exposed_s for message in measured.messages] == pytest.approx([0, 1.5, 2.0, 0])
    assert measured.exposed_s == pytest.approx(2.0)
    assert measured.waited_s == pytest.approx(0.1 + 2.0 + 0.5)


# A cluster's network


def test_groups_take_the_time_of_their_own_level() -> None:
    cluster = Cluster.load("h100x8")
    network = ClusterNetwork(cluster)
    nbytes = 64 * 2**20
    inside = network.transfer("all_gather", nbytes, range(8, 16))
    across = network.transfer("all_reduce", nbytes, range(3, 128, 8))
    nvlink, infiniband = cluster.levels
    assert inside.seconds == collective_time(cluster, "all_gather", nbytes, 8)
    assert across.seconds == collective_time(cluster, "all_reduce", nbytes, Members(16, 8))
    assert inside.uses == ((nvlink.name, 1.0),)
    assert across.uses == ((infiniband.name, 1.0),)
    assert 0 < inside.fixed < inside.seconds < across.seconds
    both = dict(network.transfer("all_gather", nbytes, range(16)).uses)
    assert set(both) == {nvlink.name, infiniband.name} and max(both.values()) == 1.0
    assert network.transfer("all_gather", nbytes, [5]).seconds == 0
    with pytest.raises(ValueError, match="evenly spaced"):
        network.transfer("all_gather", nbytes, [0, 1, 5])


# The collectives themselves


def test_a_mesh_s_groups_meet_their_own_network() -> None:
    cluster = Cluster.load("h100x8")
    plan = Plan.of("hsdp", (16, 8))
    with joined(77, 128), emulate(ClusterNetwork(cluster)) as emulation:
        inputs = SUBJECT.draw_rows(CPU)
        built = build("shardwise", SUBJECT, plan, CPU, inputs)
        built.steps[0]()
        with emulation.measure(CPU) as measured:
            built.steps[0]()
    kinds = {(message.collective, message.ranks) for message in measured.messages}
    assert kinds == {("all_gather", 8), ("reduce_scatter", 8), ("all_reduce", 16)}
    for message in measured.messages:
        members = Members(16, 8) if message.ranks == 16 else Members(8)
        expected = collective_time(cluster, message.collective, message.nbytes, members)
        assert message.modelled_s == pytest.approx(expected)


@pytest.mark.quiet
def test_no_collective_is_quicker_than_modelled() -> None:
    """And most are hardly slower: whom the machine delays is chance."""
    with joined(0, 4), emulate(Network(bandwidth=1e8, latency=2e-3)) as emulation:
        taken = []
        for _ in range(9):
            whole, part = torch.zeros(2**18), torch.zeros(2**16)
            began = time.perf_counter()
            torch_private.all_gather(whole, part, None).wait()
            taken.append(time.perf_counter() - began)
        modelled = emulation.transfer("all_gather", 2**20, dist.group.WORLD).seconds
    assert modelled == pytest.approx(2e-3 + 2**20 * 3 / 4 / 1e8)
    assert min(taken) >= modelled
    assert statistics.median(taken) < 3 * modelled


@pytest.mark.quiet
def test_two_groups_over_a_shared_link_take_the_sum() -> None:
    with joined(0, 4), emulate(Network(bandwidth=1e7, shared=True)) as emulation:
        other = dist.new_group(list(range(4)))
        with emulation.measure(CPU) as measured:
            began = time.perf_counter()
            works = [
                torch_private.all_gather(torch.zeros(2**18), torch.zeros(2**16), group)
                for group in (None, other)
            ]
            for work in works:
                work.wait()
            taken = time.perf_counter() - began
        alone = emulation.transfer("all_gather", 2**20, dist.group.WORLD).seconds
    assert taken >= 2 * alone * 0.99
    # Both were on the wire nearly all the time, so neither took as little as alone.
    assert min(message.seconds for message in measured.messages) > 1.5 * alone


def test_a_free_network_delivers_and_takes_no_time() -> None:
    with joined(1, 4), emulate(Network(bandwidth=1.0)) as emulation:
        emulation.mode = "free"
        whole, part = torch.zeros(8), torch.zeros(2)
        with emulation.measure(CPU) as measured:
            torch_private.all_gather(whole, torch.tensor([1.0, 2.0]), None).wait()
            torch_private.reduce_scatter(part, torch.arange(8.0), None).wait()
            dist.all_reduce(part)
            came = torch.zeros(8)
            torch_private.all_to_all(came, torch.arange(8.0), None).wait()
    assert whole.tolist() == [1.0, 2.0] * 4
    assert part.tolist() == [2.0, 3.0] and came.tolist() == [2.0, 3.0] * 4
    assert [message.modelled_s for message in measured.messages] == [0.0] * 4
    assert measured.exposed_s < 1e-3


def test_a_grouped_gather_is_one_message() -> None:
    with joined(1, 4), emulate(Network(bandwidth=1e9, latency=1e-3)) as emulation:
        full = torch.zeros(20)
        outputs, own = [full[:8], full[8:]], [full[2:4], full[11:14]]  # rank 1's, in their places
        own[0].copy_(torch.tensor([1.0, 2.0]))
        own[1].copy_(torch.tensor([3.0, 4.0, 5.0]))
        with emulation.measure(CPU) as measured:
            torch_private.all_gather_grouped(outputs, own, dist.group.WORLD).wait()
    assert full.tolist() == [1.0, 2.0] * 4 + [3.0, 4.0, 5.0] * 4
    assert emulation.calls == {"all_gather": 1} and emulation.sent["all_gather"] == 80
    (message,) = measured.messages
    assert message.modelled_s == pytest.approx(1e-3 + 80 * 3 / 4 / 1e9)


def test_every_gather_mode_meets_the_network() -> None:
    """And sends the same bytes, whatever the calls."""
    sent = {}
    for mode in ("packed", "grouped", "each"):
        with stepping("shardwise", Plan.of("zero3", 4, gather=mode)) as (emulation, _):
            sent[mode] = emulation.sent["all_gather"], emulation.calls["all_gather"]
    assert sent["packed"] == sent["grouped"] and sent["each"][0] == sent["packed"][0]
    assert sent["each"][1] > sent["packed"][1]


def test_names_and_models_are_as_before_when_it_closes() -> None:
    def replaced() -> tuple[object, ...]:
        single = dist.all_reduce, dist.all_to_all_single, getattr(dist, torch_private.ALL_GATHER)
        return *single, torch_private.all_gather_grouped, DistributedDataParallel.forward

    before = replaced()
    with joined(0, 2):
        with pytest.raises(KeyError), emulate(Network()):
            raise KeyError
        after = replaced()
    assert before == after


# What a GPU runs, in Triton's interpreter


def test_where_the_moves_of_a_grouped_gather_read_and_write() -> None:
    full, master = torch.zeros(100), torch.zeros(40)
    pairs = [(full[8:24], master[:4]), (full[48:80], master[10:18])]
    moves = [Move(target, source, 4, source, 0, (0, 0)) for target, source in pairs]
    assert offsets_of(moves) == ((0, 0, 4), (40, 10, 8))


@given(st.lists(st.integers(1, 300), min_size=1, max_size=6), st.integers(1, 20))
def test_copies_are_dealt_whole_and_evenly(counts: list[int], workers: int) -> None:
    begins = [sum(counts[:i]) for i in range(len(counts))]
    places = tuple((8 * at, at, count) for at, count in zip(begins, counts, strict=True))
    jobs = deal(places, block=16, workers=workers)
    moved = {at + i: to + i for to, at, count, _ in jobs for i in range(count)}
    assert moved == {at + i: to + i for to, at, count in places for i in range(count)}
    assert sum(count for _, _, count, _ in jobs) == sum(counts)  # nothing twice
    assert len(jobs) <= workers + len(counts)


def test_what_streams_add_comes_off_a_transfer_s_fixed_part_first() -> None:
    assert Transfer(20e-6, 1e-3).less(7e-6) == Transfer(pytest.approx(13e-6), 1e-3)
    assert Transfer(5e-6, 1e-3).less(7e-6) == Transfer(0.0, pytest.approx(998e-6))
    assert Transfer(1e-6, 1e-6).less(7e-6) == Transfer(0.0, 0.0)


def test_the_kernel_copies_every_piece_into_its_rows() -> None:
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    with ProcessPoolExecutor(1, get_context("spawn"), _interpret) as pool:
        full = pool.submit(_deliver).result()
    rows = torch.tensor(full)
    assert torch.equal(rows[:80].view(4, 20), torch.arange(20.0).expand(4, 20))
    assert torch.equal(rows[80:132].view(4, 13), torch.arange(30.0, 43.0).expand(4, 13))
    assert torch.equal(rows[132:], torch.full((5,), -1.0))


def _interpret() -> None:
    os.environ["TRITON_INTERPRET"] = "1"


def _deliver() -> list[float]:
    """Two pieces, 20 and 13 elements, into 4 rows each, in three jobs of up to 16 elements."""
    from shardwise.emulation import kernels

    source, full = torch.arange(64.0), torch.full((137,), -1.0)
    jobs = torch.tensor(deal(((0, 0, 20), (80, 30, 13)), block=8, workers=3))
    kernels.deliver[(len(jobs),)](full, source, jobs, 4, BLOCK=8, ALIGNED=False)
    return full.tolist()


# Engines on it


@contextmanager
def stepping(engine: str, plan: Plan) -> Iterator[tuple[object, object]]:
    """A second step of `engine`, counted; gives its emulation and model."""
    with joined(1, plan.world), emulate(Network()) as emulation:
        built = build(engine, SUBJECT, plan, CPU, SUBJECT.draw_rows(CPU))
        built.steps[0]()
        emulation.calls.clear()
        emulation.sent.clear()
        built.steps[0]()
        for parameter in built.model.parameters():
            assert torch.isfinite(torch_private.local_of(parameter)).all()
        yield emulation, built.model


PLANS = [
    Plan.of("ddp", 4, reduce="naive"),
    Plan.of("ddp", 4, reduce="flat"),
    Plan.of("ddp", 4, reduce="overlap"),
    Plan.of("ddp", 4, reduce="bucketed", bucket_bytes=2**16),
    Plan.of("zero1", 4),
    Plan.of("zero2", 4),
    Plan.of("zero3", 4),
    Plan.of("hsdp", (2, 2)),
    Plan.of("zero3", 4, reduce_dtype="bfloat16", sum_dtype="float32", gather_dtype="int8"),
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.name}-{plan.reduce}")
def test_every_plan_sends_the_bytes_of_its_formula(plan: Plan) -> None:
    with stepping("shardwise", plan) as (emulation, model):
        expected = count_sent(engine_of(model).plan)
        sent = {
            name: nbytes * (2 if name == "all_reduce" else 1)
            for name, nbytes in emulation.sent.items()
        }
        n, r = plan.shard, plan.replicate
        assert sent.get("all_gather", 0) * (n - 1) / n == pytest.approx(expected.all_gather)
        assert sent.get("reduce_scatter", 0) * (n - 1) / n == pytest.approx(expected.reduce_scatter)
        assert sent.get("all_reduce", 0) * (r - 1) / r == pytest.approx(expected.all_reduce)
        assert sent.get("all_to_all", 0) * (n - 1) / n == pytest.approx(expected.all_to_all)


@pytest.mark.parametrize(
    "plan", [Plan.of("zero3", 4), Plan.of("zero2", 4), Plan.of("hsdp", (2, 2))]
)
def test_fsdp2_meets_the_network_as_often_as_shardwise(plan: Plan) -> None:
    calls = []
    for engine in ("shardwise", "torch"):
        with stepping(engine, plan) as (emulation, _):
            calls.append(dict(emulation.calls))
    ours, theirs = calls
    assert theirs["reduce_scatter"] == len(SUBJECT.build().layers) + 1
    assert set(ours) == set(theirs)


def test_ddp_s_buckets_go_over_the_network() -> None:
    with stepping("torch", Plan.of("ddp", 4)) as (emulation, model):
        assert dict(emulation.calls).keys() == {"all_reduce"}
        total = sum(parameter.nbytes for parameter in model.parameters())
        assert emulation.sent["all_reduce"] == total


@pytest.mark.quiet
def test_ddp_waits_for_its_buckets_and_is_whole_afterwards() -> None:
    with joined(0, 2):
        model = DistributedDataParallel(nn.Linear(64, 64))
        with emulate(Network(latency=0.05)) as emulation:
            with emulation.measure(CPU) as measured:
                began = time.perf_counter()
                model(torch.ones(1, 64)).sum().backward()
                taken = time.perf_counter() - began
            assert taken >= 0.05
            assert measured.exposed_s > 0.5 * 0.05
        # Outside an emulation the hook averages, as torch itself does: over two equal ranks, of
        # which the fake group sends nothing, that halves the gradient.
        model.zero_grad()
        model(torch.ones(1, 64)).sum().backward()
        assert torch.allclose(model.module.weight.grad, torch.full((64, 64), 0.5))


def test_a_hook_of_the_user_s_own_is_told_what_is_missing() -> None:
    with joined(0, 2), emulate(Network()):
        work = dist.all_reduce(torch.ones(2), async_op=True)
        with pytest.raises(NotImplementedError, match="has no future"):
            work.get_future()


# Exposure


@pytest.mark.quiet
@pytest.mark.parametrize(("engine", "name"), [("shardwise", "zero3"), ("torch", "ddp")])
def test_a_slow_network_is_exposed_by_both_ways_to_see_it(engine: str, name: str) -> None:
    """So slow that nothing of it hides: what the model says is what the step waits."""
    plan = Plan.of(name, 2)
    network = Network(bandwidth=math.inf, latency=0.03)
    job = Job(SUBJECT, plan, 0, CPU, network, "planted", steps=3)
    with joined(0, 2):
        (figures,) = run(job, (engine,), lambda message: None)
    modelled = 30.0 * sum(figures["calls"].values())
    assert 0.6 * modelled < figures["exposed_ms"] <= 1.1 * modelled
    assert figures["counterfactual_ms"] == pytest.approx(figures["exposed_ms"], rel=0.4)
    assert figures["step_ms"] > figures["free_step_ms"]


# The command

COMMAND = [sys.executable, "-m", "shardwise.cli", "emulate", "--model", "tiny", "--seq", "8"]


def test_one_engine_alone_has_no_ratio() -> None:
    options = ["--mesh", "2", "--steps", "2", "--network", "free"]
    shown = subprocess.run(
        [*COMMAND, *options], capture_output=True, text=True, check=False, timeout=240
    )
    assert shown.returncode == 0, shown.stderr
    assert "zero3, rank 0 of 1x2" in shown.stdout and "ratio" not in shown.stdout


def test_the_command_compares_both_engines_and_writes_every_figure(tmp_path) -> None:
    path = tmp_path / "out.json"
    options = ["--world", "8", "--mesh", "2x4", "--engine", "both", "--steps", "2"]
    shown = subprocess.run(
        [*COMMAND, *options, "--network", "1e9", "--json", str(path)],
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    for word in ("shardwise", "torch", "ratio", "exposed", "counterfactual", "emulated: 1e9"):
        assert word in shown.stdout
    rows = json.loads(path.read_text())["rows"]
    assert [row["engine"] for row in rows] == ["shardwise", "torch"]
    for row in rows:
        assert row["plan"] == "hsdp over zero3" and row["mesh"] == [2, 4]
        assert row["step_ms"] > 0 and row["peak_bytes"] > 0 and row["exposed_ms"] > 0
        assert row["device_ms"] > 0 and row["reserved_bytes"] is None  # a CPU's allocator has none
        assert {message["ranks"] for message in row["messages"]} == {2, 4}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--world", "100", "--mesh", "16x8"], "mesh 16x8 has 128 ranks, but --world is 100"),
        (["--mesh", "4", "--rank", "4"], "--rank 4: expected 0 to 3"),
        (["--mesh", "4", "--plan", "zero1", "--engine", "torch"], "torch has no engine for zero1"),
        (["--mesh", "4", "--network", "fast"], "--network fast: expected modelled, free, or"),
        (["--mesh", "4", "--plan", "zreo3"], "--plan zreo3 is no file, and no strategy"),
        (["--mesh", "4", "--model", "tyni"], "unknown model 'tyni'"),
        (["--mesh", "4", "--batch", "0"], "--batch 0: expected a number"),
        (["--plan", "zero3"], "--mesh or --world is needed"),
        (["--mesh", "4", "--occupancy", "16"], "--occupancy 16 on cpu: expected"),
        (["--mesh", "4", "--json", "/tmp"], "--json /tmp is a folder"),
        (["--mesh", "4", "--out", "/proc/new"], "--out /proc/new: "),
        (["--world", "8", "--model", "llama405b", "--plan", "zero2"], "keeps"),
        (["--plan", "EMPTY"], "this is not JSON"),
        (["--plan", "OTHER"], "a Plan has no key 'rows'"),
    ],
)
def test_wrong_input_is_one_message(options, message, capsys, tmp_path) -> None:
    (tmp_path / "EMPTY").write_text("")
    (tmp_path / "OTHER").write_text('{"rows": []}')
    options = [str(tmp_path / word) if word.isupper() else word for word in options]
    assert main(["emulate", "--device", "cpu", *options]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and message in shown.err and "Traceback" not in shown.err


@pytest.mark.parametrize(
    ("name", "mesh", "ways"),
    [
        ("zero3", 8, ["shard over more ranks (--mesh)"]),
        ("hsdp", (2, 4), ["shard over more ranks (--mesh)"]),
        ("zero1", 8, ["shard over more ranks (--mesh)", "use --plan zero3"]),
        ("ddp", 8, ["use --plan zero3 --mesh 1x8"]),
    ],
)
def test_nobody_is_told_to_do_what_he_does(name: str, mesh: Any, ways: list[str]) -> None:
    assert ways_to_keep_less(Plan.of(name, mesh)) == ways
