"""`shardwise bench ddp`: data parallel's ways to send gradients, and which bucket is best.

On CPUs real gloo ranks train a model that is scaled down; on a GPU one process is a rank of an
emulated group and trains the document's XL. All ways have the same weights and inputs. Beside each
step stands what the planner says of it, and what it takes above one that sends nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from dataclasses import dataclass
from typing import Any

import torch

import shardwise as sw
from shardwise.calibration.measure import Effort, Findings, measure_links
from shardwise.description.cluster import Cluster
from shardwise.description.collectives import bus_share
from shardwise.description.language_model import LM, OPTIMIZER, draw_tokens, make_model
from shardwise.description.preset import SIZES, Size, bench_size
from shardwise.description.workload import Workload
from shardwise.emulation.collectives import Network, emulate
from shardwise.emulation.run import Taken, fake_group, time_step
from shardwise.lab.accuracy.calibrate import emulated_level
from shardwise.lab.accuracy.cases import describe_model
from shardwise.lab.charts import draw_bars
from shardwise.lab.exercises.models import tell_device
from shardwise.lab.paper.time import optimal_bucket_bytes
from shardwise.lab.parallel import document
from shardwise.lab.parallel.all_reduce import CALIBRATED, MB, Points, describe_links
from shardwise.lab.parallel.all_reduce import QUICK as QUICK_LINKS
from shardwise.lab.processes import ask_ranks, explain_failure, run_fresh, time_on_ranks
from shardwise.lab.rows import RowFile, only_draw, say
from shardwise.lab.steps.engines import (
    Precision,
    Wrapped,
    largest_difference,
    wrap_plan,
    wrap_theirs,
)
from shardwise.predict.cost import Costs
from shardwise.predict.step import StepOptions
from shardwise.profiling.results import Row, print_table
from shardwise.profiling.timing import alternate, spread, time_calls

BATCH, CONTEXT = 16, 32  # a total batch of 32 on two ranks
# What two cores step in about half a second: 7 M parameters, 29 MB of gradients.
SCALED = bench_size(layers=4, d_model=320, d_ff=1280, heads=5, vocab=1024)
QUICK_SIZE = bench_size(layers=2, d_model=64, d_ff=128, heads=4, vocab=256)
WARMUP, PARITY_STEPS, TOLERANCE = 2, 2, 1e-5
ALONE = "sends nothing"
TORCH = "torch's DDP"
BASE = "h200x8-measured"  # the device and the host that an emulated step is predicted with


@dataclass(frozen=True)
class Way:
    """One way to send gradients; without `reduce`, torch's DistributedDataParallel."""

    reduce: str
    bucket_mb: int | None = None

    @property
    def name(self) -> str:
        bucket = "" if self.bucket_mb is None else f" {self.bucket_mb} MB"
        return f"{self.reduce}{bucket}" or TORCH

    def plan(self, ranks: int) -> sw.Plan:
        nbytes = None if self.bucket_mb is None else self.bucket_mb * MB
        return sw.Plan.of("ddp", mesh=ranks, reduce=self.reduce, bucket_bytes=nbytes)

    def wrap(self, model: LM, ranks: int) -> Wrapped:
        if not self.reduce:
            return wrap_theirs(model, "ddp", Precision())
        return wrap_plan(model, self.plan(ranks))


@dataclass(frozen=True)
class Case:
    """What all ways train."""

    size_name: str
    size: Size
    ranks: int
    steps: int
    quick: bool

    @property
    def context(self) -> int:
        return 8 if self.quick else CONTEXT

    @property
    def batch(self) -> int:
        return 2 if self.quick else BATCH

    @property
    def gradient_bytes(self) -> int:
        return sum(p.nbytes for p in make_model(self.size, "meta", self.context).parameters())

    def describe(self) -> Row:
        return {
            "size": self.size_name,
            "ranks": self.ranks,
            "batch": self.batch,
            "context": self.context,
            "gradient_bytes": self.gradient_bytes,
        }


def run(arguments: argparse.Namespace) -> None:
    """Measure, write the JSON, draw the picture, print the tables."""
    if only_draw(arguments, draw):
        return
    tell_device()
    on_gpu = torch.cuda.is_available()
    case = choose_case(arguments)
    buckets = arguments.buckets[:2] if arguments.quick else arguments.buckets
    ways = _list_ways(arguments.ways, buckets)
    network, told = describe_network(arguments)
    file = RowFile.of(arguments, network=told)
    base = f"{told}/{case.size_name}/{case.batch}x{case.context}/{case.ranks}"
    missing = list(file.missing(ways, lambda way: f"{base}/{way.name}"))

    def add(way: Way, found: Row) -> None:
        row: Row = {"key": f"{base}/{way.name}", "way": way.name, **case.describe(), **found}
        file.add(row | {"document": document.DDP.get(way.name, {})})
        say(f"{way.name}: " + found.get("failure", f"{found.get('step_ms', 0):.1f} ms"))

    if on_gpu:
        for way in missing:
            if file.time_is_up():
                break
            say(f"{way.name}: {case.size_name} on a rank of {case.ranks}, {told}")
            found = run_fresh(measure_emulated, case, way, network)
            add(way, found | _predict_emulated(way, case, network))
        links = (network.bandwidth / bus_share("all_reduce", case.ranks), network.latency)
    elif missing:
        say(f"{case.ranks} gloo ranks: calibrating, then {len(missing)} ways in turn")
        effort = QUICK_LINKS if arguments.quick else CALIBRATED
        answer = ask_ranks(measure_on_ranks, case, missing, effort, world=case.ranks)
        for way in missing:
            add(way, answer["ways"][way.name] | _predict_on_gloo(way, case, answer))
        links = _read_links(answer["points"])
    if missing:
        file.add({"key": f"{base}/best", **case.describe(), **_find_best(file.rows, case, *links)})
    file.tell(arguments.plot, draw, show)


def choose_case(arguments: argparse.Namespace) -> Case:
    """The model asked for; by default the document's, on a CPU one that is scaled down."""
    on_gpu = torch.cuda.is_available()
    name = arguments.size or ("xl" if on_gpu else "scaled")
    size = QUICK_SIZE if arguments.quick else SIZES.get(name, SCALED)
    if on_gpu:
        size = dataclasses.replace(size, attention="plain")
    steps = 4 if arguments.quick else arguments.steps
    return Case(name, size, arguments.ranks, steps, arguments.quick)


def describe_network(arguments: argparse.Namespace) -> tuple[Network, str]:
    """What an emulated group is joined by, and what the rows say of it."""
    network = Network(arguments.bandwidth * 1e9, arguments.latency * 1e-6)
    told = f"{arguments.bandwidth:g} GB/s per rank, {arguments.latency:g} us per collective"
    return network, f"emulated: {told}" if torch.cuda.is_available() else "gloo"


def _list_ways(names: tuple[str, ...], buckets: tuple[int, ...]) -> list[Way]:
    ways = []
    for name in names:
        if name == "bucketed":
            ways += [Way(name, bucket) for bucket in buckets]
        else:
            ways.append(Way("" if name == "torch" else name))
    return ways


# Real ranks


def measure_on_ranks(case: Case, ways: list[Way], effort: Effort) -> dict[str, Any]:
    """What each of the ranks runs: the links, then all ways in turn, after they have agreed."""
    links = Findings()
    measure_links(links, effort, lambda what: None)
    calls = [
        (2**power, statistics.median(time_calls("all_reduce", 2**power, 6)))
        for power in range(10, 25, 2)
    ]
    candidates = {way.name: way.wrap(_build(case), case.ranks) for way in ways}
    tokens = draw_tokens(case.size, case.batch, case.context, "cpu")
    steps = {name: trial.step_on(*tokens) for name, trial in candidates.items()}
    parity = _check_parity(case, candidates, steps)
    model = _build(case)
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
    steps[ALONE] = Wrapped(model, optimizer, 1, {}).step_on(*tokens)
    taken = alternate(steps, case.steps, WARMUP, time_on_ranks)
    times = {name: [sample.step_ms for sample in samples] for name, samples in taken.items()}
    alone = statistics.median(times[ALONE])
    found = {}
    for name, trial in candidates.items():
        step = statistics.median(times[name])
        found[name] = {
            "step_ms": step,
            "step_spread_ms": spread(times[name]),
            "alone_ms": alone,
            "above_ms": step - alone,
            "share": (step - alone) / step,
            "messages": trial.settings.get("units"),
            "parity": parity[name],
        }
    points = [(p.kind, p.nbytes, p.seconds) for p in links.collectives]
    return {"points": points, "share": links.share.value, "calls": calls, "ways": found,
            "alone_ms": alone}  # fmt: skip


def _build(case: Case) -> LM:
    return make_model(case.size, "cpu", case.context)


def _check_parity(
    case: Case, candidates: dict[str, Wrapped], steps: dict[str, Any]
) -> dict[str, float]:
    """Each way's largest relative difference from torch's DDP after a few steps; an error on every
    rank if one parts.
    """
    expected = wrap_theirs(_build(case), "ddp", Precision())
    tokens = draw_tokens(case.size, case.batch, case.context, "cpu")
    for step in (*steps.values(), expected.step_on(*tokens)):
        for _ in range(PARITY_STEPS):
            step()
    found = {}
    for name, trial in candidates.items():
        found[name], where = largest_difference(trial.model, expected.model)
        if found[name] > TOLERANCE:
            raise RuntimeError(
                f"{name}: after {PARITY_STEPS} steps {where} differs from {TORCH} by "
                f"{found[name]:.1e} (allowed {TOLERANCE:.0e}); nothing was timed"
            )
    return found


def _predict_on_gloo(way: Way, case: Case, answer: dict[str, Any]) -> Row:
    """The planner's step, with links as measured and compute as in the step that sends nothing."""
    if not way.reduce:
        return {}
    cluster = describe_links(case.ranks, answer["points"], answer["share"])
    calls = {"all_reduce": tuple(map(tuple, answer["calls"]))}
    options, workload = StepOptions(loss_inside=False), Workload(case.context, case.batch)

    def simulate(plan: sw.Plan, factor: float) -> tuple[float, float]:
        """Milliseconds of the step, and of its passes, which take `factor` of what rates say."""
        plan, described = describe_model(case.size, case.batch, case.context, plan, "cpu")
        costs = dataclasses.replace(Costs.of(cluster), call_points=calls)
        parts = [part for _, s in described.segments for part in (s.forward, s.backward)]
        seconds = [costs.compute(part) * factor for part in parts]
        costs.set_passes(zip(parts, seconds, strict=True))
        timeline = sw.simulate(plan, described, cluster, workload, costs=costs, options=options)
        return timeline.step_ms, sum(seconds) * 1e3

    alone, passes = simulate(sw.Plan.of("ddp", mesh=1), 1.0)
    factor = max(0.05, (answer["alone_ms"] - (alone - passes)) / passes)
    return {"predicted_ms": simulate(way.plan(case.ranks), factor)[0]}


def _read_links(points: Points) -> tuple[float, float]:
    """Bytes/s of the largest all-reduce, seconds of the smallest: the formula's w and o."""
    sums = sorted((nbytes, seconds) for kind, nbytes, seconds in points if kind == "all_reduce")
    return sums[-1][0] / sums[-1][1], sums[0][1]


# One rank of an emulated group


def measure_emulated(case: Case, way: Way, network: Network) -> dict[str, Any]:
    """Steps with the network and with a free one; in a process of its own."""
    try:
        device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
        with fake_group(0, case.ranks), emulate(network) as emulation:
            trial = way.wrap(make_model(case.size, str(device), case.context), case.ranks)
            tokens = draw_tokens(case.size, case.batch, case.context, device)
            taken = Taken()
            time_step(trial.step_on(*tokens), emulation, device, case.steps, taken)
        return sum_up(taken)
    except (RuntimeError, ValueError) as error:
        return {"failure": explain_failure(error)}


def sum_up(taken: Taken) -> Row:
    """An emulated step's figures, ms, medians. `step` has the host in it. `device`, `free_device`
    and `exposed` are of steps with the host ahead, so that the first less the second is the third.
    """
    samples, exposures = taken.samples, taken.exposures["network"]
    steps, free = ([sample.step_ms for sample in samples[m]] for m in ("network", "free"))
    above = statistics.median(taken.difference("network", "free"))
    device, free_device = (statistics.median(taken.ahead_ms[m]) for m in ("network", "free"))
    sent = [sum(message.seconds for message in exposure.messages) for exposure in exposures]
    return {
        "step_ms": statistics.median(steps),
        "step_spread_ms": spread(steps),
        "host_ms": statistics.median(sample.cpu_ms for sample in samples["network"]),
        "free_step_ms": statistics.median(free),
        "device_ms": device,
        "free_device_ms": free_device,
        "above_ms": above,
        "exposed_ms": statistics.median(taken.exposed_ms),
        "communication_ms": statistics.median(sent) * 1e3,
        "share": above / device,
        "messages": len(exposures[0].messages),
    }


def _predict_emulated(way: Way, case: Case, network: Network) -> Row:
    """As `shardwise plan` predicts it on the packaged device, over this network."""
    if not way.reduce:
        return {}
    cluster = dataclasses.replace(Cluster.load(BASE), levels=(emulated_level(network),))
    plan = way.plan(case.ranks)
    plan, described = describe_model(case.size, case.batch, case.context, plan, "cuda")
    workload, options = Workload(case.context, case.batch), StepOptions(loss_inside=False)
    costs = Costs(cluster, emulated=True)
    timeline = sw.simulate(plan, described, cluster, workload, costs=costs, options=options)
    return {"predicted_ms": timeline.step_ms, "predicted_with": BASE}


# What is made of the rows


def _find_best(rows: list[Row], case: Case, bandwidth: float, call_s: float) -> Row:
    """The quickest bucket as measured, as predicted, and as the document's formula has it."""
    held = [row for row in rows if row.get("way", "").startswith("bucketed") and "step_ms" in row]
    found: Row = {}
    for name, key in (("measured", "step_ms"), ("predicted", "predicted_ms")):
        best = min((row for row in held if key in row), key=lambda row: row[key], default=None)
        if best is not None:
            found[f"best_{name}"] = best["way"]
    size = case.gradient_bytes
    found["best_by_formula_mb"] = optimal_bucket_bytes(size, bandwidth, call_s) / MB
    return found | {"formula": {"bytes": size, "bandwidth": bandwidth, "call_s": call_s}}


def draw(rows: list[Row]) -> str:
    groups = {
        row["way"]: {"measured": row.get("step_ms"), "predicted": row.get("predicted_ms")}
        for row in rows
        if "way" in row
    }
    return draw_bars("one step of data parallel", groups, "ms")


def short_ms(value: float) -> str:
    """In as few places as a column has."""
    return f"{value:.1f}" if abs(value) < 100 else f"{value:.0f}"


def show(rows: list[Row], facts: dict[str, Any]) -> None:
    lines, details = [], []
    for row in rows:
        if "way" not in row:
            continue
        said = row["document"]
        theirs = f"{said['step_s'] * 1e3:.0f}" if "step_s" in said else "OOM" if said else ""
        if "failure" in row:
            lines.append([row["way"], "", "failed", *[""] * 4, theirs])
            continue
        sent = row["messages"]
        cells = [row["way"], "" if sent is None else str(sent)]
        cells += [short_ms(row[n]) for n in ("step_ms", "step_spread_ms", "above_ms")]
        predicted = short_ms(row["predicted_ms"]) if "predicted_ms" in row else ""
        lines.append([*cells, f"{row['share']:.0%}", predicted, theirs])
        if "device_ms" in row:
            names = ("step_ms", "free_step_ms", "host_ms", "device_ms", "free_device_ms",
                     "exposed_ms", "communication_ms")  # fmt: skip
            details.append([row["way"], *(f"{row[name]:.0f}" for name in names)])
    heads = ("way", "sent", "step", "+-", "above", "share", "model", "document")
    title = f"one step of data parallel, ms ({facts['network']})"
    print_table(title, heads, lines, {} if details else facts["environment"], ("way",), width=80)
    if details:
        heads = ("way", "step", "free", "host", "device", "free", "exposed", "sending")
        title = "with the host in it; then by the device, the host ahead"
        print_table(title, heads, details, facts["environment"], ("way",), width=80)
    print(
        "sent: messages; above: what the step takes above one that sends nothing;\n"
        "model: the planner's step. The document trained XL on two H100s; its naive\n"
        "step took 846, 776 and 860 ms in three exercises, 68 ms of it communication\n"
        "(flat: 97 of 898), so only its own pairs compare."
    )
    for row in rows:
        if "failure" in row:
            print(f"{row['way']}: {row['failure']}")
        if "best_by_formula_mb" in row:
            print(
                f"best bucket: measured {row.get('best_measured', '-')}, predicted "
                f"{row.get('best_predicted', '-')},\nby the document's sqrt(s w o) "
                f"{row['best_by_formula_mb']:.1f} MB"
            )
