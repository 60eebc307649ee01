"""The clock process of a network that is emulated on a GPU, with the test in the GPU's place."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from shardwise.emulation.clock import (
    COPIED,
    DONE,
    ISSUED,
    LANES,
    MOST_LINKS,
    SILENT,
    Clock,
    Page,
    _Times,
)
from shardwise.emulation.networks import Transfer

WIRE = (("wire", 1.0),)


@pytest.fixture(name="clock")
def _clock() -> Iterator[Clock]:
    clock = Clock()
    yield clock
    clock.close()


def begin(clock: Clock, lane: int, transfer: Transfer) -> int:
    """As a stream does: announce it."""
    number = clock.issue(lane, transfer)
    clock.page.words[Page.begun(lane)] = number
    return number


def ends(clock: Clock, under_way: dict[int, int], limit: float = 20.0) -> dict[int, float]:
    """Seconds from now until each lane's transfer is over."""
    began, found = time.perf_counter(), {}
    while len(found) < len(under_way):
        taken = time.perf_counter() - began
        assert taken < limit, (under_way, found)
        for lane, number in under_way.items():
            if lane not in found and clock.page.words[Page.over(lane)] >= number:
                found[lane] = taken
        time.sleep(1e-4)
    return found


def test_no_transfer_is_over_before_its_time(clock: Clock) -> None:
    lane = clock.add_lane()
    for seconds in (0.0, 1e-3, 20e-3):
        began = time.perf_counter()
        ends(clock, {lane: begin(clock, lane, Transfer(seconds / 2, seconds / 2))})
        assert time.perf_counter() - began >= seconds


def test_what_was_issued_and_not_begun_does_not_end(clock: Clock) -> None:
    lane = clock.add_lane()
    first, second = (clock.issue(lane, Transfer(0.0, 0.0)) for _ in range(2))
    clock.page.words[Page.begun(lane)] = first
    ends(clock, {lane: first})
    time.sleep(0.05)
    assert clock.page.words[Page.over(lane)] == first < second


def test_lanes_on_one_link_share_its_time_and_others_do_not(clock: Clock) -> None:
    a, b, c = (clock.add_lane() for _ in range(3))
    under_way = {lane: begin(clock, lane, Transfer(0.0, 0.2, WIRE)) for lane in (a, b)}
    under_way[c] = begin(clock, c, Transfer(0.0, 0.2, (("other", 1.0),)))
    found = ends(clock, under_way)
    assert found[a] >= 0.39 and found[b] >= 0.39
    assert found[c] < min(found[a], found[b])


def test_a_lane_waits_for_room_instead_of_writing_over_what_is_under_way(clock: Clock) -> None:
    lane = clock.add_lane()
    numbers = [clock.issue(lane, Transfer(float(i), 0.0)) for i in range(ISSUED - 1)]
    assert clock.page.read_transfer(lane, numbers[0]) == (Transfer(0.0, 0.0), SILENT)
    # All slots but one are taken: the next goes on only after the first is over.
    clock.page.words[Page.begun(lane)] = numbers[0]
    last = clock.issue(lane, Transfer(7.0, 0.0))
    assert clock.page.words[Page.over(lane)] == numbers[0]
    assert clock.page.read_transfer(lane, last)[0] == Transfer(7.0, 0.0)
    assert clock.page.read_transfer(lane, numbers[1])[0] == Transfer(1.0, 0.0)


def take(clock: Clock, times: _Times, lane: int, answers: int, adds: float) -> float:
    """One transfer of 100 us on a stream that adds so much to it; what it took. Not in the clock's
    process: the test is its time too.
    """
    number = clock.issue(lane, Transfer(20e-6, 80e-6), answers)
    words = clock.page.words
    times.begin(1.0, lane, number)
    over = times.ends[lane]
    if answers == COPIED:
        words[Page.copied(lane)] = number
    times.end(over, lane)
    words[Page.done(lane)] = number
    times.learn(over + adds)
    return over + adds - 1.0


def test_the_clock_is_as_early_as_what_streams_add() -> None:
    clock = Clock()
    clock.close()  # its process would be a second clock
    lane, times = clock.add_lane(), _Times(clock.page)
    assert take(clock, times, lane, SILENT, 7e-6) == pytest.approx(107e-6)
    assert clock.page.early == 0
    for answers in (DONE, COPIED):
        for adds in (7e-6, 3e-6):  # beside compute, and on an idle device
            taken = [take(clock, times, lane, answers, adds) for _ in range(12)]
            assert taken[-1] == pytest.approx(100e-6, abs=0.2e-6)
    clock.page.unseen = 1e-6  # which the device sees, and this side does not
    taken = [take(clock, times, lane, DONE, 3e-6) for _ in range(12)]
    assert taken[-1] == pytest.approx(99e-6, abs=0.2e-6)


def test_nothing_is_learned_where_data_came_late() -> None:
    clock = Clock()
    clock.close()
    lane, times = clock.add_lane(), _Times(clock.page)
    number = clock.issue(lane, Transfer(20e-6, 80e-6), COPIED)
    times.begin(1.0, lane, number)
    times.end(times.ends[lane], lane)
    clock.page.words[Page.copied(lane)] = clock.page.words[Page.done(lane)] = number
    times.learn(1.5)
    assert clock.page.early == 0


def test_too_many_lanes_or_links_are_told(clock: Clock) -> None:
    lanes = [clock.add_lane() for _ in range(LANES)]
    with pytest.raises(ValueError, match=f"at most {LANES} groups"):
        clock.add_lane()
    uses = tuple((f"link {i}", 1.0) for i in range(MOST_LINKS + 1))
    with pytest.raises(ValueError, match=f"more than {MOST_LINKS} links"):
        clock.issue(lanes[0], Transfer(0.0, 1.0, uses))
    kinds = (Page.begun, Page.over, Page.copied, Page.done)
    words = {place(lane) for lane in lanes for place in kinds}
    assert len(words) == 4 * LANES and max(words) < len(clock.page.words)


def test_streams_do_not_wait_for_a_clock_that_is_gone(capfd: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    lane = clock.add_lane()
    number = begin(clock, lane, Transfer(1e6, 0.0))
    clock._process.kill()
    ends(clock, {lane: number})
    while not clock.failed:
        time.sleep(1e-3)
    with pytest.raises(RuntimeError, match="clock process of the emulated network has ended"):
        clock.issue(lane, Transfer(0.0, 0.0))
    time.sleep(0.05)
    assert "clock process of the emulated network was killed by SIGKILL (" in capfd.readouterr().err


def test_the_process_ends_with_its_parent() -> None:
    script = (
        "import os, signal\n"
        "from shardwise.emulation.clock import Clock\n"
        "print(Clock()._process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    pid, until = int(shown.stdout), time.perf_counter() + 20
    while _runs(pid):
        assert time.perf_counter() < until
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
