"""How a compiled graph packs what it sends."""

from __future__ import annotations

import pytest
import torch

from shardwise.engine.torch_private import chunk_cat
from shardwise.graph import runtime


def test_a_slot_is_packed_as_chunk_cat_packs_and_used_again() -> None:
    gradients = [torch.randn(8, 3), torch.randn(4), torch.randn(12, 2, 2)]
    mine = torch.empty(sum(g.numel() for g in gradients) // 4, dtype=torch.float64)
    expected = mine.new_empty((4, mine.numel()))
    chunk_cat(gradients, 4, expected)
    packed = runtime._pack(gradients, 4, mine)
    assert packed is not None and torch.equal(packed.slot.flat.view(4, -1), expected)
    other = runtime._pack(gradients, 4, mine)  # while the first is under way
    assert other is not None and other.slot is not packed.slot
    packed.give_back()
    assert packed.slot.flat.untyped_storage().nbytes() == 0
    again = runtime._pack([2 * g for g in gradients], 4, mine)
    assert again is not None and again.slot is packed.slot
    assert torch.equal(again.slot.flat.view(4, -1), 2 * expected)


@pytest.mark.parametrize("shape", [(), (6, 2)])
def test_what_is_not_cut_evenly_has_no_slot(shape: tuple[int, ...]) -> None:
    assert runtime._pack([torch.zeros(8), torch.zeros(shape)], 4, torch.empty(4)) is None
