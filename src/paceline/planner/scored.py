"""What was predicted of a run, and how far off is that?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.planner.published import PublishedRun

GIB = 2.0**30


@dataclass(frozen=True, kw_only=True)
class Scored:
    """One run, predicted."""

    run: PublishedRun
    predicted_seconds: float
    predicted_bytes: float
    """Of the rank whose memory the source reports."""
    predicted_fits: bool
    """On the most loaded rank."""

    @property
    def time_error(self) -> float | None:
        measured = self.run.step_seconds
        return None if measured is None else self.predicted_seconds / measured - 1

    @property
    def memory_error(self) -> float | None:
        measured = self.run.memory_bytes
        return None if measured is None else self.predicted_bytes / measured - 1

    def as_dict(self) -> dict[str, str | float | None]:
        measured = self.run.memory_bytes
        return {
            "id": self.run.id,
            "predicted_step_seconds": self.predicted_seconds,
            "measured_step_seconds": self.run.step_seconds,
            "predicted_memory_gib": self.predicted_bytes / GIB,
            "measured_memory_gib": None if measured is None else measured / GIB,
        }


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Absolute relative errors of some rows."""

    rows: int
    mape: float
    median: float
    p90: float
    worst: float

    @classmethod
    def of(cls, errors: Sequence[float]) -> Errors | None:
        """None without any."""
        if not errors:
            return None
        values = np.abs(np.array(errors))
        return cls(
            rows=len(values),
            mape=float(np.mean(values)),
            median=float(np.median(values)),
            p90=float(np.quantile(values, 0.9)),
            worst=float(np.max(values)),
        )
