"""Some steps of a Plan on this machine, before it is decided for: the model's own kernels in their
order, this host's work for each unit and operator, the engine's copies, its memory.

On a GPU one process is a rank of an emulated group, whose network is the cluster file's; all else
is real. On a CPU the ranks are real too, and talk by gloo.
"""

from __future__ import annotations

import copy
import math
import os
import statistics
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.calibration.calibrate import ask_ranks
from shardwise.description.cluster import Cluster
from shardwise.description.example import Call, loss_of_output
from shardwise.description.foreign import (
    build_on_host,
    count_values,
    find_function,
    is_foreign,
)
from shardwise.description.language_model import OPTIMIZER
from shardwise.description.tracing.real_run import free_bytes, with_values
from shardwise.description.tracing.torch_private import loaded_compilers, pytree
from shardwise.description.tracing.trace import find_loss
from shardwise.description.workload import Workload, row_of
from shardwise.emulation.collectives import emulate
from shardwise.emulation.engines import Subject, wrap
from shardwise.emulation.networks import ClusterNetwork
from shardwise.emulation.run import joined
from shardwise.engine.api import local
from shardwise.engine.capture import capture
from shardwise.engine.engine import microbatches
from shardwise.engine.torch_private import buffers_of, compiled_modules, parameters_of
from shardwise.errors import UserError
from shardwise.planning.memory import count_kept
from shardwise.planning.plan import Plan
from shardwise.predict.describe import as_arguments, recompute
from shardwise.predict.ranking import HOST_BOUND, Captured, Trial
from shardwise.predict.sources import as_example
from shardwise.profiling import footprint, timing
from shardwise.profiling.timing import Sample, Step

WARMUP, STEPS = 3, 5
# And so long: on a GPU until its clock is steady, and while it swings about its mean.
WARM_S, TIMED_S = 1.0, 1.0
# On a CPU: seconds, and steps at most. The first ten of a process take up to a fifth more than the
# later ones, which swing by a tenth for seconds (docs/log.md).
HOST_WARM, HOST_TIMED = (1.5, 12), (2.0, 60)
# On a GPU that waits for its host, which is shared and swings for seconds: so long.
WAITING_S = 2.0
# From so much of the step on that the host takes to issue it, the step is tried as a captured one.
MAY_PAY = 0.5
CAPTURING = 9  # calls until a captured step replays, and it is known whether that pays
RANKS_PER_CORE = 2  # real ones on a CPU, at most


@dataclass(frozen=True)
class Program:
    """A model, its inputs and its loss, as `search` is given them. All ranks can build it again if
    it can be sent to them.
    """

    model: Any
    inputs: Any = None
    loss: Any = None
    about: str = ""  # what its step does beside training the model: another's trial is not its own
    compiled: tuple[str, ...] = ()  # modules of it, which a copy is not

    @property
    def may_capture(self) -> bool:
        """Whether a trial may try its step as a captured one: it is not one already."""
        return True

    @classmethod
    def of(cls, model: Any, inputs: Any = None, loss: Any = None) -> Program:
        known = compiled_modules(model) if isinstance(model, nn.Module) else ()
        return cls(model, inputs, loss, compiled=known)

    def start(self, plan: Plan, workload: Workload, device: torch.device) -> Step:
        """The model under the Plan, on this rank; one whole training step of it."""
        row = self._sizes(plan, workload)
        if isinstance(self.model, str) and not is_foreign(self.model):
            subject = Subject(self.model, row[0], workload.sequence, (row,))
            built = subject.build()
            calls = [Call(inputs, {}) for inputs in subject.draw_rows(device)[0]]

            def loss(model: nn.Module, call: Call) -> Tensor:
                return subject.loss(model, call.args)

        else:
            built, loss = self._build(), self._loss
            calls = [self._call(built, replace(workload, micro_batch=n), device) for n in row]
        recompute(built, workload.checkpoint)
        wrap("shardwise", built, replace(plan, units=None), device)
        for module in built.modules():
            for name, buffer in module.named_buffers(recurse=False):
                buffers_of(module)[name] = buffer.to(device)
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

    def _build(self) -> nn.Module:
        """Parameters have no memory; buffers do: only a constructor knows what is in them."""
        built = self.model
        if isinstance(built, str):
            try:
                with _parameters_on_meta():
                    built = build_on_host(built)
            except Exception:
                built = build_on_host(built)  # it reads what it has just made
            compiled = compiled_modules(built)
        else:
            compiled = self.compiled
        shapes = {id(p): _shape_of(p) for p in built.parameters()}
        copied: nn.Module = copy.deepcopy(built, shapes)
        for name in compiled:
            copied.get_submodule(name).compile()
        return copied.train()

    def _call(self, model: nn.Module, workload: Workload, device: torch.device) -> Call:
        example = as_example(self.inputs, self.model)
        given = workload if example is None else example.sized(workload.micro_batch)
        args, kwargs = as_arguments(model, given)
        torch.default_generator.manual_seed(1 + dist.get_rank())
        if device.type == "cuda":
            torch.cuda.manual_seed(1 + dist.get_rank())

        def fill(value: Any, name: str = "") -> Any:
            count = count_values(model, name)  # two tokens alone are not what users train on
            return pytree.tree_map(lambda leaf: with_values(leaf, device, count), value)

        return Call(fill(args), {name: fill(value, name) for name, value in kwargs.items()})

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
    whole can be built.
    """
    register = nn.Module.register_parameter

    def keep_shape(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta:
            parameters_of(module)[name] = _shape_of(parameter)

    nn.Module.register_parameter = keep_shape  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _shape_of(parameter: nn.Parameter) -> nn.Parameter:
    """The same without memory."""
    shape = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    shape.__dict__.update(parameter.__dict__)
    return shape


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
        found: Trial = ask_ranks(_run_rank, (program, plan, workload), plan.world)
        return found
    device = torch.device("cuda", torch.cuda.current_device())
    needed, free = count_kept(plan).at_once, free_bytes(device)
    if needed > free:
        raise UserError(
            f"{plan.title} keeps {needed / 1e9:.1f} GB on a rank without activations, and the GPU "
            f"has {free / 1e9:.1f} GB free"
        )
    footprint.meet_libraries(device)
    left = footprint.free_device()
    try:
        # A GPU that waits for the garbage collector clocks up.
        with (
            joined(0, plan.world),
            emulate(ClusterNetwork(cluster)),
            timing.no_garbage_collection(),
        ):
            step = program.start(plan, workload, device)
            timing.repeat(step, timing.time_on_cuda, WARMUP, WARM_S)
            samples = time_steps(step)
            allocated, reserved = footprint.peaks_on_cuda(step)
            captured, reason = try_captured(program, step, samples, left)
            del step
    except torch.OutOfMemoryError as error:
        raise UserError(f"{plan.title} ran out of memory when it was tried") from error
    finally:
        forget_compiled()
        footprint.free_device()
    trial = sum_up(samples, allocated - left, reserved - left, "one rank, its network emulated")
    return replace(trial, captured=captured, uncaptured=reason)


def time_steps(step: Step) -> list[Sample]:
    """On a GPU, one after the other; for longer if it waits for the host."""
    samples = timing.repeat(step, timing.time_on_cuda, STEPS, TIMED_S)
    if statistics.median(s.cpu_ms / s.step_ms for s in samples) >= HOST_BOUND:
        samples += timing.repeat(step, timing.time_on_cuda, 1, WAITING_S - TIMED_S)
    return samples


def try_captured(
    program: Program, step: Step, samples: Sequence[Sample], left: int
) -> tuple[Captured | None, str]:
    """The same step replayed by `sw.capture`, where its host takes long enough that this may pay;
    or why it cannot be captured. `left`: bytes that are not the step's.
    """
    waits = statistics.median(s.cpu_ms / s.step_ms for s in samples) >= MAY_PAY
    if not waits or not program.may_capture:
        return None, ""
    captured = capture(step)
    torch.cuda.reset_peak_memory_stats()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the trial says why
        for _ in range(CAPTURING):
            captured()
    if captured.reason is not None:
        return None, captured.reason
    timing.repeat(captured, timing.time_on_cuda, WARMUP, TIMED_S)
    times = [s.step_ms for s in timing.repeat(captured, timing.time_on_cuda, STEPS, TIMED_S)]
    torch.cuda.synchronize()
    reserved = torch.cuda.max_memory_reserved() - left
    return Captured(statistics.median(times), timing.spread(times), reserved), ""


def forget_compiled() -> None:
    """What one trial compiled is no other's: torch gives up compiling code that it has compiled
    for too many models, and keeps their memory.
    """
    if loaded_compilers():
        torch.compiler.reset()


def _run_rank(program: Program, plan: Plan, workload: Workload, writer: Connection) -> None:
    device = torch.device("cpu")
    step = program.start(plan, workload, device)
    timer = timing.time_on_host(dist.barrier)
    took = torch.tensor(timing.repeat(step, timer, WARMUP)[-1].step_ms)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)  # all ranks step equally often
    once = took.item() / 1e3
    timing.repeat(step, timer, count_steps(once, *HOST_WARM))
    samples = timing.repeat(step, timer, count_steps(once, *HOST_TIMED))
    everybody: list[list[Sample]] = [[] for _ in range(plan.world)]
    dist.all_gather_object(everybody, samples)
    slowest = [max(each, key=lambda s: s.step_ms) for each in zip(*everybody, strict=True)]
    del step
    peak = footprint.peak_on_cpu(lambda: program.start(plan, workload, device))
    if dist.get_rank() == 0:
        writer.send(sum_up(slowest, peak, None, f"{plan.world} ranks, gloo"))
    dist.barrier()
    dist.destroy_process_group()


def count_steps(once: float, seconds: float, most: int) -> int:
    """How many make up so many seconds, of steps that take `once`."""
    return max(STEPS, min(most, math.ceil(seconds / max(once, 1e-6))))


def sum_up(samples: list[Sample], peak: int, reserved: int | None, how: str) -> Trial:
    times = [sample.step_ms for sample in samples]
    return Trial(
        statistics.median(times),
        timing.spread(times),
        statistics.median(sample.cpu_ms for sample in samples),
        peak,
        reserved,
        how,
    )
