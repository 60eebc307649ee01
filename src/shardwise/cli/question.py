"""What `shardwise plan` is asked: a model, machines, and the work of a step."""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

from shardwise.checked import Bound, check_bounds
from shardwise.description.foreign import find_function, is_foreign
from shardwise.description.workload import Workload, parse_micro_batches
from shardwise.errors import UserError, nearest

if TYPE_CHECKING:
    from torch import nn

    from shardwise.description.example import Example
    from shardwise.predict.ranking import Ranking

SEQUENCE = 2048  # tokens, unless something says otherwise

Count = Annotated[int, Bound("a whole number of at least 1", lambda n: n >= 1)]
Gigabytes = Annotated[float, Bound("a number above 0, in 1e9 bytes", lambda n: 0 < n < math.inf)]
_CONTENTION = "the share of compute that communication takes: at least 0 and below 1"


@dataclasses.dataclass(frozen=True)
class Question:
    """What is planned."""

    model: str
    cluster: str
    world: Count | None
    tokens: Count | None
    sequence: Count | None
    compute_dtype: str | None
    reduce_dtype: str | None
    budget_gb: Gigabytes | None
    memory_gb: Gigabytes | None = None
    contention: Annotated[float | None, Bound(_CONTENTION, lambda n: 0 <= n < 1)] = None
    links: tuple[tuple[str, str], ...] = ()
    strategies: tuple[str, ...] = ("ddp", "zero1", "zero2", "zero3", "hsdp")
    micro_batches: str | None = None
    samples: Count | None = None
    inputs: str | None = None
    loss: str | None = None
    trace_on: str = "auto"
    measure: bool = False

    def __post_init__(self) -> None:
        check_bounds(self, error=UserError)
        check_dtypes(self)

    def changed(self, assignments: list[str]) -> Question:
        """The question with every KEY=VALUE applied; unknown keys are links' names."""
        values: dict[str, Any] = {}
        links = list(self.links)
        kinds = _types_by_key()
        for text in assignments:
            key, equals, value = text.partition("=")
            key = "sequence" if key == "seq" else key
            if not (key and equals and value):
                raise UserError(f"--what-if {text}: expected KEY=VALUE, such as sequence=8192")
            if key not in kinds:
                links.append((key, value))
                continue
            try:
                values[key] = kinds[key](value)
            except ValueError as error:
                kind = "a whole number" if kinds[key] is int else "a number"
                raise UserError(
                    f"--what-if {text}: expected {kind}; several changes are given as "
                    f"--what-if {key}=... --what-if ..."
                ) from error
        try:
            return dataclasses.replace(self, links=tuple(links), **values)
        except UserError as error:
            raise UserError(f"--what-if {', '.join(assignments)}: {error}") from error

    def load_cluster(self) -> Any:
        from shardwise.description.cluster import Cluster

        cluster = Cluster.load(self.cluster)
        for name, value in self.links:
            names = [level.name for level in cluster.levels]
            if name not in names:
                valid = (*names, *_types_by_key())
                raise UserError(f"--what-if: unknown key {name!r}{nearest(name, valid)}")
            levels = tuple(
                _with_bandwidth(level, value) if level.name == name else level
                for level in cluster.levels
            )
            cluster = dataclasses.replace(cluster, levels=levels)
        if self.memory_gb is not None:
            device = dataclasses.replace(cluster.device, memory_bytes=self.memory_gb * 1e9)
            cluster = dataclasses.replace(cluster, device=device)
        if self.contention is not None:
            cluster = dataclasses.replace(cluster, communication_share_of_compute=self.contention)
        return cluster

    def check(self) -> tuple[Any, int, Workload]:
        """The cluster, the ranks and the work of one: wrong input is told before a search."""
        from shardwise.description.preset import load_preset

        if not is_foreign(self.model):
            _check_name(self.model)
            load_preset(self.model)
        cluster = self.load_cluster()
        world = self.world or cluster.ranks_per_node or 1
        return cluster, world, self._work_on(world)

    def example(self) -> Example | None:
        """The inputs that were given, if any."""
        from shardwise.predict.sources import as_example

        return as_example(self.inputs, self.model)

    def load_loss(self) -> Any:
        return None if self.loss is None else find_function(self.loss, "--loss", self.model)

    def _module(self) -> nn.Module | None:
        from shardwise.predict.sources import named_model

        return named_model(self.model) if is_foreign(self.model) else None

    def _kind_of_work(self, example: Example | None) -> tuple[int, str]:
        """Tokens of a sample, and what samples are called: sequences where they have tokens."""
        if example is not None:
            if self.sequence not in (None, example.sequence):
                raise UserError(
                    f"--sequence is {self.sequence}, and --inputs has sequences of "
                    f"{example.sequence or 'no'} tokens: leave --sequence out"
                )
            return (example.sequence, "sequences") if example.sequence else (1, "samples")
        from shardwise.description.foreign import longest_sequence, writes_about_images

        module = self._module()
        sees = getattr(module, "main_input_name", None) == "pixel_values"
        if sees and not writes_about_images(module):
            return 1, "samples"
        if self.sequence is not None or module is None:
            return self.sequence or SEQUENCE, "sequences"
        return min(SEQUENCE, longest_sequence(module) or SEQUENCE), "sequences"

    def _work_on(self, world: int) -> Workload:
        """Of a rank; its split into micro-batches is free unless they are given."""
        text, example = self.micro_batches, self.example()
        sequence, of = self._kind_of_work(example)
        if text is not None and not text.strip().isdigit():
            sizes = parse_micro_batches(text)
            if world % len(sizes):
                raise UserError(
                    f"--micro-batches {text} is for {len(sizes)} kinds of replicas, which do not "
                    f"divide {world} ranks"
                )
            sequences = sum(map(sum, sizes)) * world // len(sizes)
            if self.tokens not in (None, sequences * sequence):
                raise UserError(
                    f"--micro-batches {text} are {sequences * sequence} tokens a step on "
                    f"{world} ranks, and --tokens is {self.tokens}: leave --tokens out"
                )
            return Workload.uneven(sequence, sizes, of=of)
        per_rank = self._samples_of_a_rank(world, sequence, of, example)
        if text is None:
            return Workload(sequence, per_rank, of=of)
        count = int(text)
        batch, rest = divmod(per_rank, count) if count else (0, 0)
        if rest or not batch:
            raise UserError(f"--micro-batches {text} do not divide the {per_rank} {of} of a rank")
        return Workload.uneven(sequence, parse_micro_batches(text, batch), of=of)

    def _samples_of_a_rank(
        self, world: int, sequence: int, of: str, example: Example | None
    ) -> int:
        if self.tokens is not None and self.samples is not None:
            raise UserError("--tokens and --samples say the same of a step: give one of them")
        if self.tokens is not None and of == "samples":
            raise UserError(
                f"--tokens {self.tokens}: the inputs of {self.model} have no tokens; give the "
                "step's size as --samples"
            )
        if self.tokens is None and self.samples is None:
            if example is not None:
                return example.samples
            if is_foreign(self.model):
                raise UserError("--tokens or --samples of one step is needed, as in: --samples 64")
            raise UserError("--tokens is needed, as in: --model xl --tokens 131072")
        asked = self.tokens if self.tokens is not None else (self.samples or 0) * sequence
        least = world * sequence
        per_rank, rest = divmod(asked, least)
        if not rest and per_rank >= 1:
            return per_rank
        if self.samples is not None:
            raise UserError(f"--samples {self.samples} do not divide into {world} ranks")
        raise UserError(
            f"{asked} tokens a step do not divide into sequences of {sequence} on "
            f"{world} ranks: give --tokens as a multiple of {least}, such as "
            f"{max(1, round(asked / least)) * least}"
        )

    def answer(self) -> Ranking:
        from shardwise.calibration.search import search

        cluster, world, workload = self.check()
        try:
            return search(
                self.model,
                cluster,
                workload,
                self.budget_gb,
                world=world,
                compute_dtype=self.compute_dtype,
                reduce_dtype=self.reduce_dtype,
                strategies=self.strategies,
                inputs=self.inputs if self.measure else self.example(),
                loss=self.load_loss(),
                trace_on=self.trace_on,
                measure=self.measure,
                tell=lambda text: print(f"  {text}", file=sys.stderr, flush=True),
            )
        except ValueError as error:
            raise UserError(f"{self.model} on {self.cluster}: {error}") from error


def check_dtypes(asked: Any) -> None:
    """Error if --compute-dtype or --reduce-dtype is none that a Plan has."""
    from shardwise.planning.plan import DTYPES

    for name in ("compute_dtype", "reduce_dtype"):
        value = getattr(asked, name)
        if value is not None and value not in DTYPES:
            raise UserError(f"--{name.replace('_', '-')} {value!r}{nearest(value, DTYPES)}")


def _check_name(model: str) -> None:
    """Error if it looks like somebody's code or config, but for the word that would say so."""
    if model.endswith(".py"):
        raise UserError(f"--model {model}: name the function in it too, as {model}:build")
    if model.endswith(".json"):
        raise UserError(f"--model {model}: a config of Transformers is given as hf:{model}")


def _types_by_key() -> dict[str, Any]:
    """What --what-if can change beside the links: int, float or str, each by its key."""
    hints = get_type_hints(Question)
    del hints["links"], hints["strategies"], hints["measure"]
    return {name: (*get_args(hint), hint)[0] for name, hint in hints.items()}


def _with_bandwidth(level: Any, value: str) -> Any:
    """A link with another bandwidth, and without the points that were measured at the old one."""
    try:
        bandwidth = (
            level.bandwidth_bytes_per_s * float(value[1:]) if value[0] == "x" else float(value)
        )
        return dataclasses.replace(level, bandwidth_bytes_per_s=bandwidth, points=())
    except ValueError as error:
        raise UserError(
            f"--what-if {level.name}={value}: expected bytes/s, such as 100e9, or a factor, such "
            f"as x2 ({error})"
        ) from error
