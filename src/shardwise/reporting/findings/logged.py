"""What a run's logged steps say by themselves: for runs without a profile."""

from __future__ import annotations

from statistics import median

from shardwise.reporting.findings.finding import Finding
from shardwise.reporting.formats import show_bytes, show_share
from shardwise.reporting.run import Run, second_half


def find_in_metrics(run: Run) -> list[Finding]:
    """Facts about speed, waiting, memory and loss; never fewer than three."""
    found = [_exposed(run), _steadiness(run), _memory(run)]
    found.sort(key=lambda finding: finding.cost_ns, reverse=True)
    return [*found, _loss(run)]


def _exposed(run: Run) -> Finding:
    shares, steps = (second_half(run.column(name)) for name in ("exposed_share", "step_s"))
    if not shares or not steps:
        return Finding(
            "exposed",
            "How long ranks wait for communication was not measured on this device.",
            "`shardwise train --profile 3` measures it, unit by unit.",
        )
    share = median(shares)
    return Finding(
        "exposed",
        f"Rank 0 waits for communication during {show_share(share)} of the step.",
        "`shardwise train --profile 3` says for which units, and what hides it.",
        int(share * median(steps) * 1e9),
    )


def _steadiness(run: Run) -> Finding:
    steps = second_half(run.column("step_s"))
    if len(steps) < 4:
        return Finding("fact", "Too few steps were logged to say how steady they are.")
    middle, worst = median(steps), max(steps)
    slow = [s for s in steps if s > 1.5 * middle]
    if not slow:
        return Finding(
            "fact",
            f"Steps are steady: {middle:.3f} s in the median, {worst:.3f} s at most in the second "
            "half.",
        )
    return Finding(
        "unsteady",
        f"{len(slow)} of {len(steps)} logged steps in the second half take more than 1.5 times "
        f"the median of {middle:.3f} s; the longest takes {worst:.3f} s.",
        "Look for what runs now and then: evaluation, checkpoints, the data loader, other "
        "processes.",
        int((sum(slow) / len(steps) - middle * len(slow) / len(steps)) * 1e9),
    )


def _memory(run: Run) -> Finding:
    held = run.known("memory_bytes")
    if not held:
        return Finding("memory", "Memory was not logged.")
    half = held[len(held) // 2]
    if len(held) >= 20 and held[-1] > 1.1 * half:
        return Finding(
            "memory",
            f"Memory of rank 0 still grows: {show_bytes(half)} in the middle of the run, "
            f"{show_bytes(held[-1])} at its end.",
            "Look for tensors kept over steps: losses that were not detached, growing lists.",
            urgent=True,
        )
    return Finding(
        "memory",
        f"Rank 0 uses {show_bytes(max(held))} at most.",
        "`shardwise train --profile 3` says what it holds at the peak.",
    )


def _loss(run: Run) -> Finding:
    loss = run.known("loss")
    if not loss:
        return Finding("fact", "No logged loss is finite.")
    return Finding("fact", f"The loss went from {loss[0]:.3f} to {loss[-1]:.3f} nats per token.")
