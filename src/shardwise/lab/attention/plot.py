"""The picture of `shardwise bench attention`: TFLOP/s against the sequence length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]
_COLUMNS, _PANEL, _HEIGHT, _TOP = 3, 300, 210, 58
_INNER = (44, 26, 236, 140)  # of a panel: left, top, width, height of the plot
_LABEL = 28  # the room that a length needs
_COLORS = {"triton": "#c0392b", "flash": "#e49444", "cudnn": "#5b7fa6", "efficient": "#6a9f58",
           "plain": "#888888", "compiled": "#967bb6"}  # fmt: skip
_SWEEPS = {"heads": "16 heads", "table7": "1 head", "tables45": "batch 8, not causal"}


def make_picture(rows: Sequence[Row]) -> str:
    """Forward and backward together; one panel per sweep, dtype and width."""
    timed = [row for row in rows if "both" in row["tflops"]]
    panels: dict[tuple[str, str, int], list[Row]] = {}
    for row in timed:
        case = row["case"]
        panels.setdefault((case["sweep"], case["kind"], case["dim"]), []).append(row)
    width = _COLUMNS * _PANEL
    height = _TOP + math.ceil(len(panels) / _COLUMNS) * _HEIGHT + 10
    title = "Attention, forward + backward: TFLOP/s against the sequence length"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11" role="img">',
        f"<title>{title}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="16" y="22" font-size="15">{title}</text>',
    ]
    shown = {row["case"]["backend"] for row in timed}
    for i, name in enumerate(name for name in _COLORS if name in shown):
        parts.append(f'<rect x="{16 + 90 * i}" y="34" width="10" height="10" '
                     f'fill="{_COLORS[name]}"/>')  # fmt: skip
        parts.append(f'<text x="{31 + 90 * i}" y="43">{name}</text>')
    order = sorted(panels, key=lambda panel: (panel[:2], -panel[2]))
    for i, (sweep, kind, dim) in enumerate(order):
        x, y = i % _COLUMNS * _PANEL, _TOP + i // _COLUMNS * _HEIGHT
        words = f"{_SWEEPS.get(sweep, sweep)}, {kind}, width {dim}"
        parts += [
            f'<g transform="translate({x} {y})">',
            *_draw_panel(words, panels[sweep, kind, dim]),
            "</g>",
        ]
    return "\n".join([*parts, "</svg>", ""])


def _draw_panel(title: str, rows: Sequence[Row]) -> list[str]:
    left, top, width, height = _INNER
    lengths = sorted({row["case"]["seq"] for row in rows})
    first, last = math.log2(lengths[0]), math.log2(lengths[-1])
    most = _round_up(max(row["tflops"]["both"] for row in rows))

    def place(seq: int, tflops: float) -> tuple[float, float]:
        share = (math.log2(seq) - first) / (last - first) if last > first else 0.5
        return round(left + share * width, 1), round(top + height * (1 - tflops / most), 1)

    parts = [f'<text x="{left}" y="{top - 8}">{title}</text>']
    for share in (0.0, 0.5, 1.0):
        y = place(lengths[0], share * most)[1]
        parts.append(f'<line x1="{left}" y1="{y}" x2="{left + width}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 5}" y="{y + 4}" text-anchor="end" fill="#444">'
                     f"{share * most:g}</text>")  # fmt: skip
    free = float(left + width + _LABEL)
    for seq in reversed(lengths):
        if place(seq, 0)[0] > free - _LABEL:
            continue  # it would run into its neighbour
        free = place(seq, 0)[0]
        label = f"{seq // 1024}k" if seq >= 1024 else str(seq)
        parts.append(f'<text x="{place(seq, 0)[0]}" y="{top + height + 15}" text-anchor="middle" '
                     f'fill="#444">{label}</text>')  # fmt: skip
    for name, color in _COLORS.items():
        points = sorted((row["case"]["seq"], row["tflops"]["both"])
                        for row in rows if row["case"]["backend"] == name)  # fmt: skip
        spots = [place(*point) for point in points]
        line = " ".join(f"{x},{y}" for x, y in spots)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        for (seq, tflops), (x, y) in zip(points, spots, strict=True):
            label = f"<title>{name}, {seq:,} tokens: {tflops:.1f}</title>"
            parts.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{color}">{label}</circle>')
    return parts


def _round_up(value: float) -> float:
    """To one or two digits that an axis can end at."""
    step = 10 ** math.floor(math.log10(value))
    return next(n * step for n in (1, 1.5, 2, 3, 4, 6, 8, 10) if n * step >= value)
