"""Some steps of a Plan on this machine, before it is decided for: the model's own kernels in their
order, this host's work for each unit and operator, the engine's copies, its memory.

On a GPU one process is a rank of an emulated group, whose network is the cluster file's; all else
is real. On a CPU the ranks are real too, and talk by gloo.
"""

from __future__ import annotations

import copy
import functools
import multiprocessing
import os
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwise.description.cluster import Cluster
from shardwise.description.example import Call, loss_of_output
from shardwise.description.foreign import build_on_host, find_function, is_foreign
from shardwise.description.language_model import OPTIMIZER
from shardwise.description.tracing.real_run import free_bytes, with_values
from shardwise.description.tracing.torch_private import pytree
from shardwise.description.tracing.trace import find_loss
from shardwise.description.workload import Workload, row_of
from shardwise.emulation.collectives import emulate
from shardwise.emulation.engines import Subject
from shardwise.emulation.networks import ClusterNetwork
from shardwise.emulation.run import joined
from shardwise.engine.api import local, shard
from shardwise.engine.engine import microbatches
from shardwise.engine.state import materialize
from shardwise.engine.torch_private import buffers_of, local_of, parameters_of
from shardwise.errors import UserError
from shardwise.planning.memory import count_kept
from shardwise.planning.plan import Plan
from shardwise.predict.describe import as_arguments, find_blocks
from shardwise.predict.ranking import Trial
from shardwise.predict.sources import as_example
from shardwise.profiling import footprint, timing
from shardwise.profiling.timing import Sample, Step
from shardwise.trainer.group import open_group
from shardwise.trainer.launch import start_ranks

WARMUP, STEPS = 3, 5
# And so long on a GPU: until its clock is steady, and while it swings about its mean.
WARM_S, TIMED_S = 1.0, 1.0
RANKS_PER_CORE = 2  # real ones on a CPU, at most


@dataclass(frozen=True)
class Program:
    """A model, its inputs and its loss, as `search` is given them. All ranks can build it again if
    it can be sent to them.
    """

    model: Any
    inputs: Any = None
    loss: Any = None

    def start(self, plan: Plan, workload: Workload, device: torch.device) -> Step:
        """The model under the Plan, on this rank; one whole training step of it."""
        row = self._sizes(plan, workload)
        if isinstance(self.model, str) and not is_foreign(self.model):
            subject = Subject(self.model, row[0], workload.sequence, (row,))
            if workload.checkpoint != "none":
                raise UserError("a preset that recomputes is not tried")
            built = subject.build()
            calls = [Call(inputs, {}) for inputs in subject.draw_rows(device)[0]]

            def loss(model: nn.Module, call: Call) -> Tensor:
                return subject.loss(model, call.args)

        else:
            built, loss = self._build(workload), self._loss
            calls = [self._call(built, replace(workload, micro_batch=n), device) for n in row]
        shard(built, replace(plan, units=None))
        with warnings.catch_warnings():
            # torch's initialisers warn of DTensors on a host; `_fill` replaces what they draw.
            warnings.simplefilter("ignore", UserWarning)
            materialize(built, device)
        _fill(built)
        _move_buffers(built, device)
        trained = [p for p in built.parameters() if p.requires_grad]
        optimizer = local(torch.optim.AdamW(trained, **OPTIMIZER))

        def step() -> None:
            optimizer.zero_grad()
            for call in microbatches(built, calls):
                (loss(built, call) / (len(calls) * plan.world)).backward()
            optimizer.step()

        return step

    def _sizes(self, plan: Plan, workload: Workload) -> tuple[int, ...]:
        """Of this rank's micro-batches."""
        if workload.sizes is None:
            return (workload.micro_batch,) * workload.micro_batches
        return workload.sizes[row_of(dist.get_rank(), plan.mesh, len(workload.sizes))]

    def _build(self, workload: Workload) -> nn.Module:
        if isinstance(self.model, str):
            try:
                with _parameters_on_meta():
                    built = build_on_host(self.model)
            except Exception:
                built = build_on_host(self.model)  # it reads what it has just made
        else:
            built = copy.deepcopy(self.model)
        built.train()
        if workload.checkpoint != "none":
            for name in find_blocks(built):
                block = built.get_submodule(name)
                reentrant = workload.checkpoint == "reentrant"
                again = functools.partial(checkpoint, block.forward, use_reentrant=reentrant)
                block.forward = again
        return built

    def _call(self, model: nn.Module, workload: Workload, device: torch.device) -> Call:
        example = as_example(self.inputs, self.model)
        given = workload if example is None else example.sized(workload.micro_batch)
        torch.manual_seed(1 + dist.get_rank())
        filled = pytree.tree_map(
            lambda value: with_values(value, device), tuple(as_arguments(model, given))
        )
        return Call(*filled)

    def _loss(self, model: nn.Module, call: Call) -> Tensor:
        loss = self.loss
        if isinstance(loss, str):
            beside = self.model if isinstance(self.model, str) else ""
            loss = find_function(loss, "--loss", beside)
        if loss is not None:
            found: Tensor = loss_of_output(loss)(model, *call.args, **call.kwargs)
            return found
        return find_loss(model(*call.args, **call.kwargs))[0]


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters lose their memory as soon as a module has them, so that a model that fits nowhere
    whole can be built. Buffers keep theirs: only a constructor knows what is in them.
    """
    register = nn.Module.register_parameter

    def keep_shape(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta:
            shape = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
            shape.__dict__.update(parameter.__dict__)
            parameters_of(module)[name] = shape

    nn.Module.register_parameter = keep_shape  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@torch.no_grad()
def _fill(model: nn.Module) -> None:
    """Small random numbers: a GPU's clock depends on the values it multiplies."""
    for parameter in model.parameters():
        own = local_of(parameter)
        if own.is_floating_point():
            own.normal_(std=0.02) if own.ndim > 1 else own.fill_(1.0)


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            buffers_of(module)[name] = buffer.to(device)


def can_try(cluster: Cluster, world: int) -> str:
    """Why a Plan for so many ranks of this cluster cannot be tried here; empty if it can."""
    if cluster.host.communicates:
        most = RANKS_PER_CORE * (os.cpu_count() or 1)
        return "" if world <= most else f"{world} ranks on {most // RANKS_PER_CORE} cores"
    return "" if torch.cuda.is_available() else "there is no GPU here"


def try_plan(program: Program, plan: Plan, workload: Workload, cluster: Cluster) -> Trial:
    """Run some steps; an error where the machine cannot, or where the model does not."""
    why = can_try(cluster, plan.world)
    if why:
        raise UserError(f"{plan.title} cannot be tried: {why}")
    if cluster.host.communicates:
        return _try_on_ranks(program, plan, workload)
    device = torch.device("cuda", torch.cuda.current_device())
    needed, free = count_kept(plan).at_once, free_bytes(device)
    if needed > free:
        raise UserError(
            f"{plan.title} keeps {needed / 1e9:.1f} GB on a rank without activations, and the GPU "
            f"has {free / 1e9:.1f} GB free"
        )
    left, held = footprint.free_device(), torch.cuda.memory_reserved()
    try:
        with joined(0, plan.world), emulate(ClusterNetwork(cluster)):
            step = program.start(plan, workload, device)
            _repeat(step, timing.time_on_cuda, WARMUP, WARM_S)
            samples = _repeat(step, timing.time_on_cuda, STEPS, TIMED_S)
            allocated, reserved = footprint.peaks_on_cuda(step)
            del step
    except torch.OutOfMemoryError as error:
        raise UserError(f"{plan.title} ran out of memory when it was tried") from error
    finally:
        footprint.free_device()
    return _sum_up(samples, allocated - left, reserved - held, "one rank, its network emulated")


def _try_on_ranks(program: Program, plan: Plan, workload: Workload) -> Trial:
    reader, writer = multiprocessing.get_context("spawn").Pipe(duplex=False)
    told: list[Trial] = []

    def listen() -> None:
        try:
            told.append(reader.recv())
        except EOFError:  # the ranks failed, and say so themselves
            return

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        start_ranks(_run_rank, (program, plan, workload, writer), plan.world)
    finally:
        writer.close()
    listener.join()
    return told[0]


def _run_rank(program: Program, plan: Plan, workload: Workload, writer: Connection) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // plan.world))
    open_group("gloo")
    device = torch.device("cpu")
    step = program.start(plan, workload, device)
    timer = timing.time_on_host(dist.barrier)
    _repeat(step, timer, WARMUP, 0.0)
    samples = _repeat(step, timer, STEPS, 0.0)
    everybody: list[list[Sample]] = [[] for _ in range(plan.world)]
    dist.all_gather_object(everybody, samples)
    slowest = [max(each, key=lambda s: s.step_ms) for each in zip(*everybody, strict=True)]
    del step
    peak = footprint.peak_on_cpu(lambda: program.start(plan, workload, device))
    if dist.get_rank() == 0:
        writer.send(_sum_up(slowest, peak, None, f"{plan.world} ranks, gloo"))
    dist.barrier()
    dist.destroy_process_group()


def _repeat(
    step: Step, timer: Callable[[Step], Sample], least: int, seconds: float
) -> list[Sample]:
    samples: list[Sample] = []
    began = time.perf_counter()
    with timing.no_garbage_collection() if seconds else nullcontext():
        while len(samples) < least or time.perf_counter() - began < seconds:
            samples.append(timer(step))
    return samples


def _sum_up(samples: list[Sample], peak: int, reserved: int | None, how: str) -> Trial:
    times = [sample.step_ms for sample in samples]
    return Trial(
        statistics.median(times),
        timing.spread(times),
        statistics.median(sample.cpu_ms for sample in samples),
        peak,
        reserved,
        how,
    )
