"""Numbers and names as people read them. The page's script formats alike, and a test compares."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

# What a collective's name begins with; `reduce_scatter` comes before `reduce`.
_COLLECTIVES = (
    ("all_gather", "all-gather"),
    ("gather", "all-gather"),
    ("reduce_scatter", "reduce-scatter"),
    ("scatter", "reduce-scatter"),
    ("all_reduce", "all-reduce"),
    ("all_to_all", "all-to-all"),
    ("reduce", "all-reduce"),
)


def name_collective(name: str) -> str:
    """`all_gather`, `gather` and `all_gather_into_tensor` are all-gathers."""
    return next((full for begin, full in _COLLECTIVES if name.startswith(begin)), name)


def name_part(part: str) -> str:
    """A part of a Breakdown: `waiting_for_peers` is "waiting for peers"."""
    return part.replace("_", " ")


def show_time(nanoseconds: float) -> str:
    """4,120,000 is 4.12 ms."""
    value = nanoseconds / 1e6
    if abs(nanoseconds) < 500:
        return "0 ms"
    if abs(value) < 0.1:
        return f"{value * 1e3:.0f} µs"
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:,.{digits}f} ms"


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
    series: list[list[str]] = []  # names that follow each other
    for name in dict.fromkeys(units):
        if series and _follows(series[-1][-1], name):
            series[-1].append(name)
        else:
            series.append([name])
    shown = [_name_series(names) for names in series]
    if len(shown) > most:
        rest = sum(len(names) for names in series[most:])
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


def _name_series(names: list[str]) -> str:
    first, last = _split(names[0]), _split(names[-1])
    if len(names) == 1 or first is None or last is None:
        return name_unit(names[0])
    low, high = sorted((first[1], last[1]))
    return f"{first[0] or 'units'} {low} {'and' if len(names) == 2 else 'to'} {high}"
