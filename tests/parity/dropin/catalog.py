"""How a scenario is declared, and how it runs on a rank.

A scenario is a function of an `Api` that raises AssertionError; `@case(...)` above it adds it to
its theme's list, once for each combination of the choices given. Only the engine's name decides
where `fully_shard` and its companions come from.
"""

from __future__ import annotations

import gc
import importlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.engine.torch_private import TESTED

ENGINES = ("torch", "shardwise")
# What the scenarios say of torch's engine is true of the newest torch; ours does it on every one.
IS_NEWEST = torch.__version__.startswith(TESTED[1])
HOMES = {"torch": "torch.distributed.fsdp", "shardwise": "shardwise"}


class Api:
    """The public names of one engine: `api.fully_shard`, `api.MixedPrecisionPolicy`, ..."""

    def __init__(self, engine: str) -> None:
        self.engine = engine
        self._home = importlib.import_module(HOMES[engine])
        own = self._home.fully_shard.__module__
        assert own.startswith(f"{engine}."), f"{engine}'s fully_shard comes from {own}"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._home, name)


@dataclass(frozen=True)
class Scenario:
    name: str
    function: Callable[..., None]
    world: int
    engines: tuple[str, ...]
    arguments: dict[str, Any] = field(hash=False)


SCENARIOS: dict[str, list[Scenario]] = {}  # by theme: the last part of the scenario's module name


def case(
    world: int = 2,
    *,
    engines: tuple[str, ...] = ENGINES,
    there: bool = True,
    **choices: tuple[Any, ...],
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add a scenario on `world` ranks, one case for each combination of `choices`; not if this
    torch has not what it is about (`there`).
    """

    def add(function: Callable[..., None]) -> Callable[..., None]:
        if not there:
            return function
        listed = SCENARIOS.setdefault(function.__module__.rpartition(".")[2], [])
        for values in itertools.product(*choices.values()):
            labels = [_label(value) for value in values]
            name = "-".join([function.__name__, *labels, f"{world}ranks"])
            arguments = dict(zip(choices, values, strict=True))
            listed.append(Scenario(name, function, world, engines, arguments))
        return function

    return add


def _label(value: Any) -> str:
    if isinstance(value, tuple):
        return "_to_".join(map(_label, value))
    return str(value).removeprefix("torch.")


def perform(engine: str, function: Callable[..., None], arguments: dict[str, Any]) -> None:
    """One case on this rank; its models are gone before the next one starts."""
    api = Api(engine)
    gc.freeze()  # what is there already needs no second look: collecting takes 5 ms, not 160
    torch.manual_seed(0)
    try:
        function(api, **arguments)
    finally:
        gc.collect()
