"""Learning-rate schedules are pure functions of the step (case 52)."""

from __future__ import annotations

import itertools
import math

import pytest

from paceline.config.optim import OptimConfig
from paceline.optim.schedule import decay_range, learning_rate, lr_factor


def test_warm_up_is_linear_and_reaches_the_peak_at_its_last_step() -> None:
    config = OptimConfig(lr=1e-3, warmup_steps=10, schedule="cosine")
    assert learning_rate(config, 1, 100) == pytest.approx(1e-4, rel=1e-12)
    assert learning_rate(config, 10, 100) == 1e-3
    assert learning_rate(config, 11, 100) < 1e-3


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize("shape", ["linear", "cosine", "sqrt"])
def test_ends_exactly_at_min_lr_and_never_rises(schedule: str, shape: str) -> None:
    config = OptimConfig(lr=1e-3, min_lr=1e-4, warmup_steps=5, schedule=schedule, decay_shape=shape)
    rates = [learning_rate(config, step, 50) for step in range(1, 60)]
    assert rates[49] == pytest.approx(1e-4, rel=1e-12)
    assert rates[58] == rates[49]
    assert all(later <= earlier for earlier, later in itertools.pairwise(rates[4:]))


def test_cosine_is_half_way_at_the_middle() -> None:
    config = OptimConfig(lr=2.0, min_lr=0.5, schedule="cosine")
    assert learning_rate(config, 50, 100) == pytest.approx(1.25, rel=1e-12)
    quarter = 0.5 + 1.5 * 0.5 * (1 + math.cos(math.pi / 4))
    assert learning_rate(config, 25, 100) == pytest.approx(quarter, rel=1e-12)


def test_wsd_stays_at_the_peak_and_decays_over_the_last_steps() -> None:
    config = OptimConfig(lr=1.0, schedule="wsd", warmup_steps=10, decay_steps=20)
    assert all(lr_factor(config, step, 100) == 1.0 for step in range(10, 81))
    assert lr_factor(config, 90, 100) == pytest.approx(0.5, rel=1e-12)
    assert lr_factor(config, 100, 100) == 0.0
    assert decay_range(config.model_copy(update={"decay_steps": 0}), 100) == (90, 10)


def test_wsd_decay_longer_than_the_run_starts_after_the_warm_up() -> None:
    config = OptimConfig(lr=1.0, schedule="wsd", warmup_steps=10, decay_steps=200)
    assert lr_factor(config, 10, 100) == 1.0
    assert lr_factor(config, 55, 100) == pytest.approx(0.5, rel=1e-12)


def test_short_decay_then_stays_at_the_minimum() -> None:
    config = OptimConfig(lr=1.0, min_lr=0.1, schedule="linear", warmup_steps=10, decay_steps=40)
    assert learning_rate(config, 30, 100) == pytest.approx(0.55, rel=1e-12)
    assert learning_rate(config, 51, 100) == learning_rate(config, 100, 100) == pytest.approx(0.1)


def test_warm_up_longer_than_the_run() -> None:
    config = OptimConfig(lr=1.0, warmup_steps=100)
    assert [lr_factor(config, step, 4) for step in (1, 4)] == [0.01, 0.04]


def test_resume_gives_the_uninterrupted_rate() -> None:
    config = OptimConfig(lr=3e-4, min_lr=3e-5, warmup_steps=7)
    whole = [learning_rate(config, step, 40) for step in range(1, 41)]
    again = OptimConfig.model_validate_json(config.model_dump_json())
    assert [learning_rate(again, step, 40) for step in range(18, 41)] == whole[17:]


def test_a_new_schedule_on_resume_replaces_peak_minimum_and_shape_together() -> None:
    new = OptimConfig(lr=1e-2, min_lr=1e-3, schedule="linear")
    assert learning_rate(new, 50, 100) == pytest.approx(5.5e-3, rel=1e-12)
