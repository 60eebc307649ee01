"""What a program may touch between two steps: every touch, before and after the first step.

    python -m tests.parity.sweep                           # torch's own fully_shard
    python -m tests.parity.sweep --engine shardwise        # the drop-in
    python -m tests.parity.sweep --engine plan             # Plan.of("zero3"); or zero2, ddp, hsdp
    python -m tests.parity.sweep --touches tie freeze      # those whose names have these words
    python -m tests.parity.sweep --table                   # all beside each other

A touch is a small function that changes a `Run` (a model, its optimizer and its loop). It is done
to a model on real gloo ranks, and to a plain one that sees the batches of all of them; four steps
later both must have the same parameters, optimizer state, outputs and whatever else the touch
returned to look at: `equal`. Else `off by X (where)`, `error TYPE: ...`, `hangs`, or `crashes`.
Where the touch is one process's error too, that is no outcome: `no case`.
The touches are in sweep_parameters.py, sweep_gradients.py and sweep_programs.py.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

import shardwise as sw
from tests.parity.models import VOCABULARY, Block
from tests.ranks import RankError, Ranks

STEPS, ROWS, LENGTH, WIDTH = 3, 2, 5, 8
MOMENTS = {"before": 0, "after": 1}  # the step that a touch comes with
LIMIT = 30  # seconds of one touch before it hangs
BOUND = 1e-4
PLANS = ("zero3", "zero2", "ddp", "hsdp")
ENGINES = ("torch", "shardwise", *PLANS)
# Known to be wrong, by engine: neither equal nor a clear error. docs/cases.md has them too.
_WRITTEN_WHILE_SHOWN = (
    "a forward without backward, p.data.mul_, and on",
    "an embedding renormalises its rows in forward (max_norm)",
)
OPEN = dict.fromkeys(("shardwise", *PLANS), _WRITTEN_WHILE_SHOWN[:1])
OPEN |= dict.fromkeys(("shardwise", "ddp"), _WRITTEN_WHILE_SHOWN)
TOUCHES: dict[str, Touch] = {}


class Planned(Exception):
    """Raised by a touch, and caught by the loop around the step."""


class TouchedBlock(Block):
    """Also a parameter that a step can leave out."""

    uses_scale = True

    def __init__(self, width: int, inner: int) -> None:
        super().__init__(width, inner)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return x * self.scale if self.uses_scale else x


class Net(nn.Module):
    """Embedding, three blocks, norm and head; steps can leave out blocks, or what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(TouchedBlock(WIDTH, 16) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.left_out: set[int] = set()
        self.ignored: set[int] = set()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for i, layer in enumerate(self.layers):
            if i not in self.left_out:
                made = layer(x)
                x = x if i in self.ignored else made
        return self.head(self.norm(x))


@dataclass
class Run:
    """One model and its loop: one process's (`engine` is "alone"), or a rank's."""

    engine: str
    world: int
    model: Any = None
    opt: Any = None
    step: int = 0
    sets_none: bool = True  # how the loop clears gradients
    on_gradients: Callable[[Run], None] | None = None  # called after every backward
    program: Callable[[Run], None] | None = None  # in place of the loop's own step

    @property
    def alone(self) -> bool:
        return self.engine == "alone"

    @property
    def batch(self) -> torch.Tensor:
        """This rank's tokens, or everybody's."""
        ranks = range(self.world) if self.alone else [dist.get_rank()]
        return torch.cat([_tokens(self.step, rank) for rank in ranks])

    def loss(self, model: Any = None, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Of the mean over everybody's tokens; a Plan sums over ranks, the others average."""
        tokens = self.batch if tokens is None else tokens
        out = (self.model if model is None else model)(tokens).float().flatten(0, 1)
        loss = nn.functional.cross_entropy(out, tokens.flatten())
        return loss / self.world if self.engine in PLANS else loss

    def evaluate(self) -> torch.Tensor:
        """The output on tokens that all have."""
        self.model.eval()
        with torch.no_grad():
            out: torch.Tensor = self.model(_tokens(99, 0))
        self.model.train()
        return out

    def train_step(self) -> None:
        self.loss().backward()
        if self.on_gradients is not None:
            self.on_gradients(self)
        self.opt.step()
        self.opt.zero_grad(set_to_none=self.sets_none)

    def like(self, full: torch.Tensor, form: torch.Tensor) -> torch.Tensor:
        """`full` in the form that a tensor of this model has."""
        full = full.to(form.dtype)
        if not isinstance(form, DTensor):
            return full.clone()
        return distribute_tensor(full, form.device_mesh, form.placements, src_data_rank=None)

    def random(self, form: torch.Tensor, seed: int = 7) -> torch.Tensor:
        """The same values on every rank and in one process, in the form of `form`."""
        made = torch.randn(form.shape, generator=torch.Generator().manual_seed(seed))
        return self.like(made * 0.3, form)

    def shard(self, module: nn.Module) -> nn.Module:
        """Shard what a touch adds."""
        if self.engine == "torch":
            from torch.distributed.fsdp import fully_shard

            return fully_shard(module, mesh=_mesh())
        return module if self.alone else sw.fully_shard(module, mesh=_mesh())

    def tell_optimizer(self, old: nn.Parameter, new: nn.Parameter) -> None:
        """`new` takes the place of `old` in the optimizer, with its state."""
        for group in self.opt.param_groups:
            group["params"] = [new if p is old else p for p in group["params"]]
        if old in self.opt.state:
            self.opt.state[new] = self.opt.state.pop(old)


@dataclass(frozen=True)
class Touch:
    """One way to touch. `function(run)` may return a function of no arguments; what that gives at
    the end (tensors, numbers, lists of them) must be the same as in one process.
    """

    name: str
    function: Callable[[Run], Callable[[], Any] | None]
    when: str  # "step": before the step's forward; "gradients": between backward and optimizer
    moments: tuple[str, ...]
    prepare: Callable[[nn.Module], None] | None  # of the model, before it is sharded
    expect: dict[str, str]  # by engine: what its error says; the others must be equal
    everywhere: bool  # tried in every strategy, not only in the drop-in and zero3


def touch(
    name: str,
    when: str = "step",
    moments: Iterable[str] = tuple(MOMENTS),
    prepare: Callable[[nn.Module], None] | None = None,
    everywhere: bool = False,
    dropin: str | None = None,
    plan: str | None = None,
    **expect: str,
) -> Callable[[Any], Any]:
    """Enter a function in the table. `dropin`, `plan` or a strategy's name: what the error says."""
    if dropin:
        expect["shardwise"] = dropin
    if plan:
        expect = dict.fromkeys(PLANS, plan) | expect

    def enter(function: Any) -> Any:
        assert name not in TOUCHES, name
        TOUCHES[name] = Touch(name, function, when, tuple(moments), prepare, expect, everywhere)
        return function

    return enter


def every_step(name: str, **how: Any) -> Callable[[Any], Any]:
    """`touch` by a function that is every step's program from now on."""

    def enter(function: Callable[[Run], None]) -> Any:
        touch(name, **how)(lambda run: setattr(run, "program", function))
        return function

    return enter


def load() -> dict[str, Touch]:
    """Every touch, in the order of the files."""
    for module in ("sweep_parameters", "sweep_gradients", "sweep_programs"):
        importlib.import_module(f"tests.parity.{module}")
    return TOUCHES


def _tokens(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)


_meshes: list[Any] = []


def _mesh() -> Any:
    """One for all, made by all ranks together."""
    if not _meshes:
        _meshes.append(init_device_mesh("cpu", (dist.get_world_size(),)))
    return _meshes[0]


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    """A large eps, so that AdamW sees the gradients' size; decay and steps tell zeros from None."""
    return torch.optim.AdamW(parameters, lr=0.02, eps=0.05, weight_decay=0.1)


def begin(engine: str, world: int, prepare: Callable[[nn.Module], None] | None) -> Run:
    """A model, sharded as the engine does, with an optimizer."""
    run = Run(engine, world)
    torch.manual_seed(0)
    model = run.model = Net()
    if prepare is not None:
        prepare(model)
    if engine in PLANS:
        mesh = (2, world // 2) if engine == "hsdp" else world
        sw.shard(model, sw.Plan.of(engine, mesh=mesh))
    elif engine != "alone":
        for layer in model.layers:
            run.shard(layer)
        run.shard(model)
    run.opt = optimizer_of(model.parameters())
    return run


def carry_out(run: Run, which: Touch, moment: str) -> Any:
    """Train, with the touch; what it gave to look at."""
    look: Callable[[], Any] | None = None
    for run.step in range(STEPS):
        now = run.step == MOMENTS[moment]
        if now and which.when == "step":
            look = which.function(run)
        if now and which.when == "gradients":
            kept: list[Any] = []

            def once(run: Run, kept: list[Any] = kept) -> None:
                run.on_gradients = None
                kept.append(which.function(run))

            run.on_gradients = once
        try:
            (run.program or Run.train_step)(run)
        except Planned:
            run.opt.zero_grad()
        if now and which.when == "gradients":
            look = kept[0] if kept else None
    return look() if look is not None else None


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def outcome(engine: str, world: int, which: Touch, moment: str) -> str:
    """One rank: what became of it."""
    alone = begin("alone", world, which.prepare)
    try:
        expected = carry_out(alone, which, moment)
    except Exception as error:
        return f"no case: one process says {type(error).__name__}: {_shorten(str(error))}"
    run = begin(engine, world, which.prepare)
    try:
        seen = carry_out(run, which, moment)
        pairs = _pairs(run, alone) | {"what it looked at": (seen, expected)}
    except Exception as error:
        return f"error {type(error).__name__}: {_shorten(str(error))}"
    worst, where = 0.0, ""
    for name, (ours, theirs) in pairs.items():
        apart = _apart(ours, theirs)
        if not apart <= worst:
            worst, where = apart, name
    return "equal" if worst < BOUND else f"off by {worst:.1g} ({where})"


def _pairs(run: Run, alone: Run) -> dict[str, tuple[Any, Any]]:
    """Everything to compare, by name."""
    pairs: dict[str, tuple[Any, Any]] = {}
    ours, theirs = (
        dict(each.model.named_parameters(remove_duplicate=False)) for each in (run, alone)
    )
    pairs["names"] = (sorted(ours), sorted(theirs))
    for name in [name for name in ours if name in theirs]:
        pairs[name] = (ours[name], theirs[name])
        pairs[f"{name}.grad"] = (ours[name].grad, theirs[name].grad)
    states = [
        [
            dict(each.opt.state.get(p, {}))
            for group in each.opt.param_groups
            for p in group["params"]
        ]
        for each in (run, alone)
    ]
    for i, (mine, one) in enumerate(zip(*states, strict=True)):
        pairs[f"state {i}"] = (mine, one)
    pairs["output"] = (run.evaluate(), alone.evaluate())
    return pairs


def _apart(ours: Any, theirs: Any) -> float:
    """The largest relative difference; infinite where they are not even alike."""
    if isinstance(theirs, torch.Tensor) and isinstance(ours, torch.Tensor):
        if ours.shape != theirs.shape:
            return float("inf")
        mine, one = _own(ours, theirs)
        return float((mine.double() - one).norm() / theirs.double().norm().clamp(min=1e-9))
    if isinstance(theirs, dict) and isinstance(ours, dict):
        if ours.keys() != theirs.keys():
            return float("inf")
        return max((_apart(ours[key], theirs[key]) for key in theirs), default=0.0)
    if isinstance(theirs, list) and isinstance(ours, list):
        if len(ours) != len(theirs):
            return float("inf")
        return max(map(_apart, ours, theirs), default=0.0)
    return 0.0 if ours == theirs else float("inf")


def _own(ours: torch.Tensor, theirs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's rows of both: to bring the whole together would take most of the time."""
    theirs = theirs.detach()
    if not isinstance(ours, DTensor):
        return ours.detach(), theirs
    mesh, placements = ours.device_mesh, ours.placements
    alike = distribute_tensor(theirs, mesh, placements, src_data_rank=None)
    return ours.to_local().detach(), alike.to_local()


def _shorten(text: str, width: int = 200) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else line[:width].rstrip() + "..."


def _sweep(engine: str, wanted: list[tuple[str, str]], log: str) -> None:
    """One rank: every touch in its turn, each told in the log before and after. A rank that waits
    too long is ended by the alarm, wherever it waits.
    """
    known = load()
    rank, world = dist.get_rank(), dist.get_world_size()
    with Path(f"{log}.{rank}").open("a") as out:
        for name, moment in wanted:
            print(json.dumps([name, moment, None]), file=out, flush=True)
            signal.alarm(LIMIT)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                told = outcome(engine, world, known[name], moment)
            signal.alarm(0)
            ours = [
                str(w.message) for w in caught if re.search("after it was shard", str(w.message))
            ]
            told = f"{told}; warning: {_shorten(ours[0])}" if ours else told
            print(json.dumps([name, moment, told]), file=out, flush=True)
            # What one rank alone has left in the groups must not meet the next touch.
            dist.barrier()


def _read(log: str, world: int) -> dict[tuple[str, str], list[str | None]]:
    told: dict[tuple[str, str], list[str | None]] = {}
    for rank in range(world):
        path = Path(f"{log}.{rank}")
        for line in path.read_text().splitlines() if path.exists() else ():
            name, moment, text = json.loads(line)
            told.setdefault((name, moment), [None] * world)[rank] = text
    return told


def observe(
    ranks: Ranks, engine: str, wanted: list[tuple[str, str]], limit: float = 600
) -> dict[tuple[str, str], str]:
    """Every outcome, by touch and moment. What hangs or crashes ends its ranks, and the rest is
    tried on others.
    """
    found: dict[tuple[str, str], str] = {}
    with tempfile.TemporaryDirectory() as folder:
        while left := [each for each in wanted if each not in found]:
            log = f"{folder}/{len(found)}"
            started, ended = time.monotonic(), ""
            try:
                ranks.run(_sweep, engine, left, log, timeout=limit)
            except RankError as error:
                ended = str(error)
            told = _read(log, ranks.world)
            if not told:
                raise RuntimeError(
                    f"no touch began within {time.monotonic() - started:.0f} s: {ended}"
                )
            for key, texts in told.items():
                found[key] = _together([_explain(text, ended) for text in texts])
    return found


def _together(said: list[str]) -> str:
    """All ranks' outcomes as one: the largest difference, where they have nothing else to tell."""
    if len(set(said)) == 1:
        return said[0]
    off = [text for text in said if re.match(r"off by \S+ \(", text)]
    if len(off) == len(said) - said.count("equal"):
        return max(off, key=lambda text: float(text.split()[2]))
    return f"ranks differ: {sorted(set(said))}"


def _explain(text: str | None, ended: str) -> str:
    if text is not None:
        return text
    return "hangs or crashes" if "died" in ended or "no answer" in ended else _shorten(ended)


def cases(engine: str, words: Iterable[str] = ()) -> list[tuple[str, str]]:
    """The touches and moments that are tried of an engine."""
    words = tuple(words)
    return [
        (each.name, moment)
        for each in load().values()
        if engine in ("torch", "shardwise", "zero3") or each.everywhere
        if not words or any(word in each.name for word in words)
        for moment in each.moments
    ]


def dense_cases(engine: str) -> list[tuple[str, str]]:
    """Those that the suite has time for: all through the drop-in, and under a Plan, which is the
    same engine, those that go through what a strategy does differently. Compiling takes seconds
    each, so that comes after a step only.
    """
    chosen = [case for case in cases(engine) if case[0] not in OPEN.get(engine, ())]
    chosen = [case for case in chosen if "compile" not in case[0] or case[1] == "after"]
    if engine in PLANS:
        chosen = [case for case in chosen if TOUCHES[case[0]].everywhere and case[1] == "after"]
    return chosen


def fault(engine: str, key: tuple[str, str], told: str) -> str | None:
    """What is wrong with an outcome: None if it is what the table expects."""
    expected = load()[key[0]].expect.get(engine)
    if expected is None:
        right = told.startswith(("equal", "no case"))
    else:
        right = bool(re.search(expected, told)) or told.startswith("no case")
    return None if right else f"{key[0]} ({key[1]}): {told}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--engine", choices=(*ENGINES, "plan"), default="torch")
    parser.add_argument("--touches", nargs="*", default=(), help="words of their names (all)")
    parser.add_argument("--table", action="store_true", help="drop-in, zero3 and torch: a table")
    given = parser.parse_args(arguments)
    engine = "zero3" if given.engine == "plan" else given.engine
    if given.table:
        print_table(given.touches)
        return
    print(f"{engine}, torch {torch.__version__}, gloo ranks", flush=True)
    ranks = Ranks(4 if engine == "hsdp" else 2)
    wrong = 0
    for name, moment in cases(engine, given.touches):
        told = observe(ranks, engine, [(name, moment)])[name, moment]
        wrong += fault(engine, (name, moment), told) is not None
        print(f"{name}, {moment} the first step: {told}", flush=True)
    ranks.stop()
    print(f"{wrong} not as the table expects")


def print_table(words: Iterable[str]) -> None:
    """The table of docs/cases.md: what is equal everywhere as a list, the rest as rows."""
    ranks = Ranks(2)
    engines = ("shardwise", "zero3", "torch")
    told = [observe(ranks, engine, cases(engine, words)) for engine in engines]
    ranks.stop()
    equal = []
    print("| touch | here | torch's `fully_shard` 2.13 |\n|---|---|---|")
    for each in load().values():
        if (each.name, each.moments[0]) in told[0]:
            cells = [_cell({m: found[each.name, m] for m in each.moments}) for found in told]
            dropin, plan, torchs = cells
            here = dropin if dropin == plan else f"drop-in: {dropin}; Plan: {plan}"
            if set(cells) == {"equal"}:
                equal.append(each.name)
            else:
                print(f"| {each.name} | {here} | {torchs} |")
    print(f"\nEqual in all: {'; '.join(equal)}.")


def _cell(by_moment: dict[str, str]) -> str:
    """One outcome, or one for each moment."""
    told = {moment: _shorten(text.replace("|", "/"), 110) for moment, text in by_moment.items()}
    texts = list(dict.fromkeys(told.values()))
    cases = [text for text in texts if not text.startswith("no case")] or texts
    if len(cases) == 1:
        return cases[0]
    return "; ".join(f"{moment}: {text}" for moment, text in told.items())


if __name__ == "__main__":
    # By its importable name, so that the ranks and the touches share one module.
    sys.exit(importlib.import_module("tests.parity.sweep").main())
