"""What graphs take of a unit: this rank's parts of its parameters, and the facts about them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shardwise.engine.gradients import Gradients
from shardwise.engine.unit import Unit
from shardwise.graph.executor import GraphParameter


class Parts:
    """This rank's padded rows of one unit's parameters."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        p = unit.parameters
        self._master, layout = p.master, p.layout
        with torch.no_grad():
            self.leaves = [
                p.master[start : start + rows.part].detach()
                for start, rows in zip(layout.offsets, layout.rows, strict=True)
            ]
        self.trainable: tuple[bool, ...] = unit.trainable
        self._gradients: Gradients | None = None  # that `_trained` goes with
        self._trained: list[int] = []

    @property
    def current(self) -> bool:
        """The parameters stand in the memory that they stood in."""
        return self._master is self.unit.parameters.master

    def hand_over(self, found: Sequence[Tensor | None]) -> None:
        """Bring the gradients of the parts into the unit's sums."""
        unit, gradients = self.unit, self.unit.gradients
        if gradients is None:
            return
        if gradients is not self._gradients:
            numbers = {m.name: i for i, m in enumerate(unit.parameters.members)}
            self._gradients = gradients
            self._trained = [numbers[member.name] for member in gradients.members]
        gradients.take_rows([found[number] for number in self._trained])
        unit.sums.opened = unit.sums.complete = True


def facts_of(unit: Unit) -> Iterator[GraphParameter]:
    """What lowering has to know of a unit's parameters."""
    p, mesh, options = unit.parameters, unit.mesh, unit.options
    compute, reduce = options.dtypes(p.dtype)
    for member, rows in zip(p.members, p.layout.rows, strict=True):
        yield GraphParameter(
            tuple(member.names),
            unit.name,
            rows,
            p.dtype,
            compute,
            reduce,
            mesh.shard.group.group_name if mesh.shard.group is not None else "",
            mesh.replicate.group.group_name if mesh.replicate.group is not None else "",
            mesh.replicate.size,
            options.divide_before,
            options.divide_after,
        )
