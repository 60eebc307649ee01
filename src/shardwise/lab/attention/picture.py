"""The picture of `shardwise bench attention`: TFLOP/s against the sequence length."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardwise.lab.svg import element, line, picture, rect, text
from shardwise.profiling.results import Row

_COLUMNS, _PANEL, _HEIGHT, _TOP = 3, 300, 210, 58
_INNER = (44, 26, 236, 140)  # of a panel: left, top, width, height of the plot
_LABEL = 28  # the room that a length needs
_COLORS = {"triton": "#c0392b", "flash": "#e49444", "cudnn": "#5b7fa6", "efficient": "#6a9f58",
           "plain": "#888888", "compiled": "#967bb6"}  # fmt: skip
_SWEEPS = {"heads": "16 heads", "table7": "1 head", "tables45": "batch 8, not causal"}
_TITLE = "Attention, forward + backward: TFLOP/s against the sequence length"


def make_picture(rows: Sequence[Row]) -> str:
    """Forward and backward together; one panel per sweep, dtype and width."""
    timed = [row for row in rows if "both" in row["tflops"]]
    panels: dict[tuple[str, str, int], list[Row]] = {}
    for row in timed:
        case = row["case"]
        panels.setdefault((case["sweep"], case["kind"], case["dim"]), []).append(row)
    parts = [text(16, 22, _TITLE, font_size=15)]
    shown = {row["case"]["backend"] for row in timed}
    for i, name in enumerate(name for name in _COLORS if name in shown):
        parts += [rect(16 + 90 * i, 34, 10, 10, _COLORS[name]), text(31 + 90 * i, 43, name)]
    order = sorted(panels, key=lambda panel: (panel[:2], -panel[2]))
    for i, (sweep, kind, dim) in enumerate(order):
        x, y = i % _COLUMNS * _PANEL, _TOP + i // _COLUMNS * _HEIGHT
        title = f"{_SWEEPS.get(sweep, sweep)}, {kind}, width {dim}"
        parts.append(f'<g transform="translate({x} {y})">')
        parts += [*_draw_panel(title, panels[sweep, kind, dim]), "</g>"]
    height = _TOP + math.ceil(len(panels) / _COLUMNS) * _HEIGHT + 10
    return picture(_COLUMNS * _PANEL, height, _TITLE, parts)


def _draw_panel(title: str, rows: Sequence[Row]) -> list[str]:
    left, top, width, height = _INNER
    lengths = sorted({row["case"]["seq"] for row in rows})
    first, last = math.log2(lengths[0]), math.log2(lengths[-1])
    most = _round_up(max(row["tflops"]["both"] for row in rows))

    def at(seq: int, tflops: float) -> tuple[float, float]:
        share = (math.log2(seq) - first) / (last - first) if last > first else 0.5
        return round(left + share * width, 1), round(top + height * (1 - tflops / most), 1)

    parts = [text(left, top - 8, title)]
    for share in (0.0, 0.5, 1.0):
        y = at(lengths[0], share * most)[1]
        parts.append(line(left, y, left + width, y, stroke="#ddd"))
        parts.append(text(left - 5, y + 4, f"{share * most:g}", text_anchor="end", fill="#444"))
    free = float(left + width + _LABEL)
    for seq in reversed(lengths):
        x = at(seq, 0)[0]
        if x > free - _LABEL:
            continue  # it would run into its neighbour
        free = x
        label = f"{seq // 1024}k" if seq >= 1024 else str(seq)
        parts.append(text(x, top + height + 15, label, text_anchor="middle", fill="#444"))
    for name, color in _COLORS.items():
        points = sorted((row["case"]["seq"], row["tflops"]["both"])
                        for row in rows if row["case"]["backend"] == name)  # fmt: skip
        spots = [at(*point) for point in points]
        path = " ".join(f"{x},{y}" for x, y in spots)
        parts.append(element("polyline", points=path, fill="none", stroke=color, stroke_width=2))
        for (seq, tflops), (x, y) in zip(points, spots, strict=True):
            label = element("title", f"{name}, {seq:,} tokens: {tflops:.1f}")
            parts.append(element("circle", label, cx=x, cy=y, r=3, fill=color))
    return parts


def _round_up(value: float) -> float:
    """To one or two digits that an axis can end at."""
    step = 10 ** math.floor(math.log10(value))
    return next(n * step for n in (1, 1.5, 2, 3, 4, 6, 8, 10) if n * step >= value)
