"""Checkpoints of one process: files, manifests, rotation, URLs, values beside tensors."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections import Counter, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint import CheckpointError, CorruptCheckpoint, Manifest
from shardwise.checkpoint.collect import cut_box
from shardwise.checkpoint.manifest import Box, checksum, find_gap, seal
from shardwise.checkpoint.pieces import boxes_of_range
from shardwise.checkpoint.trees import decode, encode


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3, bias=False)
        self.b.weight = self.a.weight
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.none = nn.Parameter(torch.zeros(0, 4))
        self.register_buffer("kept", torch.arange(3))
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.notes: dict[str, Any] = {"seen": 3}

    def get_extra_state(self) -> dict[str, Any]:
        return self.notes

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.notes = state


@pytest.fixture(autouse=True)
def alone(no_group: None) -> None:
    """Without a process group."""


def test_the_files_are_safetensors_and_json(tmp_path: Path) -> None:
    model = Tied()
    saving = sw.save(tmp_path, model, step=7)
    assert saving.done and saving.wait() == saving.path == str(tmp_path / "step-00000007")
    assert (tmp_path / "latest").read_text() == "step-00000007\n"
    tensors = safetensors.torch.load_file(Path(saving.path) / "rank-00000.safetensors")
    assert torch.equal(tensors["model/a.weight@0,0"], model.a.weight)
    assert tensors["model/scale@"].item() == 2.0
    table = json.loads((Path(saving.path) / "manifest.json").read_text())
    assert table["format"] == "shardwise" and table["version"] == 1
    assert table["aliases"] == {"b.weight": "a.weight"}
    assert table["tensors"]["model/none"] == {"shape": [0, 4], "dtype": "float32", "pieces": []}
    assert "model/scratch" not in table["tensors"]


def test_ties_extra_states_and_other_names_come_back(tmp_path: Path) -> None:
    model = Tied()
    sw.save(tmp_path, model)
    other = Tied()
    other.notes = {}
    other.b = nn.Linear(3, 3, bias=False)  # no longer tied
    assert sw.load(tmp_path, other).missing == []
    assert torch.equal(other.b.weight, model.a.weight) and other.notes == {"seen": 3}
    with torch.no_grad():
        other.b.weight.add_(1)
    sw.save(tmp_path / "untied", other)
    before = model.a.weight.detach().clone()
    with pytest.raises(CheckpointError, match="are one parameter here, but differ"):
        sw.load(tmp_path / "untied", model)
    assert torch.equal(model.a.weight, before)
    wrapped = nn.Module()
    wrapped._orig_mod = Tied()  # as torch.compile does
    sw.load(tmp_path, wrapped)
    assert torch.equal(wrapped._orig_mod.a.weight, before)


def test_names_count_up_and_the_newest_is_the_last_saved(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    paths = [sw.save(tmp_path, model, step=step).path for step in (20, 20, 5)]
    assert [Path(path).name for path in paths] == [
        "step-00000020", "step-00000020-2", "step-00000005",
    ]  # fmt: skip
    assert checkpoint.all_of(tmp_path) == paths[::-1]
    (tmp_path / "latest").write_text("step-00000099\n")  # stale: nobody depends on it
    assert sw.load(tmp_path, model).path == checkpoint.newest(tmp_path) == paths[2]
    assert checkpoint.newest(tmp_path / "nothing") is None
    (tmp_path / "step-00000030").mkdir()  # no manifest: no checkpoint
    assert checkpoint.newest(tmp_path) == paths[2]


def test_a_run_says_where_its_checkpoints_are(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(CheckpointError, match=r"has no checkpoint, and is none$"):
        sw.load(tmp_path, model)
    sw.save(tmp_path / "checkpoints", model, step=1)
    with pytest.raises(CheckpointError, match=r"is none: those of a run are in .*/checkpoints"):
        sw.load(tmp_path, model)


def test_rotation_never_removes_the_last_finite_one(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    for step in range(3):
        sw.save(tmp_path, model, step=step, keep_latest_k=2)
    assert [Path(p).name[-1] for p in checkpoint.all_of(tmp_path)] == ["2", "1"]
    with torch.no_grad():
        model.bias[0] = math.nan
    for step in range(3, 7):
        sw.save(tmp_path, model, step=step, keep_latest_k=2)
    assert [Path(p).name[-1] for p in checkpoint.all_of(tmp_path)] == ["6", "5", "2"]
    flags = [Manifest.read(path).finite for path in checkpoint.all_of(tmp_path)]
    assert flags == [False, False, True]


def test_an_object_store_has_no_rename_and_needs_none(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    root = f"memory://{tmp_path.name}"
    for step in (1, 2, 3):
        saving = sw.save(root, model, optimizer, step=step, keep_latest_k=2, asynchronous=step == 3)
    assert saving.wait() == f"{root}/step-00000003"
    assert checkpoint.all_of(root) == [f"{root}/step-00000003", f"{root}/step-00000002"]
    other = nn.Linear(2, 2)
    assert sw.load(root, other).step == 3 and torch.equal(other.weight, model.weight)
    assert checkpoint.verify(root) == []
    local = sw.save(f"file://{tmp_path}", model).path
    assert local == str(tmp_path / "step-00000000")
    with pytest.raises(CheckpointError, match="cannot open nonsense://x"):
        sw.save("nonsense://x", model)


def test_verify_lists_what_is_wrong(tmp_path: Path) -> None:
    path = Path(sw.save(tmp_path, nn.Linear(64, 64), extra={"t": torch.arange(99)}).path)
    assert checkpoint.verify(tmp_path) == []
    file = path / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    problems = checkpoint.verify(path)
    assert len(problems) == 2 and all(str(file) in problem for problem in problems)
    file.write_bytes(data[:-1])
    assert "the manifest says" in checkpoint.verify(path)[0]
    file.unlink()
    assert "is not there" in checkpoint.verify(path)[0]
    assert "has no checkpoint" in checkpoint.verify(tmp_path / "no")[0]


def test_errors_of_a_save_are_told_once_and_leave_no_trace(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    for how, text in (
        ({"step": -1}, "step is -1"),
        ({"keep_latest_k": 0}, "keep_latest_k is 0"),
        ({"extra": {"f": object()}}, "extra/0/f is a builtins.object"),
        ({"extra": [1]}, "expected a dict"),
    ):
        with pytest.raises(CheckpointError, match=text):
            sw.save(tmp_path / "x", model, **how)
    other = torch.optim.SGD(nn.Linear(2, 2).parameters())
    with pytest.raises(CheckpointError, match="is none of the model's"):
        sw.save(tmp_path / "x", model, other)
    with pytest.raises(CheckpointError, match="on the meta device"):
        sw.save(tmp_path / "x", nn.Linear(2, 2, device="meta"))
    assert not (tmp_path / "x").exists()
    (tmp_path / "file").write_text("")
    saving = sw.save(tmp_path / "ok", model, asynchronous=True)
    saving.wait()
    with pytest.raises(CheckpointError, match="file"):
        sw.save(tmp_path / "file", model)


# Manifests (what reads them refuses what is wrong)


def _body(tmp_path: Path) -> dict[str, Any]:
    path = Path(sw.save(tmp_path, nn.Linear(4, 2), step=0).path)
    table = json.loads((path / "manifest.json").read_text())
    return {k: v for k, v in table.items() if k not in ("format", "version", "crc", "serial")}


WEIGHT = ("tensors", "model/weight")
PIECE = (*WEIGHT, "pieces", 0)
FILE = "rank-00000.safetensors"
WRONG: list[tuple[tuple[Any, ...], Any]] = [
    (("step",), -1), (("step",), "7"), (("step",), True), (("step",), 1 << 70), (("world",), 0),
    (("finite",), 1), (("plan",), []), (("files",), []), (("files", FILE, "bytes"), 1 << 80),
    (("files", FILE, "bytes"), 9), (("files", FILE, "crc"), -1), (("files", FILE), 3),
    (("files", "../../etc/passwd"), {"bytes": 9, "crc": 0}), ((*PIECE, "file"), "../x"),
    (("files", "/abs.safetensors"), {"bytes": 9, "crc": 0}), ((*WEIGHT, "dtype"), "object"),
    ((*WEIGHT, "dtype"), None), ((*WEIGHT, "shape"), [1 << 60, 1 << 60]),
    ((*WEIGHT, "shape"), "ab"), ((*WEIGHT, "shape"), [2, -4]), ((*WEIGHT, "shape"), [4, 4]),
    ((*WEIGHT, "shape"), [2, 4.0]),
    ((*PIECE, "offset"), [1, 0]), ((*PIECE, "offset"), [0]), ((*PIECE, "shape"), [2, 5]),
    ((*PIECE, "crc"), 1 << 33), ((*PIECE, "name"), 4), (("tensors", "evil"), {}),
    (("tensors", "other/x"), {}), (("aliases",), {"x": "nothing"}),
    (("optimizer",), {"class": "A"}),
    (("extra_of",), [5]), (("random",), [1, 2, 3]), (("unknown",), 1), (("versions",), {"a": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "value"), WRONG, ids=str)
def test_a_manifest_with_a_wrong_value_is_refused(
    tmp_path: Path, path: tuple[Any, ...], value: Any
) -> None:
    body = _body(tmp_path)
    assert Manifest.parse(seal(body).encode()).step == 0
    at: Any = body
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    with pytest.raises(CorruptCheckpoint):
        Manifest.parse(seal(body).encode())


def test_manifests_of_other_kinds_are_refused(tmp_path: Path) -> None:
    body = _body(tmp_path)
    for text, error in (
        (seal(body, version=2), "has format version 2"),
        (seal(body).replace('"step":0', '"step":1'), "is damaged"),
        ("{}", "is no manifest"),
        ("", "is no manifest"),
        (seal(body)[:-1], "is damaged"),
        ("\x80\x04K\x01.", "is no manifest"),
    ):
        with pytest.raises(CheckpointError, match=error):
            Manifest.parse(text.encode("latin1"))
    deep: Any = []
    for _ in range(200):
        deep = [deep]
    with pytest.raises(CorruptCheckpoint, match="too deep"):
        decode(deep, lambda key: torch.empty(0))


# Values, boxes, checksums


def test_values_come_back_as_they_were() -> None:
    value = {
        "plain": [1, 2.5, None, True, "x"], "tuple": (1, (2,)), "inf": [math.inf, -math.inf],
        "keys": {1: "a", (2, 3): "b"}, "set": {1, 2}, "counter": Counter([1, 1, 2]),
        "deque": deque([1, 2], maxlen=4), "bytes": b"\x00\xff", "$odd": 1,
        "scalar": torch.tensor(1.5, dtype=torch.bfloat16), "tensor": torch.arange(100),
        "array": np.arange(30, dtype=np.uint16), "number": np.float32(0.1), "dtype": torch.float16,
        "empty": torch.empty(0, 3),
    }  # fmt: skip
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(encode(value, "extra", tensors), allow_nan=False)
    assert set(tensors) == {"extra/12", "extra/9", "extra/10", "extra/11"} & set(tensors)
    back = decode(json.loads(text), tensors.__getitem__)
    for key, expected in value.items():
        got = back[key]
        assert type(got) is type(expected), key
        if isinstance(expected, torch.Tensor):
            assert torch.equal(got, expected) and got.dtype == expected.dtype, key
        elif isinstance(expected, np.ndarray):
            assert np.array_equal(got, expected) and got.dtype == expected.dtype
        else:
            assert got == expected, key
    assert math.isnan(decode(encode(math.nan, "", {}), tensors.__getitem__))


def test_ranges_of_elements_are_boxes_in_order() -> None:
    for shape in ((7,), (3, 4), (2, 3, 5), (1, 6), (4, 1, 2)):
        whole = torch.arange(math.prod(shape)).view(shape)
        for start in range(whole.numel() + 1):
            for stop in range(start, whole.numel() + 1):
                boxes = list(boxes_of_range(shape, start, stop))
                parts = [whole[box.within(Box.whole(shape))].reshape(-1) for box in boxes]
                joined = torch.cat(parts) if parts else whole.view(-1)[:0]
                assert torch.equal(joined, whole.view(-1)[start:stop]), (shape, start, stop)


def test_boxes_are_cut_without_gaps() -> None:
    for shape in ((100, 3), (1, 1000), (5, 7, 11), (3,)):
        pieces = list(cut_box(Box.whole(shape), 4, most=64))
        assert find_gap(shape, pieces) is None and all(4 * box.numel <= 64 for box in pieces)
    halves = [Box((0, 0), (2, 2)), Box((0, 2), (2, 2)), Box((0, 1), (1, 4))]
    assert find_gap((2, 4), halves[:2]) is None
    assert "elements" in (find_gap((2, 4), halves[:1]) or "")
    assert "overlap" in (find_gap((2, 4), [halves[0], Box((0, 1), (2, 2))]) or "")


def test_any_flipped_bit_and_any_exchange_changes_the_checksum() -> None:
    generator = np.random.default_rng(0)
    for size in (0, 1, 100, 8192, 3 * 8192 + 77):
        data = bytearray(generator.bytes(size))
        right = checksum(data)
        for at in {*range(0, size, 397), size - 1} if size else ():
            for bit in (1, 128):
                data[at] ^= bit
                assert checksum(data) != right, (size, at)
                data[at] ^= bit
        assert checksum(data) == right
    rows = bytearray(generator.bytes(2 * 8192))
    assert checksum(rows) != checksum(rows[8192:] + rows[:8192])
    assert checksum(rows) != checksum(rows[8:16] + rows[:8] + rows[16:])


def test_odd_dtypes_and_strides_come_back(tmp_path: Path) -> None:
    model = nn.Module()
    values = {
        "complex": torch.randn(3, 2, dtype=torch.complex64), "halves": torch.randn(5).half(),
        "float8": torch.randn(4).to(torch.float8_e4m3fn), "flags": torch.tensor([True, False]),
        "strided": torch.randn(4, 6).t(), "long": torch.arange(3), "byte": torch.arange(5).byte(),
    }  # fmt: skip
    for name, value in values.items():
        model.register_buffer(name, value.clone(memory_format=torch.preserve_format))
    sw.save(tmp_path, model)
    for name in values:
        getattr(model, name).zero_()
    sw.load(tmp_path, model)
    for name, value in values.items():
        got = getattr(model, name)
        bits = [t.contiguous().view(-1).view(torch.uint8) for t in (got, value)]
        assert torch.equal(*bits) and got.stride() == value.stride(), name


_ENDS_AT_ONCE = """
import sys, time, torch, shardwise as sw
from shardwise.checkpoint import storage
storage.watchers.append(lambda operation, path: time.sleep(0.5 * (operation == "create")))
sw.save(sys.argv[1], torch.nn.Linear(4, 4), step=1, asynchronous=True)
"""


def test_a_program_that_ends_at_once_ends_with_its_save(tmp_path: Path) -> None:
    """The thread begins to write when the main one is over."""
    run = [sys.executable, "-c", _ENDS_AT_ONCE, str(tmp_path)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert checkpoint.verify(tmp_path) == []
