"""Fixtures: pools of real ranks, shared by the tests of a file. The order of the files."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardwise import processor
from tests.quiet import sharing_the_machine
from tests.ranks import Ranks

# For this process, other workers and all ranks, before torch's first product.
processor.settle()

# Workers and their ranks have all cores busy: more threads of torch would spin for them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

# The files that take longest, first: a worker that began one of them last would end alone.
LONG = (
    "parity/test_dropin.py",
    "parity/test_parity.py",
    "parity/test_sweep.py",
    "unit/test_attention.py",
    "parity/test_engine.py",
    "unit/test_train.py",
    "parity/test_resume.py",
    "parity/test_one_schedule.py",
    "parity/test_graph.py",
    "parity/test_checkpoint_matrix.py",
    "parity/test_checkpoint.py",
    "unit/test_checkpoint_crash.py",
    "parity/test_examples.py",
    "unit/test_profile.py",
    "parity/test_plan_settings.py",
    "unit/test_parallel_benches.py",
    "unit/test_micro_batches.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {Path(__file__).parent / name: i for i, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path, len(LONG)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with sharing_the_machine(alone=item.get_closest_marker("quiet") is not None):
        return (yield)


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="module", autouse=True)
def no_group_of_another_file() -> Iterator[None]:
    """Which files share a worker is chance: none finds the group of one that another left."""
    _leave_group()
    yield
    _leave_group()


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
