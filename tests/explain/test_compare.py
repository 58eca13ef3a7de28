"""Two runs: a proposed change that was made is held to what was expected of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paceline.explain.compare import compare_runs

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
