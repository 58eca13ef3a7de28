"""Megatron-LM's `--rampup-batch-size START INCREMENT SAMPLES`: which batches does a run pass, and can the layout take
them?

Every one of START, START + INCREMENT ... --global-batch-size must be dealt out: a multiple of micro-batch x data
parallel, and with interleaving of that times pp.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.planner.megatron_flags import Flags

FLAG = "rampup-batch-size"


@dataclass(frozen=True, kw_only=True)
class RampUp:
    """Batches in sequences."""

    start: int
    increment: int
    samples: str
    """Over which it goes, as it is written."""

    @classmethod
    def of(cls, flags: Flags) -> RampUp | None:
        """None where it is not given, or not as three values with two whole numbers first."""
        values = flags.given.get(FLAG, ())
        numbers = [value.replace("_", "") for value in values[:2]]
        if len(values) != 3 or FLAG in flags.open or not all(number.isdigit() for number in numbers):
            return None
        return cls(start=int(numbers[0]), increment=int(numbers[1]), samples=values[2])

    def fits(self, portion: int, whole: int) -> bool:
        """Whether every batch up to ``whole`` is a multiple of ``portion``, and the last step ends at ``whole``."""
        even = self.start > 0 and self.increment > 0 and self.start % portion == 0 and self.increment % portion == 0
        return even and self.start <= whole and (whole - self.start) % self.increment == 0

    def made_to_fit(self, portion: int, whole: int) -> RampUp | None:
        """The nearest that `fits`, from a batch as small; None where nothing is left to ramp up."""
        if self.fits(portion, whole):
            return self
        start = max(1, math.ceil(self.start / portion)) * portion
        steps = (whole - start) // portion
        if steps < 1 or whole % portion:
            return None
        wanted = max(1.0, self.increment / portion)
        each = min((step for step in range(1, steps + 1) if steps % step == 0), key=lambda step: abs(step - wanted))
        return RampUp(start=start, increment=each * portion, samples=self.samples)

    @property
    def values(self) -> tuple[str, str, str]:
        return (str(self.start), str(self.increment), self.samples)
