"""The parity subset on one GPU: gloo ranks with CUDA tensors (NCCL refuses two ranks on one GPU).

Needs no pytest where there is none: `python -m tests.gpu.test_parity` runs the same cases.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

from tests.parity.training import compare
from tests.ranks import Ranks

try:
    import pytest
except ImportError:  # a GPU machine without test tools
    pytest = None  # type: ignore[assignment]

# fp32 products on a GPU differ in their last bits with the batch they are part of.
BOUND = 2e-6

CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "ddp-naive": ("ddp", 2, {"reduce": "naive"}),
    "ddp-flat": ("ddp", 2, {"reduce": "flat"}),
    "ddp-overlap": ("ddp", 2, {"reduce": "overlap"}),
    "ddp-bucketed": ("ddp", 2, {"reduce": "bucketed", "bucket_bytes": 1024}),
    "zero1": ("zero1", 2, {}),
    "zero2": ("zero2", 2, {}),
    "zero3": ("zero3", 2, {}),
    "zero3-deep": ("zero3", 2, {"forward_prefetch": 2, "reduce_depth": 3}),
    "zero3-each": ("zero3", 2, {"gather": "each"}),
    "zero3-grouped": ("zero3", 2, {"gather": "grouped"}),
    "zero3-last": ("zero3", 2, {"sync": "last"}),
    "zero3-whole": ("zero3", 2, {"whole": "layers.*.norm.*", "whole_below": 40}),
    "zero2-whole": ("zero2", 2, {"whole": "*.up.*", "sync": "scatter_each_reduce_last"}),
    "zero1-whole": ("zero1", 2, {"whole": "*.up.*", "sync": "last", "reduce_depth": 2}),
    "hsdp-zero2": ("hsdp", (2, 1), {"inner": "zero2"}),
    "hsdp-zero3": ("hsdp", (2, 1), {"sync": "scatter_each_reduce_last"}),
}
KINDS = [
    (dtype, optimizer, by_torch)
    for dtype in ("float32", "bfloat16")
    for optimizer, by_torch in (("sgd", False), ("adamw", False), ("adamw", True))
]


def run_case(name: str, mesh: Any, settings: dict[str, Any]) -> list[float]:
    """Every dtype and optimizer of one case, on this rank."""
    torch.cuda.set_device(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    return [
        compare(
            "odd",
            name,
            mesh,
            optimizer,
            (2, 2),
            dtype,
            settings=settings,
            by_torch=by_torch,
            device="cuda",
        )
        for dtype, optimizer, by_torch in KINDS
    ]


if pytest is not None:

    @pytest.mark.parametrize("case", CASES)
    def test_trains_to_one_process_on_a_gpu(two: Ranks, case: str) -> None:
        for errors in two.run(run_case, *CASES[case]):
            assert max(errors) <= BOUND


def main() -> int:
    """All cases without pytest; the exit code counts the failures."""
    ranks, failures = Ranks(2), 0
    for case, arguments in CASES.items():
        began = time.monotonic()
        worst = max(max(errors) for errors in ranks.run(run_case, *arguments))
        failures += worst > BOUND
        verdict = "ok" if worst <= BOUND else "FAILED"
        print(f"{case:14} {verdict} {worst:.2e} {time.monotonic() - began:.1f} s", flush=True)
    ranks.stop()
    print(f"{len(CASES) - failures} passed, {failures} failed")
    return failures


if __name__ == "__main__":
    sys.exit(main())
