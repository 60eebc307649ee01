"""A world beside the program's own, in which something may fail without harm to that one."""

from __future__ import annotations

import secrets
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from shardwise.engine.mesh import watch_ranks
from shardwise.engine.torch_private import default_store, open_groups, set_world
from shardwise.engine.words import PerWorld, control_of
from shardwise.watch import rank as watched

_LONGEST_WAIT = timedelta(minutes=5)  # for a peer, there
_LOOK_S = 1.0  # between two looks for one that has failed


class LeftWorld(ConnectionError):
    """Another rank has left a separate world by an error: its connection is closed."""


class _Breakable:
    """A store of a separate world: whoever waits in it for a rank that has failed gets an error."""

    def __init__(self, store: Any, failed: Callable[[], bool]) -> None:
        self._store, self._failed = store, failed
        self.set, self.add, self.delete_key = store.set, store.add, store.delete_key
        self.timeout = store.timeout

    def get(self, key: str) -> bytes:
        while not self._failed():
            try:
                self._store.wait([key], timedelta(seconds=_LOOK_S))
            except RuntimeError:  # not yet
                continue
            found: bytes = self._store.get(key)
            return found
        raise LeftWorld("connection closed by peer: another rank has failed")


@contextmanager
def separate_world() -> Iterator[None]:
    """The same ranks in a world of their own while it is open, whose groups and agreements nobody
    meets again, so that something may fail in it. A rank that leaves it by an error closes its
    connections, as soon as nothing of it is referred to, and those who wait for it get an error.
    """
    outside = dist.group.WORLD
    if outside is None or dist.get_world_size() == 1 or dist.get_backend() == "fake":
        yield  # nobody else is there
        return
    watch_ranks()
    before, store, left = open_groups(), default_store(), threading.Event()
    control = control_of(outside)
    assert control is not None
    # Named anew each time: a store may outlive the ranks.
    key = f"shardwise/left/{control.exchange(secrets.token_hex(8))[0]}"

    def inside() -> list[dist.ProcessGroup]:
        return [group for group in open_groups() if group not in before]

    def failed() -> bool:
        there: bool = store.check([key])
        return there

    def abort() -> None:
        """NCCL's kernels wait until their group is aborted; other backends do nothing then."""
        while not left.wait(_LOOK_S):
            if failed():
                for group in inside():
                    group.abort()
                return

    set_world(dist.new_group(timeout=_LONGEST_WAIT))
    set_world(dist.group.WORLD, _Breakable(default_store(), failed))
    aborting = threading.Thread(target=abort, daemon=True)
    aborting.start()
    try:
        with watched.paused():  # only so many groups can be watched
            yield
    except BaseException as error:
        store.set(key, b"")
        traceback.clear_frames(error.__traceback__)  # they hold tensors, and those the groups
        raise
    finally:
        left.set()
        aborting.join()
        set_world(outside)
        groups = inside()
        while groups:
            PerWorld.forget(groups[-1])
            dist.destroy_process_group(groups.pop())
