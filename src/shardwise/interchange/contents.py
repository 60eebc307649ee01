"""What is in a checkpoint, for people and as JSON."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from shardwise.checkpoint.manifest import CheckpointError, SavedTensor
from shardwise.checkpoint.read import Checkpoint, Origin, all_of, verify
from shardwise.interchange.conversion import Progress
from shardwise.interchange.foreign import Foreign
from shardwise.interchange.origins import find_foreign, open_origin

_WIDTH = 80


@dataclass(frozen=True)
class Contents:
    """One checkpoint. `problems` is None where nobody looked for any."""

    path: str
    kind: str
    origin: Origin
    problems: list[str] | None

    def to_json(self) -> dict[str, Any]:
        manifest = self.origin.manifest
        ours = isinstance(self.origin, Checkpoint)
        return {
            "path": self.path,
            "kind": self.kind,
            "step": manifest.step,
            "world": manifest.world if ours else None,
            "finite": manifest.finite if ours else None,
            "plan": manifest.plan,
            "versions": manifest.versions,
            "optimizer": manifest.optimizer and manifest.optimizer.class_name,
            "sizes": self.sizes(),
            "aliases": manifest.aliases,
            "tensors": {
                key: {"shape": saved.shape, "dtype": saved.dtype, "pieces": len(saved.pieces)}
                for key, saved in manifest.tensors.items()
            },
            "problems": self.problems,
        }

    def sizes(self) -> dict[str, dict[str, int]]:
        """By role: the model, each state of the optimizer, extra, random."""
        sizes: defaultdict[str, list[SavedTensor]] = defaultdict(list)
        for key, saved in self.origin.manifest.tensors.items():
            role = key.partition("/")[0]
            if role == "optimizer":
                role = f"optimizer {key.rpartition('/')[2]}"
            sizes[role].append(saved)
        return {
            role: {
                "tensors": len(tensors),
                "numbers": sum(math.prod(each.shape) for each in tensors),
                "bytes": sum(each.nbytes for each in tensors),
            }
            for role, tensors in sizes.items()
        }

    def lines(self, tensors: bool) -> list[str]:
        """For a terminal of 80 columns."""
        manifest = self.origin.manifest
        rows = [("checkpoint", self.path), ("format", self.kind)]
        if isinstance(self.origin, Checkpoint):
            plan = manifest.plan or {}
            settings = ", ".join(f"{k} {v}" for k, v in plan.items() if _is_short(v))
            versions = ", ".join(f"{k} {v}" for k, v in manifest.versions.items())
            numbers = "all finite" if manifest.finite else "NOT all finite"
            rows += [
                ("step", str(manifest.step)),
                ("saved by", f"{manifest.world} rank{'s' * (manifest.world > 1)}; {versions}"),
                ("plan", settings or "none"),
                ("numbers", numbers),
            ]
        if manifest.optimizer is not None:
            name = manifest.optimizer.class_name or "of a class that is not told"
            groups = len(manifest.optimizer.param_groups)
            rows.append(("optimizer", f"{name}, {groups} group{'s' * (groups != 1)}"))
        if manifest.aliases:
            rows.append(("tied", ", ".join(f"{a} = {b}" for a, b in manifest.aliases.items())))
        lines = [line for name, text in rows for line in _wrap(f"{name:<11} ", text)]
        lines += ["", f"{'part':<32}{'tensors':>9}{'numbers':>17}{'size':>12}"]
        for role, size in self.sizes().items():
            count, numbers = size["tensors"], f"{size['numbers']:,}"
            lines.append(f"{role:<32.32}{count:>9}{numbers:>17}{show_bytes(size['bytes']):>12}")
        if tensors:
            lines += ["", *self._tensor_lines()]
        return [*lines, "", *self._verdict()]

    def _tensor_lines(self) -> list[str]:
        lines = [f"{'tensor':<44}{'shape':>16}  {'dtype':<10}{'pieces':>6}"]
        for key, saved in self.origin.manifest.tensors.items():
            shape = "x".join(map(str, saved.shape)) or "one number"
            rest = f"{shape:>16}  {saved.dtype:<10}{len(saved.pieces):>6}"
            if len(key) > 43:  # a long name has a line of its own
                lines.append(key)
                key = ""
            lines.append(f"{key:<44}{rest}")
        return lines

    def _verdict(self) -> list[str]:
        if self.problems is None:
            if isinstance(self.origin, Foreign):
                return ["names, shapes and places fit; this format has no checksums"]
            return ["not verified"]
        if not self.problems:
            return ["whole: every checksum is right"]
        return [f"DAMAGED: {len(self.problems)} problem{'s' * (len(self.problems) > 1)}"] + [
            line for problem in self.problems for line in _wrap("  ", problem)
        ]


def _is_short(value: Any) -> bool:
    return isinstance(value, str | int | float | bool) and value not in (False, "")


def _wrap(head: str, text: str) -> list[str]:
    """Lines of at most 80 columns, without breaking paths."""
    lines, line = [], head
    for word in text.split(" "):
        if len(line) + len(word) >= _WIDTH and line.strip():
            lines.append(line.rstrip())
            line = " " * len(head)
        line += f"{word} "
    return [*lines, line.rstrip()]


def show_bytes(nbytes: int) -> str:
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def look_into(path: str, verified: bool, progress: Progress) -> Contents:
    """What one checkpoint holds: another program's, or one of ours."""
    origin = open_origin(path)
    if isinstance(origin, Foreign):
        origin.check_files()
        return Contents(origin.path, origin.kind, origin, None)
    problems = verify(origin.path, progress) if verified else None
    return Contents(origin.path, "shardwise", origin, problems)


@dataclass(frozen=True)
class Listed:
    """A checkpoint among others of one root."""

    path: str
    step: int | None
    nbytes: int
    finite: bool | None
    problems: list[str] | None

    @classmethod
    def of(cls, path: str, verified: bool, progress: Progress) -> Listed:
        try:
            manifest = Checkpoint.open(path).manifest
        except CheckpointError as error:
            return cls(path, None, 0, None, [str(error)])
        nbytes = sum(file.bytes for file in manifest.files.values())
        problems = verify(path, progress) if verified else None
        return cls(path, manifest.step, nbytes, manifest.finite, problems)

    @property
    def verdict(self) -> str:
        if self.problems is None:
            return "not verified"
        return "DAMAGED" if self.problems else "whole"

    def line(self, newest: bool) -> str:
        name = os.path.basename(self.path)
        finite = {True: "finite", False: "NOT FINITE", None: ""}[self.finite]
        mark = "  <- newest" if newest else ""
        return f"{name:<24}{show_bytes(self.nbytes):>10}  {finite:<11}{self.verdict:<13}{mark}"


def checkpoints_of(path: str) -> list[str] | None:
    """Those of a root, the newest first; None where the path is one checkpoint itself."""
    if find_foreign(path) is not None:
        return None
    try:
        Checkpoint.open(path)
    except CheckpointError:
        return all_of(path) or None
    return None
