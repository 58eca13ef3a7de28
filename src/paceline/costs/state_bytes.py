"""How many bytes does a parameter take at least, whatever the layout: one that learns, and one that is frozen?

The one description that closed-form bounds and the planner's sentences share with `costs/footprint.py`. A layout deals
these bytes out, and may hold some of them several times; none holds less, but in host memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.costs.layers import count_parameters
from paceline.costs.traffic import MOMENT_BYTES
from paceline.costs.workload import Workload


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Of a recipe, on all ranks together, each parameter once."""

    learned: int
    """Parameters that the optimizer updates: all, or the adapters of `[lora]`."""
    frozen: int
    """Parameters that stay as they were; 0 where all learn."""
    each_learned: float
    """Bytes of one that learns: fp32 shard and gradient, or two bytes of each and an fp32 master; and its moments."""
    each_frozen: float
    """Bytes of one that is frozen, in the mean: as it is computed with, or as `lora.base` keeps it."""

    @classmethod
    def of(cls, work: Workload) -> StateBytes:
        """What a workload asks for."""
        total = count_parameters(work.model).total
        return cls(
            learned=work.adapters if work.frozen_weights else total,
            frozen=total if work.frozen_weights else 0,
            each_learned=8.0 + MOMENT_BYTES[work.optimizer],
            each_frozen=(work.frozen_bytes or work.width) if work.frozen_weights else 0.0,
        )

    @property
    def total(self) -> float:
        """Bytes of all ranks together, at least."""
        return self.learned * self.each_learned + self.frozen * self.each_frozen
