"""Feed-forward stack under hybrid sharding, with the all-reduce delayed to the last micro-batch.

Replicas whose micro-batches differ in cost wait for each other at every all-reduce. If the replicas
reduce only once per step, with the last micro-batch, a replica may be late in one micro-batch and
early in the next for free. The program is written for torch's API; `--engine` picks the import.

    torchrun --nproc-per-node 4 examples/ffn_stack.py                        # all-reduce each time
    torchrun --nproc-per-node 4 examples/ffn_stack.py --delay-all-reduce     # with the last alone
    torchrun --nproc-per-node 4 examples/ffn_stack.py --fsdp-only            # no replicas
    torchrun --nproc-per-node 4 examples/ffn_stack.py --delay-all-reduce --engine torch

The options are those of the benchmark that this is modelled on: without any, replicas all-reduce
with every micro-batch. `shardwise bench hsdp` compares all modes in one run. The sizes are small
enough for a laptop. `--real` sets those of the figures that benchmark is known for: 8 layers of
4096 x 14336 in float32, 4096 tokens, 5 steps of warm-up and 10 measured. With torch, four GPUs of
an 8 x H100 node were reported at 2146 ms per step delayed, 2699 hybrid and 2694 without replicas.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

REAL = {
    "hidden_dim": 4096,
    "intermediate_dim": 14336,
    "num_layers": 8,
    "seqlen": 4096,
    "warmup_steps": 5,
    "measured_steps": 10,
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--engine", choices=("shardwise", "torch"), default="shardwise", help="whose fully_shard")
    add("--mesh", metavar="RxS", help="replicas x shards (two replicas if the ranks are even)")
    add("--delay-all-reduce", action="store_true", help="replicas reduce with the last micro-batch")
    add("--fsdp-only", action="store_true", help="no replicas: all ranks are one shard group")
    add("--accum-steps", type=int, default=2, help="micro-batches per step (2)")
    add(
        "--batch-size-ratio",
        type=int,
        default=2,
        help="rows of a large micro-batch; a small one has 1 (2)",
    )
    add("--sync-batch-sizes", action="store_true", help="replicas have large ones together")
    add("--real", action="store_true", help=f"the real sizes: {REAL}")
    add("--hidden-dim", type=int, default=64, help="hidden width (64)")
    add("--intermediate-dim", type=int, default=224, help="feed-forward width (224)")
    add("--num-layers", type=int, default=8, help="layers, each one unit (8)")
    add("--seqlen", type=int, default=128, help="tokens per row (128)")
    add("--warmup-steps", type=int, default=2, help="steps before the clock starts (2)")
    add("--measured-steps", type=int, default=5, help="measured steps (5)")
    args = parser.parse_args()
    if args.real:
        parser.set_defaults(**REAL)
        args = parser.parse_args()
    if args.fsdp_only and (args.delay_all_reduce or args.mesh):
        parser.error("--fsdp-only has no replicas: no --delay-all-reduce and no --mesh with it")
    return args


class Gated(nn.Module):
    """A gated feed-forward layer with its residual."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def rows_of(args: argparse.Namespace, micro_batch: int, replica: int) -> int:
    """Small and large micro-batches alternate, and neighbouring replicas are out of step."""
    turn = micro_batch if args.sync_batch_sizes else micro_batch + replica
    return args.batch_size_ratio if turn % 2 else 1


def main() -> None:
    args = parse()
    if args.engine == "torch":
        from torch.distributed.fsdp import fully_shard
    else:
        from shardwise import fully_shard

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    replicas = 1 if args.fsdp_only or world % 2 else 2
    if args.mesh:
        replicas, shards = map(int, args.mesh.split("x"))
        if replicas * shards != world:
            raise SystemExit(f"--mesh {args.mesh} does not make {world} ranks")
    if replicas == 1:
        mesh = init_device_mesh(device.type, (world,))
        replica = rank // max(1, world // 2)  # the same uneven work as with two replicas
    else:
        mesh = init_device_mesh(
            device.type, (replicas, world // replicas), mesh_dim_names=("replicate", "shard")
        )
        replica = mesh.get_local_rank("replicate")

    torch.manual_seed(0)
    model = nn.Sequential(
        *(Gated(args.hidden_dim, args.intermediate_dim) for _ in range(args.num_layers))
    ).to(device)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    times: list[float] = []
    tokens = 0
    torch.manual_seed(rank)
    for step in range(args.warmup_steps + args.measured_steps):
        dist.barrier()
        if cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        model.zero_grad()
        for i in range(args.accum_steps):
            if args.delay_all_reduce and replicas > 1:
                model.set_requires_all_reduce(i == args.accum_steps - 1)
            rows = rows_of(args, i, replica)
            x = torch.randn(rows, args.seqlen, args.hidden_dim, device=device)
            (model(x).square().mean() / args.accum_steps).backward()
            tokens += rows * args.seqlen if step >= args.warmup_steps else 0
        if cuda:
            torch.cuda.synchronize()
        if step >= args.warmup_steps:
            times.append(1e3 * (time.perf_counter() - began))

    summed = torch.tensor([sum(times), float(tokens)], device=device)
    dist.all_reduce(summed)
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    if rank == 0:
        mode = "FSDP" if replicas == 1 else "HSDP"
        mode += ", delayed all-reduce" if args.delay_all_reduce and replicas > 1 else ""
        spread = statistics.stdev(times) if len(times) > 1 else 0.0
        speed = 1e3 * summed[1].item() / summed[0].item()
        print(f"{args.engine} | {mode} | mesh {'x'.join(map(str, mesh.shape))} | norm {norm:.5e}")
        print(f"{statistics.mean(times):.1f} ± {spread:.1f} ms per step", end=" | ")
        print(f"{speed:,.0f} tokens/s per rank")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
