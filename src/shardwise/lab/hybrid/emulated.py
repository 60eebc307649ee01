"""One rank of an emulated 2 x 2 mesh; the other replica is as late as it would be."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.description.cluster import Cluster
from shardwise.emulation.collectives import Emulation, emulate
from shardwise.emulation.engines import wrap
from shardwise.emulation.networks import ClusterNetwork
from shardwise.emulation.peers import Peers
from shardwise.emulation.run import joined
from shardwise.lab.hybrid.case import RANKS, HybridCase, plan_of, summarize
from shardwise.lab.hybrid.predicted import CLUSTER
from shardwise.lab.rows import say
from shardwise.profiling.timing import (
    Moment,
    Step,
    mark_moment,
    no_garbage_collection,
    seconds_between,
)


class Candidate:
    """An engine in a mode: rank 0's steps, and in its turn those of the other replica's ranks."""

    def __init__(
        self,
        case: HybridCase,
        engine: str,
        mode: str,
        emulation: Emulation,
        device: torch.device,
    ) -> None:
        plan = plan_of(mode)
        model, self.settings = wrap(engine, case.stack.build(case.sequence), plan, device)
        self._on_cuda = device.type == "cuda"
        self._moments: list[tuple[Moment, Moment]] = []
        rows = len(case.workload.sizes or ())
        steps = [case.step(engine, model, plan, replica, device) for replica in range(rows)]
        for step in steps:
            step()  # kernels are built and memory is taken before anything is timed
        self._peers = Peers(emulation, device, plan, [self._timed(steps[0]), *steps[1:]])
        self._peers.settle(rounds=case.accumulate + 1)

    def _timed(self, step: Step) -> Step:
        def timed() -> None:
            began = mark_moment(self._on_cuda)
            step()
            self._moments.append((began, mark_moment(self._on_cuda)))

        return timed

    def run(self) -> float:
        """Play every rank once more, and give what the first one took, in ms: by CUDA events from
        an idle device, on a CPU by the host's clock.
        """
        self._peers.settle(rounds=1)
        return seconds_between(*self._moments[-1]) * 1e3


def measure(
    case: HybridCase, candidates: list[tuple[str, str]], warmup: int, steps: int
) -> dict[str, dict[str, Any]]:
    """Figures by engine and mode. All live side by side on the device and take turns, so that what
    disturbs one disturbs the others.
    """
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    network = ClusterNetwork(Cluster.load(CLUSTER))
    taken: dict[str, list[float]] = {}
    with joined(0, RANKS), emulate(network) as emulation:
        built = {}
        for engine, mode in candidates:
            say(f"emulated: {engine}, {mode}")
            built[f"{engine}/{mode}"] = Candidate(case, engine, mode, emulation, device)
        names = list(built)
        taken = {name: [] for name in names}
        with no_garbage_collection():
            for i in range(warmup + steps):
                first = i % len(names)
                for name in names[first:] + names[:first]:
                    taken[name].append(built[name].run())
        settings = {name: candidate.settings for name, candidate in built.items()}
        del built
    return {
        name: summarize(each[warmup:], case.tokens)
        | {"cluster": CLUSTER, "settings": settings[name]}
        for name, each in taken.items()
    }
