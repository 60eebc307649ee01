"""Checkpoints of other programs: Hugging Face and torch DCP, in and out, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.cli import main
from shardwise.interchange.convert import convert
from shardwise.interchange.origins import open_origin
from tests.ranks import Ranks

VOCABULARY = 61


def tiny(family: str) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    if family == "gpt2":  # tied, with buffers
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
        return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes))
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 24, "max_position_embeddings": 32}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes))


def tokens(seed: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(seed))


def load_train_save(family: str, source: str, target: str) -> dict[str, Any]:
    """A model on meta, straight into the shards of its rank; then two steps."""
    with torch.device("meta"):
        model = tiny(family)
    if family == "llama":  # its buffer of frequencies is in no file: the program computes it
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    sw.shard(model, sw.Plan.of("zero3", mesh=2))
    loaded = sw.load(source, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model.eval()
    before = model(tokens(0)).logits.detach()
    model.train()
    for step in range(2):
        model(tokens(step), labels=tokens(step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    sw.save(target, model, optimizer, step=2)
    model.eval()
    return {"before": before, "after": model(tokens(0)).logits.detach(), "missing": loaded.missing}


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_hugging_face_model_is_loaded_trained_and_given_back(family, two: Ranks, tmp_path):
    torch.manual_seed(0)
    first = tiny(family).eval()
    first.save_pretrained(tmp_path / "hf", max_shard_size="6KB")
    shards = list((tmp_path / "hf").glob("model-*.safetensors"))
    assert len(shards) > 1
    results = two.run(load_train_save, family, str(tmp_path / "hf"), str(tmp_path / "own"))
    with torch.no_grad():
        torch.testing.assert_close(results[0]["before"], first(tokens(0)).logits)
    done = convert(str(tmp_path / "own"), str(tmp_path / "back"), "hf", max_shard_bytes=6000)
    assert done.left_out == ("optimizer", "random state")
    first.config.save_pretrained(tmp_path / "back")
    back = type(first).from_pretrained(tmp_path / "back").eval()
    with torch.no_grad():
        logits = back(tokens(0)).logits
    torch.testing.assert_close(results[0]["after"], logits)
    assert not torch.equal(results[0]["before"], results[0]["after"])
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    sizes = {
        name: (tmp_path / "back" / name).stat().st_size for name in index["weight_map"].values()
    }
    assert len(sizes) > 1
    own = open_origin(str(tmp_path / "own")).manifest.tensors
    for name, value in back.state_dict().items():
        if f"model/{name}" in own:
            file = load_file(tmp_path / "back" / index["weight_map"][name])
            assert torch.equal(file[name], value)


# torch's FSDP2 and DCP


class Net(nn.Module):
    """Frozen, tied, prime-sized and single numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 7)
        self.body = nn.Sequential(nn.Linear(7, 11), nn.GELU(), nn.Linear(11, 7))
        self.frozen = nn.Linear(7, 7, bias=False).requires_grad_(False)
        self.head = nn.Linear(7, 13, bias=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(self.body(self.embed(numbers))))


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    if kind == "sgd":
        return torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9))


def make(engine: str, kind: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    if engine == "torch":
        fully_shard(model.body)
        fully_shard(model)
    else:
        sw.shard(model, sw.Plan.of(engine, mesh=2))
    return model, make_optimizer(kind, model)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        numbers = torch.arange(13) + step
        model(numbers % 13).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def full(value: Any) -> Any:
    return value.full_tensor().clone() if isinstance(value, DTensor) else value


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Everything by name, whole."""
    names = {id(p): name for name, p in model.named_parameters()}
    found = {name: full(p.detach()) for name, p in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            found |= {f"{name}/{k}": full(v) for k, v in optimizer.state[parameter].items()}
            found[f"{name}/settings"] = {k: v for k, v in group.items() if k != "params"}
    return found


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value.float(), theirs[name].float()), name
        else:
            assert value == theirs[name], name


def torch_to_ours(folder: str, kind: str, flat: bool) -> None:
    """FSDP2 saves by DCP; ours loads that folder, and one converted from it."""
    import torch.distributed as dist

    model, optimizer = make("torch", kind, seed=1)
    train(model, optimizer, 3)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    saved = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer, options=options),
        "step": 3,
    }
    dcp.save(saved, checkpoint_id=f"{folder}/dcp")
    expected = state_of(model, optimizer)
    if dist.get_rank() == 0:
        convert(f"{folder}/dcp", f"{folder}/own", "shardwise")
    dist.barrier()
    for source in ("dcp", "own"):
        mine, own_optimizer = make("zero3", kind, seed=2)
        loaded = sw.load(f"{folder}/{source}", mine, own_optimizer)
        assert loaded.step == 3
        same(state_of(mine, own_optimizer), expected)
    train(mine, own_optimizer, 1)


def ours_to_torch(folder: str, kind: str, flat: bool) -> None:
    """Ours saves; converted, it is loaded by torch's own loader into FSDP2."""
    import torch.distributed as dist

    mine, own_optimizer = make("zero3", kind, seed=3)
    train(mine, own_optimizer, 3)
    sw.save(f"{folder}/mine", mine, own_optimizer, step=3)
    if dist.get_rank() == 0:
        convert(f"{folder}/mine", f"{folder}/for-torch", "dcp")
    dist.barrier()
    model, optimizer = make("torch", kind, seed=4)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    target = {
        "model": get_model_state_dict(model),
        "optim": get_optimizer_state_dict(model, optimizer, options=options),
        "step": 0,
    }
    dcp.load(target, checkpoint_id=f"{folder}/for-torch")
    assert target["step"] == 3
    set_model_state_dict(model, target["model"])
    set_optimizer_state_dict(model, optimizer, target["optim"], options=options)
    same(state_of(model, optimizer), state_of(mine, own_optimizer))


@pytest.mark.parametrize(("kind", "flat"), [("adamw", False), ("adamw", True), ("sgd", False)])
@pytest.mark.parametrize("way", [torch_to_ours, ours_to_torch])
def test_dcp_in_and_out_bit_for_bit_with_the_optimizer(way, kind, flat, two: Ranks, tmp_path):
    two.run(way, str(tmp_path), kind, flat)


def test_every_format_becomes_every_other_and_keeps_its_bits(tmp_path):
    source = {
        "w": torch.randn(5, 3), "half": torch.randn(4, 2).bfloat16(), "one": torch.tensor(3.5),
        "none": torch.empty(0, 4), "numbers": torch.arange(7), "flags": torch.tensor([True, False]),
    }  # fmt: skip
    save_file(source, tmp_path / "model.safetensors", metadata={"format": "pt"})
    torch.save({"state_dict": source}, tmp_path / "old.pt")
    starts = [tmp_path / "model.safetensors", tmp_path / "old.pt"]
    number = 0
    for start in starts:
        for way in (("shardwise", "dcp", "hf"), ("dcp", "shardwise", "hf"), ("dcp", "hf")):
            at = start
            for to in way:
                number += 1
                at, before = tmp_path / f"{number}", at
                convert(str(before), str(at), to)
            found = load_file(at / "model.safetensors")
            assert found.keys() == source.keys()
            for name, value in source.items():
                assert torch.equal(found[name], value)
                assert found[name].dtype == value.dtype


def test_prefixes_dtypes_and_ties(tmp_path):
    model = nn.Module()
    model.a, model.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    model.b.weight = model.a.weight
    sw.save(tmp_path / "own", model)
    own, hf = str(tmp_path / "own"), str(tmp_path / "hf")
    convert(own, hf, "hf", key_prefix="model.", dtype="bfloat16")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert torch.equal(found["model.a.weight"], model.a.weight.bfloat16())
    assert list(found) == ["model.a.weight"]
    convert(hf, str(tmp_path / "again"), "shardwise", key_prefix="model.")
    manifest = open_origin(str(tmp_path / "again")).manifest
    assert list(manifest.tensors) == ["model/a.weight"]
    assert manifest.aliases == {"b.weight": "a.weight"}
    with pytest.raises(sw.CheckpointError, match=r"hf is there already"):
        convert(own, hf, "hf")
    plain = nn.Module()
    plain.a, plain.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    with pytest.raises(sw.CheckpointError, match="bfloat16 in the checkpoint, float32 here"):
        sw.load(tmp_path / "again", plain)


def read_rows(folder: str) -> dict[str, int]:
    """How many bytes a rank reads for its half."""
    from shardwise.interchange import files

    read = 0
    whole = files.ForeignFile.read

    def count(self: Any, start: int, size: int) -> bytearray:
        nonlocal read
        read += size
        return whole(self, start, size)

    files.ForeignFile.read = count  # type: ignore[method-assign]
    try:
        with torch.device("meta"):
            model = nn.Linear(64, 4096, bias=False)
        sw.shard(model, sw.Plan.of("zero3", mesh=2))
        sw.load(folder, model)
    finally:
        files.ForeignFile.read = whole  # type: ignore[method-assign]
    return {"read": read, "all": 4 * 64 * 4096, "sum": float(full(model.weight).double().sum())}


def test_a_rank_reads_its_rows_only(two: Ranks, tmp_path):
    weight = torch.randn(4096, 64)
    save_file({"weight": weight}, tmp_path / "model.safetensors")
    for found in two.run(read_rows, str(tmp_path)):
        assert found["read"] < 0.51 * found["all"]
        assert found["sum"] == pytest.approx(float(weight.double().sum()))


# The commands


def test_inspect_shows_and_verifies(tmp_path, capsys):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    root = tmp_path / "root"
    for step in (1, 2):
        sw.save(root, model, optimizer, step=step, extra={"seen": torch.arange(100)})
    assert main(["inspect", str(root), "--json", str(tmp_path / "root.json")]) == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert "step-00000002" in lines[1] and "<- newest" in lines[1] and "whole" in lines[2]
    assert len(json.loads((tmp_path / "root.json").read_text())["checkpoints"]) == 2

    one = str(root / "step-00000002")
    assert main(["inspect", one, "--tensors", "--json", str(tmp_path / "one.json")]) == 0
    shown = capsys.readouterr().out
    assert "whole: every checksum is right" in shown and "AdamW, 1 group" in shown
    assert all(len(line) <= 80 for line in shown.splitlines() if str(tmp_path) not in line), shown
    told = json.loads((tmp_path / "one.json").read_text())
    assert told["sizes"]["optimizer exp_avg"]["bytes"] == 2 * (64 + 8) * 4
    assert told["tensors"]["model/0.weight"] == {"shape": [8, 8], "dtype": "float32", "pieces": 1}

    file = root / "step-00000002" / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    assert main(["inspect", one]) == 1
    assert "DAMAGED: 1 problem" in capsys.readouterr().out
    assert main(["inspect", one, "--no-verify"]) == 0
    assert main(["inspect", str(root)]) == 1
    assert "DAMAGED" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "absent")]) == 2


def test_convert_and_inspect_by_command(tmp_path, capsys):
    model = nn.Linear(4, 4)
    sw.save(tmp_path / "own", model, step=7)
    for source, to in [("own", "dcp"), ("dcp", "shardwise"), ("shardwise", "hf")]:
        assert main(["convert", str(tmp_path / source), str(tmp_path / to), "--to", to]) == 0
        assert main(["inspect", str(tmp_path / to), "--tensors"]) == 0
    shown = capsys.readouterr().out
    assert "torch distributed checkpoint (DCP)" in shown
    assert "Hugging Face safetensors" in shown
    assert (tmp_path / "shardwise" / "step-00000007").is_dir()
    kept = load_file(tmp_path / "hf" / "model.safetensors")
    assert torch.equal(kept["weight"], model.weight)
    assert main(["convert", str(tmp_path / "own"), str(tmp_path / "hf"), "--to", "hf"]) == 2
    assert "is there already" in capsys.readouterr().err
    assert not list(Path(tmp_path).glob("*.writing-*"))
