"""Memory by role over a step: the allocator says what was taken when, the engine whose it is.

On CUDA the allocator's own history has every block, also those from before. On a CPU torch's
profiler tells of what is taken and given back while it runs; what was there before is what the
engine, the model and the optimizers hold. Every block gets one role, so roles sum to the
allocator's figure; what nobody claims is "other".
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from shardwise.description.tracing.torch_private import allocator_snapshot, record_allocations
from shardwise.engine import torch_private
from shardwise.engine.engine import Engine
from shardwise.engine.gradients import Gradients
from shardwise.engine.marks import BufferMark, Marks, RangeMark
from shardwise.predict.program import rounded
from shardwise.profiling.pieces import HostPieces
from shardwise.profiling.trace import HostAllocation
from shardwise.timeline import MEMORY_ROLES, MemoryCurve

POINTS = 1500  # a curve has at most this many, each the highest of its stretch
LARGEST = 10


@dataclass
class MemoryBlock:
    """Memory that was taken once. `born` is None if that was before the profile, `died` if it was
    given back after it or not at all.
    """

    address: int
    nbytes: int
    born: int | None = None
    died: int | None = None
    role: str = "other"
    what: str = ""


@dataclass(frozen=True)
class Owned:
    """What a tensor's memory is for."""

    nbytes: int
    role: str
    what: str


@dataclass
class Owners:
    """Who owns memory, by address: found by looking through engines, models and optimizers."""

    device: str = "cpu"
    tensors: dict[int, Owned] = field(default_factory=dict)
    buffers: dict[int, Owned] = field(default_factory=dict)  # by id of an engine's Buffer
    sizes: dict[str, set[int]] = field(default_factory=dict)  # of gradients, by unit

    def add(self, tensor: torch.Tensor | None, role: str, what: str) -> None:
        if tensor is None:
            return
        local = torch_private.local_of(tensor)
        if torch_private.is_wrapper(local):  # a class of its own, around tensors with memory
            for name in local.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
                self.add(getattr(local, name), role, what)
        elif local.device.type == self.device and not local.is_meta:
            storage = local.untyped_storage()
            if storage.nbytes():
                self.tensors.setdefault(
                    storage.data_ptr(), Owned(storage.nbytes(), role, f"{role} of {what}")
                )


def find_owners(
    engines: Iterable[Engine],
    model: nn.Module | None,
    optimizers: Iterable[torch.optim.Optimizer],
    device: str,
) -> Owners:
    """Everything that is held from step to step, and the engine's buffers."""
    owners = Owners(device)
    for unit in (unit for engine in engines for unit in engine.units):
        owners.add(unit.parameters.master, "parameters", unit.name)
        if not unit.prepared:
            continue
        held: list[tuple[Any, str]] = [(unit.kept_piece, "full")]
        if not unit.parameters.aliased:
            held.append((getattr(unit.parameters, "buffer", None), "full"))
        gradients = unit.gradients
        if gradients is not None:
            what = f"gradients of {unit.name}"
            owners.buffers[id(gradients)] = Owned(gradients.nbytes, "gradients", what)
            owners.add(gradients.sums, "gradients", unit.name)
            if gradients.slot is not None:
                held.append((gradients.slot.buffer, "slots"))
            owners.sizes[unit.name] = _gradient_sizes(gradients)
        for buffer, role in held:
            if buffer is None:
                continue
            nbytes = sum(tensor.nbytes for tensor in buffer.tensors)
            owners.buffers[id(buffer)] = Owned(nbytes, role, f"{role} of {unit.name}")
            for tensor in buffer.tensors:
                owners.add(tensor, role, unit.name)
    for name, parameter in model.named_parameters() if model is not None else ():
        owners.add(parameter.data, "parameters", name)
        owners.add(parameter.grad, "gradients", name)
    for name, buffer in model.named_buffers() if model is not None else ():
        owners.add(buffer, "other", name)
    for optimizer in optimizers:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            owners.add(parameter.data, "parameters", "an optimizer")
            owners.add(parameter.grad, "gradients", "an optimizer")
        for state in optimizer.state.values():
            for key, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor):
                    owners.add(value, "state", str(key))
    return owners


def _gradient_sizes(gradients: Gradients) -> set[int]:
    found = set()
    for shown in gradients.shown:
        nbytes = torch_private.local_of(shown.data).nbytes
        found |= {nbytes, rounded(nbytes)}
    return found


class CudaHistory:
    """The history of CUDA's allocator, and its snapshot for torch's own viewer."""

    def __init__(self) -> None:
        self.snapshot: dict[str, Any] = {}

    def start(self) -> None:
        record_allocations("all", context=None, max_entries=2_000_000)

    def stop(self) -> None:
        self.snapshot = allocator_snapshot()
        record_allocations(None)

    def blocks(self, offset: int) -> tuple[list[MemoryBlock], list[tuple[int, int, int]]]:
        """Every block, and (time, reserved, active beyond allocated) changes; `offset` is added to
        the allocator's times.
        """
        device = torch.cuda.current_device()
        alive: dict[int, MemoryBlock] = {}
        blocks: list[MemoryBlock] = []
        others: list[tuple[int, int, int]] = []
        for entry in self.snapshot["device_traces"][device]:
            time, address = entry["time_us"] * 1000 + offset, entry["addr"]
            size = rounded(entry["size"])
            action = entry["action"]
            if action == "alloc":
                alive[address] = MemoryBlock(address, size, born=time)
                blocks.append(alive[address])
            elif action == "free_requested":
                if address not in alive:
                    alive[address] = MemoryBlock(address, size)
                    blocks.append(alive[address])
                alive.pop(address).died = time
                others.append((time, 0, size))
            elif action == "free_completed":
                others.append((time, 0, -size))
            elif action in ("segment_alloc", "segment_map"):
                others.append((time, entry["size"], 0))
            elif action in ("segment_free", "segment_unmap"):
                others.append((time, -entry["size"], 0))
        for segment in self.snapshot["segments"]:
            if segment["device"] != device:
                continue
            address = segment["address"]
            for piece in segment["blocks"]:
                here = piece.get("address", address)
                if piece["state"] == "active_allocated" and here not in alive:
                    blocks.append(MemoryBlock(here, piece["size"]))
                address = here + piece["size"]
        return blocks, others

    @property
    def reserved(self) -> int:
        """Bytes that the allocator held from the device at the end."""
        device = torch.cuda.current_device()
        segments = self.snapshot["segments"]
        return sum(s["total_size"] for s in segments if s["device"] == device)


def host_blocks(
    allocations: list[HostAllocation], before: Owners, owners: Owners, noted: list[BufferMark]
) -> list[MemoryBlock]:
    """Every block of the host's allocator: those that the profiler saw, and those that an owner
    held before it began, which end where the engine says that it gave them back.
    """
    alive = {address: MemoryBlock(address, o.nbytes) for address, o in before.tensors.items()}
    blocks = list(alive.values())
    events: list[tuple[int, int, int]] = [(a.time, a.address, a.nbytes) for a in allocations]
    if allocations:
        events += [(m.time, m.address, 0) for m in noted if m.nbytes < 0]
    else:  # nobody followed the allocator: what the engine says of its own buffers
        events = [(m.time, m.address, m.nbytes) for m in noted]
    for time, address, nbytes in sorted(events):
        if nbytes > 0:
            if address in alive:  # from before: its end was not seen
                alive[address].died = time
            alive[address] = MemoryBlock(address, nbytes, born=time)
            blocks.append(alive[address])
        elif address in alive and (nbytes < 0 or alive[address].born is None):
            alive.pop(address).died = time
    for address, owned in owners.tensors.items():
        if address not in alive:  # its owner was not known at the start
            blocks.append(MemoryBlock(address, owned.nbytes))
    return blocks


def assign_roles(
    blocks: list[MemoryBlock], owners: Owners, before: Owners, marks: Marks, pieces: HostPieces
) -> None:
    """Say of every block what it is for."""
    buffers: dict[int, list[tuple[int, Owned]]] = defaultdict(list)
    for mark in marks.buffers:
        owned = owners.buffers.get(id(mark.buffer)) or before.buffers.get(id(mark.buffer))
        if mark.nbytes > 0 and owned is not None:
            buffers[mark.address].append((mark.time, owned))
    packs: dict[str, list[RangeMark]] = defaultdict(list)
    for made in marks.ranges:
        if made.name == "pack":
            packs[made.unit].append(made)
    for block in blocks:
        owned = _owner(block, owners, before, buffers)
        if owned is not None:
            block.role, block.what = owned.role, owned.what
        elif block.born is not None:
            block.role, block.what = _by_birth(block, block.born, pieces, packs, owners)


def _owner(
    block: MemoryBlock, owners: Owners, before: Owners, buffers: dict[int, list[tuple[int, Owned]]]
) -> Owned | None:
    if block.born is None and block.address in before.tensors:
        return before.tensors[block.address]
    for time, owned in buffers.get(block.address, ()):
        if (block.born or 0) <= time and (block.died is None or time <= block.died):
            return owned
    if block.died is None:
        return owners.tensors.get(block.address)
    return None


def _by_birth(
    block: MemoryBlock,
    born: int,
    pieces: HostPieces,
    packs: dict[str, list[RangeMark]],
    owners: Owners,
) -> tuple[str, str]:
    """The role of a block that no owner claims, by what the host did when it took the memory."""
    piece = pieces.at(born)
    where = f"{piece.name} {piece.unit}".strip()
    if piece.mark is not None:
        roles = {"pack": "slots", "reduce": "slots", "add": "slots", "copy-out": "full"}
        return roles.get(piece.name, "temporary"), where
    if piece.phase == "forward":
        ends = pieces.at(block.died).phase if block.died is not None else "backward"
        return ("activations" if ends != "forward" else "temporary"), where
    if piece.phase == "backward":
        pack = next((made for made in packs.get(piece.unit, ()) if made.start >= born), None)
        sizes = owners.sizes.get(piece.unit)
        lasts = pack is not None and (block.died is None or block.died >= pack.start)
        if lasts and (sizes is None or block.nbytes in sizes):
            return "gradients", where
    return "temporary", where


@dataclass(frozen=True)
class StepMemory:
    """Memory over a step of one rank: by role, what the allocator held beyond it, and the largest
    blocks at the peak.
    """

    curve: MemoryCurve
    reserved: list[int]
    active: list[int]
    largest: list[dict[str, Any]]
    limit_bytes: int | None = None  # of the device

    def moved(self, times: Iterable[int]) -> StepMemory:
        return replace(self, curve=replace(self.curve, times=tuple(times)))


def draw_curve(
    blocks: list[MemoryBlock],
    start: int,
    end: int,
    rank: int = 0,
    allocator: Sequence[tuple[int, int, int]] = (),
    reserved_at_end: int = 0,
) -> StepMemory:
    """The bytes of every role from `start` to `end`. `allocator` has (time, reserved, active beyond
    allocated) changes.
    """
    changes: list[tuple[int, str, int]] = []
    for block in blocks:
        changes.append((block.born if block.born is not None else -1, block.role, block.nbytes))
        if block.died is not None:
            changes.append((block.died, block.role, -block.nbytes))
    for time, reserved, pending in allocator:
        changes += [(time, "reserved", reserved), (time, "pending", pending)]
    changes.sort(key=lambda change: change[0])
    columns = {role: i for i, role in enumerate((*MEMORY_ROLES, "reserved", "pending"))}
    held = np.zeros((len(changes) + 1, len(columns)), np.int64)
    held[0, columns["reserved"]] = reserved_at_end - sum(reserved for _, reserved, _ in allocator)
    for i, (_, role, nbytes) in enumerate(changes, 1):
        held[i, columns[role]] = nbytes
    moments = [time for time, _, _ in changes]
    first, last = bisect_right(moments, start), bisect_left(moments, end)
    times = [start, *moments[first:last]]
    held = held.cumsum(axis=0)[first : last + 1]  # at the start, and after each change from then on
    totals = held[:, : len(MEMORY_ROLES)].sum(axis=1)
    largest = _largest(blocks, times[totals.argmax()])
    size = -(-len(times) // POINTS)
    thin = [0, *(i + int(totals[i : i + size].argmax()) for i in range(1, len(times), size))]
    series = {role: tuple(held[thin, i].tolist()) for role, i in columns.items()}
    curve = MemoryCurve(rank, tuple(times[i] for i in thin), {r: series[r] for r in MEMORY_ROLES})
    active = (totals[thin] + held[thin, columns["pending"]]).tolist()
    return StepMemory(curve, list(series["reserved"]), active, largest)


def _largest(blocks: list[MemoryBlock], moment: int) -> list[dict[str, Any]]:
    there = [
        block
        for block in blocks
        if (block.born is None or block.born <= moment)
        and (block.died is None or block.died > moment)
    ]
    there.sort(key=lambda block: -block.nbytes)
    return [{"bytes": b.nbytes, "role": b.role, "what": b.what} for b in there[:LARGEST]]
