"""Fixtures: pools of real ranks, shared by the whole run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import Ranks


@pytest.fixture(scope="session")
def two() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="session")
def four() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.stop()
