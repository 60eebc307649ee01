"""The configuration of a training run: five frozen sections, from TOML and from `--set a.b=c`."""

import dataclasses
import math
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NoReturn, get_origin, get_type_hints

from shardwise.checked import (
    ABOVE_0,
    Bound,
    OneOrMore,
    Reader,
    at_least,
    keys_of,
    out_of_bound,
    out_of_bounds,
    parse_toml,
    read_text,
    type_name,
    write_key,
    write_value,
)
from shardwise.description.preset import SIZES, Size, size_named
from shardwise.description.workload import (
    RECOMPUTE_HELP,
    Recomputing,
    Workload,
    parse_micro_batches,
)
from shardwise.errors import UserError, nearest
from shardwise.planning.strategies import NAMES

ZeroOrMore = Annotated[int, at_least(0)]
Share = Annotated[float, Bound("at least 0 and below 1", lambda n: 0 <= n < 1)]


def key(default: Any, help: str) -> Any:
    """Declare one key of a section: its default and what it means."""
    return field(default=default, metadata={"help": help})


def _check(section: str, values: Any) -> None:
    for name, value, expected in out_of_bounds(values):
        raise UserError(f"{section}.{name} must be {expected}, got {value!r}")


@dataclass(frozen=True)
class ModelConfig:
    size: str = key("tiny", f"a preset: {' '.join(SIZES)}")
    checkpoint: str = key("none", f"recompute activations: {RECOMPUTE_HELP}")
    vocab: int | None = key(None, "instead of the preset's")
    d_model: int | None = key(None, "instead of the preset's")
    d_ff: int | None = key(None, "instead of the preset's")
    layers: int | None = key(None, "instead of the preset's")
    heads: int | None = key(None, "instead of the preset's")
    kv_heads: int | None = key(None, "instead of the preset's; as many as heads if those are given")
    tied: bool | None = key(None, "instead of the preset's; share embedding and output")
    dropout: Share = key(0.0, "share of what each half of a block adds that training leaves out")

    def __post_init__(self) -> None:
        _check("model", self)
        size = self.resolve()
        try:
            recomputing = Recomputing.parse(self.checkpoint)
            if recomputing is not None:
                recomputing.choose(range(size.layers))
        except UserError as error:
            raise UserError(f"model.checkpoint: {error}") from error

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
    batch: OneOrMore = key(8, "sequences per rank and micro-batch")
    sizes: str = key("", "instead: of each micro-batch, as 1,2; of uneven replicas, as 1,2/2,1")
    seq: OneOrMore = key(128, "tokens per sequence")
    seed: ZeroOrMore = key(0, "of the grammar and of the order of the data")

    def __post_init__(self) -> None:
        _check("data", self)


_LEFT_OPEN = ("compute_dtype", "reduce_dtype", "budget_gb")  # that auto does not choose


@dataclass(frozen=True)
class PlanConfig:
    """A strategy with the plan's settings (checked by the plan itself), or a plan's JSON file."""

    strategy: str = key("zero3", "ddp zero1 zero2 zero3 hsdp, the path of a plan.json, or auto")
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.is_file and self.settings:
            raise UserError(
                f"plan settings {', '.join(self.settings)} were given beside the plan file "
                f"{self.strategy}: change them in the file, or name a strategy instead"
            )
        chosen = [name for name in self.settings if name not in _LEFT_OPEN] if self.is_auto else []
        if chosen:
            raise UserError(
                f"plan.strategy is auto, which chooses plan.{', plan.'.join(chosen)} by itself: "
                f"leave it out, or name a strategy; beside auto go {', '.join(_LEFT_OPEN)}"
            )

    @property
    def is_auto(self) -> bool:
        return self.strategy == "auto"

    @property
    def is_file(self) -> bool:
        return self.strategy.endswith(".json")


@dataclass(frozen=True)
class OptimConfig:
    lr: Annotated[float, ABOVE_0] = key(3e-3, "peak learning rate of AdamW")
    warmup: ZeroOrMore = key(10, "steps of linear warm-up, then a cosine")
    min_lr_ratio: Annotated[float, Bound("between 0 and 1", lambda n: 0 <= n <= 1)] = key(
        0.1, "the cosine ends at this share of lr"
    )
    beta1: Share = key(0.9, "of AdamW")
    beta2: Share = key(0.95, "of AdamW")
    eps: Annotated[float, ABOVE_0] = key(1e-8, "of AdamW")
    weight_decay: Annotated[float, at_least(0)] = key(0.01, "of AdamW")
    clip: Annotated[float, at_least(0)] = key(1.0, "largest gradient norm; 0 turns clipping off")
    nonfinite: Annotated[str, Bound("error or skip", lambda way: way in ("error", "skip"))] = key(
        "error", "a gradient norm of NaN or Inf: error, or skip the step"
    )
    nonfinite_limit: ZeroOrMore = key(0, "skipped steps in a row that end the run; 0: any number")

    def __post_init__(self) -> None:
        _check("optim", self)


@dataclass(frozen=True)
class RunConfig:
    steps: OneOrMore = key(60, "optimizer steps")
    micro_batches: OneOrMore = key(1, "forward and backward passes per step")
    nproc: OneOrMore = key(1, "ranks to start on this machine; under torchrun leave it at 1")
    out: Annotated[str, Bound("the path of a directory", bool)] = key(
        "run", "directory of the run's files"
    )
    seed: ZeroOrMore = key(0, "of the model's weights")
    device: Literal["auto", "cpu", "cuda"] = key("auto", "auto: cuda where there is one")
    backend: str = key("", "of torch.distributed; empty: gloo on cpu, nccl on cuda")
    log_every: OneOrMore = key(1, "steps between two rows of metrics.jsonl")
    profile: ZeroOrMore = key(0, "steps to profile, after some to warm up; 0: none")
    save_every: ZeroOrMore = key(0, "steps between two checkpoints; 0: one on SIGTERM only")
    keep: ZeroOrMore = key(2, "newest checkpoints to keep; 0: all")
    asynchronous_save: bool = key(False, "write checkpoints while training goes on")
    resume: Annotated[str, Bound("none, auto or a path", bool)] = key(
        "none", "auto: from the newest checkpoint in OUT, if any; or the path of one, or of a run"
    )
    deterministic: bool = key(False, "only kernels that give the same bits in every run")
    compile: bool = key(False, "compile every block by torch.compile")
    compare_after: ZeroOrMore = key(
        30, "steps until auto's plan is compared with what was said of it; 0: never"
    )
    capture: bool = key(False, "replay the step as a CUDA graph, where it can be captured")

    def __post_init__(self) -> None:
        _check("run", self)
        if self.profile >= self.steps:
            raise UserError(
                f"run.profile must be below run.steps ({self.steps}), as one step warms up, got "
                f"{self.profile!r}"
            )


@dataclass(frozen=True)
class TrainConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        """Sizes of micro-batches say how many there are, and the largest is the batch."""
        recomputing = Recomputing.parse(self.model.checkpoint)
        if self.run.compile and recomputing is not None and recomputing.keeps_products:
            raise UserError(
                f"model.checkpoint={self.model.checkpoint} and run.compile: the operators of a "
                "compiled block cannot be told apart; give nonreentrant, first-N or every-K"
            )
        if not self.data.sizes:
            return
        if self.data.sizes.isdigit():
            raise UserError(
                f"data.sizes is {self.data.sizes}, expected the sequences of each micro-batch, as "
                "1,2 or 1,2/2,1; how many there are is run.micro_batches"
            )
        sizes = parse_micro_batches(self.data.sizes)
        count = len(sizes[0])
        if self.run.micro_batches not in (1, count):
            raise UserError(
                f"run.micro_batches is {self.run.micro_batches} and data.sizes has {count} "
                f"({self.data.sizes}): leave run.micro_batches out"
            )
        data = dataclasses.replace(self.data, batch=max(map(max, sizes)))
        object.__setattr__(self, "data", data)
        object.__setattr__(self, "run", dataclasses.replace(self.run, micro_batches=count))

    @property
    def workload(self) -> Workload:
        """One step of one rank."""
        sizes = parse_micro_batches(self.data.sizes) if self.data.sizes else None
        return Workload(
            self.data.seq, self.data.batch, self.run.micro_batches,
            checkpoint=self.model.checkpoint, sizes=sizes,
        )  # fmt: skip

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "TrainConfig":
        """Build the configuration from tables of keys; what is absent takes its default."""
        return _ConfigReader().read(cls, values)

    @classmethod
    def from_toml(cls, text: str) -> "TrainConfig":
        """Read what `to_toml` writes."""
        return cls.from_dict(tomllib.loads(text))

    def to_toml(self) -> str:
        """Write every key, each with its meaning; reads back to an equal configuration."""
        lines: list[str] = []
        for name in SECTIONS:
            section = getattr(self, name)
            lines += [f"[{name}]"] if name == SECTIONS[0] else ["", f"[{name}]"]
            for item in _keys_with_help(section):
                value = getattr(section, item.name)
                if value is not None:
                    lines.append(f"{item.name} = {write_value(value)}  # {item.metadata['help']}")
            if section is self.plan:
                pairs = self.plan.settings.items()
                lines += [f"{write_key(name)} = {write_value(value)}" for name, value in pairs]
        return "\n".join(lines) + "\n"


SECTIONS = tuple(section.name for section in dataclasses.fields(TrainConfig))


def _keys_with_help(section: Any) -> list[dataclasses.Field[Any]]:
    return [item for item in dataclasses.fields(section) if "help" in item.metadata]


class Text(str):
    """A value from the command line, whose type is decided by the key it is given to."""

    def parse(self) -> Any:
        """Read as TOML, or as a plain string where it is not TOML."""
        try:
            return tomllib.loads(f"value = {self}")["value"]
        except (ValueError, RecursionError):
            return str(self)


class _ConfigReader(Reader):
    def convert(self, value: Any, kind: Any, path: str) -> Any:
        if kind is not PlanConfig:
            return super().convert(value, kind, path)
        self.check_table(value, kind, path)
        settings = {n: v.parse() if isinstance(v, Text) else v for n, v in value.items()}
        settings.pop("strategy", None)
        strategy = self.scalar(value.get("strategy", PlanConfig.strategy), str, "plan.strategy")
        return PlanConfig(strategy, settings)

    def scalar(self, value: Any, kind: Any, path: str) -> Any:
        if isinstance(value, Text):
            parsed = value.parse()
            textual = kind is str or get_origin(kind) is Literal
            value = str(value) if textual and not isinstance(parsed, str) else parsed
        if type(value) is int and not abs(value) < 2**63:
            self.fail(f"{path} is {value!r:.40}, more than any run has")
        if type(value) is float and not math.isfinite(value):
            self.fail(f"{path} is {value!r}, expected a finite number")
        return super().scalar(value, kind, path)

    def show(self, value: Any) -> str:
        return f"{type_name(value)} {value!r}"

    def fail_unknown(self, kind: Any, path: str, key: str, known: list[str]) -> NoReturn:
        if path:
            super().fail_unknown(kind, path, key, known)
        self.fail(f"unknown section [{key}]{nearest(key, known)}")


def load_config(path: str | None, assignments: Iterable[tuple[str, str]]) -> TrainConfig:
    """Read the TOML file, if any, then apply the assignments ("a.b", "value") in their order. A
    value that a later one hides is checked too.
    """
    values: dict[str, Any] = {}
    if path is not None:
        values = parse_toml(read_text(path, "configuration"), f"configuration {path}")
    for name, text in assignments:
        section, dot, key_name = name.partition(".")
        if not (dot and key_name):
            raise UserError(f"--set {name}={text}: expected SECTION.KEY=VALUE, as run.steps=100")
        table = values.setdefault(section, {})
        _ConfigReader().check_table(table, None, section)
        if key_name in table:
            _check_hidden(section, key_name, table[key_name])
        table[key_name] = Text(text)
    return TrainConfig.from_dict(values)


def _check_hidden(section: str, name: str, value: Any) -> None:
    """Error for a value that no run could have, though another one takes its place."""
    kind: Any = get_type_hints(TrainConfig).get(section)
    if kind is None or name not in keys_of(kind):
        return  # unknown, or a setting that a Plan checks
    path = f"{section}.{name}"
    read = _ConfigReader().convert(value, get_type_hints(kind)[name], path)
    expected = out_of_bound(kind, name, read)
    if expected is not None:
        raise UserError(f"{path} must be {expected}, got {read!r}")
    if path in _READERS and read:
        _READERS[path](read)


def _check_strategy(name: str) -> None:
    if not (name in (*NAMES, "auto") or name.endswith(".json")):
        raise UserError(f"plan.strategy is {name!r}{nearest(name, (*NAMES, 'auto'))}")


_READERS: dict[str, Callable[[str], object]] = {
    "model.size": size_named,
    "model.checkpoint": Recomputing.parse,
    "data.sizes": parse_micro_batches,
    "plan.strategy": _check_strategy,
}


def describe_keys() -> str:
    """List every key with its default and meaning, for `--help`."""
    lines = []
    for name, section in ((name, getattr(TrainConfig(), name)) for name in SECTIONS):
        for item in _keys_with_help(section):
            default = getattr(section, item.name)
            shown = "" if default is None else f" ({default!r})"
            lines.append(f"  {f'{name}.{item.name}':<24}{item.metadata['help']}{shown}")
    lines.append(f"  {'plan.KEY':<24}any setting of a Plan: mesh=2x2, compute_dtype=bfloat16, ...")
    lines.append(f"  {'':<24}beside auto: {' '.join(_LEFT_OPEN)}")
    return "\n".join(lines)
