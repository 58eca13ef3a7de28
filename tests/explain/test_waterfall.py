"""The waterfall with a capture: what was split as predicted is then measured, and still adds up."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from paceline.explain.run_folder import read_run
from paceline.explain.shares import Shares
from paceline.explain.waterfall import Waterfall, make_waterfall

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from synthetic_run import Cluster, write

KINDS = {"gemm": 2.0, "attention": 0.5, "memory_bound": 0.9, "recompute": 0.6}


def made(folder: Path, kinds: dict[str, float] | None, **shape: str) -> Waterfall:
    view = read_run(write(Cluster(**shape), folder / "run"))  # type: ignore[arg-type]
    found = make_waterfall(view, Shares(view=view), kinds)
    assert found is not None
    return found


@pytest.mark.parametrize("kinds", [None, KINDS])
def test_parts_add_up(kinds: dict[str, float] | None, tmp_path: Path) -> None:
    found = made(tmp_path, kinds)
    assert sum(part.seconds for part in found.parts) == pytest.approx(found.step_seconds, rel=1e-6)


def test_a_capture_measures_what_was_split(tmp_path: Path) -> None:
    split, captured = made(tmp_path, None), made(tmp_path, KINDS)
    inside = {"GEMM shapes", "attention", "memory-bound operators", "recompute"}
    assert not any(part.measured for part in split.parts if part.name in inside)
    assert all(part.measured for part in captured.parts if part.name in inside)
    # memory-bound and recomputed work lies wholly beyond the ceiling, in the ratio that was captured
    assert captured.seconds("memory-bound operators") / captured.seconds("recompute") == pytest.approx(1.5)
    assert split.seconds("recompute") == 0


def test_a_capture_serves_a_card_that_plan_does_not_know(tmp_path: Path) -> None:
    found = made(tmp_path, KINDS, device_name="NVIDIA Unheard Of")
    assert found.estimate is None and found.seconds("memory-bound operators") > 0
