"""Activation checkpointing of a model's blocks, whole or but for some operators."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.utils import checkpoint as activation_checkpoint

from shardwise.description.tracing.torch_private import (
    TorchDispatchMode,
    attention_operators,
    detach_below_autograd,
    is_compiled,
    product_operators,
    pytree,
    version_of,
)
from shardwise.description.workload import Recomputing
from shardwise.errors import UserError


def recompute_blocks(model: nn.Module, how: str, blocks: Sequence[str]) -> nn.Module:
    """Let the blocks that `how` chooses run again in backward: their inputs are kept, and what is
    between is made once more. Names of parameters and hooks stay as they are.
    """
    recomputing = Recomputing.parse(how)
    if recomputing is None:
        return model
    for name in recomputing.choose(blocks):
        block = model.get_submodule(name)
        if recomputing.keeps_products and any(map(is_compiled, block.modules())):
            raise UserError(
                f"{name} is compiled, so that its operators cannot be told apart: recompute whole "
                f"blocks (nonreentrant, first-N, every-K) instead of {how}"
            )
        block.forward = functools.partial(run_again, recomputing, True, block.forward)
    return model


def run_again(
    how: Recomputing, draws: bool, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Run `forward` so that backward runs it again. `draws`: it draws random numbers, maybe."""
    more: dict[str, Any] = {"context_fn": _keep_products} if how.keeps_products else {}
    return activation_checkpoint.checkpoint(
        forward, *args, use_reentrant=how.reentrant, preserve_rng_state=draws, **more, **kwargs
    )


def _keep_products() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """What a block's forward and its second run are under."""
    kept: _Kept = defaultdict(list)
    return _Keep(kept), _Give(kept)


# Of each operator, what its calls gave, with the versions of those tensors; None: not kept.
_Kept = dict[Any, list[tuple[Any, tuple[int, ...]] | None]]


def _versions(result: Any) -> tuple[int, ...]:
    return tuple(version_of(t) for t in pytree.tree_leaves(result) if isinstance(t, Tensor))


class _Keep(TorchDispatchMode):
    """Keeps what attention gives, and every other product.

    torch's `create_selective_checkpoint_contexts` does so too, but wants both runs to call the same
    operators: a unit inside of the block is gathered in one and perhaps not in the other.
    """

    def __init__(self, kept: _Kept) -> None:
        super().__init__()
        self._kept, self._products = kept, 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **kwargs or {})
        if func in product_operators:
            self._products += 1
            # Not the second, the fourth, ...: half of the products is made again.
            self._note(func, result if self._products % 2 else None)
        elif func in attention_operators:
            self._note(func, result)
        return result

    def _note(self, func: Any, result: Any) -> None:
        if result is None:
            self._kept[func].append(None)
            return
        # Autograd makes what is returned part of its graph, which a kept tensor must not hold.
        apart = pytree.tree_map(
            lambda t: detach_below_autograd(t) if isinstance(t, Tensor) else t, result
        )
        self._kept[func].append((apart, _versions(apart)))


class _Give(TorchDispatchMode):
    """Gives what was kept, in the order in which it came."""

    def __init__(self, kept: _Kept) -> None:
        super().__init__()
        self._kept = kept
        self._calls: dict[Any, int] = defaultdict(int)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in product_operators or func in attention_operators:
            number, known = self._calls[func], self._kept.get(func, [])
            self._calls[func] += 1
            if number >= len(known):
                raise UserError(
                    f"{func} runs more often in backward's second run of a block than in its "
                    "forward, so that op cannot tell which result is which: recompute the whole "
                    "block (nonreentrant)"
                )
            entry = known[number]
            if entry is not None:
                known[number] = None  # its memory goes with its last user
                result, versions = entry
                if _versions(result) != versions:
                    raise UserError(
                        f"a result of {func} was changed in place after it was kept, and the "
                        "second run needs what it was: recompute the whole block (nonreentrant)"
                    )
                return result
        return func(*args, **kwargs or {})
