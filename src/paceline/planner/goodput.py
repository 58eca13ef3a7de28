"""How much of the time is training, if processes fail now and then? Checkpoints, lost work and restarts.

With failures at random (MTBF M of the whole job), a checkpoint that holds training up for C seconds after every t
seconds of it, and R seconds from a failure to the first new step, a stretch of t takes on average

    M exp(R / M) (exp((t + C) / M) - 1)

seconds, and goodput is t over that. Source: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for
restart dumps", Future Generation Computer Systems 22 (2006), equation 20. The best t is near sqrt(2 C M) (J. W. Young,
1974).
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Of one interval between checkpoints."""

    interval_seconds: float
    share: float
    """Of all time, 0 ... 1."""
    failures_per_day: float
    lost_seconds_per_failure: float
    """Work since the last checkpoint, and the restart."""


def goodput(mtbf: float, checkpoint: float, restart: float, interval: float) -> Goodput:
    """All in seconds; ``checkpoint`` is how long saving holds training up."""
    exponent = (interval + checkpoint) / mtbf
    share = (
        0.0
        if exponent > 600 or restart / mtbf > 600
        else interval / (mtbf * math.exp(restart / mtbf) * math.expm1(exponent))
    )
    return Goodput(
        interval_seconds=interval,
        share=share,
        failures_per_day=86400 / mtbf,
        lost_seconds_per_failure=min(interval, mtbf) / 2 + restart,
    )


def best_interval(mtbf: float, checkpoint: float, restart: float) -> Goodput:
    """The interval with the most goodput."""
    low, high = math.log(1e-2), math.log(20 * mtbf)
    for _ in range(80):  # goodput rises, then falls, with the interval: ternary search over its logarithm
        left, right = low + (high - low) / 3, high - (high - low) / 3
        if (
            goodput(mtbf, checkpoint, restart, math.exp(left)).share
            < goodput(mtbf, checkpoint, restart, math.exp(right)).share
        ):
            low = left
        else:
            high = right
    return goodput(mtbf, checkpoint, restart, math.exp((low + high) / 2))
