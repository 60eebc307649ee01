"""The process beside a rank. It has no torch and shares no lock with the rank, so a collective that
never ends, a held interpreter or a stopped rank do not stop it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import selectors
import signal
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from shardwise.watch.hub import GONE_S, HEART_S, SETTINGS, TICK_S, Hub, Verdict, is_alive
from shardwise.watch.page import Reader

_FORCE_S = 0.3  # from asking a rank to end to killing it
_OWN_END_S = 2.0  # for a rank that raised to come to its own end
_LINGER_S = 4.0  # for the verdict, once the rank has ended
_NO_ONE = os.open(os.devnull, os.O_RDWR)


class Link:
    """One line of JSON after the other, over a descriptor of a selector."""

    def __init__(
        self, watcher: Watcher, file: Any, take: Callable[[Link, dict[str, Any]], None]
    ) -> None:
        self._watcher, self.file, self._take = watcher, file, take
        self._in, self._out = b"", b""
        self.on_close: Callable[[Link], None] = lambda link: None
        self.open = True
        watcher.selector.register(file, selectors.EVENT_READ, self.read)

    def send(self, **said: Any) -> None:
        if self.open:
            self._out += (json.dumps(said) + "\n").encode()
            self.flush()

    def flush(self) -> None:
        """Send what the other side takes now; the rest goes with the next tick."""
        try:
            while self._out and self.open:
                self._out = self._out[self.file.send(self._out) :]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self.close()

    def drain(self) -> None:
        """Read all that has come."""
        while self.open and self.read():
            pass

    def read(self) -> bool:
        """Take what has come; false if nothing had."""
        try:
            data = os.read(self.file.fileno(), 1 << 16)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            data = b""
        *lines, self._in = (self._in + data).split(b"\n")
        for line in lines:
            if self.open:
                self._read_line(line)
        if not data or len(self._in) > 1 << 22:
            self.close()
        return bool(data)

    def _read_line(self, line: bytes) -> None:
        try:
            said = json.loads(line)
        except ValueError:
            said = None
        if isinstance(said, dict):
            self._take(self, said)
        else:
            self.close()  # nobody of ours

    def close(self) -> None:
        if self.open:
            self.open = False
            self._watcher.selector.unregister(self.file)
            self.file.close()
            self.on_close(self)


class Watcher:
    """Looks at one rank, tells the hub, and ends the rank when the hub says so."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.rank, self.world = settings["rank"], settings["world"]
        self._pid, self._token = settings["pid"], settings["token"]
        self._verdict_file = settings["verdict"]
        self._host, self._home = socket.gethostname(), _home()
        self.selector = selectors.DefaultSelector()
        self._page = Reader(settings["page"])
        self._groups: dict[str, tuple[int, list[int]]] = {}
        self._said: dict[str, int] = {}  # counts that the hub knows
        self._stopped = False
        self._leaves: dict[str, Any] | None = None
        self._raised: dict[str, Any] | None = None
        self.ended: float | None = None
        self._verdict: Verdict | None = None
        self._kill_at: float | None = None
        self._hub_heard = time.monotonic()
        self._link: Link | None = None
        self._hub_left = False  # rank 0 came to its end; its watcher stays for the others
        # Of each rank: its host's name, what tells hosts apart, its process.
        self._peers: dict[int, tuple[str, str, int]] = {}
        os.set_blocking(0, False)
        self._words = Link(self, os.fdopen(0, "rb", buffering=0), self._from_rank)
        self._beat_at = 0.0
        self._pidfd: int | None = settings["pidfd"]
        if self._pidfd is not None:
            self.selector.register(self._pidfd, selectors.EVENT_READ, self._rank_ended)
        self.hub: Hub | None = None
        if settings["listener"] is not None:
            self._listener = socket.socket(fileno=settings["listener"])
            self._listener.setblocking(False)
            self.selector.register(self._listener, selectors.EVENT_READ, self._accept)
            self.hub = Hub(self.world)

    def run(self) -> None:
        tick = time.monotonic()
        while True:
            hub = self.hub
            settles = hub.settles if hub is not None and hub.verdict is None else None
            until = min(tick, settles or tick, self._kill_at or tick)
            for key, _ in self.selector.select(max(0.0, until - time.monotonic())):
                key.data()
            now = time.monotonic()
            if now < until:
                continue
            # This process itself was held up: nobody else's silence in that time means anything.
            late = now - tick > 1.0
            tick = now + TICK_S
            if late:
                self._hub_heard = now
            self._look(now)
            if self.hub is not None:
                self.hub.tick(now, late)
            if self._is_over(now):
                return

    # The rank

    def _look(self, now: float) -> None:
        """What the rank does now."""
        if self.ended is None and os.getppid() != self._pid:
            self._rank_ended()
        if self.ended is None:
            self._look_if_stopped()
        if self._link is not None:
            moved = self._counts()
            if moved or now >= self._beat_at:
                self._beat_at = now + HEART_S
                self._link.send(beat=moved)
            self._link.flush()
            if self._link is not None and now - self._hub_heard > GONE_S and self._verdict is None:
                self._hub_lost(f"has been silent for {now - self._hub_heard:.1f} s")
        if self._kill_at is not None and now >= self._kill_at and self.ended is None:
            self._kill_at = None
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self._pid, signal.SIGKILL)

    def _is_over(self, now: float) -> bool:
        if self.ended is None or (self.hub is not None and not self.hub.is_over(now)):
            return False
        calm = self._link is None or self._leaves is not None
        return calm or self._verdict is not None or now - self.ended > _LINGER_S

    def _look_if_stopped(self) -> None:
        try:
            with open(f"/proc/{self._pid}/stat", "rb") as file:
                state = file.read().rpartition(b") ")[2][:1]
        except OSError:
            return
        if (state == b"T") != self._stopped:
            self._stopped = state == b"T"
            self._tell(stopped=self._stopped, place=self._page.place)

    def _rank_ended(self) -> None:
        """Say how, as far as it can be known."""
        self._words.drain()
        self._rank_left(_await_exit_code(self._pid, self._pidfd))

    def _rank_left(self, code: int | None) -> None:
        """It has ended, or left its world. Let go of what others may wait for."""
        if self.ended is not None:
            return
        self.ended = time.monotonic()
        if self._pidfd is not None:
            self.selector.unregister(self._pidfd)
        place, counts = self._page.place, self._counts()
        self._tell(ended={"code": code, "leaves": self._leaves, "place": place, "counts": counts})
        if self._leaves is not None or self._verdict is not None:
            os.dup2(_NO_ONE, 2)

    def _counts(self) -> dict[str, int]:
        """Of the groups in which the rank has moved."""
        now = {group: self._page.count(track) for group, (track, _) in self._groups.items()}
        moved = {group: count for group, count in now.items() if count != self._said.get(group)}
        self._said.update(moved)
        return moved

    def _from_rank(self, link: Link, said: dict[str, Any]) -> None:
        if "unit" in said:
            number, name = said["unit"]
            self._page.units[number] = name
        elif "group" in said:
            track, group, ranks = said["group"]
            self._groups[group] = track, ranks
            self._tell(group=[group, ranks])
        elif "hub" in said:
            self._join(*said["hub"])
        elif "raised" in said:
            if self._link is None:
                self._to_rank("speak")
            self._raised = {**said["raised"], "place": self._page.place}
            self._tell(raised=self._raised)
        elif "bye" in said:
            self._leaves = {"world": False}
            self._rank_left(0)
        elif "leaves" in said:
            self._leaves = said["leaves"]
            self._tell(leaves=self._leaves)

    # The hub

    def _accept(self) -> None:
        assert self.hub is not None
        try:
            door, _ = self._listener.accept()
        except OSError:
            return
        door.setblocking(False)
        Link(self, door, self._greet)

    def _greet(self, link: Link, said: dict[str, Any]) -> None:
        """Whoever does not know the token is not of this job."""
        hello = said.get("hello")
        if not isinstance(hello, dict) or hello.get("token") != self._token:
            link.close()
            return
        assert self.hub is not None
        hub, rank = self.hub, int(hello["rank"])
        link._take = lambda link, said: hub.take(rank, said)
        link.on_close = lambda link: hub.lost(rank)
        hub.join(rank, hello["host"], hello["home"], hello["pid"], link.send)

    def _join(self, host: str, port: int, token: str) -> None:
        try:
            door = socket.create_connection((host, port), timeout=GONE_S)
        except ConnectionRefusedError:
            return  # rank 0 has ended already
        except OSError as error:
            # A wall between the hosts, maybe, that lets only known ports pass. The job may live.
            _say(
                f"rank {self.rank} is not watched: its watcher cannot reach rank 0's at "
                f"{host}:{port} ({error})"
            )
            return
        door.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        door.setblocking(False)
        self._hub_heard = time.monotonic()
        self._link = Link(self, door, self._from_hub)
        self._link.on_close = lambda link: self._hub_lost("closed its connection")
        me = {"host": self._host, "home": self._home, "pid": self._pid}
        self._tell(hello={"rank": self.rank, "token": token, **me})
        for group, (_, ranks) in self._groups.items():
            self._tell(group=[group, ranks])
        if self._raised is not None:
            self._tell(raised=self._raised)

    def _tell(self, **said: Any) -> None:
        if self._link is not None:
            self._link.send(**said)

    def _from_hub(self, link: Link, said: dict[str, Any]) -> None:
        self._hub_heard = time.monotonic()
        if "peers" in said:
            self._peers = {int(rank): tuple(peer) for rank, peer in said["peers"].items()}
            if len(self._peers) == self.world:
                self._to_rank("complete")
        elif "say" in said:
            group, count = said["say"]
            self._tell(hash=[group, count, self._page.hash_at(self._groups[group][0], count)])
        elif "tell" in said:
            group, start = said["tell"]
            track = self._groups.get(group)
            self._tell(entries=[group, self._page.entries(track[0], start) if track else []])
        elif "verdict" in said:
            self._end(Verdict(**said["verdict"]), said["printer"], self.rank in said["own"])
        elif "notice" in said:
            _say(said["notice"])
        elif "count" in said:
            self._tell(beat=self._counts())
        elif "left" in said:
            self._hub_left = True

    def _hub_lost(self, how: str) -> None:
        """Rank 0's watcher is gone: with its machine, or by somebody's hand. Then the rank itself
        tells.
        """
        if self._link is not None and self._link.open:
            self._link.on_close = lambda link: None
            self._link.close()
        self._link = None
        if self._verdict is not None or self.ended is not None or self.hub is not None:
            return
        host, home, pid = self._peers.get(0, ("its host", "", 0))
        if self._hub_left or (home == self._home and is_alive(pid)):
            return
        here = [rank for rank, (_, at, _) in self._peers.items() if at == self._home]
        text = (
            f"rank 0 of {self.world} ({host}) cannot be reached from {self._host}: its watcher "
            f"{how}. The link or that machine is down; rank {self.rank} was "
            f"{self._page.place or 'at its start'}. The ranks here were ended"
        )
        verdict = Verdict("lost", 0, text, self._page.place)
        self._end(verdict, min(here, default=self.rank))

    # The end

    def _end(self, verdict: Verdict, printer: int | None, own: bool = False) -> None:
        """Tell, if it is this one's to tell, and end the rank, which may come to its `own` end."""
        if self._verdict is not None:
            return
        self._verdict = verdict
        if self._verdict_file:
            _write(self._verdict_file, verdict)
        elif printer == self.rank:
            _say(verdict.text)
        if self.ended is None:
            self._to_rank("told" if own else "end")
            self._kill_at = time.monotonic() + (_OWN_END_S if own else _FORCE_S)
        else:
            os.dup2(_NO_ONE, 2)

    def _to_rank(self, word: str) -> None:
        with contextlib.suppress(OSError):
            os.write(1, f"{word}\n".encode())


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"shardwise: {text}\n".encode())


def _write(path: str, verdict: Verdict) -> None:
    """For a launcher, which tells it."""
    whole = f"{path}.{os.getpid()}"
    try:
        with open(whole, "w", encoding="utf-8") as file:
            json.dump(vars(verdict), file)
        os.replace(whole, path)
    except OSError:
        _say(verdict.text)


def _home() -> str:
    """Processes see each other, and share a network, only inside one of these."""
    parts = [socket.gethostname()]
    for namespace in ("net", "pid"):
        with contextlib.suppress(OSError):
            parts.append(os.readlink(f"/proc/self/ns/{namespace}"))
    return " ".join(parts)


_GET_INFO, _INFO_EXIT, _INFO = 0xC040FF0B, 1 << 3, struct.Struct("QQ11Ii")


def _await_exit_code(pid: int, pidfd: int | None) -> int | None:
    """For a moment it has left its children, and has no exit code yet."""
    code = _exit_code(pid, pidfd)
    for _ in range(50):
        if code is not None or pidfd is None:
            break
        time.sleep(0.005)
        code = _exit_code(pid, pidfd)
    return code


def _exit_code(pid: int, pidfd: int | None) -> int | None:
    """Of a process that ended, negative for a signal; None where its parent was faster and the
    kernel is too old to tell (before 6.15).
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b") ")[2].split()
        if fields[0] in (b"Z", b"X"):
            return os.waitstatus_to_exitcode(int(fields[49]))
    except (OSError, IndexError, ValueError):
        pass
    if pidfd is None:
        return None
    try:
        info = _INFO.unpack(fcntl.ioctl(pidfd, _GET_INFO, _INFO.pack(_INFO_EXIT, 0, *[0] * 11, 0)))
        return os.waitstatus_to_exitcode(info[13]) if info[0] & _INFO_EXIT else None
    except (OSError, ValueError):
        return None


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)  # it ends with its rank
    Watcher(json.loads(os.environ[SETTINGS])).run()
    os._exit(0)
