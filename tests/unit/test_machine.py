"""Processors that refuse what they announce, and what is said of processes that signals end."""

import os
import signal
import subprocess
import sys

import pytest

from shardwise import children, processor
from shardwise.children import ChildFailed, describe_end
from shardwise.trainer.launch import start_ranks
from tests.unit import launch_targets

AMX = "processor : 0\nflags\t\t: fpu avx512_bf16 amx_bf16 amx_tile\n"
# As torch's product on such a machine: it dies by SIGILL unless the limit is set. Counts its runs.
REFUSED = (
    "import os, signal\n"
    "open({log!r}, 'a').write('x')\n"
    "'ONEDNN_MAX_CPU_ISA' in os.environ or os.kill(os.getpid(), signal.SIGILL)"
)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Pretends: a processor with these flags, a product that ends so, a home of its own."""
    for name in (processor.LIMIT, processor.ANSWER, "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    runs = tmp_path / "runs"

    def pretend(cpuinfo=AMX, product=REFUSED):
        (tmp_path / "cpuinfo").write_text(cpuinfo)
        monkeypatch.setattr(processor, "_CPUINFO", tmp_path / "cpuinfo")
        monkeypatch.setattr(processor, "_PRODUCT", product.format(log=str(runs)))
        return lambda: len(runs.read_text()) if runs.exists() else 0

    yield pretend
    for name in (processor.LIMIT, processor.ANSWER):
        os.environ.pop(name, None)


def forget():
    """As another program would find it."""
    for name in (processor.LIMIT, processor.ANSWER):
        os.environ.pop(name, None)


def test_where_amx_is_refused_the_limit_is_set_after_one_probe(machine, capfd):
    probes = machine()
    processor.settle(probe=False)  # importing starts no process
    assert (probes(), processor.LIMIT in os.environ) == (0, False)
    processor.settle()
    assert os.environ[processor.LIMIT] == "AVX512_CORE_BF16"
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and "announces AMX but refuses it" in said
    processor.settle()  # as in a rank that this process starts
    assert capfd.readouterr().err == ""
    forget()
    processor.settle(probe=False)  # as another program does when it imports shardwise
    assert os.environ[processor.LIMIT] == "AVX512_CORE_BF16"
    assert probes() == 1


@pytest.mark.parametrize(
    ("cpuinfo", "product", "expected"),
    [
        ("flags : fpu avx2\n", REFUSED, 0),  # announces nothing: pays nothing
        (AMX, "open({log!r}, 'a').write('x')", 1),  # may use it
        (AMX, "open({log!r}, 'a').write('x'); raise ImportError('torch')", 2),  # tells nothing
    ],
)
def test_elsewhere_nothing_is_set(machine, capfd, cpuinfo, product, expected):
    probes = machine(cpuinfo, product)
    for _ in range(2):
        processor.settle()
        forget()
    assert (probes(), processor.LIMIT in os.environ) == (expected, False)
    assert capfd.readouterr() == ("", "")


def test_the_users_own_limit_wins(machine, monkeypatch):
    probes = machine()
    monkeypatch.setenv(processor.LIMIT, "AVX2")
    processor.settle()
    assert (os.environ[processor.LIMIT], probes()) == ("AVX2", 0)


def test_without_a_home_it_asks_again(machine, monkeypatch):
    probes = machine()
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    for _ in range(2):
        processor.settle()
        assert os.environ[processor.LIMIT] == "AVX512_CORE_BF16"
        processor.settle()
        forget()
    assert probes() == 2


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (7, "exited with code 7"),
        (-signal.SIGILL, "killed by SIGILL .*ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16"),
        (-signal.SIGKILL, "killed by SIGKILL .*out of host memory"),
        (-signal.SIGBUS, "killed by SIGBUS .*/dev/shm"),
        (-signal.SIGSEGV, "killed by SIGSEGV .*PYTHONFAULTHANDLER"),
        (-signal.SIGUSR1, "killed by SIGUSR1$"),
        (-40, "killed by signal 40$"),
    ],
)
def test_an_end_is_named_with_its_usual_cause(code, words):
    import re

    assert re.search(words, describe_end(code))


def test_ranks_that_die_or_raise_are_reported():
    with pytest.raises(ChildFailed, match=r"^rank 1 of 2 was killed by SIGILL \(the processor"):
        start_ranks(launch_targets.die_as, (1, signal.SIGILL), 2)
    with pytest.raises(ChildFailed, match=r"(?s)^rank 0 of 1 failed:.*the fault that began it"):
        start_ranks(launch_targets.raise_in_spawn, (), 1)


@pytest.mark.parametrize("number", [signal.SIGILL, signal.SIGKILL])
def test_no_command_dies_without_a_word(number):
    script = (
        "import os\nfrom shardwise import cli\n"
        f"cli.main = lambda: os.kill(os.getpid(), {number.value})\n"
        "raise SystemExit(cli.start())"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ran.returncode == 128 + number
    assert ran.stderr.startswith(f"shardwise: the command was killed by {number.name} (")


def test_a_supervised_command_is_the_command(tmp_path):
    script = (
        "import atexit, sys\nfrom shardwise.children import supervise\n"
        "atexit.register(lambda: print('once', flush=True))\n"
        "def command():\n    print(sys.stdin.read(), flush=True)\n    return 3\n"
        "sys.exit(supervise(command))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], input="in and out", capture_output=True, text=True
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (3, "in and out\nonce\n", "")


def test_a_supervised_command_ends_with_its_parent():
    script = (
        "import os, time\nfrom shardwise.children import supervise\n"
        "def command():\n    print(os.getpid(), flush=True)\n    time.sleep(100)\n"
        "supervise(command)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    assert pid != parent.pid
    parent.kill()
    parent.wait()
    assert parent.stdout.read() == ""  # closes when the command, too, has gone


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_parent_is_the_commands(number, code):
    script = (
        "import time\nfrom shardwise.children import supervise\n"
        "def command():\n    print('ready', flush=True)\n"
        "    try:\n        time.sleep(100)\n    except KeyboardInterrupt:\n        return 130\n"
        "raise SystemExit(supervise(command))"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        # Tests that a shell runs in the background ignore interrupts, and so would it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    parent.stdout.readline()
    parent.send_signal(number)
    assert parent.wait(20) == code


def test_ranks_are_not_supervised(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    assert children.supervise(os.getpid) == os.getpid()
