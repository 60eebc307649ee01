"""The rank's side of the watch: it starts its watcher, writes the page, says a last word, and ends
when its watcher says so.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import select
import socket
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from shardwise.watch import page
from shardwise.watch.hub import SETTINGS

OFF = "SHARDWISE_WATCH"  # "0" turns the watch off
VERDICT = "SHARDWISE_VERDICT"  # a file: what ended the job is written there, and not printed
ENDED = 114  # the exit code of a rank that was ended because another one failed

_BEGIN = (
    "import sys, types; p = types.ModuleType('shardwise'); p.__path__ = [sys.argv[1]]; "
    "sys.modules['shardwise'] = p; from shardwise.watch.watcher import main; main()"
)
_PATIENCE_S = 3.0  # for a verdict, before a rank that raised speaks for itself
_LONGEST_TEXT = 30_000

on: Watch | None = None  # the watch of this process; None almost never where ranks are several
_paused = False


class Watch:
    """This rank's watcher, while its world stands."""

    def __init__(
        self,
        rank: int,
        world: int,
        store: Any,
        stands: Callable[[], bool],
        explain: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._pid, self._stands, self._explain = os.getpid(), stands, explain
        self._verdict, self._hub_known = threading.Event(), threading.Event()
        self.complete = threading.Event()  # the watchers of all ranks have met
        self._speaks = False  # the watcher leaves it to this rank to say what it raised
        self._lock = threading.Lock()
        self._store, self._key = store, _agree_key(store, world)
        listener, hub = _listen(world, _store_host(store)) if rank == 0 else (None, None)
        fd = page.make()
        self.page = page.Page(fd, _Units(weakref.ref(self)))
        self._tracks: dict[str, page.Track | None] = {}
        settings = {
            "rank": rank, "world": world, "pid": self._pid, "page": fd,
            "listener": listener.fileno() if listener is not None else None,
            "token": hub[2] if hub else None,
            "verdict": os.environ.get(VERDICT),
        }  # fmt: skip
        if settings["verdict"]:
            settings["verdict"] = os.path.abspath(os.environ[VERDICT])  # it works in /
        # Opened here: when the watcher has started, this rank may have ended and be forgotten.
        pidfd = settings["pidfd"] = _open_process(self._pid)
        door = None if listener is None else listener.fileno()
        passed = [each for each in (fd, pidfd, door) if each is not None]
        # Its standard error is this rank's, for the one message; it closes it when the rank ends.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _BEGIN, str(Path(__file__).parents[1])],
            env={**os.environ, SETTINGS: json.dumps(settings)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=passed, cwd="/",
            start_new_session=True,
        )  # fmt: skip
        self._process.returncode = 0  # nobody waits for it: it ends after this process
        os.close(fd)
        if pidfd is not None:
            os.close(pidfd)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._to, self._from = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._to, False)
        if listener is not None and hub is not None:
            listener.close()
            store.set(self._key, json.dumps(hub))
            self._tell(hub=hub)
            self._hub_known.set()
        threading.Thread(target=self._listen, args=(rank != 0,), daemon=True).start()
        self._outer_hook = sys.excepthook
        sys.excepthook = self._before_end
        atexit.register(self._leave)

    # The page

    def track(self, group: str, ranks: tuple[int, ...]) -> page.Track | None:
        """Where to write the order of a group's collectives; None if the page is full."""
        if group not in self._tracks:
            number, track = len(self._tracks), None
            if number < page.TRACKS and len(ranks) > 1:
                track = self.page.track(number)
                self._tell(group=[number, group, ranks])
            self._tracks[group] = track
        return self._tracks[group]

    def orders(self) -> dict[str, tuple[int, int]]:
        """Of each group: how many collectives this rank has issued in it, and their hash."""
        return {
            group: (track.count, track.hash)
            for group, track in self._tracks.items()
            if track is not None and not group.startswith((page.RUNS, page.WORDS))
        }

    # Last words

    def _before_end(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Uncaught: the watcher tells it, with what other ranks say, in one message. Without an
        answer, or with a hook of the program's own, it is told here as ever.
        """
        if self._explain is not None:
            self._explain(error)
        # torch's own hook prints as Python's does, with the rank before each line.
        silent = self._outer_hook.__module__ in ("sys", "torch.distributed.distributed_c10d")
        if not (self.raised(error, trace) and silent):
            self._outer_hook(kind, error, trace)

    def raised(self, error: BaseException, trace: TracebackType | None) -> bool:
        """An exception is about to end this rank. Wait for the verdict: meanwhile peers lose no
        connection, and fail not in their turn. True if the watcher has told all.
        """
        if os.getpid() != self._pid or not self._stands():
            return False
        self._hub_known.wait(_PATIENCE_S)
        name = type(error).__name__
        text = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
        self._tell(raised={"type": name, "said": f"{name}: {error}"[:2000], "text": _cut(text)})
        return self._verdict.wait(_PATIENCE_S) and not self._speaks

    def _leave(self) -> None:
        self._tell(leaves={"world": self._stands()})

    def stop(self) -> None:
        """The watch of this world is over: however this rank ends, it is nobody's fault."""
        if sys.excepthook == self._before_end:
            sys.excepthook = self._outer_hook
        self._tell(bye=True)

    # The watcher's words

    def _listen(self, finds_hub: bool) -> None:
        if finds_hub:
            self._find_hub()
        with os.fdopen(os.dup(self._from), "r", encoding="utf-8") as lines:
            for line in lines:
                word = line.strip()
                if word == "complete":
                    self.complete.set()
                    continue
                self._speaks = word == "speak"
                if word == "end":
                    _flush()
                    os._exit(ENDED)
                self._verdict.set()

    def _find_hub(self) -> None:
        """Wait for rank 0's watcher. Never in a blocking call of the store, which would keep the
        program's own out.
        """
        nap = 0.01
        try:
            while not self._store.check([self._key]):
                time.sleep(nap)
                nap = min(nap * 1.5, 0.5)
            self._tell(hub=json.loads(self._store.get(self._key)))
            self._hub_known.set()
        except Exception:  # the store has gone, and with it this world
            return
        finally:
            self._store = None

    def _tell(self, **said: Any) -> None:
        """One line to the watcher; nothing if it has gone, nor from a forked child."""
        if os.getpid() != self._pid:
            return
        data = (json.dumps(said) + "\n").encode()
        with self._lock:
            while data:
                try:
                    data = data[os.write(self._to, data) :]
                except BlockingIOError:
                    if not select.select([], [self._to], [], 1.0)[1]:
                        return
                except OSError:
                    return


class _Units(page.Units):
    def __init__(self, watch: weakref.ref[Watch]) -> None:
        super().__init__()
        self._watch = watch

    def met(self, number: int, name: str) -> None:
        watch = self._watch()
        if watch is not None:
            watch._tell(unit=[number, name])


def begin(
    rank: int,
    world: int,
    store: Any,
    stands: Callable[[], bool],
    explain: Callable[[BaseException], None] | None = None,
) -> None:
    """Start watching this world, once. `stands` tells whether this process is still in it,
    `explain` adds to an error that ends it what its message does not say.
    """
    global on
    if _paused or (on is not None and on._stands()):
        return
    if on is not None:
        on.stop()
        on = None
    if os.environ.get(OFF) != "0":
        try:
            on = Watch(rank, world, store, stands, explain)
        except OSError as error:
            print(f"shardwise: ranks are not watched: {error}", file=sys.stderr)


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """No order is written meanwhile and no other world is watched; whether this rank lives, is."""
    global on, _paused
    kept, on, _paused = on, None, True
    try:
        yield
    finally:
        on, _paused = kept, False


def _open_process(pid: int) -> int | None:
    """What tells of its end, and how it ended, also when it is forgotten; None on an old system."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def _agree_key(store: Any, world: int) -> str:
    """A store may outlive its world; every rank comes once in each."""
    came: int = store.add("shardwise/watch/came", 1)
    return f"shardwise/watch/{(came - 1) // world}"


def _store_host(store: Any) -> str | None:
    """The address at which the ranks met; None for a store without one."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host: str | None = getattr(store, "host", None)
    return host


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _listen(world: int, host: str | None) -> tuple[socket.socket, tuple[str, int, str]]:
    """The hub's door: its socket; its address for the others, and what they have to say there. On
    loopback where all ranks are on this machine, as far as anybody says so; else on the way by
    which this machine reaches the store.
    """
    here = os.environ.get("LOCAL_WORLD_SIZE")
    local = here == str(world) or (here is None and (host is None or _is_loopback(host)))
    address = bound = "127.0.0.1"
    if not local:
        address = host or os.environ.get("MASTER_ADDR") or socket.gethostname()
        bound = _way_to(address)
        if _is_loopback(bound):  # the others know this machine by that name
            bound = ""
        else:
            address = bound
    family = socket.AF_INET6 if ":" in bound else socket.AF_INET
    listener = socket.create_server((bound, 0), family=family, backlog=1024)
    return listener, (address, listener.getsockname()[1], secrets.token_hex(16))


def _way_to(host: str) -> str:
    """This machine's own address on the way to another; nothing is sent."""
    family, _, _, _, at = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(at)
        return str(probe.getsockname()[0])


def _cut(text: str) -> str:
    half = _LONGEST_TEXT // 2
    return text if len(text) <= _LONGEST_TEXT else f"{text[:half]}\n[...]\n{text[-half:]}"


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):
            stream.flush()
