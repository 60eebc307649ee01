"""Calibration: measures every path on two gloo ranks and writes a cluster that loads back."""

from __future__ import annotations

import dataclasses

import pytest

from shardwise.calibration.calibrate import assemble
from shardwise.calibration.measure import Findings, HostFindings, Sampled, TimedAttention
from shardwise.cli import main
from shardwise.description.cluster import COLLECTIVES, Cluster, CollectivePoint, MatmulPoint
from shardwise.description.cluster_toml import parse_cluster, write_cluster
from shardwise.description.collectives import Members, collective_time
from shardwise.errors import UserError


def findings() -> Findings:
    """As one GPU would give them: no links."""
    best = MatmulPoint(4096, 4096, 4096, 4e14, 1e12)
    return Findings(
        matmul={"bfloat16": [best, MatmulPoint(1024, 1024, 1024, 2e14, 2e12)]},
        attention=[TimedAttention(2**17, 4e12, Sampled(0.02, 0))],
        copy=Sampled(3e12, 1e10),
        kernel=Sampled(2e-6, 1e-7),
    )


def test_one_gpu_is_measured_and_its_links_are_taken_from_a_named_cluster(monkeypatch) -> None:
    host = HostFindings(Sampled(2e-5, 1e-6), Sampled(3e-4, 2e-5), Sampled(4e-5, 3e-6))
    h100 = Cluster.load("h100x8")
    monkeypatch.setattr("shardwise.calibration.calibrate.memory_of_rank", lambda *_: 8e10)
    monkeypatch.setattr(
        "shardwise.calibration.calibrate.describe_environment",
        lambda: {"gpu": "G", "torch": "2", "load_at_start": 0.0, "cpu": "C", "cores": 2},
    )
    made = assemble("mine", findings(), host, "cuda", 1, h100)
    cluster = made.cluster
    assert cluster.levels == h100.levels
    assert cluster.communication_share_of_compute == h100.communication_share_of_compute
    assert cluster.device.rate_of("bfloat16").peak == 4e14
    assert cluster.device.attention_fraction == 0.5
    assert cluster.host.op_s == 2e-5  # the host does not run the kernel
    assert not cluster.host.communicates
    assert cluster.host.cast_s == 4e-5
    sources = dict(cluster.sources)
    assert sources["level.0.bandwidth_bytes_per_s"].startswith("cluster h100x8: ")
    assert sources["device.kernel_s"].startswith("measured by shardwise calibrate")
    again = parse_cluster(write_cluster(cluster, made.spreads), "mine.toml")
    assert dataclasses.replace(again, sources=()) == dataclasses.replace(cluster, sources=())
    assert "spread = 1e-07" in write_cluster(cluster, made.spreads)


def test_two_hosts_have_a_level_for_each_kind_of_link() -> None:
    host = HostFindings(Sampled(2e-5, 0), Sampled(3e-4, 0), Sampled(4e-5, 0))
    found = findings()
    for seconds, ranks, inside, points in (
        (0.001, 2, 1, found.collectives),
        (0.08, 2, 1, found.between_hosts),
        (0.06, 4, 2, found.between_hosts),
    ):
        points += [CollectivePoint(kind, ranks, 2**20, seconds, 0, inside) for kind in COLLECTIVES]
    made = assemble("mine", found, host, "cpu", 4, None, hosts=2)
    inner, outer = made.cluster.levels
    assert (inner.name, inner.ranks) == ("in a host", 2)
    assert (outer.name, outer.ranks) == ("between hosts", None)
    assert outer.bandwidth_bytes_per_s == pytest.approx(2**19 / 0.08)
    text = write_cluster(made.cluster, made.spreads)
    again = parse_cluster(text, "mine.toml")
    assert again.levels == made.cluster.levels
    assert collective_time(again, "all_reduce", 2**20, Members(2, stride=2)) == 0.08
    assert collective_time(again, "all_reduce", 2**20, Members(4)) == 0.06
    assert '["all_gather", 2, 1048576, 0.001, 0],' in text  # as before there were hosts
    told = text.replace("0.06, 0, 2]", "0.06, 0, 2, 9]")
    with pytest.raises(UserError, match="has the entries kind, ranks, bytes, seconds, spread"):
        parse_cluster(told, "mine.toml")


@pytest.mark.slow
def test_the_command_measures_two_ranks_and_the_file_loads_back(tmp_path, capsys) -> None:
    out = tmp_path / "mine.toml"
    assert main(["calibrate", "--quick", "--device", "cpu", "--out", str(out)]) == 0
    shown = capsys.readouterr()
    assert "best float32 product" in shown.out and f"wrote {out}" in shown.out
    assert "measuring matrix products in float32" in shown.err
    cluster = Cluster.load(out)
    assert cluster.name == "mine" and cluster.host.communicates
    assert cluster.host.cast_s is not None
    assert {p.kind for p in cluster.levels[0].points} == set(COLLECTIVES)
    assert {p.ranks for p in cluster.levels[0].points} == {2}
    assert "spread = " in out.read_text()
    assert collective_time(cluster, "all_gather", 2**18, 2) > 0
    assert cluster.device.rate_of("float32").rate(100, 100, 100) > 1e6


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--out", "x.json"], "--out x.json: a cluster file ends in .toml"),
        (["--out", "absent/x.toml"], "there is no folder absent"),
        (["--out", "x.toml", "--ranks", "0"], "--ranks is 0, expected at least 1"),
        (["--out", "x.toml", "--links", "h10"], "unknown cluster 'h10'"),
    ],
)
def test_wrong_arguments_are_told_before_anything_is_measured(arguments, told, capsys) -> None:
    assert main(["calibrate", *arguments]) == 2
    assert told in capsys.readouterr().err


def test_ranks_are_torchruns_where_it_has_started_them(monkeypatch, capsys) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["calibrate", "--out", "x.toml", "--ranks", "2"]) == 2
    assert "--ranks: torchrun has started the ranks already" in capsys.readouterr().err
