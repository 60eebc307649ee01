"""`shardwise bench growth`: its rows, its tables, its picture."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
import torch.distributed as dist

from shardwise.emulation.run import fake_group
from shardwise.lab.growth import (
    WAYS,
    draw,
    measure_planner,
    measure_report,
    measure_start,
    measure_steps,
    show,
)
from shardwise.lab.steps import engines
from shardwise.profiling.timing import describe_environment


@pytest.mark.usefixtures("no_group")
def test_every_way_is_timed_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    calls = dist.all_gather_into_tensor, dist.reduce_scatter_tensor, dist.all_reduce
    rows = []
    for blocks, world in ((1, 8), (2, 8), (1, 128)):
        engines._meshes.clear()  # a run has a process for each world
        with fake_group(0, world):
            rows.append({"kind": "step", **measure_steps(blocks, world, 1)})
    engines._meshes.clear()
    with fake_group(0, 128):
        rows += [{"kind": "start", **measure_start(2, 128, way)} for way in WAYS]
    engines._meshes.clear()
    rows.append({"kind": "planner", **measure_planner(1, 8)})
    rows.append({"kind": "report", **measure_report(1, 8)})
    assert calls == (dist.all_gather_into_tensor, dist.reduce_scatter_tensor, dist.all_reduce)
    assert all(row[way]["step_ms"] > 0 for row in rows[:3] for way in WAYS)
    assert all(row["shard_s"] > 0 and row["first_step_s"] > 0 for row in rows[3:6])
    assert all(row["seconds"] > 0 for row in rows[6:])
    show(rows, {"environment": describe_environment()})
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    for way in WAYS:
        assert f"{way}: a block of 2 takes" in printed and "on 128 ranks" in printed
    names = ElementTree.fromstring(draw(rows)).itertext()
    assert {f"{way}, by {what}" for way in WAYS for what in ("blocks", "ranks")} <= set(names)
