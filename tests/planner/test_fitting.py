"""Fits find what made the data, and never look at what they are judged on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paceline.costs.profiles import find_profile
from paceline.costs.step import predict
from paceline.planner.fit_recipes import RANGES, RECIPES, START, Recipe
from paceline.planner.fitting import (
    LINEAR,
    demands,
    fit_in_turn,
    fit_memory,
    fit_times,
    left_out,
    memory_units,
    neutral,
)
from paceline.planner.published import PublishedRun, read_run

TRUE = replace(find_profile("megatron"), gemm_efficiency=0.71, launch_us=900.0, nvlink_efficiency=0.6, kept_hidden=7.0)
TIME = ("gemm_efficiency", "launch_us", "nvlink_efficiency")
RECIPE = Recipe(profile="megatron", sources=("bridge",), time=TIME, memory=("kept_hidden", "framework_gib"))


def made_up_runs() -> list[PublishedRun]:
    """Runs that the true profile would have had."""
    runs = []
    for model, layers, hidden in (("small", 16, 1024), ("middle", 24, 2048), ("large", 32, 4096)):
        for tp in (1, 2, 4):
            for batch in (1, 4, 16):
                row = {
                    "id": f"bridge-{model}-{tp}-{batch}", "model": model, "layers": str(layers), "hidden": str(hidden),
                    "heads": "16", "ffn": str(4 * hidden), "vocab": "32000", "seq": "2048", "gpu": "H100",
                    "n_gpus": "8", "precision": "bf16", "tp": str(tp), "dp": str(8 // tp), "mbs": str(batch),
                    "gbs": "256", "step_time_s": "100", "zero": "1",
                }  # fmt: skip
                run = read_run(row)
                assert isinstance(run, PublishedRun)
                truth = predict(run.workload, run.cluster, TRUE)
                runs.append(replace(run, step_seconds=truth.seconds, memory_bytes=truth.memory_bytes))
    return runs


def test_a_fit_finds_the_numbers_that_made_the_times() -> None:
    runs = made_up_runs()
    measured = np.array([run.step_seconds for run in runs], dtype=np.float64)
    start = replace(TRUE, gemm_efficiency=0.9, launch_us=300.0, nvlink_efficiency=0.9)
    found = fit_times(start, TIME, demands(runs, TRUE), measured, np.ones(len(runs)))
    for name in TIME:
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.01)


def test_a_fit_of_memory_finds_them_too() -> None:
    runs = made_up_runs()
    measured = np.array([run.memory_bytes for run in runs], dtype=np.float64)
    start = replace(TRUE, kept_hidden=4.0, framework_gib=0.0)
    found = fit_memory(start, RECIPE.memory, memory_units(runs, TRUE), measured)
    assert found.kept_hidden == pytest.approx(7.0, rel=1e-6)
    assert found.framework_gib == pytest.approx(TRUE.framework_gib, rel=1e-6)


def test_what_is_left_out_changes_nothing() -> None:
    """The predictions of a group do not move when its own measurements are falsified."""
    runs = made_up_runs()
    groups = [run.model_name for run in runs]
    honest = left_out(runs, groups, TRUE, RECIPE)
    falsified = [
        replace(run, step_seconds=99.0 * (run.step_seconds or 0), memory_bytes=7.0 * (run.memory_bytes or 0))
        if run.model_name == "large"
        else run
        for run in runs
    ]
    other = left_out(falsified, groups, TRUE, RECIPE)
    mine = np.array([group == "large" for group in groups])
    np.testing.assert_array_equal(honest.seconds[mine], other.seconds[mine])
    np.testing.assert_array_equal(honest.memory_bytes[mine], other.memory_bytes[mine])
    assert not np.allclose(honest.seconds[~mine], other.seconds[~mine])


def test_every_fit_starts_at_the_same_numbers_whatever_is_shipped() -> None:
    for recipe in RECIPES:
        shipped = find_profile(recipe.profile)
        start = neutral(shipped, recipe)
        for name in (*recipe.time, *recipe.experts):
            low, high = RANGES[name]
            assert low <= START[name] <= high and getattr(start, name) == START[name]
            assert low <= getattr(shipped, name) <= high
        assert set(recipe.memory) <= set(LINEAR)


def test_numbers_of_experts_are_fitted_on_experts_alone() -> None:
    """And what dense models teach does not move with the times of mixtures of experts."""
    runs = made_up_runs()
    recipe = Recipe(profile="megatron", sources=("bridge",), time=TIME, experts=("expert_gemm_efficiency",))
    measured = np.array([run.step_seconds for run in runs], dtype=np.float64)
    experts = np.array([run.model_name == "large" for run in runs])
    start, demand, weights = neutral(TRUE, recipe), demands(runs, TRUE), np.ones(len(runs))
    one = fit_in_turn(start, recipe, demand, measured, weights, experts)
    other = fit_in_turn(start, recipe, demand, np.where(experts, 3.0, 1.0) * measured, weights, experts)
    assert all(getattr(one, name) == getattr(other, name) for name in TIME)
