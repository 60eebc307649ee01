"""A run in three lines."""

from statistics import median

from shardwise.reporting.run import Run


def summarize(run: Run) -> str:
    """Say in three lines what was learnt, how fast, and what it cost in memory and waiting.

    Rates are medians of the second half of the run, which leaves the warm-up out.
    """
    last = run.metrics[-1]
    loss = [value for value in run.column("loss") if value is not None]
    learnt = f"{loss[0]:.3f} -> {loss[-1]:.3f}" if loss else "not finite"
    where = f"{run.plan.get('name', 'plan')} on {run.facts.get('world', '?')} ranks"
    rate, step_s = _late_median(run, "tokens_per_s"), _late_median(run, "step_s")
    memory = [value for value in run.column("memory_bytes") if value is not None]
    exposed = _late_median(run, "exposed_share")
    return "\n".join(
        (
            f"loss        {learnt} in {last['step']} steps, {last['tokens']:,} tokens; {where}"
            f" ({run.facts.get('device', '?')})",
            f"throughput  {_shown(rate, ',.0f')} tokens/s, {_shown(step_s, '.3f')} s a step",
            f"memory      {format_bytes(max(memory, default=None))} on rank 0 at most; "
            f"communication exposed {_shown(exposed, '.0%')} of the step",
        )
    )


def format_bytes(count: float | None) -> str:
    """Give bytes in a unit a person reads."""
    if count is None:
        return "unknown"
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.2f} GiB"


def _late_median(run: Run, name: str) -> float | None:
    values = run.column(name)
    late = [value for value in values[len(values) // 2 :] if value is not None]
    return median(late) if late else None


def _shown(value: float | None, spec: str) -> str:
    return "unknown" if value is None else format(value, spec)
