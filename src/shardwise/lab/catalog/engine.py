"""Benchmarks of the engine, its kernels and its planner."""

from __future__ import annotations

from pathlib import Path

from shardwise.lab.benchmark import COMMIT, JSON, PLOT, QUICK, ROWS, Benchmark
from shardwise.lab.options import Option, count, file, flag, link_rate, list_counts, list_names

STEP = Benchmark(
    "step",
    "time, host time and memory of one training step",
    "Times whole training steps: zero_grad, forward, backward, optimizer.",
    "steps.compare",
    (
        Option("--against", {"choices": ["torch"], "default": "torch",
                             "help": "the peer (default: torch)"}),
        *ROWS,
        list_names("--cases", "case", ("fake8", "gloo2", "h200", "graph", "static")),
        list_names("--strategies", "strategy", ("zero3", "zero2", "zero1", "ddp"), None,
               "of zero3, zero2, zero1, ddp; default: all that a case has"),
        Option("--through", {"choices": ["plan", "fully_shard"], "default": "plan",
                             "help": "how shardwise is used: by a Plan, or by torch's own program "
                             "with only the import of fully_shard changed (default: plan)"}),
        count("--steps", None, "timed steps of each candidate"),
        Option("--only", {"metavar": "TEXT", "help": "cases that have this in their names"}),
    ),
    """\
cases:
  fake8   CPU, one rank of 8, nothing is sent: many small parameters, so what counts is the
          engines' own Python. zero3 and zero2 against fully_shard
  gloo2   CPU, two real ranks: zero3 against fully_shard, ddp against DistributedDataParallel,
          zero1 against that with ZeroRedundancyOptimizer. Both must agree to 1e-5 after three
          steps, else nothing is timed
  h200    GPU, 0.95 B parameters in bf16, one rank of an emulated 8-rank group, three networks.
          Skipped without a CUDA device; its figures are labelled `emulated`
  graph   GPU, the same model as compiled graphs (sw.compile) against fully_shard over compiled
          blocks; skipped without a CUDA device
  static  GPU: sw.capture against fully_shard as it is; beside them fully_shard in a plain
          torch.cuda.graph, our engine uncaptured and with an arena; the language model, a GPT-2
          medium and a mixture of experts, the first also over compiled blocks; allocated and
          reserved bytes with each alone in a process

Both engines train the same model on the same inputs with the same fused AdamW, in turn, in one run;
figures are medians, with the interquartile range after +-. Ratios are shardwise over torch: below 1
is better. `cpu` is the time until the step's call returns, `memory` the peak of a step.

examples:
  shardwise bench step --against torch
  shardwise bench step --cases fake8 --strategies zero3 --steps 100
  shardwise bench step --cases h200 --json step-h200.json
  shardwise bench step --cases static --only moe --json step-static.json --resume
  shardwise bench step --through fully_shard
  shardwise bench step --quick            every path in seconds; its figures mean nothing
""",
)  # fmt: skip
PEERS = Benchmark(
    "peers",
    "a training step against DDP, FSDP1, FSDP2, ZeroRedundancyOptimizer and DeepSpeed",
    "Times whole training steps of shardwise and of every other engine of its kind, in turn.",
    "peers.run",
    (
        *ROWS,
        list_names("--cases", "case", ("gloo", "hosts", "h200"), "gloo,h200"),
        list_counts("--ranks", "2,4", 2, "of the gloo cases; default: %(default)s"),
        list_names("--peers", "peer",
                   ("ddp", "zero-redundancy", "fsdp1", "fsdp2", "deepspeed")),
        list_names("--classes", "class",
                   ("replicate", "optimizer", "gradients", "parameters", "hybrid"), None,
                   "of replicate, optimizer, gradients, parameters, hybrid; default: all, on a GPU "
                   "parameters"),
        list_names("--models", "model", ("lm", "gpt2", "moe")),
        count("--steps", None, "timed steps of each candidate"),
        link_rate("1gbit"),
        Option("--only", {"metavar": "TEXT", "help": "cases that have this in their names"}),
    ),
    """\
classes, and who is in them:
  replicate   ddp: DDP with its defaults, DDP with gradients as views of its buckets, FSDP1 NO_SHARD
  optimizer   zero1: DDP with ZeroRedundancyOptimizer, DeepSpeed ZeRO-1
  gradients   zero2: FSDP1 SHARD_GRAD_OP, FSDP2 with reshard_after_forward=False, DeepSpeed ZeRO-2
  parameters  zero3: FSDP1 FULL_SHARD, FSDP2, DeepSpeed ZeRO-3
  hybrid      hsdp of 2 replicas: FSDP1 HYBRID_SHARD, FSDP2 on a 2-D mesh; from 4 ranks on

cases:
  gloo   CPU, real ranks: the reference model, a GPT-2 with biases and a tied embedding, a mixture
         of experts with many small parameters
  hosts  the same on two hosts of two ranks: network namespaces of this machine, a cable of RATE
         between them, torchrun on each (root and iproute2). Only where asked for
  h200   GPU, one rank of an emulated group of 8 and 128, 300 to 25 GB/s, the same models at size,
         eager and compiled blocks, against FSDP1 and FSDP2. Skipped without a CUDA device

All candidates of a class train the same model on the same inputs with the same fused AdamW. On real
ranks they must agree to 1e-5 after three steps, else a peer is not timed. A peer that is not
installed is left out, and the file says so. Medians; +- of a ratio is the interquartile range of
the rounds' ratios. `device` is by the GPU's clock with the host a step ahead.

examples:
  shardwise bench peers --json peers.json
  shardwise bench peers --ranks 2 --classes replicate --models lm
  shardwise bench peers --cases hosts --rate 1gbit --json peers-hosts.json
  shardwise bench peers --cases h200 --only 8-lm --json peers-h200.json --resume
""",
)  # fmt: skip
GROWTH = Benchmark(
    "growth",
    "how host time grows with a model's blocks and a world's ranks",
    "Times the host's own work for 8 to 512 blocks and 8 to 4,096 ranks that are not there:\n"
    "collectives return at once. Linear in the blocks and flat in the ranks is what it should be.",
    "growth",
    (*ROWS, count("--steps", 7, "timed steps of each way; default: %(default)s")),
    """\
Three ways in turn: a Plan (zero3), shardwise's fully_shard, torch's. Then how long each takes to
shard 512 blocks among 4,096 ranks, the first step, and what both add to the process's memory; how
long a search over plans takes, and a report of a predicted step. Times are the process's own on the
processor: nothing waits, and neighbours count for less. Values mean nothing, so there is no parity
to check here: tests/parity does that on real ranks.

examples:
  shardwise bench growth --json growth.json --plot growth.svg
  shardwise bench growth --quick
""",
)
GATHER = Benchmark(
    "gather",
    "gathers on 2 gloo ranks: packed against one call per tensor",
    "Times forward and backward under zero3 on two real CPU ranks, by gather mode and tensor size. "
    "Its result is what gather='auto' follows on gloo.",
    "steps.gather",
    (JSON, PLOT, QUICK, COMMIT, count("--rounds", 15)),
)
ATTENTION = Benchmark(
    "attention",
    "attention, backend against backend, on a CUDA device",
    "Times forward, backward and both per backend, dtype, width and length. A backend is first "
    "compared with float64; one that differs is not timed.",
    "attention.sweeps",
    (
        *ROWS,
        list_names("--sweeps", "sweep", ("heads", "table7", "tables45")),
        Option(
            "--shapes",
            {
                "choices": ["sweeps", "untuned"],
                "default": "sweeps",
                "help": "those of --sweeps, or drawn ones that no table was made for; "
                "default: %(default)s",
            },
        ),
    ),
    """\
sweeps:
  heads     16 heads, bf16, causal, 8,192 to 65,536 tokens: Triton, torch's flash, cuDNN
  table7    one head, causal, 128 to 131,072 tokens, bf16 and fp32, plain torch too
  tables45  batch 8, fp32, not causal, 256 to 16,384 tokens: plain torch, eager and compiled

The tables are those of the document that this project started from; its figures stand beside.

--shapes untuned: 60 shapes, bf16, of batch 1 to 32, 8 to 64 heads in groups of 1 to 8, widths 32 to
256 and 512 to 65,536 tokens, causal or not, with windows and segments, drawn by a seeded generator:
what the default takes, against every backend that can, in turn.

examples:
  shardwise bench attention --shapes untuned --json attention-untuned.json
  shardwise bench attention --json attention.json --plot attention.svg
  shardwise bench attention --sweeps heads --budget 60 --json attention.json --resume
""",
    document="assignment",
)
PROFILE = Benchmark(
    "profile",
    "what profiling costs: steps with it on and off",
    "Times steps of zero3 with the profiler on and off, in turn, on two real CPU ranks and, where "
    "there is one, on a CUDA device as a rank of an emulated group.",
    "steps.profiling",
    (
        JSON,
        PLOT,
        QUICK,
        list_names("--cases", "case", ("gloo2", "h200")),
        count("--rounds", None, "of three steps each way"),
        COMMIT,
    ),
    """\
`on` is a step that a profile times. `ratio` is that of the medians, `paired` the median of the
rounds' ratios; `traced` is what a traced step takes of one without. The last column is what the
marks cost when no profile listens.
""",
)
USER_MODELS = (
    "gpt2", "bert", "t5", "vit", "resnet", "experts", "unet", "lstm", "tied", "narrow", "lora",
    "long", "compiled",
)  # fmt: skip
ACCURACY = Benchmark(
    "accuracy",
    "how well the planner predicts step time and memory",
    "Compares predictions with reported and with measured figures.",
    "accuracy.run",
    (
        JSON,
        PLOT,
        list_names("--cases", "case", ("reported", "published", "shipped", "gloo", "h200")),
        flag("--simulated", "only what needs no accelerator and no other rank"),
        file("--docs", "write the page of results here"),
        Option("--beside", {"type": Path, "nargs": "*", "default": [], "metavar": "FILE",
                            "help": "results of other machines: the page shows them too, and "
                            "`shipped` predicts them"}),
        Option("--cluster", {"default": "h200x8-measured", "metavar": "NAME",
                             "help": "of shipped; default: %(default)s"}),
        QUICK,
        flag("--busy", "gloo: other programs run here; take quickest samples"),
        Option("--device", {"default": "", "metavar": "NAME", "help": "of h200; default: cuda"}),
        flag("--as-user", "models of others through `plan --measure`, then trained; see below"),
        list_names("--only", "model", USER_MODELS, None, "--as-user: these models; default: all"),
        flag("--resume", "--as-user: keep the rows that FILE has (the others always are)"),
        Option("--budget", {"type": float, "metavar": "S",
                            "help": "--as-user: start no model after S seconds"}),
        COMMIT,
    ),
    """\
parts:
  reported  no hardware: figures that others measured (an HSDP step on 4 GPUs, optimizer sharding
          on 8, a graph-level schedule on 128), predicted from cluster constants with their sources
  published  no hardware: throughputs that others published of full-shard steps on 8 to 128 H100s
          (torchtitan, llm-foundry, lingua), beside `plan`'s range; those that derate h100x8's
          rates are shown apart from those that nothing was set by
  shipped no hardware: the GPU's configurations that a file of --beside has measurements of, as
          `shardwise plan` predicts them: from a packaged cluster file (--cluster) and nothing of
          the run they are compared with
  gloo    two real CPU ranks: calibrates this machine, predicts a step of ddp, zero1, zero2 and
          zero3, then measures it
  h200    one GPU: times its copies and host alone, replays a model's kernels without the engine,
          then predicts and measures training steps of one rank of an emulated 8-rank group.
          `build` rows corrected the model, `held-out` rows are the claim. Skipped without a CUDA
          device

Rows are written as they come; run the same command again to go on after an interruption. With
--docs, docs/accuracy.md and its plot are written from the file.

--as-user (--cases gloo, h200) plans models of others (GPT-2, BERT, T5, ViT, ResNet, experts,
U-Net, LSTM, and language models: tied, narrow, with adapters, of a long sequence, compiled) by
their names, as `shardwise plan --model MODULE:FUNCTION` does, without and with --measure. Then the
best Plan of ddp, zero2 and zero3, and one that was not tried, really train: on a GPU one rank of 8
emulated ones, over gloo two ranks. A model that fails says so in its row; --resume tries it again.
--docs writes docs/accuracy-as-user.md.

examples:
  shardwise bench accuracy --simulated --json accuracy.json
  shardwise bench accuracy --cases shipped --beside benchmarks/results/accuracy-h200.json
  shardwise bench accuracy --cases h200 --json accuracy.json
  shardwise bench accuracy --json accuracy.json --docs docs/accuracy.md
  shardwise bench accuracy --as-user --cases h200 --json as-user.json --resume
""",
)  # fmt: skip
CAP = Benchmark(
    "cap",
    "peak memory with compute capped between reduce-scatters",
    "Runs the compiled step of a recomputing Llama-3 8B, one rank of data parallel 16 x tensor "
    "parallel 8, with its runs of compute uncapped, capped at 8 and in their original order.",
    "steps.capping",
    (*ROWS, count("--layers", 8), count("--bucket-mib", 48), count("--window", 50)),
    """\
Kernels and memory are real, collectives are answered at once. Without a CUDA device: a small model
on the host, its nodes run as they are.

examples:
  shardwise bench cap --json cap.json
  shardwise bench cap --quick
""",
    document="buckets",
)
BYTES = Benchmark(
    "bytes",
    "fewer bytes on the wire: loss curves, bytes, and steps over a slow network",
    "Trains a small model plain and with each way to send fewer bytes, counts what a step of the\n"
    "reference model sends, and on a CUDA device times steps over an emulated 50 GB/s.",
    "levers",
    (
        *ROWS,
        list_names("--parts", "part", ("bytes", "curve", "step")),
        count("--steps", 300, "that each run learns; default: %(default)s"),
    ),
    """\
parts:
  bytes   counted by the schedule: one rank of 8, the reference model of 0.95 B parameters
  curve   two gloo ranks, the built-in corpus, three seeds plain and with each lever. A lever is
          `inside` if its mean curve is no farther from the plain one than the seeds' standard
          deviation, both over the second half; `beyond`: points outside of all plain seeds
  step    GPU, one rank of an emulated group of 8 at 50 GB/s: torch's fully_shard, ours plain, ours
          with each lever, in turn. Skipped without a CUDA device

examples:
  shardwise bench bytes --json bytes.json --plot bytes.svg
  shardwise bench bytes --parts step --json bytes.json --resume
  shardwise bench bytes --quick
""",
)
SOAK = Benchmark(
    "soak",
    "thousands of captured steps: memory that must not grow, losses that must be eager's",
    "Trains a small language model by sw.capture with new inputs, another learning rate and\n"
    "clipping in every step, and looks at the memory every 1,000 steps.",
    "steps.soak",
    (
        *ROWS,
        count("--steps", 20_000, "captured; default: %(default)s"),
        count("--eager", 2_000, "of them the first, once more eagerly; default: %(default)s"),
    ),
    """\
runs:
  nccl1      the only rank of an NCCL group
  emulated8  one rank of 8, a free network, memory="arena"; its values are made up

An eager twin takes the first steps, and after the last one another twin takes over parameters and
optimizer state and goes on beside the captured step: `differ` counts losses that differ in any bit.
Without a CUDA device nothing is captured, and only the path is tried.

examples:
  shardwise bench soak --json soak.json
  shardwise bench soak --eager 20000 --json soak.json
  shardwise bench soak --quick
""",
)
ARENA = Benchmark(
    "arena",
    "memory of steps in an arena: predicted, said by explain, and taken",
    'Predicts the memory of a step with memory="arena" for models of others, then runs it.',
    "accuracy.arena",
    (
        *ROWS,
        list_names("--models", "model", tuple(m for m in USER_MODELS if m != "compiled")),
    ),
    """\
Models are those of `bench accuracy --as-user`. Each is described from its code and example inputs,
without a trial; then one rank of an emulated group of 8 trains it (zero3, bf16, fused AdamW).

  predicted  the peak of allocated bytes, and measured; cuBLAS's own workspace is in neither
  block      the arena: as `explain` says it, as the prediction has it, as the engine took it

Without a CUDA device small models run on the host, and only blocks are compared.

examples:
  shardwise bench arena --json arena.json --resume
  shardwise bench arena --models t5,lora
  shardwise bench arena --quick
""",
)
BENCHMARKS = (STEP, PEERS, GROWTH, GATHER, ATTENTION, PROFILE, ACCURACY, CAP, BYTES, SOAK, ARENA)
