"""Two runs: a proposed change that was made is held to what was expected of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paceline.explain.compare import compare_runs, listed, settings_apart

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from synthetic_run import Cluster, write


def test_expected_against_obtained(tmp_path: Path) -> None:
    slow = Cluster(seed=1, recipe=["parallel.recompute=full"])
    slow.own["backward"] = slow.own["backward"] + 0.95 * slow.own["forward"]
    write(slow, tmp_path / "before")
    write(Cluster(seed=2, recipe=["parallel.recompute=selective"]), tmp_path / "after")
    found = compare_runs(tmp_path / "before", tmp_path / "after")
    (acted,) = found.data["acted_on"]
    assert acted["id"] == "explain.full-recompute" and acted["keys"] == ["parallel.recompute"]
    assert acted["obtained"] == pytest.approx(acted["expected"], abs=0.02) and acted["expected"] > 0.1
    told = next(finding for finding in found.findings if finding.id == "explain.acted-on")
    assert "Keep the change" in told.next_step


def test_nothing_was_acted_on_where_nothing_was_changed(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        write(Cluster(seed=seed), tmp_path / name)
    assert compare_runs(tmp_path / "a", tmp_path / "b").data["acted_on"] == []


def test_the_size_of_the_model_stands_first_and_what_is_left_out_is_counted() -> None:
    first = {"train.eval_interval": 0, "checkpoint.interval": 5, "model.norm_eps": 1, "model.num_layers": 4, "b": 1}
    first |= {"train.seq_len": 16, "parallel.tp": 1}
    apart = [one.key for one in settings_apart(first, {})]
    assert apart == [
        *("model.num_layers", "train.seq_len", "model.norm_eps", "parallel.tp", "b"),
        *("checkpoint.interval", "train.eval_interval"),
    ]
    assert listed(apart).endswith("checkpoint.interval and 1 more") and listed(apart[:6]).endswith("interval")


def test_what_is_recorded_costs_time_and_is_compared(tmp_path: Path) -> None:
    for name, interval in (("a", 1), ("b", 10)):
        recipe = [f"observe.log_interval={interval}", f"observe.peak_tflops={interval}", f"run.name={name}"]
        write(Cluster(seed=1, recipe=recipe), tmp_path / name)
    found = compare_runs(tmp_path / "a", tmp_path / "b")
    assert [one["key"] for one in found.data["settings"]] == ["observe.log_interval"]


def test_variables_that_are_set_by_launchers_are_no_difference(tmp_path: Path) -> None:
    own = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "OMP_NUM_THREADS": "12", "TORCHINDUCTOR_CACHE_DIR": "/a"}
    write(Cluster(seed=1, dp=8, environment=own), tmp_path / "a")
    write(Cluster(seed=2, dp=8, environment={"NCCL_ALGO": "Ring"}), tmp_path / "b")
    found = compare_runs(tmp_path / "a", tmp_path / "b")
    assert [one["key"] for one in found.data["settings"]] == ["environment NCCL_ALGO"]


def test_recipes_that_are_not_valid_here_are_compared_as_they_are_written(tmp_path: Path) -> None:
    for name, recompute in (("a", "full"), ("b", "selective")):
        recipe = write(Cluster(seed=1, recipe=[f"parallel.recompute={recompute}"]), tmp_path / name) / "recipe.toml"
        text = recipe.read_text()
        assert "\nplugins = []" in text
        recipe.write_text(text.replace("\nplugins = []", '\nplugins = ["not_importable_from_here"]'))
    found = compare_runs(tmp_path / "a", tmp_path / "b")
    assert [one["key"] for one in found.data["settings"]] == ["parallel.recompute"] and found.data["settings_known"]
    assert "not_importable_from_here" in found.tables[0].notes[0]


def test_a_recipe_that_cannot_be_read_is_no_recipe_that_agrees(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write(Cluster(seed=1), tmp_path / name)
    (tmp_path / "b" / "recipe.toml").write_text("[train")
    found = compare_runs(tmp_path / "a", tmp_path / "b")
    assert found.tables[0].rows == (("settings of the recipes", "not known", "not known"),)
    assert found.tables[0].notes[0].startswith("b: recipe.toml") and "TOML" in found.tables[0].notes[0]
    assert not found.data["settings_known"]
