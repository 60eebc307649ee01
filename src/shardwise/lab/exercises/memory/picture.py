"""The memory curves of `shardwise bench memory` as one SVG of small panels."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from shardwise.lab.svg import element, line, picture, rect, text
from shardwise.profiling.results import Row

_WIDTH, _HEIGHT, _GAP = 250, 130, 16
_LEFT, _TOP = 48, 64
_PHASES = {"forward": "#dbe9f4", "backward": "#fbe3d0", "optimizer": "#e0efdc"}
_CURVE, _SEED = "#2a6f97", "#c0392b"


def make_picture(rows: Sequence[Row]) -> str:
    """Panels of the largest model that has curves: contexts side by side, and below one another
    the passes and precisions, all on one scale.
    """
    drawn = [row for row in rows if "curve" in row]
    drawn = [row for row in drawn if row["size"] == drawn[-1]["size"]]
    lines = list(dict.fromkeys((row["mode"], row["precision"]) for row in drawn))
    lines.sort(key=lambda line: (line[0] == "step", line[1] != "fp32"))
    columns = sorted({row["context"] for row in drawn})
    tops = [max(row["curve"]["mib"]) for row in drawn]
    tops += [row["seed"]["gb"] * 1e9 / 2**20 for row in drawn if row["seed"]]
    top = 1.08 * max(tops, default=1.0)
    title = f"Memory of the {drawn[-1]['size']} model over time" if drawn else "No curve"
    parts = [text(_LEFT, 20, escape(title), font_size=14), *_legend()]
    for row in drawn:
        column = columns.index(row["context"])
        below = lines.index((row["mode"], row["precision"]))
        x = _LEFT + column * (_WIDTH + _GAP)
        y = _TOP + below * (_HEIGHT + 2 * _GAP + 8) + _GAP
        parts += _panel(row, x, y, top, scale=column == 0)
    width = _LEFT + len(columns) * (_WIDTH + _GAP)
    height = _TOP + len(lines) * (_HEIGHT + 2 * _GAP + 8) + 24
    return picture(width, height, escape(title), parts)


def _legend() -> list[str]:
    parts, x = [], _LEFT
    for name, color in _PHASES.items():
        parts += [rect(x, 30, 14, 11, color), text(x + 18, 40, name)]
        x += 90
    parts.append(line(x, 36, x + 18, 36, stroke=_SEED, stroke_dasharray="4 3"))
    return [*parts, text(x + 24, 40, "peak that seed 004 gives")]


def _panel(row: Row, x: int, y: int, top: float, scale: bool) -> list[str]:
    curve = row["curve"]
    end = max(curve["ms"][-1], *(phase[2] for phase in curve["phases"]), 1e-9)

    def at(ms: float) -> float:
        return round(x + ms / end * _WIDTH, 1)

    def up(mib: float) -> float:
        return round(y + _HEIGHT - mib / top * _HEIGHT, 1)

    name = f"{row['mode']}, {row['precision']}, {row['context']} tokens"
    peak = max(told["bytes"] for told in row["peaks"]) / 1e9
    parts = [text(x, y - 5, f"{escape(name)}: {peak:.1f} GB")]
    for name, start, stop in curve["phases"]:
        width = round(max(0.0, at(stop) - at(start)), 1)
        parts.append(rect(at(start), y, width, _HEIGHT, _PHASES.get(name, "#eeeeee")))
    steps = [f"M{at(curve['ms'][0])},{up(0)}"]
    for ms, mib in zip(curve["ms"], curve["mib"], strict=True):
        steps += [f"H{at(ms)}", f"V{up(mib)}"]
    outline = " ".join([*steps, f"H{at(end)}", f"V{up(0)}", "Z"])
    parts.append(element("path", d=outline, fill=_CURVE, fill_opacity="0.35", stroke=_CURVE))
    if row["seed"]:
        level = up(row["seed"]["gb"] * 1e9 / 2**20)
        parts.append(line(x, level, x + _WIDTH, level, stroke=_SEED, stroke_dasharray="4 3"))
    parts.append(line(x, up(0), x + _WIDTH, up(0), stroke="#888"))
    edge = {"text_anchor": "end", "fill": "#666"}
    parts.append(text(x + _WIDTH, y + _HEIGHT + 13, f"{end:.0f} ms", **edge))
    for share in (0.0, 0.5, 1.0) if scale else ():
        level = share * top / 1.08
        parts.append(text(x - 5, up(level) + 4, _gigabytes(level), **edge))
    return parts


def _gigabytes(mib: float) -> str:
    gigabytes = mib * 2**20 / 1e9
    return f"{gigabytes:.0f} GB" if gigabytes >= 10 else f"{gigabytes:.2g} GB"
