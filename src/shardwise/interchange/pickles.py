"""Pickles that others wrote, read without running them.

A pickle is a program. Before one is loaded, `check_pickle` goes through it once without doing what
it says: it may name only what tensors are made of, and may not grow beyond its own size. It is
loaded by `torch.load(weights_only=True)`, and DCP's metadata into stand-ins that only hold values.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import zipfile
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from shardwise.interchange.files import ForeignFile

Fail = Callable[[str], NoReturn]

_MOST_WEIGHT = 10_000_000  # values, each counted as often as it is used inside of another
_MOST_PICKLE_BYTES = 1 << 30
_REFUSED = {"BYTEARRAY8", "EXT1", "EXT2", "EXT4", "INST", "OBJ", "PERSID", "FROZENSET",
            "NEXT_BUFFER", "READONLY_BUFFER", "NEWOBJ_EX", "DUP"}  # fmt: skip
_TENSOR_PARTS = re.compile(
    r"collections (OrderedDict|defaultdict)|builtins (list|dict|int|float|bool|set)"
    r"|torch\._utils _rebuild_(tensor|tensor_v2|parameter)|torch\.serialization _get_layout"
    r"|torch(\.storage)? (\w*Storage|Size|device|_utils)"
    r"|torch (bool|u?int\d+|bfloat16|float\d+\w*|complex\d+|half|double|long|short|uint8)"
)


def check_pickle(data: bytes, allowed: re.Pattern[str], fail: Fail) -> None:
    """Refuse a pickle that names anything but `allowed` ("module name"), or that would grow beyond
    measure when it is loaded. Runs nothing.
    """
    stack: list[_Slot] = []
    marks: list[int] = []
    memo: dict[int, _Slot] = {}
    try:
        for opcode, argument, _ in pickletools.genops(data):
            name = opcode.name
            if name in _REFUSED:
                fail(f"has the pickle instruction {name}, which no checkpoint needs")
            if name == "MARK":
                marks.append(len(stack))
            elif name in ("MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"):
                place = len(memo) if argument is None else argument
                if not 0 <= place <= len(data):
                    fail(f"puts a value at place {place} of a pickle of {len(data)} bytes")
                memo[place] = stack[-1]
            elif name in ("GET", "BINGET", "LONG_BINGET"):
                stack.append(memo[int(argument or 0)])
            else:
                _step(opcode, argument, stack, marks, allowed, fail)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        fail(f"is no whole pickle: {error}")


# How many values it takes, and the text of a string: names are put together from two.
_Slot = tuple[int, str | None]


def _step(
    opcode: pickletools.OpcodeInfo,
    argument: Any,
    stack: list[_Slot],
    marks: list[int],
    allowed: re.Pattern[str],
    fail: Fail,
) -> None:
    """Take from the stack and put on it as many as an instruction would."""
    taken: list[_Slot] = []
    before = opcode.stack_before
    if pickletools.markobject in before:
        start = marks.pop() - before.index(pickletools.markobject)
        if start < 0:
            raise ValueError("a mark stands too low")
        taken, stack[start:] = stack[start:], []
    elif before:
        if len(before) > len(stack) - (marks[-1] if marks else 0):
            raise ValueError("the stack is empty")
        taken, stack[-len(before) :] = stack[-len(before) :], []
    named = None
    if opcode.name == "GLOBAL":
        named = str(argument)
    elif opcode.name == "STACK_GLOBAL":
        named = f"{taken[0][1]} {taken[1][1]}"
    if named is not None and not allowed.fullmatch(named):
        shown = named.replace(" ", ".")
        fail(f"names {shown!r:.80}, which no tensor is made of: refused, and nothing was run")
    weight = 1 + sum(slot[0] for slot in taken)
    if weight > _MOST_WEIGHT:
        fail("is a pickle that grows beyond measure when it is loaded")
    text = argument if isinstance(argument, str) and not named else None
    stack.extend([(weight, text)] * len(opcode.stack_after))


def load_archive(data: ForeignFile | bytes, fail: Fail) -> Any:
    """What `torch.save` wrote: a whole file, mapped into memory, or a part of one."""
    source = data.path if isinstance(data, ForeignFile) else io.BytesIO(data)
    size = data.size if isinstance(data, ForeignFile) else len(data)
    _check_archive(source, size, fail)
    if not isinstance(source, str):
        source.seek(0)
    try:
        return torch.load(
            source, map_location="cpu", weights_only=True, mmap=isinstance(source, str)
        )
    except (pickle.UnpicklingError, RuntimeError, ValueError, TypeError, KeyError) as error:
        fail(f"cannot be loaded with weights_only: {str(error).splitlines()[0]:.200}")
    except (AttributeError, IndexError, OSError, MemoryError, EOFError, AssertionError) as error:
        fail(f"is no whole file of torch.save: {error!r:.200}")


def _check_archive(source: Any, size: int, fail: Fail) -> None:
    """Records are stored as they are: one that is packed may unpack to anything."""
    try:
        with zipfile.ZipFile(source) as archive:
            entries = archive.infolist()
            packed = [e for e in entries if e.compress_type != zipfile.ZIP_STORED]
            if packed or sum(entry.file_size for entry in entries) > size:
                fail("has packed or overlapping records, which torch.save never writes")
            programs = [e for e in entries if e.filename.rpartition("/")[2] == "data.pkl"]
            if len(programs) != 1 or programs[0].file_size > _MOST_PICKLE_BYTES:
                fail(f"has {len(programs)} records data.pkl, expected one")
            check_pickle(archive.read(programs[0]), _TENSOR_PARTS, fail)
    except (zipfile.BadZipFile, NotImplementedError, EOFError, OSError, ValueError) as error:
        fail(
            f"is no file that torch.save of torch 1.6 or newer writes ({error}); load it with the "
            "program that wrote it, and save it anew"
        )


class Held:
    """Stands for an object of another program: holds what the pickle gave it, and runs nothing."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments, self.state = arguments, None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def get(self, name: str) -> Any:
        return self.state.get(name) if isinstance(self.state, dict) else None


class RestrictedUnpickler(pickle.Unpickler):
    """Makes stand-ins for the classes in `stand_ins` ("module name"), and nothing else."""

    def __init__(self, data: bytes, stand_ins: Callable[[str], Any], fail: Fail) -> None:
        super().__init__(io.BytesIO(data))
        self._stand_ins, self._fail = stand_ins, fail

    def find_class(self, module: str, name: str) -> Any:
        found = self._stand_ins(f"{module} {name}")
        if found is None:
            self._fail(f"names '{module}.{name}', which no metadata is made of: refused")
        return found

    def persistent_load(self, pid: Any) -> Any:
        self._fail(f"refers to {pid!r:.80}, which no metadata does")
