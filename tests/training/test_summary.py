"""The summary of a run, on numbers that can be checked by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.observe.events import RunFolder, StepRecord
from paceline.training.summary import speed_of, summarize
from paceline.training.validate import Evaluation


def record(step: int, seconds: float, **more: float) -> StepRecord:
    """A step of 1000 tokens on each of two devices."""
    values = StepRecord(
        step=step,
        loss=4.0 - 0.1 * step,
        grad_norm=1.0,
        lr=0.1,
        tokens=2000 * step,
        tokens_per_second_per_gpu=1000 / seconds,
        tflops_per_gpu=2.0 / seconds,
        mfu=0.2 / seconds,
        step_seconds=seconds,
        data_wait_seconds=0.0,
        memory_gib=1.0 + 0.1 * step,
        skipped_steps=0,
        flops_convention="causal",
        peak_tflops=10.0,
    )
    return replace(values, **more)  # type: ignore[arg-type]


def test_speed_weighs_each_line_by_its_steps_and_leaves_out_the_first() -> None:
    # 9 steps of 1 s and 10 of 2 s after the first line: 29 s for 19 steps
    speed = speed_of([record(1, 50.0), record(10, 1.0), record(20, 2.0)])
    assert speed["tokens_per_second_per_gpu"] == pytest.approx(1000 * 19 / 29)
    assert speed["tflops_per_gpu"] == pytest.approx(2 * 19 / 29)
    assert speed["mfu"] == pytest.approx(0.2 * 19 / 29)
    assert speed["memory_gib"] == pytest.approx(3.0)


def test_a_single_line_is_better_than_none() -> None:
    assert speed_of([record(1, 2.0)])["tokens_per_second_per_gpu"] == pytest.approx(500)
    assert speed_of([])["mfu"] is None


def test_energy_weighs_each_line_by_its_steps() -> None:
    lines = [
        replace(record(step, 1.0), extra={"tokens_per_joule": rate}) for step, rate in ((1, 9.0), (10, 1.0), (11, 2.0))
    ]
    # 9 steps of one joule a token, one of half a joule
    assert speed_of(lines)["tokens_per_joule"] == pytest.approx(10 / 9.5)
    assert speed_of([*lines, record(12, 1.0)])["tokens_per_joule"] is None


def test_unknown_rates_stay_unknown() -> None:
    lines = [replace(record(step, 1.0), mfu=None, tflops_per_gpu=None) for step in (1, 2)]
    assert speed_of(lines)["mfu"] is None and speed_of(lines)["tflops_per_gpu"] is None


def test_what_it_tells(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for line in (record(1, 9.0), record(10, 1.0, skipped_steps=2)):
        folder.write_record(line)
    summary = summarize(
        tmp_path,
        steps=10,
        total_steps=10,
        tokens=20_000,
        stopped_by="",
        parameters=1_000_000,
        world_size=2,
        devices="2 x test",
        flops_per_token=2e9,
        evaluation=Evaluation(loss=2.0, tokens=10, unigram_loss=4.0, bytes_per_token=4.0),
        samples=[("once", " upon")],
        start_up={"imports": 1.5, "first step": 3.0},
    )
    text = dict(summary.lines())
    assert text["steps"] == "10 of 10" and text["training loss"] == "3.900 -> 3.000"
    assert "ratio 0.500" in text["bits per byte"] and "perplexity 7.4" in text["held-out loss"]
    assert text["throughput"].startswith("2,000 tokens/s, 1,000 per device")
    assert "2 GFLOP a token (attention causal," in text["model FLOP/s"]
    assert text["MFU"] == "20.0% = model FLOP/s / peak of 10 TFLOP/s"
    assert text["skipped steps"].startswith("2 ")
    assert text["to the first step"] == "4.5 s: imports 1.5, first step 3.0"
    summary.write(tmp_path)
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written["samples"] == [["once", " upon"]] and written["evaluation"]["bits_per_byte"] > 0
    stopped = replace(summary, stopped_by="SIGTERM", evaluation={})
    assert dict(stopped.lines())["steps"] == "10 of 10 (stopped: SIGTERM)" and "held-out loss" not in dict(
        stopped.lines()
    )
