"""`shardwise bench bytes`: what is made of curves, bytes and steps. The runs that learn are the
command's own.
"""

from __future__ import annotations

import pytest

from shardwise.lab import levers
from shardwise.profiling.timing import describe_environment

PLAIN = [[5.0 - 0.01 * step + 0.1 * seed for step in range(40)] for seed in range(3)]


def _row(lever: str, curves: list[list[float]]) -> dict:
    return {"part": "curve", "lever": lever, "curves": curves, "sent": 1000.0}


def test_a_curve_is_as_far_as_its_mean_from_the_plain_one() -> None:
    plain = _row("plain", PLAIN)
    same = levers.compare_curve(plain, plain)
    assert same["distance"] == same["beyond"] == 0 and same["spread"] == pytest.approx(0.1)
    shifted = _row("all kept", [[loss + 0.15 for loss in curve] for curve in PLAIN])
    found = levers.compare_curve(shifted, plain)
    assert found["distance"] == pytest.approx(0.15) and found["beyond"] == 1
    assert found["end"] == pytest.approx(same["end"] + 0.15)
    # A bump counts, though the end is as before.
    bumped = _row("x", [[*curve[:20], *(9.0 for _ in range(10)), *curve[30:]] for curve in PLAIN])
    found = levers.compare_curve(bumped, plain)
    assert found["distance"] > 1 and found["beyond"] == 0.25 and found["end"] == same["end"]


def test_tables_and_picture_take_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"part": "bytes", "lever": name, **levers.count_bytes(name)}
        for name in ("plain", "32-bit sums", "fp8 gathers")
    ]
    side = {"step_ms": 10.0, "step_spread_ms": 1.0, "device_ms": None, "peak_bytes": 2**30}
    steps = {"plain": {**side, "ratio": 0.9, "ratio_spread": 0.01}, "x": {"failure": "no memory"}}
    rows += [_row("plain", PLAIN), _row("all kept", PLAIN)]
    rows.append({"part": "step", "case": "a case", "candidates": steps})
    levers.show(rows, {"environment": describe_environment("x"), "seeds": 3, "steps": 40})
    told = capsys.readouterr().out
    assert max(map(len, told.splitlines())) <= 80
    for words in ("32-bit sums", "inside", "0.90", "x: no memory"):
        assert words in told
    assert levers.draw(rows).count("<polyline") == 4
    plain, sums, codes = (row["sent"] for row in rows[:3])
    assert sums["all_to_all"] == plain["reduce_scatter"] / 2
    assert codes["all_gather"] < 0.52 * plain["all_gather"]
