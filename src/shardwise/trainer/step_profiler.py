"""Profiling some steps of a run, and the prediction to hold them against."""

import dataclasses
import sys
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter

import torch
from torch import nn

import shardwise as sw
from shardwise.description.cluster import Cluster
from shardwise.description.language_model import LM
from shardwise.errors import UserError
from shardwise.predict.foresight import Foresight
from shardwise.predict.step import StepOptions
from shardwise.profiling.collect import NothingProfiled
from shardwise.profiling.write import choose_cluster
from shardwise.run_files import PREDICTED
from shardwise.timeline import Timeline
from shardwise.trainer.config import TrainConfig
from shardwise.trainer.group import Member

WARMUP = 5  # steps before, where the run has so many


class StepProfiler:
    """Profiles `run.profile` steps of the loop and writes their files beside the run's."""

    def __init__(
        self,
        config: TrainConfig,
        model: nn.Module,
        plan: sw.Plan,
        member: Member,
        done: int = 0,
        foresight: Foresight | None = None,
    ) -> None:
        """`done`: steps that the run had taken before it resumed; this process has to warm up."""
        self.config, self.model, self.plan, self.member = config, model, plan, member
        self.foresight = foresight
        self.peak_bytes: int | None = None  # of a rank, once it is known
        left = config.run.steps - done
        count = max(0, min(config.run.profile, left - 1))
        first = done + min(WARMUP, left - count) + 1
        self.steps = range(first, first + count)
        self._open = ExitStack()

    def before(self, step: int) -> float:
        """Begin before the first of them. Gives the seconds that this took from the loop."""
        if not self.steps or step != self.steps[0]:
            return 0.0
        began = perf_counter()
        title = f"{self.plan.title} on {self.member.world} {self.member.device.type} ranks"
        self._measured = sw.profile(self.model, len(self.steps), title=title)
        self._open.enter_context(self._measured)
        self._told_s = self._measured.seconds
        return perf_counter() - began

    def after(self, step: int) -> float:
        """End after the last of them, and write the files; seconds as `before` gives them."""
        if step not in self.steps:
            return 0.0
        began, measured = perf_counter(), self._measured
        stopped = measured.seconds - self._told_s  # inside the step that ended
        self._told_s = measured.seconds
        if step != self.steps[-1]:
            return stopped
        self._finish()
        return perf_counter() - began + stopped

    def _finish(self) -> None:
        """Write what was measured, and what rank 0 predicts of it."""
        try:
            self._open.close()
        except NothingProfiled as error:
            self._say(f"nothing was profiled: {error}")
            return
        out, member = Path(self.config.run.out), self.member
        cluster = choose_cluster(member.device_name)
        self._measured.write(out, cluster)
        if self._measured.timeline.memory:
            self.peak_bytes = self._measured.timeline.peak().total
        if member.rank == 0 and cluster:
            try:
                predicted = predict(self.config, self.plan, cluster, member.device.type)
                if self.foresight is not None:
                    predicted = as_tried(predicted, self.foresight)
                (out / PREDICTED).write_text(predicted.to_json() + "\n", encoding="utf-8")
            except (ValueError, UserError, NotImplementedError) as error:
                self._say(f"this step could not be predicted on {cluster}: {error}")

    def _say(self, text: str) -> None:
        if self.member.rank == 0:
            print(f"shardwise: {text}", file=sys.stderr, flush=True)


def as_tried(predicted: Timeline, foresight: Foresight) -> Timeline:
    """The same step, as long as it took when it was tried."""
    timeline = predicted.scaled(foresight.step_ms / predicted.step_ms)
    labels = {
        **timeline.labels,
        "title": f"{timeline.labels['title']}, as long as its trial: {foresight.basis}",
        "step_ms": f"{timeline.step_ms:.3f}",
    }
    return dataclasses.replace(timeline, labels=labels)


def predict(config: TrainConfig, plan: sw.Plan, cluster_name: str, device: str) -> Timeline:
    """The step that the configuration asks for, simulated on a packaged cluster."""
    with torch.device("meta"):
        model = LM(config.model.resolve(), config.data.seq)
    workload = config.workload
    cluster = Cluster.load(cluster_name)
    described = sw.describe(model, workload, plan, device=device)
    timeline = sw.simulate(plan, described, cluster, workload, options=StepOptions(clip=True))
    labels = {
        **timeline.labels,
        "title": f"predicted: {plan.title} on {cluster.name}",
        "source": "simulated",
        "engine": "shardwise",
        "device": cluster.device.name,
        "steps": "1",
        "step_ms": f"{timeline.step_ms:.3f}",
    }
    return dataclasses.replace(timeline, labels=labels)
