"""Recomputing some blocks, or all but some operators: the same numbers, and what is kept."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise as sw
from shardwise.cli import main
from shardwise.description.cluster import Cluster
from shardwise.description.language_model import LM
from shardwise.description.preset import SIZES
from shardwise.description.workload import Recomputing, Workload
from shardwise.errors import UserError
from shardwise.predict.ranking import Room
from shardwise.trainer.config import TrainConfig

SIZE = dataclasses.replace(SIZES["tiny"], layers=6, d_model=64, d_ff=128)
WORDS = ("nonreentrant", "op", "first-2", "every-3", "op-first-4", "op-every-2")


def build(word: str = "none", dropout: float = 0.0) -> LM:
    torch.manual_seed(0)
    return LM(SIZE, 64, word, dropout)


def draw(batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(
        0, SIZE.vocab, (2, batch, 64), generator=torch.Generator().manual_seed(1)
    )
    return tokens[0], tokens[1]


def gradients(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(2)
    model(*draw()).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(("dropout", "words"), [(0.0, WORDS), (0.3, ("op-first-4",))])
def test_one_process_gets_the_same_bits_by_every_word(dropout: float, words: Any) -> None:
    expected = gradients(build(dropout=dropout))
    for word in words:
        assert all(map(torch.equal, gradients(build(word, dropout)), expected)), word
        outside = sw.recompute(build(dropout=dropout), word)  # any model, as users call it
        assert all(map(torch.equal, gradients(outside), expected)), word


class Live(TorchDispatchMode):
    """Bytes of the storages that operators made and that still live."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {t.untyped_storage()._cdata for t in args if isinstance(t, torch.Tensor)}
        out = func(*args, **kwargs or {})
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in before and key not in self.sizes:
                    self.sizes[key] = storage.nbytes()
                    weakref.finalize(storage, self.sizes.pop, key, None)
        return out


@pytest.mark.parametrize("word", ["none", *WORDS])
def test_what_is_predicted_to_be_kept_is_kept(word: str) -> None:
    """Everything that lives between forward and backward of a real run, within 2 %."""
    model, live = build(word), Live()
    with live:
        loss = model(*draw(8))
    gc.collect()
    kept = sum(live.sizes.values())
    work = Workload(64, 8, checkpoint=word)
    with torch.device("meta"):
        described = sw.describe(LM(SIZE, 64), work, device="cpu")
    foretold = sum(segment.forward.net_bytes for _, segment in described.segments)
    assert foretold == pytest.approx(kept, rel=0.02)
    loss.backward()
    again = [s.recompute.flops > 0 for _, s in described.segments]
    recomputing = Recomputing.parse(word)
    chosen = recomputing.choose(range(SIZE.layers)) if recomputing else ()
    assert [place for place in range(SIZE.layers) if again[place + 1]] == list(chosen)


def test_op_recomputes_half_of_the_products_and_no_attention() -> None:
    with torch.device("meta"):
        model = LM(SIZE, 64)
    by = {w: sw.describe(model, Workload(64, 8, checkpoint=w)) for w in ("nonreentrant", "op")}
    counts = {}
    for word, described in by.items():
        kernels = [k for _, s in described.segments for k in s.recompute.kernels]
        for kind in ("matmul", "attention"):
            counts[word, kind] = sum(k.count for k in kernels if k.kind == kind)
    # Of the seven products of a block a whole recomputation leaves out the last, whose result
    # nobody needs; op makes the second, the fourth and the sixth.
    assert counts["nonreentrant", "matmul"] == 6 * SIZE.layers
    assert counts["op", "matmul"] == 3 * SIZE.layers
    assert counts["nonreentrant", "attention"] == SIZE.layers and not counts["op", "attention"]


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("", "expected one of none nonreentrant"),
        ("first-0", "expected one of"),
        ("op-", "expected one of"),
        ("opfirst-2", "expected one of"),
        ("first-9", "first-9, and the model has 6 blocks"),
        ("op-every-7", "every-7, and the model has 6 blocks"),
    ],
)
def test_a_wrong_word_is_told(word: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        sw.recompute(build(), word)
    with pytest.raises(UserError, match=rf"model.checkpoint: .*{told}"):
        TrainConfig.from_dict({"model": {"checkpoint": word, "layers": 6}})


def test_what_op_cannot_do_is_told() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.up(x).mul_(2))  # over the kept product

    def stack() -> nn.Module:
        return nn.Sequential(*[Block() for _ in range(3)])

    model = sw.recompute(stack(), "op")
    with pytest.raises(UserError, match=r"changed in place.*nonreentrant"):
        model(torch.randn(2, 8)).sum().backward()
    compiled = stack()
    compiled[1].compile()
    with pytest.raises(UserError, match=r"1 is compiled.*first-N"):
        sw.recompute(compiled, "op")
    with pytest.raises(UserError, match=r"run\.compile"):
        TrainConfig.from_dict({"model": {"checkpoint": "op"}, "run": {"compile": True}})


def test_no_more_is_recomputed_than_the_memory_asks_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster.load("h100x8")
    work = Workload(256, 16, sizes=((16,),))
    settings: dict[str, Any] = {"strategies": ("zero2",), "world": 2}
    free = sw.search("tiny", cluster, work, checkpoints=("none", "nonreentrant"), **settings)
    peaks = {c.workload.checkpoint: c.peak_bytes for c in free}
    room = Room.of(cluster.device, free[0].plan, 0)
    middle = room.needed(0.51 * peaks["none"] + 0.49 * peaks["nonreentrant"]) / 1e9
    found = sw.search("tiny", cluster, work, middle, **settings)
    words = {c.workload.checkpoint for c in found}
    assert "none" not in words and {"nonreentrant", "first-2"} <= words and "op" in words
    assert found[0].workload.checkpoint not in ("none", "nonreentrant")
    assert all(c.needed_bytes <= middle * 1e9 for c in found)
    whole = min(c.step_ms for c in found if c.workload.checkpoint == "nonreentrant")
    assert found[0].step_ms < whole
    # The command that `plan` prints recomputes what was ranked first.
    asked = ["plan", "--model", "tiny", "--world", "2", "--sequence", "256", "--tokens", "8192"]
    asked += ["--micro-batches", "1", "--strategies", "zero2", "--out", str(tmp_path / "plan.json")]
    main([*asked, "--budget-gb", f"{middle}"])
    out = " ".join(capsys.readouterr().out.split())
    word = out.split("model.checkpoint=")[1].split()[0]
    assert word == found[0].workload.checkpoint and f"recomputing {word}" in out
