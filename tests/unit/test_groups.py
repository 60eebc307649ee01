"""The layout of messages that travel in groups: every element is kept by one rank."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import UserError
from shardwise.planning.groups import LAYOUTS, Message, Piece, lay_out_messages

SHAPES = st.lists(st.lists(st.integers(1, 6), max_size=3).map(tuple), min_size=1, max_size=6)


@given(SHAPES, st.integers(1, 7), st.sampled_from(LAYOUTS))
def test_every_element_has_one_keeper_and_one_place(shapes, ranks, layout):
    message = Message(tuple(shapes), ranks, layout)
    kept, places = [], []
    for rank in range(ranks):
        at = 0
        for piece in message.pieces(rank):
            assert piece.offset >= at  # in the order of the part, none over another
            at = piece.offset + piece.numel
            kept += [(piece.tensor, i) for i in range(piece.start, piece.stop)]
            places += [rank * message.part + piece.offset + i for i in range(piece.numel)]
        assert at <= message.part
    assert sorted(kept) == [(t, i) for t, size in enumerate(message.sizes) for i in range(size)]
    assert len(set(places)) == len(places) == message.numel - message.padding


def test_the_two_layouts_as_they_are_drawn():
    shapes = ((4, 2), (2, 8))
    rows, flat = (Message(shapes, 2, layout) for layout in LAYOUTS)
    assert rows.pieces(1) == [Piece(0, 4, 8, 0), Piece(1, 8, 16, 4)]
    assert flat.pieces(0) == [Piece(0, 0, 8, 0), Piece(1, 0, 8, 8)]
    assert flat.pieces(1) == [Piece(1, 8, 16, 0)]
    assert rows.even and rows.padding == 0


def test_messages_hold_one_dtype_and_about_their_bytes():
    shapes = [(4,), (4,), (8,), (2,), (100,)]
    kinds = ["a", "b", "a", "b", "a"]
    found = lay_out_messages(shapes, kinds, [4] * 5, 2, 48, "rows")
    assert [members for members, _ in found] == [[0, 2], [4], [1, 3]]
    with pytest.raises(UserError, match="did you mean 'flat'"):
        lay_out_messages(shapes, kinds, [4] * 5, 2, 48, "flt")


def test_no_torch_is_needed():
    code = "import shardwise.planning.groups, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
