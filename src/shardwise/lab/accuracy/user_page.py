"""What `shardwise bench accuracy --as-user` makes of its rows: a table of 80 columns, what they
come to, a page.
"""

from __future__ import annotations

import itertools
import statistics
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from shardwise.profiling.results import Row, print_table

NOISE = 0.01  # of a step: two that differ by less are in no order

_HEAD = """\
# What users of `shardwise plan` get

Written by `shardwise bench accuracy --as-user`; do not edit. Models of others (GPT-2, BERT, T5,
ViT, ResNet, experts, U-Net, LSTM and language models of several shapes; none is this project's) are
planned by their names, as `shardwise plan --model MODULE:FUNCTION` plans them, with and without
`--measure`. Then each Plan of the table really runs: the model is built with values, sharded by
`sw.shard` and stepped with AdamW, by a program that shares nothing with the planner's trial. On the
GPU it is one rank of 8, its network emulated (`h200x8-measured`); over gloo two ranks run on one
core each.

*measured here*: the Plan was tried by `--measure`; *corrected*: another Plan of the ranking, whose
prediction was corrected by these trials. *captured*: the same step under `sw.capture`, where its
host takes half of it or more and it can be captured: said, taken, error. *in* says whether the step
lay in the stated range. Errors are predicted over measured. Memory is the peak of allocated bytes;
*fits* says whether a step runs in no more than a search asks for (in rows from before that was
tried, and on a CPU: whether the allocator took no more, with room to spare). An order is wrong if
two strategies that differ by more than 1 % and more than their spread are ranked the other way
round.
"""


def error(plan: Row, what: str) -> float | None:
    """Predicted over measured, less 1; `what` is such as predicted_ms, alone_bytes."""
    actual = plan.get(f"measured_{what.partition('_')[2]}")
    return plan[what] / actual - 1 if actual and plan.get(what) else None


def inside(plan: Row, what: str) -> bool | None:
    """Whether the step lay in the stated range."""
    if not plan.get("measured_ms") or not plan.get(what):
        return None
    low, high = plan[what]
    return bool(low <= plan["measured_ms"] <= high)


def captured_error(plan: Row) -> float | None:
    """The same of the step under `sw.capture`, where it was tried and ran."""
    if not plan.get("captured_predicted_ms") or not plan.get("captured_measured_ms"):
        return None
    return float(plan["captured_predicted_ms"] / plan["captured_measured_ms"] - 1)


def captured_inside(plan: Row) -> bool | None:
    if captured_error(plan) is None:
        return None
    low, high = plan["captured_range_ms"]
    return bool(low <= plan["captured_measured_ms"] <= high)


def fits(plan: Row, what: str) -> bool | None:
    """No limit of memory at which the search says that it fits, and it does not: as a step with no
    more than that has shown, else by what the allocator took with room to spare.
    """
    if f"fits_{what}" in plan:
        return bool(plan[f"fits_{what}"])
    took = plan.get("measured_reserved_bytes") or plan.get("measured_bytes")
    if "out of memory" in plan.get("error", ""):
        return False
    return bool(plan[what] >= took) if took else None


def measured_here(plan: Row) -> bool:
    return bool(plan["basis"] == "measured here")


def wrong_orders(row: Row, what: str) -> tuple[list[str], int]:
    """Pairs of strategies that are ranked the other way round, and how many pairs differ."""
    wrong, pairs = [], 0
    known = [p for p in row["plans"] if measured_here(p) and "measured_ms" in p]
    for a, b in itertools.combinations(known, 2):
        noise = max(a["measured_spread_ms"], b["measured_spread_ms"], NOISE * a["measured_ms"])
        differ = a["measured_ms"] - b["measured_ms"]
        if abs(differ) <= noise:
            continue
        pairs += 1
        if differ * (a[what] - b[what]) < 0:
            wrong.append(f"{row['case']}: {a['strategy']}, {b['strategy']}")
    return wrong, pairs


def tell(row: Row) -> str:
    """One line of progress."""
    if "error" in row:
        return f"{row['key']}: failed: {row['error']}"
    parts = []
    for plan in row["plans"]:
        found = error(plan, "predicted_ms")
        parts.append(f"{plan['strategy']} {plan['error'] if found is None else f'{found:+.1%}'}")
    return f"{row['key']}: {', '.join(parts)} ({row['seconds']} s)"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:+.1%}"


def _yes(value: bool | None) -> str:
    return {None: "", True: "yes", False: "no"}[value]


_COLUMNS: dict[str, Callable[[Row], str]] = {
    "strategy": lambda p: p["strategy"] + ("" if measured_here(p) else " *"),
    "said": lambda p: f"{p['predicted_ms']:.1f}",
    "took": lambda p: f"{p['measured_ms']:.1f}" if "measured_ms" in p else "failed",
    "error": lambda p: _percent(error(p, "predicted_ms")),
    "in": lambda p: _yes(inside(p, "range_ms")),
    "memory": lambda p: _percent(error(p, "predicted_bytes")),
    "alone": lambda p: _percent(error(p, "alone_ms")),
    "in ": lambda p: _yes(inside(p, "alone_range_ms")),
}


def show(rows: Sequence[Row]) -> None:
    for part, own in by_part(rows):
        lines = []
        for row in own:
            lines += [[row["case"], *[f(p) for f in _COLUMNS.values()]] for p in row["plans"]]
            if "error" in row:
                lines.append([row["case"], "failed"])
        left = ("case", "strategy")
        heads = ("case", *_COLUMNS)
        title = f"{part}: steps in ms as said with --measure (* corrected only), and alone"
        print_table(title, heads, lines, {}, left, 80)
        for row in own:
            for failed in (row, *row["plans"]):
                if "error" in failed:
                    who = f"{row['case']} {failed.get('strategy', '')}".strip()
                    print(textwrap.fill(f"{who} failed: {failed['error']}", 80))
        for line in summarize(part, own):
            print(textwrap.fill(line, 80, subsequent_indent="  "))


def by_part(rows: Iterable[Row]) -> Iterator[tuple[str, list[Row]]]:
    every = list(rows)
    for part in dict.fromkeys(row["part"] for row in every):
        yield part, [row for row in every if row["part"] == part]


def summarize(part: str, rows: Sequence[Row]) -> list[str]:
    """The claims, as sentences with their figures."""
    plans = [plan for row in rows for plan in row["plans"]]
    tried = [plan for plan in plans if measured_here(plan)]
    lines = []
    for title, own, ms, span, memory, needed in (
        ("with --measure", tried, "predicted_ms", "range_ms", "predicted_bytes", "needed_bytes"),
        ("Plans beside those tried", [p for p in plans if not measured_here(p)],
         "predicted_ms", "range_ms", "predicted_bytes", "needed_bytes"),
        ("without --measure", plans, "alone_ms", "alone_range_ms", "alone_bytes",
         "alone_needed_bytes"),
    ):  # fmt: skip
        if not own:
            continue
        said = [*_told("step", own, ms), *_told("memory", own, memory)]
        known = [found for p in own if (found := inside(p, span)) is not None]
        said.append(f"{sum(known)} of {len(known)} in the stated range")
        held = [found for p in own if (found := fits(p, needed)) is not None]
        said.append(f"'fits' wrong in {held.count(False)} of {len(held)}")
        if own is not plans and own is not tried:
            lines.append(f"{part}, {title}: {', '.join(said)}")
            continue
        wrong = [wrong_orders(row, ms) for row in rows]
        pairs = sum(count for _, count in wrong)
        names = [name for each, _ in wrong for name in each]
        more = f" ({'; '.join(names)})" if names else ""
        said.append(f"order wrong in {len(names)} of {pairs} pairs{more}")
        lines.append(f"{part}, {title}: {', '.join(said)}")
    lines += _tell_captured(f"{part}, with --measure", tried)
    for strategy in dict.fromkeys(plan["strategy"] for plan in tried if "measured_ms" in plan):
        own = [plan for plan in tried if plan["strategy"] == strategy]
        lines.append(f"{part}, with --measure, {strategy}: {_told('step', own, 'predicted_ms')[0]}")
    failed = [row["key"] for row in rows if "error" in row]
    failed += [
        f"{row['key']} {p['strategy']}" for row in rows for p in row["plans"] if "error" in p
    ]
    if failed:
        lines.append(f"{part}, failed: {', '.join(failed)}")
    return lines


def _tell_captured(title: str, tried: Sequence[Row]) -> list[str]:
    errors = [apart for p in tried if (apart := captured_error(p)) is not None]
    if not errors:
        return []
    held = [within for p in tried if (within := captured_inside(p)) is not None]
    advised = [apart for p in tried if (apart := _advised_error(p)) is not None]
    return [
        f"{title}, under sw.capture: {_summed_up('step', errors)}, {sum(held)} of {len(held)} in "
        "the stated range",
        f"{title}, captured where that was advised: {_summed_up('step', advised)}",
    ]


def _told(name: str, plans: Sequence[Row], what: str) -> list[str]:
    errors = [found for plan in plans if (found := error(plan, what)) is not None]
    if not errors:
        return []
    more = ""
    if what == "alone_ms":  # what a range has to cover
        more = f"; they took {1 / (1 + max(errors)):.2f} to {1 / (1 + min(errors)):.2f} of it"
    return [_summed_up(name, errors, more)]


def _summed_up(name: str, errors: Sequence[float], more: str = "") -> str:
    mean, worst = statistics.fmean(map(abs, errors)), max(errors, key=abs)
    plans = f"{len(errors)} Plans{more}"
    return f"{name} within {mean:.1%} on average and {worst:+.1%} at worst ({plans})"


def _advised_error(plan: Row) -> float | None:
    """Of the way that the plan's line names: captured, where that was advised."""
    advised = plan.get("captured_advised", False)
    return captured_error(plan) if advised else error(plan, "predicted_ms")


_PAGE: dict[str, Callable[[Row], str]] = {
    "strategy": lambda p: f"{p['strategy']} ({p['mode']})",
    "rests on": lambda p: "measured here" if measured_here(p) else "corrected",
    "predicted": lambda p: "{:.1f} ({:.1f} to {:.1f}) ms".format(p["predicted_ms"], *p["range_ms"]),
    "measured": lambda p: (
        f"{p['measured_ms']:.1f} ± {p['measured_spread_ms'] / 2:.1f} ms"
        if "measured_ms" in p
        else f"failed: {p['error']}"
    ),
    "host": lambda p: f"{p['measured_host_ms']:.1f} ms" if "measured_ms" in p else "",
    "error": _COLUMNS["error"],
    "in": _COLUMNS["in"],
    "peak": lambda p: _gb(p, "measured_bytes"),
    "error ": _COLUMNS["memory"],
    "reserved": lambda p: _gb(p, "measured_reserved_bytes"),
    "fits": lambda p: {None: "", True: "right", False: "wrong"}[fits(p, "needed_bytes")],
    "captured": lambda p: _show_captured(p),
    "without `--measure`": lambda p: "{:.1f} ({:.1f} to {:.1f}) ms".format(
        p["alone_ms"], *p["alone_range_ms"]
    ),
    "error  ": _COLUMNS["alone"],
    "in ": _COLUMNS["in "],
    "memory": lambda p: _percent(error(p, "alone_bytes")),
}


def _show_captured(plan: Row) -> str:
    """What was said, what it took, and how far apart."""
    if "captured_error" in plan:
        return f"not captured: {plan['captured_error']}"
    apart = captured_error(plan)
    if apart is None:
        return ""
    said, took = plan["captured_predicted_ms"], plan["captured_measured_ms"]
    return (
        f"{said:.1f}, {took:.1f} ± {plan['captured_measured_spread_ms'] / 2:.1f} ms, {apart:+.1%}"
    )


def _gb(plan: Row, what: str) -> str:
    return f"{plan[what] / 1e9:.3g} GB" if plan.get(what) else ""


def make_page(*results: dict[str, Any]) -> str:
    """From results of one or several machines."""
    lines = [_HEAD]
    for each in results:
        environment = each["environment"]
        hardware = environment.get("gpu") or environment.get("cpu")
        for part, rows in by_part(each["rows"]):
            lines += [f"## {'Two ranks over gloo' if part == 'gloo' else 'One rank of 8'}", ""]
            lines += [f"- {line}" for line in summarize(part, rows)]
            commits = [environment["commit"], *(row["commit"] for row in rows if "commit" in row)]
            told = f"{hardware}, torch {environment['torch']}, commit "
            told += " and ".join(dict.fromkeys(commits))
            lines += ["", f"{told}: `{each['command']}`.", ""]
            lines += [f"| case | {' | '.join(map(str.strip, _PAGE))} |"]
            lines += ["|---" * (len(_PAGE) + 1) + "|"]
            for row in rows:
                lines += [
                    f"| {row['case']} | {' | '.join(f(plan) for f in _PAGE.values())} |"
                    for plan in row["plans"]
                ]
            lines += ["", *[f"- *{row['case']}*: {row['about']}" for row in rows], ""]
    return "\n".join(lines)
