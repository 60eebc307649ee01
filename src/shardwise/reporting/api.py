"""`sw.report`: a plan and what was measured of it, as a page."""

from __future__ import annotations

import json
from typing import Any

from shardwise.errors import UserError
from shardwise.reporting.html import Report, report_run
from shardwise.reporting.run import Run
from shardwise.timeline import Timeline


def report(plan: Any, measured: Any, *, predicted: Timeline | None = None) -> Report:
    """Put a Plan and a measured step side by side; `.write("report.html")` writes the page.

    `measured` is a Timeline, or what `sw.profile` gives (it has one as `.timeline`, and `.memory`
    and `.messages`). `predicted` is what `sw.simulate` gives. `plan` may be None.
    """
    timeline = measured if isinstance(measured, Timeline) else getattr(measured, "timeline", None)
    if not isinstance(timeline, Timeline):
        raise UserError(
            f"a report needs a Timeline or an object with one as `.timeline`, got "
            f"{type(measured).__name__}; `with sw.profile(model, steps=3) as measured` makes one"
        )
    memory: Any = ()
    messages: Any = ()
    if timeline is not measured:
        memory, messages = getattr(measured, "memory", ()), getattr(measured, "messages", ())
    facts = {} if plan is None else {"plan_explanation": plan.explain()}
    return report_run(
        Run(
            name=timeline.labels.get("title") or (plan.title if plan is not None else "step"),
            plan={} if plan is None else json.loads(plan.to_json()),
            facts=facts,
            timeline=timeline,
            predicted=predicted,
            memory={"ranks": list(memory)},
            messages={"messages": [vars(message) for message in messages]},
        )
    )
