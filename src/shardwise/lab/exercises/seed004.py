"""The profiling figures of seed 004, which `shardwise bench` prints beside its own.

For its timings of single models the document gives no shapes and no batch. Its residual stream of
5.0 MiB at 128 tokens and d_model 2560 in fp32 means a batch of 4; its largest tensor of 100 MiB
means a d_ff of 10,240; and 0.221 s for the 2.7B model's forward on an A100 is 16 TFLOP/s with 4 x
128 tokens, which fits fp32 without tf32 and no longer context. The shapes are those that its course
gives to these names (`description/preset.py` has them). Its data-parallel runs have a context and a
total batch of 32 each: 16 x 32 tokens on each of two GPUs, as many as 4 x 128.
"""

from __future__ import annotations

from typing import Any

from shardwise.lab.parallel.document import DDP

MODELS = ("small", "medium", "large", "xl", "2.7b")
BATCH, CONTEXT = 4, 128

# Seconds: forward mean and deviation, backward mean and deviation; 5 warm-up steps, 10 timed.
TABLE_1 = {
    "small": (0.035, 0.005, 0.091, 0.024),
    "medium": (0.073, 0.005, 0.198, 0.040),
    "large": (0.097, 0.010, 0.247, 0.058),
    "xl": (0.132, 0.013, 0.312, 0.060),
    "2.7b": (0.079, 0.004, 0.193, 0.027),
}
# Seconds: forward fp32 and mixed, backward fp32 and mixed.
TABLE_2 = {
    "small": (0.028, 0.031, 0.061, 0.062),
    "medium": (0.057, 0.060, 0.124, 0.135),
    "large": (0.087, 0.090, 0.239, 0.208),
    "xl": (0.149, 0.122, 0.452, 0.292),
    "2.7b": (0.221, 0.081, 0.676, 0.223),
}
# The 2.7B model: GB at the peak of a forward pass and of a whole step, by context.
TABLE_3 = {128: (19.412, 55.246), 256: (26.103, 55.267), 512: (42.708, 55.306)}
MIXED_STEP_GB = 61.998  # a whole step with mixed precision at 128 tokens
RESIDUAL_MIB = 5.0  # the 2.7B model's residual stream at 128 tokens
# 0.01 added 1,000 times: by the dtype of the sum, of the term, and whether the term is cast before.
SUMS = {
    ("fp32", "fp32", False): 10.0001,
    ("fp16", "fp16", False): 9.9531,
    ("fp32", "fp16", False): 10.0021,
    ("fp32", "fp16", True): 10.0021,
}
# A toy model under fp16 autocast on a GPU; which loss it took is not said.
AUTOCAST_DTYPES = {
    "parameters": "float32",
    "first layer": "float16",
    "layer norm": "float32",
    "logits": "float16",
    "cross-entropy": "float16",
    "gradients": "float32",
}
# Seconds: compiled forward and backward, eager forward and backward.
TABLE_6 = {
    "small": (0.003762, 0.029213, 0.021868, 0.057893),
    "medium": (0.010411, 0.067801, 0.043957, 0.113304),
    "large": (0.025404, 0.147252, 0.066049, 0.188688),
    "xl": (0.051192, 0.287173, 0.088227, 0.325805),
    "2.7b": (0.067724, 0.439231, 0.083521, 0.463938),
}
# XL on two H100s, as `shardwise bench overlap` names the ways; its buckets are those of 10 MB.
DDP_STEPS = {
    way.removesuffix(" 10 MB"): {name.removesuffix("_s"): s for name, s in DDP[way].items()}
    for way in ("naive", "flat", "overlap", "bucketed 10 MB")
}


def forward_backward(size: str, precision: str) -> list[dict[str, Any]]:
    """What tables 1 and 2 say of this model, in ms, with the hardware; empty if nothing."""
    found: list[dict[str, Any]] = []
    if size in TABLE_1 and precision == "fp32":
        forward, forward_std, backward, backward_std = (s * 1e3 for s in TABLE_1[size])
        found.append(
            {"table": 1, "hardware": "H100", "forward": forward, "forward_std": forward_std,
             "backward": backward, "backward_std": backward_std}
        )  # fmt: skip
    if size in TABLE_2:
        times = [s * 1e3 for s in TABLE_2[size]]
        forward, backward = times[precision == "bf16" :: 2]
        found.append({"table": 2, "hardware": "A100", "forward": forward, "backward": backward})
    return [{k: _round(v) for k, v in figures.items()} for figures in found]


def memory(size: str, precision: str, context: int, mode: str) -> dict[str, Any]:
    """What table 3 and its text say, in GB; empty if nothing."""
    if size != "2.7b" or mode not in ("forward", "step"):
        return {}
    gigabytes = None
    if precision == "fp32" and context in TABLE_3:
        gigabytes = TABLE_3[context][mode == "step"]
    elif (precision, context, mode) == ("bf16", 128, "step"):
        gigabytes = MIXED_STEP_GB
    return {} if gigabytes is None else {"table": 3, "hardware": "not stated", "gb": gigabytes}


def compiled(size: str, precision: str) -> dict[str, Any]:
    """What table 6 says, in ms; empty if nothing."""
    if size not in TABLE_6 or precision != "fp32":
        return {}
    names = ("compiled_forward", "compiled_backward", "eager_forward", "eager_backward")
    times = {name: _round(s * 1e3) for name, s in zip(names, TABLE_6[size], strict=True)}
    return {"table": 6, "hardware": "not stated", **times}


def _round(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value
