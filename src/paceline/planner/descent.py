"""The lowest point of a mean of absolute residuals, none of which counts for more than a cap.

Levenberg and Marquardt's method (Quarterly of Applied Mathematics 2, 1944; Journal of SIAM 11, 1963) on squares that
are weighted anew before every step, so that they stand for absolute values; derivatives by differences. All points of a
step are evaluated in one call, as arrays: the method needs few calls, and few large calls are what numpy is fast at.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

_DAMPINGS = np.array([1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0])
"""Tried together in every step."""
_DIFFERENCE = 1e-3
_FARTHEST = 2.0
"""How far a step goes, at most, in each coordinate."""


def descend(
    residuals: Callable[[Array], Array], start: Array, weights: Array, *, cap: float = np.inf, steps: int = 60
) -> Array:
    """The point [n] that is reached from ``start``.

    Args:
        residuals: of K points [K, n], [K, rows].
        weights: of rows; their mean decides nothing.
        steps: at most.
    """
    shares = weights / weights.sum()

    def loss(found: Array, at: float) -> Any:
        return np.minimum(np.abs(found), at) @ shares

    point, scale, idle = start, 1.0, 0
    now = residuals(point[None])[0]
    for step in range(steps):
        # far from the end most rows would be beyond the cap: it comes down as steps go on
        limit = cap * (1 + 9 * 0.7**step)
        lowest = float(loss(now, limit))
        slopes = (residuals(point + _DIFFERENCE * np.eye(len(point))) - now) / _DIFFERENCE
        # near zero an absolute value is taken for a square, ever nearer as steps go on
        width = max(0.01, 0.3 * 0.5**step)
        pull = shares / np.maximum(np.abs(now), width) * (np.abs(now) < limit)
        curvature, gradient = (slopes * pull) @ slopes.T, (slopes * pull) @ now
        diagonal = np.diag(curvature) + 1e-9 * np.trace(curvature) + 1e-12
        moves = [np.linalg.solve(curvature + np.diag(scale * d * diagonal), -gradient) for d in _DAMPINGS]
        points = point + np.clip(np.array(moves), -_FARTHEST, _FARTHEST)
        found = residuals(points)
        losses = loss(found, limit)
        best = int(np.argmin(losses))
        if losses[best] < lowest:
            idle = idle + 1 if lowest - losses[best] < 1e-4 * lowest else 0
            point, now = points[best], found[best]
            scale = max(1e-6, scale * (0.3 if best < 2 else 1.0 if best < 4 else 3.0))
        else:
            idle, scale = idle + 1, scale * 30
        if idle >= 4 and not limit > 1.05 * cap:
            break
    return point
