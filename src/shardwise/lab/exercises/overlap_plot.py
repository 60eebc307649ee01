"""The picture of `shardwise bench overlap`: compute and communication, one above the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape

Row = dict[str, Any]
_WIDTH, _LEFT, _RIGHT, _TOP = 900, 120, 16, 62
_LANE, _PLAN = 34, 128
_COLORS = {"forward": ("#8fb8d8", "#a9c9e2"), "backward": ("#f0a868", "#f4bd8b"),
           "optimizer": ("#8fbf88", "#8fbf88"), "waiting": ("#ffffff", "#ffffff")}  # fmt: skip
_HIDDEN, _EXPOSED = ("#5b7fa6", "#7396bb"), ("#c0392b", "#d4594c")
_WORDS = {
    "naive": "naive: one all-reduce per tensor, after backward",
    "overlap": "overlap: each tensor's all-reduce inside backward",
    "bucketed": "bucketed: neighbouring tensors in one all-reduce, inside backward",
}


def make_picture(rows: Sequence[Row]) -> str:
    """One pair of lanes per plan, all on one scale of time. Neighbours differ in shade."""
    drawn = [row for row in rows if "failure" not in row]
    longest = max((_end(row) for row in drawn), default=1.0)
    height = _TOP + len(drawn) * _PLAN + 34
    inner = _WIDTH - _LEFT - _RIGHT

    def x(ms: float) -> float:
        return round(_LEFT + max(0.0, ms) / longest * inner, 2)

    title = "One step of data parallel: compute and communication"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="sans-serif" font-size="12" role="img">',
        f"<title>{title}</title>",
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="16" y="22" font-size="15">{title}</text>',
        *_legend(),
    ]
    for i, row in enumerate(drawn):
        y = _TOP + i * _PLAN + 24
        parts.append(f'<text x="16" y="{y - 8}">{escape(_describe(row))}</text>')
        for lane, name in enumerate(("compute", "communication")):
            middle = y + lane * (_LANE + 4) + _LANE / 2 + 4
            parts.append(f'<text x="{_LEFT - 8}" y="{middle}" text-anchor="end" fill="#444">'
                         f"{name}</text>")  # fmt: skip
        for j, (name, phase, start, end) in enumerate(row["compute"]):
            label = f"{phase} {name}: {end - start:.2f} ms"
            parts.append(_bar(x(start), x(end), y, _COLORS[phase][j % 2], label))
        for j, (nbytes, start, end, exposed) in enumerate(row["messages"]):
            shades = _EXPOSED if exposed > (end - start) / 2 else _HIDDEN
            label = (f"all-reduce of {nbytes / 1e6:.1f} MB: {end - start:.2f} ms, "
                     f"{exposed:.2f} exposed")  # fmt: skip
            parts.append(_bar(x(start), x(end), y + _LANE + 4, shades[j % 2], label))
    bottom = _TOP + len(drawn) * _PLAN + 10
    parts.append(f'<line x1="{_LEFT}" y1="{bottom}" x2="{_WIDTH - _RIGHT}" y2="{bottom}" '
                 'stroke="#888"/>')  # fmt: skip
    for share in range(5):
        ms = longest * share / 4
        anchor = "end" if share == 4 else "middle"
        parts.append(f'<text x="{x(ms)}" y="{bottom + 16}" text-anchor="{anchor}" fill="#444">'
                     f"{ms:.0f} ms</text>")  # fmt: skip
    return "\n".join([*parts, "</svg>", ""])


def _end(row: Row) -> float:
    ends = [span[3] for span in row["compute"]] + [message[2] for message in row["messages"]]
    return max(ends)


def _describe(row: Row) -> str:
    words = _WORDS.get(row["reduce"], row["reduce"])
    return (
        f"{words}. {row['size']}, {row['ranks']} ranks: step {row['step_ms']:.1f} ms, "
        f"{len(row['messages'])} messages of {row['communication_ms']:.1f} ms, "
        f"{row['exposed_ms']:.1f} exposed"
    )


def _bar(start: float, end: float, y: float, color: str, label: str) -> str:
    width = max(0.3, round(end - start, 2))
    return (
        f'<rect x="{start}" y="{y}" width="{width}" height="{_LANE}" fill="{color}">'
        f"<title>{escape(label)}</title></rect>"
    )


def _legend() -> list[str]:
    entries = [(name, shades[0]) for name, shades in _COLORS.items() if name != "waiting"]
    entries += [("all-reduce, hidden", _HIDDEN[0]), ("all-reduce, exposed", _EXPOSED[0])]
    parts, x = [], 16
    for name, color in entries:
        parts.append(f'<rect x="{x}" y="34" width="14" height="12" fill="{color}"/>')
        parts.append(f'<text x="{x + 19}" y="45">{name}</text>')
        x += 34 + 7 * len(name)
    return parts
