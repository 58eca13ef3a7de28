"""A plugin that writes how long each step of a run took, by the device's own clock: ``step_seconds.json``.

    paceline train RECIPE --set 'run.plugins=["bench/dense_steps.py"]'

Entry i is the time between the ends of steps i + 1 and i + 2 of this start, whatever lies between: the step, an
evaluation, a checkpoint that the step waited for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.bench.train import StepClock
from paceline.config.plugins import Registry
from paceline.config.run import RunConfig
from paceline.observe.hooks import Hook, RunEnd, RunStart, StepEnd
from paceline.runtime.device import choose_device
from paceline.runtime.process import process_info


class StepSeconds(Hook):
    def __init__(self, config: RunConfig) -> None:
        self._clock = StepClock(choose_device(process_info(), config.cluster.device))
        self._target: Path | None = None

    def on_start(self, start: RunStart) -> None:
        if start.rank == 0:
            self._target = start.run_dir / "step_seconds.json"

    def on_step_end(self, end: StepEnd) -> None:
        self._clock.mark()

    def on_end(self, end: RunEnd) -> None:
        if self._target is not None and end.error is None:
            seconds: list[Any] = [round(each, 5) for each in self._clock.seconds()]
            self._target.write_text(json.dumps(seconds) + "\n")


def register(registry: Registry) -> None:
    registry.hook(StepSeconds)
