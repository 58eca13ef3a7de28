from __future__ import annotations

from pathlib import Path

import pytest

from paceline.observe.hooks import BackwardEnd, CheckpointSaved, Hook, Hooks, RunEnd, RunStart, StepEnd, StepStart


class Recorder(Hook):
    def __init__(self, name: str, log: list[str], fail_at_end: bool = False) -> None:
        self.name, self.log, self.fail_at_end = name, log, fail_at_end

    def on_start(self, start: RunStart) -> None:
        self.log.append(f"{self.name} start")

    def on_step_end(self, end: StepEnd) -> None:
        self.log.append(f"{self.name} step {end.step}")

    def on_end(self, end: RunEnd) -> None:
        self.log.append(f"{self.name} end")
        if self.fail_at_end:
            raise OSError(self.name)


def test_called_in_order_and_silent_by_default(tmp_path: Path) -> None:
    log: list[str] = []
    hooks = Hooks([Recorder("a", log), Hook(), Recorder("b", log)])
    hooks.on_start(RunStart(run_name="r", run_dir=tmp_path, start_step=0, total_steps=1))
    hooks.on_step_start(StepStart(step=1))
    hooks.on_backward_end(BackwardEnd(step=1))
    hooks.on_step_end(StepEnd(step=1))
    hooks.on_checkpoint(CheckpointSaved(step=1, path=tmp_path))
    hooks.on_end(RunEnd(step=1))
    assert log == ["a start", "b start", "a step 1", "b step 1", "a end", "b end"]


def test_every_hook_hears_of_the_end() -> None:
    log: list[str] = []
    hooks = Hooks([Recorder("a", log, fail_at_end=True), Recorder("b", log)])
    with pytest.raises(OSError, match="a"):
        hooks.on_end(RunEnd(step=3, error=ValueError()))
    assert log == ["a end", "b end"]
