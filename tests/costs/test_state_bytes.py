"""Bytes of a parameter that learns and of one that is frozen, against the exact count of a rank."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.config.load import resolve
from paceline.config.run import RunConfig
from paceline.costs.adapters import count_learned
from paceline.costs.memory import estimate
from paceline.costs.profiles import PACELINE
from paceline.costs.state_bytes import StateBytes
from paceline.costs.step import predict
from paceline.costs.workload import Workload
from paceline.planner.machines import find_gpu, make_cluster


def recipe(preset: str, **lora: Any) -> RunConfig:
    train = {"seq_len": 2048, "global_batch_size": 8}
    return resolve({"model": {"preset": preset}, "train": train, "lora": lora}).config


def test_a_parameter_that_learns_takes_16_bytes() -> None:
    config = recipe("llama2_7b")
    states = StateBytes.of(Workload.of(config))
    assert (states.frozen, states.each_frozen) == (0, 0)
    assert states.total == 16 * count_learned(config)


@pytest.mark.parametrize(("base", "each"), [("bf16", 2.0), ("nf4", 0.516)])
def test_a_frozen_one_takes_what_it_is_kept_in(base: str, each: float) -> None:
    config = recipe("llama2_7b", rank=16, base=base)
    states = StateBytes.of(Workload.of(config))
    assert states.learned == count_learned(config) == 39_976_960
    assert states.each_frozen == pytest.approx(each, rel=1e-3)
    assert states.total == pytest.approx(16 * 39_976_960 + each * states.frozen, rel=1e-3)


@pytest.mark.parametrize("preset", ["llama2_7b", "qwen3_30b_a3b"])
@pytest.mark.parametrize("base", ["bf16", "nf4"])
def test_the_prediction_holds_the_weights_that_a_rank_holds(preset: str, base: str) -> None:
    """In 4 bits are linears alone: not embedding and head, not routed experts (27 of 30 billion parameters)."""
    config = recipe(preset, rank=16, base=base, targets=["q_proj"])
    cluster, _ = make_cluster(find_gpu("H200"), 1)
    found = predict(Workload.of(config), cluster, PACELINE).stages[0]
    assert found.weights == pytest.approx(estimate(config, 1).weights, rel=2e-3)
