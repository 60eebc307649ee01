"""What ranks tell each other beside the data: small host values, over the store through which
their world met. No process group is asked: a collective on the user's own would count among
theirs, and NCCL would stall the device.
"""

from __future__ import annotations

import pickle
import weakref
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from shardwise.engine import torch_private

Value = TypeVar("Value")


class PerWorld(Generic[Value]):
    """Values that belong to the world they were made in: forgotten with it, and not found in the
    one after `destroy_process_group`. Ranks that are threads have a world each.
    """

    def __init__(self) -> None:
        self._worlds: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Any, Value]]
        self._worlds = weakref.WeakKeyDictionary()

    @property
    def here(self) -> dict[Any, Value]:
        world = dist.group.WORLD
        assert world is not None, "torch.distributed is not initialised"
        return self._worlds.setdefault(world, {})


class Control:
    """The ranks of one group, by turns: each says a value, the first one puts them together."""

    def __init__(self, store: Any, ranks: tuple[int, ...], rank: int) -> None:
        self._store, self._size, self._rank = store, len(ranks), rank
        self._prefix = f"shardwise/{'-'.join(map(str, ranks))}"
        self._turn = 0
        self._generation: int | None = None

    def exchange(self, value: object) -> list[Any]:
        """Every rank's value, on every rank. Blocks until all have said theirs."""
        if self._generation is None:
            # A store may outlive its world; every rank of a group comes once in each.
            came: int = self._store.add(f"{self._prefix}/came", 1)
            self._generation = (came - 1) // self._size
        turn = f"{self._prefix}/{self._generation}/{self._turn}"
        self._turn += 1
        said = pickle.dumps(value)
        if self._rank:
            self._store.set(f"{turn}/{self._rank}", said)
            together = self._store.get(f"{turn}/all")
        else:
            together = self._put_together(turn, said)
        if together[:1] == b"=":
            return [pickle.loads(together[1:]) for _ in range(self._size)]
        return [pickle.loads(each) for each in pickle.loads(together[1:])]

    def _put_together(self, turn: str, said: bytes) -> bytes:
        keys = [f"{turn}/{rank}" for rank in range(1, self._size)]
        everybody = [said, *(self._store.get(key) for key in keys)]
        alike = all(each == said for each in everybody)
        together = b"=" + said if alike else b"*" + pickle.dumps(everybody)
        self._store.set(f"{turn}/all", together)
        # Whoever said something in this turn has read what was said in the last.
        last = f"{self._prefix}/{self._generation}/{self._turn - 2}/all"
        for key in (*keys, *([last] if self._turn > 1 else [])):
            self._store.delete_key(key)
        return together


_controls: PerWorld[Control] = PerWorld()


def control_of(group: dist.ProcessGroup | None) -> Control | None:
    """How the ranks of a group tell each other; None where no peer exists to answer (a fake group,
    a rank by itself).
    """
    if group is None or dist.get_backend(group) == "fake":
        return None
    ranks = tuple(dist.get_process_group_ranks(group))
    if len(ranks) == 1:
        return None
    known = _controls.here
    if ranks not in known:
        known[ranks] = Control(torch_private.default_store(), ranks, dist.get_rank(group))
    return known[ranks]
