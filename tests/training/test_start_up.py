"""What took how long until the first step, as a run leaves it behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.observe.events import read_events
from paceline.observe.hooks import RunStart, StepEnd, StepStart
from paceline.runtime.start_clock import StartClock
from paceline.training.start_up import StartUpHook, phases_line
from tests.training import runs


def test_a_run_tells_its_phases_once(tmp_path: Path) -> None:
    runs.alone(runs.tiny(tmp_path / "run", "synthetic", steps=3))
    (event,) = [event for event in read_events(tmp_path / "run") if event["event"] == "first_step"]
    assert event["step"] == 1
    assert list(event["phases"]) == ["data", "mesh", "model", "loader and hooks", "first step"]
    assert event["seconds"] == pytest.approx(sum(event["phases"].values()), abs=0.01)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["start_up"] == event["phases"]


def test_a_bench_has_no_start_moment(tmp_path: Path) -> None:
    times = iter([1.0, 5.0])
    hook = StartUpHook(StartClock(0.0, clock=lambda: next(times)))
    hook.on_step_start(StepStart(step=1))
    hook.on_start(RunStart(run_name="", run_dir=tmp_path, start_step=0, total_steps=2))  # begins no second time
    for step in (1, 2):
        hook.on_step_end(StepEnd(step=step))
    assert hook.clock.phases == {"loader and hooks": 1.0, "first step": 4.0}
    assert phases_line(hook.clock.phases) == "5.0 s: loader and hooks 1.0, first step 4.0"
