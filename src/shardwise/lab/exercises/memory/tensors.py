"""Single tensors of `shardwise bench memory`: the residual stream, and what attention keeps.

The document divides a residual stream by hand, and accounts for the last column of its table 4: the
memory in use between forward and backward of plain attention, batch 8, fp32. Both are formulas
here, with the tensors themselves counted beside.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from shardwise.description.language_model import attend_plainly, make_model
from shardwise.description.preset import SIZES
from shardwise.lab.attention.seed import tables_4_and_5
from shardwise.lab.exercises import seed004
from shardwise.lab.processes import explain_failure
from shardwise.lab.rows import RowFile, say
from shardwise.profiling.results import Row, print_table

BATCH = 8  # of table 4
WIDTHS: tuple[int, ...] = (16, 32, 64, 128)
LENGTHS = (256, 1024, 4096, 8192, 16384)
ON_A_CPU, IN_A_TRIAL = 3, 2  # of the lengths


def attend_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention with softmax written out, as the course asks for it: autograd then keeps both the
    exponentials and their quotients.
    """
    s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    exponentials = torch.exp(s - s.max(dim=-1, keepdim=True).values)
    return exponentials / exponentials.sum(dim=-1, keepdim=True) @ v


ATTENTIONS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "by_hand": attend_by_hand,
    "torch_softmax": lambda q, k, v: attend_plainly(q, k, v, causal=False),
}


def attention_bytes(width: int, tokens: int) -> int:
    """4 b s^2 for both kept tensors of the scores' size; queries, keys, values and the result."""
    return 4 * BATCH * tokens * (2 * tokens + 4 * width)


def residual_bytes(batch: int, context: int, d_model: int) -> int:
    """4 b s d: one fp32 tensor between two blocks."""
    return 4 * batch * context * d_model


def count_kept(attend: Callable[..., Tensor], width: int, tokens: int, device: str) -> int:
    """Bytes of the distinct tensors that are there when backward could start: the inputs, the
    result, and all that autograd keeps.
    """
    seen: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    inputs = [
        torch.randn(BATCH, tokens, width, device=device, requires_grad=True) for _ in range(3)
    ]
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = attend(*inputs)
    for tensor in (*inputs, result):
        note(tensor)
    return sum(seen.values())


def run_residual(file: RowFile, sizes: Iterable[str]) -> None:
    """The tensor that a first block gives, of models without memory: the meta device."""
    for size in file.missing(sizes, lambda size: f"residual/{size}"):
        one = dataclasses.replace(SIZES[size], layers=1, rotary=False)  # the stream is the same
        model = make_model(one, "meta", seed004.CONTEXT)
        tokens = torch.zeros(seed004.BATCH, seed004.CONTEXT, dtype=torch.long, device="meta")
        stream = model.layers[0](model.embedding(tokens))
        row: Row = {
            "key": f"residual/{size}", "part": "residual", "size": size,
            "batch": seed004.BATCH, "context": seed004.CONTEXT,
            "derived_bytes": residual_bytes(*stream.shape), "bytes": stream.nbytes,
            "document": {"mib": seed004.RESIDUAL_MIB} if size == "2.7b" else {},
        }  # fmt: skip
        file.add(row)
        say(f"residual stream of {size}: {row['bytes'] / 2**20:.1f} MiB")


def run_attention(file: RowFile, quick: bool) -> None:
    """Table 4's last column: derived, counted, and the document's."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    lengths = LENGTHS if device == "cuda" else LENGTHS[:ON_A_CPU]
    widths = WIDTHS
    if quick:
        widths, lengths = (WIDTHS[0], WIDTHS[-1]), lengths[:IN_A_TRIAL]
    shapes = [(width, tokens) for width in widths for tokens in lengths]
    for width, tokens in file.missing(shapes, lambda shape: f"attention/{shape[0]}/{shape[1]}"):
        row: Row = {
            "key": f"attention/{width}/{tokens}", "part": "attention", "width": width,
            "tokens": tokens, "batch": BATCH, "derived_bytes": attention_bytes(width, tokens),
            "document": {"gb": tables_4_and_5(width, tokens)["alone"]["memory_gb"]},
        }  # fmt: skip
        for name, attend in ATTENTIONS.items():
            try:
                row[f"{name}_bytes"] = count_kept(attend, width, tokens, device)
            except (RuntimeError, ValueError) as error:
                row["failure"] = explain_failure(error)
        file.add(row)
        say(f"attention {width} x {tokens}: " + (row.get("failure") or "counted"))


def print_tables(rows: list[Row], environment: dict[str, Any]) -> None:
    """The residual streams in MiB, as the document gives its; attention in MB of 1e6 bytes."""
    streams, kept = [], []
    for row in rows:
        if row.get("part") == "residual":
            document = f"{row['document']['mib']:.1f}" if row["document"] else ""
            figures = (row["derived_bytes"], row["bytes"])
            streams.append([row["size"], *(f"{n / 2**20:.1f}" for n in figures), document])
        elif row.get("part") == "attention":
            names = ("derived_bytes", "by_hand_bytes", "torch_softmax_bytes")
            cells = [f"{row[n] / 1e6:,.1f}" if n in row else row["failure"] for n in names]
            document = row["document"]["gb"] * 1e3
            rest = document - row["derived_bytes"] / 1e6
            shape = [str(row["width"]), f"{row['tokens']:,}"]
            kept.append([*shape, *cells, f"{document:,.1f}", f"{rest:.1f}"])
    if streams:
        title = f"residual stream, {seed004.BATCH} x {seed004.CONTEXT} tokens, fp32: MiB"
        heads: tuple[str, ...] = ("size", "4 b s d", "counted", "document's")
        print_table(title, heads, streams, environment, heads[:1], width=80)
    if kept:
        title = "attention before backward, batch 8, fp32: MB"
        heads = ("width", "tokens", "derived", "by hand", "softmax", "document's", "less derived")
        print_table(title, heads, kept, environment, (), width=80)
        print(ACCOUNT)


ACCOUNT = """\
derived: 8 b s^2 + 16 b s d bytes, two of the scores' size and q, k, v, o
by hand: softmax of its parts keeps the exponentials and the quotients: the two
softmax: torch's operator keeps only its result
The document's figure is all that its GPU had allocated. What is left over is 32
or 64 MiB (33.6, 67.1 MB) at every size: a library's workspace, it seems.
"""
