"""What stands out in a run, in sentences."""

from shardwise.reporting.findings.finding import Finding, choose
from shardwise.reporting.findings.logged import find_in_metrics
from shardwise.reporting.findings.step import find
from shardwise.reporting.run import Run

__all__ = ["Finding", "choose", "find", "find_in"]


def find_in(run: Run) -> list[Finding]:
    """All findings of a run: of its timeline, else of its logged steps."""
    if run.timeline is None:
        return find_in_metrics(run)
    return find(run.timeline, run.predicted, run.plan, memory=run.memory, messages=run.messages)
