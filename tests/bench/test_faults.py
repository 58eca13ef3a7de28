"""A few trials of every simulated fault; `bench/faults.py` runs many, `tests/explain/test_real_faults.py` real ones."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from fault_judge import share_of
from fault_kinds import SIMULATED, FaultKind
from faults import results_table, simulate, simulated_healthy


@pytest.mark.parametrize("kind", SIMULATED, ids=lambda kind: kind.name)
def test_a_fault_comes_first_and_has_its_price(kind: FaultKind) -> None:
    result = simulate(kind, 3, seed=1)
    assert result["found_first"] == 1, result["instead"]
    assert result["median_error"] is None or result["median_error"] < 0.1


def test_healthy_runs_are_left_alone() -> None:
    noisy = list(simulated_healthy(10, seed=1))
    assert noisy == [[]] * 10
    assert "0 with a finding above note" in results_table([], noisy).notes[0]


def test_shares_are_read_from_gains() -> None:
    assert share_of("12.5 % of the step, 1.14x tokens/s") == 0.125 and share_of("not determined") is None
    assert share_of("3.0% of the step at most") == 0.03 and share_of(None) is None
