"""The benchmarks' pictures: a few elements of SVG, and what is drawn of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any
from xml.sax.saxutils import escape

from shardwise.profiling.results import Row


def element(name: str, content: str = "", /, **attributes: Any) -> str:
    """One element; `text_anchor` is the attribute `text-anchor`."""
    told = "".join(f' {key.replace("_", "-")}="{value}"' for key, value in attributes.items())
    return f"<{name}{told}>{content}</{name}>" if content else f"<{name}{told}/>"


def text(x: float, y: float, content: str, **attributes: Any) -> str:
    return element("text", content, x=x, y=y, **attributes)


def rect(
    x: float, y: float, width: float, height: float, fill: str, content: str = "", **attributes: Any
) -> str:
    return element("rect", content, x=x, y=y, width=width, height=height, fill=fill, **attributes)


def line(x1: float, y1: float, x2: float, y2: float, **attributes: Any) -> str:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, **attributes)


def picture(width: int, height: int, title: str, parts: Iterable[str], font_size: int = 11) -> str:
    """The whole file: the parts on white."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'font-family="sans-serif" font-size="{font_size}" role="img">',
            element("title", title),
            element("rect", width=width, height=height, fill="#ffffff"),
            *parts,
            "</svg>",
            "",
        ]
    )


# `shardwise bench attention`: TFLOP/s against the sequence length

_IN_A_ROW, _PANEL, _PANEL_HEIGHT, _PANELS_TOP = 3, 300, 210, 58
_INNER = (44, 26, 236, 140)  # of a panel: left, top, width, height of the plot
_LABEL = 28  # the room that a length needs
_BACKENDS = {"triton": "#c0392b", "flash": "#e49444", "cudnn": "#5b7fa6", "efficient": "#6a9f58",
           "plain": "#888888", "compiled": "#967bb6"}  # fmt: skip
_SWEEPS = {"heads": "16 heads", "table7": "1 head", "tables45": "batch 8, not causal"}
_ATTENTION = "Attention, forward + backward: TFLOP/s against the sequence length"


def draw_attention(rows: Sequence[Row]) -> str:
    """Forward and backward together; one panel per sweep, dtype and width."""
    timed = [row for row in rows if "both" in row["tflops"]]
    panels: dict[tuple[str, str, int], list[Row]] = {}
    for row in timed:
        case = row["case"]
        panels.setdefault((case["sweep"], case["kind"], case["dim"]), []).append(row)
    parts = [text(16, 22, _ATTENTION, font_size=15)]
    shown = {row["case"]["backend"] for row in timed}
    for i, name in enumerate(name for name in _BACKENDS if name in shown):
        parts += [rect(16 + 90 * i, 34, 10, 10, _BACKENDS[name]), text(31 + 90 * i, 43, name)]
    order = sorted(panels, key=lambda panel: (panel[:2], -panel[2]))
    for i, (sweep, kind, dim) in enumerate(order):
        x, y = i % _IN_A_ROW * _PANEL, _PANELS_TOP + i // _IN_A_ROW * _PANEL_HEIGHT
        title = f"{_SWEEPS.get(sweep, sweep)}, {kind}, width {dim}"
        parts.append(f'<g transform="translate({x} {y})">')
        parts += [*_attention_panel(title, panels[sweep, kind, dim]), "</g>"]
    height = _PANELS_TOP + math.ceil(len(panels) / _IN_A_ROW) * _PANEL_HEIGHT + 10
    return picture(_IN_A_ROW * _PANEL, height, _ATTENTION, parts)


def _attention_panel(title: str, rows: Sequence[Row]) -> list[str]:
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
    for name, color in _BACKENDS.items():
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


# `shardwise bench memory`: the curves, in small panels

_CURVE_WIDTH, _CURVE_HEIGHT, _GAP = 250, 130, 16
_CURVES_LEFT, _CURVES_TOP = 48, 64
_PHASES = {"forward": "#dbe9f4", "backward": "#fbe3d0", "optimizer": "#e0efdc"}
_CURVE, _SEED_PEAK = "#2a6f97", "#c0392b"


def draw_memory(rows: Sequence[Row]) -> str:
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
    parts = [text(_CURVES_LEFT, 20, escape(title), font_size=14), *_memory_legend()]
    for row in drawn:
        column = columns.index(row["context"])
        below = lines.index((row["mode"], row["precision"]))
        x = _CURVES_LEFT + column * (_CURVE_WIDTH + _GAP)
        y = _CURVES_TOP + below * (_CURVE_HEIGHT + 2 * _GAP + 8) + _GAP
        parts += _memory_panel(row, x, y, top, scale=column == 0)
    width = _CURVES_LEFT + len(columns) * (_CURVE_WIDTH + _GAP)
    height = _CURVES_TOP + len(lines) * (_CURVE_HEIGHT + 2 * _GAP + 8) + 24
    return picture(width, height, escape(title), parts)


def _memory_legend() -> list[str]:
    parts, x = [], _CURVES_LEFT
    for name, color in _PHASES.items():
        parts += [rect(x, 30, 14, 11, color), text(x + 18, 40, name)]
        x += 90
    parts.append(line(x, 36, x + 18, 36, stroke=_SEED_PEAK, stroke_dasharray="4 3"))
    return [*parts, text(x + 24, 40, "the document's peak")]


def _memory_panel(row: Row, x: int, y: int, top: float, scale: bool) -> list[str]:
    curve = row["curve"]
    end = max(curve["ms"][-1], *(phase[2] for phase in curve["phases"]), 1e-9)

    def at(ms: float) -> float:
        return round(x + ms / end * _CURVE_WIDTH, 1)

    def up(mib: float) -> float:
        return round(y + _CURVE_HEIGHT - mib / top * _CURVE_HEIGHT, 1)

    name = f"{row['mode']}, {row['precision']}, {row['context']} tokens"
    peak = max(told["bytes"] for told in row["peaks"]) / 1e9
    parts = [text(x, y - 5, f"{escape(name)}: {peak:.1f} GB")]
    for name, start, stop in curve["phases"]:
        width = round(max(0.0, at(stop) - at(start)), 1)
        parts.append(rect(at(start), y, width, _CURVE_HEIGHT, _PHASES.get(name, "#eeeeee")))
    steps = [f"M{at(curve['ms'][0])},{up(0)}"]
    for ms, mib in zip(curve["ms"], curve["mib"], strict=True):
        steps += [f"H{at(ms)}", f"V{up(mib)}"]
    outline = " ".join([*steps, f"H{at(end)}", f"V{up(0)}", "Z"])
    parts.append(element("path", d=outline, fill=_CURVE, fill_opacity="0.35", stroke=_CURVE))
    if row["seed"]:
        level = up(row["seed"]["gb"] * 1e9 / 2**20)
        parts.append(
            line(x, level, x + _CURVE_WIDTH, level, stroke=_SEED_PEAK, stroke_dasharray="4 3")
        )
    parts.append(line(x, up(0), x + _CURVE_WIDTH, up(0), stroke="#888"))
    edge = {"text_anchor": "end", "fill": "#666"}
    parts.append(text(x + _CURVE_WIDTH, y + _CURVE_HEIGHT + 13, f"{end:.0f} ms", **edge))
    for share in (0.0, 0.5, 1.0) if scale else ():
        level = share * top / 1.08
        parts.append(text(x - 5, up(level) + 4, _gigabytes(level), **edge))
    return parts


def _gigabytes(mib: float) -> str:
    gigabytes = mib * 2**20 / 1e9
    return f"{gigabytes:.0f} GB" if gigabytes >= 10 else f"{gigabytes:.2g} GB"


# `shardwise bench overlap`: compute and communication, one above the other

_LANES_WIDTH, _LANES_LEFT, _LANES_RIGHT, _LANES_TOP = 900, 120, 16, 62
_LANE, _PLAN = 34, 128
_SHADES = {"forward": ("#8fb8d8", "#a9c9e2"), "backward": ("#f0a868", "#f4bd8b"),
           "optimizer": ("#8fbf88", "#8fbf88"), "waiting": ("#ffffff", "#ffffff")}  # fmt: skip
_HIDDEN, _EXPOSED = ("#5b7fa6", "#7396bb"), ("#c0392b", "#d4594c")
_PLANS = {
    "naive": "naive: one all-reduce per tensor, after backward",
    "overlap": "overlap: each tensor's all-reduce inside backward",
    "bucketed": "bucketed: neighbouring tensors in one all-reduce, inside backward",
}
_OVERLAP = "One step of data parallel: compute and communication"


def draw_overlap(rows: Sequence[Row]) -> str:
    """One pair of lanes per plan, all on one scale of time. Neighbours differ in shade."""
    drawn = [row for row in rows if "failure" not in row]
    longest = max((_last_end(row) for row in drawn), default=1.0)

    def x(ms: float) -> float:
        return round(
            _LANES_LEFT + max(0.0, ms) / longest * (_LANES_WIDTH - _LANES_LEFT - _LANES_RIGHT), 2
        )

    def bar(start: float, end: float, y: float, color: str, label: str) -> str:
        width = max(0.3, round(x(end) - x(start), 2))
        return rect(x(start), y, width, _LANE, color, element("title", escape(label)))

    parts = [text(16, 22, _OVERLAP, font_size=15), *_overlap_legend()]
    for i, row in enumerate(drawn):
        y = _LANES_TOP + i * _PLAN + 24
        parts.append(text(16, y - 8, escape(_describe_plan(row))))
        for lane, name in enumerate(("compute", "communication")):
            middle = y + lane * (_LANE + 4) + _LANE / 2 + 4
            parts.append(text(_LANES_LEFT - 8, middle, name, text_anchor="end", fill="#444"))
        for j, (name, phase, start, end) in enumerate(row["compute"]):
            label = f"{phase} {name}: {end - start:.2f} ms"
            parts.append(bar(start, end, y, _SHADES[phase][j % 2], label))
        for j, (nbytes, start, end, exposed) in enumerate(row["messages"]):
            shades = _EXPOSED if exposed > (end - start) / 2 else _HIDDEN
            label = (f"all-reduce of {nbytes / 1e6:.1f} MB: {end - start:.2f} ms, "
                     f"{exposed:.2f} exposed")  # fmt: skip
            parts.append(bar(start, end, y + _LANE + 4, shades[j % 2], label))
    bottom = _LANES_TOP + len(drawn) * _PLAN + 10
    parts.append(line(_LANES_LEFT, bottom, _LANES_WIDTH - _LANES_RIGHT, bottom, stroke="#888"))
    for share in range(5):
        ms = longest * share / 4
        anchor = "end" if share == 4 else "middle"
        parts.append(text(x(ms), bottom + 16, f"{ms:.0f} ms", text_anchor=anchor, fill="#444"))
    return picture(_LANES_WIDTH, bottom + 24, _OVERLAP, parts, font_size=12)


def _last_end(row: Row) -> float:
    ends = [span[3] for span in row["compute"]] + [message[2] for message in row["messages"]]
    return max(ends)


def _describe_plan(row: Row) -> str:
    return (
        f"{_PLANS.get(row['reduce'], row['reduce'])}. {row['size']}, {row['ranks']} ranks: step "
        f"{row['step_ms']:.1f} ms, {len(row['messages'])} messages of "
        f"{row['communication_ms']:.1f} ms, {row['exposed_ms']:.1f} exposed"
    )


def _overlap_legend() -> list[str]:
    entries = [(name, shades[0]) for name, shades in _SHADES.items() if name != "waiting"]
    entries += [("all-reduce, hidden", _HIDDEN[0]), ("all-reduce, exposed", _EXPOSED[0])]
    parts, x = [], 16
    for name, color in entries:
        parts += [rect(x, 34, 14, 12, color), text(x + 19, 45, name)]
        x += 34 + 7 * len(name)
    return parts
