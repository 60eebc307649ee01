"""Reading a run's directory, and what the page of it holds."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest

import shardwise as sw
from shardwise.cli import main
from shardwise.errors import UserError
from shardwise.reporting.report import report, report_comparison, report_run
from shardwise.reporting.run import Run, read_run
from shardwise.reporting.side import MOST_MOMENTS, MOST_SPANS, choose_ranks, thin
from shardwise.reporting.summary import summarize
from shardwise.timeline import MemoryCurve, Timeline
from tests.browser.made import crowd, make_run, resolved


def fabricate(folder, exposed=0.25, steps=10):
    rows = [
        {
            "step": step,
            "loss": 5.5 - 0.25 * step,
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
    """Collects what a browser would fetch, and the text of every element."""

    def __init__(self, text):
        super().__init__()
        self.fetched, self.data = [], {}
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self._inside = dict(attrs).get("id") or tag
        held = [v for k, v in attrs if k in ("src", "href", "srcset", "data", "poster")]
        self.fetched += [value for value in held if not value.startswith("data:")]

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, text):
        self.data[self._inside] = self.data.get(self._inside, "") + text


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "run", title="made")


# The page


def test_the_page_fetches_nothing_and_holds_its_data(made):
    run = read_run(made)
    page = Page(report_run(run).render())
    assert page.fetched == []
    assert "@import" not in page.data["style"] and "url(" not in page.data["style"]
    assert json.loads(page.data["data"]) == report_run(run).data
    assert "prefers-color-scheme" in page.data["script"]


def test_the_page_is_small_enough_for_a_phone(made):
    assert len(report_run(read_run(made)).render()) < 300_000
    assert len(report(None, crowd(20_000)).render()) < 1_500_000


def test_text_of_the_run_cannot_end_the_page_s_script(made):
    text = report_run(read_run(made)).render()
    assert "alert(1)" in text
    assert "</pre><script>alert(1)" not in text


def test_the_parts_of_every_rank_sum_to_its_step(made):
    data = report_run(read_run(made)).data
    assert [side["label"] for side in data["sides"]] == ["measured", "predicted"]
    for side in data["sides"]:
        for rank in side["ranks"].values():
            assert sum(rank["parts"].values()) == rank["step"]


def test_the_page_holds_every_span_and_the_peak_of_memory(made):
    run = read_run(made)
    side = report_run(run).data["sides"][0]
    for rank in run.timeline.ranks:
        shown = side["ranks"][str(rank)]
        assert len(shown["start"]) == sum(s.rank == rank for s in run.timeline.spans)
        peak = run.timeline.peak(rank)
        assert shown["memory"]["peak"]["total"] == peak.total
        totals = map(sum, zip(*shown["memory"]["roles"].values(), strict=True))
        assert max(totals) == peak.total
        assert shown["memory"]["limit"] == run.memory_of(rank)["limit_bytes"]


def test_the_units_add_up_to_what_was_computed_and_exposed(made):
    run = read_run(made)
    for side, timeline in zip(
        report_run(run).data["sides"], (run.timeline, run.predicted), strict=True
    ):
        for rank, shown in side["ranks"].items():
            spans = [s for s in timeline.spans if s.rank == int(rank) and s.role == "compute"]
            rows = shown["units"].values()
            assert sum(row["compute"] for row in rows) == sum(s.duration for s in spans)
            assert sum(row["exposed"] for row in rows) == shown["parts"]["exposed_transfer"]


def test_tiny_messages_do_not_stretch_the_curve(tmp_path):
    directory = make_run(tmp_path / "run")
    messages = json.loads((directory / "messages.json").read_text())
    for entry in [*messages["messages"][:1], *messages["curve"][:1]]:
        small = {**entry, "bytes": 4}
        messages["messages" if "unit" in entry else "curve"].append(small)
    (directory / "messages.json").write_text(json.dumps(messages))
    (found,) = report_run(read_run(directory)).data["wires"]
    drawn = [point["bytes"] for point in found["curve"]]
    assert drawn and min(drawn) >= 1024


def test_units_have_compute_exposed_time_and_bytes_on_both_sides(made):
    run = read_run(made)
    data = report_run(run).data
    assert data["units"][:2] == ["layers.0", "layers.1"]
    rank = str(run.timeline.slowest)
    measured = data["sides"][0]["ranks"][rank]["units"]["layers.3"]
    exposed = run.timeline.exposed(int(rank))
    assert measured["exposed"] == sum(v for (u, _), v in exposed.items() if u == "layers.3")
    predicted = data["sides"][1]["ranks"]["0"]["units"]["layers.3"]
    # Gathered for forward and backward, reduced once: 6 million parameters of 4 bytes each time.
    assert measured["bytes"] == predicted["bytes"] == 3 * 24_000_000


def test_the_curves_are_the_metrics(made):
    run = read_run(made)
    curves = {curve["name"]: curve for curve in report_run(run).data["curves"]}
    assert curves["loss"]["lines"][0]["y"] == run.column("loss")
    assert curves["loss"]["level"] == 2.75
    # 6 FLOP for each of 48 million parameters and each token, on 4 devices of 1 TFLOP/s.
    rate = run.column("tokens_per_s")[5]
    assert curves["mfu"]["lines"][0]["y"][5] == pytest.approx(rate * 6 * 48e6 / 4e12)


def test_what_is_missing_is_empty_or_explained(tmp_path):
    data = report_run(fabricate(tmp_path, exposed=None)).data
    assert data["sides"] == data["units"] == data["wires"] == []
    notes = {curve["name"]: curve["note"] for curve in data["curves"]}
    assert notes["exposed_share"] == "Not measured on this device."
    assert "peak rate" in notes["mfu"] and notes["loss"] == ""
    assert "--profile 3" in " ".join(f["text"] for f in data["findings"])
    assert len(data["findings"]) == 3


def test_a_directory_with_a_timeline_alone_is_reported(tmp_path, made):
    (tmp_path / "timeline.json").write_text((made / "timeline.json").read_text())
    run = read_run(tmp_path)
    data = report_run(run).data
    assert len(data["findings"]) == 3 and len(data["sides"]) == 1
    assert data["summary"][0].startswith("step        101 ms on 4 ranks")


def test_too_many_spans_leave_ranks_out_but_never_the_slowest():
    timeline = crowd(MOST_SPANS + 4_000, ranks=4)
    chosen = choose_ranks(timeline)
    assert timeline.slowest in chosen and len(chosen) == 3
    assert choose_ranks(crowd(1_000, ranks=4)) == [0, 1, 2, 3]


def test_a_long_memory_curve_is_thinned_around_its_peak():
    count = 50_000
    values = [1_000 + i % 97 for i in range(count)]
    values[31_234] = 9_999
    curve = MemoryCurve(0, tuple(range(count)), {"other": tuple(values)})
    kept = thin(curve)
    assert len(kept) <= MOST_MOMENTS and 31_234 in kept
    assert kept[0] == 0 and kept[-1] == count - 1


# Two runs


def test_a_comparison_says_which_is_faster_and_why(made, tmp_path):
    other = make_run(tmp_path / "other", title="slow wire", rate=4e9, slow={}, prefetch=1)
    first, second = read_run(made), read_run(other)
    data = report_comparison(first, second).data
    assert [side["label"] for side in data["sides"]] == ["made", "slow wire"]
    text = data["findings"][0]["text"]
    low, high = sorted((first.timeline.step, second.timeline.step))
    assert f"is {100 * (1 - low / high):.0f} % faster" in text or "% faster" in text
    assert text.startswith("made is" if first.timeline.step == low else "slow wire is")
    assert len(data["findings"]) == 3
    assert any("xposed transfer takes" in f["text"] for f in data["findings"])


def test_two_directories_with_the_same_title_are_told_apart(made, tmp_path):
    make_run(tmp_path / "run", title="made")
    data = report_comparison(read_run(made), read_run(tmp_path / "run")).data
    assert [side["label"] for side in data["sides"]] == ["run (A)", "run (B)"]
    assert data["findings"][0]["text"].startswith("Both steps take")


def test_a_traced_step_is_not_compared_with_one_that_was_not(made):
    """Tracing makes a step longer: it says nothing of the engine."""
    timed = {"timing": "untraced", "step_ms": "46.0", "traced_ms": "60.0"}
    traced = {"timing": "traced", "step_ms": "113.0"}
    step = read_run(made).timeline

    def run(name, labels):
        return Run(name, timeline=dataclasses.replace(step, labels={"engine": name, **labels}))

    data = report_comparison(run("torch", traced), run("shardwise", timed)).data
    texts = [finding["text"] for finding in data["findings"]]
    assert not any("faster" in text or "Compute" in text for text in texts)
    assert "torch (traced) was timed while it was traced" in texts[0]
    assert "a step takes 113 ms in torch (traced) and 60.0 ms in shardwise" in texts[1]
    assert [side["label"] for side in data["sides"]] == ["torch (traced)", "shardwise"]
    # Profiles that were written before the label tell by what they took.
    older = run("torch", {"step_ms": "113.0"}), run("shardwise", {**timed, "timing": "untraced"})
    assert "do not compare" in report_comparison(*older).data["findings"][0]["text"]
    for labels in (timed, traced):
        same = report_comparison(run("torch", labels), run("shardwise", labels)).data
        assert same["findings"][0]["text"].startswith("Both steps take")


def test_runs_without_timelines_are_compared_by_their_logs(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    runs = [fabricate(tmp_path / name) for name in ("a", "b")]
    data = report_comparison(*runs).data
    assert data["findings"][0]["text"] == "A step takes 125 ms in a and 125 ms in b."


def test_runs_with_nothing_in_common_are_refused(tmp_path, made):
    logged = fabricate(tmp_path)
    only_step = Run("step", timeline=read_run(made).timeline)
    with pytest.raises(UserError, match="nothing in common"):
        report_comparison(logged, only_step)


# The command and the function


def test_the_command_writes_and_prints_summary_and_finding(made, capsys):
    assert main(["report", str(made)]) in (0, None)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"report      {made / 'report.html'}"
    assert [line.split()[0] for line in lines[1:]] == ["loss", "throughput", "finding"]
    assert lines[-1].endswith("Raise forward_prefetch from 0 to 1.")
    assert (made / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_the_command_compares_two(made, tmp_path, capsys):
    (tmp_path / "timeline.json").write_text((made / "predicted.json").read_text())
    out = tmp_path / "both.html"
    assert main(["report", str(made), str(tmp_path), "--out", str(out)]) in (0, None)
    assert "faster" in capsys.readouterr().out
    assert out.is_file()


def test_a_plan_and_a_measured_step_make_a_report(made, tmp_path):
    plan, _ = resolved()
    run = read_run(made)
    message = SimpleNamespace(**run.messages["messages"][0])
    measured = SimpleNamespace(timeline=run.timeline, memory=[run.memory_of(0)], messages=[message])
    made_report = sw.report(plan, measured, predicted=run.predicted)
    file = made_report.write(tmp_path / "report.html")
    data = json.loads(Page(file.read_text(encoding="utf-8")).data["data"])
    assert data["runs"][0]["plan"] == plan.explain()
    assert [side["label"] for side in data["sides"]] == ["measured", "predicted"]
    assert data["sides"][0]["ranks"]["0"]["memory"]["limit"]
    assert len(sw.report(None, run.timeline).data["findings"]) == 3


def test_what_has_no_timeline_is_refused():
    with pytest.raises(UserError, match=r"needs a Timeline or an object with one as `\.timeline`"):
        report(None, "a string")
    with pytest.raises(UserError, match="has no span"):
        report(None, Timeline(()))


def test_a_report_that_cannot_be_written_says_so(made, tmp_path):
    with pytest.raises(UserError, match="cannot write"):
        report_run(read_run(made)).write(tmp_path / "absent" / "report.html")


def test_reports_are_made_without_torch(made):
    script = (
        "import sys\nfrom pathlib import Path\n"
        "from shardwise.reporting.report import report_run\n"
        "from shardwise.reporting.run import read_run\n"
        f"run = Path({str(made)!r})\n"
        "report_run(read_run(run)).write(run / 'report.html')\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


# Reading


def test_the_summary_is_three_lines_with_the_numbers(tmp_path):
    lines = summarize(fabricate(tmp_path), "Rank 1 is late.")
    assert len(lines) == 3
    assert "5.250 -> 3.000 in 10 steps, 20,480 tokens; zero3 on 2 ranks (cpu)" in lines[0]
    assert "12,345 tokens/s, 0.125 s a step; memory 300 MiB on rank 0" in lines[1]
    assert "exposed 25% of the step" in lines[1]
    assert lines[2] == "finding     Rank 1 is late."


def test_what_the_device_cannot_measure_is_said(tmp_path):
    assert "exposed unknown" in summarize(fabricate(tmp_path, exposed=None), "")[1]


def test_the_report_is_written_beside_the_run(tmp_path, capsys):
    fabricate(tmp_path)
    assert main(["report", str(tmp_path)]) in (0, None)
    assert capsys.readouterr().out.startswith(f"report      {tmp_path / 'report.html'}\n")
    assert (tmp_path / "report.html").is_file()


def test_a_run_cut_short_in_a_row_is_read_up_to_it(tmp_path):
    fabricate(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "los')
    assert len(read_run(tmp_path).metrics) == 10


def test_a_row_that_is_no_json_is_named(tmp_path):
    fabricate(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("oops\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl:11 is not JSON"):
        read_run(tmp_path)


def test_a_file_that_is_no_timeline_is_named(tmp_path):
    (tmp_path / "timeline.json").write_text('{"spans": []}')
    with pytest.raises(UserError, match=r"timeline\.json is not a timeline"):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("metrics.jsonl", '{"loss": 1.0}\n', "metrics.jsonl:1: step is missing"),
        ("metrics.jsonl", '{"step": 1, "loss": "low"}\n', "loss is 'low', expected a number"),
        ("metrics.jsonl", "[]\n", "metrics.jsonl:1: it is [], expected an object"),
        ("timeline.json", "[1, 2]", "expected a JSON object, got a list"),
        ("memory.json", '{"ranks": [{}]}', "memory.json: ranks[0].rank is missing"),
        ("memory.json", '{"ranks": [{"rank": 0, "limit_bytes": "x"}]}', "expected a number"),
        ("messages.json", '{"messages": "none"}', "messages is 'none', expected a list"),
        ("messages.json", '{"curve": [{"bytes": 3}]}', "curve[0].collective is missing"),
        ("plan.json", '{"units": 3}', "plan.json: units is 3, expected a list"),
        ("plan.json", "{", "plan.json is not JSON"),
        ("run.json", '{"world": "two"}', "world is 'two', expected a whole number"),
    ],
)
def test_files_of_another_shape_are_told_with_the_place(tmp_path, capsys, name, text, told):
    fabricate(tmp_path)
    (tmp_path / name).write_text(text)
    assert main(["report", str(tmp_path)]) == 2
    assert told in capsys.readouterr().err


def test_a_step_alone_is_a_row(tmp_path):
    fabricate(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert "not finite in 1 steps; zero3" in summarize(read_run(tmp_path), "")[0]


def test_a_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"holds no run \(metrics\.jsonl and timeline\.json"):
        read_run(tmp_path)


def test_a_run_without_steps_is_refused(tmp_path):
    with pytest.raises(UserError, match="neither a logged step nor a timeline"):
        fabricate(tmp_path, steps=0)
