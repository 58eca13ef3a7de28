"""How much do repeats of a trial differ? Below that, nothing is a gain."""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.tuner.belief import REPEAT
from paceline.tuner.objective import Goal
from paceline.tuner.space import Key, key_of
from paceline.tuner.trial import Trial

SURE = 2.0
"""Standard deviations that a gain must have."""
LEAST_OF_MEMORY = 0.002
"""torch's allocator counts to the byte; what is below is buffers that come and go."""


def deviation(trials: Sequence[Trial], goal: Goal) -> float:
    """Of one trial's value, relative: of repeats where there are any, and never below the spread within trials."""
    if goal.objective == "memory":
        return LEAST_OF_MEMORY
    groups: dict[Key, list[float]] = {}
    for trial in trials:
        if trial.is_good:
            groups.setdefault(key_of(trial.changes), []).append(trial.even_seconds)
    squares, freedom = 0.0, 0
    for values in groups.values():
        mean = sum(values) / len(values)
        squares += sum((value / mean - 1) ** 2 for value in values)
        freedom += len(values) - 1
    # the assumed deviation counts as one repeat: two that happen to be equal do not prove that there is no noise
    between = math.sqrt((squares + REPEAT**2) / (freedom + 1))
    return max(between, within(trials))


def within(trials: Sequence[Trial]) -> float:
    """The middle of the standard errors of the trials' medians, relative."""
    spreads = sorted(trial.ended.measured.spread for trial in trials if trial.is_good and trial.ended.measured)
    return spreads[len(spreads) // 2] if spreads else REPEAT


def least_gain(trials: Sequence[Trial], goal: Goal, before: int = 1, after: int = 1) -> float:
    """What a ratio of ``after`` repeats to ``before`` repeats must be above 1 to be told from noise."""
    return SURE * deviation(trials, goal) * math.sqrt(1 / before + 1 / after)
