"""Which of many is slow? Robust against the slow ones themselves: medians, and distances in medians. Torch-free."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from statistics import median
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)

LEAST = 0.05
"""A rate below the median by less is within what like machines differ by."""
DEVIATIONS = 4.0
"""And it must stand out from the spread of the others, in standard deviations of a normal distribution."""
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
    limit = min((1 - least) * middle, middle - DEVIATIONS * spread)
    return {key: rate / middle for key, rate in rates.items() if rate < limit}


def slow_ends(
    pairs: Mapping[tuple[int, int], float], *, least: float = 0.1
) -> tuple[dict[int, float], dict[tuple[int, int], float]]:
    """(ends all of whose links are slow, slow links between other ends), with shares of the median of all links.

    One end is blamed where nearly all of its links are slow and those of others are not.
    """
    slow = slow_ones(pairs, least=least)
    links: dict[int, list[bool]] = defaultdict(list)
    for pair in pairs:
        for end in pair:
            links[end].append(pair in slow)
    blamed = {end for end, found in links.items() if len(found) >= _FEWEST - 1 and sum(found) >= 0.8 * len(found)}
    if len(blamed) > len(links) / 2:
        # then it is no end that stands out
        blamed = set()
    middle = median(pairs.values()) if pairs else 0.0
    ends = {end: median(rate for pair, rate in pairs.items() if end in pair) / middle for end in sorted(blamed)}
    return ends, {pair: share for pair, share in slow.items() if not blamed & set(pair)}
