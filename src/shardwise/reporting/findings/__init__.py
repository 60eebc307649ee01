"""What stands out in a run, in sentences."""

from shardwise.reporting.findings.finding import Finding, choose
from shardwise.reporting.findings.logged import find_in_metrics
from shardwise.reporting.findings.prediction import foreseen
from shardwise.reporting.findings.step import find
from shardwise.reporting.run import Run

__all__ = ["Finding", "choose", "find", "find_in"]


def find_in(run: Run) -> list[Finding]:
    """All findings of a run: of its timeline, else of its logged steps. What `--plan auto` said and
    missed comes first.
    """
    told = foreseen(run)
    if run.timeline is not None:
        found = find(
            run.timeline, run.predicted, run.plan, memory=run.memory, messages=run.messages,
            told=told,
        )  # fmt: skip
    else:
        found = [*find_in_metrics(run), *([told] if told else [])]
    if told is not None and told.urgent:
        found = [told, *(finding for finding in found if finding is not told)]
    return found
