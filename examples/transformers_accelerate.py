"""Train an unmodified Hugging Face Transformers model under Accelerate, on shardwise's engine.

Accelerate calls torch's `fully_shard` itself, so there is no import to change. Instead,
`shardwise.replace_torch_fully_shard()`, called before `accelerator.prepare`, puts shardwise's in
its place. All the rest is an ordinary Accelerate program; with `--engine torch` the call is left
out and the losses are the same. The model is a small Llama made from a config; nothing is
downloaded.

    torchrun --nproc-per-node 2 examples/transformers_accelerate.py
    accelerate launch --num-processes 8 examples/transformers_accelerate.py --layers 32

Accelerate offers its FSDP plugin on GPUs only. Where there is none this example tells it otherwise
(see `use_plugin_on_cpu`), so that you can watch it run on CPU ranks with gloo.
"""

from __future__ import annotations

import argparse
import time

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, PartialState
from accelerate.utils import DistributedType
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

import shardwise


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
    return parser.parse_args()


def counting_rows(args: argparse.Namespace, count: int) -> TensorDataset:
    """Rows that count up from a random start with a random stride."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randint(0, args.vocabulary, (count, 1), generator=generator)
    stride = torch.randint(1, 4, (count, 1), generator=generator)
    return TensorDataset((start + stride * torch.arange(args.seq)) % args.vocabulary)


def use_plugin_on_cpu(accelerator: Accelerator, plugin: FullyShardedDataParallelPlugin) -> None:
    """What Accelerate does by itself for several GPUs. It takes over PartialState's type again with
    each object that it wraps.
    """
    PartialState().distributed_type = accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin


def main() -> None:
    args = parse()
    if args.engine == "shardwise":
        shardwise.replace_torch_fully_shard()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    on_cpu = not torch.cuda.is_available()
    accelerator = Accelerator(
        fsdp_plugin=plugin, gradient_accumulation_steps=args.accumulate, cpu=on_cpu
    )
    if on_cpu:
        torch.set_num_threads(1)
        use_plugin_on_cpu(accelerator, plugin)

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
    model = LlamaForCausalLM(config)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    micro_batches = args.steps * args.accumulate
    rows = counting_rows(args, micro_batches * args.batch * accelerator.num_processes)
    model, opt, loader = accelerator.prepare(model, opt, DataLoader(rows, batch_size=args.batch))

    model.train()
    step, total = 0, torch.zeros((), device=accelerator.device)
    began = time.perf_counter()
    for (batch,) in loader:
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)  # Accelerate divides by the number of micro-batches
            total += loss.detach() / args.accumulate
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
        if accelerator.sync_gradients:
            mean = accelerator.reduce(total, reduction="mean").item()
            if step % 10 == 0 or step == args.steps - 1:
                accelerator.print(f"step {step:>3}  loss {mean:.4f}")
            step, total = step + 1, torch.zeros_like(total)
    took = time.perf_counter() - began
    local = sum(p.to_local().numel() for p in model.parameters())
    whole = sum(p.numel() for p in model.parameters())
    tokens = micro_batches * args.batch * args.seq
    engine = "shardwise" if isinstance(model, shardwise.FSDPModule) else "torch"
    accelerator.print(f"{engine}: rank 0 keeps {local:,} of {whole:,} parameters")
    accelerator.print(
        f"{1e3 * took / args.steps:.1f} ms per step, {tokens / took:,.0f} tokens/s per rank"
    )
    state = accelerator.get_state_dict(model)  # whole, on rank 0
    kinds = {type(tensor).__name__ for tensor in state.values()}
    accelerator.print(f"state dict: {len(state)} of {', '.join(kinds)}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
