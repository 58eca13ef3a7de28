"""Which of many is slow? Robust against the slow ones themselves: medians, and distances in medians. Torch-free."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from statistics import median
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)

LEAST = 0.05
"""A rate below the median by less is within what like machines differ by."""
DEVIATIONS = 4.0
"""And it must stand out from the spread of the others, in standard deviations of a normal distribution,"""
FAR = 0.5
"""or be below this share of the median, however much the others differ."""
_FEWEST = 3


def slow_ones(rates: Mapping[Key, float], *, least: float = LEAST) -> dict[Key, float]:
    """Those that are slow among at least three, with their share of the median; none among fewer.

    The spread is the median absolute deviation (times 1.4826, for a normal distribution), no less than half a percent.
    """
    if len(rates) < _FEWEST:
        return {}
    middle = median(rates.values())
    if middle <= 0:
        return {}
    spread = max(1.4826 * median(abs(rate - middle) for rate in rates.values()), 0.005 * middle)
    limit = max(FAR * middle, min((1 - least) * middle, middle - DEVIATIONS * spread))
    return {key: rate / middle for key, rate in rates.items() if rate < limit}


def slow_ends(
    pairs: Mapping[tuple[int, int], float], *, least: float = 0.1
) -> tuple[dict[int, float], dict[tuple[int, int], float]]:
    """(ends all of whose links are slow, slow links between other ends), with shares of what is usual.

    An end is judged by its best link: one slow end makes half of the links among four slow, but nobody else's best.
    """
    best: dict[int, float] = {}
    for pair, rate in pairs.items():
        for end in pair:
            best[end] = max(best.get(end, 0.0), rate)
    ends = slow_ones(best, least=least)
    left = {pair: rate for pair, rate in pairs.items() if not ends.keys() & set(pair)}
    return ends, slow_ones(left, least=least)
