"""A run in three lines."""

from statistics import median

from shardwise.reporting.run import Run
from shardwise.reporting.words import show_bytes, show_share, show_time


def summarize(run: Run, finding: str) -> list[str]:
    """Say in three lines what was learnt, what it cost in time, memory and waiting, and what stands
    out most.

    Rates are medians of the second half of the run, which leaves the warm-up out.
    """
    lines = _summarize_run(run) if run.metrics else _summarize_step(run)
    return [*lines, f"finding     {finding}"]


def _summarize_run(run: Run) -> list[str]:
    last = run.metrics[-1]
    loss = [value for value in run.column("loss") if value is not None]
    learnt = f"{loss[0]:.3f} -> {loss[-1]:.3f}" if loss else "not finite"
    where = f"{run.plan.get('name', 'plan')} on {_ranks(run.facts.get('world'))}"
    tokens = "" if last.get("tokens") is None else f", {last['tokens']:,} tokens"
    rate, step_s = _late_median(run, "tokens_per_s"), _late_median(run, "step_s")
    memory = [value for value in run.column("memory_bytes") if value is not None]
    exposed = _late_median(run, "exposed_share")
    return [
        f"loss        {learnt} in {last['step']} steps{tokens}; {where}"
        f" ({run.facts.get('device', '?')})",
        f"throughput  {_shown(rate, ',.0f')} tokens/s, {_shown(step_s, '.3f')} s a step; memory "
        f"{show_bytes(max(memory, default=None))} on rank 0; communication exposed "
        f"{_shown(exposed, '.0%')} of the step",
    ]


def _summarize_step(run: Run) -> list[str]:
    timeline = run.timeline
    assert timeline is not None
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


def _late_median(run: Run, name: str) -> float | None:
    values = run.column(name)
    late = [value for value in values[len(values) // 2 :] if value is not None]
    return median(late) if late else None


def _shown(value: float | None, spec: str) -> str:
    return "unknown" if value is None else format(value, spec)
