"""The paper exercises of the documents this project began from, worked out and printed.

`show(name)` gives the text of one: the formula, the figures, the document's answer, and where that
is wrong, what is right and why. The functions behind them are in `memory.py` and
`time.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from shardwise.description.cluster import Cluster
from shardwise.description.preset import load_preset
from shardwise.errors import UserError, nearest
from shardwise.lab.paper import memory, time
from shardwise.lab.paper.memory import GB, GIB

LECTURE_UNIT = 0.9e9  # parameters of one block of a 70 B model, as the lecture rounds it
V5P_BYTES = 95 * GB
# Seed 004: the naive data-parallel step of the XL model on 2 H100 spent this on gradients.
XL_REDUCE_S = 0.0681
CALL_S = 30e-6  # issuing one collective; see the cluster files


def show(name: str) -> str:
    """The text of one exercise."""
    if name not in _EXERCISES:
        raise UserError(f"unknown exercise {name!r}{nearest(name, NAMES)}")
    return _EXERCISES[name]()


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as they need be; the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        first = f"{cells[0]:<{widths[0]}}"
        rest = (f"{cell:>{width}}" for cell, width in zip(cells[1:], widths[1:], strict=True))
        return "  " + "  ".join([first, *rest]).rstrip()

    return [line(head), *[line(row) for row in rows]]


def _lecture_memory() -> str:
    rows = [
        (f"{p / 1e9:.0f} B", f"{memory.static_state_bytes(p) / GB:,.0f} GB") for p in (7e9, 70e9)
    ]
    lines = [
        "Static training state in mixed precision (FSDP lecture)",
        "  12 bytes for fp32 weights and two moments, 2 for the 16-bit weights, 2 for gradients",
        *_table(("model", "state"), rows),
        "The document: 112 GB and 1.1 TB. Right.",
        "",
        "70 B fully sharded, one block of 0.9 B parameters at work",
    ]
    states = [memory.sharded_state(70e9, n, LECTURE_UNIT) for n in (128, 1280)]
    parts = (
        ("fp32 weights", "master"),
        ("first moment", "first_moment"),
        ("second moment", "second_moment"),
        ("gathered 16-bit weights", "full_weights"),
        ("16-bit gradients", "full_gradients"),
        ("as listed", "listed"),
        ("reduced fp32 gradients", "gradients"),
        ("in all", "total"),
    )
    table = [
        (label, *(f"{getattr(state, field) / GB:.2f} GB" for state in states))
        for label, field in parts
    ]
    lines += _table(("per GPU", "128 GPUs", "1,280 GPUs"), table)
    lines += [
        "The document: 2.1 + 2.1 + 2.1 + 1.8 + 1.8 GB (2.19, cut off); and 'almost 0' for the",
        "shards on 1,280 GPUs, which are 0.66 GB together. It leaves out the reduced gradients",
        "that each rank keeps until the optimizer's step. One of 80 blocks has 0.875 B parameters.",
    ]
    return "\n".join(lines)


def _strategy_bytes() -> str:
    parameters, ranks = 70e9, 128
    lines = [f"Bytes per rank and step, 70 B parameters on {ranks} GPUs (FSDP lecture)"]
    for title, gather, reduce in (
        ("16-bit gathers, 16-bit reduce", 2, 2),
        ("16-bit gathers, fp32 reduce", 2, 4),
    ):
        found = memory.strategy_bytes(
            parameters, ranks, gather_bytes=gather, reduce_bytes=reduce, groups=16
        )
        rows = [
            (r.strategy, f"{r.sent / GB:,.0f} GB", f"{r.relative:.2f}", f"{r.state / GB:,.1f} GB")
            for r in found
        ]
        lines += [title, *_table(("strategy", "sent", "to ddp", "state kept"), rows)]
    lines += [
        "The document: 1, 1 and 1.5 for NO_SHARD, SHARD_GRAD_OP and FULL_SHARD. Right while both",
        "directions have one dtype; reducing in fp32 and gathering in 16 bit makes it 1, 0.75, 1.",
        "hsdp here is 16 groups of 8: zero3 inside a group, an all-reduce of the shards across.",
    ]
    return "\n".join(lines)


def _accounting_a() -> str:
    model = memory.xxl()
    state, token = memory.block_stack_state_bytes(model), memory.block_stack_saved_bytes(model, 1)
    usable = Cluster.load("h100x8").device.memory_bytes
    rows = [
        ("80 GB, as sold", str(memory.devices_for(state, 80 * GB))),
        ("79.1 GiB, as torch sees it", str(memory.devices_for(state, usable))),
        ("80 GiB, which none has", str(memory.devices_for(state, 80 * GIB))),
    ]
    return "\n".join(
        [
            "Communication accounting (a): one device (assignment)",
            f"  parameters 2 x 16384 x 53248 x 126 = {model.parameter_count:,}",
            f"  state 16 P = {state / GB:,.1f} GB = {state / GIB:,.0f} GiB",
            f"  kept for backward 2 L (d_model + d_ff) = {token / 1e6:.2f} MB a token "
            f"({token / GIB:.3f} GiB); {token * 4096 / GB:,.1f} GB for 4,096 tokens",
            *_table(("H100", "devices"), rows),
            "The document: 3276 GiB (right), 0.016 GiB (right, for one token), 41 H100s: wrong.",
            "It divides GiB by GB. 3276 GiB is 3518 GB: 44 devices of 80 GB, or 42 of the 79.1 GiB",
            "that an H100 really offers; and the state alone fills them.",
        ]
    )


def _accounting_b() -> str:
    model = memory.xxl()
    rows = []
    for tokens in (1, 1024, 4096):
        shards = memory.shards_for(model, tokens, V5P_BYTES)
        need = memory.per_device_bytes(model, shards, tokens)
        rows.append((f"{tokens:,}", str(shards), f"{need / GB:.1f} GB"))
    gib = memory.shards_for(model, 1, 95 * GIB)
    return "\n".join(
        [
            "Communication accounting (b): shards for 95 GB (assignment)",
            "  per device 16 P / n + A / 2 + A / (2 n), A = 2 L (d_model + d_ff) bytes a token:",
            "  half of the activations is sharded, the other half is whole",
            *_table(("tokens", "shards", "each holds"), rows),
            "The document: n > 34. Wrong twice: it divides GiB by GB, and its own 34.5 needs 35.",
            f"With 95 GB it is {rows[0][1]} (37 would take 95.08 GB); with 95 GiB, {gib}.",
            "It also counts half of the activations as L d_model, without d_ff and without bytes;",
            "with one token that is lost in the rounding, with 4,096 it decides.",
        ]
    )


def _accounting_c() -> str:
    chip = time.Chip.of(Cluster.load("tpu-v5p"))
    layer = time.Layer(16384, 53248, x=16, y=4, axes_x=2, axes_y=1)
    chips = layer.x * layer.y
    plain = time.critical_batch(layer, chip)
    overlapped = time.critical_batch(layer, chip, overlap_axes=True)
    rows = [
        ("one after the other", f"{plain:,.0f}", f"{plain / chips:.0f}"),
        ("at the same time", f"{overlapped:,.0f}", f"{overlapped / chips:.0f}"),
    ]
    return "\n".join(
        [
            "Communication accounting (c): compute-bound batch, FSDP 16 x TP 4 on v5p (assignment)",
            "  math 4 B D F / (N C) >= gather 4 D F / (Y W M_X) + exchange 4 B D / (X W M_Y)",
            f"  alpha = C / W = {chip.alpha:.0f}; N = {chips}",
            *_table(("the two axes move", "tokens", "per chip"), rows),
            f"The document: 641 (its equation gives {time.document_batch(layer, chip):.0f}), from",
            "2 D F B / C for the math: one product instead of two, on one chip instead of 64. The",
            "whole batch is 25,302 tokens and the batch per chip 395.",
        ]
    )


def _accounting_d() -> str:
    chip = time.Chip.of(Cluster.load("tpu-v5p"))
    layer = time.Layer(16384, 53248, x=16, y=4, axes_x=2, axes_y=1)
    half = replace(layer, itemsize=1)
    chips = layer.x * layer.y
    rows = [("as given, X 16, Y 4", f"{time.critical_batch(layer, chip) / chips:.0f}")]
    rows.append(("overlap the two axes", f"{time.critical_batch(layer, chip, True) / chips:.0f}"))
    for overlapped, label in ((False, "the best split"), (True, "the best split, overlapped")):
        x, y, batch = time.best_split(layer, chip, chips, overlapped)
        rows.append((f"{label}: X {x}, Y {y}", f"{batch / chips:.0f}"))
    rows.append(("8-bit transfers", f"{time.critical_batch(half, chip) / chips:.0f}"))
    least = time.combined_tokens(chip, layer.d_ff, 2, 1)
    rows.append(("the least, alpha^2 / (M_X M_Y F)", f"{least:.0f}"))
    return "\n".join(
        [
            "Communication accounting (d): a smaller batch that stays compute-bound (assignment)",
            *_table(("trick", "tokens per chip"), rows),
            "Also: keep weights gathered over several micro-batches, or pipeline stages, which",
            "gather nothing.",
            "The document: a longer context. That is no trick: the batch here is in tokens, and a",
            "longer context with the same tokens changes neither side.",
        ]
    )


def _ddp_overhead() -> str:
    size = 4.0 * load_preset("xl").parameter_count
    bandwidth = size / XL_REDUCE_S
    best = time.optimal_buckets(size, bandwidth, CALL_S)
    bucket = time.optimal_bucket_bytes(size, bandwidth, CALL_S)
    lines = [
        "Data parallel: seconds after backward, by number of buckets (assignment)",
        f"  s = {size / GB:.2f} GB (XL, fp32), w = {bandwidth / GB:.0f} GB/s, o = 30 us a call",
        "  assumed: computing a bucket takes as long as sending it: nb o + s / (nb w)",
        f"  best nb = sqrt(s / (w o)) = {best:.0f}, buckets of sqrt(s w o) = {bucket / 1e6:.0f} MB",
        "  without the assumption: m + (nb - 1) max(0, m - c), m = s / (nb w) + o, c = T / nb",
    ]
    backwards = (0.05, 0.3)
    rows = []
    for megabytes in (1, 10, 100, 1000):
        buckets = max(1, round(size / (megabytes * 1e6)))
        cells = [
            f"{1e3 * time.bucket_overhead(size, bandwidth, CALL_S, buckets, T):,.1f} ms"
            for T in (None, *backwards)
        ]
        rows.append((f"{megabytes:,} MB", str(buckets), *cells))
    found = [
        time.optimal_buckets_in_general(size, bandwidth, CALL_S, backward) for backward in backwards
    ]
    rows.append(("best nb", "", f"{best:.0f}", *(f"{number:,}" for number in found)))
    head = ("bucket", "nb", "assumed", *(f"T = {1e3 * T:.0f} ms" for T in backwards))
    lines += _table(head, rows)
    lines += [
        "The document: nb = sqrt(s / (w o)). Right under the assumption; the question asks for the",
        "bucket's size, which is s / nb. With spare compute more buckets are better until their",
        "calls fill it; with too little, nb = sqrt(T / o).",
    ]
    return "\n".join(lines)


def _optimizer_sharding() -> str:
    rows = []
    for name in ("xl", "2.7b"):
        parameters = load_preset(name).parameter_count
        cost = memory.optimizer_sharding(parameters, 2)
        sizes = (f"{size / GB:.1f} GB" for size in (cost.whole, cost.sharded, cost.saved))
        rows.append((name, f"{parameters / 1e9:.2f} B", *sizes))
    implied = memory.parameters_saved_by(13 * GB, 2)
    return "\n".join(
        [
            "Optimizer state sharding on 2 GPUs, fp32, before activations (assignment)",
            *_table(("model", "parameters", "whole", "sharded", "saved"), rows),
            "The document: 55 GB and 42 GB, 13 GB saved, for XL. XL would save 8 GB. 13 GB saved",
            f"means {implied / 1e9:.2f} B parameters: the three figures fit its 2.7B, not XL.",
        ]
    )


def _rooflines() -> str:
    clusters = ("tpu-v5p", "h100x8", "h200x8", "b200x8")
    d_ff, rows = 28672, []
    for name in clusters:
        chip = time.Chip.of(Cluster.load(name))
        axes = 3 if name == "tpu-v5p" else 1
        pair = (2, 1) if name == "tpu-v5p" else (1, 1)
        rows.append(
            (
                name,
                f"{chip.alpha:,.0f}",
                f"{time.memory_bound_below(chip):.0f}",
                f"{time.data_parallel_tokens(chip, axes):,.0f}",
                f"{time.tensor_parallel_limit(chip, d_ff, 1):.1f}",
                f"{time.combined_tokens(chip, d_ff, *pair):,.0f}",
            )
        )
    return "\n".join(
        [
            "The scaling book's rooflines, 16 bit, d_ff 28672, peak rates",
            *_table(("cluster", "alpha", "memory", "FSDP", "TP chips", "FSDP x TP"), rows),
            "  alpha: C / W. memory: tokens below which a product is bound by reading its weights,",
            "  C / memory bandwidth. FSDP: tokens per chip from which it is compute-bound, alpha /",
            "  M_X (3 torus axes on v5p; one link in a GPU node). TP chips: M_Y F / alpha. FSDP x",
            "  TP: tokens per chip at the best split, alpha^2 / (M_X M_Y F).",
        ]
    )


_EXERCISES: dict[str, Callable[[], str]] = {
    "lecture-memory": _lecture_memory,
    "strategy-bytes": _strategy_bytes,
    "accounting-a": _accounting_a,
    "accounting-b": _accounting_b,
    "accounting-c": _accounting_c,
    "accounting-d": _accounting_d,
    "ddp-overhead": _ddp_overhead,
    "optimizer-sharding": _optimizer_sharding,
    "rooflines": _rooflines,
}

NAMES: tuple[str, ...] = tuple(_EXERCISES)
