"""The memory curves of `shardwise bench memory` as one SVG of small panels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

Row = dict[str, Any]
_WIDTH, _HEIGHT, _GAP = 250, 130, 16
_LEFT, _TOP = 48, 64
_PHASES = {"forward": "#dbe9f4", "backward": "#fbe3d0", "optimizer": "#e0efdc"}
_CURVE, _SEED = "#2a6f97", "#c0392b"


def draw_curves(rows: Sequence[Row], path: Path) -> None:
    """Write the picture; rows without a curve are left out."""
    path.write_text(make_picture(rows), encoding="utf-8")


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
    width = _LEFT + len(columns) * (_WIDTH + _GAP)
    height = _TOP + len(lines) * (_HEIGHT + 2 * _GAP + 8) + 24
    title = f"Memory of the {drawn[-1]['size']} model over time" if drawn else "No curve"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="20" font-size="14">{escape(title)}</text>',
        *_legend(),
    ]
    for row in drawn:
        column = columns.index(row["context"])
        line = lines.index((row["mode"], row["precision"]))
        x = _LEFT + column * (_WIDTH + _GAP)
        y = _TOP + line * (_HEIGHT + 2 * _GAP + 8) + _GAP
        parts += _panel(row, x, y, top, scale=column == 0)
    return "\n".join([*parts, "</svg>", ""])


def _legend() -> list[str]:
    parts, x = [], _LEFT
    for name, color in _PHASES.items():
        parts.append(f'<rect x="{x}" y="30" width="14" height="11" fill="{color}"/>')
        parts.append(f'<text x="{x + 18}" y="40">{name}</text>')
        x += 90
    parts.append(f'<line x1="{x}" y1="36" x2="{x + 18}" y2="36" stroke="{_SEED}" '
                 'stroke-dasharray="4 3"/>')  # fmt: skip
    parts.append(f'<text x="{x + 24}" y="40">peak that seed 004 gives</text>')
    return parts


def _panel(row: Row, x: int, y: int, top: float, scale: bool) -> list[str]:
    curve = row["curve"]
    end = max(curve["ms"][-1], *(phase[2] for phase in curve["phases"]), 1e-9)

    def at(ms: float) -> float:
        return round(x + ms / end * _WIDTH, 1)

    def up(mib: float) -> float:
        return round(y + _HEIGHT - mib / top * _HEIGHT, 1)

    words = f"{row['mode']}, {row['precision']}, {row['context']} tokens"
    peak = max(told["bytes"] for told in row["peaks"]) / 1e9
    parts = [f'<text x="{x}" y="{y - 5}">{escape(words)}: {peak:.1f} GB</text>']
    for name, start, stop in curve["phases"]:
        parts.append(
            f'<rect x="{at(start)}" y="{y}" width="{max(0.0, at(stop) - at(start)):.1f}" '
            f'height="{_HEIGHT}" fill="{_PHASES.get(name, "#eeeeee")}"/>'
        )
    steps = [f"M{at(curve['ms'][0])},{up(0)}"]
    for ms, mib in zip(curve["ms"], curve["mib"], strict=True):
        steps += [f"H{at(ms)}", f"V{up(mib)}"]
    steps += [f"H{at(end)}", f"V{up(0)}", "Z"]
    parts.append(
        f'<path d="{" ".join(steps)}" fill="{_CURVE}" fill-opacity="0.35" stroke="{_CURVE}"/>'
    )
    if row["seed"]:
        level = up(row["seed"]["gb"] * 1e9 / 2**20)
        parts.append(f'<line x1="{x}" y1="{level}" x2="{x + _WIDTH}" y2="{level}" '
                     f'stroke="{_SEED}" stroke-dasharray="4 3"/>')  # fmt: skip
    parts.append(f'<line x1="{x}" y1="{up(0)}" x2="{x + _WIDTH}" y2="{up(0)}" stroke="#888"/>')
    parts.append(f'<text x="{x + _WIDTH}" y="{y + _HEIGHT + 13}" text-anchor="end" fill="#666">'
                 f"{end:.0f} ms</text>")  # fmt: skip
    if scale:
        for share in (0.0, 0.5, 1.0):
            level = share * top / 1.08
            parts.append(f'<text x="{x - 5}" y="{up(level) + 4}" text-anchor="end" fill="#666">'
                         f"{_gigabytes(level)}</text>")  # fmt: skip
    return parts


def _gigabytes(mib: float) -> str:
    gigabytes = mib * 2**20 / 1e9
    return f"{gigabytes:.0f} GB" if gigabytes >= 10 else f"{gigabytes:.2g} GB"
