"""Paper exercises about memory: what training state takes, whole and sharded.

P is parameters. GB is 1e9 bytes and GiB 2**30 throughout: two of the seeds' answers are wrong
because they mix them.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass

from shardwise.description.preset import Preset, load_preset

GB = 1e9
GIB = 2.0**30

# fp32 master weights and two Adam moments, a 16-bit copy for compute, 16-bit gradients.
MIXED_BYTES = 3 * 4 + 2 + 2
# fp32 master weights, accumulated gradients and two Adam moments.
FULL_BYTES = 4 * 4


def static_state_bytes(parameters: float) -> float:
    """16 P: training state of mixed precision on one device, before any activation."""
    return MIXED_BYTES * parameters


@dataclass(frozen=True)
class ShardedState:
    """What one device holds under full sharding, in bytes."""

    master: float
    first_moment: float
    second_moment: float
    full_weights: float  # one unit, gathered, 16 bit
    full_gradients: float  # one unit, before its reduce, 16 bit
    gradients: float  # the reduced gradients of this rank's rows, kept until the optimizer's step

    @property
    def listed(self) -> float:
        """Without the reduced gradients, as the lecture lists it."""
        return self.total - self.gradients

    @property
    def total(self) -> float:
        return sum(astuple(self))


def sharded_state(parameters: float, ranks: int, unit_parameters: float) -> ShardedState:
    """4 P / n for the master, each moment and the gradients, 2 bytes for each parameter of the unit
    at work.
    """
    if ranks < 1:
        raise ValueError(f"ranks is {ranks}, expected at least 1")
    share = 4 * parameters / ranks
    return ShardedState(
        master=share,
        first_moment=share,
        second_moment=share,
        full_weights=2 * unit_parameters,
        full_gradients=2 * unit_parameters,
        gradients=share,
    )


@dataclass(frozen=True)
class StrategyBytes:
    """Per rank and step: bytes sent, and bytes of state kept, under one strategy."""

    strategy: str
    sent: float
    state: float
    relative: float  # bytes sent, as a multiple of ddp's


def strategy_bytes(
    parameters: float,
    ranks: int,
    *,
    gather_bytes: int = 2,
    reduce_bytes: int = 2,
    groups: int = 1,
) -> tuple[StrategyBytes, ...]:
    """What each strategy sends and keeps. `groups` replica groups share the ranks under hsdp.

    ddp all-reduces the gradients: 2 d P (n - 1) / n. zero1 and zero2 scatter them and gather the
    parameters once. zero3 gathers twice. hsdp does zero3 inside a group and all-reduces its shard
    across groups. State is 16 bytes a parameter: fp32 master and moments, and the gradients (fp32);
    zero1 and zero2 also keep the gathered parameters whole, zero1 the gradients before the reduce.
    """
    if ranks < 1 or groups < 1 or ranks % groups:
        raise ValueError(f"{ranks} ranks do not divide among {groups} groups")
    n, inside = ranks, ranks // groups
    once, within = (n - 1) / n, (inside - 1) / inside
    gather, scatter = gather_bytes * parameters, reduce_bytes * parameters
    across = 2 * scatter / inside * (groups - 1) / groups
    sent = {
        "ddp": 2 * scatter * once,
        "zero1": (scatter + gather) * once,
        "zero2": (scatter + gather) * once,
        "zero3": (scatter + 2 * gather) * once,
        "hsdp": (scatter + 2 * gather) * within + across,
    }
    master, gradients, moments = 4 * parameters, 4 * parameters, 8 * parameters
    state = {
        "ddp": master + gradients + moments,
        "zero1": (master + gradients + moments) / n + gather + scatter,
        "zero2": (master + gradients + moments) / n + gather,
        "zero3": (master + gradients + moments) / n,
        "hsdp": (master + gradients + moments) / inside,
    }
    base = sent["ddp"] or 1.0
    return tuple(StrategyBytes(name, sent[name], state[name], sent[name] / base) for name in sent)


def block_stack_state_bytes(preset: Preset) -> float:
    """16 P: fp32 master weights, accumulated gradients and both moments, on one device."""
    return FULL_BYTES * preset.parameter_count


def block_stack_saved_bytes(preset: Preset, tokens: float) -> float:
    """Kept for backward in bf16 by blocks of two linear layers: each keeps its input, so
    2 L (d_model + d_ff) bytes a token.
    """
    return 2.0 * preset.layers * (preset.d_model + preset.d_ff) * tokens


def devices_for(nbytes: float, device_bytes: float) -> int:
    """The least number of devices whose memory together holds `nbytes`."""
    return math.ceil(nbytes / device_bytes)


def per_device_bytes(preset: Preset, shards: int, tokens: float) -> float:
    """16 P / n + A / 2 + A / (2 n): state, gradients and half of the activations A are sharded,
    the other half is whole. `tokens` are one device's.
    """
    if shards < 1:
        raise ValueError(f"shards is {shards}, expected at least 1")
    activations = block_stack_saved_bytes(preset, tokens)
    state = block_stack_state_bytes(preset)
    return state / shards + activations / 2 + activations / (2 * shards)


def shards_for(preset: Preset, tokens: float, budget: float) -> int:
    """The least number of shards for which `per_device_bytes` is below `budget`."""
    activations = block_stack_saved_bytes(preset, tokens)
    room = budget - activations / 2
    if room <= 0:
        raise ValueError(
            f"half of the activations of {tokens:,.0f} tokens ({activations / 2 / GB:.1f} GB) is "
            f"not sharded and fills the budget of {budget / GB:.1f} GB: no number of shards helps"
        )
    divided = block_stack_state_bytes(preset) + activations / 2
    shards = max(1, math.ceil(divided / room))
    # Below, not equal.
    return shards + 1 if per_device_bytes(preset, shards, tokens) >= budget else shards


@dataclass(frozen=True)
class OptimizerSharding:
    """fp32 training state with and without sharded moments, in bytes, before activations."""

    whole: float
    sharded: float

    @property
    def saved(self) -> float:
        return self.whole - self.sharded


def optimizer_sharding(parameters: float, ranks: int) -> OptimizerSharding:
    """4 P each for weights and gradients, 8 P for the moments, which `ranks` share."""
    return OptimizerSharding(16 * parameters, 8 * parameters + 8 * parameters / ranks)


def parameters_saved_by(nbytes: float, ranks: int) -> float:
    """The parameters of a model for which sharding the moments over `ranks` saves `nbytes`."""
    return nbytes / (8 * (1 - 1 / ranks))


def xxl() -> Preset:
    """Seed 004's model of two linear layers a block."""
    return load_preset("xxl")
