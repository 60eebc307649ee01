"""What ranks send each other: collectives over torch.distributed, counted while a `record()` is
open, and small host values beside them.

Sums on the wire, always: gloo's AVG has silently summed in some versions (pytorch/pytorch 162338),
so nobody asks for it.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from shardwise.engine import marks, torch_private
from shardwise.engine.across import Across, across_of
from shardwise.engine.near import LARGEST, MOST_RANKS, Message, Near, meet
from shardwise.engine.process import rest_at_exit
from shardwise.engine.records import Call, open_records
from shardwise.engine.words import Control, PerWorld, control_of
from shardwise.watch import rank as watched
from shardwise.watch.page import EXCHANGE, RUNS, USES, Track


class Handle(Protocol):
    """Something under way. On CUDA `wait` orders the current stream behind it; else it blocks."""

    def wait(self) -> Any: ...


class All:
    """Several handles as one."""

    def __init__(self, handles: Sequence[Handle]) -> None:
        self.handles = handles

    def wait(self) -> None:
        for handle in self.handles:
            handle.wait()


class After:
    """Something under way, and what is to be done, once, when it has ended."""

    def __init__(self, handle: Handle, end: Callable[[], None]) -> None:
        self.handle = handle
        self._end: Callable[[], None] | None = end

    def wait(self) -> None:
        self.handle.wait()
        end, self._end = self._end, None
        if end is not None:
            end()


DONE = All(())  # nothing under way: a group of one rank, or an operation that has ended
Unpack = Callable[[], None] | None  # to run when a gather has ended


@torch.no_grad()
def add_up(pieces: torch.Tensor, into: torch.Tensor) -> None:
    """The sum of the rows of `pieces`, in the dtype of `into`. A GPU adds wider than it reads in
    one kernel; a host would first make a wider copy of everything, so it takes row after row.
    """
    if pieces.is_cuda:
        torch.sum(pieces, 0, dtype=into.dtype, out=into)
        return
    into.copy_(pieces[0])
    for piece in pieces[1:]:
        into.add_(piece)


def allocate(custom: Any, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory for a collective; that of `custom`, if it is called instead of torch.distributed."""
    if custom is None:
        return torch.empty(numel, dtype=dtype, device=device)
    made: torch.Tensor = custom.allocate((numel,), dtype=dtype, device=device)
    return made


class Buffer:
    """Tensors whose memory comes and goes, all together, while their views stay."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = tensors
        self._storages = [(s, s.nbytes()) for s in map(torch.Tensor.untyped_storage, tensors)]
        self.allocated = True

    def allocate(self) -> None:
        if not self.allocated:
            for storage, nbytes in self._storages:
                storage.resize_(nbytes)
                if marks.on is not None:
                    marks.on.buffer(self, storage.data_ptr(), nbytes)
            self.allocated = True

    def release(self) -> None:
        for storage, nbytes in self._storages if self.allocated else ():
            # numpy has a view: torch resizes that storage no more.
            if storage.resizable():
                if marks.on is not None:
                    marks.on.buffer(self, storage.data_ptr(), -nbytes)
                storage.resize_(0)
                self.allocated = False

    @contextmanager
    def present(self) -> Iterator[None]:
        """Memory is there inside; views can only be made while it is."""
        was = self.allocated
        self.allocate()
        yield
        if not was:
            self.release()


def _issued(handle: Handle) -> Handle:
    """A collective was called; a profile, if one listens, watches the wait for it."""
    return handle if marks.on is None else marks.on.issued(handle)


@dataclass(eq=False)
class Group:
    """One axis of the mesh as this rank sees it: the ranks it shares that axis with.

    `plain`: everything goes by torch's own calls, as whoever watches those expects; else by the
    cheapest way, which is `near` where all ranks are on this host, and for sums `across` where
    several are on each of several.
    """

    axis: str
    group: dist.ProcessGroup | None
    size: int
    rank: int
    control: Control | None  # moves small host values
    plain: bool = True
    near: Near | None = None
    across: Across | None = None

    @classmethod
    def of(
        cls, axis: str, group: dist.ProcessGroup | None, device: torch.device, plain: bool = False
    ) -> Group:
        """A group of torch's (None: all ranks). Where it is not `plain`, all of its ranks call."""
        rest_at_exit()
        group = group or dist.group.WORLD
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        control = control_of(group)
        if plain or control is None or device.type != "cpu" or not is_gloo(group, device):
            return cls(axis, group, size, rank, control, plain)
        assert group is not None  # `control_of` asked
        near = near_of(group, control, device)
        across = across_of(group, control, device) if near is None else None
        return cls(axis, group, size, rank, control, plain, near, across)

    def all_gather(self, output: torch.Tensor, input: torch.Tensor, custom: Any = None) -> Handle:
        """Every rank's `input`, one after the other, into `output`. `input` may be this rank's part
        of `output`. `custom` is called instead of torch.distributed, with torch's AllGather's
        arguments.
        """
        if self.size == 1:
            if output.data_ptr() != input.data_ptr():
                output.copy_(input)
            return DONE
        self._note("all_gather", output)
        output, input = as_sent(output), as_sent(input)
        if custom is not None:
            return _issued(custom(output, input, self.group, async_op=True) or DONE)
        if self.near is not None and goes_near(input, output):
            return _issued(self.near.all_gather((output, input)))
        return _issued(torch_private.all_gather(output, input, self.group))

    def post(self, source: torch.Tensor, dtype: torch.dtype) -> tuple[Handle, Message]:
        """An all-gather of everybody's `source` as `dtype`, through shared memory: the message's
        parts are there once the handle was waited for, and stay until the message is ended.
        """
        assert self.near is not None
        self._note_bytes("all_gather", source.numel() * dtype.itemsize * self.size)
        message = self.near.post(source, dtype)
        return _issued(message), message

    def all_gather_grouped(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> Handle:
        """Many gathers as one grouped call; each input may be this rank's part of its output."""
        self._note("all_gather", *outputs)
        outputs, inputs = list(map(as_sent, outputs)), list(map(as_sent, inputs))
        return _issued(torch_private.all_gather_grouped(outputs, inputs, self.group))

    def all_gather_all(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> Handle:
        """Many gathers as one message, where one can be made of them; else one each."""
        pairs = list(zip(outputs, inputs, strict=True))
        if len(pairs) == 1:
            return self.all_gather(*pairs[0])
        if outputs[0].device.type == "cpu":
            self._note("all_gather", *outputs)
            together = sum(each.nbytes for each in inputs) <= LARGEST
            if self.near is not None and together and all(goes_near(*pair) for pair in pairs):
                return _issued(self.near.all_gather(*pairs))
            return _issued(self._all_gather_packed(pairs))
        if self.groups_calls(outputs[0].device):
            return self.all_gather_grouped(outputs, inputs)
        return All([self.all_gather(*pair) for pair in pairs])

    def _all_gather_packed(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Handle:
        """All inputs side by side. gloo could group the calls, but does this itself then, and its
        thread lets go of all those tensors while this one does.
        """
        sent = torch.cat([input.reshape(-1) for _, input in pairs])
        found = sent.new_empty((self.size, sent.numel()))

        def end() -> None:
            at = 0
            for output, input in pairs:
                output.view(self.size, -1).copy_(found[:, at : at + input.numel()])
                at += input.numel()
            let_go(found)

        whole, own = as_sent(found.view(-1)), as_sent(sent)
        return After(torch_private.all_gather(whole, own, self.group), end)

    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, custom: Any = None
    ) -> Handle:
        """The sum over ranks of everybody's `input`; this rank gets its equal part of it."""
        self._note("reduce_scatter", input)
        if custom is not None:
            handle = custom(output, input, self.group, dist.ReduceOp.SUM, async_op=True)
            return _issued(handle or DONE)
        if self.near is not None and goes_near(input, output):
            return _issued(self.near.reduce_scatter(output, input))
        scatter = torch_private.reduce_scatter if self.plain else scatter_parts
        return _issued(scatter(output, input, self.group))

    def all_to_all(self, output: torch.Tensor, input: torch.Tensor) -> Handle:
        """This rank's part of everybody's `input`, one after the other, into `output`."""
        self._note("all_to_all", input)
        return _issued(torch_private.all_to_all(output, input, self.group))

    def all_reduce(self, tensor: torch.Tensor) -> Handle:
        """The sum over ranks, in place."""
        if self.size == 1:
            return DONE
        self._note("all_reduce", tensor)
        if self.near is not None and goes_near(tensor):
            return _issued(self.near.all_reduce(tensor))
        if self.across is not None and goes_near(tensor):
            return _issued(self.across.all_reduce(tensor))
        return _issued(dist.all_reduce(tensor, group=self.group, async_op=True))

    def broadcast(self, tensor: torch.Tensor) -> None:
        """The first rank's values on every rank."""
        if self.size > 1:
            dist.broadcast(as_sent(tensor), group=self.group, group_src=0)

    def exchange(self, value: object) -> list[Any]:
        """Every rank's small Python value, on every rank. Blocks; for agreement, not for data."""
        if self.size == 1 or self.control is None:
            return [value] * self.size
        return self.control.exchange(value)

    def tell(self, numbers: Sequence[int]) -> list[list[int]]:
        """Every rank's numbers, as many on each: for what is compared in every step."""
        if self.size == 1 or self.control is None:
            return [list(numbers) for _ in range(self.size)]
        if self.near is None:
            return self.control.tell(numbers)
        if self.control.track is not None:
            self.control.track.add(EXCHANGE, "agreement")
        mine = torch.tensor(numbers, dtype=torch.int64, device="cpu")  # whatever the default is
        found = mine.new_empty((self.size, len(mine)))
        self.near.all_gather((found, mine)).wait()
        return cast(list[list[int]], found.tolist())

    @cached_property
    def members(self) -> tuple[int, ...]:
        """The group's ranks in the world."""
        return tuple(dist.get_process_group_ranks(self.group))

    @cached_property
    def track(self) -> Track | None:
        """Where the watch reads the order of this group's collectives; None if nobody watches."""
        return self._find_track("")

    @cached_property
    def uses(self) -> Track | None:
        """Where it reads the order in which gathered units were needed."""
        return self._find_track(USES)

    @cached_property
    def runs(self) -> Track | None:
        """Where it reads the order in which units ran."""
        return self._find_track(RUNS)

    def _find_track(self, prefix: str) -> Track | None:
        if watched.on is None or self.group is None or self.size == 1:
            return None
        return watched.on.track(f"{prefix}{self.group.group_name}", self.members)

    def groups_calls(self, device: torch.device) -> bool:
        """Whether a grouped call takes this device's tensors. gloo's does not, though its other
        calls do: it reads them as the host's, and the process dies.
        """
        return device.type == "cpu" or not is_gloo(self.group, device)

    def _note(self, name: str, *tensors: torch.Tensor) -> None:
        if open_records or marks.on is not None:
            self._note_bytes(name, sum(t.numel() * t.element_size() for t in tensors))

    def _note_bytes(self, name: str, nbytes: int) -> None:
        if open_records or marks.on is not None:
            for log in open_records:
                if log.world is dist.group.WORLD:
                    log.calls.append(Call(name, self.axis, nbytes, self.size))
            if marks.on is not None:
                marks.on.call(name, self.axis, nbytes, self.members)


# gloo and NCCL both move these; of other dtypes (8-bit floats, 16-bit integers) the bytes.
_MOVED = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64}
_MOVED |= {torch.complex128, torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool}


def as_sent(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or its bytes where a backend could refuse its dtype: for messages that
    nothing is computed of.
    """
    return tensor if tensor.dtype in _MOVED else tensor.view(-1).view(torch.uint8)


def is_gloo(group: Any, device: torch.device) -> bool:
    """Whether gloo moves this device's tensors."""
    return f"{device.type}:gloo" in dist.get_backend_config(group).split(",")


def goes_near(*tensors: torch.Tensor) -> bool:
    """Whether memory that ranks share carries a message of these: the same answer on all ranks."""
    return not torch_private.emulated and all(
        tensor.device.type == "cpu" and tensor.is_contiguous() and 0 < tensor.nbytes <= LARGEST
        for tensor in tensors
    )


def scatter_parts(output: torch.Tensor, input: torch.Tensor, group: Any) -> Handle:
    """A reduce-scatter by the cheapest collectives. gloo (up to torch 2.13) makes one of an
    all-reduce, which brings everybody all parts. So there each rank gets its own part of
    everybody's input, beside it, and adds them in the order of the ranks.
    """
    if input.device.type != "cpu" or not is_gloo(group, input.device):
        work: Handle = torch_private.reduce_scatter(output, input, group)
        return work
    received = torch.empty_like(input)
    parts = received.view(dist.get_world_size(group), -1)

    def end() -> None:
        add_up(parts, output.view(-1))
        let_go(received)

    return After(torch_private.all_to_all(received, input, group), end)


def let_go(message: torch.Tensor) -> None:
    """Give the memory of a message back, whose collective has ended: a thread of gloo's may hold
    the tensor for a moment longer, and what comes next would need as much again.
    """
    storage = message.untyped_storage()
    if storage.resizable():
        storage.resize_(0)


def digest(value: object) -> int:
    """A short number for ranks to compare instead of the value."""
    return zlib.crc32(repr(sorted(value.items()) if isinstance(value, dict) else value).encode())


_near: PerWorld[Near | None] = PerWorld()


def near_of(group: dist.ProcessGroup, control: Control, device: torch.device) -> Near | None:
    """The memory that the ranks of a group share, all on this host; None where they do not. The
    first call of a group is a collective one. If something stands in for torch's functions on any
    of them (an emulated network, a recorder) it is not passed by.
    """
    ranks = tuple(dist.get_process_group_ranks(group))
    if len(ranks) > MOST_RANKS:
        return None
    rank, timeout_s = dist.get_rank(group), torch_private.timeout_of(group, device)

    def make() -> Near | None:
        offers = torch_private.calls_are_torchs()
        return meet(control.exchange, len(ranks), rank, timeout_s, offers)

    return _near.get(group.group_name, make)
