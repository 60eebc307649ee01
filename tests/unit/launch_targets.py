"""What `test_launch.py` runs on the ranks; importable by name from another process."""

import contextlib
import os
import signal
import socket
import sys
import time
from pathlib import Path

from shardwise.errors import UserError

RANK = int(os.environ.get("RANK", "-1"))


def write_environment(folder):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    text = " ".join(os.environ[name] for name in names)
    (Path(folder) / f"rank{RANK}").write_text(text)


def announce(folder):
    unfinished = Path(folder) / f"unfinished{RANK}"
    unfinished.write_text(str(os.getpid()))
    unfinished.rename(Path(folder) / f"pid{RANK}")
    while len(list(Path(folder).glob("pid*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)


def hang(folder):
    announce(folder)
    time.sleep(600)


def hang_deaf(folder):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    hang(folder)


def fail_last(folder):
    """The last rank raises; the others, waiting for it, see their connection break."""
    connect(folder, deep_fault)


def deep_fault():
    raise ZeroDivisionError("the fault that began it")


def exit_last(folder):
    connect(folder, lambda: sys.exit(7))


def kill_last(folder):
    connect(folder, lambda: os.kill(os.getpid(), signal.SIGKILL))


def connect(folder, last_does):
    """Rank 1 connects to rank 0 and does something; rank 0 raises as soon as it is left alone."""
    announce(folder)
    path = str(Path(folder) / "socket")
    if RANK == 0:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path)
            server.listen()
            peer, _ = server.accept()
            if peer.recv(1) == b"":
                raise ConnectionResetError("connection closed by peer")
    with socket.socket(socket.AF_UNIX) as client:
        while client.connect_ex(path):
            time.sleep(0.01)
        last_does()


def fail_while_others_hang(folder, deaf):
    announce(folder)
    if RANK == 1:
        (Path(folder) / "fault").write_text(str(time.monotonic()))
        deep_fault()
    if deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


def fail_in_gloo(folder):
    """Rank 1 raises while rank 0 waits for it in a collective."""
    import torch
    import torch.distributed as dist

    from shardwise.trainer.group import open_group

    open_group("gloo")
    dist.all_reduce(torch.ones(4))
    announce(folder)
    if RANK == 1:
        deep_fault()
    dist.all_reduce(torch.ones(4))


def list_doors(folder):
    """Meet; every address at which this rank, its watcher and gloo listen."""
    import torch
    import torch.distributed as dist

    import shardwise as sw
    from shardwise.trainer.group import open_group

    open_group("gloo")
    sw.shard(torch.nn.Linear(4, 4), sw.Plan.of("zero3", mesh=2))
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    held = set()
    for pid in ("self", *children):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # that of the folder itself
                held.add(os.readlink(fd))
    doors = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in held:
                doors.append(fields[1].partition(":")[0])
    (Path(folder) / f"doors{RANK}").write_text(" ".join(doors))
    if RANK == 0:
        with socket.socket() as other:
            assert other.connect_ex(("127.0.0.1", int(os.environ["MASTER_PORT"]))) == 0
        with socket.socket() as other:
            assert other.connect_ex(("127.0.0.2", int(os.environ["MASTER_PORT"]))) != 0
    dist.barrier()


def user_error(folder):
    announce(folder)
    raise UserError("the file is missing: give another")


def die_as(last, number):
    """The last rank is killed by a signal; the others wait for it."""
    if int(os.environ["RANK"]) == last:
        os.kill(os.getpid(), number)
    time.sleep(600)


def raise_in_spawn():
    deep_fault()


def stop_when_told(folder, steps):
    """A run of short steps that ends by SIGTERM to any rank after one more, as the trainer does."""
    from shardwise.children import Stopped
    from shardwise.trainer.stopping import StopNotice

    with StopNotice(RANK) as notice:
        announce(folder)
        for _ in range(steps):
            time.sleep(0.05)
            if notice.asked:
                raise Stopped("stopped after step 3")
