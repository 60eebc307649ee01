"""Where checkpoints are: a local folder, or any URL that fsspec opens.

    Folder   data and manifest go to a hidden temporary folder, each file fsynced; the rename of
             that folder is the commit
    Objects  object stores have no rename: files go straight under the final name, and the manifest,
             written last, is the commit

A name without a manifest is no checkpoint. Every operation that changes something on a disk is told
to `watchers` before it happens: tests stop the process there, or raise what a disk may raise.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Any

from shardwise.checkpoint.manifest import MANIFEST, MOST_MANIFEST_BYTES, CheckpointError, serial_in

LATEST = "latest"
_SAVING, _REMOVING = ".saving-", ".removing-"
_STEP = re.compile(r"step-(\d{8,})(?:-(\d+))?")
_URL = re.compile(r"([a-z][a-z0-9+.-]*)://")
_HEAD_BYTES = 200
_DAY_S = 86400.0

# Called with what is about to happen (write, fsync, rename, ...) and to which path.
watchers: list[Callable[[str, str], None]] = []


def _tell(operation: str, path: str) -> None:
    for watcher in watchers:
        watcher(operation, path)


def step_name(step: int, again: int = 1) -> str:
    return f"step-{step:08d}" if again == 1 else f"step-{step:08d}-{again}"


def _order(name: str) -> tuple[int, int]:
    """The step and the number among those of the same step that a name says."""
    found = _STEP.fullmatch(name)
    assert found is not None
    return int(found[1]), int(found[2] or 1)


class Storage(ABC):
    """The folder `root` of checkpoints."""

    root: str

    def join(self, *names: str) -> str:
        return "/".join((self.root, *names))

    def split(self) -> tuple[Storage, str]:
        """This folder as a name in the one above."""
        above, _, name = self.root.rstrip("/").rpartition("/")
        return storage_of(above or ("/" if self.root.startswith("/") else ".")), name

    def committed(self) -> list[str]:
        """Names with a manifest, the newest first."""
        steps = sorted(self._steps(), key=_order)
        serials: dict[str, float] = {}
        below = 0.0  # the highest serial of an earlier step
        for name in steps:
            serial = serial_in(self.read(name, MANIFEST, 0, _HEAD_BYTES))
            # A damaged one is where its step puts it: nobody takes an older one for the newest.
            serials[name] = below + 0.5 if serial is None else float(serial)
            below = max(below, serials[name])
        return sorted(steps, key=lambda name: (serials[name], _order(name)), reverse=True)

    def next_serial(self) -> int:
        """Above every serial that is there."""
        heads = (serial_in(self.read(name, MANIFEST, 0, _HEAD_BYTES)) for name in self._steps())
        return 1 + max((serial for serial in heads if serial is not None), default=0)

    def _steps(self) -> list[str]:
        return [name for name in self.names() if _STEP.fullmatch(name) and self.has(name, MANIFEST)]

    def free_name(self, step: int) -> str:
        taken = set(self.names())
        again = 1
        while step_name(step, again) in taken:
            again += 1
        return step_name(step, again)

    def read_manifest(self, name: str) -> bytes:
        try:
            size = self.size(name, MANIFEST)
            if size > MOST_MANIFEST_BYTES:
                raise CheckpointError(
                    f"checkpoint {self.join(name, MANIFEST)} has {size} bytes, expected at most "
                    f"{MOST_MANIFEST_BYTES}"
                )
            return self.read(name, MANIFEST, 0, size)
        except FileNotFoundError:
            raise CheckpointError(
                f"{self.join(name)} is no checkpoint: it has no {MANIFEST}"
            ) from None

    @abstractmethod
    def names(self) -> list[str]:
        """Of all that is in the folder; none where it is not there."""

    @abstractmethod
    def has(self, name: str, file: str) -> bool: ...

    @abstractmethod
    def size(self, name: str, file: str) -> int: ...

    @abstractmethod
    def read(self, name: str, file: str, start: int, size: int) -> bytes:
        """At most `size` bytes; fewer where the file ends."""

    @abstractmethod
    def read_into(self, name: str, file: str, start: int, buffer: memoryview) -> int:
        """Fill the buffer; how many bytes were there."""

    @abstractmethod
    def begin(self, name: str) -> str:
        """Make a place for a checkpoint that is to be `name`; what to call it until the commit."""

    @abstractmethod
    def write(self, name: str, file: str, buffers: Iterable[Any]) -> None:
        """A new file, on the disk when this returns."""

    @abstractmethod
    def commit(self, begun: str, name: str, manifest: bytes) -> str:
        """From now on the checkpoint is there, under the returned name."""

    @abstractmethod
    def point(self, name: str) -> None:
        """Let `latest` name it."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """All at once, for who looks from outside."""

    @abstractmethod
    def abandon(self, begun: str) -> None:
        """Remove what was begun and not committed."""


class Folder(Storage):
    """On a disk of this machine, or one that is mounted."""

    def __init__(self, root: str) -> None:
        self.root = os.path.abspath(root)
        self._locks: dict[str, int] = {}  # what this process has begun, each locked

    def _at(self, *names: str) -> str:
        return os.path.join(self.root, *names)

    def names(self) -> list[str]:
        return sorted(os.listdir(self.root)) if os.path.isdir(self.root) else []

    def has(self, name: str, file: str) -> bool:
        return os.path.isfile(self._at(name, file))

    def size(self, name: str, file: str) -> int:
        return os.stat(self._at(name, file)).st_size

    def read(self, name: str, file: str, start: int, size: int) -> bytes:
        buffer = bytearray(size)
        return bytes(buffer[: self.read_into(name, file, start, memoryview(buffer))])

    def read_into(self, name: str, file: str, start: int, buffer: memoryview) -> int:
        path = self._at(name, file)
        # No link out of the folder; a pipe would wait for somebody who writes into it.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(path, flags)
        try:
            done = 0
            while done < len(buffer):
                got = os.preadv(descriptor, [buffer[done : done + (1 << 30)]], start + done)
                if got == 0:
                    break
                done += got
            return done
        except OSError as error:  # that of an open descriptor names no file
            raise OSError(error.errno, error.strerror, path) from error
        finally:
            os.close(descriptor)

    def begin(self, name: str) -> str:
        self._make_root()
        self.sweep()
        begun = f"{_SAVING}{name}-{secrets.token_hex(4)}"
        _tell("mkdir", self._at(begun))
        os.mkdir(self._at(begun))
        # The lock goes with the process: a folder that can be locked is a dead one's.
        descriptor = os.open(self._at(begun), os.O_RDONLY)
        with suppress(OSError):  # of a file system without locks: `sweep` goes by age there
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._locks[begun] = descriptor
        return begun

    def _make_root(self) -> None:
        missing = []
        at = self.root
        while not os.path.isdir(at):
            missing.append(at)
            at = os.path.dirname(at)
        for path in reversed(missing):
            _tell("mkdir", path)
            os.makedirs(path, exist_ok=True)
            _sync_folder(os.path.dirname(path))

    def sweep(self) -> None:
        """Remove what dead processes left."""
        for name in self.names():
            if name.startswith(_REMOVING) or (name.startswith(_SAVING) and self._is_dead(name)):
                self._remove_tree(name)

    def _is_dead(self, name: str) -> bool:
        if name in self._locks:
            return False
        try:
            descriptor = os.open(self._at(name), os.O_RDONLY)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            return time.time() - os.fstat(descriptor).st_mtime > _DAY_S
        finally:
            os.close(descriptor)

    def write(self, name: str, file: str, buffers: Iterable[Any]) -> None:
        self._write_durably(self._at(name, file), buffers, os.O_EXCL)

    def _write_durably(self, path: str, buffers: Iterable[Any], how: int) -> None:
        _tell("create", path)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | how, 0o644)
        try:
            for buffer in buffers:
                _tell("write", path)
                left = memoryview(buffer).cast("B")
                while left:
                    left = left[os.write(descriptor, left[: 1 << 30]) :]
            _tell("fsync", path)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def commit(self, begun: str, name: str, manifest: bytes) -> str:
        self.write(begun, MANIFEST, [manifest])
        _sync_folder(self._at(begun))
        step, _ = _order(name)
        while True:
            _tell("rename", self._at(name))
            try:
                os.rename(self._at(begun), self._at(name))
                break
            except OSError as error:  # another job was faster
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                name = self.free_name(step)
        _sync_folder(self.root)
        self._unlock(begun)
        return name

    def point(self, name: str) -> None:
        # Always the same name: what a dead process left is written over.
        path = self._at(f".{LATEST}")
        self._write_durably(path, [f"{name}\n".encode()], os.O_TRUNC)
        _tell("rename", self._at(LATEST))
        os.rename(path, self._at(LATEST))
        _sync_folder(self.root)

    def remove(self, name: str) -> None:
        hidden = f"{_REMOVING}{name}-{secrets.token_hex(4)}"
        _tell("rename", self._at(hidden))
        os.rename(self._at(name), self._at(hidden))
        _sync_folder(self.root)
        self._remove_tree(hidden)

    def abandon(self, begun: str) -> None:
        self._unlock(begun)
        if os.path.isdir(self._at(begun)):
            self._remove_tree(begun)

    def _unlock(self, begun: str) -> None:
        descriptor = self._locks.pop(begun, None)
        if descriptor is not None:
            os.close(descriptor)

    def _remove_tree(self, name: str) -> None:
        path = self._at(name)
        for file in sorted(os.listdir(path)):
            _tell("unlink", os.path.join(path, file))
            inner = os.path.join(path, file)
            if os.path.isdir(inner) and not os.path.islink(inner):
                shutil.rmtree(inner, ignore_errors=True)
            else:
                os.unlink(inner)
        _tell("rmdir", path)
        os.rmdir(path)


def _sync_folder(path: str) -> None:
    _tell("fsync", path)
    descriptor = os.open(path or ".", os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Objects(Storage):
    """Behind fsspec: S3, GCS, memory, ..."""

    def __init__(self, url: str) -> None:
        try:
            import fsspec  # type: ignore[import-untyped]
        except ImportError as error:
            raise CheckpointError(f"{url} needs fsspec: pip install fsspec") from error
        self.root = url.rstrip("/")
        try:
            self._files, self._path = fsspec.core.url_to_fs(self.root)
        except (ImportError, ValueError) as error:
            raise CheckpointError(f"cannot open {url}: {error}") from error
        self._committed: set[str] = set()

    def _at(self, *names: str) -> str:
        return "/".join((self._path.rstrip("/"), *names))

    def names(self) -> list[str]:
        self._files.invalidate_cache()
        try:
            found = self._files.ls(self._path, detail=False)
        except FileNotFoundError:
            return []
        return sorted(PurePosixPath(str(each).rstrip("/")).name for each in found)

    def has(self, name: str, file: str) -> bool:
        return bool(self._files.isfile(self._at(name, file)))

    def size(self, name: str, file: str) -> int:
        return int(self._files.info(self._at(name, file))["size"])

    def read(self, name: str, file: str, start: int, size: int) -> bytes:
        if size == 0:
            return b""
        return bytes(self._files.cat_file(self._at(name, file), start=start, end=start + size))

    def read_into(self, name: str, file: str, start: int, buffer: memoryview) -> int:
        data = self.read(name, file, start, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def begin(self, name: str) -> str:
        self._files.makedirs(self._at(name), exist_ok=True)  # nothing, where there are no folders
        return name

    def write(self, name: str, file: str, buffers: Iterable[Any]) -> None:
        path = self._at(name, file)
        _tell("create", path)
        with self._files.open(path, "wb") as stream:
            for buffer in buffers:
                _tell("write", path)
                stream.write(memoryview(buffer).cast("B"))

    def commit(self, begun: str, name: str, manifest: bytes) -> str:
        path = self._at(begun, MANIFEST)
        _tell("write", path)
        self._files.pipe_file(path, manifest)
        self._committed.add(begun)
        return begun

    def point(self, name: str) -> None:
        path = self._at(LATEST)
        _tell("write", path)
        self._files.pipe_file(path, f"{name}\n".encode())

    def remove(self, name: str) -> None:
        path = self._at(name, MANIFEST)
        _tell("unlink", path)
        self._files.rm_file(path)
        self._remove_all(name)

    def abandon(self, begun: str) -> None:
        if begun not in self._committed:
            self._remove_all(begun)

    def _remove_all(self, name: str) -> None:
        path = self._at(name)
        _tell("unlink", path)
        if self._files.exists(path):
            self._files.rm(path, recursive=True)


def storage_of(path: str | os.PathLike[str]) -> Storage:
    """A local folder, or what a URL names."""
    text = os.fspath(path)
    scheme = _URL.match(text)
    if scheme is None or scheme[1] in ("file", "local"):
        return Folder(text[scheme.end() :] if scheme else text)
    return Objects(text)
