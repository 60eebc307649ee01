"""How the ranks of a save or a load agree: each does its part, and all go on, or all raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from shardwise.checkpoint.manifest import CheckpointError, CorruptCheckpoint
from shardwise.engine import torch_private
from shardwise.engine.mesh import watch_ranks
from shardwise.engine.words import Control, PerWorld, control_of

Value = TypeVar("Value")


class Talk:
    """The ranks of the world, or this process by itself."""

    def __init__(self, control: Control | None, rank: int, world: int, home: Any = None) -> None:
        self.control, self.rank, self.world = control, rank, world
        self._home = home  # the store that `control` leads to stays as long as this

    def agree(self, doing: str, action: Callable[[], Value]) -> list[Value]:
        """`action()` of every rank. If it raised on some, the same CheckpointError on all, which
        names them and what each was doing.
        """
        error: Exception | None = None
        try:
            said: tuple[str, Any] = ("ok", action())
        except Exception as raised:
            error = raised
            kind = "corrupt" if isinstance(raised, CorruptCheckpoint) else "error"
            said = (kind, _describe(raised))
        everybody = [said] if self.control is None else self.control.exchange(said)
        failed = {rank: text for rank, (kind, text) in enumerate(everybody) if kind != "ok"}
        if not failed:
            return [value for _, value in everybody]
        self.part()
        corrupt = any(kind == "corrupt" for kind, _ in everybody)
        text = _join(doing, failed, self.rank if self.control is None else 0, len(everybody))
        raise (CorruptCheckpoint if corrupt else CheckpointError)(text) from error

    def first(self, doing: str, action: Callable[[], Value]) -> Value:
        """What `action()` gave on rank 0, which alone runs it."""
        alone = self.control is None
        return self.agree(doing, lambda: action() if alone or self.rank == 0 else None)[0]  # type: ignore[return-value]

    def part(self) -> None:
        """The last word of a save: rank 0, which may be the store's home, leaves last."""
        if self.control is not None:
            self.control.part()


def _describe(error: Exception) -> str:
    if isinstance(error, CheckpointError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror}{where}"
    return f"{type(error).__name__}: {error}"


def _join(doing: str, failed: dict[int, str], first: int, world: int) -> str:
    texts = list(dict.fromkeys(failed.values()))
    if len(texts) == 1 and len(failed) == world > 1:
        return f"{doing}: {texts[0]}"
    ranks_of = {text: [rank + first for rank in failed if failed[rank] == text] for text in texts}
    told = []
    for text, ranks in list(ranks_of.items())[:4]:
        told.append(f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {text}")
    if len(texts) > 4:
        told.append(f"and {len(texts) - 4} more")
    return f"{doing}: {'; '.join(told)}"


def talk() -> Talk:
    """Of the calling thread with those of the other ranks."""
    if not dist.is_initialized():
        return Talk(None, 0, 1)
    rank, world = dist.get_rank(), dist.get_world_size()
    watch_ranks()  # a plain model's ranks too wait for each other here
    return Talk(control_of(dist.group.WORLD), rank, world)


_background: PerWorld[Talk] = PerWorld()


def background_talk() -> Talk:
    """Of a thread beside, over a connection of its own; made once in a world."""
    main = talk()
    if main.control is None:
        return main

    def make() -> Talk:
        store = torch_private.default_store()
        separate = torch_private.separate_store(store)
        control = Control(separate, tuple(range(main.world)), main.rank, "saving/")
        return Talk(control, main.rank, main.world, store)

    return _background.get("saving", make)
