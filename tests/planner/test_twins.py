"""Runs predicted by measurements of nearly the same run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.planner.published import PublishedRun, read_run
from paceline.planner.twins import (
    constant_per_micro_batch,
    same_but_zero,
    same_on_a_rank,
    step_seconds,
    twin_errors,
    unsharded_bytes,
)


def run(name: str, *, seconds: float, gib: float = 20.0, zero: int = 0, gpus: int = 16, tp: int = 2) -> PublishedRun:
    row = {
        "id": f"nanotron-{name}", "model": "Llama-like 3B", "layers": "28", "hidden": "3072", "heads": "32",
        "ffn": "8192", "vocab": "131072", "seq": "4096", "gpu": "H100-80", "n_gpus": str(gpus), "tp": str(tp),
        "pp": "2", "zero": str(zero), "mbs": "1", "gbs": "256", "mem_GiB": str(gib), "step_time_s": str(seconds),
    }  # fmt: skip
    found = read_run(row)
    assert isinstance(found, PublishedRun), found
    return found


def test_a_twin_is_the_same_layout_with_another_zero_stage() -> None:
    runs = [run("a", seconds=10.0), run("b", seconds=12.5, zero=1), run("c", seconds=99.0, tp=4)]
    assert twin_errors(runs, step_seconds, same_but_zero) == pytest.approx([0.25, -0.2])
    assert twin_errors(runs[:1], step_seconds, same_but_zero) == []


def test_of_several_twins_the_median_counts_and_copies_of_figures_do_not() -> None:
    runs = [run(name, seconds=value) for name, value in (("a", 10.0), ("b", 11.0), ("c", 12.0), ("d", 50.0))]
    assert max(twin_errors(runs, step_seconds, same_but_zero)) == pytest.approx(0.2)
    runs[1] = replace(runs[1], secondary=True)
    assert len(twin_errors(runs, step_seconds, same_but_zero)) == 3


def test_unsharded_memory_does_not_depend_on_how_many_ranks_there_are() -> None:
    runs = [run("a", seconds=10.0, gib=20.0), run("b", seconds=10.0, gib=22.0, gpus=64)]
    assert twin_errors(runs, unsharded_bytes, same_on_a_rank) == pytest.approx([0.1, -1 / 11])
    assert twin_errors([replace(one, memory_bytes=None) for one in runs], unsharded_bytes, same_on_a_rank) == []


def test_what_is_left_is_told_by_the_micro_batch() -> None:
    assert constant_per_micro_batch(run("a", seconds=74.0), 10.0) == pytest.approx(1.0)  # 64 micro-batches
