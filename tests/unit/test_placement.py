"""Layouts: rows cover every element once, agree with torch.chunk, and leave no gaps."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.engine.gradients import _lay_rows
from shardwise.engine.torch_private import chunk_cat
from shardwise.planning.rows import ALIGNMENT, Rows, lay_out
from shardwise.planning.units import group_by_bytes

shapes = st.lists(st.integers(0, 9), min_size=0, max_size=3).map(tuple)
worlds = st.integers(1, 9)


@given(shapes, worlds)
def test_rows_are_torch_chunks(shape: tuple[int, ...], ranks: int) -> None:
    rows = Rows(shape, ranks)
    if not shape:
        assert [rows.local_shape(r) for r in range(ranks)] == [()] * ranks
        assert rows.part == 1
        return
    tensor = torch.arange(rows.numel).view(shape)
    chunks = list(tensor.chunk(ranks)) + [tensor[:0]] * ranks
    covered = []
    for rank in range(ranks):
        start, stop = rows.span(rank)
        assert torch.equal(tensor[start:stop], chunks[rank])
        assert rows.local_shape(rank) == tuple(chunks[rank].shape)
        assert (stop - start) * rows.width <= rows.part
        covered += list(range(start, stop))
    assert covered == list(range(shape[0]))
    assert rows.even == (shape[0] % ranks == 0)


@given(st.lists(shapes, max_size=8), worlds)
def test_a_layout_has_no_gaps_and_no_overlaps(
    all_shapes: list[tuple[int, ...]], ranks: int
) -> None:
    layout = lay_out(all_shapes, ranks)
    assert sorted(layout.order) == list(range(len(all_shapes)))
    assert [layout.rows[i].shape for i in range(len(all_shapes))] == [
        tuple(all_shapes[i]) for i in layout.order
    ]
    at = 0
    for rows, offset in zip(layout.rows, layout.offsets, strict=True):
        assert offset == at
        at += rows.part
    assert layout.shard_numel == at
    assert layout.full_numel == at * ranks
    scalars = sum(1 for shape in all_shapes if shape == ())
    assert layout.counted_numel == at - scalars
    # 0-d parameters lie last, and every aligned part starts aligned.
    flags = [rows.replicated for rows in layout.rows]
    assert flags == sorted(flags)
    for rows, offset in zip(layout.rows, layout.offsets, strict=True):
        if rows.part % ALIGNMENT == 0 and not rows.replicated and rows.part:
            assert offset % ALIGNMENT == 0


@given(st.lists(shapes, min_size=1, max_size=6), worlds)
def test_gathering_shards_gives_the_parameters_back(
    all_shapes: list[tuple[int, ...]], ranks: int
) -> None:
    """Cut by rows, laid rank after rank as a gather does, read parameter after parameter."""
    layout = lay_out(all_shapes, ranks)
    tensors = [torch.randn(rows.shape) for rows in layout.rows]
    shards = torch.zeros(ranks, layout.shard_numel)
    for rank in range(ranks):
        for tensor, rows, offset in zip(tensors, layout.rows, layout.offsets, strict=True):
            start, stop = rows.span(rank)
            mine = tensor if rows.replicated else tensor[start:stop]
            shards[rank, offset : offset + mine.numel()] = mine.reshape(-1)
    for tensor, rows, offset in zip(tensors, layout.rows, layout.offsets, strict=True):
        block = shards[:, offset : offset + rows.part].reshape(-1)[: rows.numel]
        assert torch.equal(block.view(rows.shape), tensor)


@given(st.lists(st.integers(0, 50)), st.integers(1, 60))
def test_groups_keep_order_and_limit(sizes: list[int], limit: int) -> None:
    groups = group_by_bytes(sizes, lambda s: s, limit)
    assert [s for group in groups for s in group] == sizes
    assert all(groups)
    for group in groups:
        assert sum(group) <= limit or len(group) == 1
    for left, right in pairwise(groups):
        assert sum(left) + right[0] > limit  # a neighbour would not have fitted


@given(
    rows=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    width=st.integers(1, 5),
    ranks=st.integers(2, 24),
)
def test_rows_are_laid_as_chunk_cat_lays_them(rows: list[int], width: int, ranks: int) -> None:
    """Strided ones too, and cast; what is padding stays as it was: zeros."""
    tensors = [torch.randn(width, count).t() for count in rows] + [torch.randn(rows[0])]
    numel = sum(Rows(tuple(t.shape), ranks).part for t in tensors)
    expected = torch.empty(ranks, numel, dtype=torch.float64)
    chunk_cat([t.contiguous() for t in tensors], ranks, expected)
    laid = torch.zeros_like(expected)
    _lay_rows(tensors, laid)
    assert torch.equal(laid, expected)


def test_a_layout_knows_how_much_of_it_is_padding() -> None:
    assert [Rows((rows, 4), 8).holders for rows in (0, 1, 5, 8, 9, 16)] == [0, 1, 5, 8, 5, 8]
    assert Rows((), 8).holders == 8
    assert lay_out([(3, 4), (3,)], 8).mostly_padding
    assert not lay_out([(4, 4)], 8).mostly_padding
    assert not lay_out([()], 8).mostly_padding
