"""Which recipes are worth judging? Those that walks downhill see, and those between the best and the ends of walks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from paceline.tuner.belief import Array
from paceline.tuner.space import Key, Point, Space
from paceline.tuner.trial import Changes

Score = Callable[[Sequence[Point], float], Array]
"""(points, optimism) -> what a walk goes down."""
Note = Callable[[Iterable[Point]], list[Point]]

_STEPS = 24
"""Of a walk."""


def pool(
    space: Space, best: Point | None, tried: set[Key], *, score: Score, runs: Callable[[Changes], float]
) -> list[Point]:
    """Points to choose among.

    Args:
        best: so far, where it is another one than the base.
        tried: left out.
        runs: the probability that a change runs.
    """
    seen: dict[Key, Point] = {}

    def note(points: Iterable[Point]) -> list[Point]:
        found = list(points)
        for point in found:
            seen.setdefault(point.key, point)
        return found

    note(space.named())
    starts = [space.origin, *([best] if best is not None else [])]
    ends = []
    for start in starts[-2:]:
        for optimism in (0.0, 1.0):
            ends.append(_downhill(space, start, optimism, score, note))
    for start in starts:
        for end in ends:
            note(_between(space, start, end, runs))
    for end in ends[:1]:
        note(space.neighbours(end))
    return [point for key, point in seen.items() if key not in tried]


def _downhill(space: Space, start: Point, optimism: float, score: Score, note: Note) -> Point:
    """From neighbour to better neighbour, until none is."""
    here, value = start, math.inf
    for _ in range(_STEPS):
        near = note(space.neighbours(here))
        if not near:
            return here
        scores = score(near, optimism)
        best = int(np.argmin(scores))
        if scores[best] >= value - 1e-6:
            return here
        here, value = near[best], float(scores[best])
    return here


def _between(space: Space, start: Point, end: Point, runs: Callable[[Changes], float]) -> Iterable[Point]:
    """The end without each of its changes, with each alone, and with halves of them, the surest first."""
    changed = [key for key in end.changes if end.changes[key] != start.changes.get(key)]
    dropped = [key for key in start.changes if key not in end.changes]
    changed.sort(key=lambda key: -runs({key: end.changes[key]}))
    half = len(changed) // 2
    subsets = [*([key] for key in changed), changed[:half], changed[half:], changed[::2], changed[1::2]]
    subsets += [[key for key in changed if key != out] for out in changed]
    for subset in subsets:
        wanted: Changes = {**start.changes, **{key: end.changes[key] for key in subset}}
        found = space.point(wanted)
        if found is not None:
            yield found
    for key in dropped:
        found = space.point({name: value for name, value in start.changes.items() if name != key})
        if found is not None:
            yield found
