"""A traced step of a device, brought to a step that was only timed."""

from __future__ import annotations

import pytest

from shardwise.engine.marks import CallMark, Marks
from shardwise.profiling.device import device_end
from shardwise.profiling.memory import Owners
from shardwise.profiling.merge import Peers
from shardwise.profiling.shown_step import RETIMED, Choice, Collected, choose
from shardwise.profiling.step_times import StepTimes
from shardwise.profiling.trace import Kernel, TorchTrace
from shardwise.profiling.traced_to_timed import StepMap, bring_kernels

pytestmark = pytest.mark.usefixtures("no_group")

US = 1000
SOURCE, TARGET = (
    (0, 1000 * US),
    (5000 * US, 5600 * US),
)  # the host needs 1 ms with a trace, 0.6 without
COMPUTE, WIRE = 7, 20  # streams


def make_marks() -> Marks:
    """A forward in its own step, a collective from the first tenth of it to the second, and a
    backward in the second half.
    """
    marks = Marks("cuda")
    marks.contexts.clear()
    for start, end in (SOURCE, TARGET):
        tenth = (end - start) // 10
        call = CallMark("all_gather", "a", "forward", "shard", 64, tuple(range(8)), start + tenth)
        call.issued = start + 2 * tenth
        marks.roots.append(start)
        marks.calls.append(call)
        marks.contexts += [(start, "a", "forward"), (start + 5 * tenth, "a", "backward")]
    return marks


def kernel(launched: int, start: int, took: int, stream: int = COMPUTE) -> Kernel:
    return Kernel("k", start * US, (start + took) * US, stream, launched * US, "kernel")


def places(kernels: list[Kernel]) -> list[tuple[float, float]]:
    """Begins and ends, in microseconds since the target began."""
    return [((k.start - TARGET[0]) / US, (k.end - TARGET[0]) / US) for k in kernels]


def bring(kernels: list[Kernel]) -> list[Kernel]:
    return bring_kernels(kernels, StepMap(make_marks(), SOURCE, TARGET))


def test_a_device_that_waits_for_its_host_waits_less() -> None:
    kernels = [kernel(at, at + 5, 40) for at in (300, 400, 700, 900)]
    # Launches are at six tenths of their time; each kernel takes what it took.
    assert places(bring(kernels)) == [(185, 225), (245, 285), (425, 465), (545, 585)]
    assert [k.launched - TARGET[0] for k in bring(kernels)] == [
        180 * US,
        240 * US,
        420 * US,
        540 * US,
    ]


def test_a_device_that_is_behind_its_host_stays_so() -> None:
    before = kernel(-300, -100, 400)
    kernels = [kernel(at, 300 + i * 200, 200) for i, at in enumerate((50, 250, 350, 450))]
    moved = bring([before, *kernels])
    assert places(moved) == [(-100, 300)] + [(300 + i * 200, 500 + i * 200) for i in range(4)]


def test_what_waited_for_a_collective_still_does() -> None:
    """The collective takes its time, however many kernels show it; compute begins behind it, and
    without it where the host says.
    """
    wire = [kernel(110, 120, 1, WIRE), kernel(120, 121, 30, WIRE), kernel(130, 419, 1, WIRE)]
    compute = [kernel(300, 425, 50), kernel(900, 905, 20)]
    moved = bring([*wire, *compute])
    begun = 66 + 10  # launched, and on its way
    assert places(moved) == [
        (begun, begun + 1), (begun + 1, begun + 31), (begun + 299, begun + 300),
        (begun + 305, begun + 355), (545, 565),
    ]  # fmt: skip


class Taken(StepTimes):
    """Two traced steps and two timed ones."""

    def __init__(self, *milliseconds: float) -> None:
        super().__init__("cpu")
        self.bounds = [(-1000 * US, 0), SOURCE, (2000 * US, 2600 * US), TARGET]
        self._took = [round(each * 1e6) for each in milliseconds]

    def durations(self) -> list[int]:
        return self._took


class Two(Peers):
    """Beside this rank one that has a reason of its own."""

    def exchange(self, value: object) -> list[object]:
        return [value, "the other's reason" if isinstance(value, str) else value]


def choose_of(steps: Taken, marks: Marks | None = None, peers: Peers | None = None) -> Choice:
    kernels = [kernel(at, at + 5, 40) for at in (-60, 300, 400, 700, 900)]
    kernels[-1] = kernel(900, 905, 95)
    seen = Collected(
        "cuda", marks or make_marks(), True, True, steps, range(2), None, 0, Owners(), Owners()
    )
    return choose(seen, TorchTrace(kernels=kernels), 4, peers or Peers())


def test_the_timed_step_is_shown_with_the_trace_brought_to_it() -> None:
    choice = choose_of(Taken(1.3, 1.0, 0.7, 0.62))
    assert choice.shown == 3 and choice.source == 1 and choice.note == RETIMED and not choice.warns
    assert choice.labels == {"step_ms": "0.620", "timing": "untraced", "traced_ms": "1.000"}
    assert choice.trace is not None
    opened, closed = (device_end(choice.trace.kernels, at) for at in TARGET)
    assert (closed - opened) / US == 545 + 95


def test_a_traced_step_that_happened_to_be_short_is_brought_to_a_timed_one_too() -> None:
    choice = choose_of(Taken(1.3, 0.5, 0.7, 0.62))
    assert (choice.shown, choice.note) == (3, RETIMED)


def test_a_trace_that_cost_nothing_is_shown_as_it_is() -> None:
    choice = choose_of(Taken(1.3, 1.0, 0.7, 0.99))
    assert (choice.shown, choice.source, choice.step_map, choice.note) == (1, 1, None, "")
    assert choice.labels == {"step_ms": "0.990", "timing": "untraced", "traced_ms": "1.000"}


def test_where_the_result_is_not_what_the_timed_step_took_the_traced_one_is_shown() -> None:
    choice = choose_of(Taken(1.3, 1.0, 0.7, 0.8))
    assert (choice.shown, choice.step_map, choice.warns) == (1, None, True)
    assert choice.labels["timing"] == "traced"
    assert "it would take 0.6 ms, and that took 0.8 ms" in choice.note


def test_where_the_timed_step_went_another_way_the_traced_one_is_shown() -> None:
    marks = make_marks()
    marks.contexts[-1] = marks.contexts[-1][0], "b", "backward"
    choice = choose_of(Taken(1.3, 1.0, 0.7, 0.62), marks)
    assert choice.shown == 1 and "where the traced step has" in choice.note


def test_all_ranks_show_the_traced_step_if_one_of_them_has_to() -> None:
    choice = choose_of(Taken(1.3, 1.0, 0.7, 0.62), peers=Two())
    assert choice.shown == 1 and "the other's reason" in choice.note
    assert choice.trace is not None and choice.trace.kernels[1].launched == 300 * US
