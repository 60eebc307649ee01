"""What `fully_shard` does with the inputs and faults of docs/cases.md: run it and see.

    python -m tests.parity.fsdp2_cases                     # torch's own, every row
    python -m tests.parity.fsdp2_cases --rows 8 11         # some rows
    python -m tests.parity.fsdp2_cases --engine shardwise  # the drop-in, on the same inputs

Every case runs on two real gloo ranks in processes of their own, because some crash and some never
end, and prints one line: `works`, `error TYPE: ...`, `hangs`, `wrong: ...`. "Works" means that
three steps of training end at the parameters of one process that saw the batches of both ranks.
The cases themselves are in fsdp2_parameters.py (rows 1 to 9), fsdp2_motion.py (10 to 18) and
fsdp2_setup.py (19 to 26).
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.parity.models import Block
from tests.ranks import RankError, Ranks

WIDTH, STEPS = 8, 3
HOMES = {"torch": "torch.distributed.fsdp", "shardwise": "shardwise"}
NAMES = ("fully_shard", "MixedPrecisionPolicy", "register_fsdp_forward_method")
CASES: list[list[Any]] = []  # row, what, function of no arguments
api = SimpleNamespace()  # fully_shard and its companions, of the engine that is looked at


def case(row: int, what: str, **settings: Any) -> Callable[[Any], Any]:
    """A function with these settings tells the outcome on one rank."""
    entry: list[Any] = [row, what, None]
    CASES.append(entry)  # here, not in `add`: several on one function stay in their order

    def add(function: Any) -> Any:
        entry[2] = partial(function, **settings)
        return function

    return add


class Net(nn.Module):
    """Three residual blocks and a head; cases override `run`, or give other blocks."""

    block: Any = Block

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.block(WIDTH, 16) for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.run(layer, x)
        return self.head(x)

    def run(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        return layer(x)


def build(kind: Callable[[], Any], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return kind()


def shard(model: Any, **settings: Any) -> Any:
    """Each block a unit, the rest the root's."""
    settings.setdefault("mesh", init_device_mesh("cpu", (2,)))
    for layer in getattr(model, "layers", ()):
        api.fully_shard(layer, **settings)
    return api.fully_shard(model, **settings)


def batch(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def square(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().sum()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def off(model: Any, alone: Any) -> float:
    """The largest relative difference of any parameter from one process's."""
    worst = 0.0
    theirs = dict(alone.named_parameters())
    for name, p in model.named_parameters():
        got, expected = whole(p).detach().double(), theirs.pop(name).detach().double()
        if got.shape != expected.shape:
            raise AssertionError(f"{name}: shape {got.shape}, was {expected.shape}")
        if expected.numel():
            worst = max(worst, float((got - expected).norm() / expected.norm().clamp(min=1e-9)))
    if theirs:
        raise AssertionError(f"missing parameters: {list(theirs)}")
    return worst


def judge(error: float, bound: float = 1e-4, what: str = "parameters") -> str:
    return "works" if error < bound else f"wrong: {what} off by {error:.1%}, no error"


def train(
    kind: Callable[[], Any],
    loss: Callable[[Any, torch.Tensor], torch.Tensor] = square,
    before: Callable[[Any, int], Any] = lambda _model, _step: None,
    bound: float = 1e-4,
    prepare: Callable[[Any], Any] = lambda _model: None,
    **settings: Any,
) -> str:
    """Train on both ranks and in one process; gradients are averaged over ranks. `before` is called
    before each step, `prepare` once on the sharded model.
    """
    alone, model = build(kind), shard(build(kind), **settings)
    prepare(model)
    opts = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (alone, model)]
    for step in range(STEPS):
        before(alone, step)
        before(model, step)
        for rank in range(2):
            (loss(alone, batch(rank, step)) / 2).backward()
        loss(model, batch(dist.get_rank(), step)).backward()
        for opt in opts:
            opt.step()
            opt.zero_grad()
    return judge(off(model, alone), bound)


def load() -> list[list[Any]]:
    """Every case, in the order of the rows."""
    for module in ("fsdp2_parameters", "fsdp2_motion", "fsdp2_setup"):
        importlib.import_module(f"tests.parity.{module}")
    return sorted(CASES, key=lambda entry: entry[0])


def _prepare(engine: str) -> None:
    """One rank: import all that the cases need, and meet the other once."""
    home = importlib.import_module(HOMES[engine])
    api.__dict__.update({name: getattr(home, name) for name in NAMES})
    load()
    dist.barrier()


def _observe(index: int) -> str:
    """One rank: the outcome, and the engine's warnings."""
    function = load()[index][2]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        told = function()
    ours = [str(w.message) for w in caught if re.search(r"FSDP|fully_shard", str(w.message))]
    return f"{told}; warning: {_shorten(ours[0])}" if ours else told


def _shorten(text: str, width: int = 160) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else line[:width].rstrip() + "..."


def _explain(text: str | None, timeout: float) -> str:
    """One rank's part of a RankError in one line."""
    if text is None:
        return "works"
    if text.startswith("no answer"):
        return f"hangs (given up after {timeout:.0f} s)"
    if "Traceback" not in text:
        return f"crashes: {text}"
    lines = text.strip().splitlines()
    start = max(i for i, line in enumerate(lines) if re.match(r"[\w.]+(Error|Exception)\b", line))
    kind, _, message = " ".join(lines[start:]).partition(": ")
    message = re.sub(r"^\[\S+\] ", "", message)  # the place in the backend's source
    return f"error {kind.rpartition('.')[2]}: {_shorten(message)}"


def observe(engine: str, index: int, timeout: float) -> str:
    """The outcome on both ranks, in one line if they agree."""
    ranks = Ranks(2)
    try:
        # Start and import first: on a busy machine that alone can take longer than the limit, and
        # a slow start is not a hang.
        ranks.run(_prepare, engine, timeout=300)
        told = ranks.run(_observe, index, timeout=timeout)
    except RankError as error:
        told = [_explain(text, timeout) for text in error.errors]
    finally:
        ranks.stop()
    return told[0] if told[0] == told[1] else f"rank 0: {told[0]}; rank 1: {told[1]}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--engine", choices=tuple(HOMES), default="torch")
    parser.add_argument("--rows", type=int, nargs="*", help="rows of docs/cases.md (all)")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds before 'hangs' (60)")
    given = parser.parse_args(arguments)
    print(f"{given.engine}, torch {torch.__version__}, two gloo ranks", flush=True)
    for index, (row, what, _) in enumerate(load()):
        if not given.rows or row in given.rows:
            print(f"{row:>2} {what}: {observe(given.engine, index, given.timeout)}", flush=True)


if __name__ == "__main__":
    # By its importable name, so that the ranks and the cases share one module.
    sys.exit(importlib.import_module("tests.parity.fsdp2_cases").main())
