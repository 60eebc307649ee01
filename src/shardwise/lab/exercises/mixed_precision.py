"""`shardwise bench mixed-precision`: sums in 16 bits, dtypes under autocast, a layer norm's parts.

Nothing here is timed. Sums and layer norms are exact and the same on any machine. The dtypes under
CUDA's autocast are followed by its lists, as the planner follows them
(`description/tracing/device_kernels.py`): they need no CUDA device; with one, they are measured.
"""

from __future__ import annotations

import argparse
import textwrap
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.description.parameters import dtype_name
from shardwise.description.tracing.device_kernels import DeviceKernels
from shardwise.lab.charts import draw_curves
from shardwise.lab.exercises import seed004
from shardwise.lab.exercises.models import one_thread
from shardwise.lab.rows import RowFile, say
from shardwise.profiling.results import Row, print_table

TERM, TIMES = 0.01, 1000
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# The dtype of the sum, of the term, and whether the term is cast before it is added.
SUMS = (
    ("fp32", "fp32", False), ("fp16", "fp16", False), ("fp32", "fp16", False),
    ("fp32", "fp16", True), ("bf16", "bf16", False), ("fp32", "bf16", False),
)  # fmt: skip
POINTS = 50  # of a drawn sum
WIDTH, ROWS = 1024, 64  # of the layer norm's input
# Name, spread and mean of the input, and the epsilon under the root.
INPUTS = (
    ("usual", 1.0, 0.0, 1e-5),
    ("large", 300.0, 0.0, 1e-5),
    ("off centre", 1.0, 100.0, 1e-5),
    ("small", 1e-4, 0.0, 1e-12),
)
STAGES = ("mean", "variance", "scale")


# Sums


def add_up(total: str, term: str, cast: bool) -> tuple[list[float], float]:
    """The sum as it grows, and the term as its dtype holds it."""
    s = torch.tensor(0.0, dtype=DTYPES[total])
    x = torch.tensor(TERM, dtype=DTYPES[term])
    grown = []
    for _ in range(TIMES):
        s += x.to(DTYPES[total]) if cast else x
        grown.append(s.item())
    return grown, x.item()


def explain_sum(total: str, held: float, final: float) -> str:
    """Where the error comes from: the term's own, times 1,000, or the sum's rounding."""
    from_term = (held - TERM) * TIMES
    gap = torch.finfo(DTYPES[total]).eps * 2 ** int(torch.tensor(final).log2().floor())
    rounded = final - TIMES * held
    text = f"the term is {held:.9g}: {from_term:+.4f} in all; "
    if gap / 2 >= held:
        return text + f"at {final:g} numbers lie {gap:.4g} apart, and adding {TERM} changes nothing"
    return text + f"rounding the sum to {gap:.2g} adds {rounded:+.4f}"


def run_sums(file: RowFile) -> None:
    for total, term, cast in file.missing(SUMS, lambda s: "sums/{}/{}/{}".format(*s)):
        grown, held = add_up(total, term, cast)
        document = seed004.SUMS.get((total, term, cast))
        row: Row = {
            "key": f"sums/{total}/{term}/{cast}", "part": "sums", "sum": total, "term": term,
            "cast": cast, "value": round(grown[-1], 4), "error": grown[-1] - TERM * TIMES,
            "document": {} if document is None else {"value": document},
            "reason": explain_sum(total, held, grown[-1]),
            "curve": [[i + 1, grown[i]] for i in range(0, TIMES, TIMES // POINTS)]
            + [[TIMES, grown[-1]]],
        }  # fmt: skip
        file.add(row)
        say(f"{TIMES} x {TERM} in {term}, summed in {total}: {row['value']}")


# Dtypes


class ToyModel(nn.Module):
    """The course's: a layer, a norm, a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(8, 16, bias=False)
        self.ln = nn.LayerNorm(16)
        self.fc2 = nn.Linear(16, 4, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = functional.relu(self.fc1(x))
        normed = self.ln(first)
        return first, normed, self.fc2(normed)


def find_dtypes(device: str, autocast: str) -> dict[str, str]:
    """Of each part of the toy model; on the device "meta", as CUDA's autocast casts."""
    torch.manual_seed(0)
    model = ToyModel().to(device)
    x = torch.randn(6, 8, device=device)
    targets = torch.zeros(6, dtype=torch.long, device=device)
    lower = DTYPES[autocast]
    if device == "meta":
        mode: Any = DeviceKernels("cuda", lower, lambda kernel: None).active()
    else:
        mode = torch.autocast(device, lower)
    with mode:
        first, normed, logits = model(x)
        loss, mean = functional.cross_entropy(logits, targets), logits.mean()
    loss.backward()
    gradient = model.fc1.weight.grad
    assert gradient is not None
    parts = {
        "parameters": model.fc1.weight, "first layer": first, "layer norm": normed,
        "logits": logits, "cross-entropy": loss, "mean of logits": mean, "gradients": gradient,
    }  # fmt: skip
    return {name: dtype_name(tensor.dtype) for name, tensor in parts.items()}


REASONS = {
    "parameters": "autocast casts copies, at each use",
    "first layer": "products are on autocast's list of 16-bit operators",
    "layer norm": "CUDA: on the list of fp32 operators; a CPU's list lacks it",
    "logits": "a product again",
    "cross-entropy": "on the list of fp32 operators, on both",
    "mean of logits": "on no list: it stays as its input is",
    "gradients": "of the parameters, in their dtype",
}


def run_dtypes(file: RowFile) -> None:
    kinds = ["cuda" if torch.cuda.is_available() else "meta", "cpu"]
    todo = [(device, autocast) for device in kinds for autocast in ("fp16", "bf16")]
    for device, autocast in file.missing(todo, lambda each: "dtypes/{}/{}".format(*each)):
        row: Row = {
            "key": f"dtypes/{device}/{autocast}", "part": "dtypes", "autocast": autocast,
            "device": "cuda" if device == "meta" else device,
            "source": "autocast's lists, followed" if device == "meta" else "measured",
            "dtypes": find_dtypes(device, autocast),
            # The document is about a GPU and fp16.
            "document": seed004.AUTOCAST_DTYPES if autocast == "fp16" and device != "cpu" else {},
            "reasons": REASONS,
        }  # fmt: skip
        file.add(row)
        say(f"dtypes under {autocast} autocast of {row['device']}: {row['source']}")


# Layer norm


def normalize(x: Tensor, eps: float, low: torch.dtype, stages: tuple[str, ...]) -> Tensor:
    """A layer norm written out, with the stages that are named in `low` and the others in fp32."""

    def at(stage: str, value: Tensor) -> Tensor:
        return value.to(low if stage in stages else torch.float32)

    seen = at("mean", x)
    mean = (seen.sum(-1, keepdim=True) / WIDTH).float()
    centred = at("variance", x.float() - mean)
    variance = ((centred * centred).sum(-1, keepdim=True) / WIDTH).float()
    root = torch.rsqrt(at("scale", variance) + at("scale", torch.tensor(eps)))
    return at("scale", x.float() - mean) * root


def find_error(got: Tensor, x: Tensor, eps: float) -> float:
    """Against float64 of the same 16-bit input: the norm of the difference over the norm."""
    wanted = functional.layer_norm(x.double(), (WIDTH,), eps=eps)
    return ((got.double() - wanted).norm() / wanted.norm()).item()


def run_layer_norms(file: RowFile) -> None:
    todo = [(dtype, each) for dtype in ("fp16", "bf16") for each in INPUTS]
    for dtype, (name, size, mean, eps) in file.missing(
        todo, lambda each: f"layer-norm/{each[0]}/{each[1][0]}"
    ):
        low = DTYPES[dtype]
        torch.manual_seed(0)
        x = (mean + size * torch.randn(ROWS, WIDTH)).to(low)
        given = {stage: normalize(x, eps, low, (stage,)) for stage in STAGES}
        given["all"] = normalize(x, eps, low, STAGES)
        given["torch"] = functional.layer_norm(x, (WIDTH,), eps=eps)
        errors = {way: find_error(got, x, eps) for way, got in given.items()}
        row: Row = {
            "key": f"layer-norm/{dtype}/{name}", "part": "layer-norm", "dtype": dtype,
            "input": name, "std": size, "mean": mean, "eps": eps,
            # JSON has no number for what overflowed.
            "errors": {way: error if error < 1e30 else None for way, error in errors.items()},
        }  # fmt: skip
        file.add(row)
        say(f"layer norm, {dtype}, {name}: done")


def run(arguments: argparse.Namespace) -> None:
    """Run the exercises, write the JSON, draw the sums, print tables and reasons."""
    file = RowFile.of(arguments)
    parts = {"sums": run_sums, "dtypes": run_dtypes, "layer-norm": run_layer_norms}
    with one_thread(True):  # too small for more
        for part in arguments.parts:
            parts[part](file)
    file.tell(arguments.plot, draw, show)


def draw(rows: list[Row]) -> str:
    """The sums as they grow; the one that is cast before is left out, being the same."""
    curves = {
        f"{row['term']} in {row['sum']}": row["curve"]
        for row in rows
        if row["part"] == "sums" and not row["cast"]
    }
    exact = {"exact": [(1, TERM), (TIMES, TERM * TIMES)]}
    title = f"{TERM} added {TIMES:,} times"
    return draw_curves(
        title, curves | exact, "additions", "sum", log_x=False, log_y=False, dashed=("exact",)
    )


def show(rows: list[Row], facts: dict[str, Any]) -> None:
    environment = facts["environment"]
    sums, reasons, norms = [], [], []
    dtypes: list[Row] = []
    for row in rows:
        if row["part"] == "sums":
            what = [row["sum"], row["term"] + (", cast before" if row["cast"] else "")]
            document = f"{row['document']['value']:.4f}" if row["document"] else ""
            sums.append([*what, f"{row['value']:.4f}", document])
            reasons.append(f"{what[1]} summed in {what[0]}: {row['reason']}.")
        elif row["part"] == "dtypes":
            dtypes.append(row)
        else:
            cells = ("overflow" if e is None else f"{e:.1e}" for e in row["errors"].values())
            norms.append([row["dtype"], row["input"], *cells])
    if sums:
        heads = ("sum", "term", "result", "document's")
        title = f"{TERM} added {TIMES:,} times"
        print_table(title, heads, sums, environment, heads[:2], width=80)
        _say_all(reasons)
    if dtypes:
        _print_dtypes(dtypes, environment)
    if norms:
        names = ("dtype", "input", *STAGES, "all", "torch's")
        title = "layer norm with one stage in 16 bits: error against float64"
        print_table(title, names, norms, environment, names[:2], width=80)
        told = ("{}: std {:g}, mean {:g}, eps {:g}".format(*each) for each in INPUTS)
        _say_all(["; ".join(told) + ".", SENSITIVE])


def _print_dtypes(rows: list[Row], environment: dict[str, Any]) -> None:
    lines = []
    documents: dict[str, str] = next((row["document"] for row in rows if row["document"]), {})
    for part in REASONS:
        cells = (row["dtypes"][part].replace("float", "fp").replace("bfp", "bf") for row in rows)
        lines.append([part, *cells, documents.get(part, "").replace("float", "fp")])
    heads = ("part", *(f"{row['device']} {row['autocast']}" for row in rows), "document's")
    print_table("dtypes under autocast", heads, lines, environment, heads, width=80)
    _say_all([f"{part}: {reason}." for part, reason in REASONS.items()])
    if documents:
        _say_all([LOSS])


LOSS = (
    "The document's fp16 loss is that of a loss which autocast does not know, such as a mean of "
    "the logits; cross-entropy gives fp32."
)
SENSITIVE = (
    "Sensitive are the statistics. In fp16 the squares of a large input pass 65,504, the variance "
    "is infinite and the output zero (an error of 1); the sum of an input off centre passes it "
    "too; a variance and an epsilon below 6e-8 are zero, and the division by their root "
    "overflows: the underflow that the document names. bf16 has fp32's range, and nothing is lost "
    "so; but it has 8 bits, and the mean of an input off centre is rounded to them. torch's kernel "
    "keeps the statistics in fp32 for inputs of either kind, and errs by its output's rounding."
)


def _say_all(sentences: list[str]) -> None:
    for sentence in sentences:
        print(textwrap.fill(sentence, 80, subsequent_indent="  "))
