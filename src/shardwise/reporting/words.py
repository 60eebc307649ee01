"""Numbers and names as people read them. The page's script formats alike, and a test compares."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

COLLECTIVES = {
    "gather": "all-gather",
    "all_gather": "all-gather",
    "scatter": "reduce-scatter",
    "reduce_scatter": "reduce-scatter",
    "reduce": "all-reduce",
    "all_reduce": "all-reduce",
}
PARTS = {
    "compute": "compute",
    "contention": "contention",
    "exposed_transfer": "exposed transfer",
    "waiting_for_peers": "waiting for peers",
    "copies": "copies",
    "host_idle": "host idle",
}


def name_collective(name: str) -> str:
    """`all_gather`, `gather` and `all_gather_into_tensor` are all-gathers."""
    for key in sorted(COLLECTIVES, key=len, reverse=True):
        if name.startswith(key):
            return COLLECTIVES[key]
    return name


def show_time(nanoseconds: float) -> str:
    """4,120,000 is 4.12 ms."""
    value = nanoseconds / 1e6
    if abs(nanoseconds) < 500:
        return "0 ms"
    if abs(value) < 0.1:
        return f"{value * 1e3:.0f} µs"
    if abs(value) < 10:
        return f"{value:.2f} ms"
    if abs(value) < 100:
        return f"{value:.1f} ms"
    return f"{value:,.0f} ms"


def show_share(share: float) -> str:
    """0.254 is 25 %, 0.034 is 3.4 %."""
    percent = 100 * share
    return f"{percent:.1f} %" if 0.05 <= abs(percent) < 9.95 else f"{percent:.0f} %"


def show_bytes(count: float | None) -> str:
    """1,610,612,736 is 1.50 GiB."""
    if count is None:
        return "unknown"
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            digits = 0 if unit == "B" or abs(count) >= 100 else 1
            return f"{count:.{digits}f} {unit}"
        count /= 1024
    return f"{count:,.2f} GiB"


def name_unit(unit: str) -> str:
    """A unit's name; one that is a bare number says what it counts."""
    return f"unit {unit}" if unit.isdigit() else unit or "the root"


def name_units(units: Iterable[str], most: int = 4) -> str:
    """`layers.0 .. layers.3` are "layers 0 to 3"; the rest is listed, at most `most` of them."""
    names = list(dict.fromkeys(units))
    runs: list[list[str]] = []
    for name in names:
        if runs and _follows(runs[-1][-1], name):
            runs[-1].append(name)
        else:
            runs.append([name])
    shown = [_name_run(run) for run in runs]
    if len(shown) > most:
        rest = sum(len(run) for run in runs[most:])
        return f"{', '.join(shown[:most])} and {rest} more"
    return join(shown)


def join(words: Sequence[str]) -> str:
    """a, b and c."""
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def _split(name: str) -> tuple[str, int] | None:
    found = re.fullmatch(r"(.*?)\.?(\d+)", name)
    return (found[1], int(found[2])) if found else None


def _follows(before: str, name: str) -> bool:
    a, b = _split(before), _split(name)
    return a is not None and b is not None and a[0] == b[0] and abs(a[1] - b[1]) == 1


def _name_run(run: list[str]) -> str:
    if len(run) == 1:
        return name_unit(run[0])
    first, last = _split(run[0]), _split(run[-1])
    assert first is not None and last is not None
    low, high = sorted((first[1], last[1]))
    return f"{first[0] or 'units'} {low} {'and' if len(run) == 2 else 'to'} {high}"
