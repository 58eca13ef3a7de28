"""The layout of flat buffers."""

from __future__ import annotations

import pytest
import torch

from paceline.parallel.buckets import plan_buckets

SHAPES = {
    "embed": torch.Size((1003, 7)),
    "block.norm": torch.Size((7,)),
    "block.up": torch.Size((7, 33)),
    "scalar": torch.Size(()),
    "head": torch.Size((1003, 7)),
}


@pytest.mark.parametrize("shard_degree", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("bucket_elements", [1, 500, 10**9])
def test_every_element_lies_once_and_belongs_to_one_rank(shard_degree: int, bucket_elements: int) -> None:
    layout = plan_buckets(SHAPES, shard_degree=shard_degree, bucket_elements=bucket_elements)
    owners = torch.zeros(layout.size, dtype=torch.int64)
    for bucket in layout.buckets:
        assert bucket.size % (64 * shard_degree) == 0
        for slot in bucket.slots:
            assert slot.start % 64 == 0 and bucket.start <= slot.start <= slot.end <= bucket.end
            assert slot.end - slot.start == slot.shape.numel()
            for shard in range(shard_degree):
                start, end = layout.owned(slot, shard)
                owners[start:end] += 1
                begin = layout.shard_start(bucket, shard)
                assert begin <= start <= end <= begin + layout.shard_size(bucket)
    in_slots = torch.zeros_like(owners)
    for slot in layout.slots.values():
        in_slots[slot.start : slot.end] += 1
    assert torch.equal(owners, in_slots) and int(owners.max()) == 1
    assert int(owners.sum()) == sum(shape.numel() for shape in SHAPES.values())


def test_last_used_parameters_come_first() -> None:
    layout = plan_buckets(SHAPES, shard_degree=2, bucket_elements=300)
    assert list(layout.slots) == list(reversed(SHAPES))
    assert [[slot.name for slot in bucket.slots] for bucket in layout.buckets] == [
        ["head"],
        ["scalar", "block.up"],
        ["block.norm", "embed"],
    ]
    assert layout.size < sum(shape.numel() for shape in SHAPES.values()) + 3 * 128 + 5 * 64


def test_parameters_that_are_used_together_lie_in_their_order() -> None:
    shapes = {name: torch.Size((64, size)) for name, size in (("norm", 1), ("q", 2), ("bias", 1), ("k", 3), ("o", 4))}
    usual = plan_buckets(shapes, shard_degree=2, bucket_elements=10**6)
    layout = plan_buckets(shapes, shard_degree=2, bucket_elements=10**6, together=[("q", "k")])
    assert list(usual.slots) == ["o", "k", "bias", "q", "norm"]
    assert list(layout.slots) == ["o", "q", "k", "bias", "norm"]
    assert layout.slots["q"].end == layout.slots["k"].start and layout.size == usual.size
