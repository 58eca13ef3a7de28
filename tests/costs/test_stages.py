"""Stages are cut so that the slowest is as fast as can be."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest

from paceline.config.model import ModelConfig
from paceline.config.presets import preset
from paceline.config.run import RunConfig
from paceline.costs.layers import training_flops_per_token
from paceline.costs.stages import cut_stages, partition, stage_costs, stages_of_rank
from paceline.errors import ConfigError


def _config(name: str = "tiny_llama", changes: dict[str, Any] | None = None, **parallel: Any) -> RunConfig:
    model = preset(name) | (changes or {})
    return RunConfig.model_validate({"model": model, "parallel": parallel, "train": {"seq_len": 256}})


def _best_by_trial(costs: Sequence[int], last: int, parts: int) -> tuple[int, ...]:
    """All cuts: least maximum, then least sum of squares, then fewest in front."""
    options = []
    for cuts in itertools.combinations(range(1, len(costs)), parts - 1):
        ends = [0, *cuts, len(costs)]
        sums = [sum(costs[start:stop]) for start, stop in itertools.pairwise(ends)]
        sums[-1] += last
        sizes = tuple(stop - start for start, stop in itertools.pairwise(ends))
        options.append((max(sums), sum(value**2 for value in sums), sizes))
    return min(options)[2]


def test_no_cut_is_better() -> None:
    draw = random.Random(0)
    for _ in range(500):
        items = draw.randint(1, 9)
        parts, last = draw.randint(1, items), draw.randint(0, 20)
        costs = [draw.randint(1, 9) for _ in range(items)]
        assert partition(costs, last, parts) == _best_by_trial(costs, last, parts), (costs, last, parts)


def test_layers_that_do_not_divide() -> None:
    """Case 78: 46 layers over 4 stages and 40 over 16 get a layout; 3 layers over 4 stages are refused."""
    assert partition([1] * 46, 1, 4) == (11, 12, 12, 11)
    forty = partition([1] * 40, 0, 16)
    assert sum(forty) == 40 and set(forty) == {2, 3}
    with pytest.raises(ConfigError, match="3 layers cannot be cut into 4") as error:
        cut_stages(_config(changes={"num_layers": 3}, pp=4), 4)
    assert "at most 3 stages" in error.value.next_step


def test_head_and_multi_token_prediction_count_on_the_last_stage() -> None:
    def sizes(**changes: Any) -> list[int]:
        return [len(stage) for stage in cut_stages(_config(changes={"num_layers": 16} | changes, pp=4), 4)]

    assert sizes(vocab_size=2) == [4, 4, 4, 4]
    big = sizes(vocab_size=8192)
    assert big[-1] < 4 and sum(big) == 16
    assert sizes(vocab_size=2, mtp_layers=3)[-1] < 4


def test_dense_and_expert_layers_have_their_own_costs() -> None:
    """Three cheap layers in front of expert layers: the first stage takes more layers than the others."""
    changes = {"num_layers": 8, "vocab_size": 2, "mtp_layers": 0, "ffn_size": 16}
    config = _config(
        "tiny_deepseek", changes | {"moe": preset("tiny_deepseek")["moe"] | {"first_dense_layers": 3}}, pp=2
    )
    first, second = cut_stages(config, 2)
    assert len(first) > len(second)


def test_recomputed_layers_cost_one_forward_more() -> None:
    modes = ["full"] * 4 + ["none"] * 4
    config = _config(changes={"num_layers": 8, "vocab_size": 2}, recompute=modes, pp=2)
    costs = stage_costs(config, (range(4), range(4, 8)))
    assert costs[0] == pytest.approx(4 / 3 * costs[1], rel=1e-3)


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_switch", "tiny_deepseek", "tiny_gpt"])
def test_costs_of_all_stages_are_those_of_the_model(name: str) -> None:
    config = _config(name, pp=2)
    whole = training_flops_per_token(config.model, 256)
    assert sum(stage_costs(config, cut_stages(config, 2))) == pytest.approx(whole, rel=1e-12)


def test_a_layout_overrides() -> None:
    config = _config(changes={"num_layers": 8}, pp=4, pipeline_layout=[1, 2, 2, 3])
    assert cut_stages(config, 4) == (range(1), range(1, 3), range(3, 5), range(5, 8))


@pytest.mark.parametrize(
    ("layout", "words"),
    [([4, 4], "names 2 stages"), ([2, 2, 2, 3], "places 9 layers"), ([3, 0, 2, 3], "without layers")],
)
def test_layouts_that_do_not_fit_are_refused(layout: list[int], words: str) -> None:
    config = _config(changes={"num_layers": 8}, pp=4, pipeline_layout=layout)
    with pytest.raises(ConfigError, match=words):
        cut_stages(config, 4)


def test_where_stages_lie() -> None:
    loop = _config(pp=2, stages_per_rank=2, pipeline_schedule="interleaved_1f1b").parallel
    assert [stages_of_rank(loop, rank) for rank in range(2)] == [(0, 2), (1, 3)]
    v = _config(pp=4, stages_per_rank=2, pipeline_schedule="zbv").parallel
    assert [stages_of_rank(v, rank) for rank in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    assert stages_of_rank(_config().parallel, 0) == (0,)


def test_thousands_of_layers_are_cut_at_once() -> None:
    assert sum(partition([5] * 10_000, 7, 64)) == 10_000
    assert sum(partition([5] * 10_000, 7, 9216)) == 10_000
    assert ModelConfig(**preset("llama3_405b")).num_layers == 126
    assert len(cut_stages(_config("llama3_405b", pp=16, stages_per_rank=7), 112)) == 112
