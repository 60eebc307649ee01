"""One rank of an emulated 2 x 2 mesh; the other replica is as late as it would be."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from shardwise.description.cluster import Cluster
from shardwise.emulation.collectives import emulate
from shardwise.emulation.engines import wrap
from shardwise.emulation.networks import ClusterNetwork
from shardwise.emulation.peers import Peers
from shardwise.emulation.run import joined
from shardwise.lab.hybrid.case import RANKS, HybridCase, plan_of, summarize
from shardwise.lab.hybrid.predicted import CLUSTER
from shardwise.lab.processes import explain_failure
from shardwise.profiling.footprint import free_device
from shardwise.profiling.timing import no_garbage_collection


def measure(case: HybridCase, engine: str, mode: str, warmup: int, steps: int) -> dict[str, Any]:
    """Steps of rank 0, in a group that is opened for it: by CUDA events from an idle device, on a
    CPU by the host's clock.
    """
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    plan, network = plan_of(mode), ClusterNetwork(Cluster.load(CLUSTER))
    try:
        with joined(0, RANKS), emulate(network) as emulation:
            if device.type == "cuda":
                free_device()
            model, settings = wrap(engine, case.stack.build(case.sequence), plan, device)
            rows = len(case.workload.sizes or ())
            roles = [case.step(engine, model, plan, replica, device) for replica in range(rows)]
            for _ in range(max(1, warmup // rows)):
                for role in roles:
                    role()
            peers = Peers(emulation, device, plan, roles)
            peers.settle(rounds=case.accumulate + 1)
            with no_garbage_collection():
                taken = [_time(peers, device) for _ in range(steps)]
        return summarize(taken, case.tokens) | {"cluster": CLUSTER, "settings": settings}
    except (RuntimeError, ValueError) as error:
        return {"failure": explain_failure(error)}
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _time(peers: Peers, device: torch.device) -> float:
    if device.type != "cuda":
        began = time.perf_counter()
        peers.run(0)
        return (time.perf_counter() - began) * 1e3
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    peers.run(0)
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
