"""The picture of `shardwise bench overlap`: compute and communication, one above the other."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from shardwise.lab.svg import element, line, picture, rect, text
from shardwise.profiling.results import Row

_WIDTH, _LEFT, _RIGHT, _TOP = 900, 120, 16, 62
_LANE, _PLAN = 34, 128
_COLORS = {"forward": ("#8fb8d8", "#a9c9e2"), "backward": ("#f0a868", "#f4bd8b"),
           "optimizer": ("#8fbf88", "#8fbf88"), "waiting": ("#ffffff", "#ffffff")}  # fmt: skip
_HIDDEN, _EXPOSED = ("#5b7fa6", "#7396bb"), ("#c0392b", "#d4594c")
_PLANS = {
    "naive": "naive: one all-reduce per tensor, after backward",
    "overlap": "overlap: each tensor's all-reduce inside backward",
    "bucketed": "bucketed: neighbouring tensors in one all-reduce, inside backward",
}
_TITLE = "One step of data parallel: compute and communication"


def make_picture(rows: Sequence[Row]) -> str:
    """One pair of lanes per plan, all on one scale of time. Neighbours differ in shade."""
    drawn = [row for row in rows if "failure" not in row]
    longest = max((_end(row) for row in drawn), default=1.0)

    def x(ms: float) -> float:
        return round(_LEFT + max(0.0, ms) / longest * (_WIDTH - _LEFT - _RIGHT), 2)

    def bar(start: float, end: float, y: float, color: str, label: str) -> str:
        width = max(0.3, round(x(end) - x(start), 2))
        return rect(x(start), y, width, _LANE, color, element("title", escape(label)))

    parts = [text(16, 22, _TITLE, font_size=15), *_legend()]
    for i, row in enumerate(drawn):
        y = _TOP + i * _PLAN + 24
        parts.append(text(16, y - 8, escape(_describe(row))))
        for lane, name in enumerate(("compute", "communication")):
            middle = y + lane * (_LANE + 4) + _LANE / 2 + 4
            parts.append(text(_LEFT - 8, middle, name, text_anchor="end", fill="#444"))
        for j, (name, phase, start, end) in enumerate(row["compute"]):
            label = f"{phase} {name}: {end - start:.2f} ms"
            parts.append(bar(start, end, y, _COLORS[phase][j % 2], label))
        for j, (nbytes, start, end, exposed) in enumerate(row["messages"]):
            shades = _EXPOSED if exposed > (end - start) / 2 else _HIDDEN
            label = (f"all-reduce of {nbytes / 1e6:.1f} MB: {end - start:.2f} ms, "
                     f"{exposed:.2f} exposed")  # fmt: skip
            parts.append(bar(start, end, y + _LANE + 4, shades[j % 2], label))
    bottom = _TOP + len(drawn) * _PLAN + 10
    parts.append(line(_LEFT, bottom, _WIDTH - _RIGHT, bottom, stroke="#888"))
    for share in range(5):
        ms = longest * share / 4
        anchor = "end" if share == 4 else "middle"
        parts.append(text(x(ms), bottom + 16, f"{ms:.0f} ms", text_anchor=anchor, fill="#444"))
    return picture(_WIDTH, bottom + 24, _TITLE, parts, font_size=12)


def _end(row: Row) -> float:
    ends = [span[3] for span in row["compute"]] + [message[2] for message in row["messages"]]
    return max(ends)


def _describe(row: Row) -> str:
    return (
        f"{_PLANS.get(row['reduce'], row['reduce'])}. {row['size']}, {row['ranks']} ranks: step "
        f"{row['step_ms']:.1f} ms, {len(row['messages'])} messages of "
        f"{row['communication_ms']:.1f} ms, {row['exposed_ms']:.1f} exposed"
    )


def _legend() -> list[str]:
    entries = [(name, shades[0]) for name, shades in _COLORS.items() if name != "waiting"]
    entries += [("all-reduce, hidden", _HIDDEN[0]), ("all-reduce, exposed", _EXPOSED[0])]
    parts, x = [], 16
    for name, color in entries:
        parts += [rect(x, 34, 14, 12, color), text(x + 19, 45, name)]
        x += 34 + 7 * len(name)
    return parts
