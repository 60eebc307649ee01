"""Which parameters travel together: from a module and a `Cut` to the units of a Plan."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from shardwise.description.parameters import ParameterSpec, UnitSpec, dtype_name, places
from shardwise.errors import UserError
from shardwise.planning.groups import group_by_bytes

MIB = 2**20
CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
# A model without repeated blocks is cut into runs of about this size.
DEFAULT_RUN_BYTES = 32 * MIB
# Gradients that are all-reduced travel in buckets of this size: DDP's own default.
BUCKET_BYTES = 25 * MIB


@dataclass(frozen=True)
class Cut:
    """How to find the units of a model.

    blocks: the repeated blocks of the model (children of one class in a ModuleList, Sequential or
    ModuleDict); a model
        without them is cut into runs of modules of about `bucket_bytes`.
    class: every module whose class has one of the names `of`.
    pattern: every module whose name matches one of the shell patterns `of`.
    count: runs of modules that hold at least `of` parameters together.
    """

    by: str = "blocks"
    of: tuple[str, ...] | int | None = None

    def __post_init__(self) -> None:
        if self.by not in ("blocks", "class", "pattern", "count"):
            raise ValueError(
                f"units: by={self.by!r}, expected 'blocks', 'class', 'pattern' or 'count'"
            )
        if self.by in ("class", "pattern"):
            if isinstance(self.of, list):
                object.__setattr__(self, "of", tuple(self.of))
            names = self.of
            if not (isinstance(names, tuple) and names and all(isinstance(n, str) for n in names)):
                raise ValueError(f"units by {self.by} need at least one name, got {self.of!r}")
        if self.by == "count" and not (isinstance(self.of, int) and self.of > 0):
            raise ValueError(f"units by count need a positive number, got {self.of!r}")
        if self.by == "blocks" and self.of is not None:
            raise ValueError(f"units by blocks take no further value, got of={self.of!r}")

    @classmethod
    def parse(cls, value: Any) -> Cut:
        """From what a user writes: a class (or several), a pattern (or several), a number of
        parameters, or None.
        """
        if value is None or value == "blocks":
            return cls()
        if isinstance(value, Cut):
            return value
        if isinstance(value, bool):
            raise ValueError(f"units: got {value!r}, expected a class, a pattern or a number")
        if isinstance(value, int):
            return cls("count", value)
        if isinstance(value, dict):
            return cls(**value)
        several = list(value) if isinstance(value, list | tuple | set) else [value]
        if several and all(isinstance(v, str) for v in several):
            return cls("pattern", tuple(several))
        if several and all(isinstance(v, type) and issubclass(v, nn.Module) for v in several):
            return cls("class", tuple(sorted(v.__name__ for v in several)))
        raise ValueError(
            f"units: got {value!r}, expected module classes, name patterns or a number"
        )


# In shard groups of this many ranks and more, a parameter that would be padded to twice its size or
# more is kept whole if it has fewer elements than DeepSpeed keeps whole anyway.
LARGE_GROUP = 64
SMALL_NUMEL = 100_000


@dataclass(frozen=True)
class Whole:
    """Which parameters every rank keeps whole: by name, or by size."""

    patterns: tuple[str, ...] = ()
    below: int | None = 0  # bytes; None: small ones that would be mostly padding
    ranks: int = 1  # of the shard group

    def find(self, model: nn.Module) -> frozenset[str]:
        """First names of these parameters. Error for a pattern that matches none."""
        found: set[str] = set()
        missed = list(self.patterns)
        for names, parameter in places(model):
            hits = [p for p in self.patterns if any(fnmatch.fnmatchcase(n, p) for n in names)]
            missed = [pattern for pattern in missed if pattern not in hits]
            if hits or self._is_small(parameter):
                found.add(names[0])
        if missed:
            known = [names[0] for names, _ in places(model)][:12]
            raise ValueError(f"whole: {missed[0]!r} matches no parameter; the model has {known}")
        return frozenset(found)

    def _is_small(self, parameter: nn.Parameter) -> bool:
        if self.below is not None:
            return parameter.numel() * parameter.element_size() < self.below
        if self.ranks < LARGE_GROUP or parameter.numel() >= SMALL_NUMEL:
            return False
        # A 0-d parameter has no rows to pad, and an empty one nothing to keep.
        rows = parameter.shape[0] if parameter.dim() else 0
        return rows > 0 and parameter.numel() > 0 and 2 * rows <= self.ranks


Run = list[tuple[str, nn.Module]]  # modules that form one unit


def why_not_cut(module: nn.Module, parameter: nn.Parameter) -> str:
    """Why no sharded parameter can take the place of this one of the module's own; nothing if one
    can.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return (
            f"is in a scripted {module.original_name}, which lets nobody put a sharded parameter "
            "in its place; use the module without torch.jit"
        )
    if is_lazy(parameter):
        return (
            f"of a {type(module).__name__} has no shape yet: it gets one in the module's first "
            "forward. Run that, on an example, before it is cut"
        )
    return ""


def check_cuttable(model: nn.Module) -> None:
    """Error for a model with a parameter that cannot be cut."""
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            if why := why_not_cut(module, parameter):
                raise UserError(f"parameter {name!r} {why}")


def cut_units(
    model: nn.Module,
    cut: Cut,
    bucket_bytes: int | None,
    whole: frozenset[str] = frozenset(),
) -> tuple[UnitSpec, ...]:
    """The units of `model`: those of `whole` parameters, in data parallel's buckets no matter which
    module uses them, then the root unit if it has parameters of its own, then the rest.

    Finds the runs of modules, merges small neighbours up to `bucket_bytes`, gives every parameter
    to the deepest run that contains all of its places (a tied parameter of two runs goes to their
    common ancestor, at last the root), and splits a unit whose parameters have different dtypes.
    """
    runs = _merge(_find_runs(model, cut, bucket_bytes), bucket_bytes)
    run_of_module = {name: i for i, run in enumerate(runs) for name, _ in run}
    owned: dict[int | None, list[ParameterSpec]] = {None: [], **{i: [] for i in range(len(runs))}}
    apart: list[ParameterSpec] = []
    for names, parameter in places(model):
        spec = _spec_of(names, parameter)
        if spec.name in whole:
            apart.append(spec)
            continue
        chains = [_enclosing_runs(name, run_of_module) for name in names]
        common = [run for run in chains[0] if all(run in chain for chain in chains[1:])]
        owned[common[0] if common else None].append(spec)
    units: list[UnitSpec] = []
    for bucket in _buckets(apart, BUCKET_BYTES):
        units += _split_by_dtype(f"whole:{bucket[0].name}", ("",), bucket, whole=True)
    units += _cut_root(owned[None], max((_run_bytes(run) for run in runs), default=0))
    for i, run in enumerate(runs):
        modules = tuple(name for name, _ in run)
        label = modules[0] if len(modules) == 1 else f"{modules[0]}..{modules[-1]}"
        units += _split_by_dtype(label, modules, owned[i])
    return tuple(units)


def _cut_root(parameters: list[ParameterSpec], limit: int) -> list[UnitSpec]:
    """The root's own parameters, in pieces no larger than the largest other unit: an output
    projection's gradients then travel at backward's start instead of waiting for the embedding's.
    """
    pieces: list[list[ParameterSpec]] = [[]]
    for parameter in parameters:
        held = sum(p.nbytes for p in pieces[-1])
        # A small piece (a norm) is not worth a message of its own: it goes with what follows.
        if limit and held > limit // 8 and held + parameter.nbytes > limit:
            pieces.append([])
        pieces[-1].append(parameter)
    units: list[UnitSpec] = []
    for piece in pieces:
        label = "root" if len(pieces) == 1 else f"root:{piece[0].name}"
        units += _split_by_dtype(label, ("",), piece)
    return units


def _run_bytes(run: Run) -> int:
    return sum(p.numel() * p.element_size() for _, module in run for p in module.parameters())


def cut_buckets(model: nn.Module, group: str, bucket_bytes: int) -> tuple[UnitSpec, ...]:
    """Data parallel's units: groups of parameters for one all-reduce, no matter which module uses
    them.

    Listed so that the reverse of the list is the order in which backward is expected to finish
    them.
    """
    specs = [_spec_of(names, parameter) for names, parameter in places(model)]
    units: list[UnitSpec] = []
    for i, members in enumerate(group_parameters(specs, group, bucket_bytes)):
        label = members[0].name if len(members) == 1 else f"bucket{i}"
        units += _split_by_dtype(label, ("",), members)
    return tuple(units)


def group_parameters(
    specs: list[ParameterSpec], group: str, bucket_bytes: int
) -> list[list[ParameterSpec]]:
    """As a row of `strategies.REDUCES` says: each parameter alone, all in one, or in buckets."""
    if group == "parameter":
        return [[spec] for spec in specs]
    if group == "all":
        return [specs] if specs else []
    return _buckets(specs, bucket_bytes)


def _buckets(specs: list[ParameterSpec], nbytes: int) -> list[list[ParameterSpec]]:
    """Filled from the back, as gradients arrive, so that the first to be ready is a full one."""
    runs = group_by_bytes(reversed(specs), lambda s: s.nbytes, nbytes)
    return [list(reversed(run)) for run in reversed(runs)]


def _spec_of(names: list[str], parameter: nn.Parameter) -> ParameterSpec:
    dtype = dtype_name(parameter.dtype)
    return ParameterSpec(names[0], tuple(parameter.shape), dtype, parameter.requires_grad)


def _find_runs(model: nn.Module, cut: Cut, bucket_bytes: int | None) -> list[Run]:
    if cut.by == "blocks":
        blocks = [[pair] for pair in _repeated_blocks(model, "")]
        return blocks or group_by_bytes(
            _owners(model), lambda pair: _own_bytes(pair[1]), bucket_bytes or DEFAULT_RUN_BYTES
        )
    if cut.by == "count":
        assert isinstance(cut.of, int)
        return _runs_of_count(model, cut.of)
    assert isinstance(cut.of, tuple)
    modules = [(n, m) for n, m in _called(model) if any(True for _ in m.parameters())]
    if cut.by == "class":
        found = [(n, m) for n, m in modules if any(c.__name__ in cut.of for c in type(m).__mro__)]
    else:
        found = [(n, m) for n, m in modules if any(fnmatch.fnmatchcase(n, p) for p in cut.of)]
        # "layers.*" means the layers, not also everything inside them.
        depth = {p: p.count(".") for p in cut.of}
        found = [
            (n, m)
            for n, m in found
            if any(fnmatch.fnmatchcase(n, p) and n.count(".") == depth[p] for p in cut.of)
        ]
    if not found:
        kinds = sorted({type(m).__name__ for _, m in modules})
        seen = kinds if cut.by == "class" else [n for n, _ in modules][:12]
        raise ValueError(
            f"units by {cut.by} {list(cut.of)} match no module with parameters and a forward; the "
            f"model has {seen}"
        )
    return [[pair] for pair in found]


def _repeated_blocks(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Outermost children of containers that share a class, have submodules and hold parameters.

    A container inside a container (a stage of blocks) counts as a block only if it holds none, and
    only if it is called: what is inside a list or a bare `nn.Module()` counts in its place.
    """
    inside = _called_children if isinstance(module, CONTAINERS) else nn.Module.named_children
    children = list(inside(module))
    kinds = Counter(type(child) for _, child in children if any(True for _ in child.parameters()))
    for name, child in children:
        path = f"{prefix}{name}"
        composite = any(True for _ in child.children()) and kinds[type(child)] > 1
        block = isinstance(module, CONTAINERS) and composite
        inner = (
            []
            if block and not isinstance(child, CONTAINERS)
            else list(_repeated_blocks(child, f"{path}."))
        )
        if inner or not block:
            yield from inner
        else:
            yield path, child


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward or "forward" in module.__dict__


def _called_children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Children; for one without a forward, its own."""
    for name, child in module.named_children():
        if _has_forward(child):
            yield name, child
        else:
            yield from ((f"{name}.{inner}", m) for inner, m in _called_children(child))


def _called(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules inside `model` whose forward is called: a unit of others would never be gathered.
    Lists of modules and of parameters have none, and attention reads its projection's weights.
    """
    attentions = (m for m in model.modules() if isinstance(m, nn.MultiheadAttention))
    read = {id(m.out_proj) for m in attentions}
    return [(n, m) for n, m in model.named_modules() if n and _has_forward(m) and id(m) not in read]


def _owners(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules that hold parameters directly, in the model's order; the model itself is the root's
    business.
    """
    return [(n, m) for n, m in _called(model) if any(True for _ in m.parameters(recurse=False))]


def _runs_of_count(model: nn.Module, least: int) -> list[Run]:
    runs: list[Run] = []
    held = least
    for pair in _owners(model):
        if held >= least:
            runs.append([])
            held = 0
        runs[-1].append(pair)
        held += sum(p.numel() for p in pair[1].parameters(recurse=False))
    return runs


def _merge(runs: list[Run], bucket_bytes: int | None) -> list[Run]:
    """Small neighbouring units become one, up to `bucket_bytes`: a message should be worth its
    latency.
    """
    if not bucket_bytes or any(len(run) > 1 for run in runs):
        return runs
    names = {run[0][0] for run in runs}
    if any(not names.isdisjoint(_outer(name)) for name in names):  # one is inside another
        return runs
    return [[run[0] for run in group] for group in group_by_bytes(runs, _run_bytes, bucket_bytes)]


def _outer(name: str) -> list[str]:
    """The modules that a module or parameter is inside of, the innermost first."""
    parts = name.split(".")
    return [".".join(parts[:k]) for k in range(len(parts) - 1, 0, -1)]


def _own_bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters(recurse=False))


def _enclosing_runs(parameter_name: str, run_of_module: dict[str, int]) -> list[int]:
    """The runs whose modules contain the parameter, the deepest first."""
    return [run_of_module[name] for name in _outer(parameter_name) if name in run_of_module]


def _split_by_dtype(
    name: str, modules: tuple[str, ...], parameters: list[ParameterSpec], whole: bool = False
) -> list[UnitSpec]:
    dtypes = list(dict.fromkeys(spec.dtype for spec in parameters))
    return [
        UnitSpec(
            name if len(dtypes) == 1 else f"{name}[{dtype}]",
            modules,
            tuple(spec for spec in parameters if spec.dtype == dtype),
            whole=whole,
        )
        for dtype in dtypes
    ]
