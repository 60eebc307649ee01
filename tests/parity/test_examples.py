"""The examples run as their help says, on two ranks, and both engines print the same numbers.

All runs share one start of torchrun (`run_examples.py`): Transformers takes seconds to import.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDS = {
    "transformers_torchrun": ("transformers",),
    "transformers_accelerate": ("transformers", "accelerate"),
    "ffn_stack": (),
}
SHORT = ("--warmup-steps", "1", "--measured-steps", "2")
RUNS: dict[str, dict[str, tuple[str, ...]]] = {
    "transformers_torchrun": {
        "ours": ("--save", "saved"),
        "theirs": ("--engine", "torch"),
        "bf16": ("--steps", "11", "--layers", "1", "--bf16"),
    },
    "transformers_accelerate": {"ours": (), "theirs": ("--engine", "torch")},
    "ffn_stack": {
        "ours": ("--delay-all-reduce", *SHORT),
        "theirs": ("--delay-all-reduce", "--engine", "torch", *SHORT),
        "each": ("--mesh", "2x1", *SHORT),
        "fsdp": ("--fsdp-only", *SHORT),
    },
}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def missing(name: str) -> list[str]:
    return [package for package in NEEDS[name] if importlib.util.find_spec(package) is None]


def free_ports(count: int) -> list[int]:
    with ExitStack() as probes:
        sockets = [probes.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all runs have left what they printed, and the checkpoint."""
    folder = tmp_path_factory.mktemp("examples")
    runs = []
    for example in (name for name in NEEDS if not missing(name)):
        asked = {"help": ("--help",), **RUNS[example]}
        for (variant, arguments), port in zip(asked.items(), free_ports(len(asked)), strict=True):
            run = {"name": f"{example}-{variant}", "script": str(EXAMPLES / f"{example}.py")}
            port = None if variant == "help" else port
            runs.append({**run, "arguments": arguments, "port": port})
    (folder / "runs.json").write_text(json.dumps(runs))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launcher, str(Path(__file__).with_name("run_examples.py")), "runs.json"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return folder


def printed(folder: Path, example: str, *variants: str, ranks: int = 2) -> list[str]:
    """What rank 0 of each run has printed; all ranks must have ended well."""
    if absent := missing(example):
        pytest.skip(f"{absent[0]} is not installed (pip install shardwise[test])")
    found = []
    for variant in variants:
        for rank in range(ranks):
            texts = {x: folder / f"{example}-{variant}.{rank}.{x}" for x in ("code", "out", "err")}
            said = texts["out"].read_text()[-2000:] + texts["err"].read_text()[-4000:]
            assert texts["code"].read_text() == "0", f"{variant}, rank {rank}: {said}"
        found.append((folder / f"{example}-{variant}.0.out").read_text())
    return found


def losses(printed: str) -> list[float]:
    return [float(x) for x in re.findall(r"loss ([\d.]+)", printed)]


def test_every_example_is_listed() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(NEEDS) == set(RUNS)


@pytest.mark.parametrize("name", NEEDS)
def test_torchrun_takes_no_option_of_an_example_for_its_own(name: str) -> None:
    """It looks for abbreviations of its own options also behind the script's name."""
    from torch.distributed.run import get_args_parser

    options = re.findall(r'add\("(--[\w-]+)"', (EXAMPLES / f"{name}.py").read_text())
    assert "--engine" in options and len(options) > 5
    parsed = get_args_parser().parse_args(["--nproc-per-node", "2", f"{name}.py", *options])
    assert parsed.training_script_args == options


@pytest.mark.parametrize("name", NEEDS)
def test_help_teaches(folder: Path, name: str) -> None:
    (said,) = printed(folder, name, "help", ranks=1)
    assert re.search(rf"torchrun --nproc-per-node \d examples/{name}.py", said)
    assert "--engine" in said


def test_transformers_under_torchrun(folder: Path) -> None:
    """The default run learns, as torch's does, and saves a checkpoint that Transformers reads."""
    ours, theirs, bf16 = printed(folder, "transformers_torchrun", "ours", "theirs", "bf16")
    assert losses(bf16)[-1] < 0.8 * losses(bf16)[0]
    assert losses(ours) == pytest.approx(losses(theirs), abs=2e-4)
    assert losses(ours)[-1] < 0.5 * losses(ours)[0]
    kept, whole = (
        int(n.replace(",", "")) for n in re.search(r"keeps ([\d,]+) of ([\d,]+)", ours).groups()
    )
    assert kept < 0.6 * whole

    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder / "saved")
    assert sum(p.numel() for p in model.parameters()) == whole


def test_transformers_under_accelerate(folder: Path) -> None:
    ours, theirs = printed(folder, "transformers_accelerate", "ours", "theirs")
    assert "shardwise: rank 0 keeps" in ours  # by the class of the prepared model
    assert "torch: rank 0 keeps" in theirs
    assert losses(ours) == pytest.approx(losses(theirs), abs=2e-4)
    assert losses(ours)[-1] < 0.5 * losses(ours)[0]
    for said in (ours, theirs):
        assert re.search(r"state dict: \d+ of Tensor$", said, re.MULTILINE)  # no DTensor is left


def test_feed_forward_stack(folder: Path) -> None:
    """Gradients do not depend on the engine, on when replicas reduce, or on the mesh."""
    norms = []
    modes = {"ours": "HSDP, delayed", "theirs": "HSDP, delayed", "each": "HSDP |", "fsdp": "FSDP |"}
    for said, mode in zip(printed(folder, "ffn_stack", *modes), modes.values(), strict=True):
        assert f"| {mode}" in said
        assert re.search(r"ms per step \| [\d,]+ tokens/s per rank", said), said
        norms.append(float(re.search(r"norm (\S+)", said).group(1)))
    assert norms == pytest.approx([norms[0]] * 4, rel=1e-4)
