"""Steps of several candidates in turn, in one run: time, memory, and first whether they agree."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
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
    (measured,) = measure_on_networks(family, (case,), builds, emulation, isolates)
    return measured


def measure_on_networks(
    family: Family,
    cases: Sequence[StepCase],
    builds: Builds,
    emulation: Emulation | None,
    isolates: bool = False,
) -> list[Measured]:
    """A result for each of cases that differ by nothing but name and network. Candidates are built
    once for all of them, so who fails in one fails in all; only times differ.
    """
    first = Measured(isolates)
    measured = [first, *(replace(first, sides={}, samples={}) for _ in cases[1:])]
    on_gpu = family.device == "cuda"
    (_measure_on_gpu if on_gpu else _measure_on_cpu)(family, cases, builds, emulation, measured)
    return measured


def _enter_network(case: StepCase, emulation: Emulation | None) -> None:
    if emulation is not None and case.network is not None:
        emulation.change_network(case.network)


def _measure_on_cpu(
    family: Family,
    cases: Sequence[StepCase],
    builds: Builds,
    emulation: Emulation | None,
    measured: Sequence[Measured],
) -> None:
    """All candidates live side by side and step in turn; memory is taken from others like them.

    The memory step has a batch of one token, so that its peak is what the parameters cost
    (gathered, reduced, optimized) and next to nothing of activations.
    """
    case, first = cases[0], measured[0]
    tokens = draw_tokens(case.size, case.batch, case.length, family.device)
    candidates: dict[str, Wrapped] = {}
    for name, build in builds.items():
        with first.trying(name):
            candidates[name] = build()
    steps = {name: candidate.step_on(*tokens) for name, candidate in candidates.items()}
    steps = _warm_up(steps, PARITY_STEPS, first)
    if family.real:
        check_parity(candidates, first)
    timer = time_on_ranks if family.real else timing.timer_on("cpu")
    for case, each in zip(cases, measured, strict=True):
        _enter_network(case, emulation)
        steps = _warm_up(steps, case.warmup if each is first else 1, first)
        each.samples = timing.alternate(steps, case.steps, 0, timer)
    timed = list(steps)
    first.settings |= {name: candidates[name].settings for name in timed}
    del candidates, steps
    one_token = draw_tokens(case.size, 1, 1, family.device)
    for name in timed:

        def build_step(name: str = name) -> Step:
            return builds[name]().step_on(*one_token)

        peak = footprint.peak_on_cpu(build_step)
        for each in measured:
            each.sides[name] = Side.of(each.samples[name], peak)
    counted = "all CPU allocations of a step on one token (so: parameters, not activations)"
    first.settings["peak_bytes"] = counted


def _warm_up(steps: Mapping[str, Step], times: int, measured: Measured) -> dict[str, Step]:
    """The steps of those that have not failed, before or in it."""
    for name, step in steps.items():
        if name not in measured.failures:
            with measured.trying(name):
                for _ in range(times):
                    step()
    return {name: step for name, step in steps.items() if name not in measured.failures}


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
    family: Family,
    cases: Sequence[StepCase],
    builds: Builds,
    emulation: Emulation | None,
    measured: Sequence[Measured],
) -> None:
    """The candidates take turns on the device: build, warm up, time on every network, free, some
    times each.
    """
    case, first = cases[0], measured[0]
    blocks: dict[str, list[Block]] = {name: [] for name in builds}
    first.settings |= {
        "peak_bytes": "torch.cuda.max_memory_allocated over a step, less what was there before",
        "reserved_bytes": "torch.cuda.max_memory_reserved over a step, less what was there before",
        "device_ms": "by the device's clock, with the host a step ahead",
        "blocks": case.blocks,
    }
    tokens = draw_tokens(case.size, case.batch, case.length, family.device)
    for _ in range(case.blocks):
        for name, build in builds.items():
            if name not in first.failures:
                with first.trying(name):
                    blocks[name].append(_time_block(cases, build, tokens, emulation))
    footprint.free_device()
    for name, taken in blocks.items():
        if name in first.failures:
            continue
        # Only the first block makes the libraries' workspaces; the others find them there.
        allocated = min(block.allocated for block in taken)
        reserved = min(block.reserved for block in taken)
        for i, each in enumerate(measured):
            each.samples[name] = [sample for block in taken for sample in block.timed[i].samples]
            device_ms = [value for block in taken for value in block.timed[i].device_ms]
            each.sides[name] = Side.of(
                each.samples[name], allocated, taken[-1].collectives, device_ms, reserved
            )
        first.settings[name] = taken[-1].settings
        compiling = [block.first_s for block in taken if block.first_s is not None]
        if compiling:
            first.settings.setdefault("first_step_s", {})[name] = compiling


@dataclass(frozen=True)
class Timed:
    """One candidate's steps on one network."""

    samples: list[Sample]  # with the host in them
    device_ms: list[float]  # with the host ahead


@dataclass(frozen=True)
class Block:
    """One candidate's turn on the device. Bytes and collectives, the same on every network, are
    taken on the first.
    """

    timed: list[Timed]  # on each network
    allocated: int
    reserved: int
    collectives: int | None  # of a step
    first_s: float | None  # of the first step, where that compiles
    settings: dict[str, Any]


def _time_block(
    cases: Sequence[StepCase],
    build: Callable[[], Wrapped],
    tokens: tuple[torch.Tensor, torch.Tensor],
    emulation: Emulation | None,
) -> Block:
    case = cases[0]
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
        return _time_steps(cases, build(), tokens, emulation, left, held)


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
    cases: Sequence[StepCase],
    candidate: Wrapped,
    tokens: tuple[torch.Tensor, torch.Tensor],
    emulation: Emulation | None,
    left: int,
    held: int,
) -> Block:
    case, step = cases[0], candidate.step_on(*tokens)
    _enter_network(case, emulation)
    compiles = case.through == "compile" or case.compiled
    first = round(timing.time_on_cuda(step).step_ms / 1e3, 2) if compiles else None
    timed = [_time_on_network(case, step, case.warmup, emulation)]
    called = sum(emulation.calls.values()) if emulation else 0
    allocated, reserved = footprint.peaks_on_cuda(step)
    sent = sum(emulation.calls.values()) - called if emulation is not None else None
    if sent == 0 and "captured" not in candidate.settings:  # a graph's messages go unseen
        raise BenchmarkError(f"{case.name}: no collective went over the emulated network")
    for other in cases[1:]:
        _enter_network(other, emulation)
        timed.append(_time_on_network(other, step, 1, emulation))
    return Block(timed, allocated - left, reserved - held, sent, first, candidate.settings)


def _time_on_network(case: StepCase, step: Step, warmup: int, emulation: Emulation | None) -> Timed:
    """Steps are timed with the host in them, then as many with the host ahead."""
    rounds = math.ceil(case.steps / case.blocks)
    samples = timing.alternate({"": step}, rounds, warmup, timing.time_on_cuda)[""]
    alone = []
    if emulation is not None:
        hold = emulation.links_of(torch.device("cuda", 0)).delay
        for _ in range(rounds):
            took, _ = timing.time_ahead(step, hold, samples, nullcontext())
            alone.append(took)
    return Timed(samples, alone)
