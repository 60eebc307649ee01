"""A run in words: three lines, and what it was made with."""

from __future__ import annotations

from typing import Any

from shardwise.reporting.formats import show_bytes, show_share, show_time
from shardwise.reporting.run import Run, typical
from shardwise.timeline import Timeline


def summarize(run: Run, finding: str) -> list[str]:
    """Say in three lines what was learnt, what it cost in time, memory and waiting, and what stands
    out most.

    Rates are medians of the second half of the run, which leaves the warm-up out.
    """
    lines = _summarize_step(run.timeline) if run.timeline and not run.metrics else _logged(run)
    return [*lines, f"finding     {finding}"]


def _logged(run: Run) -> list[str]:
    last, loss = run.metrics[-1], run.known("loss")
    learnt = f"{loss[0]:.3f} -> {loss[-1]:.3f}" if loss else "not finite"
    where = f"{run.plan.get('name', 'plan')} on {_ranks(run.facts.get('world'))}"
    tokens = "" if last.get("tokens") is None else f", {last['tokens']:,} tokens"

    def rate(name: str, spec: str) -> str:
        value = typical(run.column(name))
        return "unknown" if value is None else format(value, spec)

    return [
        f"loss        {learnt} in {last['step']} steps{tokens}{_resumed(run)}; {where}"
        f" ({run.facts.get('device', '?')})",
        f"throughput  {rate('tokens_per_s', ',.0f')} tokens/s, {rate('step_s', '.3f')} s a step; "
        f"memory {show_bytes(max(run.known('memory_bytes'), default=None))} on rank 0; "
        f"communication exposed {rate('exposed_share', '.0%')} of the step",
    ]


def _resumed(run: Run) -> str:
    after = ", ".join(f"{step:,}" for step in run.facts.get("resumed_after", ()))
    return f", resumed after step {after}" if after else ""


def _summarize_step(timeline: Timeline) -> list[str]:
    labels, parts = timeline.labels, timeline.breakdown()
    known = (labels.get("engine"), labels.get("plan"), labels.get("device"))
    what = ", ".join(dict.fromkeys(word for word in known if word))
    peak = show_bytes(timeline.peak().total) if timeline.memory else "unknown"
    return [
        f"step        {show_time(parts.step)} on {_ranks(timeline.world)}"
        f"{f' ({what})' if what else ''}",
        f"compute     {show_share(parts.compute / parts.step)} of it; communication exposed "
        f"{show_share(parts.exposed_transfer / parts.step)}, waiting for peers "
        f"{show_share(parts.waiting_for_peers / parts.step)}; memory {peak} at the peak",
    ]


def _ranks(count: int | None) -> str:
    return "1 rank" if count == 1 else f"{'?' if count is None else count} ranks"


def describe(run: Run) -> dict[str, Any]:
    """The plan in words, its settings, the configuration and the versions."""
    labels = run.timeline.labels if run.timeline is not None else {}
    return {
        "label": run.name,
        "plan": run.facts.get("plan_explanation") or "",
        "settings": {
            name: value
            for name, value in run.plan.items()
            if name not in ("units", "cut") and value is not None
        },
        "config": run.config,
        "facts": {
            name: value
            for name, value in {**labels, **run.facts}.items()
            if name != "plan_explanation" and value not in (None, "")
        },
    }
