"""Captured steps on one GPU: as eager ones, bit for bit, and what becomes of those that cannot be.

NCCL of one rank, and one process as a rank of an emulated group of eight. The eager side has the
optimizer that a captured step makes of the user's: `capturable`, its rate a tensor of the device.
Needs no pytest where there is none: `python -m tests.gpu.test_capture` runs the same tests.
"""

from __future__ import annotations

import gc
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.emulation.collectives import Network, emulate
from shardwise.emulation.run import joined
from shardwise.engine.torch_private import is_recording
from tests.gpu.standalone import run_all
from tests.ranks import Ranks

DEVICE = torch.device("cuda", 0)
WIDTH, ROWS, STEPS = 64, 8, 12


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.spare = nn.Linear(WIDTH, 4)  # not used
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Tied ends, a parameter in every block that nobody uses, and one that is frozen."""

    def __init__(self, dropout: float = 0.0, checkpointed: bool = False) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(3))
        self.leave.weight = self.enter.weight
        self.blocks[1].norm.weight.requires_grad_(False)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            if self.checkpointed and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.leave(x)


class Asks(nn.Module):
    """Does much more where it is recorded, as libraries do that may not read a mask then."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.reads = reads

    def forward(self, x: Tensor) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            big = torch.ones(4096, 4096, device=x.device)
            for _ in range(20 if self.reads else 1):
                big = big @ big * 0
            return x + big[0, 0]
        return x + 1 if self.reads and x.abs().sum().item() < 0 else x


class Run:
    """A model under an engine, its optimizer and its step."""

    def __init__(self, eager: bool, case: dict[str, Any]) -> None:
        case = {"strategy": "zero3", "fused": False, "micro": 1, "clip": True, **case}
        self.case = case
        torch.manual_seed(0)
        net = Net(case.get("dropout", 0.0), case.get("checkpointed", False)).to(DEVICE)
        if "asks" in case:
            net.blocks[1].dropout = Asks(case["asks"])
        if case.get("compiled"):
            for block in net.blocks:
                block.compile()
        world = dist.get_world_size()
        if case.get("dropin"):
            for block in net.blocks:
                sw.fully_shard(block)
            self.model: nn.Module = sw.fully_shard(net)
        else:
            mesh = (2, world // 2) if case["strategy"] == "hsdp" else world
            settings = {"compute_dtype": case.get("dtype"), **case.get("settings", {})}
            plan = sw.Plan.of(case["strategy"], mesh, units=[Block], **settings)
            self.model = sw.shard(net, plan)
        rate: Any = torch.tensor(1e-2, device=DEVICE) if eager else 1e-2
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=rate, fused=case["fused"] or None, capturable=eager
        )
        self.scaler = torch.amp.GradScaler("cuda", enabled=case.get("scaled", False))
        self.rate_on_device = True
        self.optimizer.register_step_post_hook(self._look_at_rate)

    def _look_at_rate(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.rate_on_device = isinstance(optimizer.param_groups[0]["lr"], Tensor)

    def set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def step(self, *batches: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        total = torch.zeros((), device=DEVICE)
        several = len(batches) > 1
        for batch in sw.microbatches(self.model, batches) if several else batches:
            with torch.autocast("cuda", torch.bfloat16, enabled=self.case.get("autocast", False)):
                loss = self.model(batch).float().square().mean() / len(batches)
            self.scaler.scale(loss).backward()
            total += loss.detach()
        if self.case["clip"] and not self.scaler.is_enabled():
            sw.clip_grad_norm(self.model, 0.5)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return total

    @property
    def values(self) -> dict[str, Tensor]:
        """All that training changes, and the gradients that hang on the parameters."""
        found = {}
        for name, parameter in self.model.named_parameters():
            found[name] = _local(parameter).clone()
            if parameter.grad is not None:
                found[f"{name}, its gradient"] = _local(parameter.grad).clone()
            for key, value in self.optimizer.state.get(parameter, {}).items():
                found[f"{name}, {key}"] = _local(value).clone()
        return found


def _local(tensor: Tensor) -> Tensor:
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()


@contextmanager
def nccl_of_one() -> Iterator[None]:
    torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=DEVICE)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def emulated(bandwidth: float = float("inf")) -> Iterator[None]:
    with joined(1, 8), emulate(Network(bandwidth, 0.0)):
        yield


def draw(i: int, rows: int = ROWS) -> Tensor:
    drawn = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(i))
    return drawn.to(DEVICE)


Change = Callable[[Run], None]


def train(run: Run, step: Callable[..., Tensor], changes: dict[int, Change]) -> list[Tensor]:
    torch.cuda.manual_seed(7)
    losses = []
    for i in range(STEPS):
        if i in changes:
            changes[i](run)
        run.set_rate(1e-2 / (1 + i))
        batches = [draw(10 * i + j) for j in range(run.case["micro"])]
        losses.append(step(*batches))
    return losses


def compare(case: dict[str, Any], changes: dict[int, Change] | None = None) -> list[str]:
    """What of a captured training is not as eagerly, and why it was not captured if it was not."""
    eager, ours = Run(True, case), Run(False, case)
    expected = train(eager, eager.step, changes or {})
    step = sw.capture(ours.step)
    got = train(ours, step, changes or {})
    wrong = [f"loss {i}: {float(a)} eager, {float(b)} captured" for i, (a, b) in
             enumerate(zip(expected, got, strict=True)) if not torch.equal(a, b)]  # fmt: skip
    theirs, mine = eager.values, ours.values
    wrong += [f"only one has {name}" for name in sorted(theirs.keys() ^ mine.keys())]
    for name in theirs.keys() & mine.keys():
        if not torch.equal(theirs[name], mine[name]):
            worst = float((theirs[name].float() - mine[name].float()).abs().max())
            wrong.append(f"{name} differs by {worst:.1e}")
    if step.reason is not None:
        wrong.append(f"not captured: {step.reason}")
    elif not step.recordings:
        wrong.append("nothing was recorded")
    return wrong[:5]


ALONE: dict[str, dict[str, Any]] = {
    "zero3": {},
    "zero3, bf16": {"dtype": "bfloat16"},
    "zero3, fused": {"fused": True, "dtype": "bfloat16"},
    "zero2, accumulation": {"strategy": "zero2", "micro": 3, "dtype": "bfloat16"},
    "zero1, accumulation, last": {
        "strategy": "zero1", "micro": 2, "dtype": "bfloat16", "settings": {"sync": "last"},
    },
    "ddp, bf16": {"strategy": "ddp", "dtype": "bfloat16"},
    "checkpointed": {"checkpointed": True, "dtype": "bfloat16"},
    "dropout": {"dropout": 0.3, "dtype": "bfloat16"},
    "no clipping": {"clip": False},
    "fully_shard": {"dropin": True},
    "fully_shard, autocast": {"dropin": True, "autocast": True, "micro": 2},
    "compiled blocks": {"compiled": True, "dtype": "bfloat16"},
    "scaled": {"scaled": True, "fused": True, "autocast": True},
}  # fmt: skip
AMONG_EIGHT: dict[str, dict[str, Any]] = {
    "zero3": {"dtype": "bfloat16"},
    "zero3, packed, accumulation": {"micro": 2, "settings": {"gather": "packed"}},
    "zero3, kept pieces": {"dtype": "bfloat16", "settings": {"keep_after_forward": 4}},
    "zero2": {"strategy": "zero2", "settings": {"whole_below": 300}},
    "zero1": {"strategy": "zero1", "micro": 2},
    "ddp": {"strategy": "ddp", "dtype": "bfloat16"},
    "hsdp": {"strategy": "hsdp", "dtype": "bfloat16", "micro": 2},
    "fully_shard": {"dropin": True, "dropout": 0.2},
}


def _unfreeze(run: Run) -> None:
    run.model.blocks[1].norm.weight.requires_grad_(True)  # type: ignore[index, union-attr]


def _evaluate(run: Run) -> None:
    with torch.no_grad():
        run.model(draw(99))


def _three(run: Run) -> None:
    run.case = {**run.case, "micro": 3}


def _assign(run: Run) -> None:
    block: Any = run.model.blocks[2]  # type: ignore[index]
    state = {name: value.clone() for name, value in block.state_dict().items()}
    block.load_state_dict(state, assign=True)
    run.optimizer.param_groups[0]["params"] = list(run.model.parameters())


def _stop_dropping(run: Run) -> None:
    run.model.eval()


def _drop_again(run: Run) -> None:
    run.model.train()


CHANGES: dict[str, dict[int, Change]] = {
    "a layer is unfrozen": {6: _unfreeze},
    "evaluations between": {5: _evaluate, 8: _evaluate},
    "more micro-batches": {6: _three},
    "memory moves": {6: _assign},
    "another mode": {5: _stop_dropping, 9: _drop_again},
}


def _fail_all(wrong: dict[str, list[str]]) -> None:
    bad = {name: said for name, said in wrong.items() if said}
    assert not bad, "\n".join(f"{name}: {line}" for name, said in bad.items() for line in said)


def _each(cases: dict[str, Any], look: Callable[[Any], list[str]]) -> None:
    """Every case, also after one that raised: a run on a borrowed GPU has to tell all."""
    wrong = {}
    for name, case in cases.items():
        try:
            wrong[name] = look(case)
        except Exception:
            wrong[name] = traceback.format_exc().strip().splitlines()[-4:]
    _fail_all(wrong)


def test_nccl_of_one_rank_equals_eager() -> None:
    with nccl_of_one():
        _each(ALONE, compare)


def test_one_rank_of_eight_equals_eager() -> None:
    with emulated():
        _each(AMONG_EIGHT, compare)


def test_a_changed_step_is_seen() -> None:
    with nccl_of_one():
        _each(CHANGES, lambda changes: compare({"dtype": "bfloat16", "dropout": 0.1}, changes))


def test_an_emulated_network_takes_its_time_in_a_graph_too() -> None:
    """About ten milliseconds for each gather and reduce, so that the host's share of an eager step
    is small: replayed as long as eagerly, within 10 %.
    """
    with emulated(bandwidth=1e7):
        run = Run(False, {})
        step, batch = sw.capture(run.step), draw(0)
        taken = []
        for _ in range(9):
            torch.cuda.synchronize()
            began = time.perf_counter()
            step(batch)
            torch.cuda.synchronize()
            taken.append(time.perf_counter() - began)
        assert step.recordings, step.reason
        eager, replayed = min(taken[1:3]), sorted(taken[4:])[2]
        assert 0.9 < replayed / eager < 1.1, taken


def _take_number(run: Run) -> None:
    for group in run.optimizer.param_groups:
        group["lr"] = float(group["lr"])


FAILING: dict[str, tuple[str, Callable[[Run], Callable[..., Tensor]]]] = {}


def _fails(said: str) -> Callable[[Any], Any]:
    def add(make: Callable[[Run], Callable[..., Tensor]]) -> Any:
        FAILING[make.__name__] = said, make
        return make

    return add


@_fails("the host reads a value of the device at")
def reads_the_loss(run: Run) -> Callable[..., Tensor]:
    def step(batch: Tensor) -> Tensor:
        loss = run.step(batch)
        loss.item()
        return loss

    return step


@_fails("recording it failed")
def waits_for_the_device(run: Run) -> Callable[..., Tensor]:
    """In the middle of the step, where streams are under way and random numbers were drawn."""

    def wait(*_: Any) -> None:
        if is_recording():
            torch.cuda.current_stream().synchronize()

    run.model.blocks[1].register_forward_hook(wait)  # type: ignore[index, union-attr, operator]
    return run.step


@_fails("recording it failed")
def raises_in_backward(run: Run) -> Callable[..., Tensor]:
    def refuse(gradient: Tensor) -> None:
        if is_recording():
            raise ValueError("not in a graph")

    def hang(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(refuse)

    run.model.blocks[0].register_forward_hook(hang)  # type: ignore[index, union-attr, operator]
    return run.step


@_fails("random numbers are drawn on the host")
def draws_on_the_host(run: Run) -> Callable[..., Tensor]:
    def step(batch: Tensor) -> Tensor:
        torch.rand(1)
        return run.step(batch)

    return step


def test_what_cannot_be_captured_is_said_and_nothing_is_lost() -> None:
    case = {"dropout": 0.3, "dtype": "bfloat16"}

    def look(failing: tuple[str, Callable[[Run], Callable[..., Tensor]]]) -> list[str]:
        said, make = failing
        eager, ours = Run(True, case), Run(False, case)
        step, on_device = sw.capture(make(ours)), []

        def watched(*batches: Tensor) -> Tensor:
            loss = step(*batches)
            on_device.append(ours.rate_on_device)
            return loss

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            got = train(ours, watched, {})
        # From then on its rate is the number that the program wrote: other last bits.
        gave_up = on_device.index(False)
        expected = train(eager, make(eager), {gave_up: _take_number})
        told = [str(w.message) for w in caught if "goes on eagerly" in str(w.message)]
        wrong = [] if len(told) == 1 and said in told[0] else [f"said {told}, expected {said!r}"]
        same = all(map(torch.equal, expected, got))
        theirs, mine = eager.values, ours.values
        parted = [name for name in theirs if not torch.equal(theirs[name], mine[name])]
        return wrong + ([] if same and not parted else [f"parted: {parted[:3]}, losses {same}"])

    with nccl_of_one():
        _each(FAILING, look)


def test_a_step_that_asks_whether_it_is_recorded_goes_the_way_it_rehearsed() -> None:
    """One that reads from the device on that way is recorded on the other, and let go of if its
    replays are slower.
    """
    with nccl_of_one():
        for reads in (False, True):
            eager, ours = (Run(eager, {"clip": False, "asks": reads}) for eager in (True, False))
            step = sw.capture(ours.step)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for i in range(STEPS):
                    torch.testing.assert_close(eager.step(draw(i)), step(draw(i)))
            told = [str(w.message) for w in caught if "goes on eagerly" in str(w.message)]
            if reads:
                assert len(told) == 1 and "slower way while it is recorded" in told[0], told
            else:
                assert step.recordings and not told, (step.reason, told)


def test_memory_stays_and_the_host_is_quick() -> None:
    """Through 300 replays; host time of one below 2 ms."""
    with nccl_of_one():
        run = Run(False, {"dtype": "bfloat16"})
        step = sw.capture(run.step)
        batch = draw(0)
        for _ in range(8):
            step(batch)
        torch.cuda.synchronize()
        reserved, took = torch.cuda.memory_reserved(), []
        for _ in range(300):
            began = time.perf_counter()
            step(batch)
            took.append(time.perf_counter() - began)
        torch.cuda.synchronize()
        assert step.recordings, step.reason
        assert torch.cuda.memory_reserved() == reserved
        assert sorted(took)[150] < 2e-3, sorted(took)[150]


def _on_gloo() -> tuple[str | None, bool]:
    """On each of two ranks that share the GPU."""
    torch.cuda.set_device(DEVICE)
    run = Run(False, {})
    step = sw.capture(run.step)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        losses = [step(draw(i)) for i in range(6)]
    return step.reason, all(bool(torch.isfinite(loss)) for loss in losses)


def test_a_dropped_step_gives_its_memory_back() -> None:
    """The first one leaves what libraries keep for its stream, the others nothing."""
    with nccl_of_one():
        left = []
        for _ in range(3):
            run = Run(False, {"dtype": "bfloat16"})
            step = sw.capture(run.step)
            train(run, step, {})
            assert step.recordings, step.reason
            del run, step
            gc.collect()
            torch.cuda.empty_cache()
            left.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
        assert left[1] == left[2], left


def test_gloo_is_named() -> None:
    ranks = Ranks(2)
    try:
        for reason, finite in ranks.run(_on_gloo):
            assert finite and "gloo moves the data of unit" in str(reason), reason
    finally:
        ranks.stop()


if __name__ == "__main__":
    run_all(globals())
