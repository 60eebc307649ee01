"""Two hosts on one machine: network namespaces with a cable between them, for one job at a time."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess

ADDRESSES = ("10.83.0.1", "10.83.0.2")
INTERFACE = "chaos"
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_NEW_NAME = 0x04000000  # CLONE_NEWUTS


class Hosts:
    """The pair of a slot, made at the first use; none where that is not permitted."""

    def __init__(self) -> None:
        self._names = [f"shardwise-{os.getpid()}-{side}" for side in "ab"]
        self._made = False

    def plug(self) -> None:
        """A new cable, at full speed."""
        if not self._made:
            for name in self._names:
                _ip("netns", "add", name)
                _ip("-n", name, "link", "set", "lo", "up")
            self._made = True
        for name in self._names[:1]:
            subprocess.run(["ip", "-n", name, "link", "del", INTERFACE], capture_output=True)
        first, second = self._names
        _ip("-n", first, "link", "add", INTERFACE, "type", "veth", "peer", "name", INTERFACE,
            "netns", second)  # fmt: skip
        for name, address in zip(self._names, ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
            _ip("-n", name, "link", "set", INTERFACE, "up")

    def enter(self, host: int) -> None:
        """This process, and what it starts, lives on that host from now on."""
        libc = ctypes.CDLL(None, use_errno=True)
        descriptor = os.open(f"/run/netns/{self._names[host]}", os.O_RDONLY)
        if libc.setns(descriptor, _NEW_NETWORK) != 0:
            raise OSError(ctypes.get_errno(), "cannot enter a network namespace")
        os.close(descriptor)
        if libc.unshare(_NEW_NAME) != 0:
            raise OSError(ctypes.get_errno(), "cannot have a host name of its own")
        socket.sethostname(f"host-{'ab'[host]}")
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE

    def remove(self) -> None:
        for name in self._names if self._made else ():
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def cut_cable() -> None:
    """Called on a host: its end of the cable is down."""
    _ip("link", "set", INTERFACE, "down")


def throttle_cable() -> None:
    """Called on a host: what it sends goes slowly, and late."""
    settings = "root tbf rate 2mbit burst 4kb latency 400ms"
    subprocess.run(
        ["tc", "qdisc", "add", "dev", INTERFACE, *settings.split()], check=True, capture_output=True
    )


def permitted() -> bool:
    """Whether this process may make hosts."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return False
    trial = Hosts()
    try:
        trial.plug()
        return True
    except (OSError, subprocess.CalledProcessError):
        return False
    finally:
        trial.remove()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
