"""The documented plugin trains through the command line, and each of its four parts is used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def paceline(*arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "paceline", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=240, check=False)


def train(folder: Path, *changes: str) -> list[dict[str, float]]:
    """Runs the example's recipe and returns its metrics."""
    settings = [
        f"--set=run.dir={folder}",
        "--set=observe.tensorboard=false",
        *(f"--set={change}" for change in changes),
    ]
    done = paceline("train", "examples/plugin/recipe.toml", *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, float]]]:
    """The run of the example on a text that only its own data source gives: one that repeats itself."""
    folder = tmp_path_factory.mktemp("plugin")
    text = folder / "text.txt"
    text.write_text("pace by pace along the line, " * 100)
    lines = train(folder / "run", f"data.train=bytes:{text}", "train.steps=40")
    return folder / "run", lines


def test_the_preset_is_expanded_into_the_run_folder(example: tuple[Path, list[dict[str, float]]]) -> None:
    recipe = tomllib.loads((example[0] / "recipe.toml").read_text())
    assert recipe["model"]["hidden_size"] == 64
    assert recipe["model"]["vocab_size"] == 256


def test_the_data_source_is_what_the_model_learns(example: tuple[Path, list[dict[str, float]]]) -> None:
    # a model that knows nothing of the text stands at ln 256 = 5.5; 29 bytes in a row are learned in a few steps
    losses = [line["loss"] for line in example[1]]
    assert losses[0] > 5
    assert losses[-1] < 2


def test_the_task_decides_what_is_scored(tmp_path: Path) -> None:
    masked = train(tmp_path / "with_context", "train.steps=1")[0]
    plain = train(tmp_path / "pretrain", "train.steps=1", "task.kind=pretrain")[0]
    # the same weights and samples, other tokens in the mean
    assert masked["loss"] != plain["loss"]
    assert masked["tokens"] == plain["tokens"]


def test_the_hook_writes_what_it_saw(example: tuple[Path, list[dict[str, float]]]) -> None:
    folder, lines = example
    best = json.loads((folder / "best_loss.json").read_text())
    assert best["loss"] == min(line["loss"] for line in lines)
    assert {"step": best["step"], "loss": best["loss"]} in [
        {"step": line["step"], "loss": line["loss"]} for line in lines
    ]


def test_a_file_that_is_too_short_is_refused(tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("too short")
    settings = [f"--set=run.dir={tmp_path / 'run'}", f"--set=data.train=bytes:{short}"]
    done = paceline("train", "examples/plugin/recipe.toml", *settings)
    assert done.returncode == 1
    assert "has 9 bytes, a sample needs 129" in done.stderr
