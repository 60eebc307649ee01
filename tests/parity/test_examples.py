"""The examples run as their help says, on two ranks, and both engines print the same numbers."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDS = {
    "transformers_torchrun": ("transformers",),
    "transformers_accelerate": ("transformers", "accelerate"),
    "ffn_stack": (),
}
ENGINES = ("shardwise", "torch")
pytestmark = [pytest.mark.slow, pytest.mark.quiet, pytest.mark.timeout(600)]


def need(name: str) -> Path:
    for package in NEEDS[name]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed (pip install shardwise[test])")
    return EXAMPLES / f"{name}.py"


def torchrun(name: str, *variants: tuple[str, ...]) -> list[str]:
    """What the example prints on two ranks, for each tuple of arguments; all run at once."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    running = [
        subprocess.Popen(
            [*launcher, str(need(name)), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for arguments in variants
    ]
    try:
        printed = [each.communicate(timeout=400) for each in running]
    finally:
        for each in running:
            each.kill()
    for each, (out, errors) in zip(running, printed, strict=True):
        assert each.returncode == 0, out[-2000:] + errors[-4000:]
    return [out for out, _ in printed]


def losses(printed: str) -> list[float]:
    return [float(x) for x in re.findall(r"loss ([\d.]+)", printed)]


def test_every_example_is_listed() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(NEEDS)


@pytest.mark.parametrize("name", NEEDS)
def test_help_teaches(name: str) -> None:
    command = [sys.executable, str(need(name)), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.search(rf"torchrun --nproc-per-node \d examples/{name}.py", done.stdout)
    assert "--engine" in done.stdout


def test_transformers_under_torchrun(tmp_path: Path) -> None:
    """The default run learns, as torch's does, and saves a checkpoint that Transformers reads."""
    ours, theirs, bf16 = torchrun(
        "transformers_torchrun",
        ("--save", str(tmp_path)),
        ("--engine", "torch"),
        ("--steps", "11", "--layers", "1", "--bf16"),
    )
    assert losses(bf16)[-1] < 0.8 * losses(bf16)[0]
    assert losses(ours) == pytest.approx(losses(theirs), abs=2e-4)
    assert losses(ours)[-1] < 0.5 * losses(ours)[0]
    kept, whole = (
        int(n.replace(",", "")) for n in re.search(r"keeps ([\d,]+) of ([\d,]+)", ours).groups()
    )
    assert kept < 0.6 * whole

    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(tmp_path)
    assert sum(p.numel() for p in model.parameters()) == whole


def test_transformers_under_accelerate() -> None:
    ours, theirs = torchrun("transformers_accelerate", *(("--engine", e) for e in ENGINES))
    assert "shardwise: rank 0 keeps" in ours  # by the class of the prepared model
    assert "torch: rank 0 keeps" in theirs
    assert losses(ours) == pytest.approx(losses(theirs), abs=2e-4)
    assert losses(ours)[-1] < 0.5 * losses(ours)[0]


def test_feed_forward_stack() -> None:
    """Gradients do not depend on the engine, on when replicas reduce, or on the mesh."""
    norms = []
    modes = ((), ("--engine", "torch"), ("--each",), ("--mesh", "1x2"))
    short = ("--warmup", "1", "--steps", "2")
    for printed in torchrun("ffn_stack", *((*mode, *short) for mode in modes)):
        assert re.search(r"ms per step \| [\d,]+ tokens/s per rank", printed), printed
        norms.append(float(re.search(r"norm (\S+)", printed).group(1)))
    assert norms == pytest.approx([norms[0]] * 4, rel=1e-4)
