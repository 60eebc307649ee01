"""How far the steps of models of others were from what `shardwise plan` said, in a few lines."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.lab.accuracy import user_page
from shardwise.predict.ranking import HOST_BOUND

STRATEGIES = ("ddp", "zero2", "zero3")
HEADS = ["", "Plans", "on average", *STRATEGIES, "at worst", "in the range", "memory"]

Plan = dict[str, Any]


@dataclass(frozen=True)
class Way:
    """One of the predictions that a row has of its step."""

    error: Callable[[Plan], float | None]  # None: there is none
    inside: Callable[[Plan], bool | None]
    memory: str = ""


TRIED = Way(
    lambda plan: user_page.error(plan, "predicted_ms"),
    lambda plan: user_page.inside(plan, "range_ms"),
    "predicted_bytes",
)
ALONE = Way(
    lambda plan: user_page.error(plan, "alone_ms"),
    lambda plan: user_page.inside(plan, "alone_range_ms"),
    "alone_bytes",
)
CAPTURED = Way(user_page.captured_error, user_page.captured_inside)


def make(on_gpu: Sequence[Any], on_host: Sequence[Any]) -> tuple[list[str], list[list[str]]]:
    gpu, host = ([plan for row in rows for plan in row["plans"]] for rows in (on_gpu, on_host))
    tried = [plan for plan in gpu if user_page.measured_here(plan)]
    waits = [p for p in tried if p["measured_host_ms"] >= HOST_BOUND * p["measured_ms"]]
    return HEADS, [
        _line("H200, `--measure`: the GPU sets the step", [p for p in tried if p not in waits]),
        _line("the same, steps that wait for a shared host", waits),
        _line("the same, replayed by `sw.capture`", tried, CAPTURED),
        _line("H200, no trial", gpu, ALONE),
        _line("2 gloo ranks, `--measure`", [p for p in host if user_page.measured_here(p)]),
        _line("2 gloo ranks, no trial", host, ALONE),
    ]


def _line(title: str, plans: Sequence[Plan], way: Way = TRIED) -> list[str]:
    errors = [(plan, found) for plan in plans if (found := way.error(plan)) is not None]

    def mean(strategy: str = "") -> str:
        own = [abs(found) for plan, found in errors if strategy in ("", plan["strategy"])]
        return f"{statistics.fmean(own):.1%}"

    inside = [way.inside(plan) for plan, _ in errors]
    memory = [found for p in plans if way.memory and (found := user_page.error(p, way.memory))]
    return [
        title,
        str(len(errors)),
        mean(),
        *map(mean, STRATEGIES),
        f"{max((found for _, found in errors), key=abs):+.1%}",
        f"{inside.count(True)} of {len(inside)}",
        f"{max(memory, key=abs):+.1%}" if memory else "",
    ]
