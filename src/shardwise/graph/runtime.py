"""How a compiled graph sends: the engine's own groups, one call for each message.

torch's collectives of traced graphs wait for one tensor at a time, and each costs tens of
microseconds of Python; a gather of a whole block would be ten of them. So before a graph is
compiled its collectives of parameters and gradients become these operators: many tensors in one
message, one wait for all. They go through `Group`, as the engine's do: what is recorded, emulated
or not grouped by a backend is so for both.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from shardwise.engine.collectives import DONE, Buffer, Group, Handle
from shardwise.engine.engine import Engine
from shardwise.engine.executor import Lane
from shardwise.engine.gradients import Slot
from shardwise.engine.torch_private import chunk_cat, foreach_copy_
from shardwise.graph.nodes import (
    ALL_GATHERS,
    ALL_REDUCES,
    KINDS,
    REDUCE_SCATTERS,
    group_of,
    is_wait,
)
from shardwise.graph.passes.order import copy_graph

_library = torch.library.Library("shardwise_sends", "DEF")
# Parts are cast on their way into the memory that the gather fills: parameter after parameter, the
# parts of all ranks of each.
_library.define("gather(Tensor[] parts, int ranks, str group, ScalarType dtype) -> Tensor")
# Gradients are cast, padded and laid rank after rank by one kernel; the result is this rank's rows.
_library.define(
    "scatter(Tensor[] gradients, int rows, int ranks, str group, ScalarType dtype) -> Tensor"
)
# The same of parts that no graph is given: by their numbers on the shelf of `place`.
_library.define(
    "gather_kept(Tensor place, int[] numbers, int numel, int ranks, str group, ScalarType dtype)"
    " -> Tensor"
)
# Lays gradients on the shelf of `place`; the result is for autograd, which has to be given one.
_library.define("deliver(Tensor place, Tensor[] gradients, int[] numbers) -> Tensor")
_library.define("add_up(Tensor[] sums, str group, ScalarType dtype) -> Tensor")
# Nothing is written; but whoever reads it afterwards must come afterwards.
_library.define("arrive(Tensor(a!) sent) -> ()")
# What a message was packed of is read until here, and its memory may be used again afterwards: the
# compiler goes by that, for it knows nothing of lanes. Compute waits for the packing only.
_library.define("let_go(Tensor(a!) sent, Tensor[] packed) -> ()")

GATHER = torch.ops.shardwise_sends.gather.default
GATHER_KEPT = torch.ops.shardwise_sends.gather_kept.default
SCATTER = torch.ops.shardwise_sends.scatter.default
DELIVER = torch.ops.shardwise_sends.deliver.default
ADD_UP = torch.ops.shardwise_sends.add_up.default
ARRIVE = torch.ops.shardwise_sends.arrive.default
LET_GO = torch.ops.shardwise_sends.let_go.default


@dataclass(frozen=True)
class Path:
    """A group, and the engine's lane beside compute that its messages are packed and sent on."""

    group: Group
    lane: Lane


# By the names that torch.distributed gives the groups.
gathers: dict[str, Path] = {}
sums: dict[str, Path] = {}


def know(engine: Engine) -> None:
    """Send over an engine's groups from now on."""
    executor = engine.executor
    for unit in engine.units:
        shard, replicate = unit.mesh.shard, unit.mesh.replicate
        if shard.group is not None:
            gathers[shard.group.group_name] = Path(shard, executor.gathers)
            sums[shard.group.group_name] = Path(shard, executor.scatters)
        if replicate.group is not None:
            sums[replicate.group.group_name] = Path(replicate, executor.replicas)


class Shelf:
    """This rank's parts of a model's parameters, where graphs find them, and the gradients that
    graphs leave. So parts and gradients are no inputs and outputs of graphs, each of which costs
    the host time at every door of torch's: a graph is given a place, which is where it looks, and
    has a gradient of a sink, the one leaf of autograd.
    """

    def __init__(self, parts: list[Tensor]) -> None:
        self.parts = parts
        self._found: dict[int, Tensor] = {}

    def make_inputs(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """A place and its sink. They keep the shelf, not it them: a graph that waits for its
        backward has saved one.
        """
        place = torch.zeros(1, device=device)
        sink = place.detach().requires_grad_()
        _shelves[place.data_ptr()] = self
        for tensor in (place, sink):
            tensor.shelf = self  # type: ignore[attr-defined]
        return place, sink

    def lay(self, numbers: list[int], gradients: list[Tensor]) -> None:
        """Add to what is there, never into its memory: gradients may share one."""
        for number, gradient in zip(numbers, gradients, strict=True):
            there = self._found.get(number)
            self._found[number] = gradient if there is None else there + gradient

    def take(self) -> list[Tensor | None]:
        """Gradients that were laid since, parameter by parameter."""
        found, self._found = self._found, {}
        return [found.get(number) for number in range(len(self.parts))]


@dataclass(eq=False)
class _Sent:
    """A message under way: what compute waits for, and the memory that it reads until then."""

    path: Path
    handle: Handle
    reads: Any
    packed: Handle = DONE  # all that compute has to wait for to use the gradients' memory again

    def end(self) -> None:
        self.path.lane.join(self.handle)
        self._drop()

    def let_go(self) -> None:
        """A slot is the lane's own, whose next pack comes behind this message."""
        self.path.lane.join(self.packed)
        self._drop()

    def _drop(self) -> None:
        if isinstance(self.reads, _Packed):
            self.reads.give_back()
        self.reads = None


@dataclass(frozen=True)
class _Packed:
    """A message in one of the slots that are used again and again, and what was packed."""

    slot: Slot
    free: list[Slot]  # where it goes afterwards
    gradients: list[Tensor]

    def give_back(self) -> None:
        self.slot.buffer.release()
        self.free.append(self.slot)


_free_slots: dict[Any, list[Slot]] = {}  # by what they are for

_shelves: weakref.WeakValueDictionary[int, Shelf] = weakref.WeakValueDictionary()  # by memory

_under_way: dict[int, _Sent] = {}  # by the memory that the first tensor fills


@dataclass(frozen=True)
class Gathering:
    """One gather of a graph: what it was called with."""

    parts: list[Tensor]
    ranks: int
    name: str
    dtype: torch.dtype

    @property
    def key(self) -> Any:
        return *(part.data_ptr() for part in self.parts), self.dtype

    def send_early(self) -> None:
        """Start it before its graph runs, which will find it under way."""
        _early[self.key] = _gather(self.parts, self.ranks, self.name, self.dtype)


_early: dict[Any, Tensor] = {}
_noted: list[Gathering] | None = None


@contextmanager
def note_gathers() -> Iterator[list[Gathering]]:
    """What graphs gather inside, in their order."""
    global _noted
    found: list[Gathering] = []
    _noted = found
    try:
        yield found
    finally:
        _noted = None


def forget_early() -> None:
    """What no graph asked for is let go."""
    while _early:
        _arrive(_early.popitem()[1])


def _gather(parts: list[Tensor], ranks: int, name: str, dtype: torch.dtype) -> Tensor:
    if _noted is not None or _early:
        asked = Gathering(parts, ranks, name, dtype)
        if _noted is not None:
            _noted.append(asked)
        if (sent := _early.pop(asked.key, None)) is not None:
            return sent
    path = gathers[name]
    flat = parts[0].new_empty(sum(p.numel() for p in parts) * ranks, dtype=dtype)
    numels = [part.numel() for part in parts]
    outputs = flat.split([numel * ranks for numel in numels])
    own = _own_pieces(flat, numels, ranks, path.group.rank)
    with path.lane.behind_compute:
        foreach_copy_(own, parts)
        moment = path.lane.mark()
        return _start(flat, path, path.group.all_gather_all(outputs, own), parts, moment)


def _own_pieces(flat: Tensor, numels: list[int], ranks: int, rank: int) -> tuple[Tensor, ...]:
    """This rank's part of every parameter. What lies between two of them is one piece of a single
    split: a view of each would be several calls.
    """
    sizes, gap = [], 0
    for numel in numels:
        sizes += [gap + rank * numel, numel]
        gap = (ranks - 1 - rank) * numel
    return flat.split([*sizes, gap])[1::2]


def _gather_kept(
    place: Tensor, numbers: list[int], numel: int, ranks: int, name: str, dtype: torch.dtype
) -> Tensor:
    parts = _shelves[place.data_ptr()].parts
    return _gather([parts[number] for number in numbers], ranks, name, dtype)


def _deliver(place: Tensor, gradients: list[Tensor], numbers: list[int]) -> Tensor:
    _shelves[place.data_ptr()].lay(numbers, gradients)
    return torch.zeros_like(place)


def _scatter(
    gradients: list[Tensor], rows: int, ranks: int, name: str, dtype: torch.dtype
) -> Tensor:
    path = sums[name]
    mine = gradients[0].new_empty(rows, dtype=dtype)
    with path.lane.behind_compute:
        packed = _pack(gradients, ranks, mine) if path.lane.ordered else None
        if packed is not None:
            moment = path.lane.mark()
            handle = path.group.reduce_scatter(mine, packed.slot.flat)
            return _start(mine, path, handle, packed, moment)
        slot = mine.new_empty((ranks, rows))
        chunk_cat([g.expand(ranks) if g.dim() == 0 else g for g in gradients], ranks, slot)
        moment = path.lane.mark()
        handle = path.group.reduce_scatter(mine, slot.view(-1))
        return _start(mine, path, handle, (slot, gradients), moment)


def _pack(gradients: list[Tensor], ranks: int, mine: Tensor) -> _Packed | None:
    """By one multi-tensor copy, where every gradient is cut evenly among not too many ranks: on a
    GPU it takes less time than `chunk_cat`, whose many blocks keep the next matrix product waiting.
    """
    even = all(g.dim() and g.shape[0] % ranks == 0 for g in gradients)
    if not (even and Slot.pays(len(gradients), ranks)):
        return None
    sizes = tuple(g.numel() // ranks for g in gradients)
    free = _free_slots.setdefault((sizes, ranks, mine.dtype, mine.device), [])
    starts = list(accumulate(sizes, initial=0))[:-1]
    if free:
        slot = free.pop()
    else:
        flat = mine.new_empty(sum(sizes) * ranks)
        slot = Slot(starts, sizes, ranks, flat, Buffer(flat))
    slot.pack(gradients)
    return _Packed(slot, free, gradients)


def _add_up(terms: list[Tensor], name: str, dtype: torch.dtype) -> Tensor:
    path = sums[name]
    flat = terms[0].new_empty(sum(each.numel() for each in terms), dtype=dtype)
    with path.lane.behind_compute:
        chunk_cat([t.view(1) if t.dim() == 0 else t for t in terms], 1, flat.view(1, -1))
        moment = path.lane.mark()
        return _start(flat, path, path.group.all_reduce(flat), terms, moment)


def _start(
    output: Tensor, path: Path, handle: Handle, reads: Any = None, packed: Handle = DONE
) -> Tensor:
    if path.lane.ordered:
        handle.wait()
        handle = path.lane.mark()
    _under_way[output.data_ptr()] = _Sent(path, handle, reads, packed)
    return output


def _arrive(sent: Tensor) -> None:
    found = _under_way.pop(sent.data_ptr(), None)
    if found is not None:
        found.end()


def _let_go(sent: Tensor, packed: list[Tensor]) -> None:
    found = _under_way.get(sent.data_ptr())
    if found is not None and found.path.lane.ordered:
        found.let_go()
    else:
        _arrive(sent)


for _name, _kernel in (
    ("gather", _gather), ("gather_kept", _gather_kept), ("deliver", _deliver),
    ("scatter", _scatter), ("add_up", _add_up), ("arrive", _arrive), ("let_go", _let_go),
):  # fmt: skip
    for _device in ("CPU", "CUDA"):
        _library.impl(_name, _kernel, _device)


@torch.library.register_fake("shardwise_sends::gather", lib=_library)
def _(parts: list[Tensor], ranks: int, group: str, dtype: torch.dtype) -> Tensor:
    return parts[0].new_empty(sum(part.numel() for part in parts) * ranks, dtype=dtype)


@torch.library.register_fake("shardwise_sends::gather_kept", lib=_library)
def _(
    place: Tensor, numbers: list[int], numel: int, ranks: int, group: str, dtype: torch.dtype
) -> Tensor:
    return place.new_empty(numel * ranks, dtype=dtype)


@torch.library.register_fake("shardwise_sends::deliver", lib=_library)
def _(place: Tensor, gradients: list[Tensor], numbers: list[int]) -> Tensor:
    return torch.empty_like(place)


@torch.library.register_fake("shardwise_sends::scatter", lib=_library)
def _(gradients: list[Tensor], rows: int, ranks: int, group: str, dtype: torch.dtype) -> Tensor:
    return gradients[0].new_empty(rows, dtype=dtype)


@torch.library.register_fake("shardwise_sends::add_up", lib=_library)
def _(sums: list[Tensor], group: str, dtype: torch.dtype) -> Tensor:
    return sums[0].new_empty(sum(each.numel() for each in sums), dtype=dtype)


@torch.library.register_fake("shardwise_sends::arrive", lib=_library)
def _(sent: Tensor) -> None:
    return None


@torch.library.register_fake("shardwise_sends::let_go", lib=_library)
def _(sent: Tensor, packed: list[Tensor]) -> None:
    return None


_SENDS = {"all_gather": GATHER, "reduce_scatter": SCATTER, "all_reduce": ADD_UP}


def send_by_groups(graph: Graph) -> Graph:
    """A copy in which collectives over known groups are one operator a message, and one wait."""
    graph, _ = copy_graph(graph)
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in KINDS and group_of(node) in sums:
            _replace(graph, node)
    graph.lint()
    return graph


def _replace(graph: Graph, node: Node) -> None:
    kind, name = KINDS[node.target], group_of(node)
    several = node.target in (ALL_GATHERS, REDUCE_SCATTERS, ALL_REDUCES)
    given: Any = node.args[0]
    inputs = list(given) if several else [given]
    values = node.meta["val"] if several else [node.meta["val"]]
    ranks, dtype = sums[name].group.size, values[0].dtype
    numels = [value.numel() for value in values]
    args: tuple[Any, ...] = (inputs, name, dtype)
    if kind == "all_gather":
        args = (inputs, ranks, name, dtype)
    elif kind == "reduce_scatter":
        args = (inputs, sum(numels), ranks, name, dtype)
    each: dict[Node, Any] = {u: u.args[1] for u in node.users} if several else {node: 0}
    waits = [(user, i) for source, i in each.items() for user in source.users if is_wait(user)]
    places = {n: at for at, n in enumerate(graph.nodes)}
    first = min((wait for wait, _ in waits), key=places.__getitem__)

    def call(target: Any, *args: Any) -> Node:
        made = graph.call_function(target, args)
        known = torch.fx.node.map_arg(args, lambda n: n.meta["val"])
        made.meta["val"] = target(*known)
        return made

    with graph.inserting_before(node):
        sent = call(_SENDS[kind], *args)
    with graph.inserting_before(first):
        call(LET_GO, sent, inputs)
        call(ARRIVE, sent)
        tensors, at = [], 0
        for value, numel in zip(values, numels, strict=True):
            piece = call(torch.ops.aten.slice.Tensor, sent, 0, at, at + numel)
            tensors.append(call(torch.ops.aten.view.default, piece, list(value.shape)))
            at += numel
    for wait, i in waits:
        wait.replace_all_uses_with(tensors[i])
        graph.erase_node(wait)
    for source in list(each) if several else ():
        graph.erase_node(source)
    graph.erase_node(node)
