"""`shardwise bench soak`: thousands of captured steps, each with new inputs, a learning rate of its
own and clipping. Memory must not grow, and losses must be those of eager steps, bit for bit.

A twin takes the first steps eagerly and is let go before the captured run begins, so that memory
is that run's alone. At its end another one takes over its parameters and optimizer state, and both
go on together.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import shardwise as sw
from shardwise.children import ChildFailed
from shardwise.description.language_model import compute_loss, make_model
from shardwise.description.preset import Size, bench_size
from shardwise.emulation.collectives import Network, emulate
from shardwise.emulation.run import joined
from shardwise.lab.charts import draw_curves
from shardwise.lab.processes import run_fresh
from shardwise.lab.rows import RowFile, say
from shardwise.profiling import footprint
from shardwise.profiling.results import Row, print_table
from shardwise.trainer.group import use_deterministic_kernels

SIZE = bench_size(layers=2, d_model=128, d_ff=512, heads=4, vocab=256)
TINY = bench_size(layers=2, d_model=16, d_ff=32, heads=2, vocab=64)
BATCH, RATE, CLIP = 4, 1e-3, 1.0
WORLD = 8  # emulated


@dataclass(frozen=True)
class Soak:
    """One run. `emulated`: as a rank of 8, whose gathers and reduces bring made-up values; else as
    the only rank of a real group.
    """

    name: str
    emulated: bool
    memory: str  # of the Plan
    steps: int
    eager: int  # of them the first, once more without a graph
    every: int  # steps between two looks at memory
    device: str

    @property
    def size(self) -> Size:
        """A host has no graphs: there it only tries the path."""
        return SIZE if self.device == "cuda" else TINY

    @property
    def length(self) -> int:
        return 128 if self.device == "cuda" else 8

    @property
    def tail(self) -> int:
        """Steps beside a twin when the run is over."""
        return max(4, self.eager // 10)


def soaks(steps: int, eager: int, device: str) -> list[Soak]:
    every = max(1, min(1000, steps // 4))
    return [
        Soak(name, emulated, memory, steps, min(eager, steps), every, device)
        for name, emulated, memory in (
            ("nccl1", False, "allocator"),
            ("emulated8", True, "arena"),
        )
    ]


class Run:
    """A model, its optimizer and its step."""

    def __init__(self, soak: Soak, device: torch.device, captured: bool) -> None:
        model = make_model(soak.size, str(device))
        plan = sw.Plan.of(
            "zero3", dist.get_world_size(), memory=soak.memory, reduce_dtype="float32",
            compute_dtype="bfloat16" if device.type == "cuda" else "float32",
        )  # fmt: skip
        self.model, self.device = sw.shard(model, plan), device
        # The eager optimizer is as sw.capture makes that of a program: it counts and reads its rate
        # on the device.
        on_device = not captured and device.type == "cuda"
        rate: Any = torch.tensor(RATE, device=device) if on_device else RATE
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=rate, capturable=on_device, fused=True
        )
        self.call: Callable[[Tensor, Tensor], Tensor] = self.step
        self.captured = sw.capture(self.step) if captured else None
        if self.captured is not None:
            self.call = self.captured

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = compute_loss(self.model, tokens, targets)
        loss.backward()
        sw.clip_grad_norm(self.model, CLIP)
        self.optimizer.step()
        return loss.detach()

    def set_rate(self, rate: float) -> None:
        (group,) = self.optimizer.param_groups
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate

    @torch.no_grad()
    def take_over(self, other: Run) -> None:
        """Its parameters and optimizer state."""
        pairs = zip(self.model.parameters(), other.model.parameters(), strict=True)
        for mine, theirs in pairs:
            _local(mine).copy_(_local(theirs))
            state = self.optimizer.state[mine]
            for key, value in other.optimizer.state[theirs].items():
                _local(state[key]).copy_(_local(value))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def rate_at(step: int, steps: int) -> float:
    """A warm-up, then a cosine down to a tenth."""
    if step < 100:
        return RATE * (step + 1) / 100
    return RATE * (0.55 + 0.45 * math.cos(math.pi * step / (steps + 1)))


def batches(
    soak: Soak, first: int, count: int, device: torch.device
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The inputs of steps, whoever asks: random tokens, and what is to be learnt of each."""
    generator, shape = torch.Generator(device), (BATCH, soak.length)
    for step in range(first, first + count):
        drawn = generator.manual_seed(step)
        tokens = torch.randint(0, soak.size.vocab, shape, generator=drawn, device=device)
        yield step, tokens, (5 * tokens + 1) % soak.size.vocab


def train(
    run: Run, soak: Soak, first: int, count: int, look: Callable[[int], None] = lambda _: None
) -> Tensor:
    """The losses of so many steps; `look` after every so many of them."""
    losses = torch.zeros(count, device=run.device)
    for step, tokens, targets in batches(soak, first, count, run.device):
        run.set_rate(rate_at(step, soak.steps))
        losses[step - first] = run.call(tokens, targets)
        if (step + 1) % soak.every == 0:
            look(step + 1)
    return losses.cpu()


def measure(soak: Soak) -> Row:
    """One run, in a process of its own."""
    with _group(soak) as device:
        cuda = device.type == "cuda"
        began = time.monotonic()
        expected = train(Run(soak, device, captured=False), soak, 0, soak.eager)
        eager_s = time.monotonic() - began
        if cuda:
            footprint.free_device()
        run = Run(soak, device, captured=True)
        samples: list[dict[str, float]] = []
        began = time.monotonic()

        def look(step: int) -> None:
            sample = {"step": step}
            if cuda:
                torch.cuda.synchronize()
                sample["allocated"] = torch.cuda.memory_allocated()
                sample["reserved"] = torch.cuda.memory_reserved()
            samples.append(sample | {"seconds": round(time.monotonic() - began, 2)})
            if step % (5 * soak.every) == 0:
                say(f"  {step} of {soak.steps} steps, {samples[-1]['seconds']:.0f} s")

        losses = train(run, soak, 0, soak.steps, look)
        seconds = time.monotonic() - began
        assert run.captured is not None
        twin = Run(soak, device, captured=False)
        train(twin, soak, 0, 2)  # makes its optimizer's state
        twin.take_over(run)
        ends = [train(each, soak, soak.steps, soak.tail) for each in (twin, run)]
        reserved = [sample["reserved"] for sample in samples] if cuda else []
        return {
            "steps": soak.steps,
            "captured": bool(run.captured.recordings),
            "reason": run.captured.reason,
            "seconds": round(seconds, 1),
            "step_ms": 1e3 * seconds / soak.steps,
            "eager_ms": 1e3 * eager_s / soak.eager,
            "growth_bytes": max(reserved) - reserved[0] if cuda else None,
            "samples": samples,
            "head": compare(expected, losses[: soak.eager]),
            "tail": compare(*ends),
            "losses": [float(losses[0]), float(losses[-1])],
            "curve": losses[:: max(1, soak.steps // 200)].tolist(),
        }


def compare(eager: Tensor, captured: Tensor) -> Row:
    """How many losses differ in any bit, and the most by which one does."""
    differ = eager.view(torch.int32) != captured.view(torch.int32)
    apart = (eager - captured).abs()[differ]
    return {
        "steps": len(eager),
        "differ": int(differ.sum()),
        "largest": float(apart.max()) if len(apart) else 0.0,
    }


@contextmanager
def _group(soak: Soak) -> Iterator[torch.device]:
    """One rank's process group; on a GPU with kernels that add in one order."""
    cuda = soak.device == "cuda"
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    torch.set_num_threads(1)
    with ExitStack() as stack:
        if cuda:
            use_deterministic_kernels()
            # A graph would fill memory at every replay, and an eager step as well.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
            torch.cuda.set_device(device)
        if soak.emulated:
            stack.enter_context(joined(0, WORLD))
            stack.enter_context(emulate(Network()))
        else:
            dist.init_process_group(
                "nccl" if cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1,
                device_id=device if cuda else None,
            )  # fmt: skip
            stack.callback(dist.destroy_process_group)
        yield device


def run(arguments: argparse.Namespace) -> None:
    """Run by run; the JSON is written after each."""
    steps, eager = (20, 10) if arguments.quick else (arguments.steps, arguments.eager)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        say("no CUDA device here: nothing is captured, and figures are of the path alone")
    planned = soaks(steps, eager, device)
    size, length = planned[0].size, planned[0].length
    settings = f"{BATCH} x {length} tokens, zero3, fused AdamW, rates of a cosine, norm {CLIP}"
    file = RowFile.of(arguments, model=size.describe(), settings=settings)
    file.rows = [row for row in file.rows if "failure" not in row]  # those are tried again
    for soak in file.missing(planned, lambda soak: soak.name):
        say(f"{soak.name}: {soak.steps} captured steps")
        row: Row = {"key": soak.name, "case": dataclasses.asdict(soak)}
        try:
            row |= run_fresh(measure, soak)
        except ChildFailed as error:
            say(str(error))
            row["failure"] = str(error).strip().splitlines()[-1]
        file.add(row)
    if arguments.plot is not None:
        arguments.plot.write_text(draw(file.rows), encoding="utf-8")
    show(file.rows, file.facts)


def show(rows: list[Row], facts: dict[str, Any]) -> None:
    lines = []
    for row in rows:
        if "failure" in row:
            continue
        grown = row["growth_bytes"]
        lines.append(
            [row["key"], f"{row['steps']:,}", f"{row['step_ms']:.2f}", f"{row['eager_ms']:.2f}",
             "-" if grown is None else f"{grown / 2**20:.1f}",
             *(f"{row[part]['differ']}/{row[part]['steps']}" for part in ("head", "tail")),
             f"{max(row['head']['largest'], row['tail']['largest']):.0e}"]
        )  # fmt: skip
    heads = ["run", "steps", "ms", "eager", "MiB more", "differ", "at end", "by"]
    print_table("a soak", heads, lines, facts["environment"], ("run",), 80)
    print("MiB more: reserved, against the first look; differ: losses that are not eager's")
    for row in rows:
        for why in filter(None, (row.get("failure"), row.get("reason"))):
            print(f"{row['key']}: {why}")


def draw(rows: list[Row]) -> str:
    """Losses of the captured runs."""
    curves = {
        row["key"]: [
            (i * row["steps"] / len(row["curve"]), loss)
            for i, loss in enumerate(row["curve"])
            if math.isfinite(loss)
        ]
        for row in rows
        if "failure" not in row
    }
    return draw_curves("Losses of captured steps", curves, "step", "loss", False, False)
