"""The few elements of SVG that the benchmarks' pictures are made of."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


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
