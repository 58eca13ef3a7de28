"""Weights are read by slice, without any process group, into any pieces."""

from __future__ import annotations

import pytest
import torch

from paceline.checkpoint.pieces import Box, ShardedValue
from paceline.checkpoint.ranks import Ranks
from paceline.checkpoint.state import TrainState
from paceline.checkpoint.store import CheckpointWriter, Contents
from paceline.checkpoint.weights import CheckpointSource, fill
from paceline.errors import CheckpointError

WEIGHT = torch.arange(12.0).view(4, 3)


@pytest.fixture
def source(tmp_path):
    values = {
        "model/a": ShardedValue.from_full(WEIGHT),
        "model/b": ShardedValue.from_full(torch.ones(2)),
        "optim/a/exp_avg": ShardedValue.from_full(torch.zeros(4, 3)),
    }
    folder = tmp_path / "checkpoints" / "step_00000001"
    CheckpointWriter(Ranks()).save(folder, Contents(values=values, state=TrainState(step=1)))
    return CheckpointSource(tmp_path)


def test_shapes_and_slices(source):
    assert source.shapes() == {"a": torch.Size([4, 3]), "b": torch.Size([2])}
    assert torch.equal(source.read("a"), WEIGHT)
    assert torch.equal(source.read("a", Box(offsets=(1, 2), sizes=(2, 1))), WEIGHT[1:3, 2:3])


def test_fill_pieces(source):
    flat = torch.zeros(5, dtype=torch.bfloat16)
    fill(source, {"a": ShardedValue.from_flat_range(flat, (4, 3), 4)})
    assert flat.tolist() == [4, 5, 6, 7, 8]
    a, b = torch.zeros(4, 3), torch.zeros(2)
    source.fill({"a": ShardedValue.from_full(a), "b": ShardedValue.from_full(b)})
    assert torch.equal(a, WEIGHT) and b.tolist() == [1, 1]


def test_what_does_not_fit_is_listed(source):
    wrong = {"a": ShardedValue.from_full(torch.zeros(3, 4)), "c": ShardedValue.from_full(torch.zeros(1))}
    for call in (lambda: fill(source, wrong), lambda: source.fill(wrong)):
        with pytest.raises(CheckpointError) as caught:
            call()
        assert "a is [4, 3] there and [3, 4] here" in str(caught.value) and "missing: " in str(caught.value)
