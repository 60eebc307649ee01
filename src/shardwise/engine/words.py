"""What ranks tell each other beside tensors: small values, over the store through which they met.

exchange   any value. Each rank says its own and asks for all of them; whoever comes last puts
           them together. So a rank sends three or four requests, of however many ranks.
tell       numbers, in every step: ranks of one host meet in memory, and only the first of each
           host goes to the store.
"""

from __future__ import annotations

import hashlib
import pickle
import struct
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, TypeVar, cast

import torch
import torch.distributed as dist

from shardwise.engine import torch_private
from shardwise.engine.near import meet
from shardwise.engine.regions import host
from shardwise.watch import rank as watched
from shardwise.watch.page import EXCHANGE, WORDS, Track

Value = TypeVar("Value")
_NAMED = 16  # ranks of a group that its keys name one by one
_HEAD = struct.Struct("<IQ")  # before a value in a list of them: whose, and how many bytes


class PerWorld(Generic[Value]):
    """Values that are made once in each world: forgotten with it, and not found in the one after
    `destroy_process_group`. Ranks that are threads have a world each.
    """

    _all: ClassVar[list[PerWorld[Any]]] = []

    def __init__(self) -> None:
        self._worlds: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Any, Value]]
        self._worlds = weakref.WeakKeyDictionary()
        self._all.append(self)

    @classmethod
    def forget(cls, world: dist.ProcessGroup) -> None:
        """Let go of all that was made in this world: a mesh keeps its groups, and so its key."""
        for each in cls._all:
            each._worlds.pop(world, None)

    def get(self, key: Any, make: Callable[[], Value]) -> Value:
        """The value of `key` in this world; made if nobody has asked for it yet."""
        world = dist.group.WORLD
        assert world is not None, "torch.distributed is not initialised"
        made = self._worlds.setdefault(world, {})
        if key not in made:
            made[key] = make()
        return made[key]


class Control:
    """The ranks of one group, by turns. `watch`: whether a turn is told to the rank's watch."""

    def __init__(
        self, store: Any, ranks: tuple[int, ...], rank: int, about: str = "", watch: bool = True
    ) -> None:
        self._store, self._size, self._rank = store, len(ranks), rank
        # Some stores join what several ranks say; else each value has a key of its own.
        self._joins = getattr(store, "has_extended_api", lambda: False)()
        self.about, self._prefix = about, f"shardwise/{about}{_name(ranks)}"
        self._turn = 0
        self._generation: int | None = None
        self._ranks = ranks
        self.track: Track | None = None  # where the watch reads how often this rank came here
        self._watch = watch
        self._hosts: _Hosts | None = None
        self._find_track()  # now, if it can be: a rank may end before its first turn

    def exchange(self, value: object) -> list[Any]:
        """Every rank's value, on every rank. Blocks until all have said theirs."""
        self.note_turn()
        if self._generation is None:
            # A store may outlive its world; every rank of a group comes once in each.
            came: int = self._store.add(f"{self._prefix}/came", 1)
            self._generation = (came - 1) // self._size
        turn = self._key_of(self._turn)
        self._turn += 1
        said = pickle.dumps(value)
        if self._joins:
            self._store.append(f"{turn}/said", _HEAD.pack(self._rank, len(said)) + said)
        else:
            self._store.set(f"{turn}/{self._rank}", said)
        is_last = self._store.add(f"{turn}/came", 1) == self._size
        together = self._put_together(turn) if is_last else self._store.get(f"{turn}/all")
        if together[:1] == b"=":
            return [pickle.loads(together[1:]) for _ in range(self._size)]
        return [pickle.loads(each) for each in pickle.loads(together[1:])]

    def tell(self, numbers: Sequence[int]) -> list[list[int]]:
        """Every rank's numbers, as many on each. For what is compared in every step."""
        if self._hosts is None:
            self._hosts = _Hosts(self, self._store, self._rank)
        return self._hosts.tell(numbers)

    def find_hosts(self) -> list[list[int]]:
        """The places in the group of each host's ranks; nothing where a host cannot be known."""
        by_word: dict[object, list[int]] = {}
        for place, word in enumerate(self.exchange(_host_word())):
            by_word.setdefault(word, []).append(place)
        return [] if None in by_word else list(by_word.values())

    def among(self, places: Sequence[int], why: str) -> Control:
        """The turns of some of the group's ranks, this one among them, by themselves."""
        ranks = tuple(self._ranks[place] for place in places)
        name = f"{self.about}{why} {_name(self._ranks)}/"
        return Control(self._store, ranks, places.index(self._rank), name, watch=False)

    def part(self) -> None:
        """The last word: the first rank, which may be the store's home, leaves after the others."""
        turn = f"{self._key_of(self._turn)}/parting"
        if self._rank:
            if self._store.add(turn, 1) == self._size - 1:
                self._store.set(f"{turn}/all", b"")
        elif self._size > 1:
            self._store.get(f"{turn}/all")
            self._delete(turn, f"{turn}/all")

    def note_turn(self) -> None:
        """Let the watch know that this rank has come here once more."""
        if self.track is None:
            self._find_track()
        if self.track is not None:
            self.track.add(EXCHANGE, "agreement")

    def _find_track(self) -> None:
        if self._watch and watched.on is not None:
            self.track = watched.on.track(f"{WORDS}{self._prefix}", self._ranks)

    def _key_of(self, turn: int) -> str:
        return f"{self._prefix}/{self._generation}/{turn}"

    def _put_together(self, turn: str) -> bytes:
        """What all have said, for all."""
        everybody = self._take(turn)
        alike = all(each == everybody[0] for each in everybody)
        together = b"=" + everybody[0] if alike else b"*" + pickle.dumps(everybody)
        self._store.set(f"{turn}/all", together)
        self._delete(f"{turn}/came")
        if self._turn > 1:  # whoever has come to this turn has read the last one
            self._delete(f"{self._key_of(self._turn - 2)}/all")
        return together

    def _take(self, turn: str) -> list[bytes]:
        """Everybody's value, by rank, out of the store."""
        if not self._joins:
            keys = [f"{turn}/{rank}" for rank in range(self._size)]
            everybody = [self._store.get(key) for key in keys]
            self._delete(*keys)
            return everybody
        said, at, found = self._store.get(f"{turn}/said"), 0, {}
        self._delete(f"{turn}/said")
        while at < len(said):
            rank, nbytes = _HEAD.unpack_from(said, at)
            at += _HEAD.size + nbytes
            found[rank] = said[at - nbytes : at]
        return [found[rank] for rank in range(self._size)]

    def _delete(self, *keys: str) -> None:
        for key in keys:
            self._store.delete_key(key)


class _Hosts:
    """The ranks of a group by the hosts that they are on: those of one share memory, the first of
    each goes to the store for them. All ranks make it, and find the same.
    """

    def __init__(self, control: Control, store: Any, rank: int) -> None:
        self._control, self._near, self._leaders = control, None, None
        self._places = control.find_hosts()
        if not self._places:
            return
        own = next(each for each in self._places if rank in each)
        inside, at = control.among(own, "host of"), own.index(rank)
        timeout = getattr(store, "timeout", dist.default_pg_timeout).total_seconds()
        near = meet(inside.exchange, len(own), at, timeout)
        if not all(control.exchange(near is not None)):
            return
        self._near = near
        if at == 0 and len(self._places) > 1:
            self._leaders = control.among([places[0] for places in self._places], "hosts of")

    def tell(self, numbers: Sequence[int]) -> list[list[int]]:
        """Every rank's numbers: to the first rank of the host, to those of other hosts, back."""
        if self._near is None:
            return [list(each) for each in self._control.exchange(tuple(numbers))]
        self._control.note_turn()
        mine = torch.tensor(numbers, dtype=torch.int64, device="cpu")  # whatever the default is
        here = mine.new_empty((self._near.size, len(mine)))
        self._near.all_gather((here, mine)).wait()
        if len(self._places) > 1:
            everybody = mine.new_empty((sum(map(len, self._places)), len(mine)))
            if self._leaders is not None:
                by_host = self._leaders.exchange(here.tolist())
                for places, told in zip(self._places, by_host, strict=True):
                    everybody[places] = mine.new_tensor(told)
            self._near.broadcast(everybody).wait()
            here = everybody
        return cast(list[list[int]], here.tolist())


def _host_word() -> str | None:
    """What ranks of one host say alike, and others do not; None where that cannot be known."""
    try:
        return hashlib.sha1(host().encode()).hexdigest()[:16]
    except OSError:
        return None


def _name(ranks: tuple[int, ...]) -> str:
    """A group's, for keys: every request carries it."""
    if len(ranks) <= _NAMED:
        return "-".join(map(str, ranks))
    word = hashlib.sha1(repr(ranks).encode()).hexdigest()[:16]
    return f"{ranks[0]}-{ranks[-1]}-{len(ranks)}-{word}"


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
    return _controls.get(
        ranks, lambda: Control(torch_private.default_store(), ranks, dist.get_rank(group))
    )
