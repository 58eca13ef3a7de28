"""Paceline's profile against runs of Paceline on one H200 that docs/measured holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.config.load import resolve
from paceline.costs.hardware import find_hardware
from paceline.costs.step import predict
from paceline.costs.workload import Cluster

MEASURED = Path(__file__).parents[2] / "docs" / "measured"
RUNS = [
    json.loads(line)
    for name in ("fused_one_gpu.jsonl", "bench_llama3_1b.jsonl")
    for line in (MEASURED / name).read_text().splitlines()
]
GPU = find_hardware("H200 SXM")


@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run['recipe']['run']['name']}-{run['step_seconds']:.3f}")
def test_within_a_few_percent_and_never_below_in_memory(run: dict[str, object]) -> None:
    """Time within 4 %, memory within 5 % and not below: these runs were in sight when the profile was made."""
    assert GPU is not None
    estimate = predict(resolve(run["recipe"]).config, Cluster(gpu=GPU, gpus=1))  # type: ignore[arg-type]
    assert estimate.seconds == pytest.approx(run["step_seconds"], rel=0.04)
    assert 1.0 <= estimate.memory_gib / run["peak_memory_gib"] <= 1.05  # type: ignore[operator]


def test_fused_kernels_and_narrow_sums_are_worth_what_was_measured() -> None:
    """Of 1.454 s: fused weight gradients and update save 46 ms, fp8 another 272, not to recompute 8."""
    assert GPU is not None
    found = [predict(resolve(run["recipe"]).config, Cluster(gpu=GPU, gpus=1)).seconds for run in RUNS[:5]]
    measured = [float(run["step_seconds"]) for run in RUNS[:5]]
    assert found[0] - found[1] == pytest.approx(measured[0] - measured[1], abs=0.025)
    assert found[1] - found[2] == pytest.approx(measured[1] - measured[2], abs=0.025)
    assert found[1] - found[4] == pytest.approx(measured[1] - measured[4], abs=0.025)
