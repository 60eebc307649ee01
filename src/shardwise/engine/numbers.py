"""State that is one number for a whole parameter, as the count of its steps.

The program sees one number for each parameter. An optimizer works on one for each stretch of
neighbours (`stretches.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch

if TYPE_CHECKING:
    from shardwise.engine.stretches import Neighbours

# Plain tensors whatever the parameter is.
_KEYS = frozenset({"step", "mu_product", "eta", "mu"})


def is_number(key: str, value: Any) -> bool:
    """Not a tensor with an element for each of the parameter."""
    return key in _KEYS or not isinstance(value, torch.Tensor)


class Numbers:
    """One such number of all neighbours in a group whose state began in the same step.

    The program can keep what it sees: the place of a parameter's number in `_visible` is never used
    for another parameter, nor for a later state. The places are of one tensor, so that one copy
    shows what a step made of all of them, and its version tells whether somebody else changed one.
    """

    def __init__(self, like: torch.Tensor, stretches: Sequence[Neighbours]) -> None:
        counts = [len(stretch.members) for stretch in stretches]
        starts = list(accumulate(counts, initial=0))
        # Weakly: they hold the numbers, which must go with them and not wait for a collection.
        self._places = WeakKeyDictionary({s: (i, starts[i]) for i, s in enumerate(stretches)})
        self._live: WeakSet[Neighbours] = WeakSet()
        self._visible = like.new_zeros(sum(counts))
        self._own = like.new_zeros(len(counts))  # the optimizer's, by stretch
        self._index: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self._versions = -1, -1  # of both tensors, when they said the same

    def add(self, stretch: Neighbours, value: torch.Tensor) -> tuple[Any, list[Any]]:
        """A place for the optimizer's number and one for each parameter's, all with this value."""
        i, start = self._places[stretch]
        own = self._own[i]
        own.copy_(value)
        visible = [self._visible[start + j] for j in range(len(stretch.members))]
        for place in visible:
            place.copy_(value)
        self._live.add(stretch)
        self._index = None
        self.doubt()
        return own, visible

    def remove(self, stretch: Neighbours) -> None:
        """From now on the program, or torch, has the parameters' numbers for itself."""
        self._live.discard(stretch)
        self._index = None

    def follow(self) -> list[Neighbours]:
        """Take over what somebody else made of the parameters' numbers since the last step. Gives
        the neighbours among which they differ now.
        """
        if not self._changed():
            return []
        values, apart = self._visible.tolist(), []
        for stretch in self._live:
            i, start = self._places[stretch]
            first, *others = values[start : start + len(stretch.members)]
            if any(other != first for other in others):
                apart.append(stretch)
            else:
                self._own[i].copy_(self._visible[start])
        self._note()
        return apart

    def _changed(self) -> bool:
        if (self._own._version, self._visible._version) != self._versions:
            return True
        # On the host a look costs less than to miss what `.data` or numpy changed.
        return self._visible.device.type == "cpu" and not torch.equal(*self._both())

    def doubt(self) -> None:
        """Take nothing for seen."""
        self._versions = -1, -1

    def show(self) -> None:
        """Copy the optimizer's numbers to the parameters' places, if a step changed them."""
        if self._own._version != self._versions[0]:
            owners, places = self._arrange()
            if places is None:
                self._visible.copy_(self._own.index_select(0, owners))
            else:
                self._visible.index_copy_(0, places, self._own.index_select(0, owners))
            self._note()

    def _note(self) -> None:
        self._versions = self._own._version, self._visible._version

    def _both(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The optimizer's number for every parameter that is stepped here, and what it sees."""
        owners, places = self._arrange()
        visible = self._visible if places is None else self._visible[places]
        return self._own.index_select(0, owners), visible

    def _arrange(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """For every parameter that is stepped here its stretch, and its place if not all are."""
        if self._index is None:
            owners: list[int] = []
            places: list[int] = []
            for stretch in sorted(self._live, key=self._places.__getitem__):
                i, start = self._places[stretch]
                owners += [i] * len(stretch.members)
                places += range(start, start + len(stretch.members))
            options: dict[str, Any] = {"dtype": torch.long, "device": self._visible.device}
            everything = places == list(range(len(self._visible)))
            at = None if everything else torch.tensor(places, **options)
            self._index = torch.tensor(owners, **options), at
        return self._index
