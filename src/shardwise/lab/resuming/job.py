"""One training run on ranks that are forked from a server with torch loaded, and one of them killed
in it, if asked for.

Each rank runs the trainer as it is. What is watched and done to it hangs in three places: where it
draws a batch, where a save changes the disk, and where a run goes on.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
import traceback
import zlib
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from shardwise.children import STOPPED, ChildFailed, Stopped, describe_end

_PRELOAD = ["torch.distributed.tensor", "torch._dynamo", "shardwise.trainer.loop"]
_LONGEST_S = 180.0
TAKEN_OVER = "taken-over"  # a checkpoint of what a rank had right after it resumed


@dataclass(frozen=True)
class Kill:
    """A signal to a rank: so many seconds after it drew the step's first batch, or before so many
    operations of that step's save on its disk.
    """

    rank: int
    step: int
    after_s: float | None = None
    operations: int | None = None
    signal: int = signal.SIGKILL

    def expected(self, rank: int) -> int | None:
        """The exit code of a rank; None: it may end by any."""
        if self.signal == signal.SIGTERM:
            return STOPPED
        return -self.signal if rank == self.rank else None


def run_job(config_toml: str, world: int, folder: Path, kill: Kill | None = None) -> None:
    """Train on so many ranks. With `kill`, one of them is killed, and then the others, as a
    launcher does; or by SIGTERM all end. ChildFailed if that is not how it ended. What ranks note
    goes to the folder.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    folder.mkdir(parents=True, exist_ok=True)
    port = _free_port()
    processes: list[BaseProcess] = []
    for rank in range(world):
        mine = kill if kill is not None and kill.rank == rank else None
        task = (rank, world, port, config_toml, str(folder), mine)
        processes.append(context.Process(target=_run_rank, args=task, daemon=True))
        processes[-1].start()
    try:
        codes = _wait(processes)
    finally:
        for process in processes:
            process.kill()
            process.join()
    for rank, code in enumerate(codes):
        expected = 0 if kill is None else kill.expected(rank)
        if expected is not None and code != expected:
            raise ChildFailed(f"rank {rank} of {world} {_describe(code, folder, rank)}")


def _wait(processes: list[BaseProcess]) -> list[int | None]:
    """Exit codes when all have ended, or the first badly."""
    deadline = time.monotonic() + _LONGEST_S
    while True:
        codes = [process.exitcode for process in processes]
        if (
            any(code not in (None, 0, STOPPED) for code in codes)
            or None not in codes
            or time.monotonic() > deadline
        ):
            break
        wait([process.sentinel for process in processes if process.exitcode is None], 1.0)
    # Peers of a killed rank may be seen to fail first.
    patience = time.monotonic() + 1.0
    for process in processes:
        process.join(max(0.0, patience - time.monotonic()))
    return [process.exitcode for process in processes]


def _describe(code: int | None, folder: Path, rank: int) -> str:
    told = folder / f"error-{rank}"
    if told.exists():
        return f"failed:\n{told.read_text()}"
    return f"was not done in {_LONGEST_S:.0f} s" if code is None else describe_end(code)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# In a rank


def _run_rank(
    rank: int, world: int, port: int, config_toml: str, folder: str, kill: Kill | None
) -> None:
    import torch

    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )  # fmt: skip
    torch.set_num_threads(1)
    from shardwise.trainer import loop

    try:
        with (
            open(os.devnull, "w") as nowhere,
            open(Path(folder) / f"said-{rank}", "a", encoding="utf-8") as said,
        ):
            os.dup2(nowhere.fileno(), 1)
            os.dup2(said.fileno(), 2)
            _Probe(rank, Path(folder), kill).attach()
            loop.train(config_toml)
    except Stopped as stop:
        (Path(folder) / f"stopped-{rank}").write_text(str(stop))
        os._exit(STOPPED)
    except BaseException:
        (Path(folder) / f"error-{rank}").write_text(traceback.format_exc())
        os._exit(1)
    os._exit(0)


class _Probe:
    """What is noted of a rank, and when it is killed."""

    def __init__(self, rank: int, folder: Path, kill: Kill | None) -> None:
        self.rank, self.folder, self.kill = rank, folder, kill
        self._left: int | None = None  # operations until it is killed

    def attach(self) -> None:
        from shardwise.checkpoint import storage
        from shardwise.trainer.checkpoints import Checkpoints
        from shardwise.trainer.data import Corpus

        draw, restore = Corpus.batch, Checkpoints.restore

        def batch(corpus: Corpus, **how: Any) -> Any:
            drawn = draw(corpus, **how)
            crc = zlib.crc32(drawn[1].tobytes(), zlib.crc32(drawn[0].tobytes()))
            self._note("data", f"{how['step']} {how['micro']} {crc:08x}")
            if how["micro"] == 0:
                self._begin(how["step"])
            return drawn

        def take_over(checkpoints: Checkpoints) -> Any:
            progress = restore(checkpoints)
            if progress.step:
                self._save_again(checkpoints, progress.step)
            return progress

        setattr(Corpus, "batch", batch)  # noqa: B010
        setattr(Checkpoints, "restore", take_over)  # noqa: B010
        storage.watchers.append(self._changes)

    def _begin(self, step: int) -> None:
        if self.kill is None or step < self.kill.step:
            return
        if step > self.kill.step:
            if self.kill.after_s is not None and self.kill.signal == signal.SIGKILL:
                self._strike()  # the step was shorter than those that it was drawn by
            return
        self._left = self.kill.operations
        if self.kill.after_s is not None:
            timer = threading.Timer(self.kill.after_s, self._strike)
            timer.daemon = True
            timer.start()

    def _changes(self, operation: str, path: str) -> None:
        """The disk is about to change."""
        if TAKEN_OVER in path:
            return
        self._note("changes", f"{operation} {Path(path).name}")
        if self._left is not None:
            if self._left == 0:
                self._strike()
            self._left -= 1

    def _save_again(self, checkpoints: Any, step: int) -> None:
        import shardwise as sw

        sw.save(self.folder / TAKEN_OVER, checkpoints.model, checkpoints.optimizer, step=step)

    def _note(self, what: str, text: str) -> None:
        with open(self.folder / f"{what}-{self.rank}", "a", encoding="utf-8") as file:
            file.write(f"{text}\n")

    def _strike(self) -> None:
        assert self.kill is not None
        os.kill(os.getpid(), self.kill.signal)
