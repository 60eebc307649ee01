"""The emulated network on one GPU, against its clock.

Needs no pytest where there is none: `python -m tests.gpu.test_emulated` runs the same tests.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import Work
from torch.nn.parallel import DistributedDataParallel

from shardwise.emulation.check import time_collective
from shardwise.emulation.collectives import Emulation, Network, emulate
from shardwise.emulation.exposure import Message
from shardwise.emulation.run import joined
from shardwise.engine import torch_private
from tests.gpu.standalone import run_all

DEVICE = torch.device("cuda", 0)
MIB = 2**20
WORLD = 8
ERROR = 0.03
IDLE_S = 6e-6  # that waits on an idle device take less or more


@contextmanager
def network(bandwidth: float, shared: bool = False, occupancy: int = 0) -> Iterator[Emulation]:
    with joined(1, WORLD), emulate(Network(bandwidth, 20e-6, shared), occupancy) as emulation:
        yield emulation


def test_collectives_take_the_modelled_time() -> None:
    """From 64 MiB to 1 GiB beside small matrix products, as in a step; shorter gathers may wait for
    room to copy. Long products leave copies none, so beside those only what has nothing to copy is
    timed, from 16 MiB on.
    """
    late = []
    with network(300e9) as emulation:
        for size in (4, 16, 64, 256, 1024):
            kinds = [("all_gather", "idle"), ("reduce_scatter", "idle"), ("all_reduce", "idle")]
            if size >= 16:
                kinds += [("all_reduce", "small"), ("all_reduce", "large")]
            if size >= 64:
                kinds += [("all_gather", "small"), ("reduce_scatter", "small")]
            for collective, load in kinds:
                modelled, taken = time_collective(emulation, DEVICE, collective, size * MIB, load)
                over = statistics.median(taken) - modelled
                if abs(over) >= ERROR * modelled + (IDLE_S if load == "idle" else 0):
                    late.append(f"{collective}, {size} MiB, {load}: {over * 1e6:+.1f} us")
    assert not late, late


def test_a_grouped_gather_delivers_and_takes_the_time_of_one() -> None:
    """Odd sizes and even ones (which are copied by wider reads), into one buffer in place."""
    for sizes in ((4 * MIB, 3 * MIB + 5, 7), (4 * MIB, 2 * MIB, 64)):
        full = torch.full((WORLD * sum(sizes),), -1.0, device=DEVICE)
        outputs = list(full.split([WORLD * size for size in sizes]))
        own = [output.view(WORLD, -1)[1] for output in outputs]
        values = [torch.rand(size, device=DEVICE) for size in sizes]
        with network(100e9) as emulation:
            for _ in range(2):  # the first builds the kernel
                for place, value in zip(own, values, strict=True):
                    place.copy_(value)
                emulation.links_of(DEVICE).delay(5e-3)
                with emulation.measure(DEVICE) as measured:
                    torch_private.all_gather_grouped(outputs, own, dist.group.WORLD).wait()
        for output, value in zip(outputs, values, strict=True):
            assert torch.equal(output.view(WORLD, -1), value.expand(WORLD, -1))
        (message,) = measured.messages
        assert abs(message.seconds / message.modelled_s - 1) < ERROR, message


def test_transfers_leave_the_multiprocessors_to_compute() -> None:
    """Products beside a transfer of their length take hardly longer than alone."""
    matrix = torch.randn((8192, 8192), device=DEVICE, dtype=torch.bfloat16)

    def products(work: Work | None) -> float:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for _ in range(16):
            torch.mm(matrix, matrix)
        ended.record()
        if work is not None:
            work.wait()
        torch.cuda.synchronize()
        return began.elapsed_time(ended)

    whole = torch.zeros(1024 * MIB // 4, device=DEVICE)
    with network(30e9):  # 63 ms, longer than the products
        dist.all_reduce(whole)
        alone, beside = [], []
        for _ in range(12):
            time.sleep(0.05)  # a device that rested runs at a higher clock rate
            alone.append(products(None))
            time.sleep(0.05)
            beside.append(products(dist.all_reduce(whole, async_op=True)))
    assert statistics.median(beside) < 1.03 * statistics.median(alone), (alone, beside)


def test_groups_that_share_a_link_share_its_time() -> None:
    """Two equal gathers at once over one link take as long as one after the other; over links of
    their own they take as long as one.
    """
    alone = Network(100e9, 20e-6).seconds(256 * MIB, WORLD)
    for shared, expected in ((True, 2 * alone - 20e-6), (False, alone)):
        with network(100e9, shared) as emulation:
            taken = [message.seconds for message in _gather_twice_at_once(emulation)]
            for seconds in taken:
                assert abs(seconds / expected - 1) < ERROR, (shared, taken, expected)


def _gather_twice_at_once(emulation: Emulation) -> list[Message]:
    groups = [dist.group.WORLD, dist.new_group(list(range(WORLD)))]
    whole = [torch.zeros(256 * MIB // 4, device=DEVICE) for _ in groups]
    part = torch.zeros(256 * MIB // 4 // WORLD, device=DEVICE)
    for _ in range(2):  # the first round makes the streams
        torch.cuda.synchronize()
        emulation.links_of(DEVICE).delay(5e-3)
        with emulation.measure(DEVICE) as measured:
            works = [
                torch_private.all_gather(output, part, group)
                for output, group in zip(whole, groups, strict=True)
            ]
            for work in works:
                work.wait()
    return measured.messages


def test_a_wait_of_the_compute_stream_is_exposed() -> None:
    """A gather behind which nothing computes is exposed in full; behind a longer product, not."""
    with network(100e9) as emulation:
        whole = torch.zeros(64 * MIB // 4, device=DEVICE)
        part = torch.zeros(64 * MIB // 4 // WORLD, device=DEVICE)
        matrix = torch.randn((8192, 8192), device=DEVICE, dtype=torch.bfloat16)
        exposed = {}
        for products in (0, 8):
            for _ in range(2):
                torch.cuda.synchronize()
                emulation.links_of(DEVICE).delay(5e-3)
                with emulation.measure(DEVICE) as measured:
                    work = torch_private.all_gather(whole, part, None)
                    for _ in range(products):
                        matrix @ matrix
                    work.wait()
            exposed[products] = measured.exposed_s
        modelled = Network(100e9, 20e-6).seconds(64 * MIB, WORLD)
        assert abs(exposed[0] / modelled - 1) < ERROR, (exposed, modelled)
        assert exposed[8] < 0.05 * modelled, (exposed, modelled)


def test_a_free_collective_takes_no_longer_than_its_copy() -> None:
    with network(1e9) as emulation:
        emulation.mode = "free"
        whole = torch.zeros(MIB, device=DEVICE)
        part = torch.full((MIB // WORLD,), 3.0, device=DEVICE)
        for _ in range(2):
            with emulation.measure(DEVICE) as measured:
                torch_private.all_gather(whole, part, None).wait()
        assert measured.messages[0].seconds < 1e-3
        assert measured.messages[0].modelled_s == 0
        assert bool((whole == 3.0).all())


def test_blocks_that_move_the_data_take_the_same_time_and_move_it() -> None:
    with network(100e9, occupancy=16) as emulation:
        part = torch.randn(16 * MIB // 4 // WORLD, device=DEVICE).bfloat16()
        whole = torch.zeros(WORLD * part.numel(), device=DEVICE, dtype=torch.bfloat16)
        own = torch.zeros_like(part)
        summed = whole.clone()
        late = defaultdict(list)
        for i in range(7):
            torch.cuda.synchronize()
            emulation.links_of(DEVICE).delay(5e-3)
            with emulation.measure(DEVICE) as measured:
                torch_private.all_gather(whole, part, None).wait()
                torch_private.reduce_scatter(own, whole, None).wait()
                dist.all_reduce(summed)
            for message in measured.messages if i else ():  # the first builds the kernels
                late[message.collective].append(message.seconds / message.modelled_s - 1)
        assert torch.equal(whole.view(WORLD, -1), part.expand(WORLD, -1))
        assert torch.equal(own, part)
        for collective, errors in late.items():
            allowed = ERROR + IDLE_S / Network(100e9, 20e-6).seconds(whole.nbytes, WORLD)
            assert abs(statistics.median(errors)) < allowed, (collective, errors)


def test_ddp_s_buckets_go_over_the_network() -> None:
    with network(10e9) as emulation:
        model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(8)]).to(DEVICE)
        wrapped = DistributedDataParallel(model, bucket_cap_mb=8)
        for _ in range(3):
            wrapped.zero_grad()
            emulation.sent.clear()
            emulation.links_of(DEVICE).delay(20e-3)
            with emulation.measure(DEVICE) as measured:
                wrapped(torch.randn(64, 1024, device=DEVICE)).square().mean().backward()
        assert emulation.sent["all_reduce"] == 8 * 4 * MIB
        modelled = sum(message.modelled_s for message in measured.messages)
        assert 0.5 * modelled < measured.exposed_s < 1.1 * modelled, (measured.exposed_s, modelled)


if __name__ == "__main__":
    run_all(globals())
