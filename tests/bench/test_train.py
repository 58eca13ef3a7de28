"""The bench trains as `paceline train` does and reports one line that can be compared. No time is asserted."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from paceline.bench.train import StepClock
from paceline.cli import main as command_line
from paceline.config.load import resolve
from paceline.costs.layers import training_flops_per_token
from paceline.explain.run_folder import read_run
from paceline.observe.hooks import StepEnd
from paceline.observe.telemetry.record import RecordWriter
from paceline.runtime.gemm import sustained_gemm
from tests.cli.commands import LAUNCHER
from tests.training import runs

KEYS = (
    "step_seconds",
    "tokens_per_second_per_gpu",
    "tflops_per_gpu",
    "peak_memory_gib",
    "sustained_gemm_tflops",
    "recipe",
    "versions",
)


def test_one_json_line_with_consistent_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    recorded: list[int] = []
    monkeypatch.setattr(RecordWriter, "put", lambda self, line: recorded.append(line[0]))
    recipe, out = tmp_path / "tiny.toml", tmp_path / "results" / "lines.jsonl"
    recipe.write_text("")
    # data, checkpoints and the run folder of the recipe are left alone
    tiny = runs.tiny(tmp_path / "run", "no such data", "train.eval_interval=2", "checkpoint.interval=1", steps=1000)
    sets = [f"--set={override}" for override in tiny]
    for _ in range(2):
        arguments = ["bench", "train", str(recipe), "--steps", "4", "--warm-up", "2", f"--out={out}", *sets]
        monkeypatch.setattr(sys, "argv", ["paceline", *arguments])
        with pytest.raises(SystemExit) as end:
            command_line.main()
        assert not end.value.code
    assert recorded == [*range(1, 7)] * 2, "a run has its record, so the bench has it"
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines == out.read_text().splitlines() and len(lines) == 2
    record = json.loads(lines[0])
    assert set(KEYS) <= set(record)
    assert record["steps"] == 4 and record["step_seconds_min"] <= record["step_seconds"] <= record["step_seconds_max"]
    tokens = 4 * 16  # of a step
    assert record["tokens_per_second_per_gpu"] == pytest.approx(tokens / record["step_seconds"])
    flops = training_flops_per_token(resolve({}, tiny).config.model, 16)
    assert record["tflops_per_gpu"] == pytest.approx(tokens * flops / record["step_seconds"] / 1e12)
    assert record["fraction_of_gemm"] == pytest.approx(record["tflops_per_gpu"] / record["sustained_gemm_tflops"])
    assert record["mfu"] is None and record["peak_tflops"] is None, "a CPU has no peak in the table"
    assert record["gemm_dtype"] == "float32" and record["sustained_bf16_gemm_tflops"] is None
    assert record["tokens_per_joule"] is None, "a CPU does not count its energy here"
    phases = record["start_up_seconds"]
    assert list(phases) == ["imports", "process group", "mesh", "model", "loader and hooks", "first step"]
    assert record["recipe"]["data"]["train"] == "synthetic" and record["recipe"]["train"]["steps"] == 6
    assert record["versions"]["torch"] == torch.__version__
    assert "sustained GEMM" in captured.err
    told = captured.err.splitlines()
    for text in ("building the model", "warm-up 2/2", "step 4/4", "measuring the matrix product"):
        assert told.count(text) == 2, text
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("terminal", "options", "line", "table"), [
    (True, [], False, True), (True, ["--json"], True, False), (False, [], True, True), (False, ["--json"], True, False),
])  # fmt: skip
def test_the_line_is_for_programs_and_the_table_for_people(
    terminal: bool,
    options: list[str],
    line: bool,
    table: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    recipe = tmp_path / "tiny.toml"
    recipe.write_text("")
    sets = [f"--set={override}" for override in runs.tiny(tmp_path / "run", "none", steps=1)]
    arguments = ["bench", "train", str(recipe), "--steps=1", "--warm-up=1", *options, *sets]
    monkeypatch.setattr(sys, "argv", ["paceline", *arguments])
    with pytest.raises(SystemExit) as end:
        command_line.main()
    assert not end.value.code
    captured = capsys.readouterr()
    assert len(captured.out.splitlines()) == line
    assert ("sustained GEMM" in captured.err) is table


def test_a_recipe_in_place_of_the_verb(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["paceline", "bench", "mine.toml", "--steps", "5"])
    with pytest.raises(SystemExit) as end:
        command_line.main()
    assert end.value.code == 2
    assert "paceline bench train mine.toml --steps 5" in capsys.readouterr().err


def test_the_clock_gives_times_between_neighbouring_steps() -> None:
    clock = StepClock(torch.device("cpu"))
    for step in (1, 2, 3):
        clock.on_step_end(StepEnd(step=step))
    assert len(clock.seconds()) == 2 and all(seconds >= 0 for seconds in clock.seconds())


def test_gemm_counts_what_it_multiplied() -> None:
    rate = sustained_gemm(torch.device("cpu"), seconds=0.05)
    assert rate.size == 1024 and rate.dtype == "float32"
    repeats = rate.tflops * 1e12 * rate.seconds / (2 * rate.size**3)
    assert round(repeats) >= 1 and repeats == pytest.approx(round(repeats))


def test_gemm_in_fp8() -> None:
    rate = sustained_gemm(torch.device("cpu"), seconds=0.02, fp8=True)
    assert rate.dtype == "float8_e4m3fn" and rate.tflops > 0


def test_a_kept_folder_is_a_run_that_explain_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    recipe, kept = tmp_path / "tiny.toml", tmp_path / "kept"
    recipe.write_text("")
    sets = [f"--set={override}" for override in runs.tiny(tmp_path / "run", "none", "observe.log_interval=9")]
    arguments = ["bench", "train", str(recipe), "--steps=4", "--warm-up=2", f"--keep={kept}", "--json", *sets]
    monkeypatch.setattr(sys, "argv", ["paceline", *arguments])
    with pytest.raises(SystemExit) as end:
        command_line.main()
    assert not end.value.code
    record = json.loads(capsys.readouterr().out)
    assert [line["step"] for line in record["logged"]] == [1, 6], "the first and the last step are always logged"
    assert all(line["loss"] > 0 and line["grad_norm"] > 0 for line in record["logged"])
    assert len(record["seconds_by_step"]) == 4
    view = read_run(kept)
    assert view.config is not None and view.config.train.steps == 6
    assert view.end == "end" and list(view.steps) == [1, 2, 3, 4, 5, 6] and not view.problems
    assert [line.loss for line in view.metrics] == [line["loss"] for line in record["logged"]]
