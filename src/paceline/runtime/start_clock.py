"""How long does it take from the command to the end of the first step, and what takes it?"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping

import psutil

from paceline.runtime.launcher import LAUNCHER_PID


class StartClock:
    """Seconds of each phase of a start, in their order.

    Args:
        began: when the first phase began, Unix seconds; now where it is left out.
    """

    def __init__(self, began: float | None = None, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._last = clock() if began is None else began
        self.phases: dict[str, float] = {}

    @classmethod
    def of_process(cls, environ: Mapping[str, str] | None = None) -> StartClock:
        """Counts from the command: `paceline --nproc`'s own start where this is one of its processes.

        Two phases are over already: `launcher`, and `imports` of this process. What another launcher (torchrun, srun)
        did before is not known here.
        """
        environ = os.environ if environ is None else environ
        own = psutil.Process().create_time()
        clock = cls(own)
        if (launcher := environ.get(LAUNCHER_PID, "")).isdigit():
            try:
                began = psutil.Process(int(launcher)).create_time()
            except psutil.Error:
                began = own
            clock.phases["launcher"] = max(own - began, 0.0)
        clock.done("imports")
        return clock

    def done(self, phase: str) -> float:
        """Ends a phase, gives its seconds, and begins the next one. A phase that comes again adds up."""
        now = self._clock()
        seconds = now - self._last
        self._last = now
        self.phases[phase] = self.phases.get(phase, 0.0) + seconds
        return seconds

    @property
    def total(self) -> float:
        return sum(self.phases.values())
