"""The commands under layouts of several axes, in processes of their own as a user starts them."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from paceline.observe.events import read_metrics
from tests.cli.commands import paceline
from tests.training import runs, stage_faults

TP2_PP2 = ("--nproc", "4", "--set=parallel.tp=2", "--set=parallel.pp=2")


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "tiny.toml"
    path.write_text("")
    return str(path)


def sets(*overrides: str) -> list[str]:
    return [f"--set={override}" for override in overrides]


def test_a_run_over_tensor_and_pipeline_ranks_trains_and_then_speaks(recipe: str, tmp_path: Path) -> None:
    folder, text = tmp_path / "run", runs.write_text(tmp_path / "text")
    more = ("model.vocab_size=259", "observe.progress=lines", "model.tie_embeddings=true")
    done = paceline("train", recipe, *TP2_PP2, *sets(*runs.tiny(folder, text, *more, steps=4)))
    assert done.returncode == 0, done.stderr
    assert "4 ranks, tp 2, pp 2 (1f1b), zero 1 (flat engine)" in " ".join((done.stdout + done.stderr).split())
    assert [record.step for record in read_metrics(folder)] == [1, 2, 3, 4]
    assert "4 x " in done.stdout and "paceline generate" in done.stdout
    said = paceline("generate", str(folder), "--prompt", "abcd", "-n", "5", "--temperature", "0", "--json")
    assert said.returncode == 0, said.stderr
    assert json.loads(said.stdout)["prompt"] == "abcd"


def test_bench_measures_a_layout(recipe: str, tmp_path: Path) -> None:
    tiny = runs.tiny(tmp_path / "run", "synthetic", "parallel.cp=2", "parallel.pp=2")
    done = paceline("bench", "train", recipe, "--nproc", "4", "--steps", "2", "--warm-up", "1", *sets(*tiny))
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    record = json.loads(line)
    assert record["loss"] > 0
    # all ranks together: a step's tokens over its time
    assert 4 * record["tokens_per_second_per_gpu"] == pytest.approx(4 * 16 / record["step_seconds"])


def test_an_error_in_the_last_stage_ends_all_processes_with_its_words(recipe: str, tmp_path: Path) -> None:
    data = runs.write_dataset(tmp_path / "corpus")
    tiny = runs.tiny(
        tmp_path / "run",
        data,
        "run.name=raise:3:99:3",
        f'run.plugins=["{stage_faults.__file__}"]',
        "task.kind=faulty",
        steps=20,
    )
    began = time.monotonic()
    done = paceline("train", recipe, *TP2_PP2, *sets(*tiny))
    assert done.returncode not in (0, None) and time.monotonic() - began < 100
    assert stage_faults.WORDS in done.stderr, done.stderr
    assert [record.step for record in read_metrics(tmp_path / "run")] == [1, 2]
