"""Saving: ranks agree on what each writes, write, and commit by one rename.

    all ranks     say what they hold, agree who writes which piece
    rank 0        makes a temporary folder            .saving-step-00000020-1f00ab12/
    each rank     its file, fsynced                     rank-00000.safetensors, ...
    rank 0        the manifest, fsynced                 manifest.json
    rank 0        fsyncs the folder, renames it,      step-00000020/        <- the commit
                  fsyncs the one above
    rank 0        moves the pointer                   latest
    rank 0        removes what is too old

A rank that cannot do its part says so, and every rank raises the same error; what was there before
stays as it was. An asynchronous save does all from the second line's files on in a thread, from
copies on the host.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.checkpoint.collect import (
    Assignment,
    Share,
    Table,
    assign,
    collect,
    merge_optimizers,
)
from shardwise.checkpoint.manifest import (
    MANIFEST,
    CheckpointError,
    DataFile,
    Manifest,
    Piece,
    SavedTensor,
)
from shardwise.checkpoint.storage import Storage, storage_of
from shardwise.checkpoint.talk import Talk, background_talk, talk
from shardwise.checkpoint.write import (
    Source,
    Written,
    copy_to_host,
    file_name,
    find_sources,
    write_part,
)
from shardwise.engine.words import PerWorld
from shardwise.watch import rank as watch

PROGRESS_S = 2.0  # a save that takes longer says how far it is


class Saving:
    """A save under way, or done. `path` is the checkpoint's folder."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._error: CheckpointError | None = None
        self._thread: threading.Thread | None = None

    @property
    def done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> str:
        """Until it is committed; its folder. An error of the save is raised here, or by the next
        save, once.
        """
        if self._thread is not None:
            self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self.path

    def _start(self, work: Callable[[], str]) -> None:
        def run() -> None:
            try:
                self.path = work()
            except CheckpointError as error:
                self._error = error
            except Exception as error:  # of the store: a peer is gone
                self._error = CheckpointError(f"saving {self.path}: {error}")

        # Not a daemon: the program's end waits for it.
        self._thread = threading.Thread(target=run, name="shardwise-save")
        self._thread.start()
        _all.add(self)


_under_way: PerWorld[list[Saving]] = PerWorld()  # ranks that are threads have a world each
_without_world: list[Saving] = []
_all: weakref.WeakSet[Saving] = weakref.WeakSet()


def _last() -> list[Saving]:
    """The last asynchronous save, if nobody has waited for it."""
    return _under_way.get("last", list) if dist.is_initialized() else _without_world


def finish_last() -> None:
    """Wait for the last asynchronous save; its error, if nobody has heard of it."""
    last = _last()
    while last:
        last.pop().wait()


def _report_unheard() -> None:
    for saving in _all:
        if saving._error is not None:
            print(f"shardwise: a save failed: {saving._error}", file=sys.stderr)


atexit.register(_report_unheard)


@dataclass(frozen=True)
class Order:
    """What a save was asked for: the same on every rank."""

    root: str
    step: int
    keep_latest_k: int | None
    asynchronous: bool

    def __post_init__(self) -> None:
        keep = self.keep_latest_k
        if type(self.step) is not int or self.step < 0:
            raise CheckpointError(f"step is {self.step!r}, expected a whole number >= 0")
        if keep is not None and (type(keep) is not int or keep < 1):
            raise CheckpointError(f"keep_latest_k is {keep!r}, expected a whole number >= 1")


@dataclass(frozen=True)
class Said:
    """What a rank tells the others before a save."""

    order: Order
    table: Table
    share: Share  # without its tensors
    # Of each group of ranks: how many collectives were issued in it, and a hash of their order.
    moved: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def table_without_repeats(self, rank: int, firsts: Sequence[int]) -> Table:
        """Its table without an `extra` that an earlier rank has alike."""
        if firsts[rank] == rank:
            return self.table
        return [row for row in self.table if not row[0].startswith(f"extra/{rank}/")]


def check_alike(said: Sequence[Said]) -> list[int]:
    """Error where ranks were asked for different saves. For each rank the first whose `extra` is
    the same.
    """
    first = said[0].order
    for rank, each in enumerate(said):
        if each.order != first:
            raise CheckpointError(f"rank {rank} was told to save {each.order}, rank 0 {first}")
    digests = [each.share.extra_digest for each in said]
    return [digests.index(digest) for digest in digests]


def assign_pieces(said: Sequence[Said]) -> Assignment:
    firsts = check_alike(said)
    return assign([each.table_without_repeats(i, firsts) for i, each in enumerate(said)])


@dataclass(frozen=True)
class Begun:
    """A checkpoint that is not there yet: what it is called now, and what it will be."""

    temporary: str
    name: str
    serial: int


def begin(storage: Storage, step: int) -> Begun:
    name = storage.free_name(step)
    return Begun(storage.begin(name), name, storage.next_serial())


def check_moved(doing: str, said: Sequence[Said]) -> None:
    """What ranks hold after they have moved different units in one collective is kept by nobody.
    The watch ends such a job a moment later; a save may come first.
    """
    first: dict[str, int] = {}
    for rank, each in enumerate(said):
        for group, order in each.moved.items():
            other = first.setdefault(group, rank)
            if said[other].moved[group] != order:
                raise CheckpointError(
                    f"{doing}: ranks {other} and {rank} have run units in different orders, so "
                    "what they gathered or reduced together, and hold now, is not what was asked "
                    "for. Let every rank run the same modules in the same order"
                )


def make_manifest(
    said: Sequence[Said], assignment: Assignment, written: Sequence[Written], serial: int
) -> Manifest:
    """Of all ranks' words and files."""
    pieces: dict[str, list[Piece]] = {key: [] for key in assignment.tensors}
    files: dict[str, DataFile] = {}
    for each in written:
        if each.file is not None and each.data is not None:
            files[each.file] = each.data
        for key, piece in each.pieces:
            pieces[key].append(piece)
    shares = [each.share for each in said]
    firsts = check_alike(said)
    distinct = sorted(set(firsts))
    return Manifest(
        step=said[0].order.step,
        world=len(said),
        finite=all(each.finite for each in written),
        files=files,
        tensors={
            key: SavedTensor(shape, dtype, tuple(sorted(pieces[key], key=lambda p: p.box.offset)))
            for key, (shape, dtype) in assignment.tensors.items()
        },
        plan=shares[0].plan,
        aliases={name: first for share in shares for name, first in share.aliases.items()},
        optimizer=merge_optimizers([share.optimizer for share in shares]),
        extra=tuple(shares[i].extra for i in distinct),
        extra_of=tuple(distinct.index(i) for i in firsts),
        random=tuple(s.random for s in shares) if shares[0].random is not None else (),
        modules={name: tree for share in shares for name, tree in share.modules.items()},
        versions={"torch": torch.__version__, "shardwise": sys.modules["shardwise"].__version__},
        serial=serial,
    )


def rotate(storage: Storage, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints and the newest finite one."""
    names = storage.committed()
    finite = next((name for name in names if _is_finite(storage, name)), None)
    for name in reversed(names[keep:]):
        if name != finite:
            storage.remove(name)


def _is_finite(storage: Storage, name: str) -> bool:
    try:
        return Manifest.parse(storage.read_manifest(name), storage.join(name)).finite
    except (CheckpointError, OSError):
        return False


class Progress:
    """Says on stderr, every two seconds, how much of a file is written."""

    def __init__(self, what: str, total: int, quiet: bool) -> None:
        self._what, self._total, self._quiet = what, total, quiet
        self._done, self._next = 0, time.monotonic() + PROGRESS_S

    def __call__(self, nbytes: int) -> None:
        self._done += nbytes
        if not self._quiet and time.monotonic() > self._next:
            self._next = time.monotonic() + PROGRESS_S
            done, total = self._done / 1e6, self._total / 1e6
            text = f"shardwise: saving {self._what}: {done:.0f} of {total:.0f} MB of rank 0's file"
            print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class _Work:
    """All of a save that the model is not needed for."""

    storage: Storage
    said: list[Said]
    assignment: Assignment
    begun: Begun
    rank: int

    def run(self, ranks: Talk, sources: Sequence[Source]) -> str:
        """Write, agree, commit; the checkpoint's folder."""
        doing = f"cannot save {self.storage.join(self.begun.name)}"
        try:
            written = ranks.agree(doing, lambda: self._write(sources))
            name = ranks.first(doing, lambda: self._commit(written))
        except CheckpointError:
            self.abandon()
            raise
        ranks.part()
        return self.storage.join(name)

    def _write(self, sources: Sequence[Source]) -> Written:
        total = sum(source.nbytes for source in sources)
        progress = Progress(self.begun.name, total, quiet=self.rank != 0)
        try:
            return write_part(self.storage, self.begun.temporary, self.rank, sources, progress)
        except OSError as error:
            raise self._explain(error, file_name(self.rank)) from error

    def _commit(self, written: list[Written]) -> str:
        storage, order = self.storage, self.said[0].order
        manifest = make_manifest(self.said, self.assignment, written, self.begun.serial)
        text = manifest.to_text().encode()
        try:
            name = storage.commit(self.begun.temporary, self.begun.name, text)
        except OSError as error:
            raise self._explain(error, MANIFEST) from error
        try:
            storage.point(name)
            if order.keep_latest_k is not None:
                rotate(storage, order.keep_latest_k)
        except OSError as error:
            raise CheckpointError(
                f"{storage.join(name)} is saved, but what comes after failed: "
                f"{error.strerror or error} ({error.filename or storage.root})"
            ) from error
        return name

    def _explain(self, error: OSError, file: str) -> CheckpointError:
        path = error.filename or self.storage.join(self.begun.temporary, file)
        return CheckpointError(f"{error.strerror or error} ({path})")

    def abandon(self) -> None:
        """Rank 0 removes what was begun; where even that fails, the next save does."""
        if self.rank == 0:
            with suppress(OSError):
                self.storage.abandon(self.begun.temporary)


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    step: int = 0,
    extra: Mapping[str, Any] | None = None,
    asynchronous: bool = False,
    keep_latest_k: int | None = None,
    random: bool = True,
) -> Saving:
    """Save model, optimizer, `extra` and the random state of every rank as a new checkpoint in the
    folder or URL `path`; a collective call.

    `extra` holds JSON values, tensors, and objects with `state_dict` and `load_state_dict`.
    `asynchronous` copies to the host and returns; a thread writes and commits. A save first waits
    for the one before. `keep_latest_k` removes older checkpoints after the commit, never the newest
    one whose numbers are all finite. An error leaves what was there as it was.
    """
    finish_last()
    ranks, doing = talk(), f"cannot save to {os.fspath(path)}"
    own: list[Share] = []

    def say() -> Said:
        order = Order(os.fspath(path), step, keep_latest_k, asynchronous)
        own.append(collect(model, optimizer, extra, random, ranks.rank))
        moved = watch.on.orders() if watch.on is not None else {}
        return Said(order, own[0].table, replace(own[0], held=[]), moved)

    said = ranks.agree(doing, say)
    check_moved(doing, said)
    storage = storage_of(path)
    # What follows from what all have said is the same on all, its errors too.
    assignment = assign_pieces(said)
    sources = find_sources(own[0], assignment, ranks.rank if len(said) > 1 else 0)
    begun = ranks.first(doing, lambda: begin(storage, step))
    saving = Saving(storage.join(begun.name))
    work = _Work(storage, said, assignment, begun, ranks.rank)
    if not asynchronous:
        saving.path = work.run(ranks, sources)
        return saving
    copies: list[Source] = []
    try:
        ranks.agree(doing, lambda: copies.extend(copy_to_host(sources)))
    except CheckpointError:
        work.abandon()
        raise
    beside = background_talk()
    saving._start(lambda: work.run(beside, copies))
    _last().append(saving)
    return saving
