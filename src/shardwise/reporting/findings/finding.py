"""What a finding is, and how large a loss has to be to become one."""

from __future__ import annotations

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
