"""Every private name of torch that src/ uses, where it stands, and whether this torch has it.

`pytest -s tests/unit/test_torch_private.py` prints the table. It is read from the source: imports
and dotted names of torch with a part that begins with `_`, and `_attributes` of objects that are
not ours.
"""

from __future__ import annotations

import ast
import dis
import functools
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

import shardwise
from shardwise.engine.torch_private import FSDPState

SRC = Path(shardwise.__file__).parent

# Where private names may stand: `description` and `kernels` lie below `engine`, and graphs have
# their own.
ALLOWED = {
    "engine/torch_private.py",
    "description/tracing/torch_private.py",
    "graph/torch_private.py",
    "kernels/torch_private.py",
}

# Classes in the place of torch's: they answer to the private names that torch calls.
STAND_INS = {"fsdp2/module.py", "fsdp2/sharding.py"}

NAMED_TUPLES = {"_asdict", "_fields", "_make", "_replace"}  # Python's, and public


@dataclass(frozen=True, order=True)
class Use:
    """A private name in a file: dotted from `torch` on, or `._name` of some object of torch's."""

    name: str
    file: str
    line: int
    guarded: bool = False  # by a version switch: this torch need not have it
    overrides: bool = False  # a class of ours that inherits from torch's defines it


def is_private(name: str) -> bool:
    return any(part[:1] == "_" and part[:2] != "__" and part != "_" for part in name.split("."))


def dotted(node: ast.AST) -> str:
    """`a.b.c`, or nothing if it is more than names."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and dotted(node.value):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


def is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


@functools.cache
def names_of(kind: type) -> frozenset[str]:
    """What a class has, and what its methods set on its instances."""
    found = set(dir(kind))
    for method in (getattr(m, "__func__", m) for base in kind.__mro__ for m in vars(base).values()):
        if isinstance(method, FunctionType):
            found |= {i.argval for i in dis.get_instructions(method) if i.opname == "STORE_ATTR"}
    return frozenset(found)


@functools.cache
def torchs() -> frozenset[str]:
    """Private names of the objects of torch that src/ is given."""
    node = torch.ones(1, requires_grad=True).exp().grad_fn
    kinds = (torch.Tensor, nn.Parameter, nn.Module, DTensor, DeviceMesh, torch.UntypedStorage)
    more = (torch.optim.Optimizer, dist.ProcessGroup, DistributedDataParallel, FSDPState)
    options = dist.ProcessGroupGloo._Options
    given = (*kinds, *more, options, FSDPModule, Shard, type(torch.ops.aten.add.Tensor), type(node))
    scheduled = torch.optim.SGD([torch.ones(1)], lr=0.1)  # what a scheduler leaves on it
    torch.optim.lr_scheduler.ConstantLR(scheduled)
    scheduled.step()
    found = frozenset(vars(nn.Module())).union(vars(scheduled), *map(names_of, given))
    return frozenset(filter(is_private, found))


class Source:
    """One file's syntax tree, with who its names are and what each node stands in."""

    def __init__(self, file: str, text: str) -> None:
        self.file, self.tree = file, ast.parse(text)
        self.nodes = list(ast.walk(self.tree))
        self.parents = {child: n for n in self.nodes for child in ast.iter_child_nodes(n)}
        self.imported: dict[str, str] = {}  # name here -> dotted name
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for item in node.names:
                    root = item.name.partition(".")[0]
                    self.imported[item.asname or root] = item.name if item.asname else root
            elif isinstance(node, ast.ImportFrom):
                for item in node.names:
                    self.imported[item.asname or item.name] = f"{node.module}.{item.name}"
        for node in self.tree.body:  # `aten = torch.ops.aten`
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                meant = self.resolve(node.value)
                if meant.startswith("torch."):
                    self.imported[node.targets[0].id] = meant

    def resolve(self, node: ast.AST) -> str:
        """The full dotted name of what is imported; nothing for any other object."""
        root, _, rest = dotted(node).partition(".")
        return f"{self.imported[root]}.{rest}".rstrip(".") if root in self.imported else ""

    def definitions(self) -> Iterator[str]:
        for node in self.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield node.name
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if is_self(node.value):
                    yield node.attr
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                statement = self.parents[node]
                if isinstance(self.parents.get(statement), ast.ClassDef | ast.Module):
                    yield node.id

    def is_guarded(self, node: ast.AST) -> bool:
        """Inside `try: ... except ImportError`, or a branch on `hasattr`."""
        while node in self.parents:
            child, node = node, self.parents[node]
            if isinstance(node, ast.Try) and child in node.body:
                caught = {dotted(n) for h in node.handlers if h.type for n in ast.walk(h.type)}
                if caught & {"ImportError", "AttributeError"}:
                    return True
            if isinstance(node, ast.If | ast.IfExp) and child is not node.test:
                calls = (n.func for n in ast.walk(node.test) if isinstance(n, ast.Call))
                if "hasattr" in map(dotted, calls):
                    return True
        return False

    def uses(self, ours: set[str]) -> Iterator[Use]:
        for node in self.nodes:
            overrides = isinstance(node, ast.ClassDef)
            for name in self._names(node, ours):
                line = getattr(node, "lineno", 0)
                yield Use(name, self.file, line, self.is_guarded(node), overrides)

    def _names(self, node: ast.AST, ours: set[str]) -> Iterator[str]:
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            full = [module + item.name for item in node.names]
            yield from (name for name in full if name.startswith("torch") and is_private(name))
        elif isinstance(node, ast.Attribute):
            yield from self._attribute(node, ours)
        elif isinstance(node, ast.Call):
            called = dotted(node.func).rpartition(".")[2]
            given = {"attrgetter": slice(None), "methodcaller": slice(1)}.get(called)
            if called in ("getattr", "setattr", "hasattr", "delattr"):
                given = slice(1, 2)
            for value in node.args[given] if given else ():
                name = value.value if isinstance(value, ast.Constant) else ""
                if isinstance(name, str) and is_private(name) and self._is_torchs(name, ours):
                    yield f".{name}"
        elif isinstance(node, ast.ClassDef):
            bases = map(self.resolve, node.bases)
            if any(base.startswith("torch.") or "torch_private" in base for base in bases):
                body = [name for item in node.body for name in _bound(item)]
                yield from (f".{name}" for name in body if name in torchs())

    def _attribute(self, node: ast.Attribute, ours: set[str]) -> Iterator[str]:
        whole = self.resolve(node)
        if whole.partition(".")[0] == "torch":
            outermost = not isinstance(self.parents[node], ast.Attribute)
            if outermost and is_private(whole):
                yield whole
        elif whole or not is_private(node.attr) or node.attr in NAMED_TUPLES:
            return  # another library's or ours; public
        elif node.attr not in ours if is_self(node.value) else self._is_torchs(node.attr, ours):
            yield f".{node.attr}"

    def _is_torchs(self, name: str, ours: set[str]) -> bool:
        known = name in ours or name.startswith("_shardwise") or name in NAMED_TUPLES
        return not known or name in torchs()


def _bound(item: ast.stmt) -> list[str]:
    """The names that a statement of a class gives it."""
    if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
        return [item.name]
    targets = [item.target] if isinstance(item, ast.AnnAssign) else getattr(item, "targets", [])
    return [target.id for target in targets if isinstance(target, ast.Name)]


def find_uses(files: dict[str, str]) -> list[Use]:
    sources = [Source(file, text) for file, text in files.items()]
    ours = {name for source in sources for name in source.definitions()}
    return sorted(use for source in sources for use in source.uses(ours))


def find_misplaced(uses: list[Use]) -> list[Use]:
    answered = {use.name for use in uses if use.overrides}
    wrong = []
    for use in uses:
        stands_in = use.file in STAND_INS and use.name in answered
        if not (use.file in ALLOWED or stands_in):
            wrong.append(use)
    return wrong


@functools.cache
def uses_in_src() -> list[Use]:
    return find_uses({str(p.relative_to(SRC)): p.read_text() for p in SRC.rglob("*.py")})


def is_there(name: str) -> bool:
    """Whether this torch has the name."""
    if name.startswith("."):
        return name[1:] in torchs()
    if "._cuda_" in name and not torch.backends.cuda.is_built():
        return True  # cannot be told here
    found: Any = torch
    path = "torch"
    for part in name.split(".")[1:]:
        path = f"{path}.{part}"
        try:  # first as a module: torch hides some behind functions of the same name
            found = importlib.import_module(path)
        except ImportError:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
    return True


def as_table(uses: list[Use]) -> str:
    rows = dict.fromkeys(
        (use.name, use.file + (" (overrides)" if use.overrides else "")) for use in uses
    )
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"{name:<{width}}  {file}" for name, file in rows)


def test_private_names_stand_where_they_may() -> None:
    uses = uses_in_src()
    print(f"\n{as_table(uses)}")
    wrong = [f"{use.file}:{use.line}: {use.name}" for use in find_misplaced(uses)]
    assert not wrong, (
        "private names of torch belong into engine/torch_private.py, with what is lost without "
        "them:\n" + "\n".join(wrong)
    )


def test_this_torch_has_every_private_name() -> None:
    asked = {use.name for use in uses_in_src() if not use.guarded}
    missing = sorted(name for name in asked if not is_there(name))
    assert not missing, f"torch {torch.__version__} does not have {missing}"


def test_each_way_to_use_a_private_name_is_found() -> None:
    text = """
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree
from torch.testing._internal.distributed.fake_pg import FakeStore
from operator import attrgetter
try:
    from torch._new import thing
except ImportError:
    thing = None

aten = torch.ops.aten

class Mine(nn.Module):
    def __init__(self):
        self._kept, self._version = 1, 2
    def _apply(self, fn):
        return super()._apply(fn)
    def _own(self, other, parameter):
        os._exit(other._kept + other._own() + other._fields)
        dist.distributed_c10d._get_default_store()
        aten._to_copy(parameter._made_up, self._parameters, parameter._version, self._version)
        return getattr(parameter, "_base"), attrgetter("_shardwise_x", "_local_tensor")
"""
    uses = find_uses({"room/file.py": text})
    assert {use.name for use in uses} == {
        "torch.utils._pytree",
        "torch.testing._internal.distributed.fake_pg.FakeStore",
        "torch._new.thing",
        "torch.distributed.distributed_c10d._get_default_store",
        "torch.ops.aten._to_copy",
        "._apply",
        "._made_up",
        "._parameters",
        "._version",
        "._base",
        "._local_tensor",
    }
    assert {use.name for use in uses if use.guarded} == {"torch._new.thing"}
    assert {use.name for use in uses if use.overrides} == {"._apply"}
    assert find_misplaced(uses) == uses
    assert {use.name for use in uses if not is_there(use.name)} == {"torch._new.thing", "._made_up"}
