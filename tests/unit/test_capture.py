"""`sw.capture` without a GPU: signatures, guards, learning rates, and what is not captured. A
recorder that stands in for CUDA's runs the step at each replay, on the recording's own inputs.
"""

from __future__ import annotations

import dataclasses
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.engine import capture as captures
from shardwise.engine import rates as engine_rates
from shardwise.engine import static, torch_private
from shardwise.engine.capture import CapturedStep, signature_of
from shardwise.engine.engine import engine_of
from shardwise.engine.recorder import Uncapturable
from shardwise.engine.step_state import Before, Left, Watched
from shardwise.schedule.unit import State
from tests.ranks import Ranks


class Timed:
    """A span of the device: a rehearsal takes 10 ms, a replay what the test says."""

    def __init__(self, ms: float) -> None:
        self.ms = ms

    def end(self) -> None: ...


class Replayed:
    """Counts what a recorder is asked; a replay runs the step."""

    replay_ms = 10.0

    def __init__(self, device: torch.device) -> None:
        self.refusal: str | None = None
        self.warmed = self.rehearsed = self.recorded = self.replayed = 0
        self.fails: Exception | None = None
        self.fixed: list[bool] = []

    def warm(self, run: Callable[[], Any]) -> Any:
        self.warmed += 1
        return run()

    def rehearse(self, run: Callable[[], Any]) -> Any:
        self.rehearsed += 1
        self.fixed.append(torch_private.is_recording(static.fixed))
        return run()

    def record(self, run: Callable[[], Any], lanes: Any) -> tuple[Any, Callable[[], None]]:
        self.recorded += 1
        if self.fails is not None:
            if dist.get_world_size() == 1:
                run()
            raise Uncapturable("recording it failed") from self.fails
        output = torch.zeros(())

        def replay() -> None:
            self.replayed += 1
            output.copy_(run())

        return output, replay

    def give_back(self) -> None: ...

    def start_span(self) -> Timed:
        return Timed(self.replay_ms if self.recorded else 10.0)

    @property
    def counts(self) -> tuple[int, ...]:
        return self.warmed, self.rehearsed, self.recorded, self.replayed


@pytest.fixture(autouse=True)
def alone(no_group: None) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the stand-in take models of the host, and optimizers their rates as tensors."""
    monkeypatch.setattr(captures, "find_refusal", lambda engine: "")
    monkeypatch.setattr(captures, "host_state", lambda optimizers: None)
    monkeypatch.setattr(engine_rates, "_device_of", lambda group: torch.device("cpu"))


class Run:
    """A small model with its optimizer, and its step: gradients are cleared at the end of it."""

    def __init__(self, strategy: str = "zero3", mesh: int = 1, **settings: Any) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
        plan = sw.Plan.of(strategy, mesh, compute_dtype="bfloat16", **settings)
        self.model = sw.shard(net, plan)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, fused=True)

    def step(self, *batches: torch.Tensor, more: Any = None) -> torch.Tensor:
        total = torch.zeros(())
        for batch in sw.microbatches(self.model, batches):
            loss = self.model(batch).float().square().mean()
            loss.backward()
            total += loss.detach()
        sw.clip_grad_norm(self.model, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    @property
    def values(self) -> list[torch.Tensor]:
        return [p.detach().to_local().clone() for p in self.model.parameters()]  # type: ignore[attr-defined]


def captured(step: Callable[..., Any], warmup: int = 2, graphs: int = 8) -> Any:
    return CapturedStep(step, warmup, graphs, Replayed)  # type: ignore[arg-type]


def draw(i: int, rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(i))


def equal(one: Run, other: Run) -> bool:
    return all(map(torch.equal, one.values, other.values))


def test_eager_steps_then_one_recording_then_replays_train_alike(on_cpu: None) -> None:
    """With a rate that the program changes before every call, as a float."""
    eager, ours = Run(), Run()
    step = captured(ours.step)
    for i in range(9):
        for run in (eager, ours):
            run.optimizer.param_groups[0]["lr"] = 0.1 / (i + 1)
        expected, got = eager.step(draw(i)), step(draw(i))
        assert torch.equal(expected, got) and got.grad_fn is None
        assert isinstance(ours.optimizer.param_groups[0]["lr"], float)
    assert equal(eager, ours)
    # The first call meets the model, before there is a recorder.
    assert step._recorder.counts == (1, 1, 1, 6)
    assert step._recorder.fixed == [True]


@pytest.mark.parametrize("memory", ["allocator", "arena"])
def test_a_dropped_step_and_its_model_are_gone(on_cpu: None, memory: str) -> None:
    """Once nobody holds them nothing else does: no graph, no hook, no table of the engine's."""
    run = Run(memory=memory)
    step = captured(run.step)
    kept = [step(draw(i)) for i in range(8)]
    engine = engine_of(run.model)
    gone = [weakref.ref(each) for each in (run.model, run.optimizer, engine, step)]
    gone += [weakref.ref(unit.parameters.full) for unit in engine.units]
    if engine.executor.arena is not None:
        assert engine.executor.arena.block is not None
        gone.append(weakref.ref(engine.executor.arena.block))
    assert len(gone) == 4 + len(engine.units) + (memory == "arena") and len(step.recordings) == 1
    del run, step, engine
    gc.collect()
    assert [type(each()).__name__ for each in gone if each() is not None] == []
    assert len(kept) == 8


def test_an_output_is_the_caller_s_own(on_cpu: None) -> None:
    run = Run()
    step = captured(run.step)
    kept = [step(draw(i)) for i in range(6)]
    values = [float(loss) for loss in kept]
    step(draw(6))
    assert [float(loss) for loss in kept] == values
    assert len(set(values)) == 6


def test_one_graph_for_each_number_of_micro_batches_and_shape(on_cpu: None) -> None:
    eager, ours = Run(), Run()
    step = captured(ours.step)
    batches = [(draw(0),), (draw(1), draw(2)), (draw(3, rows=3),)]
    for _ in range(5):
        for inputs in batches:
            eager.step(*inputs)
            step(*inputs)
    assert len(step.recordings) == 3 and equal(eager, ours)


def test_more_signatures_than_graphs_run_eagerly_and_it_is_said_once(on_cpu: None) -> None:
    eager, ours = Run(), Run()
    step = captured(ours.step, warmup=1, graphs=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in (2, 3, 4) * 5:
            eager.step(draw(rows, rows))
            step(draw(rows, rows))
    assert len(step.recordings) == 2 and equal(eager, ours)
    assert len([w for w in caught if "recorded 2 signatures" in str(w.message)]) == 1


def _freeze(run: Run) -> None:
    next(run.model.parameters()).requires_grad_(False)


def _evaluate(run: Run) -> None:
    run.model.eval()


def _assign(run: Run) -> None:
    state = {name: value.clone() for name, value in run.model.state_dict().items()}
    run.model.load_state_dict(state, assign=True)
    run.optimizer.param_groups[0]["params"] = list(run.model.parameters())


def _decay(run: Run) -> None:
    run.optimizer.param_groups[0]["weight_decay"] = 0.1


@pytest.mark.parametrize("change", [_freeze, _evaluate, _assign, _decay])
def test_a_changed_model_is_recorded_anew(on_cpu: None, change: Callable[[Run], None]) -> None:
    eager, ours = Run(), Run()
    step = captured(ours.step)
    for i in range(10):
        if i == 5:
            change(eager)
            change(ours)
        eager.step(draw(i))
        step(draw(i))
    assert step._recorder.recorded == 2 and equal(eager, ours)


def test_a_mode_that_comes_back_finds_its_graph(on_cpu: None) -> None:
    run = Run()
    step = captured(run.step)
    for i in range(16):
        run.model.train(i % 8 < 4)
        step(draw(i))
    assert step._recorder.recorded == 2 and step._recorder.replayed > 6


def test_an_evaluation_between_steps_changes_nothing(on_cpu: None) -> None:
    eager, ours = Run("zero1"), Run("zero1")
    step = captured(ours.step)
    for i in range(8):
        eager.step(draw(i))
        step(draw(i))
        with torch.no_grad():
            assert torch.equal(eager.model(draw(9)), ours.model(draw(9)))
    assert step._recorder.recorded == 1 and equal(eager, ours)


def test_gradients_that_were_not_there_when_it_was_recorded_keep_a_call_eager(
    on_cpu: None,
) -> None:
    eager, ours = Run(), Run()
    step = captured(ours.step)
    for i in range(8):
        for run in (eager, ours):
            if i == 6:  # the step adds to it
                run.model(draw(20)).float().sum().backward()
        eager.step(draw(i))
        step(draw(i))
    assert step._recorder.replayed == 4 and equal(eager, ours)


def test_what_a_recording_needs_of_gradients() -> None:
    p, q, r, s = (nn.Parameter(torch.zeros(1)) for _ in range(4))
    added, taken, made = torch.ones(1), torch.ones(1), torch.ones(1)
    gone = weakref.ref(torch.ones(1))
    before, after = Before(Watched()), Left(Watched())
    before.hung = [(p, None), (q, weakref.ref(added)), (r, taken), (s, gone)]
    after.hung = [(p, made), (q, added), (r, made), (s, None)]
    assert [(id(a), b) for a, b in before.needs(after)] == [(id(p), None), (id(q), added)]


def test_a_recording_that_fails_leaves_everything_as_it_was(on_cpu: None) -> None:
    """The stand-in runs the whole step and then fails: on a GPU nothing would have run, so only
    what Python notes is compared. The step goes on eagerly, and it is said once.
    """
    run = Run()
    step = captured(run.step)
    for i in range(3):
        step(draw(i))
    step._recorder.fails = RuntimeError("no")
    engine = engine_of(run.model)
    orders = list(engine.schedule.forward_order.current)
    backwards, groups = engine.backwards, dict(run.optimizer.param_groups[0])
    undone = []

    class Watching(Before):
        def restore(self) -> None:
            super().restore()
            undone.append(
                (
                    engine.backwards == backwards,
                    engine.schedule.forward_order.current == orders,
                    all(unit.state is State.FREE for unit in engine.units),
                    {**run.optimizer.param_groups[0]} == groups,
                    all(p.grad is None for p in run.model.parameters()),
                )
            )

    captures.Before = Watching  # type: ignore[misc]
    try:
        with pytest.warns(UserWarning, match="goes on eagerly: recording it failed"):
            step(draw(3))
    finally:
        captures.Before = Before  # type: ignore[misc]
    assert undone == [(True,) * 5]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(4, 7):
            step(draw(i))
    assert step.reason == "recording it failed" and step._recorder.recorded == 1


def test_gradients_that_a_failed_recording_let_go_of_are_there_again(on_cpu: None) -> None:
    """A step that begins by letting go of them, as most do: nobody holds them while it is recorded;
    those that somebody else holds are the very same afterwards.
    """
    run = Run()

    def begins_anew(batch: torch.Tensor) -> torch.Tensor:
        run.optimizer.zero_grad()
        loss = run.model(batch).float().square().mean()
        loss.backward()
        run.optimizer.step()
        return loss.detach()

    step = captured(begins_anew)
    for i in range(3):
        step(draw(i))
    first, *others = run.model.parameters()
    held, gone = first.grad, [weakref.ref(p.grad) for p in others]
    expected = [p.grad.to_local().clone() for p in (first, *others)]  # type: ignore[union-attr]
    step._recorder.fails = RuntimeError("no")
    found: list[Any] = []

    class Watching(Before):
        def restore(self) -> None:
            found.append([reference() for reference in gone])
            super().restore()
            found.append([p.grad for p in (first, *others)])
            found.append([grad.to_local().clone() for grad in found[1]])

    captures.Before = Watching  # type: ignore[misc]
    try:
        with pytest.warns(UserWarning, match="goes on eagerly: recording it failed"):
            step(draw(3))
    finally:
        captures.Before = Before  # type: ignore[misc]
    assert found[0] == [None] * len(others) and found[1][0] is held
    assert all(map(torch.equal, found[2], expected))
    step(draw(4))
    assert all(p.grad is not None for p in (first, *others))


def test_a_rate_changed_inside_the_step_is_not_captured(on_cpu: None) -> None:
    run = Run()

    def scheduled(batch: torch.Tensor) -> torch.Tensor:
        loss = run.step(batch)
        run.optimizer.param_groups[0]["lr"] *= 0.5
        return loss

    step = captured(scheduled)
    step(draw(0))
    with pytest.warns(UserWarning, match="the learning rate is changed inside the step"):
        for i in range(3):
            step(draw(i))
    assert float(run.optimizer.param_groups[0]["lr"]) == pytest.approx(0.1 / 16)


@pytest.mark.parametrize(("ms", "pays"), [(10.9, True), (11.1, False)])
def test_replays_that_are_slower_than_the_step_are_let_go_of(
    on_cpu: None, monkeypatch: pytest.MonkeyPatch, ms: float, pays: bool
) -> None:
    monkeypatch.setattr(Replayed, "replay_ms", ms)
    eager, ours = Run(), Run()
    step = captured(ours.step)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(10):
            assert torch.equal(eager.step(draw(i)), step(draw(i)))
    assert equal(eager, ours)
    assert (step.reason is None) == pays == bool(step.recordings)
    said = f"a replay takes {ms} ms and the step as it is 10.0: something in it takes a slower way"
    assert [said in str(each.message) for each in caught] == [] if pays else [True]


def test_a_step_that_asks_whether_it_is_recorded_may_be_told_no(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever takes part in a recording hears the truth."""

    def ask() -> bool:
        return True

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", ask)
    monkeypatch.setattr(torch.cuda, "is_initialized", ask)
    for denied in (True, False):
        with torch_private.answers_about_recording(denied) as asked:
            assert torch_private.is_recording() and not asked
            assert torch.cuda.is_current_stream_capturing() is not denied
            assert asked == {__name__}
    assert torch.cuda.is_current_stream_capturing is ask


def test_what_changes_in_every_call_ends_the_trying(on_cpu: None) -> None:
    run = Run()
    step = captured(run.step, warmup=3)
    with pytest.warns(UserWarning, match="the optimizer's settings changes from call to call"):
        for i in range(30):
            run.optimizer.param_groups[0]["weight_decay"] = i * 1e-4
            step(draw(i))
    assert step._recorder.recorded == 0


def test_a_record_of_calls_sees_them(on_cpu: None) -> None:
    run = Run()
    step = captured(run.step)
    for i in range(5):
        step(draw(i))
    replayed = step._recorder.replayed
    with sw.record():
        step(draw(5))
    assert step._recorder.replayed == replayed
    step(draw(6))
    assert step._recorder.replayed == replayed + 1


def test_on_the_host_the_step_goes_on_and_says_why_once() -> None:
    eager, ours = Run(), Run()
    step = sw.capture(ours.step)
    with pytest.warns(UserWarning, match="the model is on cpu, and only CUDA has graphs"):
        step(draw(0))
    eager.step(draw(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(1, 5):
            eager.step(draw(i))
            step(draw(i))
    assert equal(eager, ours) and "CUDA" in str(step.reason)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (numpy.zeros(2), "holds a ndarray"),
        (iter([1]), "holds a list_iterator"),
        ({1, 2}, "holds a set"),
        (torch.zeros(2, requires_grad=True), "holds a tensor that requires a gradient"),
    ],
)
def test_inputs_that_a_replay_would_not_read_are_named(value: Any, said: str) -> None:
    with pytest.raises(Uncapturable, match=rf"input\[0\]\['x'\] {said}"):
        signature_of([{"x": value}], [])


def test_a_signature_is_shapes_kinds_and_values() -> None:
    @dataclasses.dataclass(frozen=True)
    class Pair:
        x: Any
        y: Any

    one = torch.zeros(2, 3)
    model, kept = nn.Linear(1, 1), []
    values: list[Any] = [
        one, one.T, one.double(), one[:1], [one], (one,), {"a": one}, {"b": one}, Pair(one, 1),
        Pair(one, 2), Pair(one, 2.0), "a", model, nn.Linear(1, 1), None, True, 1,
    ]  # fmt: skip
    signatures = [signature_of(value, kept) for value in values]
    assert len(set(signatures)) == len(values)
    assert signature_of(Pair(one + 1, 2), kept) == signatures[values.index("a") - 2]
    assert any(each is model for each in kept)


def _on_ranks(case: str) -> tuple[str | None, tuple[int, ...], list[float]]:
    """On each rank: rank 1 has another shape in some calls, an input that cannot be, or a recording
    that fails.
    """
    captures.find_refusal = lambda engine: ""
    captures.host_state = lambda optimizers: None
    rank = dist.get_rank()
    run = Run(mesh=2)
    step = captured(run.step)
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(9):
            odd = rank == 1 and i in (5, 7)
            if case == "fails" and rank == 1 and step._recorder is not None:
                step._recorder.fails = RuntimeError("no")
            batch = draw(i, rows=3 if case == "shapes" and odd else 4)
            extra = {"more": iter(())} if case == "input" and odd else {}
            losses.append(float(step(batch, **extra)))
    return step.reason, step._recorder.counts, losses


@pytest.mark.parametrize(
    ("case", "reason", "counts"),
    [
        ("shapes", None, (3, 1, 1, 4)),
        ("input", "input['more'] holds a tuple_iterator", (1, 1, 1, 2)),
        ("fails", "recording it failed", (1, 1, 1, 0)),
    ],
)
def test_ranks_replay_together_or_not_at_all(
    two: Ranks, case: str, reason: str | None, counts: tuple[int, ...]
) -> None:
    for said, counted, losses in two.run(_on_ranks, case):
        assert (said or "").startswith(reason or "") and bool(said) == bool(reason)
        assert counted == counts
        assert len(losses) == 9


def test_wrong_arguments_say_what_is_expected() -> None:
    with pytest.raises(TypeError, match="a function that runs one training step, got a int"):
        sw.capture(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="warmup is 0, expected a whole number >= 1"):
        sw.capture(print, warmup=0)
