"""What is not a tensor comes back too, or says why not."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from paceline.checkpoint.state import TrainState, restore_rng
from paceline.errors import CheckpointError
from paceline.runtime.seed import rng_state, seed_all

CPU = torch.device("cpu")


def draw() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(np.random.rand())


def test_round_trip():
    state = TrainState(step=3, tokens=4, consumed_samples=5, schedule={"kind": "cosine"}, extra={"plugin": [1, None]})
    assert TrainState.from_json(state.to_json(), source="x") == state


def test_unknown_fields_of_a_later_release_are_ignored_but_not_a_later_format():
    assert TrainState.from_json('{"format": 1, "step": 2, "more": 1}', source="x").step == 2
    with pytest.raises(CheckpointError, match="format 99"):
        TrainState.from_json('{"format": 99, "step": 2}', source="x")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        TrainState.from_json("{", source="state.json")


def test_random_numbers_go_on_or_are_seeded_by_the_rule():
    seed_all(1)
    saved = rng_state(CPU)
    expected = draw()
    assert restore_rng(saved, device=CPU, seed=1, step=10, rank=0)
    assert draw() == expected
    drawn = []
    for step, rank in ((10, 0), (10, 0), (10, 1), (20, 0)):
        assert not restore_rng(None, device=CPU, seed=1, step=step, rank=rank)
        drawn.append(draw())
    assert drawn[0] == drawn[1] and len(set(drawn)) == 3
