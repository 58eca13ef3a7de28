"""What do the trials teach the planner? The numbers of its profile for this machine, as `plan calibrate` fits them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.costs.workload import Workload
from paceline.planner.calibration import Calibration, calibrate, calibration_text
from paceline.planner.published import PublishedRun
from paceline.planner.run_sources import Source
from paceline.tuner.space import Space
from paceline.tuner.trial import Trial


@dataclass(frozen=True, kw_only=True)
class Learned:
    """``text``: the file, for `cluster.calibration` or ``paceline plan --calibration``."""

    text: str
    found: Calibration

    @property
    def before(self) -> float:
        """Mean absolute relative error of the planner's steps, of the trials; ``after`` of the fitted one's."""
        return _mean(self.found.before)

    @property
    def after(self) -> float:
        return _mean(self.found.after)


def learned(space: Space, trials: Sequence[Trial]) -> Learned | None:
    """None where nothing has run, or the planner does not know the device."""
    card = space.machine.hardware
    runs = [run for trial in trials if trial.is_good and (run := _run(space, trial)) is not None]
    if card is None or not runs:
        return None
    found = calibrate(runs, space.machine.profile)
    text = calibration_text(found, runs).replace("`paceline plan calibrate`", "`paceline tune`", 1)
    return Learned(text=text, found=found)


def _run(space: Space, trial: Trial) -> PublishedRun | None:
    point = space.point(trial.changes)
    if point is None:
        return None
    return PublishedRun(
        id=f"trial {trial.number}",
        source=Source(key="paceline", title="Paceline", prefix=(), profile=space.machine.profile.name),
        model_name=space.base.model.preset or space.base.run.name,
        workload=Workload.of(point.config),
        cluster=space.machine.cluster,
        step_seconds=trial.step_seconds,
        memory_bytes=trial.peak_bytes,
    )


def _mean(errors: Sequence[float]) -> float:
    return sum(map(abs, errors)) / len(errors) if errors else 0.0
