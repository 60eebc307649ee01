"""Charts that any benchmark can draw of its figures: bars in groups, and curves."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

from shardwise.lab.pictures import element, line, picture, rect, text

_COLORS = (
    "#c0392b", "#5b7fa6", "#e49444", "#6a9f58", "#967bb6", "#888888", "#2c7a7b", "#b7791f",
    "#d98aa0",
)  # fmt: skip
_WIDTH, _LEFT, _RIGHT = 760, 210, 90
_TOP, _BAR, _GAP = 58, 16, 12
_PLOT_HEIGHT = 260

Groups = Mapping[str, Mapping[str, float | None]]  # group, then series; None is not drawn
Curves = Mapping[str, Sequence[tuple[float, float]]]  # name, then points


def draw_bars(title: str, groups: Groups, unit: str) -> str:
    """A horizontal bar for each series of each group, with its figure behind it."""
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    figures = [value for group in groups.values() for value in group.values() if value is not None]
    most = max(figures, default=0.0) or 1.0
    legend, more = _legend(names)
    parts = [text(16, 22, escape(title), font_size=15), *legend]
    y = float(_TOP + more)
    for label, group in groups.items():
        middle = y + len(group) * _BAR / 2 + 4
        parts.append(text(_LEFT - 8, middle, escape(label), text_anchor="end"))
        for name, value in group.items():
            if value is not None:
                width = max(1.0, round((_WIDTH - _LEFT - _RIGHT) * value / most, 1))
                color = _COLORS[names.index(name) % len(_COLORS)]
                said = f"{value:.4g} {unit}"
                hover = element("title", escape(f"{label}, {name}: {said}"))
                parts.append(rect(_LEFT, round(y, 1), width, _BAR - 2, color, hover))
                parts.append(text(_LEFT + width + 5, round(y + 11, 1), said, fill="#444"))
            y += _BAR
        y += _GAP
    return picture(_WIDTH, math.ceil(y) + 8, escape(title), parts)


def draw_curves(
    title: str,
    curves: Curves,
    x_label: str,
    y_label: str,
    log_x: bool = True,
    log_y: bool = True,
    dashed: Sequence[str] = (),
) -> str:
    """A curve for each name; `dashed` ones are predictions or a document's."""
    names = list(curves)
    points = [point for curve in curves.values() for point in curve]
    legend, more = _legend(names)
    head = _TOP + more
    parts = [text(16, 22, escape(title), font_size=15), *legend]
    height = head + _PLOT_HEIGHT + 46
    if points:
        x_axis = _Axis([x for x, _ in points], log_x, 70, _WIDTH - 30)
        y_axis = _Axis([y for _, y in points], log_y, head + _PLOT_HEIGHT, head + 8)
        parts += _grid(x_axis, y_axis)
        for name, curve in curves.items():
            color = _COLORS[names.index(name) % len(_COLORS)]
            spots = [(x_axis.at(x), y_axis.at(y)) for x, y in sorted(curve)]
            dash = {"stroke_dasharray": "5 4"} if name in dashed else {}
            path = " ".join(f"{x},{y}" for x, y in spots)
            parts.append(
                element("polyline", points=path, fill="none", stroke=color, stroke_width=2, **dash)
            )
            for (x, y), (left, top) in zip(sorted(curve), spots, strict=True):
                hover = element("title", escape(f"{name}: {x:.4g} {x_label}, {y:.4g} {y_label}"))
                parts.append(element("circle", hover, cx=left, cy=top, r=3, fill=color))
    parts.append(text(_WIDTH / 2, height - 8, escape(x_label), text_anchor="middle", fill="#444"))
    parts.append(text(16, head + 2, escape(y_label), fill="#444"))
    return picture(_WIDTH, height, escape(title), parts)


class _Axis:
    """Where a value lies between two ends of a picture, and which values to name."""

    def __init__(self, values: Sequence[float], log: bool, start: float, end: float) -> None:
        self.log, self.start, self.end = log, start, end
        low, high = min(values), max(values)
        if log:
            low, high = max(low, 1e-12), max(high, 1e-12)
            self.low, self.high = math.log10(low), math.log10(high)
            powers = range(math.floor(self.low), math.ceil(self.high) + 1)
            self.ticks = [10.0**power for power in powers]
            self.low, self.high = float(powers[0]), float(powers[-1])
        else:
            self.low, self.high = min(low, 0.0), high or 1.0
            self.ticks = [self.low + (self.high - self.low) * share / 4 for share in range(5)]
        if self.high == self.low:
            self.high = self.low + 1

    def at(self, value: float) -> float:
        shown = math.log10(max(value, 1e-12)) if self.log else value
        share = (shown - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)


def _grid(x_axis: _Axis, y_axis: _Axis) -> list[str]:
    parts = []
    for tick in y_axis.ticks:
        y = y_axis.at(tick)
        parts.append(line(x_axis.start, y, x_axis.end, y, stroke="#ddd"))
        parts.append(text(x_axis.start - 5, y + 4, f"{tick:.4g}", text_anchor="end", fill="#444"))
    for tick in x_axis.ticks:
        x = x_axis.at(tick)
        parts.append(line(x, y_axis.start, x, y_axis.end, stroke="#eee"))
        label = f"{tick:.4g}"
        parts.append(text(x, y_axis.start + 15, label, text_anchor="middle", fill="#444"))
    return parts


def _legend(names: Sequence[str]) -> tuple[list[str], int]:
    """In as many lines as it needs, and the height of those after the first."""
    parts, x, y = [], 16, 34
    for i, name in enumerate(names):
        width = 32 + 7 * len(name)
        if x > 16 and x + width > _WIDTH:
            x, y = 16, y + 16
        parts += [rect(x, y, 10, 10, _COLORS[i % len(_COLORS)]), text(x + 15, y + 9, escape(name))]
        x += width
    return parts, y - 34
