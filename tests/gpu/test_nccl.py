"""NCCL's own calls on one GPU, which a group of one rank can make.

Needs no pytest where there is none: `python -m tests.gpu.test_nccl` runs the same tests.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from shardwise.engine import torch_private
from shardwise.engine.collectives import Group

DEVICE = torch.device("cuda", 0)
SIZES = (2**20, 3 * 2**18 + 5, 7)


def test_a_grouped_gather_is_one_call_in_place_and_out_of_place() -> None:
    """Also behind work of another stream: `wait` orders the stream that calls it."""
    torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=DEVICE)
    try:
        group = Group("shard", dist.group.WORLD, 1, 0, None)
        assert group.groups_calls(DEVICE)
        for in_place in (True, False):
            outputs = [torch.zeros(size, device=DEVICE) for size in SIZES]
            inputs = outputs if in_place else [torch.empty_like(output) for output in outputs]
            lane = torch.cuda.Stream(DEVICE)
            with torch.cuda.stream(lane):
                torch.cuda._sleep(10_000_000)
                torch._foreach_add_(inputs, 3.0) if in_place else [x.fill_(3.0) for x in inputs]
                torch_private.all_gather_grouped(outputs, inputs, dist.group.WORLD).wait()
                sums = [output.sum() for output in outputs]
            torch.cuda.current_stream(DEVICE).wait_stream(lane)
            assert [float(x) for x in sums] == [3.0 * size for size in SIZES]
    finally:
        dist.destroy_process_group()


def main() -> int:
    test_a_grouped_gather_is_one_call_in_place_and_out_of_place()
    print("ok")
    return 0


if __name__ == "__main__":
    sys.exit(main())
