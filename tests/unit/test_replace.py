"""Putting shardwise's names into modules that imported torch's."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch.distributed._composable.fsdp as older
import torch.distributed.fsdp as fsdp

import shardwise


class Lazy(ModuleType):
    """As Transformers' modules: asking for a name imports it."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked for")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Lazy:
    made = Lazy("an_eager_library")
    vars(made).update(fully_shard=fsdp.fully_shard, shard_it=fsdp.fully_shard, other=len)
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


def test_modules_that_imported_the_name_get_ours(library: Lazy) -> None:
    theirs = fsdp.fully_shard
    put_back = shardwise.replace_torch_fully_shard()
    try:
        for home in (fsdp, older, library):
            assert vars(home)["fully_shard"] is shardwise.fully_shard
        assert library.shard_it is shardwise.fully_shard and library.other is len
        methods = (fsdp.register_fsdp_forward_method, shardwise.register_fsdp_forward_method)
        assert methods[0] is methods[1]
        shardwise.replace_torch_fully_shard()()  # nothing left to replace, nor to put back
        assert fsdp.fully_shard is shardwise.fully_shard
    finally:
        put_back()
    for home in (fsdp, older, library):
        assert vars(home)["fully_shard"] is theirs
    assert library.shard_it is theirs
    assert shardwise.fully_shard is not theirs
