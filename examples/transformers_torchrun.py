"""Train an unmodified Hugging Face Transformers model, sharded, under plain torchrun.

The model is a small Llama made from a config (nothing is downloaded) and learns to count: each row
is a start and a stride, and the next token is the last plus the stride. The program is written for
torch's `fully_shard`; only the import says whose engine runs it, and both print the same losses.

    torchrun --nproc-per-node 2 examples/transformers_torchrun.py
    torchrun --nproc-per-node 2 examples/transformers_torchrun.py --engine torch
    torchrun --nproc-per-node 8 examples/transformers_torchrun.py --layers 32 --hidden 4096 --bf16

GPUs and NCCL are used where there are any, otherwise CPU ranks and gloo.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--engine", choices=("shardwise", "torch"), default="shardwise", help="whose fully_shard")
    add("--steps", type=int, default=20, help="optimizer steps (20)")
    add("--accumulate", type=int, default=2, help="micro-batches per step (2)")
    add("--batch", type=int, default=8, help="rows per micro-batch and rank (8)")
    add("--seq", type=int, default=16, help="tokens per row (16)")
    add("--layers", type=int, default=3, help="decoder layers, each one unit (3)")
    add("--hidden", type=int, default=64, help="width (64)")
    add("--vocabulary", type=int, default=61, help="tokens the model knows (61)")
    add("--lr", type=float, default=1e-2, help="AdamW's learning rate (1e-2)")
    add("--bf16", action="store_true", help="compute in bfloat16, keep and reduce in float32")
    add("--save", metavar="FOLDER", help="write a whole, unsharded Transformers checkpoint here")
    return parser.parse_args()


def counting_rows(args: argparse.Namespace, step: int, rank: int) -> torch.Tensor:
    """Rows of this rank's micro-batch: the same for every engine, different for every rank."""
    generator = torch.Generator().manual_seed(1_000_003 * rank + step)
    start = torch.randint(0, args.vocabulary, (args.batch, 1), generator=generator)
    stride = torch.randint(1, 4, (args.batch, 1), generator=generator)
    return (start + stride * torch.arange(args.seq)) % args.vocabulary


def main() -> None:
    args = parse()
    if args.engine == "torch":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    else:
        from shardwise import MixedPrecisionPolicy, fully_shard

    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl")
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (world,))

    torch.manual_seed(0)  # all ranks must start from the same values
    config = LlamaConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to(device)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if args.bf16 else None
    settings = {"mesh": mesh, **({"mp_policy": policy} if policy else {})}
    for layer in model.model.layers:
        fully_shard(layer, **settings)
    fully_shard(model, **settings)  # embedding, last norm and head: what no layer has taken
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)  # after sharding

    model.train()
    began = time.perf_counter()
    for step in range(args.steps):
        total = torch.zeros((), device=device)
        for i in range(args.accumulate):
            # Gradients travel with the last micro-batch only.
            model.set_requires_gradient_sync(i == args.accumulate - 1)
            rows = counting_rows(args, step * args.accumulate + i, rank).to(device)
            loss = model(input_ids=rows, labels=rows).loss / args.accumulate
            loss.backward()  # averaged over ranks, as in torch
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        dist.all_reduce(total)
        if rank == 0 and (step % 10 == 0 or step == args.steps - 1):
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            print(f"step {step:>3}  loss {total.item() / world:.4f}  norm {norm.item():.3f}")
    took = time.perf_counter() - began
    tokens = args.steps * args.accumulate * args.batch * args.seq
    if rank == 0:
        local = sum(p.to_local().numel() for p in model.parameters())
        whole = sum(p.numel() for p in model.parameters())
        print(f"{args.engine}: rank 0 keeps {local:,} of {whole:,} parameters")
        print(f"{1e3 * took / args.steps:.1f} ms per step, {tokens / took:,.0f} tokens/s per rank")

    if args.save:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(model, options=options)  # whole on rank 0, empty elsewhere
        if rank == 0:
            plain = LlamaForCausalLM(config)
            plain.load_state_dict(state)
            plain.save_pretrained(args.save)
            print(f"saved to {args.save}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
