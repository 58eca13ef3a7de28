"""When has a run started? At the end of its first step; what took how long until then is told once."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from paceline.observe.events import RunFolder
from paceline.observe.hooks import Hook, RunStart, StepEnd, StepStart
from paceline.runtime.start_clock import StartClock

log = logging.getLogger(__name__)


class StartUpHook(Hook):
    """Ends the last phases of a start: `loader and hooks`, then `first step`, which compiles and allocates.

    The first step of a start is read by the host, so its end is the device's. Comes last among the hooks.

    Args:
        folder: whose ``events.jsonl`` gets the phases; None writes nothing.
    """

    def __init__(self, clock: StartClock, folder: RunFolder | None = None) -> None:
        self.clock = clock
        self.folder = folder
        self._started = self._stepped = False

    def on_start(self, start: RunStart) -> None:
        self._begin()

    def on_step_start(self, start: StepStart) -> None:
        self._begin()

    def _begin(self) -> None:
        if not self._started:
            self._started = True
            self.clock.done("loader and hooks")

    def on_step_end(self, end: StepEnd) -> None:
        if self._stepped:
            return
        self._stepped = True
        self.clock.done("first step")
        if self.folder is not None:
            log.info("first step after %s", phases_line(self.clock.phases))
            phases = {phase: round(seconds, 3) for phase, seconds in self.clock.phases.items()}
            self.folder.write_event("first_step", step=end.step, seconds=round(self.clock.total, 3), phases=phases)


def phases_line(phases: Mapping[str, float]) -> str:
    """``41.2 s: launcher 3.1, imports 8.2, ...``"""
    parts = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in phases.items())
    return f"{sum(phases.values()):.1f} s: {parts}"
