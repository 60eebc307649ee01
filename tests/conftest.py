"""Fixtures: pools of real ranks, shared by the whole run."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest
import torch
import torch.distributed as dist

from tests.quiet import sharing_the_machine
from tests.ranks import Ranks


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with sharing_the_machine(alone=item.get_closest_marker("quiet") is not None):
        return (yield)


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


@pytest.fixture
def no_group() -> Iterator[None]:
    """No process group at the start (a test may have left its group of one), and none after."""
    _leave_group()
    yield
    _leave_group()


@pytest.fixture(autouse=True)
def denormal_numbers() -> Iterator[None]:
    """A benchmark that ran in this process may have switched them off."""
    torch.set_flush_denormal(False)
    yield


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
