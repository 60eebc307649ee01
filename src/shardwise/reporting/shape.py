"""What the files of a run must look like for a report: checked once, where they are read."""

from __future__ import annotations

from typing import Any

from shardwise.errors import UserError

NUMBER = (int, float)
_NAMES = {NUMBER: "a number", int: "a whole number", str: "a text"}

# A key that ends in ? may be missing or null; keys that are not named may hold anything.
METRICS_ROW = {
    "step": NUMBER, "loss?": NUMBER, "tokens?": NUMBER, "tokens_per_s?": NUMBER, "step_s?": NUMBER,
    "memory_bytes?": NUMBER, "exposed_share?": NUMBER, "mfu?": NUMBER, "grad_norm?": NUMBER,
    "skipped?": NUMBER,
}  # fmt: skip
MEMORY = {
    "ranks?": [
        {"rank": int, "limit_bytes?": NUMBER, "peak_allocated?": NUMBER, "times?": [NUMBER],
         "reserved?": [NUMBER], "largest?": [{}]}
    ],
}  # fmt: skip
MESSAGES = {
    "cluster?": str,
    "messages?": [
        {"collective": str, "unit": str, "phase": str, "ranks": int, "bytes": NUMBER,
         "seconds": NUMBER}
    ],
    "curve?": [{"collective": str, "ranks": int, "bytes": NUMBER, "seconds": NUMBER}],
}  # fmt: skip
PLAN = {
    "name?": str,
    "mesh?": [int],
    "units?": [{"name": str, "parameters": [{"shape": [int], "dtype": str}]}],
}
FACTS = {
    "world?": int, "parameters?": NUMBER, "flops_per_token?": NUMBER, "peak_flops?": NUMBER,
    "unigram_entropy?": NUMBER, "plan_explanation?": str,
}  # fmt: skip


def check(value: Any, shape: Any, file: str) -> None:
    """Raise an error that names the first place in `file` that is not of this shape."""
    wrong = _find(value, shape, "")
    if wrong:
        raise UserError(
            f"{file}: {wrong}. It is not what shardwise writes, or it was changed: remove it, or "
            "profile or train again"
        )


def _find(value: Any, shape: Any, where: str) -> str:
    """What is wrong first; nothing if all is right."""
    place = where or "it"
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return f"{place} is {_show(value)}, expected an object"
        for name, inner in shape.items():
            key, optional = name.removesuffix("?"), name.endswith("?")
            here = f"{where}.{key}" if where else key
            if value.get(key) is None:
                if not optional:
                    return f"{here} is missing"
            elif found := _find(value[key], inner, here):
                return found
        return ""
    if isinstance(shape, list):
        if not isinstance(value, list):
            return f"{place} is {_show(value)}, expected a list"
        return next(
            filter(None, (_find(v, shape[0], f"{where}[{i}]") for i, v in enumerate(value))), ""
        )
    if isinstance(value, bool) or not isinstance(value, shape):
        return f"{place} is {_show(value)}, expected {_NAMES[shape]}"
    return ""


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
