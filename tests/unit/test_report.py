import json
from html.parser import HTMLParser

import pytest

from shardwise.errors import UserError
from shardwise.reporting.html import render_html, write_html
from shardwise.reporting.run import read_run
from shardwise.reporting.text import format_bytes, summarize


def fabricate(folder, exposed=0.25, steps=10):
    rows = [
        {
            "step": step,
            "loss": 5.5 - 0.25 * step,
            "grad_norm": 1.0,
            "lr": 0.003,
            "tokens": 2048 * step,
            "tokens_per_s": 12345.0 if step > 1 else 10.0,
            "step_s": 0.125,
            "memory_bytes": 300 * 2**20 + step,
            "exposed_share": exposed,
        }
        for step in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.toml").write_text('[run]\nout = "</pre><script>x</script>"\n')
    (folder / "plan.json").write_text('{"name": "zero3", "mesh": [1, 2]}')
    facts = {
        "world": 2,
        "device": "cpu",
        "commit": None,
        "parameters": 918656,
        "unigram_entropy": 2.75,
        "plan_explanation": "kept: 12 MB <per rank>",
    }
    (folder / "run.json").write_text(json.dumps(facts))
    return read_run(folder)


class Page(HTMLParser):
    """Collects what a browser would fetch, the scripts' text and the visible text."""

    def __init__(self, text):
        super().__init__()
        self.fetched, self.tags, self.data, self.visible = [], [], {}, ""
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self._inside = dict(attrs).get("id") or tag
        self.fetched += [v for k, v in attrs if k in ("src", "href", "srcset", "data", "poster")]
        self.fetched += [tag] if tag in ("link", "iframe", "object", "base") else []

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, text):
        self.data[self._inside] = self.data.get(self._inside, "") + text
        if self._inside not in ("script", "style", "data"):
            self.visible += text


def test_the_summary_is_three_lines_with_the_numbers(tmp_path):
    lines = summarize(fabricate(tmp_path)).splitlines()
    assert len(lines) == 3
    assert "5.250 -> 3.000 in 10 steps, 20,480 tokens; zero3 on 2 ranks (cpu)" in lines[0]
    assert "12,345 tokens/s, 0.125 s a step" in lines[1]
    assert "300 MiB on rank 0" in lines[2]
    assert "exposed 25% of the step" in lines[2]


def test_the_page_fetches_nothing(tmp_path):
    text = render_html(fabricate(tmp_path))
    page = Page(text)
    assert page.fetched == []
    assert "@import" not in page.data["style"]
    assert "url(" not in page.data["style"]
    assert "Plotly" in page.data["script"]


def test_the_page_holds_the_numbers_the_plan_and_the_configuration(tmp_path):
    run = fabricate(tmp_path)
    page = Page(render_html(run))
    curves = {curve["name"]: curve for curve in json.loads(page.data["data"])}
    assert curves["loss"]["y"] == [5.5 - 0.25 * step for step in range(1, 11)]
    assert curves["loss"]["line"] == 2.75
    assert curves["memory_bytes"]["y"][0] == pytest.approx(300)
    assert curves["exposed_share"]["y"] == [0.25] * 10
    assert summarize(run) in page.visible
    assert "kept: 12 MB <per rank>" in page.visible
    assert 'out = "</pre><script>x</script>"' in page.visible
    assert "parameters918,656" in page.visible
    assert "commit" not in page.visible
    assert "prefers-color-scheme: dark" in page.data["style"]


def test_what_the_device_cannot_measure_is_said(tmp_path):
    run = fabricate(tmp_path, exposed=None)
    assert "exposed unknown" in summarize(run)
    curves = {c["name"]: c for c in json.loads(Page(render_html(run)).data["data"])}
    assert curves["exposed_share"]["note"] == "Not measured on this device."
    assert curves["loss"]["note"] == ""


def test_the_report_is_written_beside_the_run(tmp_path):
    file = write_html(fabricate(tmp_path))
    assert file == tmp_path / "report.html"
    assert file.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_run_cut_short_in_a_row_is_read_up_to_it(tmp_path):
    fabricate(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "los')
    assert len(read_run(tmp_path).metrics) == 10


def test_a_row_that_is_no_json_is_named(tmp_path):
    fabricate(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("oops\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl:11 is not a JSON object"):
        read_run(tmp_path)


def test_a_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"holds no run \(metrics\.jsonl is missing\)"):
        read_run(tmp_path)


def test_a_run_without_steps_is_refused(tmp_path):
    with pytest.raises(UserError, match="has no step yet"):
        fabricate(tmp_path, steps=0)


@pytest.mark.parametrize(
    ("count", "text"), [(None, "unknown"), (5, "5 B"), (3 * 2**20, "3 MiB"), (2**31, "2.00 GiB")]
)
def test_bytes_are_shown_in_a_readable_unit(count, text):
    assert format_bytes(count) == text
