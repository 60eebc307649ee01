"""Dataclasses read from tables: what is wrong is told with its path, bounds hold in code too."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest

from shardwise.checked import Count, Reader, Share, check_bounds
from shardwise.description.cluster import Cluster
from shardwise.description.cluster_toml import parse_cluster, write_cluster
from shardwise.errors import UserError


@dataclass(frozen=True)
class Link:
    name: str
    ranks: Count | None
    share: Share = 1.0
    kind: Literal["wire", "air"] = "wire"
    sizes: tuple[int, ...] = ()
    cache: Any = field(default=None, compare=False)

    def __post_init__(self) -> None:
        check_bounds(self, "link: ")


@dataclass(frozen=True)
class Net:
    links: Annotated[tuple[Link, ...], "a note"] = field(metadata={"key": "link"})


def read(**table: Any) -> Net:
    return Reader("file: ").read(Net, {"link": [table]}, "net")


def test_a_table_becomes_a_dataclass() -> None:
    (link,) = read(name="nvlink", share=1, sizes=[1, 2]).links
    assert link == Link("nvlink", None, 1.0, sizes=(1, 2)) and type(link.share) is float
    named = Reader().read_named(Link, {"a": {"ranks": 2}, "b": {}})
    assert named == (Link("a", 2), Link("b", None))


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ({}, r"file: net\.link\.0\.name is missing"),
        ({"name": 3}, r"file: net\.link\.0\.name must be a string, got 3"),
        ({"name": "a", "shar": 1}, r"unknown key net\.link\.0\.shar: did you mean 'share'"),
        ({"name": "a", "cache": 1}, r"unknown key net\.link\.0\.cache"),
        ({"name": "a", "ranks": True}, r"ranks must be a whole number, got True"),
        ({"name": "a", "kind": "wir"}, r"kind = 'wir' is not a choice: did you mean 'wire'"),
        ({"name": "a", "sizes": 3}, r"net\.link\.0\.sizes must be a list"),
        ({"name": "a", "sizes": ["b"]}, r"net\.link\.0\.sizes\.0 must be a whole number, got 'b'"),
    ],
)
def test_what_is_wrong_is_told_with_its_path(table: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=told):
        read(**table)


def test_bounds_hold_at_birth() -> None:
    with pytest.raises(ValueError, match=r"link: share is 2, expected a share in \(0, 1\]"):
        Link("a", None, 2)
    with pytest.raises(ValueError, match="link: ranks is 0, expected a number >= 1"):
        Link("a", 0)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("points_source =", "# ", r"device\.matmul\.\w+\.points have no points_source"),
        (
            "    [",
            "    [1, ",
            r"a row of device\.matmul\.\w+\.points has the entries m, n, k, FLOP.s, .*, got \[1, ",
        ),
        ("[host]", "[host]\npoints_source = 'x'", "unknown key host.points_source"),
        ("[contention]", "[other]", "unknown key other"),
    ],
)
def test_measured_points_of_a_cluster_file(old: str, new: str, told: str) -> None:
    text = write_cluster(Cluster.load("h200x8-measured"))
    assert old in text
    with pytest.raises(UserError, match=told):
        parse_cluster(text.replace(old, new, 1), "x.toml")
