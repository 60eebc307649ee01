"""Emulated collectives against the clock: the time each takes on the device, beside the time it is
to take. The device is otherwise idle, or computes: matrix products of a step's size, or large ones,
which keep every multiprocessor for a millisecond.
"""

from __future__ import annotations

import itertools
import statistics
from typing import Any

import torch
import torch.distributed as dist

from shardwise.description.cluster import COLLECTIVES
from shardwise.emulation.collectives import Emulation, emulate
from shardwise.emulation.networks import NetworkModel
from shardwise.errors import UserError
from shardwise.profiling.timing import issue_collective

SIZES = tuple(2**20 * 4**i for i in range(6))  # 1 MiB to 1 GiB
# Rows, inner and columns of the products, and less than one takes.
LOADS: dict[str, tuple[tuple[int, int, int], float] | None] = {
    "idle": None,
    "small": ((8192, 2048, 2048), 45e-6),
    "large": ((8192, 8192, 8192), 1.2e-3),
}


def check(device: torch.device, networks: list[tuple[str, NetworkModel]]) -> list[dict[str, Any]]:
    """One row per network, collective, size and load. The process group is open."""
    if device.type != "cuda":
        raise UserError("--check times collectives on a GPU; there is none here")
    rows = []
    for name, network in networks:
        if network.transfer("all_gather", SIZES[0], range(dist.get_world_size())).seconds == 0:
            continue
        with emulate(network) as emulation:
            for collective, nbytes, load in itertools.product(COLLECTIVES, SIZES, LOADS):
                modelled, taken = time_collective(emulation, device, collective, nbytes, load)
                median = statistics.median(taken)
                row = {
                    "check": collective,
                    "network": f"emulated: {name}",
                    "bytes": nbytes,
                    "device": load,
                    "modelled_us": modelled * 1e6,
                    "taken_us": median * 1e6,
                    "error": median / modelled - 1,
                    "worst_error": max((seconds / modelled - 1 for seconds in taken), key=abs),
                    "rounds": len(taken),
                }
                rows.append(row)
    return rows


def time_collective(
    emulation: Emulation, device: torch.device, collective: str, nbytes: int, load: str
) -> tuple[float, list[float]]:
    """The modelled seconds of a collective, and those of several in a row."""
    world, count = dist.get_world_size(), nbytes // 4
    whole = torch.zeros(count, device=device)
    part = torch.zeros(count // world, device=device)
    modelled = emulation.transfer(collective, nbytes, dist.group.WORLD).seconds
    rounds = max(3, min(20, round(30e-3 / modelled)))
    head_start = 2e-3 + rounds * 200e-6
    side = torch.cuda.Stream(device)
    # The first builds the kernel, which may take longer than the head start.
    issue_collective(collective, whole, part).wait()
    torch.cuda.synchronize(device)
    busy = _compute(device, load, head_start + 1.1 * rounds * modelled)
    with torch.cuda.stream(side):
        emulation.links_of(device).delay(head_start)
        with emulation.measure(device) as measured:
            for _ in range(rounds):
                issue_collective(collective, whole, part).wait()
            if busy is not None and busy.query():
                raise RuntimeError("the matrix products ended before the collectives were issued")
    return modelled, [message.seconds for message in measured.messages]


def _compute(device: torch.device, load: str, seconds: float) -> torch.cuda.Event | None:
    """Queue products for at least so long; the event at their end."""
    shape = LOADS[load]
    if shape is None:
        return None
    (rows, inner, columns), each = shape
    left = torch.randn((rows, inner), device=device, dtype=torch.bfloat16)
    right = torch.randn((inner, columns), device=device, dtype=torch.bfloat16)
    out = torch.mm(left, right)
    for _ in range(5 + round(seconds / each)):
        torch.mm(left, right, out=out)
    return torch.cuda.current_stream(device).record_event()
