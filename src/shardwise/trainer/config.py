"""The configuration of a training run: five frozen sections, from TOML and from `--set a.b=c`."""

import dataclasses
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from shardwise.errors import UserError, nearest
from shardwise.trainer.sizes import SIZES, CheckpointKind, Size, size_named
from shardwise.trainer.toml import Text, build_section, convert, key, parse_text, write_section


def _require(holds: bool, where: str, expected: str, got: Any) -> None:
    if not holds:
        raise UserError(f"{where} must be {expected}, got {got!r}")


@dataclass(frozen=True)
class ModelConfig:
    size: str = key("tiny", f"a preset: {' '.join(SIZES)}")
    checkpoint: CheckpointKind = key("none", "recompute activations: none reentrant nonreentrant")
    vocab: int | None = key(None, "instead of the preset's")
    d_model: int | None = key(None, "instead of the preset's")
    d_ff: int | None = key(None, "instead of the preset's")
    layers: int | None = key(None, "instead of the preset's")
    heads: int | None = key(None, "instead of the preset's")
    kv_heads: int | None = key(None, "instead of the preset's; as many as heads if those are given")
    tied: bool | None = key(None, "instead of the preset's; share embedding and output")

    def __post_init__(self) -> None:
        self.resolve()

    def resolve(self) -> Size:
        """Give the size: the preset with the overrides in place."""
        names = ("vocab", "d_model", "d_ff", "layers", "heads", "kv_heads", "tied")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if "heads" in given:
            given.setdefault("kv_heads", given["heads"])
        return dataclasses.replace(size_named(self.size), **given)


@dataclass(frozen=True)
class DataConfig:
    path: str = key("", "text, .npy or .bin token file; empty: the built-in grammar")
    token_dtype: Literal["uint16", "uint32"] = key("uint16", "type of the ids of a .bin file")
    batch: int = key(8, "sequences per rank and micro-batch")
    seq: int = key(128, "tokens per sequence")
    seed: int = key(0, "of the grammar and of the order of the data")

    def __post_init__(self) -> None:
        _require(self.batch >= 1, "data.batch", "at least 1", self.batch)
        _require(self.seq >= 1, "data.seq", "at least 1", self.seq)
        _require(self.seed >= 0, "data.seed", "at least 0", self.seed)


@dataclass(frozen=True)
class PlanConfig:
    """A strategy with the plan's settings (checked by the plan itself), or a plan's JSON file."""

    strategy: str = key("zero3", "ddp zero1 zero2 zero3 hsdp, or the path of a plan.json")
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.is_file and self.settings:
            raise UserError(
                f"plan settings {', '.join(self.settings)} were given beside the plan file "
                f"{self.strategy}: change them in the file, or name a strategy instead"
            )

    @property
    def is_file(self) -> bool:
        return self.strategy.endswith(".json")

    @classmethod
    def build(cls, values: Mapping[str, Any]) -> "PlanConfig":
        settings = dict(values)
        strategy = convert(settings.pop("strategy", cls.strategy), str, "plan.strategy")
        for name, value in settings.items():
            if isinstance(value, Text):
                settings[name] = parse_text(value)
        return cls(strategy, settings)


@dataclass(frozen=True)
class OptimConfig:
    lr: float = key(3e-3, "peak learning rate of AdamW")
    warmup: int = key(10, "steps of linear warm-up, then a cosine")
    min_lr_ratio: float = key(0.1, "the cosine ends at this share of lr")
    beta1: float = key(0.9, "of AdamW")
    beta2: float = key(0.95, "of AdamW")
    eps: float = key(1e-8, "of AdamW")
    weight_decay: float = key(0.01, "of AdamW")
    clip: float = key(1.0, "largest gradient norm; 0 turns clipping off")
    nonfinite: str = key("error", "a gradient norm of NaN or Inf: error, or skip the step")

    def __post_init__(self) -> None:
        _require(self.lr > 0, "optim.lr", "above 0", self.lr)
        _require(self.warmup >= 0, "optim.warmup", "at least 0", self.warmup)
        ratio = self.min_lr_ratio
        _require(0 <= ratio <= 1, "optim.min_lr_ratio", "between 0 and 1", ratio)
        for name in ("beta1", "beta2"):
            beta = getattr(self, name)
            _require(0 <= beta < 1, f"optim.{name}", "at least 0 and below 1", beta)
        _require(self.eps > 0, "optim.eps", "above 0", self.eps)
        _require(self.weight_decay >= 0, "optim.weight_decay", "at least 0", self.weight_decay)
        _require(self.clip >= 0, "optim.clip", "at least 0", self.clip)
        choices = ("error", "skip")
        _require(self.nonfinite in choices, "optim.nonfinite", "error or skip", self.nonfinite)


@dataclass(frozen=True)
class RunConfig:
    steps: int = key(60, "optimizer steps")
    micro_batches: int = key(1, "forward and backward passes per step")
    nproc: int = key(1, "ranks to start on this machine; under torchrun leave it at 1")
    out: str = key("run", "directory of the run's files")
    seed: int = key(0, "of the model's weights")
    device: Literal["auto", "cpu", "cuda"] = key("auto", "auto: cuda where there is one")
    backend: str = key("", "of torch.distributed; empty: gloo on cpu, nccl on cuda")
    log_every: int = key(1, "steps between two rows of metrics.jsonl")
    profile: int = key(0, "steps to profile, after some to warm up; 0: none")

    def __post_init__(self) -> None:
        for name in ("steps", "micro_batches", "nproc", "log_every"):
            _require(getattr(self, name) >= 1, f"run.{name}", "at least 1", getattr(self, name))
        _require(self.seed >= 0, "run.seed", "at least 0", self.seed)
        few = f"at least 0 and below run.steps ({self.steps}), as one step warms up"
        _require(0 <= self.profile < self.steps, "run.profile", few, self.profile)
        _require(bool(self.out), "run.out", "the path of a directory", self.out)


@dataclass(frozen=True)
class TrainConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    run: RunConfig = field(default_factory=RunConfig)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "TrainConfig":
        """Build the configuration from tables of keys; what is absent takes its default."""
        for name, section in values.items():
            if name not in SECTIONS:
                raise UserError(f"unknown section [{name}]{nearest(name, SECTIONS)}")
            convert(section, dict, name)
        return cls(
            model=build_section(ModelConfig, values.get("model", {}), "model"),
            data=build_section(DataConfig, values.get("data", {}), "data"),
            plan=PlanConfig.build(values.get("plan", {})),
            optim=build_section(OptimConfig, values.get("optim", {}), "optim"),
            run=build_section(RunConfig, values.get("run", {}), "run"),
        )

    @classmethod
    def from_toml(cls, text: str) -> "TrainConfig":
        """Read what `to_toml` writes."""
        return cls.from_dict(tomllib.loads(text))

    def to_toml(self) -> str:
        """Write every key, each with its meaning; reads back to an equal configuration."""
        return "\n".join(
            write_section(name, getattr(self, name), self.plan.settings if name == "plan" else {})
            for name in SECTIONS
        )


SECTIONS = tuple(section.name for section in dataclasses.fields(TrainConfig))


def load_config(path: str | None, assignments: Iterable[tuple[str, str]]) -> TrainConfig:
    """Read the TOML file, if any, then apply the assignments ("a.b", "value") in their order."""
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"cannot read configuration {path}: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise UserError(f"configuration {path} is not valid TOML: {error}") from error
    for name, text in assignments:
        section, dot, key_name = name.partition(".")
        if not (dot and key_name):
            raise UserError(f"--set {name}={text}: expected SECTION.KEY=VALUE, as run.steps=100")
        table = values.setdefault(section, {})
        convert(table, dict, section)
        table[key_name] = Text(text)
    return TrainConfig.from_dict(values)


def describe_keys() -> str:
    """List every key with its default and meaning, for `--help`."""
    lines = []
    for name, section in ((name, getattr(TrainConfig(), name)) for name in SECTIONS):
        for item in dataclasses.fields(section):
            if "help" in item.metadata:
                default = getattr(section, item.name)
                shown = "" if default is None else f" ({default!r})"
                lines.append(f"  {f'{name}.{item.name}':<20}{item.metadata['help']}{shown}")
    lines.append(f"  {'plan.KEY':<20}any setting of a Plan: mesh=2x2, compute_dtype=bfloat16, ...")
    return "\n".join(lines)
