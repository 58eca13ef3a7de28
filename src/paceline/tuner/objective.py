"""What is better? Fewer seconds for as many sequences; or fewer bytes, at a speed that is not given up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.tuner.trial import Trial

Objective = Literal["tokens", "memory"]
SPEED_KEPT = 0.9
"""Of the base's tokens/s, that a recipe of least memory still has."""


@dataclass(frozen=True, kw_only=True)
class Goal:
    """``tokens``: most tokens/s. ``memory``: least peak memory among recipes of at least ``speed`` of the base's."""

    objective: Objective = "tokens"
    speed: float = SPEED_KEPT

    def value(self, trial: Trial) -> float:
        """Smaller is better."""
        return trial.even_seconds if self.objective == "tokens" else trial.peak_bytes

    def admits(self, trial: Trial, base: Trial | None) -> bool:
        """Whether it is fast enough to count."""
        if self.objective == "tokens" or base is None:
            return True
        return trial.even_seconds <= base.even_seconds / self.speed

    @property
    def what(self) -> str:
        return "tokens/s" if self.objective == "tokens" else "peak memory"
