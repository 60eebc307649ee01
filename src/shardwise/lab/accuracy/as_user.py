"""`shardwise bench accuracy --as-user`: models of others, planned as their users plan them, then
trained as they train them.

Each model is searched by its name (`sw.search`, which `shardwise plan` calls), without and with
`measure`. Then the best Plan of each strategy, and one that was not tried, really runs: a program
of its own, which shares its stopwatch with the trial and nothing else, builds the model with
values, shards it and steps; where the trial captured the step, under `sw.capture` too.
On a GPU it is one rank of 8 whose network is emulated; over gloo there are two real ranks.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import shardwise as sw
from shardwise.calibration.calibrate import ask_ranks
from shardwise.calibration.search import measured
from shardwise.calibration.trial import Program, forget_compiled, time_steps
from shardwise.description.cluster import Cluster
from shardwise.description.language_model import OPTIMIZER
from shardwise.description.workload import Workload
from shardwise.emulation.collectives import emulate
from shardwise.emulation.networks import ClusterNetwork
from shardwise.emulation.run import joined
from shardwise.errors import UserError
from shardwise.lab.accuracy import user_page
from shardwise.lab.accuracy.user_models import BY_NAME, MODELS, UserModel
from shardwise.lab.processes import explain_failure, time_on_ranks
from shardwise.lab.rows import RowFile, say
from shardwise.predict.ranking import Candidate, Ranking
from shardwise.profiling import footprint, timing
from shardwise.profiling.results import Row, read_json
from shardwise.profiling.timing import Sample, Step

STRATEGIES = ("ddp", "zero2", "zero3")
WARMUP, STEPS, WARM_S, TIMED_S = 3, 5, 0.7, 0.8
OTHER_PROGRAM = 0.05  # of memory, by which predictions of the same program do not differ
ROUNDS = 3  # of the ranks of a CPU: each Plan in turn


@dataclass(frozen=True)
class Place:
    """Where models run: one rank of a GPU cluster, its network emulated, or ranks over gloo."""

    part: str
    cluster: Cluster
    world: int
    scale: str  # of the models
    device: str

    @classmethod
    def of(cls, part: str, cluster: str, device: str, quick: bool) -> Place | None:
        """None where this machine has no such device."""
        scale = "quick" if quick else part
        if part == "gloo":
            return cls(part, Cluster.load("cpu-gloo"), 2, scale, "cpu")
        if not device and not torch.cuda.is_available():
            say("h200: skipped, no CUDA device here")
            return None
        return cls(part, Cluster.load(cluster), 8, scale, device or "cuda")


def run(arguments: argparse.Namespace) -> None:
    """Plan and train every model that has no row yet; print and write what came of it."""
    parts = [part for part in ("gloo", "h200") if part in arguments.cases]
    if not parts:
        raise UserError("--as-user has --cases gloo and h200: name one of them")
    models = MODELS if arguments.only is None else [BY_NAME[name] for name in arguments.only]
    rows = RowFile.of(arguments)
    rows.rows = [row for row in rows.rows if "error" not in row]  # those are tried again
    beside = [read_json(path, "--beside", needs="plans") for path in arguments.beside]
    for part in parts:
        place = Place.of(part, arguments.cluster, arguments.device, arguments.quick)
        if place is not None:
            run_place(place, models, rows)
    user_page.show(rows.rows)
    if arguments.docs is not None:
        page = user_page.make_page(rows.facts | {"rows": rows.rows}, *beside)
        arguments.docs.write_text(page, encoding="utf-8")


def run_place(place: Place, models: Sequence[UserModel], rows: RowFile) -> None:
    for model in rows.missing(models, lambda model: _key(place, model)):
        began = time.monotonic()
        head: Row = {"key": _key(place, model), "part": place.part, "case": model.name}
        head |= {"about": model.about, "cluster": place.cluster.name, "world": place.world}
        try:
            row: Row = {**head, **run_model(place, model)}
        except Exception as error:  # one model must not cost the others
            traceback.print_exc()
            row = {**head, "plans": [], "error": explain_failure(error)}
        row["seconds"] = round(time.monotonic() - began, 1)
        rows.add(row)
        say(user_page.tell(row))
        gc.collect()


def _key(place: Place, model: UserModel) -> str:
    return f"{place.part} {model.name}"


def run_model(place: Place, model: UserModel) -> Row:
    """The predictions first, then what they are compared with."""
    say(f"{place.part} {model.name}: planning")
    alone, tried = predict(place, model)
    chosen = choose(tried)
    if not chosen:
        raise UserError(f"no Plan could be tried: {'; '.join(tried.notes) or tried.explain()}")
    say(f"{place.part} {model.name}: training by {len(chosen)} Plans")
    found = train(place, model, chosen, [_needs(c, alone) for c in chosen])
    plans = [tell_plan(c, alone, took) for c, took in zip(chosen, found, strict=True)]
    return {"plans": plans, "notes": list(tried.notes)}


def predict(place: Place, model: UserModel) -> tuple[Ranking, Ranking]:
    """What `sw.search` gives, and what it gives with `measure=True`: that is the second of the two
    calls here, on the first one's answer. No trial of an earlier run is taken for one of this.
    """
    ranking = search(place, model)
    program = Program(model.build_text(place.scale), _inputs(place, model), model.loss)
    with _new_cache():
        return ranking, measured(ranking, program, place.cluster, say)


def search(place: Place, model: UserModel) -> Ranking:
    """What `sw.search` gives."""
    ranking = sw.search(
        model.build_text(place.scale), place.cluster, model.work(place.scale),
        inputs=_inputs(place, model), loss=model.loss, world=place.world,
        strategies=STRATEGIES, checkpoints=("none",),
    )  # fmt: skip
    if not ranking:
        raise UserError(ranking.explain())
    return ranking


def _inputs(place: Place, model: UserModel) -> str | None:
    """Of models that are not given a sequence of tokens."""
    return None if model.work(place.scale) is not None else model.inputs_text(place.scale)


@contextmanager
def _new_cache() -> Iterator[None]:
    name = "XDG_CACHE_HOME"
    before = os.environ.get(name)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[name] = folder
        try:
            yield
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before


def predict_again(row: Row) -> list[Row]:
    """What a search says now, without trials, of the Plans that a row has measured: rows for the
    page of predictions. Where it has no such bucket, the best of that strategy and split. Nothing
    of a model that its library computes in another way by now, as its memory shows.
    """
    cluster, model = Cluster.load(row["cluster"]), BY_NAME[row["case"]]
    place = Place(row["part"], cluster, row["world"], row["part"], "")
    ranking = search(place, model)
    found: list[Row] = []
    for plan in row["plans"]:
        if "measured_ms" not in plan:
            continue
        wanted = (plan["strategy"], plan["mode"].partition(",")[0])
        alike = [c for c in ranking if (c.plan.title, c.workload.split) == wanted]
        best = next((c for c in alike if _mode(c) == plan["mode"]), alike[0])
        if abs(best.peak_bytes / plan["alone_bytes"] - 1) > OTHER_PROGRAM:
            say(f"{row['key']} {plan['strategy']}: left out, it is another program by now")
            continue
        assert best.range_ms is not None
        low, high = best.range_ms
        found.append(
            {
                "case": f"{row['case']} {plan['strategy']}",
                "mode": _mode(best),
                "set": "others",
                "cluster": row["cluster"],
                "predicted_ms": best.step_ms,
                "range_ms": best.range_ms,
                "measured_ms": plan["measured_ms"],
                "measured_host_ms": plan["measured_host_ms"],
                "inside": low <= plan["measured_ms"] <= high,
                "predicted_bytes": best.peak_bytes,
                "measured_bytes": plan["measured_bytes"],
            }
        )
    return found


def _mode(candidate: Candidate) -> str:
    return f"{candidate.workload.split}, {candidate.show_settings()}"


def choose(ranking: Ranking) -> list[Candidate]:
    """Of each strategy the best that was tried; and the best that was not, whose time is corrected
    by the others'.
    """
    found: dict[str, Candidate] = {}
    for candidate in ranking:
        key = candidate.plan.title if candidate.trial is not None else ""
        found.setdefault(key, candidate)
    corrected = found.pop("", None)
    return [*found.values(), *([corrected] if corrected is not None and found else [])]


def _alone(candidate: Candidate, alone: Ranking) -> Candidate:
    """The same Plan and work before anything was tried."""
    work = (candidate.plan, candidate.workload)
    return next(c for c in alone if (c.plan, c.workload) == work)


def _needs(candidate: Candidate, alone: Ranking) -> dict[str, float]:
    """What a search asks for the allocator, with and without trials."""
    before = _alone(candidate, alone)
    return {"needed_bytes": candidate.allocator_bytes, "alone_needed_bytes": before.allocator_bytes}


def tell_plan(candidate: Candidate, alone: Ranking, took: Row) -> Row:
    """A Plan's prediction with and without trials, and what it took."""
    before = _alone(candidate, alone)
    return {
        "strategy": candidate.plan.title,
        "mode": _mode(candidate),
        "basis": candidate.basis,
        "predicted_ms": candidate.step_ms,
        "range_ms": candidate.range_ms,
        "predicted_bytes": candidate.peak_bytes,
        "tried_host_ms": None if candidate.trial is None else candidate.trial.host_ms,
        "alone_basis": before.basis,
        "alone_ms": before.step_ms,
        "alone_range_ms": before.range_ms,
        "alone_bytes": before.peak_bytes,
        **_told_captured(candidate),
        **_needs(candidate, alone),
        "breakdown_ms": {name: ns / 1e6 for name, ns in before.breakdown.parts().items()},
        **took,
    }


def _told_captured(candidate: Candidate) -> Row:
    """What was said of the Plan's step under `sw.capture`, if that was tried."""
    found = None if candidate.trial is None else candidate.trial.captured
    if found is None:
        return {}
    return {
        "captured_predicted_ms": found.step_ms,
        "captured_range_ms": found.range_ms,
        "captured_advised": candidate.captured is not None,
    }


# What the predictions are compared with.


def start(model: UserModel, scale: str, plan: sw.Plan, work: Workload, device: str) -> Step:
    return start_training(model, scale, plan, work, device)[1]


def start_training(
    model: UserModel, scale: str, plan: sw.Plan, work: Workload, device: str
) -> tuple[torch.nn.Module, Step]:
    """A training program as its user writes it: its model and its step."""
    rank = dist.get_rank()
    torch.manual_seed(7)  # the same first weights on every rank
    with torch.device(device):
        built = model.build(**model.sizes[scale][0]).train()
    sw.shard(built, plan)
    trained = [p for p in built.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, **OPTIMIZER)
    torch.manual_seed(100 + rank)
    batches = [_to(model.inputs(scale, work.micro_batch), device)] * work.micro_batches
    divisor = len(batches) * plan.world

    def step() -> None:
        optimizer.zero_grad()
        for batch in sw.microbatches(built, batches) if len(batches) > 1 else batches:
            (_loss(model, built, batch) / divisor).backward()
        optimizer.step()

    return built, step


def _to(batch: Any, device: str) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device)
    return {name: tensor.to(device) for name, tensor in batch.items()}


def _loss(model: UserModel, built: torch.nn.Module, batch: Any) -> Tensor:
    if model.loss is None:
        loss: Tensor = built(**batch).loss
        return loss
    output = built(batch)
    return model.loss(output, batch) if model.loss_takes_inputs else model.loss(output)


def train(
    place: Place, model: UserModel, chosen: Sequence[Candidate], needs: Sequence[dict[str, float]]
) -> list[Row]:
    """What steps of each Plan took; of one that failed, the error."""
    works = [(replace(c.plan, units=None).to_json(), c.workload) for c in chosen]
    if place.part == "gloo":
        found: list[Row] = ask_ranks(train_as_rank, (model.name, place.scale, works), place.world)
        return found
    return [
        _train_emulated(place, model, *work, needed, bool(_told_captured(candidate)))
        for work, needed, candidate in zip(works, needs, chosen, strict=True)
    ]


def _train_emulated(
    place: Place,
    model: UserModel,
    plan: str,
    work: Workload,
    needs: dict[str, float],
    captured: bool = False,
) -> Row:
    """As the first of the emulated ranks; on a CPU only to try the benchmark. `captured`: by
    `sw.capture` too.
    """
    cuda = place.device.startswith("cuda")
    left = footprint.free_device() if cuda else 0
    peaks: tuple[int | None, int | None] = (None, None)
    within: Row = {}
    try:
        with joined(0, place.world), emulate(ClusterNetwork(place.cluster)) as emulation:
            step = start(model, place.scale, sw.Plan.from_json(plan), work, place.device)
            if cuda:
                footprint.free_device()  # the whole model's, which is cut by now
            timer = timing.timer_on(place.device)
            timing.repeat(step, timer, WARMUP, WARM_S if cuda else 0.0)
            called = sum(emulation.calls.values())
            samples = time_steps(step) if cuda else timing.repeat(step, timer, STEPS)
            if not sum(emulation.calls.values()) > called:
                raise RuntimeError("no collective went over the emulated network")
            if cuda:
                allocated, reserved = footprint.peaks_on_cuda(step)
                peaks = allocated - left, reserved - left
                # The larger first: a step that has no room leaves nothing to go on with.
                for what in sorted(needs, key=needs.__getitem__, reverse=True):
                    within[f"fits_{what}"] = footprint.runs_within(step, int(needs[what]) + left)
            if captured and all(within.values()):
                within |= _train_captured(step)
            del step
    except Exception as error:
        if not isinstance(error, torch.OutOfMemoryError):
            traceback.print_exc()
        return {"error": explain_failure(error)}
    finally:
        forget_compiled()
        if cuda:
            footprint.free_device()
    return _tell(samples, *peaks) | within


def _train_captured(step: Step) -> Row:
    """The same program with one line more."""
    replayed = sw.capture(step)
    timing.repeat(replayed, timing.time_on_cuda, 3 * WARMUP, WARM_S)
    samples = timing.repeat(replayed, timing.time_on_cuda, STEPS, TIMED_S)
    if replayed.reason is not None:
        return {"captured_error": replayed.reason}
    told = _tell(samples, None, None)
    return {f"captured_{name}": told[name] for name in ("measured_ms", "measured_spread_ms")}


def train_as_rank(
    name: str, scale: str, works: Sequence[tuple[str, Workload]], writer: Connection
) -> None:
    """All Plans in rounds, so that what disturbs one disturbs the others; then their memory."""
    model = BY_NAME[name]

    def begin(plan: str, work: Workload) -> Step:
        return start(model, scale, sw.Plan.from_json(plan), work, "cpu")

    steps = [begin(*work) for work in works]
    warm = [timing.repeat(step, time_on_ranks, WARMUP)[-1].step_ms for step in steps]
    quick = scale == "quick"
    counts = [STEPS if quick else max(STEPS, round(1e3 * TIMED_S / ms)) for ms in warm]
    samples: list[list[Sample]] = [[] for _ in steps]
    for _ in range(1 if quick else ROUNDS):
        for step, count, into in zip(steps, counts, samples, strict=True):
            step()  # after the others' steps nothing of this one's is in the caches
            into += timing.repeat(step, time_on_ranks, count)
    del steps, step
    peaks = [footprint.peak_on_cpu(partial(begin, *work)) for work in works]
    if dist.get_rank() == 0:
        writer.send([_tell(each, peak, None) for each, peak in zip(samples, peaks, strict=True)])
    dist.barrier()
    dist.destroy_process_group()


def _tell(samples: Sequence[Sample], peak: int | None, reserved: int | None) -> Row:
    times = [sample.step_ms for sample in samples]
    return {
        "measured_ms": statistics.median(times),
        "measured_spread_ms": timing.spread(times),
        "measured_host_ms": statistics.median(sample.cpu_ms for sample in samples),
        "measured_bytes": peak,
        "measured_reserved_bytes": reserved,
        "steps": len(times),
    }
