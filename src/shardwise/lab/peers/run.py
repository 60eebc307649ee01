"""`shardwise bench peers`: shardwise against every other engine, class by class.

The peers of a class step in turn with ours, in one run; before, all train some steps from the same
weights and inputs, and one whose parameters are others then is not timed. Every class runs in
processes of its own. With `--cases hosts` the ranks are on two hosts with a slow link between them;
with `--cases h200` one process is a rank of an emulated group.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from shardwise.children import ChildFailed
from shardwise.description.preset import BENCH, Size
from shardwise.emulation.collectives import Network
from shardwise.hosts import refusal
from shardwise.lab.charts import draw_bars
from shardwise.lab.peers.engines import CLASSES, Peer, compile_blocks, is_installed, wrap_ours
from shardwise.lab.rows import RowFile, only_draw, say
from shardwise.lab.steps.cases import MEDIUM, MIXED, Family, StepCase, describe_case
from shardwise.lab.steps.compare import compare_sides
from shardwise.lab.steps.engines import Wrapped
from shardwise.lab.steps.measure import Measured, measure
from shardwise.lab.steps.models import GPT2_MEDIUM, MOE, GPTSize, MoESize, build_model
from shardwise.profiling.results import Row, print_table, say_where
from shardwise.profiling.timing import spread

# Models that are none of the reference model's: biases and a tied embedding; many small parameters.
SMALL: dict[str, Size] = {
    "lm": MEDIUM,
    "gpt2": GPTSize(192, 768, 4, 4, 4, 1024, tied=True, rotary=False, fused_qkv=True),
    "moe": MoESize(128, 256, 4, 4, 4, 512, rotary=False, fused_qkv=True),
}
LARGE: dict[str, tuple[Size, int, int]] = {  # with the sequences of a rank and their length
    "lm": (BENCH, 4, 2048),
    "gpt2": (GPT2_MEDIUM, 8, 1024),
    "moe": (MOE, 8, 1024),
}
WORLDS, RATES = (8, 128), (300, 100, 50, 25)  # emulated ranks, GB/s of each
LATENCY = 20e-6
RATE = "1gbit"  # of the link between hosts: sending takes about as long as computing


@dataclasses.dataclass(frozen=True)
class Group:
    """One case in one class: ours and all peers, in turn."""

    family: Family
    kind: str  # of CLASSES
    peers: tuple[str, ...]  # names

    @property
    def case(self) -> StepCase:
        return self.family.cases[0]

    def key(self, peer: str) -> str:
        return f"{self.case.name}/{self.kind}/{peer}"


def families(arguments: argparse.Namespace) -> Iterator[Family]:
    """A family for each case, so that each has processes of its own."""
    for where in arguments.cases:
        if where == "h200" and not torch.cuda.is_available():
            say("h200: skipped, no CUDA device here")
            continue
        why = refusal() if where == "hosts" else ""
        if why:
            say(f"hosts: skipped, {why}")
            continue
        for family in FOUND[where](arguments):
            (case,) = family.cases
            if arguments.only is not None and arguments.only not in case.name:
                continue
            case = case.quick() if arguments.quick else case
            if arguments.steps is not None:
                case = dataclasses.replace(case, steps=arguments.steps)
            yield dataclasses.replace(family, cases=(case,))


def _gloo(arguments: argparse.Namespace) -> Iterator[Family]:
    models = arguments.models
    for i, ranks in enumerate(arguments.ranks):
        # A quick run has another model for each number of ranks.
        for name in (models[i % len(models)],) if arguments.quick else models:
            case = StepCase(f"gloo{ranks}-{name}", SMALL[name], 4, 64, (), steps=20, warmup=2)
            yield Family((case,), "gloo", ranks, ranks, "cpu")


def _hosts(arguments: argparse.Namespace) -> Iterator[Family]:
    """Two ranks on each of two hosts: shards of replicas are inside a host."""
    rate = arguments.rate or RATE
    for name in arguments.models[:1] if arguments.quick else arguments.models:
        case = StepCase(f"hosts-{rate}-{name}", SMALL[name], 4, 64, (), steps=12, warmup=2)
        yield Family((case,), "gloo", 4, 4, "cpu", rate)


def emulated_families(models: tuple[str, ...], device: str = "cuda") -> Iterator[Family]:
    """As the step benchmark's emulated cases, with more ranks, networks and models."""
    for world in WORLDS:
        for name in models:
            for rate in RATES:
                for compiled in (False, True):
                    size, batch, length = LARGE[name]
                    how = "compiled" if compiled else "eager"
                    case = StepCase(
                        f"h200-{world}-{name}-{rate}GBs-{how}", size, batch, length, (),
                        steps=12, warmup=3, precision=MIXED, blocks=3, compiled=compiled,
                        network=Network(bandwidth=rate * 1e9, latency=LATENCY),
                    )  # fmt: skip
                    yield Family((case,), "fake", world, 1, device)


FOUND: dict[str, Callable[[argparse.Namespace], Iterator[Family]]] = {
    "gloo": _gloo,
    "hosts": _hosts,
    "h200": lambda arguments: emulated_families(arguments.models),
}


def groups(
    family: Family, classes: tuple[str, ...] | None, peers: tuple[str, ...]
) -> Iterator[Group]:
    """The classes of a case with peers of these kinds."""
    for kind in classes or (tuple(CLASSES) if family.real else ("parameters",)):
        named = tuple(p.name for p in find_peers(family, kind) if p.kind in peers)
        if named:
            yield Group(family, kind, named)


def find_peers(family: Family, kind: str) -> list[Peer]:
    """Who takes part there: not all can be emulated, and replicas of shards need four ranks."""
    if family.world < 2 * CLASSES[kind].replicas or family.world % CLASSES[kind].replicas:
        return []
    return [peer for peer in CLASSES[kind].peers if family.real or peer.emulated]


def run(arguments: argparse.Namespace) -> None:
    """Measure group by group, write the JSON after each, print the tables."""
    if only_draw(arguments, draw):
        return
    asked: tuple[str, ...] = arguments.peers
    peers = tuple(kind for kind in asked if is_installed(kind))
    for kind in asked:
        if kind not in peers:
            say(f"{kind}: not installed here, left out")
    file = RowFile.of(arguments, not_installed=[kind for kind in asked if kind not in peers])
    for family in families(arguments):
        missing = [
            dataclasses.replace(group, peers=left)
            for group in groups(family, arguments.classes, peers)
            if (left := tuple(name for name in group.peers if group.key(name) not in file))
        ]
        if not missing:
            continue
        if file.time_is_up():
            break
        for row in measure_groups(missing, arguments.quick):
            file.add(row)
    if arguments.plot is not None:
        arguments.plot.write_text(draw(file.rows), encoding="utf-8")
    if file.rows:
        show(file.rows, file.facts)
    else:
        print("nothing was measured: no case of these is left on this machine")


def measure_groups(asked: list[Group], quick: bool) -> Iterator[Row]:
    """A row for each peer of each class of one case, in the same processes. If these end in an
    error, the classes have processes of their own, and the rows of the one that fails say so.
    """
    try:
        yield from asked[0].family.ask(compare_groups, asked, quick)
    except ChildFailed as error:
        if len(asked) > 1:
            for group in asked:
                yield from measure_groups([group], quick)
            return
        lines = str(error).strip().splitlines()
        failure = f"its processes ended: {lines[-1] if lines else 'no word'}"
        say(failure)
        for name in asked[0].peers:
            yield describe_row(asked[0], name) | {"failure": failure}


def compare_groups(asked: list[Group], quick: bool) -> list[Row]:
    """What each of the ranks runs."""
    rows = []
    for group in asked:
        say(f"{group.case.name} {group.kind}: {group.case.steps} steps each, in turn")
        for row in compare_group(group, quick):
            say(f"  {row['peer']}: {row.get('failure') or format(row['step_ratio'], '.2f')}")
            rows.append(row)
    return rows


def describe_row(group: Group, peer: str) -> Row:
    strategy = CLASSES[group.kind].strategy
    names = {"case": group.case.name, "class": group.kind, "strategy": strategy, "peer": peer}
    return {"key": group.key(peer), **names}


def compare_group(group: Group, quick: bool) -> list[Row]:
    """A row for each peer."""
    family, case, kind = group.family, group.case, CLASSES[group.kind]
    wraps: dict[str, Any] = {"ours": partial(wrap_ours, kind)}
    wraps |= {peer.name: peer.wrap for peer in kind.peers if peer.name in group.peers}
    if case.compiled:
        wraps = {name: compile_blocks(wrap) for name, wrap in wraps.items()}

    def build(wrap: Any) -> Wrapped:
        return wrap(build_model(case.size, family.device), case.precision)

    builds = {name: partial(build, wrap) for name, wrap in wraps.items()}
    with case.open_network() as emulation:
        measured = measure(family, case, builds, emulation, isolates=True)
    told = describe_case(family, case, quick) | {"compiled": case.compiled}
    return [
        describe_row(group, name) | _figures(measured, name) | {"settings": told}
        for name in group.peers
    ]


def _figures(measured: Measured, peer: str) -> Row:
    failure = measured.failures.get("ours") or measured.failures.get(peer)
    if failure:
        return {"failure": failure, "parity": measured.parity.get(peer)}
    pairs = zip(measured.samples["ours"], measured.samples[peer], strict=True)
    ratios = [ours.step_ms / theirs.step_ms for ours, theirs in pairs]
    return {
        **compare_sides(measured.sides["ours"], measured.sides[peer]),
        "paired_ratio": statistics.median(ratios),
        "ratio_spread": spread(ratios),
        "parity": measured.parity.get(peer),
        "wraps": {name: measured.settings[name] for name in ("ours", peer)},
    }


RATIOS = ("step", "device", "memory", "reserved")


def show(rows: list[Row], facts: dict[str, Any]) -> None:
    """Times, then ratios, of each class."""
    first = ("case", "peer")
    for kind in dict.fromkeys(row["class"] for row in rows):
        mine = [row for row in rows if row["class"] == kind]
        good = [row for row in mine if "failure" not in row]
        if not good:
            continue
        strategy = mine[0]["strategy"]
        times = [
            [row["case"], row["peer"], *(_ms(row[side]) for side in ("ours", "theirs"))]
            for row in good
        ]
        title = f"{kind} sharded, one step, ms: {strategy} and its peers"
        title = title.replace("replicate sharded", "replicated")
        print_table(title, [*first, "ours", "theirs"], times, {}, first, 80)
        lines = []
        for row in good:
            found = [row[f"{name}_ratio"] for name in RATIOS]
            told = ["-" if ratio is None else f"{ratio:.2f}" for ratio in found]
            parity = "-" if row["parity"] is None else f"{row['parity']:.0e}"
            told.insert(1, f"{row['ratio_spread']:.2f}")
            lines.append([row["case"], row["peer"], *told, parity])
        heads = [*first, RATIOS[0], "+-", *RATIOS[1:], "parity"]
        kept = [i for i, _ in enumerate(heads) if any(line[i] != "-" for line in lines)]
        lines = [[line[i] for i in kept] for line in lines]
        title = "ratios: ours over theirs, below 1 is better"
        print_table(title, [heads[i] for i in kept], lines, {}, first, 80)
    print(say_where(facts["environment"]))
    for row in rows:
        if "failure" in row:
            print(f"{row['case']} {row['peer']}: {row['failure']}")
    for kind in facts.get("not_installed", ()):
        print(f"{kind}: not installed there, not measured")
    if any(row["case"].startswith("h200") for row in rows):
        print("emulated network: values are fabricated, times are not")


def _ms(side: Row) -> str:
    return f"{side['step_ms']:.1f} +-{side['step_spread_ms']:.1f}"


def draw(rows: list[Row]) -> str:
    """Ours over each peer's step."""
    bars: dict[str, dict[str, float | None]] = {}
    for row in rows:
        if "failure" not in row:
            bars.setdefault(f"{row['case']} {row['strategy']}", {})[row["peer"]] = row["step_ratio"]
    return draw_bars("One training step: ours over each peer's", bars, "ratio")
