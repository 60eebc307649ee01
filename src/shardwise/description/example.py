"""Example inputs of a model: its arguments for one micro-batch, of any size, and its loss.

What users give: one tensor, a sequence of positional arguments, a mapping of keyword ones, a pair
(tuple, dict) of both, text (`tokens:int64[4,1024]`), or a function that gives any of these, with
the number of samples as its argument if it takes one. Dim 0 of the tensors is the samples.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.description.tracing.real_run import staying, tell
from shardwise.description.tracing.torch_private import pytree
from shardwise.errors import UserError, nearest

_TENSOR = re.compile(r"(?:(?P<name>\w+)\s*:\s*)?(?P<dtype>\w+)\s*\[(?P<shape>[^\]]*)\]")
_DTYPES = (
    "float32", "bfloat16", "float16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool",
)  # fmt: skip


class Call(NamedTuple):
    """What forward is called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, given: Any) -> Call:
        """From what users give."""
        if isinstance(given, Call):
            return given
        if isinstance(given, Tensor):
            return cls((given,), {})
        if isinstance(given, Mapping):
            return cls((), dict(given))
        if isinstance(given, str | bytes) or not isinstance(given, Sequence):
            raise UserError(
                f"example inputs are {given!r:.60}, expected a tensor, a tuple of positional "
                "arguments, a dict of keyword ones, or both as (tuple, dict)"
            )
        both = len(given) == 2 and isinstance(given[0], tuple) and isinstance(given[1], dict)
        return cls(given[0], dict(given[1])) if both else cls(tuple(given), {})

    @property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in pytree.tree_leaves(tuple(self)) if isinstance(leaf, Tensor)]

    @property
    def as_given(self) -> Any:
        """The tensor, the tuple or the dict that a user thinks of."""
        if self.kwargs:
            return (self.args, self.kwargs) if self.args else self.kwargs
        return self.args[0] if len(self.args) == 1 else self.args


class Example:
    """A model's arguments for micro-batches of any size; `samples` is the size that it was given
    in.
    """

    def __init__(self, given: Any) -> None:
        self._make = given if callable(given) and not isinstance(given, Tensor) else None
        sizes = [] if self._make is None else _positional(self._make)
        self._takes_size = bool(sizes)
        if self._make is None:
            self._call = Call.of(given)
        else:
            self._call = self._ask(*sizes[:1])
        found = [tensor.shape[0] for tensor in self._call.tensors if tensor.dim()]
        if not found or not found[0]:
            raise UserError(
                "example inputs have no tensor with a dim of samples: give at least one, as in "
                "x:float32[8,3,224,224]"
            )
        self.samples: int = sizes[0] if sizes else found[0]

    def _ask(self, *size: int) -> Call:
        assert self._make is not None
        try:
            with staying():
                made = self._make(*size)
            return Call.of(made)
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"the function of the example inputs failed: {tell(error)}") from error

    @property
    def sequence(self) -> int | None:
        """Tokens of a sample, if its first tensor is of tokens."""
        first = self._call.tensors[0]
        tokens = first.dim() == 2 and not first.is_floating_point() and first.dtype != torch.bool
        return first.shape[1] if tokens else None

    def sized(self, samples: int) -> Call:
        """The arguments for so many samples: asked for, or dim 0 repeated or cut."""
        if samples == self.samples:
            return self._call
        if self._takes_size:
            return self._ask(samples)

        def resize(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.dim() or len(value) != self.samples:
                return value
            if value.is_meta:
                made = torch.empty((samples, *value.shape[1:]), dtype=value.dtype, device="meta")
            else:
                made = value.detach()[torch.arange(samples, device=value.device) % len(value)]
            return made.requires_grad_() if value.requires_grad else made

        args, kwargs = pytree.tree_map(resize, tuple(self._call))
        return Call(args, kwargs)


def _positional(function: Callable[..., Any]) -> list[int]:
    """The positional parameters of a function, each as its default if that is a whole number, else
    as 1.
    """
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [
        p.default if type(p.default) is int and p.default > 0 else 1
        for p in parameters
        if p.kind in kinds
    ]


def parse_tensors(text: str, forward: Callable[..., Any]) -> Call:
    """Tensors without values from text: those whose names are parameters of `forward` are keyword
    arguments, the others positional ones, in their order.
    """
    args: list[Tensor] = []
    kwargs: dict[str, Tensor] = {}
    known = inspect.signature(forward).parameters
    rest = _TENSOR.sub("", text)
    if rest.strip(" ,;") or not _TENSOR.search(text):
        raise UserError(
            f"--inputs {text!r}: expected tensors as name:dtype[sizes], such as "
            "tokens:int64[4,1024] or image:float32[8,3,224,224],label:int64[8]; or a function, as "
            "FILE.py:NAME"
        )
    for found in _TENSOR.finditer(text):
        name, dtype, shape = found["name"], found["dtype"], found["shape"]
        if dtype not in _DTYPES:
            raise UserError(
                f"--inputs {found[0]!r}: unknown dtype {dtype!r}{nearest(dtype, _DTYPES)}"
            )
        sizes = [size.strip() for size in re.split("[,x]", shape)]
        if not all(size.isdigit() and int(size) > 0 for size in sizes):
            raise UserError(f"--inputs {found[0]!r}: sizes are whole numbers above 0, as [4,1024]")
        made = torch.empty([*map(int, sizes)], dtype=getattr(torch, dtype), device="meta")
        if name in known:
            kwargs[name] = made
        else:
            args.append(made)
    return Call(tuple(args), kwargs)


def loss_of_output(loss: Callable[..., Any]) -> Callable[..., Tensor]:
    """`loss(output)`, `loss(output, inputs)` or `loss(output, a, b, ...)` as what a trace calls:
    a function of the model and its inputs.
    """
    count = len(_positional(loss))

    def whole(model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        output = model(*args, **kwargs)
        if count == 1:
            return loss(output)
        if count == 2:
            return loss(output, Call(args, kwargs).as_given)
        return loss(output, *args, **kwargs)

    return whole
