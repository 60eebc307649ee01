"""`shardwise bench gather` on two real ranks."""

from __future__ import annotations

from shardwise.lab.steps.gather import MODES, measure


def test_every_mode_is_timed_for_every_size() -> None:
    rows = measure(rounds=2, widths=(16, 32))
    assert [row["tensor_bytes"] for row in rows] == [1024, 4096]
    for row in rows:
        assert set(row["median_ms"]) == set(MODES) and min(row["median_ms"].values()) > 0
        medians = row["median_ms"]
        assert row["each_over_packed"] == medians["each"] / medians["packed"]
