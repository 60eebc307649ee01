"""An emulated network: one process is a rank of any mesh, for torch's engines and ours alike.

While `emulate(network)` is open, torch.distributed's collectives copy what would arrive (own shard
repeated into a gather's output, own part of a reduce), take the modelled time on one stream per
group, and return work whose `wait()` orders streams without blocking the host. Both engines look
these functions up in `torch.distributed` at each call, so both meet the same network. Grouped
gathers go by `torch_private`; DistributedDataParallel issues from C++, so it gets a communication
hook.

The values are fabricated: read no loss from them, and label every figure `emulated`.
docs/emulation.md says what is modelled and what is not.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Work
from torch.nn.parallel import DistributedDataParallel

from shardwise.description.tracing.torch_private import comm_hooks_of
from shardwise.emulation.device import DeviceLinks, Mode, Move
from shardwise.emulation.exposure import DeviceRecorder, Exposure, HostRecorder, Message
from shardwise.emulation.links import Flow, HostLinks
from shardwise.emulation.networks import NO_TIME, Network, NetworkModel, Transfer
from shardwise.engine import torch_private

# When the last of the other ranks joins each collective of a group, in seconds of the step.
Joins = Mapping[tuple[int, ...], Sequence[float]]

__all__ = ["Emulation", "Network", "emulate"]


class EmulatedWork(Work):
    """A collective under way. torch's FSDP2 waits only for instances of torch's own `Work`, which
    take 70 us to make: those that were waited for serve again, with their event.
    """

    idle: ClassVar[list[EmulatedWork]] = []
    device: torch.device
    emulation: Emulation
    arrived: torch.cuda.Event | None = None
    flow: Flow | None = None  # on a CPU
    waited_for = False

    @classmethod
    def start(cls, emulation: Emulation, device: torch.device) -> EmulatedWork:
        work = cls.idle.pop() if cls.idle else cls()
        work.emulation, work.device, work.waited_for = emulation, device, False
        work.flow = None
        if device.type == "cuda" and work.arrived is None:
            work.arrived = torch.cuda.Event()
        return work

    def wait(self, timeout: Any = None) -> bool:
        if self.flow is not None:
            self.emulation.wait_on_host(self.flow)
        else:
            assert self.arrived is not None
            torch_private.current_stream(self.device).wait_event(self.arrived)
        if not self.waited_for:
            self.waited_for = True
            self.idle.append(self)
        return True

    def get_future(self) -> Any:
        raise NotImplementedError(
            "an emulated collective has no future; wait() for it, or remove the communication hook "
            "that asks for one (emulation installs its own on DistributedDataParallel)"
        )


class Emulation:
    """The collectives of one open emulation, what each cost, and how often it was called.

    `mode` may be changed between steps, to see what the network costs them: in a `free` one data
    arrives and nobody waits, with the same calls on the host; in an `unwaited` one, on a GPU with
    occupancy, the collectives' kernels also go on beside compute for their time. The network itself
    changes by `change_network`.
    """

    def __init__(self, network: NetworkModel, occupancy: int = 0) -> None:
        self.network = network
        self.occupancy = occupancy
        self.mode: Mode = "network"
        self.calls: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()  # bytes of whole buffers, by collective
        self._host = HostLinks()
        self._devices: dict[torch.device, DeviceLinks] = {}
        self._ranks: dict[Any, tuple[int, ...]] = {}
        self._transfers: dict[tuple[str, int, Any], Transfer] = {}
        self._recorder: HostRecorder | DeviceRecorder | None = None
        self._joins: Joins = {}
        self._joined: Counter[tuple[int, ...]] = Counter()  # collectives of this step, by group
        self._step_began = 0.0  # by the host's clock

    def begin_step(self, device: torch.device, joins: Joins) -> None:
        """A step begins, in whose collectives other ranks are as late as `joins` says."""
        self._joins = joins
        self._joined.clear()
        self._step_began = time.perf_counter()
        if joins and device.type == "cuda":
            self.links_of(device).begin_step()

    def change_network(self, network: NetworkModel) -> None:
        """Between steps: what is under way on devices ends first."""
        for device in self._devices:
            torch.cuda.synchronize(device)
        self.network = network
        self._transfers.clear()

    def all_gather(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any = None,
        async_op: bool = False,
    ) -> Work | None:
        move = _gathers(output_tensor.view(-1), input_tensor.reshape(-1), group)
        return self._run("all_gather", [move], group, async_op)

    def all_gather_grouped(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], group: Any
    ) -> Work | None:
        """Many gathers that take the time of one."""
        pairs = zip(outputs, inputs, strict=True)
        moves = [_gathers(output, source, group) for output, source in pairs]
        return self._run("all_gather", moves, group, async_op=True)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Work | None:
        whole, own = input.view(-1), output.view(-1)
        part, rank = own.numel(), dist.get_rank(group)
        first, last = rank * part, rank * part + part
        move = Move(own, whole[first:last], 1, whole, whole.numel(), (first, last))
        return self._run("reduce_scatter", [move], group, async_op)

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Work | None:
        if output_split_sizes or input_split_sizes:
            raise NotImplementedError("the emulated network has all-to-alls of equal parts only")
        whole, size = input.view(-1), input.numel()
        ranks = dist.get_world_size(group)
        own = whole.view(ranks, -1)[dist.get_rank(group)]
        move = Move(output.view(-1), own, ranks, whole, size, (0, size))
        return self._run("all_to_all", [move], group, async_op)

    def all_reduce(
        self, tensor: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False
    ) -> Work | None:
        size = tensor.numel()
        # Twice round the ring: a kernel that moves the data reads it twice.
        move = Move(tensor, tensor, 0, tensor, 2 * size, (0, size))
        return self._run("all_reduce", [move], group, async_op)

    @contextmanager
    def measure(self, device: torch.device) -> Iterator[Exposure]:
        """What the block's collectives took and what of it was exposed, filled in at its end. On a
        GPU the current stream is the one that counts as compute.
        """
        cuda = device.type == "cuda"
        self._recorder = DeviceRecorder(device) if cuda else HostRecorder(self._host)
        try:
            with self._recorder.watch() as measured:
                yield measured
        finally:
            self._recorder = None

    def links_of(self, device: torch.device) -> DeviceLinks:
        if device not in self._devices:
            self._devices[device] = DeviceLinks(device, self.occupancy)
        return self._devices[device]

    def close(self) -> None:
        for links in self._devices.values():
            links.close()

    def wait_on_host(self, flow: Flow) -> None:
        waited = self._host.wait(flow)
        if isinstance(self._recorder, HostRecorder):
            self._recorder.waits.append(waited)

    def transfer(self, collective: str, nbytes: int, group: Any) -> Transfer:
        """What the network says of one collective; asked once for each size and group."""
        key = (collective, nbytes, group)
        if key not in self._transfers:
            self._transfers[key] = self.network.transfer(collective, nbytes, self._ranks_of(group))
        return self._transfers[key]

    def _run(self, name: str, moves: Sequence[Move], group: Any, async_op: bool) -> Work | None:
        """Queue the copies, and the time of the whole message."""
        nbytes = sum(move.nbytes for move in moves)
        self.calls[name] += 1
        self.sent[name] += nbytes
        group = group or dist.group.WORLD
        ranks = self._ranks_of(group)
        transfer = self._delayed(self.transfer(name, nbytes, group), ranks)
        message = None
        if self._recorder is not None:
            modelled = transfer.seconds if self.mode == "network" else 0.0
            message = Message(name, len(ranks), nbytes, modelled, group=ranks)
        # Autograd does not record a collective; to say so takes longer than to ask.
        with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
            on_device = moves[0].target.is_cuda
            run = self._on_device if on_device else self._on_host
            work = run(group, moves, transfer, message)
        if async_op:
            return work
        work.wait()
        return None

    def _on_device(
        self, group: Any, moves: Sequence[Move], transfer: Transfer, message: Message | None
    ) -> EmulatedWork:
        device = moves[0].target.device
        links, work = self.links_of(device), EmulatedWork.start(self, device)
        assert work.arrived is not None
        began = ended = None
        if message is not None and isinstance(self._recorder, DeviceRecorder):
            began, ended = self._recorder.add(message)
        links.run(group, moves, transfer, work.arrived, began, self.mode)
        if ended is not None:
            ended.record(links.lane(group).stream)
        return work

    def _on_host(
        self, group: Any, moves: Sequence[Move], transfer: Transfer, message: Message | None
    ) -> EmulatedWork:
        for move in moves:
            move.run()
        work = EmulatedWork.start(self, torch.device("cpu"))
        taken = transfer if self.mode == "network" else NO_TIME
        work.flow = self._host.add(time.perf_counter(), group, taken, self._step_began)
        if message is not None and isinstance(self._recorder, HostRecorder):
            self._recorder.add(message, work.flow)
        return work

    def _delayed(self, transfer: Transfer, ranks: tuple[int, ...]) -> Transfer:
        """With the moment at which the last of the group's other ranks joins it."""
        late = self._joins.get(ranks, ())
        at = self._joined[ranks]
        self._joined[ranks] += 1
        return replace(transfer, joins=late[at]) if at < len(late) else transfer

    def _ranks_of(self, group: Any) -> tuple[int, ...]:
        if group not in self._ranks:
            self._ranks[group] = tuple(dist.get_process_group_ranks(group))
        return self._ranks[group]


@contextmanager
def emulate(network: NetworkModel, occupancy: int = 0) -> Iterator[Emulation]:
    """Put the emulated collectives in torch.distributed's place; restore them at the end.

    `occupancy`: on a GPU, how many blocks move a collective's data at the modelled rate, as a
    communication library's kernel would; 0: copies at full speed, then nothing that takes room.
    """
    emulation = Emulation(network, occupancy)
    try:
        with in_place_of_torch(emulation), _hook_ddp():
            yield emulation
    finally:
        emulation.close()


@contextmanager
def in_place_of_torch(stand_in: Any) -> Iterator[None]:
    """Both engines call `stand_in` meanwhile: its `all_gather`, `all_gather_grouped`,
    `reduce_scatter`, `all_to_all` and `all_reduce`.
    """
    replaced = {
        "all_gather_single": stand_in.all_gather,
        "all_gather_into_tensor": stand_in.all_gather,
        "reduce_scatter_single": stand_in.reduce_scatter,
        "reduce_scatter_tensor": stand_in.reduce_scatter,
        "all_to_all_single": stand_in.all_to_all,
        "all_reduce": stand_in.all_reduce,
    }
    # Which of the names exist depends on torch's version.
    originals = {name: getattr(dist, name) for name in replaced if hasattr(dist, name)}
    grouped = torch_private.all_gather_grouped
    for name in originals:
        setattr(dist, name, replaced[name])
    torch_private.all_gather_grouped = stand_in.all_gather_grouped
    outside, torch_private.emulated = torch_private.emulated, True
    try:
        yield
    finally:
        torch_private.emulated = outside
        torch_private.all_gather_grouped = grouped
        for name, original in originals.items():
            setattr(dist, name, original)


def _gathers(output: torch.Tensor, source: torch.Tensor, group: Any) -> Move:
    size = output.numel()
    return Move(output, source, dist.get_world_size(group), source, size, (0, size))


class _Buckets:
    """The buckets of a DistributedDataParallel model that are under way.

    Its reducer calls the process group from C++, below everything Python can put in the way. So a
    communication hook sends each bucket through `torch.distributed.all_reduce` as Python sees it;
    the waits follow at the end of backward, where the reducer's own are.
    """

    emulations: ClassVar[int] = 0  # that are open

    def __init__(self, group: Any) -> None:
        self.group = group
        self.under_way: list[tuple[Any, torch.futures.Future[torch.Tensor], torch.Tensor]] = []

    def send(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        if not _Buckets.emulations:
            # Fabricated gradients need no average. Real ones do.
            buffer.div_(dist.get_world_size(self.group))
        devices: list[Any] = [buffer.device] if buffer.is_cuda else []
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        work = dist.all_reduce(buffer, group=self.group, async_op=True)
        self.under_way.append((work, future, buffer))
        if bucket.is_last():
            # The reducer queues its own waits after this.
            torch_private.call_after_backward(self.wait)
        return future

    def wait(self) -> None:
        for work, future, buffer in self.under_way:
            work.wait()
            future.set_result(buffer)
        self.under_way.clear()


@contextmanager
def _hook_ddp() -> Iterator[None]:
    """Give every DistributedDataParallel model that runs meanwhile the hook, unless it has one."""
    original = DistributedDataParallel.forward

    def forward(model: DistributedDataParallel, *inputs: Any, **kwargs: Any) -> Any:
        if not comm_hooks_of(model):
            # Without annotations: torch reads a hook's, and does not know postponed ones.
            model.register_comm_hook(
                _Buckets(model.process_group), lambda buckets, bucket: buckets.send(bucket)
            )
        return original(model, *inputs, **kwargs)

    DistributedDataParallel.forward = forward  # type: ignore[method-assign, assignment]
    _Buckets.emulations += 1
    try:
        yield
    finally:
        _Buckets.emulations -= 1
        DistributedDataParallel.forward = original  # type: ignore[method-assign]
