"""`shardwise bench resume`: runs that were killed and resumed against the same ones uninterrupted,
bit for bit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from shardwise.checkpoint import Manifest, all_of
from shardwise.children import ChildFailed
from shardwise.lab.resuming.job import TAKEN_OVER, Kill, run_job
from shardwise.lab.rows import RowFile, say
from shardwise.profiling.results import Row, print_table
from shardwise.trainer.config import TrainConfig

STEPS = 8
_TOKENS = "tokens.txt"
_COMPARED = ("step", "loss", "grad_norm", "skipped", "lr", "tokens")  # of a row of metrics
_PLANS = {1: ("ddp", "zero1", "zero3"), 2: ("ddp", "zero1", "zero2", "zero3", "hsdp")}
_QUICK_PAIRS = 2


@dataclass(frozen=True)
class Pair:
    """A run and where it is killed, all drawn from `seed`."""

    seed: int
    kill_step: int
    device: str
    world: int
    resumed_world: int
    plan: str
    dtype: str
    micro_batches: int
    save_every: int
    keep: int
    asynchronous: bool
    recompute: str
    victim: int
    moment: str  # "step", or "save": of the kill step
    at: float  # share of that moment that passes before

    @classmethod
    def draw(cls, seed: int, device: str) -> Pair:
        chance = random.Random(f"pair {seed}")
        world = 1 if device == "cuda" else chance.choice((1, 2, 2))
        save_every = chance.choice((1, 2, 3))
        moment = chance.choice(("step", "save"))
        kill_step = chance.randint(1, STEPS - 1)
        if moment == "save":
            kill_step = chance.choice(range(save_every, STEPS + 1, save_every))
        changes = device == "cpu" and chance.random() < 0.2
        resumed_world = 3 - world if changes else world
        return cls(
            seed, kill_step, device, world, resumed_world,
            plan=chance.choice(_PLANS[world]),
            dtype=chance.choice(("float32", "bfloat16")),
            micro_batches=chance.choice((1, 2)),
            save_every=save_every,
            keep=0 if changes else chance.choice((0, 1, 2)),
            asynchronous=chance.random() < 0.5,
            recompute=chance.choice(("none", "nonreentrant")),
            victim=chance.randrange(world),
            moment=moment,
            at=chance.random(),
        )  # fmt: skip

    @property
    def key(self) -> str:
        return f"{self.device} {self.seed} {self.kill_step}"

    def config(self, out: Path, world: int, resume: str = "none") -> str:
        hybrid = {"mesh": [2, 1]} if self.plan == "hsdp" and world == 2 else {}
        plan = "zero3" if self.plan == "hsdp" and world == 1 else self.plan
        small = {"layers": 2, "d_model": 32, "d_ff": 64, "heads": 2, "dropout": 0.1}
        if self.device == "cuda":
            small |= {"layers": 4, "d_model": 512, "d_ff": 1024, "heads": 8}
        return TrainConfig.from_dict({
            "model": {**small, "checkpoint": self.recompute},
            "data": {
                "path": str(out.parent / _TOKENS), "batch": 2, "seed": self.seed,
                "seq": 16 if self.device == "cpu" else 256,
            },
            "plan": {"strategy": plan, "compute_dtype": self.dtype, **hybrid},
            "optim": {"warmup": 2},
            "run": {
                "steps": STEPS, "micro_batches": self.micro_batches, "out": str(out),
                "seed": self.seed, "device": self.device, "save_every": self.save_every,
                "keep": self.keep, "asynchronous_save": self.asynchronous, "resume": resume,
                "deterministic": True,
            },
        }).to_toml()  # fmt: skip

    def kill(self, whole: Path) -> Kill:
        """When, by what the uninterrupted run has shown."""
        if self.moment == "step":
            step_s = median(row["step_s"] for row in _rows(whole))
            return Kill(self.victim, self.kill_step, after_s=self.at * step_s)
        victim = self.victim if _notes(whole, "changes", self.victim) else 0  # it writes nothing
        shortest = _shortest_save(_notes(whole, "changes", victim))
        return Kill(victim, self.kill_step, operations=int(self.at * shortest))


def _shortest_save(changes: list[str]) -> int:
    """How often a save of a rank changed the disk, at the least."""
    begins = [i for i, line in enumerate(changes) if line.startswith("create rank-")]
    ends = [*begins[1:], len(changes)]
    return min(end - begin for begin, end in zip(begins, ends, strict=True))


def try_pair(pair: Pair, folder: Path) -> Row:
    """Run it whole; run it, kill it, resume it; what differs."""
    began = time.monotonic()
    whole, cut = folder / "whole", folder / "cut"
    row: Row = {"key": pair.key, **dataclasses.asdict(pair)}
    folder.mkdir(parents=True, exist_ok=True)
    # The built-in grammar takes longer to write than the run takes.
    (folder / _TOKENS).write_bytes(random.Random(pair.seed).randbytes(1 << 16))
    try:
        run_job(pair.config(whole, pair.world), pair.world, whole)
        run_job(pair.config(cut, pair.world), pair.world, cut, pair.kill(whole))
        run_job(pair.config(cut, pair.resumed_world, "auto"), pair.resumed_world, cut)
        resumed = json.loads((cut / "run.json").read_text()).get("resumed_after", [0])[-1]
        row |= {"resumed_after": resumed, "differing": list(_compare(pair, whole, cut, resumed))}
    except ChildFailed as error:
        row["differing"] = [str(error)]
    return row | {"seconds": round(time.monotonic() - began, 2)}


def _compare(pair: Pair, whole: Path, cut: Path, resumed: int) -> Iterator[str]:
    """What of the resumed run is not what it is without the kill. On other ranks sums are added in
    another order: there only what was taken over is compared, and that the run ended.
    """
    if resumed and (cut / TAKEN_OVER).exists():
        saved = cut / "checkpoints" / f"step-{resumed:08d}"
        if saved.exists():  # else it has been rotated out since
            yield from _compare_state(saved, Path(all_of(cut / TAKEN_OVER)[0]))
    steps = [row["step"] for row in _rows(cut)]
    if steps != list(range(1, STEPS + 1)):
        yield f"metrics.jsonl has the steps {steps}"
    if pair.world != pair.resumed_world:
        return
    yield from _compare_files(
        Path(all_of(whole / "checkpoints")[0]), Path(all_of(cut / "checkpoints")[0])
    )
    for mine, other in zip(_rows(whole), _rows(cut), strict=False):
        wrong = [name for name in _COMPARED if mine[name] != other[name]]
        if wrong:
            yield f"step {mine['step']} logged another {', '.join(wrong)}"
    for rank in range(pair.world):
        drawn = [
            dict(line.rsplit(" ", 1) for line in _notes(run, "data", rank)) for run in (whole, cut)
        ]
        if drawn[0] != drawn[1]:
            yield f"rank {rank} drew other batches"


def _compare_files(mine: Path, other: Path) -> Iterator[str]:
    """Two checkpoints of the same ranks: manifests but for their serial, and every byte of data."""
    manifests = [dataclasses.replace(Manifest.read(str(path)), serial=0) for path in (mine, other)]
    for name in (field.name for field in dataclasses.fields(Manifest)):
        if getattr(manifests[0], name) != getattr(manifests[1], name):
            yield f"the last checkpoints differ in {name}"
    for file in manifests[0].files:
        if (mine / file).read_bytes() != (other / file).read_bytes():
            yield f"the last checkpoints differ in {file}"


def _compare_state(saved: Path, taken: Path) -> Iterator[str]:
    """Two checkpoints of whatever ranks: every tensor of the model and the optimizer, and the
    random state of the ranks that both have.
    """
    before, after = _read_whole(saved), _read_whole(taken)
    random_states = [Manifest.read(str(path)).random for path in (saved, taken)]
    common = min(map(len, random_states))
    if random_states[0][:common] != random_states[1][:common]:
        yield "another random state was taken over"
    names = ("model/", "optimizer/", *(f"random/{rank}/" for rank in range(common)))
    for key in sorted(before.keys() | after.keys()):
        if key.startswith(names) and not _same(before.get(key), after.get(key)):
            yield f"another {key} was taken over"


def _same(first: Any, second: Any) -> bool:
    if first is None or second is None or first.shape != second.shape:
        return False
    return bool(first.dtype == second.dtype and first.tobytes() == second.tobytes())


def _read_whole(path: Path) -> dict[str, Any]:
    """Every tensor of a checkpoint, put together from its pieces; bfloat16 as its bytes."""
    import torch
    from safetensors.torch import load_file

    manifest = Manifest.read(str(path))
    files = {name: load_file(path / name) for name in manifest.files}
    found = {}
    for key, saved in manifest.tensors.items():
        tensor = torch.empty(saved.shape, dtype=getattr(torch, saved.dtype))
        for piece in saved.pieces:
            at = tuple(map(slice, piece.box.offset, piece.box.ends))
            tensor[at] = files[piece.file][piece.name]
        found[key] = tensor.reshape(-1).view(torch.uint8).numpy()
    return found


def _rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def _notes(run: Path, what: str, rank: int) -> list[str]:
    file = run / f"{what}-{rank}"
    return file.read_text().splitlines() if file.exists() else []


def run(arguments: argparse.Namespace) -> None:
    """Pair by pair; the JSON is written after each."""
    count = _QUICK_PAIRS if arguments.quick else arguments.pairs
    file = RowFile.of(arguments, steps=STEPS)
    pairs = [Pair.draw(arguments.seed + i, arguments.device) for i in range(count)]
    for pair in file.missing(pairs, lambda pair: pair.key):
        with tempfile.TemporaryDirectory(prefix="shardwise-resume-") as folder:
            row = try_pair(pair, Path(folder))
        file.add(row)
        told = "equal" if not row["differing"] else "; ".join(row["differing"])
        say(f"seed {pair.seed}, killed in step {pair.kill_step} ({pair.moment}): {told}")
    show(file.rows, file.facts)
    wrong = [row for row in file.rows if row["differing"]]
    if wrong:
        raise ChildFailed(f"{len(wrong)} of {len(file.rows)} resumed runs differ")


def show(rows: list[Row], facts: dict[str, Any]) -> None:
    """How many pairs, by what was killed and how it went on."""
    groups: Counter[tuple[str, ...]] = Counter()
    equal: Counter[tuple[str, ...]] = Counter()
    anew: Counter[tuple[str, ...]] = Counter()  # killed before there was a checkpoint
    for row in rows:
        saves = "beside" if row["asynchronous"] else "at once"
        alike = "same" if row["world"] == row["resumed_world"] else "others"
        group = (row["device"], row["moment"], saves, alike)
        groups[group] += 1
        equal[group] += not row["differing"]
        anew[group] += row.get("resumed_after") == 0
    counts = (groups, equal, anew)
    lines = [(*group, *(str(each[group]) for each in counts)) for group in sorted(groups)]
    lines.append(("all", "", "", "", *(str(sum(each.values())) for each in counts)))
    heads = ("device", "killed in a", "saved", "ranks after", "pairs", "equal", "began anew")
    print_table(
        "Killed and resumed, bit for bit", heads, lines, facts["environment"], heads[:4], width=80
    )
