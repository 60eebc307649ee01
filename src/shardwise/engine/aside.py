"""Losses that a block makes inside its forward and keeps aside: on itself, in a list that a
forward hook fills, in an object that nobody here can look into.

They are no visible part of its output, so backward may come to them before any gradient comes to an
output, and would read parameters that are freed. In a block that may do so, what autograd saves of
them is saved with the name of the parameter: whoever reads it in backward gathers its unit first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from itertools import chain, takewhile
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise.engine import torch_private

if TYPE_CHECKING:
    from shardwise.engine.engine import Engine
    from shardwise.engine.unit import Unit

Saved = tuple[torch.Tensor, int, "weakref.ref[Unit] | None"]  # a tensor, its version, whose it is


class Aside:
    """One module with units, and those inside it that belong to no other.

    `is_idle`: nothing is to be done for its forwards, as long as `hooks`, the dicts of forward
    hooks inside, have the sizes in `seen`.
    """

    def __init__(self, module: nn.Module, is_part: Callable[[nn.Module], bool]) -> None:
        self.module = weakref.ref(module)
        self._is_part = is_part
        self.is_idle = False
        self.hooks: list[dict[int, Callable[..., Any]]] = []
        self.seen: list[int] = []
        self._hooked = False  # others have hung forward hooks inside
        self._keeps = False  # a forward has left a tensor with a graph on a module
        self._looked = False
        self._inputs: Any = None  # of the forward that is looked at, with the tensors in them
        self._given: set[int] = set()
        self.was_missed = False  # the last forward did, and its parameters were saved as ever
        self.entered: list[Any] = []  # for each forward under way: what saves

    def begin(self, engine: Engine, inputs: Any) -> None:
        """A forward with gradients begins."""
        self.was_missed = False
        if not self._looked:
            self._inputs, self._given = inputs, set(map(id, _tensors_of(inputs)))
        self._look_for_hooks()
        self.is_idle = self._looked and not (self._hooked or self._keeps)
        # Whoever else saves (a checkpoint, an offload) makes tensors of its own.
        saves = (self._hooked or self._keeps) and torch_private.saves_by_itself()
        context = _saving(engine) if saves else None
        if context is not None:
            context.__enter__()
        self.entered.append(context)

    def end(self) -> None:
        """It is over, well or not."""
        context = self.entered.pop()
        if context is not None:
            context.__exit__(None, None, None)
        elif not (self._looked or self.entered):
            self._looked = True
            self._keeps = self.was_missed = self._keeps_graphs()
        if not self.entered:
            self._inputs = None

    def miss(self) -> None:
        """The forward that has just ended returned something in which tensors may be hidden, so
        backward may come to them unseen.
        """
        self.was_missed = not self._keeps
        self._keeps, self.is_idle = True, False

    def _parts(self) -> Iterator[nn.Module]:
        module = self.module()
        return iter(()) if module is None else _inside(module, self._is_part)

    def _look_for_hooks(self) -> None:
        self.hooks = self.hooks or [torch_private.forward_hooks(part) for part in self._parts()]
        found = list(map(len, self.hooks))
        if found != self.seen:
            self.seen = found
            own, *inside = [list(each.values()) for each in self.hooks]
            own = list(takewhile(lambda hook: not _is_ours(hook), own))  # the rest run later
            self._hooked = any(not _is_ours(hook) for hook in chain(own, *inside))

    def _keeps_graphs(self) -> bool:
        """Whether modules, or the lists that the caller gave, have got tensors with a graph."""
        values = [value for part in self._parts() for value in vars(part).values()]
        kept = [tensor for value in values for tensor in _tensors_of(value, depth=2)]
        kept += [tensor for tensor in _tensors_of(self._inputs) if id(tensor) not in self._given]
        return any(tensor.grad_fn is not None for tensor in kept)


def _inside(module: nn.Module, is_part: Callable[[nn.Module], bool]) -> Iterator[nn.Module]:
    yield module
    for child in module.children():
        if is_part(child):
            yield from _inside(child, is_part)


def _tensors_of(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """Tensors in what hangs on a module, or in inputs, not deep: it may hold anything, itself
    too.
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif depth and isinstance(value, list | tuple | set | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_of(item, depth - 1)


def _is_ours(hook: Any) -> bool:
    home = getattr(getattr(hook, "__func__", hook), "__module__", "")
    return str(home).startswith("shardwise.")


def _saving(engine: Engine) -> Any:
    """Save tensors so that a read in backward gathers the unit that they are of."""
    engine_of = weakref.ref(engine)  # the graph keeps both functions

    @torch_private.never_compiled
    def pack(tensor: torch.Tensor) -> Saved:
        # Detached: an output that its own node saves would keep that node for ever.
        engine = engine_of()
        owner = engine.owner_of(tensor) if engine is not None else None
        return tensor.detach(), torch_private.writes_of(tensor), owner

    @torch_private.never_compiled
    def unpack(saved: Saved) -> torch.Tensor:
        tensor, version, owner_of = saved
        engine, unit = engine_of(), owner_of() if owner_of is not None else None
        if engine is not None and unit is not None and torch_private.inside_backward():
            engine.bring_in_backward(unit)
        # torch does not look itself at what was saved so.
        if torch_private.writes_of(tensor) != version:
            raise RuntimeError(
                f"a tensor of shape {tuple(tensor.shape)} that backward needs was changed in place "
                f"after forward had saved it: it is at version {torch_private.writes_of(tensor)}, "
                f"expected {version}; clone it before it is changed"
            )
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
