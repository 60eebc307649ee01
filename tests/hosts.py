"""Hosts in one machine: network namespaces joined by a link that can be cut or throttled. Needs
root and iproute2.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NEW_NETWORK = 0x40000000


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


class Hosts:
    """Two hosts, 10.77.0.1 and 10.77.0.2, and the link between them."""

    def __init__(self, prefix: str) -> None:
        self.names = [f"{prefix}{i}" for i in range(2)]
        self.addresses = ["10.77.0.1", "10.77.0.2"]

    def start(self) -> None:
        for name in self.names:
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        ends = [word for name in self.names for word in ("name", "wire", "netns", name)]
        _run("ip", "link", "add", *ends[:4], "type", "veth", "peer", *ends[4:])
        for name, address in zip(self.names, self.addresses, strict=True):
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "wire")
            _run("ip", "-n", name, "link", "set", "wire", "up")

    def enter(self, host: int) -> None:
        """From now on the calling process is on that host."""
        fd = os.open(f"/run/netns/{self.names[host]}", os.O_RDONLY)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(fd, _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(fd)

    def cut(self) -> None:
        _run("ip", "-n", self.names[0], "link", "set", "wire", "down")

    def throttle(self, rate: str) -> None:
        """`rate` in tc's words: 10mbit."""
        for name in self.names:
            shape = ("tbf", "rate", rate, "burst", "32kbit", "latency", "400ms")
            _run("tc", "-n", name, "qdisc", "replace", "dev", "wire", "root", *shape)

    def stop(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def permitted() -> bool:
    return (
        os.geteuid() == 0 and shutil.which("ip") is not None and Path("/proc/self/ns/net").exists()
    )


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    hosts = Hosts(f"sw{os.getpid()}-")
    try:
        hosts.start()
        yield hosts
    finally:
        hosts.stop()
