"""One rank's data file: its pieces in safetensors' format, each with its checksum.

A file is a header's length in eight bytes, the header (JSON), and the pieces one after the other
without a gap. Threads copy to the host, sum up and look for infinite numbers while the file is
written.
"""

from __future__ import annotations

import json
import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.pool import AsyncResult, ThreadPool

import torch

from shardwise.checkpoint.collect import Assignment, Share
from shardwise.checkpoint.manifest import ITEM_BYTES, Box, DataFile, Dims, Piece, checksum
from shardwise.checkpoint.storage import Storage
from shardwise.checkpoint.trees import bytes_of

# How safetensors calls dtypes; the bytes of any other are written as bytes.
DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32",
    "int32": "I32", "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16",
    "float32": "F32", "float64": "F64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
BATCH_BYTES = 4 << 20  # pieces that one thread takes at a time
JOIN_BYTES = 64 << 10  # pieces below are written together
THREADS, AHEAD = 2, 4


@dataclass(frozen=True)
class Source(ABC):
    """A piece that this rank writes."""

    key: str
    dtype: str
    box: Box

    @abstractmethod
    def read(self) -> torch.Tensor: ...

    @property
    def name(self) -> str:
        return f"{self.key}@{','.join(map(str, self.box.offset))}"

    @property
    def nbytes(self) -> int:
        return self.box.numel * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class InMemory(Source):
    tensor: torch.Tensor

    def read(self) -> torch.Tensor:
        return self.tensor


@dataclass(frozen=True)
class Written:
    """What a rank wrote: nothing, or one file."""

    file: str | None
    data: DataFile | None
    pieces: list[tuple[str, Piece]]  # each with the key of its tensor
    finite: bool


def file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def find_sources(share: Share, assignment: Assignment, rank: int) -> list[InMemory]:
    """The pieces that this rank writes, as views of what it holds."""
    held = {each.key: each for each in share.held}
    sources = []
    for key, box in assignment.pieces[rank]:
        part = next(part for part in held[key].parts if part.box.overlap(box) == box)
        sources.append(InMemory(key, held[key].dtype, box, part.tensor[box.within(part.box)]))
    if any(source.tensor.is_cuda for source in sources):
        torch.cuda.synchronize()  # other threads, on streams of their own, will read them
    return sources


def copy_to_host(sources: Sequence[Source]) -> list[InMemory]:
    """The same pieces as they are now, whatever becomes of the tensors: for writing later."""
    copies = []
    on_device = False
    for source in sources:
        tensor = source.read()
        pinned = tensor.device.type == "cuda"
        on_device |= pinned
        # Contiguous, whatever the strides of the view.
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        copies.append(copy.copy_(tensor, non_blocking=pinned))
    if on_device:
        torch.cuda.current_stream().synchronize()
    return [
        InMemory(source.key, source.dtype, source.box, copy)
        for source, copy in zip(sources, copies, strict=True)
    ]


def make_header(entries: Sequence[tuple[str, str, Dims]]) -> bytes:
    """Of pieces in order: name, dtype, shape. Padded, so that the data begins aligned."""
    table: dict[str, object] = {}
    at = 0
    for name, dtype, shape in entries:
        size = Box.whole(shape).numel * ITEM_BYTES[dtype]
        known = DTYPES.get(dtype)
        written = list(shape) if known else [*shape, ITEM_BYTES[dtype]]
        table[name] = {"dtype": known or "U8", "shape": written, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_part(
    storage: Storage,
    begun: str,
    rank: int,
    sources: Sequence[Source],
    progress: Callable[[int], None] = lambda nbytes: None,
) -> Written:
    """Write this rank's file under the name of a checkpoint that was begun. No process group."""
    if not sources:
        return Written(None, None, [], True)
    header = make_header([(each.name, each.dtype, each.box.shape) for each in sources])
    sums: list[int] = []
    finite: list[bool] = []

    def buffers() -> Iterator[bytes | memoryview]:
        yield header
        # Not an executor of concurrent.futures: it takes no more work once the program has come to
        # its end, where an asynchronous save may be under way. From Python 3.12 on no thread can be
        # started there either: then this one does it all.
        try:
            pool = ThreadPool(THREADS)
        except RuntimeError:
            for batch in _batches(sources):
                yield from take(_prepare(batch))
            return
        with pool:
            waiting: deque[AsyncResult[Batch]] = deque()
            for batch in _batches(sources):
                waiting.append(pool.apply_async(_prepare, (batch,)))
                if len(waiting) > AHEAD:
                    yield from take(waiting.popleft().get())
            while waiting:
                yield from take(waiting.popleft().get())

    def take(batch: Batch) -> Iterator[bytes | memoryview]:
        ready, crcs, is_finite = batch
        sums.extend(crcs)
        finite.append(is_finite)
        for buffer in ready:
            yield buffer
            progress(len(buffer))

    file = file_name(rank)
    storage.write(begun, file, buffers())
    pieces = [
        (each.key, Piece(file, each.name, each.box, crc))
        for each, crc in zip(sources, sums, strict=True)
    ]
    size = len(header) + sum(each.nbytes for each in sources)
    return Written(file, DataFile(size, zlib.crc32(header)), pieces, all(finite))


Batch = tuple[list[bytes | memoryview], list[int], bool]


def _batches(sources: Sequence[Source]) -> Iterator[list[Source]]:
    batch: list[Source] = []
    size = 0
    for source in sources:
        batch.append(source)
        size += source.nbytes
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _prepare(batch: list[Source]) -> Batch:
    """Bytes, checksums, and whether all numbers of model and optimizer are finite."""
    buffers: list[bytes | memoryview] = []
    small: list[memoryview] = []
    crcs: list[int] = []
    finite = True
    for source in batch:
        host = source.read().cpu()
        if source.key.startswith(("model/", "optimizer/")):
            finite = finite and is_finite(host)
        data = bytes_of(host)
        crcs.append(checksum(data))
        if len(data) < JOIN_BYTES:
            small.append(data)
            continue
        if small:
            buffers.append(b"".join(small))
            small = []
        buffers.append(data)
    if small:
        buffers.append(b"".join(small))
    return buffers, crcs, finite


def is_finite(tensor: torch.Tensor) -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
        return True
    if tensor.is_complex() or tensor.itemsize == 1:
        return bool(torch.isfinite(tensor if tensor.is_complex() else tensor.float()).all())
    ends = torch.stack(torch.aminmax(tensor))  # no memory for an answer per element
    return bool(torch.isfinite(ends).all())
