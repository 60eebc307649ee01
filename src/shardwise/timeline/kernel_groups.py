"""Kernels by what they do: a name's group, and which of them take the time.

On a device these are its kernels; on a host, operators by their own time, without that of the
operators they call.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

PHASES = ("forward", "backward", "optimizer")
# By what a name says, the first that fits. A fused attention (torch's kernels, and ours) is both
# products and softmax; the loss's log-softmax is a softmax too.
_NAMES = (
    ("collectives", r"nccl|gloo:|c10d|allreduce|all_reduce|allgather|all_gather|reduce_scatter"),
    ("attention", r"flash|fmha|sdpa|scaled_dot_product|attention"
                  r"|\b(forward|joined|dq|dkdv|dq_from_stash|lines|split)(_hopper)?_kernel"),
    ("products", r"gemm|gemv|nvjet|xmma|cutlass|splitk|dot_kernel|conv(?!ert)"
                 r"|::(mm|bmm|addmm|baddbmm|matmul|linear|dot|mv|addmv|_scaled_mm)$"),
    ("softmax", r"softmax"),
    ("norms", r"norm(?!al)"),
    ("copies", r"memcpy|memset|copy|catarray|fillfunctor|::(cat|clone|contiguous|fill_|zero_)$"),
    ("other", r"embedding|index|gather|scatter|nll_loss|cross_entropy|arange"
              r"|::(as_strided|t|to|transpose|permute|expand|slice|select|narrow|chunk|split|item"
              r"|type_as|result_type|detach|alias|resize_|.*view.*|.*reshape.*|.*flatten.*"
              r"|.*squeeze.*|empty.*|resolve_.*|_local_scalar_dense|lift_fresh)$"),
    ("reductions", r"reduce_kernel|triton_(red|per)_|::(sum|mean|amax|amin|max|min|prod)$"),
    ("elementwise", r"elementwise|functor|triton_poi_|^aten::"),
)  # fmt: skip
_PATTERNS = [(group, re.compile(pattern, re.IGNORECASE)) for group, pattern in _NAMES]
GROUPS = (
    "products", "attention", "softmax", "norms", "elementwise", "reductions", "copies",
    "optimizer", "other", "collectives",
)  # fmt: skip
NOTABLE = 0.02  # of a pass: a kernel that is worth naming
_INNER = re.compile(r"\b(\w*Functor\w*|\w+_kernel_cuda|\w+_kernel(?=\()|cutlass_\w+)")


def group_of(name: str, phase: str = "") -> str:
    """What a kernel or an operator does. All that an optimizer computes is the optimizer's."""
    for group, pattern in _PATTERNS:
        if pattern.search(name):
            return "optimizer" if phase == "optimizer" and group != "collectives" else group
    return "optimizer" if phase == "optimizer" else "other"


def shorten(name: str) -> str:
    """A C++ kernel without its namespaces, types and arguments; what it applies to each element
    stands behind it in brackets.
    """
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    head = re.match(r"[^<(]*", name)[0]  # type: ignore[index]  # it matches anything
    if head == name:
        return name
    base = head.rpartition("::")[2].strip()
    inner = [found for found in _INNER.findall(name.removeprefix(head)) if found != base]
    return f"{base} ({inner[-1]})" if inner else base


@dataclass(frozen=True)
class Ran:
    """Something that ran. `begun` is the host's: when it launched a kernel, or began to compute."""

    name: str
    begun: int
    ns: int


def own_times(operators: Iterable[tuple[str, int, int, int]]) -> list[Ran]:
    """Operators (name, start, end, thread) by their own time."""
    made: list[tuple[str, int]] = []
    own: list[int] = []
    open_on: dict[int, list[tuple[int, int]]] = defaultdict(list)  # number and end, by thread
    for name, start, end, thread in sorted(operators, key=lambda each: (each[1], -each[2])):
        above = open_on[thread]
        while above and above[-1][1] <= start:
            above.pop()
        if above:
            own[above[-1][0]] -= end - start
        above.append((len(made), end))
        made.append((name, start))
        own.append(end - start)
    return [Ran(name, start, max(0, ns)) for (name, start), ns in zip(made, own, strict=True)]


def tabulate(ran: Iterable[tuple[str, Ran]]) -> list[dict[str, Any]]:
    """What ran in each phase by name, the longest first."""
    found: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for phase, each in ran:
        told = found[phase, each.name]
        told[0] += 1
        told[1] += each.ns
    rows = [
        {"phase": phase, "group": group_of(name, phase), "name": name, "count": count, "ns": ns}
        for (phase, name), (count, ns) in found.items()
    ]
    return sorted(rows, key=lambda row: -row["ns"])


def merge_phases(rows: Iterable[dict[str, Any]], phases: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of some phases by name and group, the longest first."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        if row["phase"] in phases:
            key = row["name"], row["group"]
            held = found.setdefault(key, {"name": key[0], "group": key[1], "count": 0, "ns": 0})
            held["count"] += row["count"]
            held["ns"] += row["ns"]
    return sorted(found.values(), key=lambda row: -row["ns"])


def sum_by_group(rows: Iterable[dict[str, Any]]) -> dict[str, int]:
    """Nanoseconds of each group that is there, in GROUPS' order."""
    sums = dict.fromkeys(GROUPS, 0)
    for row in rows:
        sums[row["group"]] += row["ns"]
    return {group: ns for group, ns in sums.items() if ns}


def computing(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without collectives, which run beside: what shares are shares of."""
    return [row for row in rows if row["group"] != "collectives"]
