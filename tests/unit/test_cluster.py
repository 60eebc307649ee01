"""Cluster files: every number has a source, wrong files say what is wrong, and files round-trip."""

from __future__ import annotations

import dataclasses

import pytest

from shardwise.description.cluster import (
    Cluster,
    CollectivePoint,
    Device,
    Host,
    Level,
    MatmulPoint,
    MatmulRate,
    Protocol,
    known_clusters,
)
from shardwise.description.cluster_toml import parse_cluster, write_cluster
from shardwise.errors import UserError

NAMES = ("a100x8", "b200x8", "cpu-gloo", "h100x8", "h200x8", "h200x8-measured", "tpu-v5p", "v100x8")


def test_the_packaged_clusters() -> None:
    assert set(NAMES) == set(known_clusters())


@pytest.mark.parametrize("name", NAMES)
def test_every_number_has_a_source_and_the_file_round_trips(name: str) -> None:
    cluster = Cluster.load(name)
    assert cluster.name == name
    keys = [key for key, _ in cluster.sources]
    assert len(set(keys)) == len(keys)
    for key in ("device.memory_bytes", "level.0.bandwidth_bytes_per_s", "host.op_s"):
        assert key in keys
    assert all(source.strip() for _, source in cluster.sources)
    again = parse_cluster(write_cluster(cluster), name)
    assert dataclasses.replace(again, sources=()) == dataclasses.replace(cluster, sources=())
    assert dict(again.sources) == dict(cluster.sources)


@pytest.mark.parametrize("name", [n for n in NAMES if "x8" in n])
def test_gpu_nodes_have_eight_devices_and_slower_links_between_them(name: str) -> None:
    cluster = Cluster.load(name)
    inner, outer = cluster.levels
    assert (inner.ranks, outer.ranks) == (8, None)
    assert outer.bandwidth_bytes_per_s < inner.bandwidth_bytes_per_s
    assert outer.latency_s > inner.latency_s
    assert 0 < cluster.communication_share_of_compute < 0.3


def test_known_figures() -> None:
    h100, h200 = Cluster.load("h100x8").device, Cluster.load("h200x8").device
    assert h100.rate_of("bfloat16").peak == 989.4e12
    assert h200.bandwidth_bytes_per_s == 4.8e12
    assert 78 * 2**30 < h100.memory_bytes < 80 * 2**30
    assert Cluster.load("tpu-v5p").device.rate_of("bfloat16").achievable == 4.6e14


def test_unknown_names_and_files(tmp_path) -> None:
    with pytest.raises(UserError, match=r"unknown cluster 'h100x4': did you mean 'h100x8'.*Valid"):
        Cluster.load("h100x4")
    with pytest.raises(UserError, match="cannot read the cluster file"):
        Cluster.load(tmp_path / "absent.toml")
    path = tmp_path / "mine.toml"
    path.write_text(write_cluster(Cluster.load("h100x8")))
    assert Cluster.load(path).device == Cluster.load("h100x8").device


GOOD = write_cluster(Cluster.load("tpu-v5p"))


def test_a_file_that_is_no_text_is_told(tmp_path) -> None:
    (tmp_path / "c.toml").write_bytes(b"\x80\x81")
    with pytest.raises(UserError, match="is not text"):
        Cluster.load(tmp_path / "c.toml")


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("value = 1.8e+11", "value = -1", "bandwidth_bytes_per_s is -1.0, expected a number >= 1"),
        ("value = 180000000000", "value = true", "must be a number, got True"),
        ("[host]", "[hosts]", "unknown key hosts: did you mean 'host'"),
        ("kernel_s = {", "kernel = {", "unknown key device.kernel: did you mean 'kernel_s'"),
        ('name = "ici"', "name = 3", "level.0.name must be a string, got 3"),
        ("[[level]]", "[level]", "must be written"),
        ("communicates = false", "communicates = 1", "must be true or false"),
        ("name =", "name", "is not valid TOML"),
    ],
)
def test_wrong_files_say_what_is_wrong(old: str, new: str, told: str) -> None:
    text = GOOD.replace("value = 180000000000", "value = 1.8e+11") if "e+11" in old else GOOD
    assert old in text
    with pytest.raises(UserError, match=told):
        parse_cluster(text.replace(old, new, 1), "x.toml")


def test_a_number_without_a_source_is_refused() -> None:
    lines = [
        "memory_bytes = 5" if line.startswith("memory_bytes") else line
        for line in GOOD.splitlines()
    ]
    with pytest.raises(UserError, match=r"device.memory_bytes is 5, expected .* source ="):
        parse_cluster("\n".join(lines), "x.toml")


def test_values_check_themselves() -> None:
    rate = MatmulRate("float32", 1e12, 0.5)
    with pytest.raises(ValueError, match=r"fraction of float32 is 1.5, expected a share in"):
        MatmulRate("float32", 1e12, 1.5)
    with pytest.raises(ValueError, match="has no matmul rate for any dtype"):
        Device("d", 1e9, 1e9, 0.9, 0.0, ())
    device = Device("d", 1e9, 1e9, 0.9, 0.0, (rate,))
    with pytest.raises(ValueError, match="no matmul rate for bfloat16; it has float32"):
        device.rate_of("bfloat16")
    shares = {name: device.product_rate_of(name) for name in ("float32", "complex64", "float64")}
    assert shares == {"float32": (rate, 1.0), "complex64": (rate, 0.25), "float64": (rate, 0.5)}
    assert device.product_rate_of("complex128") == (rate, 0.125)
    assert device.product_rate_of("int8") == (rate, 1.0)
    with pytest.raises(ValueError, match="took 0 s"):
        CollectivePoint("all_gather", 2, 8, 0)
    with pytest.raises(ValueError, match="collective 'broadcast'"):
        CollectivePoint("broadcast", 2, 8, 1)
    with pytest.raises(ValueError, match="no protocol"):
        Level("l", 8, 1e9, ())
    protocol = Protocol("p", 0, 0)
    inner, odd = Level("a", 8, 1e9, (protocol,)), Level("b", 12, 1e9, (protocol,))
    with pytest.raises(ValueError, match="whole number of groups"):
        Cluster("c", device, (inner, odd), Host(0, 0, 0))
    with pytest.raises(ValueError, match=r"communication_share_of_compute is 1, expected"):
        Cluster("c", device, (inner,), Host(0, 0, 0), communication_share_of_compute=1)


def test_measured_matmul_points_decide_near_them() -> None:
    points = (MatmulPoint(128, 128, 128, 1e9), MatmulPoint(4096, 4096, 4096, 1e12))
    rate = MatmulRate("float32", 2e12, 0.5, points)
    assert rate.rate(128, 128, 128) == 1e9
    assert rate.rate(4096, 4096, 4096) == 1e12
    assert 1e9 < rate.rate(1024, 1024, 1024) < 1e12
    assert rate.rate(3000, 4096, 4096) > 0.9e12
    assert MatmulRate("float32", 2e12, 0.5).rate(8, 8, 8) == 1e12


def test_a_cast_has_its_own_figure_and_older_files_have_none() -> None:
    packaged = Cluster.load("h200x8")
    assert packaged.host.cast_s == packaged.host.seconds_to_cast < packaged.host.unit_s / 5
    lines = write_cluster(packaged).splitlines(keepends=True)
    older = parse_cluster("".join(line for line in lines if "cast_s" not in line), "older.toml")
    assert older.host.cast_s is None
    assert older.host.seconds_to_cast == pytest.approx(packaged.host.seconds_to_cast, rel=0.05)
    assert parse_cluster(write_cluster(older), "again.toml").host == older.host
    with pytest.raises(ValueError, match="cast_s"):
        Host(0.0, 0.0, 0.0, cast_s=-1.0)
