"""What rank 0's watcher decides for all: whether something is a fault, who began it, what is said.

A fault is settled for a moment before it is told: a rank that fails makes others fail, and the one
that began it is to be named.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shardwise.watch.page import RUNS, USES

SETTINGS = "SHARDWISE_WATCHER"  # in the environment of a watcher: what it has to know
TICK_S = 0.5  # how often watchers look and tell
HEART_S = 1.0  # how often they do at least
GONE_S = 3.0  # silence after which a watcher, or its machine, is lost
_STOPPED_S = 1.5  # stopped for so long while another rank runs
_SETTLE_S = 0.2
_LOST_S = 1.0  # a rank has lost another: who, and why?
_JOINING_S = 5.0  # ranks that rank 0 does not wait for may still be on their way
_LEAVING_S = 1.5  # ranks that exit by agreement do it within this time
_EARLY_S = 1.0  # a rank has ended and others wait for it
_WAITING_S = 30.0  # after which a rank that never comes is named, and nobody is ended
_ASKED_TO_END = (-signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP)
# How gloo, the store and NCCL say that another rank has gone.
LOST_PEER = re.compile(
    r"connection (closed|reset|refused|aborted)|closed by peer|broken pipe"
    r"|remote process exited|failed to recv|socket timeout|timed out waiting",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Verdict:
    """What ended a job."""

    kind: str  # killed, raised, exited, stopped, lost, diverged, early
    rank: int
    text: str
    place: str = ""  # where that rank was


@dataclass
class Seen:
    """One rank, as its watcher tells."""

    host: str
    home: str  # what tells hosts apart
    pid: int
    send: Callable[..., None]
    heard: float
    counts: dict[str, int] = field(default_factory=dict)
    moved: float = 0.0  # when it last issued a collective
    place: str = ""
    stopped: bool = False
    stopped_since: float | None = None  # while another rank ran
    raised: dict[str, Any] | None = None
    leaves: dict[str, Any] | None = None
    ended: float | None = None
    code: int | None = None
    connected: bool = True

    @property
    def left(self) -> bool:
        """It said goodbye to its world, or came to its program's end."""
        if self.leaves is None or self.raised is not None:
            return False
        return not self.leaves["world"] or self.code in (0, None)


@dataclass(frozen=True)
class Fault:
    order: int  # the likely cause first
    time: float
    kind: str
    rank: int
    text: str  # after "rank 1 of 4 "
    more: str = ""  # a traceback


class Hub:
    def __init__(self, world: int) -> None:
        self.world = world
        self.ranks: dict[int, Seen] = {}
        self.groups: dict[str, list[int]] = {}
        self._alike: dict[str, int] = {}  # in each group: collectives known to be the same
        self._asked: dict[str, tuple[int, dict[int, int | None]]] = {}
        self._told: dict[str, dict[int, list[dict[int, list[Any]]]]] = {}
        self._faults: dict[int, Fault] = {}
        self.settles: float | None = None
        self.verdict: Verdict | None = None
        self._decided = self._heart_at = 0.0
        self._noticed = False

    # What watchers say

    def join(self, rank: int, host: str, home: str, pid: int, send: Callable[..., None]) -> None:
        self.ranks[rank] = Seen(host, home, pid, send, time.monotonic())
        if self.verdict is not None:  # told already; this one has only to end
            send(verdict=vars(self.verdict), printer=None, own=[])
            return
        peers = {r: (seen.host, seen.home, seen.pid) for r, seen in self.ranks.items()}
        if len(peers) == self.world:
            self._everybody(peers=peers)
        elif 0 in peers:
            send(peers={0: peers[0]})
        if 0 in peers and self.ranks[0].ended is not None and self.ranks[0].left:
            send(left=True)

    def take(self, rank: int, said: dict[str, Any]) -> None:
        seen, now = self.ranks[rank], time.monotonic()
        seen.heard = now
        if "beat" in said:
            self._count(seen, said["beat"], now)
            if self.settles is not None:
                self._ask_for_hashes()
        elif "group" in said:
            group, ranks = said["group"]
            self.groups[group] = ranks
            seen.counts.setdefault(group, 0)
        elif "stopped" in said:
            seen.stopped, seen.place = said["stopped"], said["place"]
        elif "raised" in said:
            seen.raised, seen.place = said["raised"], said["raised"]["place"]
            self._suspect(rank, now)
        elif "leaves" in said:
            seen.leaves = said["leaves"]
        elif "ended" in said:
            ended = said["ended"]
            seen.ended, seen.code, seen.place = now, ended["code"], ended["place"]
            seen.leaves = seen.leaves or ended["leaves"]
            self._count(seen, ended["counts"], now)
            self._suspect(rank, now)
            if rank == 0 and seen.left:
                self._everybody(left=True)
        elif "hash" in said:
            self._compare(rank, *said["hash"])
        elif "entries" in said:
            self._find_difference(rank, *said["entries"])

    def lost(self, rank: int) -> None:
        """A watcher's connection has closed."""
        seen = self.ranks[rank]
        seen.connected = False
        near = 0 in self.ranks and seen.home == self.ranks[0].home
        if near and is_alive(seen.pid):
            return  # somebody has killed the watcher, not the rank
        if seen.ended is None and not seen.left:
            text = (
                "is lost: its watcher's connection closed. Its machine, the link to it, or all of "
                "its processes are gone"
            )
            self._fault(rank, 4, "lost", text)

    # What follows

    def is_over(self, now: float) -> bool:
        """Nobody is left to tell, or nobody who can be reached."""
        first = self.ranks.get(0)
        since = now - (first.ended if first is not None and first.ended is not None else now)
        if self.verdict is not None and now - self._decided > GONE_S:
            return True
        if len(self.ranks) < self.world and since < _JOINING_S:
            return False
        return not any(seen.connected for rank, seen in self.ranks.items() if rank != 0)

    def tick(self, now: float, late: bool) -> None:
        """Look at everybody, and decide when a fault has settled."""
        if self.verdict is not None:
            return
        if now >= self._heart_at:
            self._heart_at = now + HEART_S
            self._everybody(tick=True)
        for rank, seen in self.ranks.items():
            if late:
                seen.heard = now
            if seen.connected and seen.ended is None:
                self._look(rank, seen, now)
            elif seen.ended is not None and seen.left:
                self._look_for_waiting(rank, seen, now)
        self._ask_for_hashes()
        self._notice(now)
        if self.settles is not None and now >= self.settles:
            self._decide(now)

    def _look(self, rank: int, seen: Seen, now: float) -> None:
        if now - seen.heard > GONE_S:
            text = (
                f"is lost: its watcher has been silent for {now - seen.heard:.1f} s. Its machine "
                "or the link to it is down"
            )
            self._fault(rank, 4, "lost", text)
        others_run = any(
            other.ended is None and not other.stopped
            for other in self.ranks.values()
            if other is not seen
        )
        if not (seen.stopped and others_run):
            seen.stopped_since = None
        elif seen.stopped_since is None:
            seen.stopped_since = now
        elif now - seen.stopped_since > _STOPPED_S:
            text = (
                "was stopped (SIGSTOP or SIGTSTP: somebody's kill -STOP, a suspended job) while "
                "others ran"
            )
            self._fault(rank, 1, "stopped", text)

    def _look_for_waiting(self, rank: int, seen: Seen, now: float) -> None:
        """It ended well. That is a fault only if others have gone on to a collective with it."""
        for group, ranks in self.groups.items():
            for other in ranks:
                peer = self.ranks.get(other)
                if group not in seen.counts or peer is None or peer.ended is not None:
                    continue
                if peer.counts.get(group, 0) > seen.counts.get(group, 0):
                    if now - max(peer.moved, seen.ended or now) > _EARLY_S:
                        text = (
                            f"ended (its program was over) while rank {other} waits for it in a "
                            "collective, a save or a load"
                        )
                        self._fault(rank, 2, "early", text)
                    return

    def _suspect(self, rank: int, now: float) -> None:
        """It raised, or ended: is that a fault, and which?"""
        seen = self.ranks[rank]
        if seen.raised is not None:
            if seen.leaves is not None and not seen.leaves["world"]:
                return
            said = seen.raised
            if said["type"] == "KeyboardInterrupt":
                self._fault(rank, 5, "raised", "was interrupted (Ctrl-C, or SIGINT)")
            else:
                lost = LOST_PEER.search(said["said"]) is not None
                settle = _LOST_S if lost else _SETTLE_S  # the other's watcher may be a bit late
                self._fault(rank, 6 if lost else 2, "raised", "failed", said["text"], settle)
        elif seen.ended is not None and not seen.left and seen.code != 0:
            if seen.code is None:
                text = (
                    "ended without a word (most often that is SIGKILL, by the system running out "
                    "of host memory)"
                )
                self._fault(rank, 1, "killed", text)
            elif seen.code < 0:
                from shardwise.children import describe_end  # not before: a watcher is to be small

                aborts = -seen.code == signal.SIGABRT
                asked = seen.code in _ASKED_TO_END
                order, settle = (5, _LOST_S) if asked else (3 if aborts else 1, _SETTLE_S)
                self._fault(rank, order, "killed", describe_end(seen.code), settle=settle)
            else:
                patience = _LEAVING_S if seen.leaves is not None else _SETTLE_S
                text = f"exited with code {seen.code} (its output may say why)"
                self._fault(rank, 4, "exited", text, settle=patience)

    def _fault(
        self, rank: int, order: int, kind: str, text: str, more: str = "", settle: float = _SETTLE_S
    ) -> None:
        now = time.monotonic()
        known = self._faults.get(rank)
        if self.verdict is None and (known is None or order < known.order):
            self._faults[rank] = Fault(order, now, kind, rank, text, more)
            self.settles = min(self.settles or now + settle, now + settle)
            self._everybody(count=True)  # fresh ones, to find orders that parted just now

    def _decide(self, now: float) -> None:
        """Name the fault that began it, and end all ranks; unless all have ended alike, by what
        somebody asked of all of them.
        """
        self._decided = now
        first = min(self._faults.values(), key=lambda fault: (fault.order, fault.time))
        first = self._blame_early_end(first)
        everybody = list(self.ranks.values())
        all_ended = len(everybody) == self.world and None not in [s.ended for s in everybody]
        alike = len({seen.code for seen in everybody}) == 1
        if all_ended and alike and first.kind in ("killed", "exited"):
            self.verdict = Verdict(first.kind, first.rank, "")  # whoever did it knows
            return
        self._pass(self._word(first))

    def _blame_early_end(self, first: Fault) -> Fault:
        """A lost peer that had come to its end: that rank, not the one that complains."""
        if first.order != 6:
            return first
        for rank, seen in self.ranks.items():
            if seen.left:
                text = (
                    f"ended (its program was over) while rank {first.rank} went on, which then "
                    "lost it in a collective"
                )
                return Fault(2, first.time, "early", rank, text, first.more)
        return first

    def _word(self, fault: Fault) -> Verdict:
        seen = self.ranks[fault.rank]
        where = f" {seen.place}" if seen.place else ""
        several = len({each.home for each in self.ranks.values()}) > 1
        host = f" ({seen.host})" if several else ""
        text = f"rank {fault.rank} of {self.world}{host} {fault.text}"
        if fault.kind != "diverged":  # which says it itself
            text += where
        if any(each.ended is None for each in self.ranks.values() if each is not seen):
            text += "; the other ranks were ended"
        if fault.more:
            text += f":\n{fault.more}"
        return Verdict(fault.kind, fault.rank, text, seen.place)

    def _pass(self, verdict: Verdict) -> None:
        self.verdict = verdict
        alive = [rank for rank, seen in self.ranks.items() if seen.ended is None and seen.connected]
        printer = min(alive, default=verdict.rank)
        cause = self.ranks[verdict.rank].raised or {}
        own = [  # these keep the end that they have come to: they all raised the same
            rank
            for rank, seen in self.ranks.items()
            if seen.raised is not None and seen.raised["said"] == cause.get("said")
        ]
        self._everybody(verdict=vars(verdict), printer=printer, own=own)

    def _everybody(self, **said: Any) -> None:
        for seen in list(self.ranks.values()):
            if seen.connected:
                seen.send(**said)

    # The order of collectives

    def _count(self, seen: Seen, counts: dict[str, int], now: float) -> None:
        if counts:
            seen.counts.update(counts)
            seen.moved = now

    def _ask_for_hashes(self) -> None:
        """Ask the ranks of each group for their hash at the last collective that all issued."""
        for group, ranks in self.groups.items():
            members = [self.ranks[rank] for rank in ranks if rank in self.ranks]
            if len(members) < len(ranks) or group.startswith(RUNS):
                continue
            common = min(seen.counts.get(group, 0) for seen in members)
            asked = self._asked.get(group)
            if common > self._alike.get(group, 0) and (asked is None or asked[0] < common):
                self._asked[group] = common, {}
                for seen in members:
                    if seen.connected:
                        seen.send(say=[group, common])

    def _compare(self, rank: int, group: str, count: int, value: int | None) -> None:
        asked = self._asked.get(group)
        if asked is None or asked[0] != count:
            return
        asked[1][rank] = value
        if len(asked[1]) < len(self.groups[group]):
            return
        values = set(asked[1].values())
        if len(values) == 1:
            self._alike[group] = count
        elif None not in values and group.removeprefix(USES) not in self._told:
            moved = group.removeprefix(USES)
            self._told[moved] = {}
            # First what ran, which says more; then what was moved or used, which is always there.
            for each in (RUNS + moved, group):
                for member in self.groups[group]:
                    self.ranks[member].send(tell=[each, self._alike.get(each, 0) + 1])

    def _find_difference(self, rank: int, group: str, entries: list[list[Any]]) -> None:
        """Once all have told what they ran and what they moved: where they parted."""
        group = group.removeprefix(RUNS).removeprefix(USES)
        told = self._told[group].setdefault(rank, [])
        told.append({entry[0]: entry for entry in entries})
        everybody = self._told[group]
        if any(len(everybody.get(member, ())) < 2 for member in self.groups[group]):
            return
        for which in range(2):
            lists = {member: both[which] for member, both in everybody.items()}
            for count in sorted(set.intersection(*map(set, lists.values()))):
                at = {member: entries[count] for member, entries in lists.items()}
                if len({entry[1] for entry in at.values()}) > 1:
                    self._diverged(at)
                    return

    def _diverged(self, at: dict[int, list[Any]]) -> None:
        """Blame the rank that is alone; of two, the higher."""
        does = {rank: f"{verb} of unit {unit}" for rank, (_, _, verb, unit, _) in at.items()}
        said = list(does.values())
        common = max(said, key=lambda what: (said.count(what), what == does[min(does)]))
        odd = max(rank for rank, what in does.items() if what != common)
        first = min(rank for rank, what in does.items() if what == common)
        text = (
            f"runs another order than rank {first} in step {at[odd][4]}: {does[odd]} where rank "
            f"{first} has {common}. They gather and reduce together: what one moves is not what "
            "the other asks for. Let every rank run the same modules in the same order"
        )
        self._fault(odd, 0, "diverged", text)

    def _notice(self, now: float) -> None:
        """Once: a rank waits for another that does not come. It may only be slow, so it stays."""
        if self._noticed:
            return
        for group, ranks in self.groups.items():
            members = {rank: self.ranks[rank] for rank in ranks if rank in self.ranks}
            counts = {rank: seen.counts.get(group, 0) for rank, seen in members.items()}
            if len(counts) < 2 or len(set(counts.values())) == 1:
                continue
            ahead, behind = (
                max(counts, key=lambda r: counts[r]),
                min(counts, key=lambda r: counts[r]),
            )
            since = now - max(seen.moved for seen in members.values())
            if since > _WAITING_S:
                self._noticed = True
                printer = min((r for r, seen in self.ranks.items() if seen.connected), default=0)
                self.ranks[printer].send(
                    notice=f"rank {ahead} has waited {since:.0f} s for rank {behind} in a "
                    f"collective (it has issued {counts[ahead]}, rank {behind} "
                    f"{counts[behind]}). Nobody is ended for that: it may be slow"
                )
                return


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2][:1] not in (b"Z", b"X")
    except OSError:
        return True
