"""A range of elements is cut into few boxes that cover it once, and pieces are views."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.checkpoint.pieces import Box, BoxIndex, Piece, ShardedValue, boxes_of_range


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 6), max_size=4), st.data())
def test_boxes_cover_the_range_once_in_order(shape, data):
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    end = data.draw(st.integers(start, numel))
    numbers = torch.arange(numel).view(shape)
    boxes = boxes_of_range(shape, start, end)
    found = []
    for box in boxes:
        index = tuple(slice(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True))
        found += numbers[index].flatten().tolist()
    assert found == list(range(start, end))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_the_docstring_example():
    assert boxes_of_range((4, 3), 2, 8) == [
        Box(offsets=(0, 2), sizes=(1, 1)),
        Box(offsets=(1, 0), sizes=(1, 3)),
        Box(offsets=(2, 0), sizes=(1, 2)),
    ]


def test_scalar_and_empty_ranges():
    assert boxes_of_range((), 0, 1) == [Box(offsets=(), sizes=())]
    assert boxes_of_range((), 0, 0) == []
    assert boxes_of_range((0, 5), 0, 0) == []


def test_flat_pieces_are_views_of_the_buffer():
    flat = torch.zeros(9)
    value = ShardedValue.from_flat_range(flat, (5, 4), start=6)
    for piece in value.pieces:
        piece.tensor.fill_(1)
    assert flat.tolist() == [1.0] * 9
    assert value.num_local_bytes == 36


def test_a_piece_outside_the_tensor_is_refused():
    with pytest.raises(AssertionError, match="leaves"):
        ShardedValue(
            global_shape=torch.Size([4]), dtype=torch.float32, pieces=(Piece(offsets=(3,), tensor=torch.zeros(2)),)
        )


def test_pieces_inside_a_larger_tensor_are_the_same_memory():
    flat = torch.zeros(6)
    value = ShardedValue.from_flat_range(flat, (4, 3), start=2).inside((9, 5), (5, 2), saved=False)
    whole = torch.zeros(9, 5)
    for piece in value.pieces:
        piece.tensor.fill_(1)
        whole[tuple(slice(o, o + s) for o, s in zip(piece.offsets, piece.tensor.shape, strict=True))] = 1
    assert value.global_shape == torch.Size((9, 5)) and not any(piece.saved for piece in value.pieces)
    assert flat.tolist() == [1.0] * 6
    # elements 2 to 7 of the 4 x 3 tensor whose corner is at (5, 2)
    assert whole.nonzero().tolist() == [[5, 4], [6, 2], [6, 3], [6, 4], [7, 2], [7, 3]]
    assert not any(piece.saved for piece in value.map(torch.clone).pieces)


@pytest.mark.parametrize("sizes", [(1, 1, 3), (1, 2, 5), (4, 3, 7), (2, 1, 7)])
def test_an_index_finds_all_that_a_box_touches(sizes):
    """The same as looking at each, whichever dims are cut how thin."""
    whole = (4, 3, 7)
    starts = [range(0, size, step) for size, step in zip(whole, sizes, strict=True)]
    boxes = []
    for offsets in itertools.product(*starts):
        ends = (min(size, start + step) for size, start, step in zip(whole, offsets, sizes, strict=True))
        boxes.append(Box(offsets=offsets, sizes=tuple(e - o for e, o in zip(ends, offsets, strict=True))))
    index = BoxIndex([(box, number) for number, box in enumerate(boxes)])
    for asked in (Box(offsets=(0, 0, 0), sizes=whole), Box(offsets=(1, 1, 2), sizes=(2, 1, 4)), boxes[-1]):
        expected = {n: box.common(asked) for n, box in enumerate(boxes) if box.common(asked) is not None}
        assert {number: common for common, number in index.touched(asked)} == expected
    assert list(BoxIndex([]).touched(boxes[0])) == []
