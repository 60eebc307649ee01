"""Charts of benchmarks: what stands in them, also where figures are missing or equal."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from shardwise.lab.charts import draw_bars, draw_curves


def elements(svg: str, name: str) -> list[ElementTree.Element]:
    return ElementTree.fromstring(svg).findall(f".//{{http://www.w3.org/2000/svg}}{name}")


def test_bars_are_as_long_as_their_figures_and_missing_ones_are_not_drawn():
    svg = draw_bars("a < b", {"one": {"ours": 2.0, "theirs": 4.0}, "two": {"ours": None}}, "ms")
    bars = [bar for bar in elements(svg, "rect") if len(bar)]
    assert float(bars[1].get("width")) == 2 * float(bars[0].get("width"))
    assert len(bars) == 2


def test_curves_keep_the_order_of_their_points_and_say_them():
    svg = draw_curves("t", {"a": [(10.0, 1.0), (1.0, 100.0)]}, "MB", "ms", dashed=("a",))
    (path,) = elements(svg, "polyline")
    (x1, y1), (x2, y2) = (map(float, spot.split(",")) for spot in path.get("points").split())
    assert x1 < x2 and y1 < y2 and path.get("stroke-dasharray")
    assert "a: 10 MB, 1 ms" in svg


def test_no_figures_one_figure_and_zeros_are_still_pictures():
    for curves in ({}, {"a": [(1.0, 1.0)]}, {"a": [(0.0, 0.0)]}):
        for log in (True, False):
            assert elements(draw_curves("t", curves, "x", "y", log, log), "title")
    assert elements(draw_bars("t", {}, "ms"), "title")
    assert elements(draw_bars("t", {"a": {"b": 0.0}}, "ms"), "rect")
