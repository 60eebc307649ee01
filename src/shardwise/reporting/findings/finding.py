"""What a finding is, how large a loss has to be to become one, and which ones are shown first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

WORTH = 0.02  # of the step: less is not worth a sentence
USUAL_ON_CPU = 0.15  # of the step: there Python and copies run between the kernels anyway
SHOWN = 3


@dataclass(frozen=True)
class Finding:
    """One thing worth knowing. `cost_ns` is what it costs the step; facts cost nothing."""

    kind: str
    what: str
    change: str = ""
    cost_ns: int = 0
    units: tuple[str, ...] = ()
    rank: int | None = None
    urgent: bool = False

    @property
    def text(self) -> str:
        return f"{self.what} {self.change}".strip()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"text": self.text, "units": list(self.units)}


def choose(findings: Iterable[Finding]) -> tuple[list[Finding], list[Finding]]:
    """The ones to open with, and the rest: losses before facts, and a second one of a kind only
    where there is room.
    """
    ordered = list(findings)
    losses = [finding for finding in ordered if finding.cost_ns or finding.urgent]
    of_kind = {finding.kind: finding for finding in reversed(losses)}
    fresh = sorted(of_kind.values(), key=ordered.index)
    queue = dict.fromkeys([*fresh, *losses, *ordered])
    first = sorted(list(queue)[:SHOWN], key=ordered.index)
    return first, [finding for finding in ordered if finding not in first]
