"""The recipes of docs/launch.md: run on one host and on two, and what cannot be run here checked by
its fields.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from shardwise.hosts import ADDRESSES, NAMES, Hosts, refusal, two_hosts

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "launch"
STEPS, SAVE_EVERY = 60, 10
MODEL = (
    "--plan", "zero3", "--set", "model.layers=2", "--set", "model.d_model=32",
    "--set", "model.d_ff=64", "--set", "data.seq=16",
)  # fmt: skip
on_hosts = pytest.mark.skipif(refusal() != "", reason=refusal())
WAIT_S = 150.0


def environment(**more: str) -> dict[str, str]:
    """torchrun and python are those of this interpreter."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    quiet = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "NPROC": "1"}
    source = {"PYTHONPATH": f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}"}
    return {**os.environ, **quiet, **source, "PATH": path, **more}


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with two_hosts("200mbit") as made:
        yield made


def finish(programs: list[subprocess.Popen[str]], logs: list[Path]) -> None:
    """All end well, in time."""
    deadline = time.monotonic() + WAIT_S
    try:
        codes = [each.wait(max(0.1, deadline - time.monotonic())) for each in programs]
    finally:
        for each in programs:
            each.kill()
            each.wait()
    assert codes == [0] * len(programs), "\n".join(log.read_text() for log in logs)


def steps_of(out: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def world_of(out: Path) -> int:
    return json.loads((out / "run.json").read_text())["world"]


def test_one_host(tmp_path: Path) -> None:
    words = ["bash", str(RECIPES / "one_host.sh"), *MODEL, "--steps", "3", "--out", "run"]
    done = subprocess.run(
        words, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=WAIT_S
    )
    assert done.returncode == 0, done.stderr
    assert steps_of(tmp_path / "run")[-1] == 3 and world_of(tmp_path / "run") == 1


@on_hosts
def test_two_hosts_that_are_known_beforehand(hosts: Hosts, tmp_path: Path) -> None:
    words = ["bash", str(RECIPES / "static.sh"), *MODEL, "--steps", "3", "--out", "run"]
    logs = [tmp_path / f"{name}.log" for name in NAMES]
    programs = []
    for i, log in enumerate(logs):
        env = environment(NODES="2", NODE=str(i), HEAD=ADDRESSES[0])
        with log.open("w") as file:
            programs.append(hosts.start(i, words, cwd=tmp_path, env=env, stdout=file, stderr=file))
    finish(programs, logs)
    assert steps_of(tmp_path / "run")[-1] == 3 and world_of(tmp_path / "run") == 2


@on_hosts
def test_slurm_on_two_hosts_begins_again_after_a_rank_is_killed(
    hosts: Hosts, tmp_path: Path
) -> None:
    """The script with SLURM's variables and stand-ins for its two programs: `srun` starts one task
    on each host, which is this script's last line on each. It runs the elastic recipe.
    """
    tools = tmp_path / "bin"
    tools.mkdir()
    # A slow scontrol: whoever reads the first name only is gone when the second comes.
    names = f"echo {NAMES[0]}; sleep 0.2; echo {NAMES[1]}"
    stand_ins = {"scontrol": names, "srun": 'exec "$@"'}
    for name, line in stand_ins.items():
        (tools / name).write_text(f"#!/bin/sh\n{line}\n")
        (tools / name).chmod(0o755)
    env = environment(
        SLURM_JOB_NUM_NODES="2", SLURM_JOB_NODELIST="host-[a-b]", SLURM_JOB_ID="4711",
        SLURM_GPUS_ON_NODE="1", SLURM_SUBMIT_DIR=str(ROOT), SAVE_EVERY=str(SAVE_EVERY),
    )  # fmt: skip
    env["PATH"] = f"{tools}:{env['PATH']}"
    out = tmp_path / "run"
    words = ["bash", str(RECIPES / "slurm.sbatch"), *MODEL, "--steps", str(STEPS), "--out", "run"]
    logs = [tmp_path / f"{name}.log" for name in NAMES]
    programs = []
    for i, log in enumerate(logs):
        with log.open("w") as file:
            programs.append(hosts.start(i, words, cwd=tmp_path, env=env, stdout=file, stderr=file))
    deadline = time.monotonic() + WAIT_S
    while not list(out.glob("checkpoints/step-*/manifest.json")):
        runs = time.monotonic() < deadline and not any(each.poll() for each in programs)
        assert runs, "\n".join(log.read_text() for log in logs)
        time.sleep(0.01)
    (rank,) = ranks_below(programs[1].pid)
    os.kill(rank, signal.SIGKILL)
    finish(programs, logs)
    assert steps_of(out) == list(range(1, STEPS + 1)) and world_of(out) == 2
    resumed = json.loads((out / "run.json").read_text())["resumed_after"]
    assert len(resumed) == 1 and resumed[0] in range(SAVE_EVERY, STEPS, SAVE_EVERY)


def ranks_below(pid: int) -> list[int]:
    """The trainer's processes among what this one has started: they are torchrun's children."""
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        words = Path(f"/proc/{child}/cmdline").read_text()
        if "shardwise.cli\0train" in words and "torchrun" not in words:
            found.append(int(child))
        else:
            found += ranks_below(int(child))
    return found


@pytest.mark.parametrize("name", sorted(path.name for path in RECIPES.glob("*.s*")))
def test_scripts_have_no_wrong_syntax_and_the_page_links_to_them(name: str) -> None:
    done = subprocess.run(["bash", "-n", str(RECIPES / name)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"(../examples/launch/{name})" in (ROOT / "docs" / "launch.md").read_text()


def test_slurm_starts_one_task_on_each_host() -> None:
    text = (RECIPES / "slurm.sbatch").read_text()
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", text, re.MULTILINE))
    assert asked["ntasks-per-node"] == "1" and int(asked["nodes"]) > 1
    assert asked["signal"].startswith("TERM@")
    # SLURM reads no directive behind the first command.
    assert text.index("#SBATCH --open-mode") < text.index("set -euo")


def test_the_manifest_is_the_elastic_recipe_on_pods_that_find_each_other() -> None:
    service, job = yaml.safe_load_all((RECIPES / "kubernetes.yaml").read_text())
    assert (service["kind"], service["apiVersion"]) == ("Service", "v1")
    assert (job["kind"], job["apiVersion"]) == ("Job", "batch/v1")
    name, spec = job["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    # A name for every pod, also before it is ready.
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert spec["completionMode"] == "Indexed" and pod["restartPolicy"] in ("OnFailure", "Never")
    (container,) = pod["containers"]
    words = container["command"] + container["args"]
    assert all(isinstance(word, str) for word in words)
    after = dict(itertools.pairwise(words))
    head, port = after["--rdzv-endpoint"].split(":")
    assert head == f"{name}-0.{pod['subdomain']}"
    assert int(port) == service["spec"]["ports"][0]["port"]
    assert int(after["--nnodes"]) == spec["completions"] == spec["parallelism"] > 1
    assert int(after["--nproc-per-node"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["volumes"]}
    assert after["--out"].startswith(mounts["runs"]) and "/dev/shm" in mounts.values()
    # Word for word what elastic.sh runs, with its defaults.
    values = {
        "NODES": after["--nnodes"], "NPROC": after["--nproc-per-node"], "HEAD": head,
        "PORT": port, "JOB": after["--rdzv-id"],
    }  # fmt: skip
    options = words[words.index("--resume") + 1 :]
    recipe = (RECIPES / "elastic.sh").read_text()
    echoed = recipe.replace("exec torchrun", "printf '%s\\n' torchrun")
    said = subprocess.run(
        ["bash", "-c", echoed, "elastic.sh", *options],
        env={"PATH": os.environ["PATH"], **values}, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert shlex.split(said) == words
