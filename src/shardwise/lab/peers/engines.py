"""The peers of `shardwise bench peers`: torch's engines of both generations and DeepSpeed, by the
class of what they shard. Each trains the same model with the same optimizer as ours.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from shardwise.description.language_model import OPTIMIZER, compute_loss
from shardwise.emulation.engines import AXES, fully_shard_blocks
from shardwise.lab.steps.engines import Precision, Tensors, Wrapped, mesh_of, wrap_plan
from shardwise.planning.plan import DTYPES
from shardwise.planning.units import BUCKET_BYTES
from shardwise.profiling.timing import Step

# Everybody's AdamW. The gradient of a key projection's bias is zero but for rounding, which torch's
# own 1e-8 makes steps of: engines that sum in another order would part there, and only there.
SETTINGS = OPTIMIZER | {"eps": 1e-6}

KINDS = ("ddp", "zero-redundancy", "fsdp1", "fsdp2", "deepspeed")


@dataclass(frozen=True)
class Peer:
    """Another engine, as one of a class."""

    name: str
    kind: str  # of KINDS
    wrap: Callable[[nn.Module, Precision], Wrapped]
    emulated: bool = False  # the emulated network carries all that it sends


@dataclass(frozen=True)
class PeerClass:
    """What is sharded: our strategy for it, and who else does it."""

    strategy: str
    peers: tuple[Peer, ...]
    replicas: int = 1  # of the shard group

    def plan(self, precision: Precision) -> Any:
        world = dist.get_world_size()
        mesh = world if self.replicas == 1 else (self.replicas, world // self.replicas)
        return precision.plan(self.strategy, mesh)


def wrap_ours(kind: PeerClass, model: Any, precision: Precision) -> Wrapped:
    """shardwise with the defaults of a Plan."""
    return wrap_plan(model, kind.plan(precision), settings=SETTINGS)


def _wrapped(model: nn.Module, settings: dict[str, Any]) -> Wrapped:
    return Wrapped(model, torch.optim.AdamW(model.parameters(), **SETTINGS), 1, settings)


def _wrap_ddp(model: Any, precision: Precision, **settings: Any) -> Wrapped:
    told = {"wrap": f"DistributedDataParallel {settings or ', its defaults'}"}
    return _wrapped(DistributedDataParallel(model, **settings), told)


def _wrap_zero_redundancy(model: Any, precision: Precision) -> Wrapped:
    # Its package compiles optimizers when it is imported.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, **SETTINGS)
    settings = {"wrap": "DistributedDataParallel, its defaults", "optimizer": "ZeroRedundancy"}
    return Wrapped(wrapped, optimizer, 1, settings)


def _wrap_fsdp2(strategy: str, model: Any, precision: Precision) -> Wrapped:
    device = next(model.parameters()).device.type
    hybrid = strategy == "hsdp"
    plan = HYBRID.plan(precision) if hybrid else precision.plan(strategy)
    mesh = _mesh_2d(device) if hybrid else mesh_of(device)
    return _wrapped(model, fully_shard_blocks(model, plan, mesh))


def _mesh_2d(device: str) -> DeviceMesh:
    shape = (HYBRID.replicas, dist.get_world_size() // HYBRID.replicas)
    return mesh_of(device, shape, AXES)


class _FSDP1(Wrapped):
    def whole(self) -> Tensors:
        from torch.distributed.fsdp import FullyShardedDataParallel

        with FullyShardedDataParallel.summon_full_params(self.model):
            return {
                name.replace("_fsdp_wrapped_module.", ""): parameter.detach().clone()
                for name, parameter in self.model.named_parameters()
            }


def _wrap_fsdp1(strategy: str, model: Any, precision: Precision) -> Wrapped:
    """Each block is wrapped, then the root; parameters keep their names, so that all engines give
    the optimizer the same ones.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    device = next(model.parameters()).device
    policy = MixedPrecision(
        param_dtype=DTYPES[precision.compute] if precision.compute else None,
        reduce_dtype=DTYPES[precision.reduce] if precision.reduce else None,
    )
    mesh = _mesh_2d(device.type) if strategy.startswith("HYBRID") else mesh_of(device.type)
    wrapped = FullyShardedDataParallel(
        model,
        sharding_strategy=ShardingStrategy[strategy],
        auto_wrap_policy=ModuleWrapPolicy({type(model.layers[0])}),
        mixed_precision=policy,
        device_id=device,
        use_orig_params=True,
        device_mesh=mesh,
    )
    optimizer = torch.optim.AdamW(wrapped.parameters(), **SETTINGS)
    settings = {"wrap": "FullyShardedDataParallel of each block, then the root, its defaults"}
    return _FSDP1(wrapped, optimizer, 1, settings | {"sharding_strategy": strategy})


def _import_deepspeed() -> Any:
    found = importlib.import_module("deepspeed")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return found


@dataclass(frozen=True)
class _DeepSpeed(Wrapped):
    engine: Any = None
    stage: int = 0

    def step_on(self, tokens: torch.Tensor, targets: torch.Tensor, micro_batches: int = 1) -> Step:
        assert micro_batches == 1
        engine = self.engine

        def step() -> None:
            engine.backward(compute_loss(engine, tokens, targets))
            engine.step()  # clears the gradients too

        return step

    def whole(self) -> Tensors:
        deepspeed = _import_deepspeed()
        named = dict(self.model.named_parameters())
        gathers = list(named.values()) if self.stage == 3 else []
        with deepspeed.zero.GatheredParameters(gathers):
            return {name: parameter.detach().clone() for name, parameter in named.items()}


def _wrap_deepspeed(stage: int, model: Any, precision: Precision) -> Wrapped:
    """DeepSpeed in fp32, with torch's own optimizer in it and no clipping; else its defaults."""
    deepspeed = _import_deepspeed()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # only reported: the loss is a mean already
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0,
        "zero_optimization": {
            "stage": stage,
            # As torch's buckets. Its own default takes 2 GB, which would be most of what is held.
            "reduce_bucket_size": BUCKET_BYTES // 4,
            "allgather_bucket_size": BUCKET_BYTES // 4,
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
    }
    optimizer = torch.optim.AdamW(model.parameters(), **SETTINGS)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=config, dist_init_required=False
    )
    settings = {"wrap": f"deepspeed {deepspeed.__version__}", "config": config}
    return _DeepSpeed(model, optimizer, 1, settings, engine=engine, stage=stage)


def _fsdp1(strategy: str) -> Peer:
    return Peer(f"FSDP1 {strategy}", "fsdp1", partial(_wrap_fsdp1, strategy), emulated=True)


def _fsdp2(strategy: str, told: str = "") -> Peer:
    return Peer(f"FSDP2{told}", "fsdp2", partial(_wrap_fsdp2, strategy), emulated=True)


def _deepspeed(stage: int) -> Peer:
    return Peer(f"DeepSpeed ZeRO-{stage}", "deepspeed", partial(_wrap_deepspeed, stage))


HYBRID = PeerClass(
    "hsdp",
    (_fsdp1("HYBRID_SHARD"), _fsdp2("hsdp")),
    replicas=2,
)
CLASSES: dict[str, PeerClass] = {
    "replicate": PeerClass(
        "ddp",
        (
            Peer("DDP", "ddp", _wrap_ddp),
            Peer("DDP, views", "ddp", partial(_wrap_ddp, gradient_as_bucket_view=True)),
            _fsdp1("NO_SHARD"),
        ),
    ),
    "optimizer": PeerClass(
        "zero1",
        (
            Peer("ZeroRedundancyOptimizer", "zero-redundancy", _wrap_zero_redundancy),
            _deepspeed(1),
        ),
    ),
    "gradients": PeerClass(
        "zero2", (_fsdp1("SHARD_GRAD_OP"), _fsdp2("zero2", ", kept"), _deepspeed(2))
    ),
    "parameters": PeerClass("zero3", (_fsdp1("FULL_SHARD"), _fsdp2("zero3"), _deepspeed(3))),
    "hybrid": HYBRID,
}


def is_installed(kind: str) -> bool:
    """torch has all of them but DeepSpeed."""
    return kind != "deepspeed" or importlib.util.find_spec("deepspeed") is not None


def compile_blocks(wrap: Callable[..., Wrapped]) -> Callable[..., Wrapped]:
    """The same over compiled blocks, which is how all of these are used with torch.compile."""

    def wrap_compiled(model: Any, precision: Precision) -> Wrapped:
        for block in model.layers:
            block.compile()
        wrapped = wrap(model, precision)
        return dataclasses.replace(wrapped, settings=wrapped.settings | {"blocks": "compiled"})

    return wrap_compiled
