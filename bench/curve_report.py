"""Loss curves on a page: how far is a run from its reference, beside how far seeds are from each other?"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

Curve: TypeAlias = Sequence[float | None]
"""The loss of each step; None of one that was skipped."""
Curves: TypeAlias = Mapping[str, Curve]

SMOOTH = 20
"""Steps of the running mean."""
SAID = (
    f"nats a token; *smoothed*: of running means over {SMOOTH} steps, without the first fifth. The band is the largest "
    "such difference between any two of three seeds."
)
"""What the columns of `gap_rows` are."""


def ends(curve: Curve) -> str:
    """The first loss and the last one."""
    there = [loss for loss in curve if loss is not None]
    return f"(loss {there[0]:.3f} to {there[-1]:.3f})" if there else "(no step of it has a loss)"


def gap_rows(curves: Curves, seeds: Sequence[str], titles: Mapping[str, str]) -> Iterator[str]:
    """``seeds``: the reference, and its runs with other seeds. ``titles``: of the runs to compare, in order."""
    reference = curves[seeds[0]]
    there = [curves[name] for name in seeds if len(curves.get(name, ())) == len(reference)]
    yield "| run | largest, smoothed | mean | last, smoothed | of the seeds' band (smoothed) |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    band = seeds_band(there)
    if band is not None:
        yield f"| **band of {len(there)} seeds** | **{band:.4f}** | | | |"
    for name, title in titles.items():
        if name not in curves or len(curves[name]) != len(reference):
            continue
        if not (smooth := difference(curves[name], reference)):
            yield f"| {title} | no step with a loss in both | | | |"
            continue
        each = [abs(value) for value in _by_step(curves[name], reference) if value is not None]
        largest = max(map(abs, smooth))
        share = "" if not band else f"{largest / band:.2f}"
        yield f"| {title} | {largest:.4f} | {sum(each) / len(each):.4f} | {smooth[-1]:+.4f} | {share} |"


def skipped_lines(curves: Curves) -> list[str]:
    skipped = {name: sum(loss is None for loss in curve) for name, curve in curves.items()}
    if not any(skipped.values()):
        return []
    said = ", ".join(f"{name} {number}" for name, number in skipped.items() if number)
    return ["", f"Steps skipped because something was not finite, left out of every difference: {said}."]


def difference(losses: Curve, reference: Curve) -> list[float]:
    """Running means of the difference, over the steps that both have, from the first fifth of the run on.

    Before, seeds part by more than a kernel ever could: a band of those steps would forgive anything. A window without
    a step that both have is left out.
    """
    each = _by_step(losses, reference)
    window = min(SMOOTH, len(each))
    first = max(window, len(each) // 5)
    windows = ([x for x in each[end - window : end] if x is not None] for end in range(first, len(each) + 1))
    return [sum(there) / len(there) for there in windows if there]


def seeds_band(seeds: Sequence[Curve]) -> float | None:
    """The largest smoothed difference between any two; None with fewer than two, or without a step in common."""
    differences = itertools.chain.from_iterable(difference(*pair) for pair in itertools.combinations(seeds, 2))
    return max(map(abs, differences), default=None)


def _by_step(losses: Curve, reference: Curve) -> list[float | None]:
    pairs = zip(losses, reference, strict=True)
    return [None if one is None or other is None else one - other for one, other in pairs]
