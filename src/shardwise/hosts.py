"""Two hosts on one machine: network namespaces with a cable between them, which can be throttled
and cut. Needs root and iproute2.

    with two_hosts("200mbit") as hosts:
        programs = [hosts.start(i, ["torchrun", "--nnodes", "2", ...]) for i in range(2)]
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from shardwise.errors import UserError

NAMES = ("host-a", "host-b")
ADDRESSES = ("10.83.0.1", "10.83.0.2")
INTERFACE = "wire"
_NEW_NETWORK, _NEW_NAME, _NEW_MOUNTS = 0x40000000, 0x04000000, 0x00020000  # CLONE_NEW...
_BIND, _PRIVATE_BELOW = 4096, 16384 | 1 << 18  # MS_BIND, MS_REC | MS_PRIVATE
_DEATH_SIGNAL = 1  # of prctl
_numbers = itertools.count()  # a process may make several pairs
_UNITS = {"kbit": 125.0, "mbit": 125e3, "gbit": 125e6}


class Hosts:
    """A pair of hosts, made at the first `plug`. They know each other by name."""

    def __init__(self) -> None:
        number = next(_numbers)
        self._spaces = [f"shardwise-{os.getpid()}-{number}{side}" for side in "ab"]
        self._book: Path | None = None  # their /etc/hosts; there is none before the first `plug`

    def plug(self) -> None:
        """A new cable, at full speed."""
        if self._book is None:
            number, path = tempfile.mkstemp(prefix="shardwise-hosts-")
            os.close(number)
            self._book = Path(path)
            known = zip(("127.0.0.1", *ADDRESSES), ("localhost", *NAMES), strict=True)
            self._book.write_text("".join(f"{address} {name}\n" for address, name in known))
            self._book.chmod(0o644)
            for space in self._spaces:
                _run("ip", "netns", "add", space)
                _run("ip", "-n", space, "link", "set", "lo", "up")
        first, second = self._spaces
        subprocess.run(["ip", "-n", first, "link", "del", INTERFACE], capture_output=True)
        _run("ip", "-n", first, "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE,
             "netns", second)  # fmt: skip
        for space, address in zip(self._spaces, ADDRESSES, strict=True):
            _run("ip", "-n", space, "address", "add", f"{address}/24", "dev", INTERFACE)
            _run("ip", "-n", space, "link", "set", INTERFACE, "up")

    def throttle(self, rate: str) -> None:
        """Both directions; `rate` in tc's words: 200mbit."""
        for space in self._spaces:
            throttle_cable(rate, space)

    def cut(self) -> None:
        _run("ip", "-n", self._spaces[0], "link", "set", INTERFACE, "down")

    def enter(self, host: int) -> None:
        """This process, and what it starts, lives on that host from now on."""
        descriptor = os.open(f"/run/netns/{self._spaces[host]}", os.O_RDONLY)
        _call("setns", descriptor, _NEW_NETWORK)
        os.close(descriptor)
        _call("unshare", _NEW_NAME | _NEW_MOUNTS)
        socket.sethostname(NAMES[host])
        _call("mount", b"none", b"/", None, _PRIVATE_BELOW, None)
        _call("mount", os.fsencode(str(self._book)), b"/etc/hosts", None, _BIND, None)
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE

    def start(self, host: int, words: Sequence[str], **settings: Any) -> subprocess.Popen[str]:
        """A program on that host, which is asked to end if this process dies; `settings` are
        Popen's.
        """

        def settle() -> None:
            _call("prctl", _DEATH_SIGNAL, signal.SIGTERM)
            self.enter(host)

        env = {**(settings.pop("env", None) or os.environ), "GLOO_SOCKET_IFNAME": INTERFACE}
        return subprocess.Popen(words, text=True, env=env, preexec_fn=settle, **settings)

    def remove(self) -> None:
        """End what still runs there, and all of it is gone."""
        if self._book is None:
            return
        for space in self._spaces:
            said = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True)
            for pid in map(int, said.stdout.split()):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", space], capture_output=True)
        self._book.unlink(missing_ok=True)
        self._book = None


@contextmanager
def two_hosts(rate: str = "") -> Iterator[Hosts]:
    """Hosts whose cable has this rate, if one is given; gone at the end."""
    hosts = Hosts()
    try:
        hosts.plug()
        if rate:
            hosts.throttle(rate)
        yield hosts
    finally:
        hosts.remove()


def cut_cable() -> None:
    """Called on a host: its end of the cable is down."""
    _run("ip", "link", "set", INTERFACE, "down")


def throttle_cable(rate: str, space: str = "") -> None:
    """What a host sends goes at this rate: the caller's, or that of a namespace."""
    # A millisecond's worth goes at once. What is sent quicker waits; it is not dropped.
    burst = max(4096, int(bytes_per_second(rate) / 1e3))
    where = ("-n", space) if space else ()
    shape = ("tbf", "rate", rate, "burst", str(burst), "latency", "400ms")
    _run("tc", *where, "qdisc", "replace", "dev", INTERFACE, "root", *shape)


def bytes_per_second(rate: str) -> float:
    """Of a rate such as 200mbit."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if found is None or float(found[1]) == 0:
        raise UserError(f"the rate is {rate!r}, expected a number with kbit, mbit or gbit: 200mbit")
    return float(found[1]) * _UNITS[found[2]]


@functools.cache
def refusal() -> str:
    """Why this process may not make hosts; nothing where it may."""
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"there is no {tool}: install iproute2"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    try:
        with two_hosts("1gbit") as hosts:
            trial = hosts.start(0, ["true"])
            return "" if trial.wait() == 0 else "a program could not be started on a host"
    except subprocess.CalledProcessError as error:
        words = " ".join(error.cmd)
        return f"not permitted here: {words}: {os.fsdecode(error.stderr).strip()}"
    except (OSError, subprocess.SubprocessError) as error:
        return f"not permitted here: {error}"


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def _call(name: str, *arguments: Any) -> None:
    """A call of the system's own."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
