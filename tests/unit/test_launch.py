import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwise.errors import UserError
from shardwise.trainer.launch import RankFailed, run_ranks, start_ranks
from shardwise.trainer.stopping import StopNotice

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def _targets(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def launch(target, *args, nproc=2):
    run_ranks(f"launch_targets:{target}", args, nproc)


def pids(folder):
    return [int(file.read_text()) for file in folder.glob("pid*")]


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def fail(target, *args):
    with pytest.raises(RankFailed) as caught:
        launch(target, *args)
    return caught.value


def test_each_rank_gets_its_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    launch("write_environment", str(tmp_path), nproc=3)
    lines = [(tmp_path / f"rank{rank}").read_text().split() for rank in range(3)]
    assert [line[:4] for line in lines] == [[str(r), str(r), "3", "127.0.0.1"] for r in range(3)]
    assert len({line[4] for line in lines}) == 1
    assert int(lines[0][5]) == max(1, len(os.sched_getaffinity(0)) // 3)


@pytest.mark.parametrize("asked", ["5", "3,2", "many"])
def test_a_chosen_number_of_threads_is_kept(tmp_path, monkeypatch, asked):
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    launch("write_environment", str(tmp_path), nproc=1)
    assert (tmp_path / "rank0").read_text().split()[5] == asked


def test_a_launcher_without_output_starts_ranks(tmp_path):
    program = (
        "import os\n"
        "from shardwise.trainer.launch import PRELOADED, run_ranks\n"
        "PRELOADED.clear()\n"
        "os.close(1)\n"
        f"run_ranks('launch_targets:write_environment', ({str(tmp_path)!r},), 1)"
    )
    path = os.pathsep.join([str(HERE), *sys.path])
    ran = subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path})
    assert ran.returncode == 0 and (tmp_path / "rank0").exists()


@pytest.mark.quiet
@pytest.mark.parametrize("deaf", [False, True])
def test_a_rank_that_raises_ends_all_within_five_seconds(tmp_path, deaf):
    error = fail("fail_while_others_hang", str(tmp_path), deaf)
    assert time.monotonic() - float((tmp_path / "fault").read_text()) < 5
    assert error.rank == 1
    assert not [pid for pid in pids(tmp_path) if alive(pid)]


@pytest.mark.parametrize("target", ["fail_last", "fail_in_gloo"])
def test_only_the_first_traceback_is_shown(tmp_path, capfd, target):
    error = fail(target, str(tmp_path))
    assert str(error).startswith("rank 1 of 2 failed; the other ranks were ended:\nTraceback")
    assert str(error).count("Traceback") == 1
    assert "in deep_fault" in str(error)
    assert "ZeroDivisionError: the fault that began it" in str(error)
    assert "launch.py" not in str(error)
    assert capfd.readouterr() == ("", "")


def test_a_killed_rank_is_named_rather_than_the_peers_it_breaks(tmp_path, capfd):
    error = fail("kill_last", str(tmp_path))
    assert str(error).startswith("rank 1 of 2 was killed by SIGKILL")
    assert "out of host memory: lower data.batch" in str(error)
    assert "connection closed" not in str(error)
    assert capfd.readouterr() == ("", "")


def test_a_rank_that_exits_is_named_with_its_code(tmp_path):
    assert str(fail("exit_last", str(tmp_path))).startswith("rank 1 of 2 exited with code 7")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_listen_on_loopback_only(tmp_path):
    launch("list_doors", str(tmp_path))
    for rank in range(2):
        doors = (tmp_path / f"doors{rank}").read_text().split()
        assert doors and set(doors) == {"0100007F"}, doors  # 127.0.0.1


def test_a_user_error_comes_back_as_one(tmp_path):
    with pytest.raises(UserError, match=r"^the file is missing: give another$"):
        launch("user_error", str(tmp_path))


def test_under_torchrun_it_joins(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr("launch_targets.RANK", 0, raising=False)
    launch("announce", str(tmp_path), nproc=1)
    assert pids(tmp_path) == [os.getpid()]


def test_under_torchrun_another_number_of_ranks_is_an_error(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(UserError, match="nproc is 2, but torchrun has started 4 ranks"):
        launch("announce", "unused", nproc=2)


def start_launcher(folder, target, *args, nproc=2):
    """`shardwise`'s own way to run ranks and to end, in a process group of its own."""
    program = (
        "import sys\n"
        "from shardwise import cli\n"
        "from shardwise.trainer.launch import PRELOADED, run_ranks\n"
        "PRELOADED.clear()\n"  # these ranks need no torch
        "class Parser:\n"
        "    command = staticmethod(lambda _: run_ranks("
        f"'launch_targets:{target}', {(str(folder), *args)!r}, {nproc}))\n"
        "    parse_args = lambda self, _: self\n"
        "cli.build_parser = Parser\n"
        "sys.exit(cli.start())\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize("everybody", [False, True])
def test_sigterm_goes_on_to_the_ranks_and_the_command_ends_with_75(tmp_path, everybody):
    """Also where a scheduler signals every process of the job: ranks hear it more than once."""
    launcher = start_launcher(tmp_path, "stop_when_told", 600)
    wait_until(lambda: len(pids(tmp_path)) == 2, 60)
    if everybody:
        os.killpg(launcher.pid, signal.SIGTERM)
    else:
        os.kill(launcher.pid, signal.SIGTERM)
    _, told = launcher.communicate(timeout=60)
    assert launcher.returncode == 75, told
    assert told.splitlines()[-1] == "shardwise: stopped after step 3"
    assert "Traceback" not in told
    assert not [pid for pid in pids(tmp_path) if alive(pid)]


def test_a_second_sigterm_ends_ranks_at_once_and_one_that_has_no_step_yet_by_the_first(tmp_path):
    launcher = start_launcher(tmp_path, "hang", nproc=1)
    wait_until(lambda: pids(tmp_path), 60)
    os.kill(launcher.pid, signal.SIGTERM)
    _, told = launcher.communicate(timeout=60)
    assert launcher.returncode == 75 and "before its first step" in told

    class Ended(Exception):
        pass

    notice, codes = StopNotice(0), []

    def end(code):
        codes.append(code)
        raise Ended

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardwise.trainer.stopping.os._exit", end)
        with notice:
            os.kill(os.getpid(), signal.SIGTERM)
            wait_until(lambda: notice.asked, 5)
            notice._hear()  # the echo of the first
            assert codes == []
            patch.setattr("shardwise.trainer.stopping._ECHO_S", -1.0)
            with pytest.raises(Ended):
                notice._hear()
    assert codes == [143]


@pytest.mark.parametrize(
    ("target", "blow"),
    [("hang", signal.SIGINT), ("hang_deaf", signal.SIGINT), ("hang", signal.SIGKILL)],
)
def test_a_launcher_that_ends_leaves_no_rank_behind(tmp_path, target, blow):
    program = (
        "from shardwise.trainer.launch import PRELOADED, run_ranks\n"
        "PRELOADED.clear()\n"
        f"run_ranks('launch_targets:{target}', ({str(tmp_path)!r},), 2)"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])},
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        # Tests that a shell runs in the background ignore interrupts, and so would it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        wait_until(lambda: len(pids(tmp_path)) == 2, 60)
        os.kill(launcher.pid, blow)
        assert launcher.wait(10) != 0
        wait_until(lambda: not [pid for pid in pids(tmp_path) if alive(pid)], 5)
    finally:
        launcher.kill()
        launcher.wait()


def test_no_more_ranks_are_started_than_memory_holds() -> None:
    with pytest.raises(UserError, match="1000000000 ranks are asked for on this machine"):
        start_ranks("no.module:no_function", (), 10**9)
