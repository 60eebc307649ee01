"""The Plan: one frozen value that says how a model is trained in parallel. Everything else reads
it.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, NoReturn, Unpack, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.checked import Reader, keys_of
from shardwise.description.parameters import ParameterSpec, UnitSpec, dtype_name
from shardwise.errors import nearest
from shardwise.planning import memory
from shardwise.planning.blocks import CODES
from shardwise.planning.settings import Settings, parse_mesh
from shardwise.planning.strategies import GATHERS, NAMES, REDUCES, STRATEGIES, SYNCS, Strategy
from shardwise.planning.units import (
    BUCKET_BYTES,
    LARGE_GROUP,
    MIB,
    Cut,
    Whole,
    check_cuttable,
    cut_buckets,
    cut_units,
)
from shardwise.schedule.policy import Policy, UnitPolicy

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}


SUMS = ("float32",)  # wider than what travels, and exact enough for sums over thousands of ranks


def find_dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else DTYPES[name]


def cast_dtypes(
    own: torch.dtype, compute: torch.dtype | None, reduce: torch.dtype | None
) -> tuple[torch.dtype, torch.dtype]:
    """What parameters of the dtype `own` are computed and reduced in. Integers are never cast."""
    return (compute or own, reduce or own) if own.is_floating_point else (own, own)


def sums_in(travels: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    """What gradients are added in: as they travel, or as asked where that is wider."""
    wider = asked is not None and travels.is_floating_point and travels.itemsize < asked.itemsize
    return cast(torch.dtype, asked) if wider else travels


# Bytes of one message where the strategy does not pay for size with memory: 32 MiB is the larger of
# the two communication sizes that grouped FSDP was reported with.
# A small model still needs units that overlap each other: so many. Data parallel has none below
# 3 MiB, where messages over gloo cost more than they hide (docs/log.md).
LEAST_UNITS = 4
LEAST_BUCKET_BYTES = {"ddp": 3 * MIB}
DEFAULT_BUCKET_BYTES = {"ddp": BUCKET_BYTES, "zero1": 32 * MIB, "zero2": 32 * MIB, "zero3": None}


@dataclass(frozen=True)
class Plan:
    """How a model is trained: the mesh, the units, and what is kept, gathered, prefetched and
    reduced when.

    Made by `Plan.of(name, mesh=..., **settings)`; checks itself at birth; round-trips through JSON.
    `units` is None until `resolve(model)` (which `shard` calls) finds them by `cut`.
    """

    name: str
    mesh: tuple[int, int]  # (replicate, shard)
    inner: str = "zero3"  # hsdp only: the strategy inside a shard group
    cut: Cut = Cut()
    bucket_bytes: int | None = None  # None: the strategy's default; small units are merged up to it

    compute_dtype: str | None = None  # None: the parameters' own
    reduce_dtype: str | None = None  # None: the parameters' own
    # None: as they travel; float32: gradients that travel as 16 bits are added in 32
    sum_dtype: str | None = None
    output_dtype: str | None = None  # None: leave the model's output alone

    reduce: str = "bucketed"  # ddp only: naive, flat, overlap, bucketed
    sync: str = "each"  # each, scatter_each_reduce_last, last
    average: bool = False  # divide the sums by the number of all ranks
    forward_prefetch: int = 1  # units gathered ahead of the one that runs
    backward_prefetch: int = 1
    reduce_depth: int = 1  # gradient slots in flight before backward waits for the oldest
    # None: the root unit only; True: all; False: none; k: each rank keeps 1/k and gathers in groups
    # of k ranks
    keep_after_forward: bool | int | None = None
    # So many units at the model's end stay gathered from forward to backward, which begins there
    keep_last: int = 0
    unused: str = "zeros"  # parameters used on some ranks only: zeros elsewhere, or an error
    gather: str = (
        "auto"  # packed, grouped, each; auto: what measured best for the backend and the sizes
    )

    # None: full parameters travel as they are computed with; a dtype of 8 bits: as codes in blocks
    # with a scale each
    gather_dtype: str | None = None

    # Of what a step takes: torch's allocator, one "arena", or "auto": an arena on a GPU
    memory: str = "allocator"

    # Parameters that every rank keeps whole, with their gradients and optimizer state: those with a
    # name that matches a shell pattern, and those of fewer bytes; None: in large shard groups small
    # ones that would be mostly padding. ddp keeps all of them so.
    whole: tuple[str, ...] = ()
    whole_below: int | None = None

    units: tuple[UnitSpec, ...] | None = None
    # The caller's own mesh: its groups are used. Not part of the value; JSON keeps its shape.
    device_mesh: DeviceMesh | None = dataclasses.field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        self._check_choice("name", NAMES)
        self._check_choice("inner", tuple(n for n in STRATEGIES if n != "ddp"))
        self._check_choice("reduce", tuple(REDUCES))
        self._check_choice("sync", SYNCS)
        self._check_choice("gather", GATHERS)
        self._check_choice("unused", ("zeros", "error"))
        self._check_choice("memory", ("allocator", "arena", "auto"))
        for field in ("compute_dtype", "reduce_dtype", "output_dtype"):
            if getattr(self, field) is not None:
                self._check_choice(field, tuple(DTYPES))
        self._check_sum()
        for field, least in (
            ("forward_prefetch", 0),
            ("backward_prefetch", 0),
            ("reduce_depth", 1),
            ("keep_last", 0),
        ):
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"Plan.{field} is {value!r}, expected a whole number >= {least}")
        if self.bucket_bytes is not None and not (
            type(self.bucket_bytes) is int and self.bucket_bytes > 0
        ):
            raise ValueError(
                f"Plan.bucket_bytes is {self.bucket_bytes!r}, expected a positive whole number of "
                "bytes"
            )
        if not isinstance(self.average, bool):
            raise ValueError(f"Plan.average is {self.average!r}, expected true or false")
        self._check_whole()
        if self.name != "ddp" and self.reduce != "bucketed":
            raise ValueError(
                f"Plan.reduce={self.reduce!r} is a setting of 'ddp'; {self.name!r} reduces by unit "
                "(set the units and bucket_bytes instead)"
            )
        if self.name != "hsdp" and self.inner != "zero3":
            raise ValueError(
                f"Plan.inner={self.inner!r} is a setting of 'hsdp', not of {self.name!r}"
            )
        self._check_mesh()
        self._check_keep()
        self._check_gather()

    def _check_choice(self, field: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, field)
        if value not in choices:
            raise ValueError(f"Plan.{field} is {value!r}{nearest(str(value), choices)}")

    def _check_sum(self) -> None:
        if self.sum_dtype is None:
            return
        self._check_choice("sum_dtype", SUMS)
        if self.reduce_dtype in ("float32", "float64"):
            raise ValueError(
                f"Plan.sum_dtype={self.sum_dtype!r} is for gradients that travel as 16 bits, but "
                f"reduce_dtype is {self.reduce_dtype!r}; set reduce_dtype='bfloat16', or leave "
                "sum_dtype out"
            )

    def _check_whole(self) -> None:
        if isinstance(self.whole, list):
            object.__setattr__(self, "whole", tuple(self.whole))
        if not (isinstance(self.whole, tuple) and all(isinstance(p, str) for p in self.whole)):
            raise ValueError(
                f"Plan.whole is {self.whole!r}, expected patterns of parameter names, such as "
                "('*.norm.*', 'head.bias')"
            )
        below = self.whole_below
        if below is not None and (type(below) is not int or below < 0):
            raise ValueError(f"Plan.whole_below is {below!r}, expected a whole number of bytes")

    def _check_mesh(self) -> None:
        mesh = self.mesh
        if not (len(mesh) == 2 and all(type(n) is int and n >= 1 for n in mesh)):
            raise ValueError(f"Plan.mesh is {mesh!r}, expected (replicate, shard), both at least 1")
        if self.name == "ddp" and self.shard != 1:
            raise ValueError(
                f"ddp shards nothing, but the mesh {mesh} has a shard axis of {self.shard}; "
                f"use mesh={self.replicate * self.shard}, or another strategy"
            )
        if self.name.startswith("zero") and self.replicate != 1:
            raise ValueError(
                f"{self.name} has one shard group, but the mesh {mesh} has {self.replicate} "
                "replicas; "
                f"use Plan.of('hsdp', mesh={mesh}, inner={self.name!r})"
            )

    def _check_keep(self) -> None:
        keep = self.keep_after_forward
        if self.keep_last and self.strategy.parameters != "shard":
            raise ValueError(
                f"Plan.keep_last={self.keep_last} needs parameters that are freed after forward; "
                f"{self.title} keeps them anyway"
            )
        if self.keep_last and (keep is True or not (keep is None or isinstance(keep, bool))):
            raise ValueError(
                f"Plan.keep_last={self.keep_last} with keep_after_forward={keep}: give one of them"
            )
        if keep is None or isinstance(keep, bool):
            return
        if self.strategy.parameters != "shard":
            raise ValueError(
                f"Plan.keep_after_forward={keep} needs parameters that are freed after forward; "
                f"{self.title} keeps them anyway"
            )
        if not (isinstance(keep, int) and 1 < keep < self.shard and self.shard % keep == 0):
            raise ValueError(
                f"Plan.keep_after_forward is {keep!r}, expected true, false, or a group size that "
                "divides "
                f"the shard axis of {self.shard} (more than 1, less than {self.shard})"
            )

    def _check_gather(self) -> None:
        if self.gather_dtype is None:
            return
        self._check_choice("gather_dtype", tuple(CODES))
        if self.strategy.parameters != "shard":
            raise ValueError(
                f"Plan.gather_dtype={self.gather_dtype!r} is for parameters that are gathered "
                f"in every pass; {self.title} keeps them whole: use zero3, or leave it out"
            )
        if self.gather not in ("auto", "packed"):
            raise ValueError(
                f"Plan.gather={self.gather!r} with gather_dtype={self.gather_dtype!r}: codes "
                "are always packed; leave gather out"
            )

    @classmethod
    def of(
        cls,
        name: str,
        mesh: int | str | tuple[int, ...] | DeviceMesh = 1,
        **given: Unpack[Settings],
    ) -> Plan:
        """A Plan by strategy name: ddp, zero1, zero2, zero3, hsdp.

        mesh: (replicate, shard), "2x4", or one number n: (n, 1) for ddp, (1, n) for the zeros; or
            torch's DeviceMesh of one or two such axes, whose groups are then used.
        inner: hsdp only: the strategy inside a shard group (zero3).
        units: which parameters travel together: classes, name patterns or a parameter count (see
            `Cut`); by default the model's blocks.
        bucket_bytes: units smaller than this are merged (by default the strategy's own size).
        compute_dtype: of gathered parameters, and so of compute (the parameters' own).
        reduce_dtype: of gradients while they are reduced (the parameters' own).
        sum_dtype: "float32": gradients that travel as 16 bits are added in 32 (as they travel).
        output_dtype: of the model's output (left alone).
        reduce: ddp only, how gradients are grouped: naive, flat, overlap, bucketed.
        sync: when gradients are reduced over micro-batches: each; scatter_each_reduce_last, where
            replicas are summed at the last one; last.
        forward_prefetch, backward_prefetch: units gathered ahead of the one that runs (1, 1).
        reduce_depth: reductions in flight before backward waits for the oldest (1).
        keep_after_forward: what stays gathered after forward: None, the root unit; True, all;
            False, nothing; k, each rank keeps 1/k and gathers among k ranks.
        keep_last: so many units at the model's end (or all) stay gathered as well (0): backward
            needs them first, and they are not gathered again.
        unused: a parameter that only some ranks used: "zeros" from the others, or an "error".
        average: divide the sums of gradients by the number of ranks (False: the loss does).
        whole: name patterns of parameters that every rank keeps whole, their gradients all-reduced.
        whole_below: the same for parameters of fewer bytes than this; 0: none. By default, in shard
            groups of 64 ranks and more, parameters of fewer than 100,000 elements that have at most
            half as many rows as there are ranks: cut, they would be mostly padding.
        memory: of full parameters, staging and reduces: from torch's "allocator", or one "arena"
            laid out after the second step; "auto" is an arena on a GPU, the allocator on a host.
        gather_dtype: "float8_e4m3fn" or "int8": full parameters of two dims and more travel as 8
            bits, in blocks with a scale each (zero3; the master stays as it is).
        gather: packed, grouped, each; auto is what measured best for the backend and the sizes.
        """
        settings = cast(dict[str, Any], given)
        known = {field.name for field in dataclasses.fields(cls)}
        known -= {"name", "mesh", "cut", "device_mesh"}
        for key in settings:
            if key not in known:
                raise ValueError(f"Plan has no setting {key!r}{nearest(key, sorted(known))}")
        for field in ("compute_dtype", "reduce_dtype", "sum_dtype", "output_dtype", "gather_dtype"):
            if isinstance(settings.get(field), torch.dtype):
                settings[field] = dtype_name(settings[field])
        if isinstance(settings.get("whole"), str):
            settings["whole"] = (settings["whole"],)
        cut = Cut.parse(settings.pop("units", None))
        own = mesh if isinstance(mesh, DeviceMesh) else None
        return cls(name, parse_mesh(name, mesh), cut=cut, device_mesh=own, **settings)

    @property
    def replicate(self) -> int:
        return self.mesh[0]

    @property
    def shard(self) -> int:
        return self.mesh[1]

    @property
    def world(self) -> int:
        return self.replicate * self.shard

    def axes_of(self, unit: UnitSpec) -> tuple[int, int]:
        """The ranks that a unit is replicated and sharded over: the mesh, or all ranks and one."""
        return (self.world, 1) if unit.whole else self.mesh

    @property
    def strategy(self) -> Strategy:
        """The row of the strategy table that this Plan follows inside a shard group."""
        return STRATEGIES[self.inner if self.name == "hsdp" else self.name]

    def has_arena(self, streams: bool) -> bool:
        """Whether steps have their memory in an arena, on a device with streams or a host."""
        return self.memory == "arena" or (self.memory == "auto" and streams)

    @property
    def policy(self) -> Policy:
        """What the schedule is told of all units."""
        parameters, state = self.strategy.parameters, self.strategy.state
        naive = self.name == "ddp" and self.reduce == "naive"
        # Its full parameters stay, so gradients of one unit more may.
        depth = max(self.reduce_depth, 2) if parameters == "replicate" else self.reduce_depth
        return Policy(
            forward_prefetch=self.forward_prefetch,
            backward_prefetch=self.backward_prefetch,
            reduce_depth=0 if naive else depth,
            sync=self.sync,
            frees_in_pass=parameters == "shard",
            frees_after_step=parameters != "replicate",
            during_backward=self.name != "ddp" or REDUCES[self.reduce].during_backward,
            sums_in_slots=not naive and state == "replicate",
            refreshes=True,
            needs_equal_use=self.unused == "error",
            needs_equal_values=True,
            may_grow=False,
        )

    @property
    def freed_units(self) -> list[str]:
        """Units that are freed after forward unless a setting keeps them, in the model's order."""
        units = self.require_units()
        return [unit.name for unit in units if unit.modules != ("",) and not unit.whole]

    def unit_policy(self, is_root: bool, name: str = "") -> UnitPolicy:
        """What the schedule is told of one unit. The root is needed again right after forward, so
        it is kept unless nothing is.
        """
        keep = self.keep_after_forward
        keeps = keep is not False if is_root else keep or False
        if self.keep_last and not is_root and name in self.freed_units[-self.keep_last :]:
            keeps = True
        return UnitPolicy(keep=keeps, stays_shown=is_root)

    @property
    def title(self) -> str:
        return f"hsdp over {self.inner}" if self.name == "hsdp" else self.name

    @property
    def message_bytes(self) -> int | None:
        """bucket_bytes, or the strategy's own default."""
        row = self.inner if self.name == "hsdp" else self.name
        return self.bucket_bytes or DEFAULT_BUCKET_BYTES[row]

    def message_bytes_of(self, model_bytes: int) -> int | None:
        """The same for a model with so many bytes of parameters."""
        limit = self.message_bytes
        if limit is None or self.bucket_bytes is not None:
            return limit
        return min(limit, max(model_bytes // LEAST_UNITS, LEAST_BUCKET_BYTES.get(self.name, 0)))

    def dtypes(self, own: str) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        """Master, compute and reduce dtype of parameters whose own dtype is `own`."""
        master = getattr(torch, own)
        compute, reduce = find_dtype(self.compute_dtype), find_dtype(self.reduce_dtype)
        return master, *cast_dtypes(master, compute, reduce)

    def sum_dtype_of(self, own: str) -> torch.dtype:
        """What the gradients of such parameters are added in."""
        return sums_in(self.dtypes(own)[2], find_dtype(self.sum_dtype))

    @property
    def cut_by(self) -> tuple[Any, ...]:
        """All that says how a model is cut: Plans that are alike in it have the same units."""
        ranks = self.shard if self.whole_below is None and self.shard >= LARGE_GROUP else 1
        whole = (self.whole, self.whole_below, ranks)
        return (self.name, self.reduce, self.message_bytes, self.bucket_bytes, self.cut, whole)

    def resolve(self, model: nn.Module) -> Plan:
        """The same Plan with its units found in `model` (which may be on the meta device). A Plan
        that has units already must fit the model exactly.
        """
        check_cuttable(model)
        whole = Whole(self.whole, self.whole_below, self.shard)
        bucket = self.message_bytes_of(sum(p.nbytes for p in model.parameters()))
        if self.name == "ddp":
            whole.find(model)  # keeps everything so; a pattern must match something all the same
            assert bucket is not None
            units = cut_buckets(model, REDUCES[self.reduce].group, bucket)
        else:
            units = cut_units(model, self.cut, bucket, whole.find(model))
        if self.units is not None and self.units != units:
            raise ValueError(_difference(self.units, units))
        return dataclasses.replace(self, units=units)

    def require_units(self) -> tuple[UnitSpec, ...]:
        if self.units is None:
            raise ValueError("this Plan has no units yet: call plan.resolve(model) first")
        return self.units

    def explain(self, micro_batches: int = 1) -> str:
        """Per rank: bytes kept by role, peak full-parameter bytes, bytes sent per step by
        collective.
        """
        return memory.explain(self, micro_batches)

    def to_json(self) -> str:
        data = dataclasses.asdict(dataclasses.replace(self, device_mesh=None))
        del data["device_mesh"]
        return json.dumps(data, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The inverse of `to_json`. Unknown, missing and wrong keys are errors that name them."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"a Plan is a JSON object, and this is not JSON: {error}") from error
        reader = _PlanReader()
        reader.check_keys(cls, data, "")
        mesh = data["mesh"]
        if not (isinstance(mesh, list) and len(mesh) == 2):
            raise ValueError(f"mesh is {mesh!r}, expected [replicate, shard], such as [1, 8]")
        data["mesh"] = tuple(mesh)
        if "cut" in data:
            reader.check_keys(Cut, data["cut"], "cut")
            data["cut"] = Cut(**data["cut"])
        if data.get("units") is not None:
            data["units"] = reader.convert(data["units"], tuple[UnitSpec, ...], "units")
        return cls(**data)


class _PlanReader(Reader):
    """Says which kind of thing is wrong: a Plan has many units, and people know them by name."""

    def check_table(self, value: Any, kind: Any, path: str) -> None:
        if not isinstance(value, dict):
            keys = sorted(keys_of(kind))
            self.fail(f"{_TITLES[kind]} is a JSON object with the keys {keys}, got {value!r:.60}")

    def check_list(self, value: Any, member: Any, path: str) -> None:
        if not isinstance(value, list):
            self.fail(f"{path} is {value!r:.60}, expected a list; leave units out to cut anew")

    def fail_unknown(self, kind: Any, path: str, key: str, known: list[str]) -> NoReturn:
        self.fail(f"{_TITLES[kind]} has no key {key!r}{nearest(key, sorted(known))}")

    def fail_missing(self, kind: Any, path: str, missing: list[str], table: Any) -> NoReturn:
        self.fail(f"{_TITLES[kind]} needs {missing}; got only {sorted(table)}")

    def fail(self, text: str) -> NoReturn:
        raise ValueError(text)


_TITLES = {Plan: "a Plan", Cut: "cut", UnitSpec: "a unit", ParameterSpec: "a unit's parameter"}


def _difference(planned: tuple[UnitSpec, ...], found: tuple[UnitSpec, ...]) -> str:
    """The first place where a Plan made for another model departs from this one."""
    for ours, theirs in zip(planned, found, strict=False):
        if ours != theirs:
            have = {p.name: p for p in theirs.parameters}
            for p in ours.parameters:
                if have.get(p.name) != p:
                    return (
                        f"the Plan was made for another model: unit {ours.name!r} expects {p}, "
                        f"the model has {have.get(p.name, 'no such parameter there')}; resolve "
                        "the Plan again"
                    )
            return (
                f"the Plan was made for another model: unit {ours.name!r} became "
                f"{theirs.name!r}; resolve it again"
            )
    return (
        f"the Plan has {len(planned)} units, the model gives {len(found)}; resolve the Plan again"
    )
