"""One program, two engines: what torch's `fully_shard` does, shardwise's does too.

Each scenario of `tests/parity/dropin/` runs with torch's names and with shardwise's, on real gloo
ranks, and makes the same assertions. `-k "on_shardwise and tied"` picks by engine and name.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest

from tests.parity.dropin.catalog import ENGINES, IS_NEWEST, SCENARIOS, Scenario, perform
from tests.ranks import Ranks

THEMES = (
    "training",
    "accumulation",
    "parameters",
    "precision",
    "forwards",
    "placements",
    "meshes",
    "communication",
    "classes",
    "setters",
    "state",
    "checkpoints",
    "initialisation",
    "composition",
    "programs",
    "changes",
    "extensions",
    "misuse",
    "lifetimes",
    "unused",
    "afterwards",
    "differences",
)
for theme in THEMES:
    importlib.import_module(f"tests.parity.dropin.{theme}")


def _test_of(theme: str) -> Callable[..., None]:
    """One test function per theme, over its cases and the engines each is for."""
    chosen = [
        pytest.param(engine, case, id=f"on_{engine}-{case.name}")
        for engine in ENGINES
        for case in SCENARIOS[theme]
        if engine in case.engines and (IS_NEWEST or engine != "torch")
    ]

    @pytest.mark.parametrize(("engine", "case"), chosen)
    def test(engine: str, case: Scenario, request: pytest.FixtureRequest) -> None:
        ranks: Ranks = request.getfixturevalue({2: "two", 4: "four"}[case.world])
        ranks.run(perform, engine, case.function, case.arguments, timeout=60)

    return test


for theme in THEMES:
    globals()[f"test_{theme}"] = _test_of(theme)
