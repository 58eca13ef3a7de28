"""Layers on each pipeline rank."""

from __future__ import annotations

import pytest

from paceline.costs.cuts import Cut, layers_by_rank


@pytest.mark.parametrize("cut", ["cost", "even", "greedy"])
@pytest.mark.parametrize(("layers", "pp", "stages_per_rank"), [(32, 4, 1), (30, 4, 1), (126, 8, 4), (16, 16, 1)])
def test_no_layer_is_lost(cut: Cut, layers: int, pp: int, stages_per_rank: int) -> None:
    found = layers_by_rank(layers, pp, cut, 2.0, stages_per_rank)
    assert len(found) == pp and sum(found) == pytest.approx(layers)


def test_by_cost_the_last_rank_has_fewer() -> None:
    assert layers_by_rank(32, 4, "cost", 2.5) == (8.0, 9.0, 9.0, 6.0)


def test_llama_405b_counts_embedding_and_head_as_layers() -> None:
    """126 layers on 8 x 16 stages, as its published runs have it."""
    assert layers_by_rank(126, 8, "even", 1.0, 16) == (15.0, *[16.0] * 6, 15.0)


def test_greedy_fills_ranks_in_turn() -> None:
    assert layers_by_rank(16, 4, "greedy", 4.0) == (6.0, 5.0, 5.0, 0.0)
