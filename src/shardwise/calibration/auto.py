"""`sw.shard` with a Plan, or with "auto": one that is chosen here, by trials on the ranks that are
there. `sw.compare` holds what it took against what was said.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise.engine import api
from shardwise.engine.attach import find_device
from shardwise.errors import UserError
from shardwise.planning.plan import Plan

if TYPE_CHECKING:
    from shardwise.predict.foresight import Compared, Foresight

AUTO = "auto"
_foreseen: weakref.WeakKeyDictionary[nn.Module, Foresight] = weakref.WeakKeyDictionary()


def shard(
    model: nn.Module,
    plan: Plan | str,
    *,
    example: Any = None,
    loss: Callable[..., Any] | None = None,
    micro_batches: int = 1,
    compute_dtype: str | None = None,
    reduce_dtype: str | None = None,
    budget_gb: float | None = None,
) -> nn.Module:
    """Shard `model` in place as `plan` says, and return it. Parameter names stay; build the
    optimizer afterwards.

    With plan="auto" all ranks call it together. The first searches for this world, all of them run
    some steps of the best Plans with AdamW on copies of the model, and take the fastest that fits;
    rank 0 says in three lines why. The model, its gradients and random states are not touched.

    example: what the model is called with in one micro-batch of a rank, as `sw.search` takes it.
    loss: of the output, or of the output and the inputs; default: as `sw.search` has it.
    micro_batches: forward and backward passes of one step.
    compute_dtype, reduce_dtype: default: the parameters' own, and float32.
    budget_gb: memory of a rank, in 1e9 bytes; default: what the device has.
    """
    if plan != AUTO:
        given = (example, loss, compute_dtype, reduce_dtype, budget_gb)
        if isinstance(plan, Plan) and (micro_batches != 1 or any(v is not None for v in given)):
            raise UserError(
                "example, loss, micro_batches, dtypes and budget_gb are for sw.shard(model, "
                "'auto'); a Plan has been made with them"
            )
        return api.shard(model, plan)  # type: ignore[arg-type]  # which refuses other texts
    from shardwise.calibration.choice import Question, choose

    question = Question(example, loss, micro_batches, compute_dtype, reduce_dtype, budget_gb)
    chosen, foresight = choose(model, question, lambda: _prepare(model), _say)
    sharded = api.shard(model, chosen)
    _foreseen[sharded] = foresight
    return sharded


def _prepare(model: nn.Module) -> torch.device:
    """Where the model is; an error for one that cannot be sharded."""
    if not isinstance(model, nn.Module):
        raise UserError(f"sw.shard takes an nn.Module, got a {type(model).__name__}")
    api.check_whole(model)
    return find_device(model)


def _say(text: str) -> None:
    print(f"shardwise: {text}", file=sys.stderr, flush=True)


def compare(model: nn.Module, measured: Any) -> Compared:
    """What steps of a model took, beside what `sw.shard(model, "auto")` said; printed, a sentence.

    measured: what `sw.profile` gave, or the seconds of one step.
    """
    foresight = _foreseen.get(model)
    if foresight is None:
        raise UserError("sw.compare is for a model whose plan sw.shard(model, 'auto') has chosen")
    if isinstance(measured, int | float):
        if not measured > 0:
            raise UserError(f"a step of {measured} seconds: expected more than 0")
        return foresight.compare(measured * 1e3)
    timeline = getattr(measured, "timeline", None)
    if timeline is None:
        raise UserError(
            f"sw.compare takes what sw.profile gave, or seconds, got a {type(measured).__name__}"
        )
    parts = timeline.breakdown()
    peak = timeline.peak().total if timeline.memory else None
    return foresight.compare(
        timeline.step_ms, peak, (parts.exposed_transfer + parts.waiting_for_peers) / 1e6
    )
