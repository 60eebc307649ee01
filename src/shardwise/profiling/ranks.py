"""The ranks that profile together: what they tell each other, and whose clock says what.

They talk through the process group's store, so that a profile adds no collective to the run and
works over any backend. One process that stands for a rank of many (a fake group) is alone.
"""

from __future__ import annotations

import itertools
import pickle
import socket
import statistics
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch.distributed as dist

_ROUNDS = 9
_numbers = itertools.count()  # all ranks profile equally often


class Peers:
    """This rank among those of the default process group."""

    def __init__(self) -> None:
        joined = dist.is_initialized()
        self.rank = dist.get_rank() if joined else 0
        self.fake = joined and dist.get_backend() == "fake"
        self.world = dist.get_world_size() if joined and not self.fake else 1
        self._prefix = f"shardwise/profile/{next(_numbers)}"
        self._talks = 0
        if self.world > 1:
            self._store = dist.distributed_c10d._get_default_store()

    @property
    def leads(self) -> bool:
        return self.world == 1 or self.rank == 0

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        collected = self.collect(value)
        return self.share(collected)

    def collect(self, value: Any) -> list[Any] | None:
        """Every rank's value on the first rank, None on the others."""
        if self.world == 1:
            return [value]
        key = f"{self._prefix}/{self._talks}"
        self._talks += 1
        if not self.leads:
            self._put(f"{key}/{self.rank}", value)
            return None
        others = range(1, self.world)
        return [value, *(pickle.loads(self._store.get(f"{key}/{rank}")) for rank in others)]

    def share(self, value: Any) -> Any:
        """The first rank's value, on every rank."""
        if self.world == 1:
            return value
        key = f"{self._prefix}/{self._talks}"
        self._talks += 1
        if self.leads:
            self._put(key, value)
            return value
        return pickle.loads(self._store.get(key))

    def _put(self, key: str, value: Any) -> None:
        self._store.set(key, pickle.dumps(value))  # type: ignore[arg-type]

    def compare_clocks(self) -> tuple[int, int]:
        """Nanoseconds that this rank's clock is ahead of the first rank's, and how wrong that may
        be. Processes of one machine share a clock; others are compared behind barriers.
        """
        machines = self.exchange(_machine())
        if len(set(machines)) == 1:
            return 0, 0
        seen = []
        for _ in range(_ROUNDS):
            dist.barrier()
            seen.append(perf_counter_ns())
        first = self.share(seen)
        ahead = [mine - theirs for mine, theirs in zip(seen, first, strict=True)]
        spread = max(ahead) - min(ahead)
        errors = self.exchange(spread)
        return int(statistics.median(ahead)), max(errors)


def _machine() -> str:
    """Names one boot of one machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()
