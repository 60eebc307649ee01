"""Files that mean harm, or are broken: each is refused with an error that says why. None runs code,
waits for anybody, writes anything or takes memory as it asks.
"""

from __future__ import annotations

import base64
import io
import json
import os
import pickle
import resource
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn

import shardwise as sw
from shardwise.checkpoint import CorruptCheckpoint, Manifest, verify
from shardwise.checkpoint.manifest import seal
from shardwise.cli import main
from shardwise.description.cluster_toml import load_cluster
from shardwise.errors import UserError
from shardwise.interchange.convert import convert
from shardwise.trainer.config import load_config
from shardwise.trainer.loop import load_plan

MOST_S = 1.0  # of this process's own time: other processes may have the machine
MOST_WAIT_S = 30.0
MOST_GROWTH_KB = 300_000


class Bomb:
    """Whoever unpickles it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3))


def body_of(folder: Path) -> dict[str, Any]:
    table = json.loads((folder / "manifest.json").read_bytes())
    return {k: v for k, v in table.items() if k not in ("format", "version", "crc", "serial")}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The body of a right manifest and the bytes of its data file."""
    root = tmp_path_factory.mktemp("good")
    made = model()
    optimizer = torch.optim.AdamW(made.parameters())
    made(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    folder = Path(sw.save(root, made, optimizer, step=1).path)
    return {"body": body_of(folder), "data": (folder / "rank-00000.safetensors").read_bytes()}


def refused(action: Callable[[], Any], phrase: str, folder: Path) -> None:
    """The error is a user's, says the phrase, comes soon, and leaves everything as it was."""
    before = sorted(folder.rglob("*"))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began, used = time.monotonic(), time.process_time()
    with pytest.raises(UserError, match=phrase) as found:
        action()
    assert time.process_time() - used < MOST_S
    assert time.monotonic() - began < MOST_WAIT_S
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < MOST_GROWTH_KB
    assert len(str(found.value)) < 2000, "the message repeats what the file says"
    assert sorted(folder.rglob("*")) == before, "something was written"


# Our own manifest

FILE = "rank-00000.safetensors"
WEIGHT = "model/0.weight"


def edit(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(body: dict[str, Any]) -> None:
        *above, last = path
        for part in above:
            body = body[part]
        body[last] = value

    return change


def rename_file(name: str) -> Callable[[dict[str, Any]], None]:
    def change(body: dict[str, Any]) -> None:
        body["files"][name] = body["files"].pop(FILE)
        for tensor in body["tensors"].values():
            for piece in tensor["pieces"]:
                piece["file"] = name

    return change


def drop(*path: Any) -> Callable[[dict[str, Any]], None]:
    def change(body: dict[str, Any]) -> None:
        *above, last = path
        for part in above:
            body = body[part]
        del body[last]

    return change


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


def across(body: dict[str, Any]) -> None:
    """Pieces that make comparing each with each other take hours."""
    count = 3000
    piece = body["tensors"][WEIGHT]["pieces"][0]
    pieces = [
        {**piece, "name": f"x{i}", "offset": [i, i], "shape": [count - i, 1]} for i in range(count)
    ]
    left = count * count - sum(count - i for i in range(count))
    pieces.append({**piece, "name": "rest", "offset": [0, 0], "shape": [1, left // 1]})
    body["tensors"][WEIGHT] = {"shape": [count, left], "dtype": "uint8", "pieces": pieces}
    body["tensors"][WEIGHT]["shape"] = [count, max(count, left)]


PIECE = ("tensors", WEIGHT, "pieces", 0)
MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "a path that leads up": (rename_file("../rank-00000.safetensors"), "is no name of a data file"),
    "an absolute path": (rename_file("/etc/passwd"), "is no name of a data file"),
    "a path with a nul": (rename_file("rank-00000.safetensors\0"), "is no name of a data file"),
    "more elements than exist": (edit("tensors", WEIGHT, "shape", value=[10**18]), "from 0 to"),
    "sizes whose product overflows": (
        edit("tensors", WEIGHT, "shape", value=[2**32, 2**32]), "more than any tensor has"),
    "a negative size": (edit("tensors", WEIGHT, "shape", value=[-3, 4]), "from 0 to"),
    "true as a size": (edit("tensors", WEIGHT, "shape", value=[True, 4]), "from 0 to"),
    "a fraction as a size": (edit("tensors", WEIGHT, "shape", value=[3.0, 4]), "from 0 to"),
    "too many dims": (edit("tensors", WEIGHT, "shape", value=[1] * 100), "at most 64"),
    "a file of more bytes than a disk": (edit("files", FILE, "bytes", value=10**30), "from 8 to"),
    "a file smaller than its pieces": (edit("files", FILE, "bytes", value=9), "its pieces take"),
    "an unknown dtype": (edit("tensors", WEIGHT, "dtype", value="float7"), "expected one of"),
    "the name of a function as a dtype": (
        edit("tensors", WEIGHT, "dtype", value="load"), "expected one of"),
    "a piece outside of its tensor": (edit(*PIECE, "offset", value=[2, 0]), "expected a part of"),
    "a piece of another number of dims": (edit(*PIECE, "offset", value=[0]), "expected a part of"),
    "a gap": (edit(*PIECE, "shape", value=[2, 4]), "the pieces have 8 elements"),
    "pieces that overlap": (
        lambda body: body["tensors"][WEIGHT].update(pieces=[
            {**body["tensors"][WEIGHT]["pieces"][0], "shape": [2, 3], "name": "a"},
            {**body["tensors"][WEIGHT]["pieces"][0], "shape": [3, 2], "name": "b"},
        ]), "pieces overlap"),
    "pieces across each other": (across, "in too many ways|elements, shape"),
    "a piece of no file": (edit(*PIECE, "file", value="rank-00009.safetensors"), "not among"),
    "a piece used twice": (
        lambda body: body["tensors"].update({"model/x": body["tensors"][WEIGHT]}), "used twice"),
    "a checksum that is text": (edit(*PIECE, "crc", value="0"), "crc is '0', expected"),
    "a checksum out of range": (edit(*PIECE, "crc", value=2**32), "crc is 4294967296, expected"),
    "no tensors": (drop("tensors"), "has no key 'tensors'"),
    "an unknown key": (edit("hook", value="os.system"), "has an unknown key 'hook'"),
    "a list for a table": (edit("tensors", value=[]), "tensors is .*expected a table"),
    "null for a number": (edit("step", value=None), "step is None, expected a whole number"),
    "no ranks": (edit("world", value=0), "world is 0, expected a whole number"),
    "more ranks than exist": (edit("world", value=10**9), "world is 1000000000"),
    "a step of many digits": (edit("step", value=10**4000), "step is 1000"),
    "text for true": (edit("finite", value="yes"), "finite is 'yes'"),
    "a key of no group": (edit("tensors", "config/x", value={}), "is no key; keys begin with"),
    "an alias of nothing": (edit("aliases", value={"a": "b"}), "another name of a saved tensor"),
    "parameters as a setting": (
        edit("optimizer", "param_groups", 0, "settings", "params", value=[]), "no setting"),
    "a million keys": (
        lambda body: body.update(dict.fromkeys(map(str, range(10**5)), 0)), "an unknown key"),
    "random state of other ranks": (edit("random", value=[1, 2, 3]), "random has 3 entries"),
}  # fmt: skip


def write_checkpoint(folder: Path, text: str | bytes, data: bytes) -> Path:
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_bytes(text.encode() if isinstance(text, str) else text)
    (folder / FILE).write_bytes(data)
    return folder


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_wrong_manifest(case, good, tmp_path):
    change, phrase = MANIFESTS[case]
    body = json.loads(json.dumps(good["body"]))
    change(body)
    folder = write_checkpoint(tmp_path / "step-00000001", seal(body, 1), good["data"])
    refused(lambda: sw.load(folder, model()), phrase, tmp_path)
    assert verify(folder), "verify found nothing"


def text_of(good: dict[str, Any]) -> str:
    return seal(good["body"], 1)


TEXTS: dict[str, tuple[Callable[[dict[str, Any]], str | bytes], str]] = {
    "a newer version": (lambda good: seal(good["body"], 1, version=2), "has format version 2"),
    "no manifest": (lambda good: b"\x80\x04K\x01.", "is no manifest of a shardwise checkpoint"),
    "not UTF-8": (lambda good: resealed(good, b'"step"', b'"st\xff"'), "is not JSON"),
    "a key twice": (lambda good: resealed(good, b'"step"', b'"world":1,"step"'), "is there twice"),
    "a number that is none": (lambda good: resealed(good, b'"step":1', b'"step":NaN'), "NaN"),
    "deep nesting": (
        lambda good: resealed(good, b'"step":1', b'"step":' + b"[" * 10**6), "is not JSON"),
    "a flipped bit": (lambda good: text_of(good).replace('"step":1', '"step":2'), "is damaged"),
    "cut short": (lambda good: text_of(good)[:-10], "is damaged"),
}  # fmt: skip


def resealed(good: dict[str, Any], old: bytes, new: bytes) -> bytes:
    """Whoever means harm writes a right checksum."""
    import zlib

    head, _, rest = text_of(good).encode().partition(b"\n")
    assert old in rest
    rest = rest.replace(old, new, 1)
    before, crc, after = head.partition(b'"crc": "')
    empty = before + crc + b"00000000" + after[8:] + b"\n" + rest
    sealed = f"{zlib.crc32(empty):08x}".encode()
    return before + crc + sealed + after[8:] + b"\n" + rest


@pytest.mark.parametrize("case", TEXTS)
def test_a_wrong_text_of_a_manifest(case, good, tmp_path):
    make, phrase = TEXTS[case]
    folder = write_checkpoint(tmp_path / "step-00000001", make(good), good["data"])
    refused(lambda: sw.load(folder, model()), phrase, tmp_path)


def test_values_that_are_nested_or_absurd_inside_of_a_right_manifest(good, tmp_path):
    cases = [
        (nested(900), "nested too deep"),
        ({"$number": "", "dtype": "float32", "shape": [10**12]}, "is wrong"),
        ({"$number": "00", "dtype": "__import__", "shape": []}, "no dtype"),
        ({"$torch": "load", "kind": "dtype"}, "no dtype"),
        ({"$bytes": "!"}, "is wrong"),
        ({"$tensor": "model/absent"}, "which it has not"),
        ({"$deque": [], "maxlen": "x"}, "is wrong"),
    ]
    for number, (value, phrase) in enumerate(cases):
        body = json.loads(json.dumps(good["body"])) | {"extra": [{"x": value}], "extra_of": [0]}
        folder = write_checkpoint(
            tmp_path / f"{number}" / "step-00000001", seal(body, 1), good["data"]
        )
        refused(lambda folder=folder: sw.load(folder, model()), phrase, tmp_path)


def swap(folder: Path, kind: str, elsewhere: Path) -> None:
    """Put something else in the place of the data file."""
    file = folder / FILE
    if kind == "link":
        elsewhere.write_bytes(file.read_bytes())
    file.unlink()
    if kind == "link":
        file.symlink_to(elsewhere)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()


@pytest.mark.parametrize("kind", ["link", "device", "pipe", "folder", "absent"])
def test_something_else_than_a_data_file(kind, good, tmp_path):
    folder = write_checkpoint(tmp_path / "step-00000001", text_of(good), good["data"])
    swap(folder, kind, tmp_path / "elsewhere")
    phrase = r"rank-00000\.safetensors (cannot be read|has \d+ bytes|is not there)"
    refused(lambda: sw.load(folder, model()), phrase, tmp_path)


def test_a_pointer_that_leads_out_is_not_followed(good, tmp_path):
    write_checkpoint(tmp_path / "root" / "step-00000001", text_of(good), good["data"])
    for text in ("../elsewhere\n", "/etc\n", "\0", "x" * 10**6):
        (tmp_path / "root" / "latest").write_text(text)
        assert sw.load(tmp_path / "root", model()).path.endswith("root/step-00000001")
    (tmp_path / "root" / "latest").unlink()
    os.mkfifo(tmp_path / "root" / "latest")
    assert sw.load(tmp_path / "root", model()).step == 1


def test_a_pipe_as_a_manifest_is_no_checkpoint(tmp_path):
    (tmp_path / "step-00000001").mkdir()
    os.mkfifo(tmp_path / "step-00000001" / "manifest.json")
    refused(lambda: sw.load(tmp_path / "step-00000001", model()), "no checkpoint", tmp_path)
    assert main(["inspect", str(tmp_path)]) == 2


# safetensors


def header(table: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(start: Any = 0, end: Any = 48, shape: Any = (3, 4), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


SAFETENSORS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "has 0 bytes"),
    "a huge header": (header({}, length=2**63), "says that its header has"),
    "a header past the end": (header({}, length=100), "says that its header has 100 bytes"),
    "no JSON": (header(b"{"), "is not JSON"),
    "no table": (header([]), "no table"),
    "not UTF-8": (header(b'{"\xff": 1}'), "is not JSON"),
    "deep nesting": (header(b"[" * 10**6), "is not JSON"),
    "a name twice": (header(b'{"a": 1, "a": 2}'), "is there twice"),
    "past the end": (header({"a": entry()}, b"0" * 47), "inside of it"),
    "offsets of another size": (header({"a": entry(0, 40)}, b"0" * 48), "expected 48 bytes"),
    "offsets backwards": (header({"a": entry(48, 0)}, b"0" * 48), "expected 48 bytes"),
    "negative offsets": (header({"a": entry(-48, 0)}, b"0" * 48), "whole numbers from 0 to"),
    "overlapping": (header({"a": entry(), "b": entry(8, 56)}, b"0" * 96), "overlaps another"),
    "the same bytes": (header({"a": entry(), "b": entry()}, b"0" * 48), "overlaps another"),
    "a gap": (header({"a": entry(48, 96)}, b"0" * 96), "leaves a gap"),
    "hidden bytes": (header({"a": entry()}, b"0" * 1000), "its tensors end at"),
    "absurd shape": (header({"a": entry(shape=(10**18,))}, b"0" * 48), "whole numbers from 0 to"),
    "overflowing shape": (header({"a": entry(shape=(2**40, 2**40))}, b"0" * 48), "more than any"),
    "true as a size": (header({"a": entry(shape=(True, 12))}, b"0" * 48), "whole numbers"),
    "text as a size": (header({"a": entry(shape=("3", 4))}, b"0" * 48), "whole numbers"),
    "unknown dtype": (header({"a": entry(dtype="F7")}, b"0" * 48), "of dtype 'F7'"),
    "a list as dtype": (header({"a": entry(dtype=[])}, b"0" * 48), "of dtype"),
    "metadata of numbers": (header({"__metadata__": {"a": 1}}), "no table of strings"),
    "a pickle": (pickle.dumps({"a": 1}), "says that its header has"),
}


@pytest.mark.parametrize("case", SAFETENSORS)
def test_a_wrong_safetensors_file(case, tmp_path):
    data, phrase = SAFETENSORS[case]
    (tmp_path / "model.safetensors").write_bytes(data)
    refused(lambda: sw.load(tmp_path, model()), phrase, tmp_path)


INDEXES: dict[str, tuple[Any, str]] = {
    "up": ({"weight_map": {"a": "../x.safetensors"}}, "expected a file of its own folder"),
    "absolute": ({"weight_map": {"a": "/etc/passwd"}}, "expected a file of its own folder"),
    "dots": ({"weight_map": {"a": ".."}}, "expected a file of its own folder"),
    "no name": ({"weight_map": {"a": 3}}, "not all names of files"),
    "no map": ({"weight_map": [1]}, "no table weight_map"),
    "a link": ({"weight_map": {"a": "link.safetensors"}}, "leads out of the folder"),
    "a pipe": ({"weight_map": {"a": "pipe.safetensors"}}, "is a pipe, expected a file"),
    "absent": ({"weight_map": {"a": "b.safetensors"}}, "No such file"),
    "lies": ({"weight_map": {"b": "good.safetensors"}}, "though the index says so"),
    "twice": (b'{"weight_map": {"a": "x", "a": "y"}}', "is there twice"),
    "deep": (b"[" * 10**6, "is not JSON"),
}


@pytest.mark.parametrize("case", INDEXES)
def test_a_wrong_index(case, tmp_path):
    index, phrase = INDEXES[case]
    folder = tmp_path / "hf"
    folder.mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "elsewhere.safetensors")
    save_file({"a": torch.ones(2)}, folder / "good.safetensors")
    (folder / "link.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
    os.mkfifo(folder / "pipe.safetensors")
    text = index if isinstance(index, bytes) else json.dumps(index).encode()
    (folder / "model.safetensors.index.json").write_bytes(text)
    refused(lambda: sw.load(folder, model()), phrase, tmp_path)


def test_links_of_hugging_face_caches_are_followed(tmp_path):
    made = model()
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    save_file(made.state_dict(), blobs / "d34d")
    (snapshot / "model.safetensors").symlink_to("../../blobs/d34d")
    other = model()
    sw.load(snapshot, other)
    assert torch.equal(other[0].weight, made[0].weight)


# Pickles


def archive(program: bytes, records: dict[str, bytes] | None = None, packed: bool = False) -> bytes:
    """What torch.save makes of a pickle of one's own."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED) as file:
        file.writestr("archive/data.pkl", program)
        file.writestr("archive/version", b"3\n")
        for name, data in (records or {}).items():
            file.writestr(f"archive/{name}", data)
    return out.getvalue()


def laughs(levels: int) -> bytes:
    """A tuple of two tuples of two tuples ..., as a key: whoever hashes it never ends."""
    program = b"\x80\x02}(K\x01\x85q\x00"
    for i in range(levels):
        program += b"h" + bytes([i]) + b"\x86q" + bytes([i + 1])
    return program + b"K\x01u."


def stride_zero() -> bytes:
    out = io.BytesIO()
    torch.save({"0.weight": torch.ones(1).expand(10**12)}, out)
    return out.getvalue()


def pickles(bomb: Bomb) -> dict[str, tuple[bytes, str]]:
    saved = io.BytesIO()
    torch.save({"0.weight": bomb}, saved)
    return {
        "a bomb": (saved.getvalue(), "names '(posix|os).mkdir'.*nothing was run"),
        "a bomb of protocol 4": (
            archive(pickle.dumps({"a": bomb}, protocol=4)), "names '(posix|os).mkdir'"),
        "an old file with a bomb": (pickle.dumps(bomb), "no file that torch.save"),
        "eval": (archive(b"cbuiltins\neval\n(V1+1\ntR."), "names 'builtins.eval'"),
        "getattr": (archive(b"cbuiltins\ngetattr\n."), "names 'builtins.getattr'"),
        "a submodule by dots": (
            archive(b"\x80\x04\x8c\x05torch\x8c\x0bos.system.x\x93."), "names 'torch.os.system"),
        "an instance by INST": (archive(b"(ios\nsystem\n."), "instruction INST"),
        "a huge bytearray": (
            archive(b"cbuiltins\nbytearray\n(J\xff\xff\xff\x7ftR."), "names 'builtins.bytearray'"),
        "a place far away": (archive(b"N\x72\xff\xff\xff\x7f."), "puts a value at place"),
        "billions of tuples": (archive(laughs(60)), "grows beyond measure"),
        "an empty stack": (archive(b"0000."), "no whole pickle"),
        "cut short": (archive(b"\x80\x02X\xff\xff\xff\x7fa"), "no whole pickle"),
        "a packed record": (archive(b"}.", {"data/0": b"0" * 10**8}, packed=True), "packed"),
        "two programs": (archive(b"}.", {"x/data.pkl": b"}."}), "has 2 records data.pkl"),
        "no zip": (b"PK\x03\x04" + b"0" * 100, "no file that torch.save"),
        "a tensor of stride 0": (stride_zero(), "holds '0.weight' of 4000000000000 bytes"),
        "no tensors": (archive(b"}X\x01\x00\x00\x00aK\x01s."), "expected a tensor"),
        "a list": (archive(b"]."), "expected a dict of tensors"),
    }  # fmt: skip


def test_pickles_that_mean_harm(tmp_path):
    bomb = tmp_path / "exploded"
    cases = pickles(Bomb(bomb))
    for case, (data, phrase) in cases.items():
        for name in ("x.pt", "pytorch_model.bin"):
            folder = tmp_path / case.replace(" ", "-")
            folder.mkdir(exist_ok=True)
            (folder / name).write_bytes(data)
        refused(lambda folder=folder: sw.load(folder / "x.pt", model()), phrase, tmp_path)
        refused(lambda folder=folder: sw.load(folder, model()), phrase, tmp_path)
        target = str(folder / "out")
        refused(
            lambda folder=folder, target=target: convert(str(folder), target, "hf"),
            phrase, tmp_path,
        )  # fmt: skip
    assert not bomb.exists()


def write_dcp(folder: Path) -> None:
    dcp.save(
        {"model": {"0.weight": torch.ones(3, 4), "0.bias": torch.ones(3)}},
        checkpoint_id=folder,
        no_dist=True,
    )


def metadata_with(folder: Path, change: Callable[[Any], Any]) -> None:
    file = folder / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    file.write_bytes(pickle.dumps(change(metadata) or metadata))


def change_place(**fields: Any) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        for info in metadata.storage_data.values():
            for name, value in fields.items():
                setattr(info, name, value)

    return change


def change_tensor(**fields: Any) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        for name, value in fields.items():
            setattr(metadata.state_dict_metadata["model.0.weight"], name, value)

    return change


def double_chunks(metadata: Any) -> None:
    metadata.state_dict_metadata["model.0.weight"].chunks *= 2


def test_dcp_folders_that_mean_harm(tmp_path):
    bomb = Bomb(tmp_path / "exploded")
    encoded = base64.b64encode(b"x")
    changes: dict[str, tuple[Callable[[Any], Any], str]] = {
        "a bomb": (lambda m: bomb, "names '(posix|os).mkdir'"),
        "a bomb inside": (lambda m: setattr(m, "planner_data", bomb), "names '(posix|os).mkdir'"),
        "another object": (lambda m: {"a": encoded}, "expected DCP's Metadata"),
        "up": (change_place(relative_path="../x.distcp"), "expected a file of its own folder"),
        "absolute": (change_place(relative_path="/etc/passwd"), "expected a file of its own"),
        "no name": (change_place(relative_path=7), "expected a name"),
        "past the end": (change_place(length=10**15), "which has"),
        "before the start": (change_place(offset=-1), "whole numbers from 0 to"),
        "true as a place": (change_place(offset=True), "whole numbers from 0 to"),
        "packed": (change_place(transform_descriptors=["zstd"]), "packed or encrypted"),
        "absurd size": (change_tensor(size=torch.Size([2**40, 2**20])), "more than any tensor"),
        "no size": (change_tensor(size=None), "the pieces have|expected a part"),
        "a size of text": (change_tensor(size="3x4"), "the pieces have|expected a part"),
        "a gap": (change_tensor(chunks=[]), "the pieces have 0 elements"),
        "overlaps": (double_chunks, "the pieces have 24 elements"),
        "chunks of text": (change_tensor(chunks=["x"]), "for the chunks of"),
        "no entries": (lambda m: setattr(m, "state_dict_metadata", [1]), "expected a table"),
        "no places": (lambda m: m.storage_data.clear(), "does not say where"),
        "storage of another": (lambda m: setattr(m, "storage_data", 5), "expected a table"),
    }
    for case, (change, phrase) in changes.items():
        folder = tmp_path / case.replace(" ", "-")
        write_dcp(folder)
        metadata_with(folder, change)
        refused(lambda folder=folder: sw.load(folder, model()), phrase, tmp_path)
    assert not bomb.path.exists()


def test_dcp_data_that_means_harm(tmp_path):
    bomb = Bomb(tmp_path / "exploded")
    items: dict[str, tuple[Callable[[bytes], bytes], str]] = {
        "a bomb": (lambda item: archive(pickle.dumps(bomb, protocol=2)), "names '(posix|os)"),
        "an old pickle": (lambda item: pickle.dumps(bomb), "no file that torch.save"),
        "another shape": (lambda item: saved(torch.ones(2, 2)), "something else than"),
        "no tensor": (lambda item: saved([1, 2]), "something else than"),
        "garbage": (lambda item: b"\0" * len(item), "no file that torch.save"),
    }
    for case, (make, phrase) in items.items():
        folder = tmp_path / case.replace(" ", "-")
        write_dcp(folder)
        data = next(folder.glob("*.distcp"))

        def change(metadata: Any, data: Path = data, make: Any = make) -> None:
            for index, info in metadata.storage_data.items():
                if index.fqn == "model.0.weight":
                    whole = data.read_bytes()
                    item = make(whole[info.offset : info.offset + info.length])
                    info.offset, info.length = len(whole), max(len(item), 48)
                    data.write_bytes(whole + item.ljust(48, b"\0"))

        metadata_with(folder, change)
        refused(lambda folder=folder: sw.load(folder, model()), phrase, tmp_path)
    assert not bomb.path.exists()


def saved(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def test_a_dcp_metadata_of_billions(tmp_path):
    write_dcp(tmp_path / "dcp")
    (tmp_path / "dcp" / ".metadata").write_bytes(laughs(60))
    refused(lambda: sw.load(tmp_path / "dcp", model()), "grows beyond measure", tmp_path)
    (tmp_path / "dcp" / ".metadata").unlink()
    os.mkfifo(tmp_path / "dcp" / ".metadata")
    refused(lambda: sw.load(tmp_path / "dcp", model()), "is a pipe", tmp_path)


# Configurations, plans, clusters

DEEP = "a = " + "[" * 10**5
CONFIGS: dict[str, tuple[str | bytes, str]] = {
    "deep": (DEEP, "nested too deep"),
    "a key of many dots": ("a" + ".a" * 10**5 + " = 1", "nested too deep"),
    "many digits": ("[run]\nsteps = " + "9" * 5000, "is not valid TOML"),
    "a huge number": ("[run]\nsteps = " + "9" * 30, "more than any run has"),
    "infinite": ("[optim]\nlr = inf", "expected a finite number"),
    "not a number": ("[optim]\nlr = nan", "expected a finite number"),
    "true as a number": ("[run]\nsteps = true", "must be a whole number"),
    "not UTF-8": (b"\xff\xfe", "is not text"),
    "twice": ("[run]\nsteps = 1\nsteps = 2", "is not valid TOML"),
    "a number for a table": ("run = 3", "must be a table"),
    "too long": (b"#" * 10**7, "has more than"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_wrong_configuration(case, tmp_path):
    text, phrase = CONFIGS[case]
    file = tmp_path / "run.toml"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    refused(lambda: load_config(str(file), []), phrase, tmp_path)


def test_pipes_and_devices_as_configurations(tmp_path):
    pipe = tmp_path / "pipe.toml"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero"), tmp_path):
        refused(lambda path=path: load_config(str(path), []), "cannot read", tmp_path)
    refused(lambda: load_cluster(str(pipe)), "it is no file", tmp_path)
    plan = tmp_path / "plan.json"
    os.mkfifo(plan)
    config = load_config(None, [("plan.strategy", str(plan))])
    refused(lambda: load_plan(config.plan, 1), "it is no file", tmp_path)


def test_wrong_plans_and_clusters(tmp_path):
    plan = tmp_path / "plan.json"
    config = load_config(None, [("plan.strategy", str(plan))])
    right = json.loads(sw.Plan.of("zero3", mesh=1).to_json())
    texts = {
        "[" * 10**6: "this is not JSON",
        "9" * 5000: "this is not JSON",
        json.dumps(right | {"mesh": [1, -1]}): "mesh",
        json.dumps(right | {"mesh": [True, 1]}): "mesh",
        json.dumps(right | {"mesh": [1, 10**30]}): "but 1 are running",
        json.dumps(right | {"hook": "os.system"}): "hook",
        json.dumps(right | {"compute_dtype": "load"}): "load",
    }
    for text, phrase in texts.items():
        plan.write_text(text)
        refused(lambda: load_plan(config.plan, 1), phrase, tmp_path)
    cluster = tmp_path / "cluster.toml"
    for text, phrase in {DEEP: "nested too deep", "a = " + "9" * 5000: "not valid TOML"}.items():
        cluster.write_text(text)
        refused(lambda: load_cluster(str(cluster)), phrase, tmp_path)


def test_what_is_refused_is_called_damaged_or_wrong_not_run(good, tmp_path):
    """`inspect` says the same as a load, with its exit code."""
    folder = write_checkpoint(tmp_path / "root" / "step-00000001", text_of(good), good["data"])
    assert main(["inspect", str(folder)]) == 0
    body = json.loads(json.dumps(good["body"]))
    MANIFESTS["an absolute path"][0](body)
    (folder / "manifest.json").write_text(seal(body, 1))
    assert main(["inspect", str(folder.parent)]) == 1
    with pytest.raises(CorruptCheckpoint):
        Manifest.read(str(folder))
