"""Real gloo ranks for tests: started once, then handed many cases.

`Ranks(n).run(function, *args)` calls `function(*args)` on every rank and returns what each
returned; the process group is up on all of them. Importing torch is slow, so the ranks stay; a rank
that raises reports its traceback and lives on, one that hangs or dies takes the pool down, and the
next `run` starts a fresh one, as it does when the ranks have gathered many groups.
"""

from __future__ import annotations

import multiprocessing
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from shardwise.children import describe_end

# What every rank would import by itself, some of it only when it makes its first optimizer
# (`torch._dynamo`): a second each.
PRELOADED = ["torch.distributed.tensor", "torch._dynamo", "shardwise.fsdp2"]
# Process groups that a pool may gather, as tests make meshes: gloo has a thread for each that wakes
# up 100 times a second, and with 60 of them four idle ranks take half a core.
GROUPS = 16


class RankError(AssertionError):
    """What went wrong on which rank. `errors[rank]` is the exception's text, or None."""

    def __init__(self, errors: list[str | None]) -> None:
        self.errors = errors
        told = [f"--- rank {rank}\n{text}" for rank, text in enumerate(errors) if text]
        super().__init__("\n".join(told))


class Ranks:
    """A pool of `world` gloo ranks on this machine."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """`function(*args)` on every rank; its results by rank, or RankError with every rank's own
        error.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        deadline = time.monotonic() + timeout
        results: list[Any] = [None] * self.world
        errors: list[str | None] = [None] * self.world
        groups = 0
        for rank, pipe in enumerate(self._pipes):
            try:
                if not pipe.poll(max(0.0, deadline - time.monotonic())):
                    errors[rank] = f"no answer within {timeout} s"
                    continue
                ok, value, groups = pipe.recv()
            except EOFError:
                self._processes[rank].join()
                errors[rank] = f"the process {describe_end(self._processes[rank].exitcode)}"
                continue
            if ok:
                results[rank] = value
            else:
                errors[rank] = value
        if any(errors):
            # After an error ranks may be out of step with each other: never reuse them.
            self.stop()
            raise RankError(errors)
        if groups > GROUPS:
            self.stop()
        return results

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.world, port, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)


def _serve(rank: int, world: int, port: int, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, function(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send((*answer, len(dist.distributed_c10d._world.pg_map)))


@contextmanager
def on_host(name: object) -> Iterator[None]:
    """What meets inside finds this rank on a host of that name."""
    from shardwise.engine import regions, words

    real = regions.host
    regions.host = words.host = lambda: f"{real()} {name}"
    try:
        yield
    finally:
        regions.host = words.host = real
