"""The report in real Chromium: it opens from disk, draws, answers, and shows what its data says."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.reporting.report import report, report_comparison, report_run
from shardwise.reporting.run import Run, read_run
from tests.browser.browser import CHROMIUM, DRIVER, Browser
from tests.browser.made import crowd, make_run

pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="needs Debian's chromium and chromium-driver"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = Browser()
    yield found
    found.stop()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("pages")
    one = read_run(make_run(folder / "run", title="ours"))
    two = read_run(make_run(folder / "other", title="theirs", rate=5e9, slow={}, prefetch=1))
    logged = Run("logged", metrics=one.metrics, facts=one.facts)
    step = Run("step", timeline=one.timeline)
    long = [replace(r.timeline, labels={"title": f"hsdp over zero3 on {n} cpu ranks", "note": note})
            for r, n, note in ((one, 1024, "the traced one"), (two, 2048, ""))]  # fmt: skip
    return SimpleNamespace(
        run=report_run(one).write(folder / "run.html"),
        comparison=report_comparison(two, one).write(folder / "both.html"),
        steps=report_comparison(step, Run("other", timeline=two.timeline)).write(folder / "s.html"),
        long=report_comparison(*(replace(step, timeline=t) for t in long)).write(folder / "l.html"),
        logged=report_run(logged).write(folder / "logged.html"),
        step=report_run(step).write(folder / "step.html"),
        crowd=report(None, crowd(20_000)).write(folder / "crowd.html"),
    )


def data_of(browser: Browser) -> Any:
    return json.loads(browser.run("return document.getElementById('data').textContent"))


def hover(browser: Browser, selector: str, across: float, down: float) -> str:
    """Move the mouse over a place of a chart; give the tooltip's text."""
    x, y = browser.run(
        "const e = document.querySelector(arguments[0]); e.scrollIntoView({block: 'center'});"
        "const r = e.getBoundingClientRect(); return [r.left + arguments[1] * r.width, "
        "r.top + (arguments[2] > 1 ? arguments[2] : arguments[2] * r.height)]",
        selector, across, down,
    )  # fmt: skip
    mouse(browser, "mouseMoved", x - 3, y)
    mouse(browser, "mouseMoved", x, y)
    shown = "const t = document.getElementById('tip'); return t.hidden ? '' : t.innerText"
    return str(browser.run(shown))


def mouse(browser: Browser, kind: str, x: float, y: float, **more: Any) -> None:
    event = {"type": kind, "x": x, "y": y, **more}
    browser.driver.execute_cdp_cmd("Input.dispatchMouseEvent", event)
    browser.settle()


def middle(browser: Browser, selector: str) -> tuple[float, float, float]:
    """The left end, the width and the middle height of an element in the window."""
    left, width, height = browser.run(
        "const e = document.querySelector(arguments[0]); e.scrollIntoView({block: 'center'});"
        "const r = e.getBoundingClientRect(); return [r.left, r.width, r.top + r.height / 2]",
        selector,
    )
    return left, width, height


def visible_range(browser: Browser, chart: str = "streams") -> list[float]:
    found = browser.run(f"const x = charts.{chart}.scales.x; return [x.min, x.max]")
    return [float(value) for value in found]


STREAMS = "#streams .u-over"
PAGES = ("run", "comparison", "steps", "long", "logged", "step", "crowd")


@pytest.mark.parametrize(
    ("name", "width"),
    [("run", 1200), ("comparison", 1200), *((name, 390) for name in PAGES)],
)
def test_it_opens_from_disk_silently_and_fits(
    browser: Browser, pages: SimpleNamespace, name: str, width: int
) -> None:
    page: Path = getattr(pages, name)
    browser.open(page, width, 844)
    said, asked = browser.logs()
    assert said == []
    assert [url for url in asked if not url.startswith("data:")] == [page.resolve().as_uri()]
    assert browser.run("return document.documentElement.scrollWidth") <= width
    assert browser.run("return document.querySelectorAll('section').length") == 9
    assert browser.run("return document.querySelectorAll('#findings > ol > li').length") == 3
    text = browser.run("return document.body.innerText")
    assert not any(word in text for word in ("[object", "undefined", "NaN", "null"))
    drawn = browser.run("return [...plots].every(p => p.root.getBoundingClientRect().width <= innerWidth)")  # fmt: skip  # noqa: E501
    assert drawn


def fixed(value: float, digits: int) -> str:
    """As JavaScript's toFixed: ties of the exact value go up."""
    quantum = Decimal(1).scaleb(-digits)
    return f"{Decimal(value).quantize(quantum, ROUND_HALF_UP):,}"


def shown_as(value: float, kind: str) -> str:
    match kind:
        case "time":
            ms = value / 1e6
            if abs(value) < 500:
                return "0 ms"
            if abs(ms) < 0.1:
                return f"{fixed(ms * 1e3, 0)} µs"
            return f"{fixed(ms, 2 if abs(ms) < 10 else 1 if abs(ms) < 100 else 0)} ms"
        case "bytes":
            for unit in ("B", "KiB", "MiB"):
                if abs(value) < 1024:
                    return f"{fixed(value, 0 if unit == 'B' or abs(value) >= 100 else 1)} {unit}"
                value /= 1024
            return f"{fixed(value, 2)} GiB"
        case "share":
            percent = 100 * value
            return f"{fixed(percent, 1 if 0.05 <= abs(percent) < 9.95 else 0)} %"
        case "count":
            return fixed(value, 0)
        case "number":
            return fixed(value, 3).replace(",", "")
    raise AssertionError(f"no format {kind}")


def look_up(data: Any, pointer: str) -> Any:
    for key in pointer.split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        data = data[int(key)] if isinstance(data, list) else data[key]
    return data


READ = """return [...document.querySelectorAll('.num[data-path]')].map(e => [e.dataset.path,
  e.dataset.as, e.dataset.over || '', e.dataset.less || '', e.textContent])"""


@pytest.mark.parametrize("name", ["run", "comparison", "logged"])
def test_numbers_on_the_page_are_those_of_its_data(
    browser: Browser, pages: SimpleNamespace, name: str
) -> None:
    browser.open(getattr(pages, name))
    data, compared = data_of(browser), 0
    ranks = browser.run("return [...document.querySelectorAll('#rank option')].map(o => o.value)")
    for rank in ranks or [""]:
        if rank:
            browser.run(
                "const s = document.getElementById('rank'); s.value = arguments[0];"
                "s.dispatchEvent(new Event('change'))", rank,
            )  # fmt: skip
        for path, kind, over, less, text in browser.run(READ):
            value = look_up(data, path)
            if over:
                value = value / look_up(data, over)
            if less:
                value -= look_up(data, less)
            sign = "+" if less and value > 0 else ""
            assert text == sign + shown_as(value, kind), path
            compared += 1
    assert compared > (100 if name != "logged" else 8)
    texts = browser.run(
        "return [...document.querySelectorAll('.findings li')].map(e => e.innerText)"
    )
    for finding, text in zip(data["findings"], texts, strict=False):
        assert finding["what"].replace("`", "") in text
        assert finding["change"].replace("`", "") in text
    if data["summary"]:
        summary = browser.run("return document.querySelector('.summary').innerText").split()
        assert summary == " ".join(data["summary"][:2]).split()


def test_the_waterfall_sums_up_and_follows_the_chosen_rank(
    browser: Browser, pages: SimpleNamespace
) -> None:
    browser.open(pages.run)
    data = data_of(browser)
    seen = set()
    for rank in ("0", "2"):
        browser.run(
            "const s = document.getElementById('rank'); s.value = arguments[0];"
            "s.dispatchEvent(new Event('change'))", rank,
        )  # fmt: skip
        bars = browser.run(
            "return [...document.querySelectorAll('#waterfall .side')[0].querySelectorAll('i')]"
            ".map(e => [parseFloat(e.style.left) || 0, parseFloat(e.style.width)])"
        )
        *parts, whole = bars
        assert sum(width for _, width in parts) == pytest.approx(whole[1])
        for (left, width), (following, _) in itertools.pairwise(parts):
            assert following == pytest.approx(left + width, abs=2e-4)  # CSS rounds to 6 digits
        title = browser.run("return document.querySelector('#waterfall h3').textContent")
        assert f"rank {rank}" in title
        step = data["sides"][0]["ranks"][rank]["step"]
        text = browser.run("return document.querySelector('#waterfall .total .num').textContent")
        assert text == shown_as(step, "time")
        seen.add(json.dumps(bars))
    assert len(seen) == 2


def test_a_span_answers_with_unit_phase_duration_and_bytes(
    browser: Browser, pages: SimpleNamespace
) -> None:
    browser.open(pages.run)
    data = data_of(browser)
    side = data["sides"][0]
    rank, texts = side["ranks"][str(side["slowest"])], side["texts"]
    end = browser.run("return visible.end") * 1e6
    lanes = browser.run(
        "return buildLanes().groups[0].lanes.map(l => [l.stream, l.top + 16 + BAR / 2])"
    )
    for name, wanted in (("compute", "backward"), ("shard", "reduce_scatter")):
        lane = dict(lanes)[name]
        i = next(
            i for i, stream in enumerate(rank["stream"])
            if rank["streams"][stream] == name and texts[rank["name"][i]] == wanted
        )  # fmt: skip
        place = (rank["start"][i] + rank["duration"][i] / 2) / end
        text = hover(browser, STREAMS, place, lane)
        assert f"{wanted.replace('_', '-')} of {texts[rank['unit'][i]]}" in text
        assert texts[rank["phase"][i]] in text
        assert shown_as(rank["duration"][i], "time") in text
        if rank["bytes"][i]:
            assert shown_as(rank["bytes"][i], "bytes") in text
    assert rank["bytes"][i]
    mouse(browser, "mouseMoved", 2, 2)
    assert browser.run("return document.getElementById('tip').hidden")


def test_a_gap_says_what_compute_waits_for(browser: Browser, pages: SimpleNamespace) -> None:
    browser.open(pages.run)
    data = data_of(browser)
    side = data["sides"][0]
    rank, texts = side["ranks"][str(side["slowest"])], side["texts"]
    gaps = rank["gaps"]
    kinds = [texts[kind] for kind in gaps["kind"]]
    i = max(
        (i for i, kind in enumerate(kinds) if kind == "exposed_transfer"),
        key=lambda i: gaps["duration"][i],
    )
    place = (gaps["start"][i] + gaps["duration"][i] / 2) / (browser.run("return visible.end") * 1e6)
    top = browser.run("return buildLanes().groups[0].lanes[0].top + 16 + BAR / 2")
    text = hover(browser, STREAMS, place, top)
    assert "exposed transfer" in text
    assert shown_as(gaps["duration"][i], "time") in text
    assert texts[gaps["unit"][i]] in text


@pytest.mark.parametrize(
    ("selector", "words"),
    [
        ("#memory .u-over", ["MiB", "at ", "activations"]),
        ("#curves .u-over", ["step ", "entropy"]),
    ],
)
def test_charts_answer_where_the_mouse_is(
    browser: Browser, pages: SimpleNamespace, selector: str, words: list[str]
) -> None:
    browser.open(pages.run)
    text = hover(browser, selector, 0.5, 0.2)
    assert all(word in text for word in words), text
    mouse(browser, "mouseMoved", 2, 2)
    assert browser.run("return document.getElementById('tip').hidden")


def test_a_message_answers_on_the_bandwidth_curve(browser: Browser, pages: SimpleNamespace) -> None:
    browser.open(pages.run)
    messages = data_of(browser)["wires"][0]["messages"]
    sent = next(m for m in messages if m["collective"] == "all-gather")
    across, down = browser.run(
        "const c = charts.wire; return [c.valToPos(arguments[0], 'x') / c.over.clientWidth, "
        "c.valToPos(arguments[0] / arguments[1], 'y') / c.over.clientHeight]",
        sent["bytes"], sent["seconds"],
    )  # fmt: skip
    text = hover(browser, "#wire .u-over", across, down)
    assert shown_as(sent["bytes"], "bytes") in text and "GB/s" in text


def test_wheel_drag_and_reset_change_the_range_of_all_time_axes(
    browser: Browser, pages: SimpleNamespace
) -> None:
    browser.open(pages.run)
    whole = visible_range(browser)
    left, width, height = middle(browser, STREAMS)
    mouse(browser, "mouseWheel", left + width / 2, height, deltaX=0, deltaY=-240)
    near = visible_range(browser)
    assert whole[0] < near[0] < near[1] < whole[1]
    assert visible_range(browser, "memory0") == near
    centre = sum(near) / 2
    assert centre == pytest.approx(sum(whole) / 2, rel=0.02)

    # Drag over the middle half of what is seen.
    for kind, place in (("mousePressed", 0.25), ("mouseMoved", 0.5), ("mouseMoved", 0.75)):
        buttons = {"button": "left", "buttons": 1, "clickCount": 1}
        mouse(browser, kind, left + place * width, height, **buttons)
    mouse(browser, "mouseReleased", left + 0.75 * width, height, button="left", clickCount=1)
    nearer = visible_range(browser)
    assert nearer[1] - nearer[0] == pytest.approx((near[1] - near[0]) / 2, rel=0.03)
    assert visible_range(browser, "memory1") == nearer

    assert browser.run("return document.querySelector('.reset').disabled") is False
    browser.run("document.querySelector('.reset').click()")
    assert visible_range(browser) == whole == visible_range(browser, "memory0")
    assert browser.run("return document.querySelector('.reset').disabled") is True


def test_a_double_click_shows_the_whole_step_again(
    browser: Browser, pages: SimpleNamespace
) -> None:
    browser.open(pages.run)
    whole = visible_range(browser)
    browser.run("look(10, 12)")
    assert visible_range(browser) == [10, 12]
    left, width, height = middle(browser, STREAMS)
    for count in (1, 2):
        for kind in ("mousePressed", "mouseReleased"):
            mouse(browser, kind, left + width / 2, height, button="left", clickCount=count)
    assert visible_range(browser) == whole


def test_light_and_dark_by_preference_and_by_hand(browser: Browser, pages: SimpleNamespace) -> None:
    colours = "const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]"

    def brightness(text: str) -> float:
        return sum(float(part) for part in text[text.index("(") + 1 : -1].split(",")[:3]) / 3

    browser.open(pages.run, dark=False)
    paper, ink = map(brightness, browser.run(colours))
    assert paper > 230 and ink < 60
    curve = browser.run("return charts.loss.series[1].stroke()")
    browser.prefer("dark")
    dark_paper, dark_ink = map(brightness, browser.run(colours))
    assert dark_paper < 40 and dark_ink > 200
    assert browser.run("return charts.loss.series[1].stroke()") != curve
    browser.run("document.getElementById('theme').click()")
    assert brightness(browser.run(colours)[0]) == paper
    assert browser.logs()[0] == []


def test_units_show_each_metric_by_its_tab(browser: Browser, pages: SimpleNamespace) -> None:
    browser.open(pages.run)
    seen = []
    for number in range(3):
        browser.run(f"document.querySelectorAll('#units button')[{number}].click()")
        seen.append(browser.run("return document.querySelector('#units tbody').innerText"))
        # 8 layers of two sides; the optimizer computes too, and sends nothing.
        dots = browser.run("return document.querySelectorAll('#units .dots i').length")
        assert dots == (16 if number == 2 else 18)
    assert len(set(seen)) == 3
    assert "68.7 MiB" in seen[2]


def test_a_comparison_draws_both_steps(browser: Browser, pages: SimpleNamespace) -> None:
    browser.open(pages.comparison)
    labels = browser.run("return buildLanes().groups.map(g => g.side.label)")
    assert labels == ["theirs", "ours"]
    sides = browser.run("return document.querySelectorAll('#waterfall .side').length")
    assert sides == 2
    assert browser.run("return Object.keys(charts).filter(k => k.startsWith('memory')).length") >= 2
    assert browser.run("return charts.loss.series.length") == 4  # steps, two runs, the entropy


def test_what_a_reader_should_know_of_a_step_stands_below_it(
    browser: Browser, pages: SimpleNamespace
) -> None:
    browser.open(pages.long)
    notes = browser.run(
        "return [...document.querySelectorAll('#waterfall .side')]"
        ".map(e => e.querySelector('.note')?.innerText ?? '')"
    )
    assert notes == ["This step: the traced one.", ""]


def test_what_is_missing_says_how_to_get_it(browser: Browser, pages: SimpleNamespace) -> None:
    browser.open(pages.logged)
    notes = browser.run("return [...document.querySelectorAll('.missing')].map(e => e.innerText)")
    assert sum("shardwise train --profile 3" in note for note in notes) == 6
    browser.open(pages.step)
    notes = browser.run("return [...document.querySelectorAll('.missing')].map(e => e.innerText)")
    assert any("shardwise train" in note for note in notes)


def test_twenty_thousand_spans_are_drawn_and_found(
    browser: Browser, pages: SimpleNamespace
) -> None:
    browser.open(pages.crowd)
    assert browser.run("return sides[0].ranks[rankOf(0)].start.length") == 10_000
    browser.run("look(50, 50.2)")
    text = hover(
        browser, STREAMS, 0.5, browser.run("return buildLanes().groups[0].lanes[0].top + 26")
    )
    assert "forward of layers." in text
    # Not a thing of time limits: every chart draws with one canvas, not an element for each span.
    assert browser.run("return document.querySelectorAll('*').length") < 1_000


def test_fingers_zoom_and_a_tap_answers(browser: Browser, pages: SimpleNamespace) -> None:
    browser.open(pages.run, 390, 844)
    command = browser.driver.execute_cdp_cmd
    command("Emulation.setTouchEmulationEnabled", {"enabled": True, "maxTouchPoints": 2})
    try:
        whole = visible_range(browser)
        left, width, height = middle(browser, STREAMS)

        def touch(kind: str, *places: float) -> None:
            points = [{"x": left + p * width, "y": height, "id": i} for i, p in enumerate(places)]
            command("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

        touch("touchStart", 0.4, 0.6)
        touch("touchMove", 0.35, 0.65)
        touch("touchMove", 0.3, 0.7)
        touch("touchEnd")
        near = visible_range(browser)
        assert whole[0] < near[0] < near[1] < whole[1]
        assert near[1] - near[0] == pytest.approx((whole[1] - whole[0]) / 2, rel=0.1)

        top = browser.run("return buildLanes().groups[0].lanes[0].top + 16 + BAR / 2")
        height = browser.run("return document.querySelector(arguments[0]).getBoundingClientRect().top", STREAMS) + top  # fmt: skip  # noqa: E501
        touch("touchStart", 0.5)
        touch("touchEnd")
        shown = "const t = document.getElementById('tip'); return t.hidden ? '' : t.innerText"
        for _ in range(100):  # a tap becomes a mouse's move a moment later
            if text := browser.run(shown):
                break
            browser.settle()
        assert " ms" in text
    finally:
        command("Emulation.setTouchEmulationEnabled", {"enabled": False})


def test_kernels_of_a_phase_by_name(browser: Browser, pages: SimpleNamespace) -> None:
    browser.open(pages.run, 1200, 900)
    names = (
        "return [...document.querySelectorAll('#kernels tbody tr')].map(r => r.cells[0].innerText)"
    )
    assert browser.run(names)[:2] == ["sgemm_128x64", "sgemm_128x64"]  # the optimizer's own apart
    press = "[...document.querySelectorAll('#kernels button')].find(b => b.innerText == 'Forward')"
    browser.run(f"{press}.click()")
    assert browser.run(names) == ["sgemm_128x64", "softmax_warp_forward", "Memcpy DtoD"]
    shares = browser.run(
        "return [...document.querySelectorAll('#kernels .falls .share .num')].map(e => e.innerText)"
    )
    assert sum(float(share.split()[0]) for share in shares) == pytest.approx(100, abs=1)
    assert browser.run("return document.querySelectorAll('#kernels i').length") == 3
