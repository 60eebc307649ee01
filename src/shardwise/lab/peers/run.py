"""`shardwise bench peers`: shardwise against every other engine, class by class.

The peers of a class step in turn with ours, in one run; before, all train some steps from the same
weights and inputs, and one whose parameters are others then is not timed. With `--cases hosts` the
ranks are on two hosts with a slow link between them; with `--cases h200` one process is a rank of
an emulated group. Every case runs in processes of its own, but those that differ by nothing but the
emulated network share them, and what is built there.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
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
from shardwise.lab.steps.measure import Measured, measure_on_networks
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
    """A family's cases in one class: ours and all peers, in turn."""

    family: Family
    kind: str  # of CLASSES
    peers: tuple[str, ...]  # names

    def key(self, case: StepCase, peer: str) -> str:
        return f"{case.name}/{self.kind}/{peer}"

    def missing(self, file: RowFile) -> Group:
        """With only the cases, and only the peers, that have a row missing."""
        pairs = [
            (case, peer)
            for case in self.family.cases
            for peer in self.peers
            if self.key(case, peer) not in file
        ]
        family = dataclasses.replace(self.family, cases=tuple(dict.fromkeys(c for c, _ in pairs)))
        return Group(family, self.kind, tuple(dict.fromkeys(peer for _, peer in pairs)))


def families(arguments: argparse.Namespace) -> Iterator[Family]:
    """With the cases asked for. Those of a family differ by nothing but the emulated network."""
    for where in arguments.cases:
        if where == "h200" and not torch.cuda.is_available():
            say("h200: skipped, no CUDA device here")
            continue
        why = refusal() if where == "hosts" else ""
        if why:
            say(f"hosts: skipped, {why}")
            continue
        for family in FOUND[where](arguments):
            cases = tuple(
                _as_asked(case, arguments)
                for case in family.cases
                if arguments.only is None or arguments.only in case.name
            )
            if cases:
                yield dataclasses.replace(family, cases=cases)


def _as_asked(case: StepCase, arguments: argparse.Namespace) -> StepCase:
    case = case.quick() if arguments.quick else case
    return case if arguments.steps is None else dataclasses.replace(case, steps=arguments.steps)


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
    """As the step benchmark's emulated cases, with more ranks, networks and models; those that tell
    most come first, as time may run out.
    """
    for world in WORLDS:
        for compiled in (False, True):
            for name in models:
                size, batch, length = LARGE[name]
                how = "compiled" if compiled else "eager"
                cases = tuple(
                    StepCase(
                        f"h200-{world}-{name}-{rate}GBs-{how}", size, batch, length, (),
                        steps=12, warmup=3, precision=MIXED, blocks=2 if compiled else 3,
                        compiled=compiled, network=Network(rate * 1e9, LATENCY),
                    )
                    for rate in RATES
                )  # fmt: skip
                yield Family(cases, "fake", world, 1, device)


FOUND: dict[str, Callable[[argparse.Namespace], Iterator[Family]]] = {
    "gloo": _gloo,
    "hosts": _hosts,
    "h200": lambda arguments: emulated_families(arguments.models),
}


def groups(
    family: Family, classes: tuple[str, ...] | None, peers: tuple[str, ...]
) -> Iterator[Group]:
    """The classes of a family with peers of these kinds."""
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
            left
            for group in groups(family, arguments.classes, peers)
            if (left := group.missing(file)).peers
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
    """A row for each case and peer of each class of one family, in the same processes. If these end
    in an error, the classes have processes of their own, and the rows of the one that fails say so.
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
        for case, name in product(asked[0].family.cases, asked[0].peers):
            yield describe_row(asked[0], case, name) | {"failure": failure}


def compare_groups(asked: list[Group], quick: bool) -> list[Row]:
    """What each of the ranks runs."""
    rows = []
    for group in asked:
        cases = group.family.cases
        names = ", ".join(case.name for case in cases)
        say(f"{names}: {group.kind}, {cases[0].steps} steps each, in turn")
        for row in compare_group(group, quick):
            told = row.get("failure") or format(row["step_ratio"], ".2f")
            say(f"  {row['case']} {row['peer']}: {told}")
            rows.append(row)
    return rows


def describe_row(group: Group, case: StepCase, peer: str) -> Row:
    strategy = CLASSES[group.kind].strategy
    names = {"case": case.name, "class": group.kind, "strategy": strategy, "peer": peer}
    return {"key": group.key(case, peer), **names}


def compare_group(group: Group, quick: bool) -> list[Row]:
    """A row for each case and peer."""
    family, kind = group.family, CLASSES[group.kind]
    case = family.cases[0]
    wraps: dict[str, Any] = {"ours": partial(wrap_ours, kind)}
    wraps |= {peer.name: peer.wrap for peer in kind.peers if peer.name in group.peers}
    if case.compiled:
        wraps = {name: compile_blocks(wrap) for name, wrap in wraps.items()}

    def build(wrap: Any) -> Wrapped:
        return wrap(build_model(case.size, family.device), case.precision)

    builds = {name: partial(build, wrap) for name, wrap in wraps.items()}
    with case.open_network() as emulation:
        measured = measure_on_networks(family, family.cases, builds, emulation, isolates=True)
    rows = []
    for case, each in zip(family.cases, measured, strict=True):
        told = describe_case(family, case, quick) | {"compiled": case.compiled}
        for name in group.peers:
            row = describe_row(group, case, name) | _figures(each, name)
            rows.append(row | {"settings": told})
    return rows


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
