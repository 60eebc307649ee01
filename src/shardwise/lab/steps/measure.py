"""Steps of several candidates in turn, in one run: time, memory, and first whether they agree."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.calibration.trial import forget_compiled
from shardwise.description.language_model import draw_tokens
from shardwise.emulation.collectives import Emulation
from shardwise.lab.processes import explain_failure, time_on_ranks
from shardwise.lab.rows import say
from shardwise.lab.steps.cases import Family, StepCase
from shardwise.lab.steps.engines import Wrapped, compare_tensors
from shardwise.profiling import footprint, timing
from shardwise.profiling.timing import Sample, Side, Step

TOLERANCE = 1e-5
PARITY_STEPS = 3
LEFT_OVER = 2**28  # bytes that may stay on the device between them without a word


class BenchmarkError(Exception):
    """A comparison that would not be worth its figures."""


Builds = Mapping[str, Callable[[], Wrapped]]  # the first one is ours


@dataclass
class Measured:
    """What candidates took. `parity` is the largest relative difference from ours; one that differs
    too much is not timed, and `failures` says so. If it `isolates`, errors of a candidate go there
    too, and the others are measured.
    """

    isolates: bool = False
    sides: dict[str, Side] = field(default_factory=dict)
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    parity: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def trying(self, name: str) -> Iterator[None]:
        """What is done for one candidate."""
        try:
            yield
        except Exception as error:
            if not self.isolates:
                raise
            self.failures[name] = explain_failure(error)
            say(f"  {name}: {self.failures[name]}")


def measure(
    family: Family,
    case: StepCase,
    builds: Builds,
    emulation: Emulation | None,
    isolates: bool = False,
) -> Measured:
    measured = Measured(isolates)
    on_gpu = family.device == "cuda"
    (_measure_on_gpu if on_gpu else _measure_on_cpu)(family, case, builds, emulation, measured)
    return measured


def _measure_on_cpu(
    family: Family, case: StepCase, builds: Builds, emulation: Emulation | None, measured: Measured
) -> None:
    """All candidates live side by side and step in turn; memory is taken from others like them.

    The memory step has a batch of one token, so that its peak is what the parameters cost
    (gathered, reduced, optimized) and next to nothing of activations.
    """
    tokens = draw_tokens(case.size, case.batch, case.length, family.device)
    candidates: dict[str, Wrapped] = {}
    for name, build in builds.items():
        with measured.trying(name):
            candidates[name] = build()
    steps = {name: candidate.step_on(*tokens) for name, candidate in candidates.items()}
    for name, step in steps.items():
        with measured.trying(name):
            for _ in range(PARITY_STEPS):
                step()
    if family.real:
        check_parity(candidates, measured)
    timer = time_on_ranks if family.real else timing.timer_on("cpu")
    steps = {name: step for name, step in steps.items() if name not in measured.failures}
    measured.samples = timing.alternate(steps, case.steps, case.warmup, timer)
    measured.settings = {name: candidates[name].settings for name in steps}
    del candidates, steps
    one_token = draw_tokens(case.size, 1, 1, family.device)
    for name, samples in measured.samples.items():

        def build_step(name: str = name) -> Step:
            return builds[name]().step_on(*one_token)

        measured.sides[name] = Side.of(samples, footprint.peak_on_cpu(build_step))
    counted = "all CPU allocations of a step on one token (so: parameters, not activations)"
    measured.settings["peak_bytes"] = counted


def check_parity(candidates: Mapping[str, Wrapped], measured: Measured) -> None:
    """Compare what all have after the same steps with the first one's; a collective call. Where one
    gives no gradients, its parameters are compared.
    """
    ours, *others = (name for name in candidates if name not in measured.failures)
    mine = candidates[ours].whole()
    for name in others:
        with measured.trying(name):
            other = candidates[name].whole()
            common = mine if mine.keys() <= other.keys() else dict(_parameters(mine))
            worst, where = compare_tensors(common, other)
            measured.parity[name] = worst
            if worst > TOLERANCE:
                measured.failures[name] = (
                    f"after {PARITY_STEPS} steps from the same weights and inputs, {where} differs "
                    f"by {worst:.1e} of its largest value (allowed {TOLERANCE:.0e}); nothing was "
                    "timed"
                )


def _parameters(tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, each) for name, each in tensors.items() if not name.endswith("gradient"))


def _measure_on_gpu(
    family: Family, case: StepCase, builds: Builds, emulation: Emulation | None, measured: Measured
) -> None:
    """The candidates take turns on the device: build, warm up, time, free, some times each."""
    blocks: dict[str, list[Block]] = {name: [] for name in builds}
    measured.settings |= {
        "peak_bytes": "torch.cuda.max_memory_allocated over a step, less what was there before",
        "reserved_bytes": "torch.cuda.max_memory_reserved over a step, less what was there before",
        "device_ms": "by the device's clock, with the host a step ahead",
        "blocks": case.blocks,
    }
    tokens = draw_tokens(case.size, case.batch, case.length, family.device)
    for _ in range(case.blocks):
        for name, build in builds.items():
            if name not in measured.failures:
                with measured.trying(name):
                    blocks[name].append(_time_block(case, build, tokens, emulation))
    footprint.free_device()
    for name, taken in blocks.items():
        if name in measured.failures:
            continue
        # Only the first block makes the libraries' workspaces; the others find them there.
        measured.samples[name] = [sample for block in taken for sample in block.samples]
        measured.sides[name] = Side.of(
            measured.samples[name],
            min(block.allocated for block in taken),
            taken[-1].collectives,
            [value for block in taken for value in block.device_ms],
            min(block.reserved for block in taken),
        )
        measured.settings[name] = taken[-1].settings
        first = [block.first_s for block in taken if block.first_s is not None]
        if first:
            measured.settings.setdefault("first_step_s", {})[name] = first


@dataclass(frozen=True)
class Block:
    """One candidate's turn on the device."""

    samples: list[Sample]
    device_ms: list[float]
    allocated: int
    reserved: int
    collectives: int | None  # of a step
    first_s: float | None  # of the first step, where that compiles
    settings: dict[str, Any]


def _time_block(
    case: StepCase,
    build: Callable[[], Wrapped],
    tokens: tuple[torch.Tensor, torch.Tensor],
    emulation: Emulation | None,
) -> Block:
    """Steps are timed with the host in them, then as many with the host ahead."""
    if case.compiled:
        forget_compiled()
    left = footprint.free_device(workspaces=case.captures)
    held = torch.cuda.memory_reserved()
    if left > LEFT_OVER:
        say(
            f"warning: {left / 2**20:.0f} MiB stayed on the device after the last candidate: "
            f"{footprint.largest_blocks()}"
        )
    with insist_on_static_steps() if case.captures else nullcontext():
        return _time_steps(case, build(), tokens, emulation, left, held)


@contextmanager
def insist_on_static_steps() -> Iterator[None]:
    """A step that is not captured, or leaves its arena, is an error: it would be timed as if it
    were.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the step is not captured")
        warnings.filterwarnings("error", message=r"Plan\.memory='arena'")
        yield


def _time_steps(
    case: StepCase,
    candidate: Wrapped,
    tokens: tuple[torch.Tensor, torch.Tensor],
    emulation: Emulation | None,
    left: int,
    held: int,
) -> Block:
    step = candidate.step_on(*tokens)
    compiles = case.through == "compile" or case.compiled
    first = round(timing.time_on_cuda(step).step_ms / 1e3, 2) if compiles else None
    rounds = math.ceil(case.steps / case.blocks)
    taken = timing.alternate({"": step}, rounds, case.warmup, timing.time_on_cuda)[""]
    alone = []
    if emulation is not None:
        hold = emulation.links_of(torch.device("cuda", 0)).delay
        for _ in range(rounds):
            took, _ = timing.time_ahead(step, hold, taken, nullcontext())
            alone.append(took)
    called = sum(emulation.calls.values()) if emulation else 0
    allocated, reserved = footprint.peaks_on_cuda(step)
    sent = sum(emulation.calls.values()) - called if emulation is not None else None
    if sent == 0 and "captured" not in candidate.settings:  # a graph's messages go unseen
        raise BenchmarkError(f"{case.name}: no collective went over the emulated network")
    return Block(taken, alone, allocated - left, reserved - held, sent, first, candidate.settings)
