"""torch's distributed checkpoints (DCP), read: `.metadata`, and the `.distcp` files that it names.

`.metadata` is a pickle. It is checked before it is loaded, and loaded into stand-ins, never into
torch's own classes; then every name and number in it is checked. The data is torch.save's, one
tensor after the other, loaded by `weights_only`.

Names are flat, as DCP makes them of nested dicts: `model.fc.weight`, `optim.param_groups.0.lr`,
`optim.state.fc.weight.exp_avg`.
"""

from __future__ import annotations

import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Any

import torch

from shardwise.checkpoint.manifest import (
    ITEM_BYTES,
    Box,
    CheckpointError,
    Dims,
    Piece,
    SavedGroup,
    SavedOptimizer,
    SavedTensor,
    find_gap,
)
from shardwise.checkpoint.trees import encode
from shardwise.description.parameters import dtype_name
from shardwise.interchange.files import ForeignFile, check_dims, open_beside
from shardwise.interchange.foreign import Foreign
from shardwise.interchange.pickles import Held, RestrictedUnpickler, check_pickle, load_archive

METADATA = ".metadata"
_MOST_METADATA_BYTES = 1 << 30
_MOST_OPEN = 2  # tensors kept after they were read: boxes of one are asked for after each other

_CLASSES = (
    "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
    "TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
)  # fmt: skip
_ALLOWED = re.compile(
    rf"torch\.distributed\.checkpoint\.metadata ({'|'.join(_CLASSES)})"
    r"|torch\.distributed\.checkpoint\.filesystem _StorageInfo"
    r"|torch (Size|device|[a-z]+\d*\w*)|torch\.serialization _get_layout"
    r"|collections OrderedDict|pathlib(\._local)? (Posix|Windows|PurePosix)?Path"
)


class _Metadata(Held): ...


class _Tensor(Held): ...


class _Bytes(Held): ...


class _Index(Held):
    """A key: two are the same only if they are one, so looking one up runs nothing of theirs."""


class _Size(Held): ...


def _stand_in(name: str) -> Any:
    if not _ALLOWED.fullmatch(name):
        return None
    module, _, name = name.partition(" ")
    if module == "torch" and name in ITEM_BYTES:
        return getattr(torch, name)  # a dtype; names nothing else
    known = {
        "Metadata": _Metadata,
        "TensorStorageMetadata": _Tensor,
        "BytesStorageMetadata": _Bytes,
        "MetadataIndex": _Index,
        "Size": _Size,
        "OrderedDict": dict,
    }
    return known.get(name, Held)


class DistributedCheckpoint(Foreign):
    """A folder that `torch.distributed.checkpoint.save` wrote."""

    kind = "torch distributed checkpoint (DCP)"

    def __init__(self, folder: str, key_prefix: str | None = None) -> None:
        self._entries = _Entries(folder)
        self._kept: OrderedDict[tuple[str, Dims], torch.Tensor] = OrderedDict()
        self._lock = threading.Lock()
        names = _Names(self._entries, key_prefix)
        tensors: dict[str, SavedTensor] = {}
        extra: dict[str, Any] = {}
        for key, saved in self._entries.tensors.items():
            ours = names.tensors[key]
            if ours.startswith("extra/"):
                extra[key] = {"$tensor": ours}
            tensors[ours] = saved
        step = 0
        for key in names.others:
            value = self._entries.load_value(key)
            if key == "step" and type(value) is int and value >= 0:
                step = value
            else:
                extra[key] = encode(value, f"extra/0/{key}", {})
        super().__init__(folder, tensors, None, names.read_optimizer(), extra, step)

    def read_box(self, piece: Piece, dtype: str, box: Box) -> torch.Tensor:
        key = piece.name, piece.box.offset
        with self._lock:
            if key not in self._kept:
                self._kept[key] = self._entries.load_tensor(piece, dtype)
                while len(self._kept) > _MOST_OPEN:
                    self._kept.popitem(last=False)
            tensor = self._kept[key]
        return tensor[box.within(piece.box)]


class _Entries:
    """What `.metadata` says, checked: tensors with their pieces, other values, where each is."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._metadata = open_beside(folder, METADATA, folder)
        self.fail = self._metadata.fail
        self._files: dict[str, ForeignFile] = {}
        self._places: dict[tuple[str, Dims | None], tuple[str, int, int]] = {}
        self.tensors: dict[str, SavedTensor] = {}
        self.values: list[str] = []
        self.paths: dict[str, tuple[Any, ...]] = {}
        table = self._load()
        self._read_places(table.get("storage_data"))
        entries = table.get("state_dict_metadata")
        if not isinstance(entries, dict):
            self.fail(f"has {entries!r:.80} for state_dict_metadata, expected a table")
        for key, entry in entries.items():
            if not isinstance(key, str):
                self.fail(f"has the key {key!r:.80}, expected a string")
            if isinstance(entry, _Bytes):
                self._place(key, None)
                self.values.append(key)
            else:
                self.tensors[key] = self._read_tensor(key, entry)
        paths = table.get("planner_data")
        for key, path in paths.items() if isinstance(paths, dict) else ():
            if isinstance(key, str) and isinstance(path, tuple):
                self.paths[key] = path

    def _load(self) -> Held:
        if self._metadata.size > _MOST_METADATA_BYTES:
            self.fail(f"has {self._metadata.size} bytes, more than any metadata")
        data = bytes(self._metadata.read(0, self._metadata.size))
        check_pickle(data, _ALLOWED, self.fail)
        try:
            found = RestrictedUnpickler(data, _stand_in, self.fail).load()
        except CheckpointError:
            raise
        except Exception as error:  # whatever a wrong pickle runs into
            self.fail(f"is no pickle of DCP's metadata: {error!r:.200}")
        if not isinstance(found, _Metadata):
            self.fail(f"holds a {type(found).__name__}, expected DCP's Metadata")
        return found

    def _read_places(self, given: Any) -> None:
        if not isinstance(given, dict):
            self.fail(f"has {given!r:.80} for storage_data, expected a table")
        for index, info in given.items():
            key = index.get("fqn") if isinstance(index, _Index) else None
            if not isinstance(key, str) or not isinstance(info, Held):
                self.fail(f"has storage_data that is not of DCP's files: {index!r:.80}")
            if info.get("transform_descriptors"):
                self.fail(f"has {key!r:.80} packed or encrypted, which is not read")
            offset = index.get("offset")
            place = None if offset is None else self._dims(offset, f"the offset of {key!r:.80}")
            name, start, length = (info.get(n) for n in ("relative_path", "offset", "length"))
            if not isinstance(name, str):
                self.fail(f"has {key!r:.80} in the file {name!r:.80}, expected a name")
            if name not in self._files:
                self._files[name] = open_beside(self._folder, name, self._metadata.path)
            check_dims(self._metadata, (start, length), f"the place of {key!r:.80}", 2)
            if start + length > self._files[name].size:
                self.fail(
                    f"has {key!r:.80} from {start} to {start + length} of {name}, which has "
                    f"{self._files[name].size} bytes"
                )
            self._places[key, place] = name, start, length

    def _dims(self, given: Any, what: str) -> Dims:
        inner = given.arguments[0] if isinstance(given, _Size) and given.arguments else ()
        return check_dims(self._metadata, inner, what)

    def _place(self, key: str, offset: Dims | None) -> tuple[str, int, int]:
        # An offset of zeros may be left out, of a 0-d tensor it may be empty.
        for tried in (offset, None):
            if (key, tried) in self._places:
                return self._places[key, tried]
        self.fail(f"does not say where {key!r:.80} at {offset} is")

    def _read_tensor(self, key: str, entry: Any) -> SavedTensor:
        properties = entry.get("properties") if isinstance(entry, _Tensor) else None
        state = properties.state if isinstance(properties, Held) else None
        dtype = state[0] if isinstance(state, tuple) and state else None
        if not isinstance(dtype, torch.dtype):
            self.fail(f"has {entry!r:.80} under {key!r:.80}, expected a tensor of a known dtype")
        shape = self._dims(entry.get("size"), f"the shape of {key!r:.80}")
        chunks = entry.get("chunks")
        if not isinstance(chunks, list) or not all(isinstance(c, Held) for c in chunks):
            self.fail(f"has {chunks!r:.80} for the chunks of {key!r:.80}")
        pieces = []
        for chunk in chunks:
            offset = self._dims(chunk.get("offsets"), f"a chunk of {key!r:.80}")
            box = Box(offset, self._dims(chunk.get("sizes"), f"a chunk of {key!r:.80}"))
            inside = len(box.offset) == len(box.shape) == len(shape) and all(
                end <= size for end, size in zip(box.ends, shape, strict=True)
            )
            if not inside:
                self.fail(f"has a chunk {box} of {key!r:.80}, expected a part of {list(shape)}")
            if box.numel:
                file, _, length = self._place(key, offset)
                if box.numel * dtype.itemsize > length:
                    self.fail(f"has {length} bytes for {box} of {key!r:.80}, too few")
                pieces.append(Piece(file, key, box, 0))
        problem = find_gap(shape, [piece.box for piece in pieces])
        if problem:
            self.fail(f"{key!r:.80}: {problem}")
        return SavedTensor(shape, dtype_name(dtype), tuple(pieces))

    def _load_item(self, key: str, offset: Dims | None) -> Any:
        name, start, length = self._place(key, offset)
        file = self._files[name]
        data = bytes(file.read(start, length))
        return load_archive(data, lambda text: file.fail(f"at {start} ({key!r:.80}) {text}"))

    def load_value(self, key: str) -> Any:
        return self._load_item(key, None)

    def load_tensor(self, piece: Piece, dtype: str) -> torch.Tensor:
        tensor = self._load_item(piece.name, piece.box.offset)
        fits = isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided
        if not fits or (tuple(tensor.shape), dtype_name(tensor.dtype)) != (piece.box.shape, dtype):
            self._files[piece.file].fail(
                f"has something else than the metadata's {dtype} of {list(piece.box.shape)} for "
                f"{piece.name!r:.80}"
            )
        return tensor


class _Names:
    """Which names are the model's, which the optimizer's, and which neither's.

    The optimizer's have `state.` in them, before a parameter's name and after the name that the
    program gave to the optimizer. The model's stand below one name, by which most of them are.
    """

    _STATE = re.compile(r"(?:(.*?)\.)?state\.(.+)\.([^.]+)")
    _GROUP = re.compile(r"(?:(.*?)\.)?param_groups\.(.+)\.([^.]+)")

    def __init__(self, entries: _Entries, key_prefix: str | None) -> None:
        self._entries = entries
        found = {key: self._STATE.fullmatch(key) for key in [*entries.tensors, *entries.values]}
        groups = {key: self._GROUP.fullmatch(key) for key in [*entries.values, *entries.tensors]}
        roots = {match[1] for match in groups.values() if match}
        self._states = {key: m for key, m in found.items() if m is not None and m[1] in roots}
        self._groups = {key: m for key, m in groups.items() if m is not None}
        rest = [key for key in entries.tensors if key not in self._states | self._groups]
        prefix = self._find_prefix(rest) if key_prefix is None else key_prefix
        self.tensors: dict[str, str] = {}
        for key in entries.tensors:
            if key in self._states:
                self.tensors[key] = f"optimizer/{self._states[key][2]}/{self._states[key][3]}"
            elif key in self._groups:
                self.tensors[key] = f"optimizer/#dcp/{key}"
            elif key.startswith(prefix) and len(key) > len(prefix):
                self.tensors[key] = f"model/{key.removeprefix(prefix)}"
            else:
                self.tensors[key] = f"extra/0/{key}"
        if len(roots) > 1 or len(set(self.tensors.values())) < len(self.tensors):
            entries.fail(f"has several optimizers ({', '.join(map(repr, roots))}); one can be read")
        if rest and not any(name.startswith("model/") for name in self.tensors.values()):
            raise CheckpointError(f"no tensor begins with {prefix!r}; there are {rest[:5]}, ...")
        known = self._states.keys() | self._groups.keys()
        self.others = [key for key in entries.values if key not in known]

    def _find_prefix(self, keys: list[str]) -> str:
        """What stands before the model's names: the dicts that the program put it into."""
        above = Counter(self._entries.paths.get(key, (key,))[:-1] for key in keys)
        parameters = {match[2] for match in self._states.values()}

        def fits(path: tuple[Any, ...]) -> tuple[bool, bool, int]:
            prefix = _dotted(path)
            known = any(prefix + name in self._entries.tensors for name in parameters)
            return known, "model" in path, above[path]

        return _dotted(max(above, key=fits)) if above else ""

    def read_optimizer(self) -> SavedOptimizer | None:
        if not self._states and not self._groups:
            return None
        tables: dict[str, dict[str, Any]] = {}
        for key, match in self._groups.items():
            if key in self._entries.tensors:
                value: Any = {"$tensor": self.tensors[key]}
            else:
                value = self._entries.load_value(key)
                if match[3] != "params":
                    value = encode(value, key, {})
            tables.setdefault(match[2], {})[match[3]] = value
        values: dict[str, dict[str, Any]] = {}
        for key in self._entries.values:
            state = self._states.get(key)
            if state is not None:
                value = encode(self._entries.load_value(key), key, {})
                values.setdefault(state[2], {})[state[3]] = value
        return SavedOptimizer("", tuple(self._read_groups(tables)), values)

    def _read_groups(self, tables: dict[str, dict[str, Any]]) -> Iterable[SavedGroup]:
        """By number, each with its parameters' names; or by parameter, with equal settings one."""
        numbered = {name: table for name, table in tables.items() if name.isdecimal()}
        if numbered:
            for name in sorted(numbered, key=int):
                settings = dict(numbered[name])
                params = settings.pop("params", [])
                if not isinstance(params, list) or not all(isinstance(p, str) for p in params):
                    self._entries.fail(f"has {params!r:.80} for params of group {name}")
                settings.pop("param_names", None)
                yield SavedGroup(tuple(params), settings)
            return
        alike: list[tuple[dict[str, Any], list[str]]] = []
        for name, settings in tables.items():
            kept = {k: v for k, v in settings.items() if k not in ("params", "param_names")}
            for known, names in alike:
                if known == kept:
                    names.append(name)
                    break
            else:
                alike.append((kept, [name]))
        for settings, names in alike:
            yield SavedGroup(tuple(names), settings)


def _dotted(path: tuple[Any, ...]) -> str:
    return "".join(f"{part}." for part in path)
