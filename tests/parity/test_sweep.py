"""What a program may touch between two steps: equal to one process, or an error that names it.

The touches, and what is expected of each, are in sweep_parameters.py, sweep_gradients.py and
sweep_programs.py; `python -m tests.parity.sweep` tells what torch does with the same.
"""

from __future__ import annotations

import pytest

from tests.parity.sweep import ENGINES, dense_cases, fault, load, observe
from tests.ranks import Ranks


@pytest.mark.parametrize("engine", [e for e in ENGINES if e not in ("torch", "hsdp")])
def test_touches(two: Ranks, engine: str) -> None:
    _check(two, engine)


def test_touches_with_replicas(four: Ranks) -> None:
    _check(four, "hsdp")


def _check(ranks: Ranks, engine: str) -> None:
    wanted = dense_cases(engine)
    told = observe(ranks, engine, wanted)
    faults = [wrong for case in wanted if (wrong := fault(engine, case, told[case]))]
    assert not faults, "\n".join(faults)


def test_a_fault_is_told_by_name() -> None:
    """An outcome that is neither equal nor the error that the table names is a fault."""
    load()
    name = "untie what was tied before sharding"
    said = "error RuntimeError: parameter 'head.weight' was tied to 'embed.weight'"
    assert fault("shardwise", (name, "after"), said) is None
    assert fault("shardwise", (name, "after"), "equal") is not None
    assert fault("torch", (name, "after"), "equal") is None
    wrong = fault("torch", (name, "after"), "off by 3 (embed.weight)")
    assert wrong is not None and name in wrong
    for outcome in ("hangs or crashes", "ranks differ: ['equal', 'off by 1 (x)']"):
        assert fault("zero3", ("load_state_dict", "before"), outcome) is not None
