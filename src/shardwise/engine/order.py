"""The order in which units run: recorded in one pass, replayed as prefetches in the next."""

from __future__ import annotations

from shardwise.engine.unit import Unit


class Order:
    """One direction's order. A pass that deviates from the last one falls back to gathers on
    demand.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.expected: list[Unit] = []
        self.current: list[Unit] = []
        self._at = 0

    def begin(self, guess: list[Unit] | None = None) -> None:
        """Start a pass. What the last pass did is what this one is expected to do; `guess` serves
        before any.
        """
        if self.current:
            self.expected, self.current = self.current, []
        elif guess and not self.expected:
            self.expected = guess
        self._at = 0

    @property
    def names(self) -> tuple[str, ...]:
        """What the last pass ran, in order."""
        return tuple([unit.name for unit in self.current or self.expected])

    def visit(self, unit: Unit) -> list[Unit]:
        """`unit` runs now; the units to gather ahead."""
        self.current.append(unit)
        expected, at = self.expected, self._at
        if at >= len(expected) or expected[at] is not unit:
            try:
                at = expected.index(unit, at)
            except ValueError:
                return []
        self._at = at + 1
        return expected[at + 1 : at + 1 + self.depth]
