"""Python values as JSON and tensors, and back: what schedulers, data loaders and settings hold.

JSON has no tuples, no keys but strings, no infinity: those are tables with one key that begins with
`$`. Tensors go to `tensors` under a key, numbers of a few bytes into the JSON itself. Whatever else
is an error with its place and type: nothing is pickled.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from shardwise.checkpoint.manifest import ITEM_BYTES, CheckpointError, CorruptCheckpoint
from shardwise.description.parameters import dtype_name
from shardwise.engine.torch_private import local_of

_INLINE_BYTES = 16
Tensors = dict[str, torch.Tensor]
_MOST_DEPTH = 100


def encode(value: Any, key: str, tensors: Tensors) -> Any:
    """`value` as JSON; its tensors go into `tensors`, under keys that begin with `key`."""
    match value:
        case None | bool() | str():
            return value
        case int():
            return int(value)
        case float():
            return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
        case bytes() | bytearray():
            return {"$bytes": base64.b64encode(value).decode()}
        case torch.Tensor():
            return _encode_tensor(value, key, tensors)
        case np.ndarray() | np.generic():
            array = np.asarray(value)
            if array.dtype.kind not in "biufc":
                _refuse(value, key, f"a numpy array of {array.dtype}")
            found = _encode_tensor(torch.from_numpy(np.array(array)), key, tensors)
            return {"$scalar" if isinstance(value, np.generic) else "$array": found}
        case torch.dtype() | torch.device():
            return {"$torch": str(value).removeprefix("torch."), "kind": type(value).__name__}
        case torch.Size() | tuple():
            return {"$tuple": [encode(v, f"{key}/{i}", tensors) for i, v in enumerate(value)]}
        case list():
            return [encode(v, f"{key}/{i}", tensors) for i, v in enumerate(value)]
        case set() | frozenset():
            return {"$set": [encode(v, f"{key}/{i}", tensors) for i, v in enumerate(value)]}
        case deque():
            items = [encode(v, f"{key}/{i}", tensors) for i, v in enumerate(value)]
            return {"$deque": items, "maxlen": value.maxlen}
        case Mapping():
            return _encode_table(value, key, tensors)
    _refuse(value, key, f"a {type(value).__module__}.{type(value).__qualname__}")


def _refuse(value: Any, key: str, kind: str) -> Any:
    raise CheckpointError(
        f"{key} is {kind} ({value!r:.60}), which a checkpoint cannot hold: expected JSON values, "
        "tensors, numpy arrays, or an object with state_dict and load_state_dict"
    )


def _encode_table(value: Mapping[Any, Any], key: str, tensors: Tensors) -> Any:
    plain = all(type(name) is str and not name.startswith("$") for name in value)
    if plain and not isinstance(value, Counter):
        return {name: encode(each, f"{key}/{name}", tensors) for name, each in value.items()}
    items = [
        [encode(name, f"{key}/#{i}", tensors), encode(each, f"{key}/{i}", tensors)]
        for i, (name, each) in enumerate(value.items())
    ]
    return {"$counter" if isinstance(value, Counter) else "$dict": items}


def _encode_tensor(value: torch.Tensor, key: str, tensors: Tensors) -> Any:
    tensor = local_of(value.detach())
    if tensor.is_sparse or tensor.is_quantized or tensor.layout != torch.strided:
        _refuse(value, key, f"a {tensor.layout} tensor")
    name = dtype_name(tensor.dtype)
    if name not in ITEM_BYTES:
        _refuse(value, key, f"a tensor of {tensor.dtype}")
    if tensor.nbytes > _INLINE_BYTES:
        tensors[key] = tensor
        return {"$tensor": key}
    data = bytes_of(tensor.cpu()).tobytes().hex()
    return {"$number": data, "dtype": name, "shape": list(tensor.shape)}


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a tensor on the host."""
    flat = tensor.detach().contiguous().reshape(-1)
    array: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
    return memoryview(array)


def decode(value: Any, find: Callable[[str], torch.Tensor], depth: int = 0) -> Any:
    """The inverse of `encode`; `find` gives the tensor of a key."""
    if depth > _MOST_DEPTH:
        raise CorruptCheckpoint("a checkpoint's JSON is nested too deep")

    def each(items: Any) -> list[Any]:
        return [decode(item, find, depth + 1) for item in items]

    try:
        match value:
            case list():
                return each(value)
            case {"$float": text}:
                return float(text)
            case {"$bytes": text}:
                return base64.b64decode(text, validate=True)
            case {"$tensor": key}:
                return find(key)
            case {"$number": data, "dtype": name, "shape": shape}:
                return _decode_number(data, name, shape)
            case {"$scalar": inner}:
                return decode(inner, find, depth + 1).numpy()[()]
            case {"$array": inner}:
                return decode(inner, find, depth + 1).numpy()
            case {"$torch": name, "kind": "dtype"}:
                if name not in ITEM_BYTES:
                    raise ValueError(f"no dtype {name!r:.60}")
                return getattr(torch, name)
            case {"$torch": name, "kind": "device"}:
                return torch.device(name)
            case {"$tuple": items}:
                return tuple(each(items))
            case {"$set": items}:
                return set(each(items))
            case {"$deque": items, "maxlen": maxlen}:
                return deque(each(items), maxlen)
            case {"$dict": items}:
                return {decode(k, find, depth + 1): decode(v, find, depth + 1) for k, v in items}
            case {"$counter": items}:
                return Counter(
                    {decode(k, find, depth + 1): decode(v, find, depth + 1) for k, v in items}
                )
            case dict():
                return {k: decode(v, find, depth + 1) for k, v in value.items()}
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CorruptCheckpoint(f"a checkpoint's value {value!r:.80} is wrong: {error}") from error
    return value


def _decode_number(data: str, name: str, shape: list[int]) -> torch.Tensor:
    if name not in ITEM_BYTES:
        raise ValueError(f"no dtype {name!r:.60}")
    raw = bytearray.fromhex(data)
    dtype = getattr(torch, name)
    if not raw:
        return torch.empty(0, dtype=dtype).view(shape)
    return torch.frombuffer(raw, dtype=torch.uint8).clone().view(dtype).view(shape)


def keys_in(value: Any, depth: int = 0) -> list[str]:
    """The keys of the tensors that a decoded value needs."""
    if depth > 2 * _MOST_DEPTH:  # two levels of JSON may be one of the value
        raise CorruptCheckpoint("a checkpoint's JSON is nested too deep")
    if isinstance(value, list):
        return [key for item in value for key in keys_in(item, depth + 1)]
    if not isinstance(value, dict):
        return []
    if "$tensor" in value:
        return [value["$tensor"]] if isinstance(value["$tensor"], str) else []
    return [key for item in value.values() for key in keys_in(item, depth + 1)]
