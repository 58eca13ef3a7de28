"""Loads of expert layers, put together from the ranks that have them."""

from __future__ import annotations

import pytest
import torch

from distributed import run
from paceline.observe.events import Metric
from paceline.observe.experts import ExpertMeter

LAYERS = ("blocks.1", "blocks.3", "mtp.1")


def _read(rank: int, world_size: int) -> list[dict[str, Metric]]:
    """Ranks 0 and 1 have the first layer, both with the counts of the two; rank 2 has the others."""
    meter = ExpertMeter(torch.device("cpu"), LAYERS, 4)
    for _ in range(2):
        if rank < 2:
            meter.add(LAYERS[:1], torch.tensor([[4, 0, 2, 2]]), torch.tensor([2]), torch.tensor([8.0]))
        else:
            load = torch.tensor([[1, 1, 1, 1], [0, 0, 0, 0]])
            meter.add(LAYERS[1:], load, torch.tensor([0, 0]), torch.tensor([2.0, 0.0]))
    return [meter.read(), meter.read()]


def test_rows_come_from_the_ranks_that_have_them() -> None:
    for found, after in run(_read, 3):
        assert found["moe/load_max_over_mean"] == [2.0, 1.0, 0.0]
        assert found["moe/drop_share"] == [0.25, 0.0, 0.0]
        assert found["moe/router_entropy"] == [1.0, 0.5, 0.0]
        assert after["moe/load_max_over_mean"] == pytest.approx([0.0, 0.0, 0.0])
