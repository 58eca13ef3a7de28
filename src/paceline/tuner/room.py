"""How much memory do tensors really find? The figure of the card, corrected by trials that found room and that did not.

Fragmentation, buffers of collectives and other programs take a share that nobody predicts, and it is the same share for
all recipes: where one runs out that was thought to fit, the next one is expected to find as little.
"""

from __future__ import annotations

import math

import numpy as np

from paceline.tuner.belief import Array, Guess, normal_cdf

_DOUBT = 0.05
"""Of the figure, in logarithms: one standard deviation."""
_WIDTH, _POINTS = 4.0, 81


class Room:
    """A distribution over the logarithm of the bytes there are."""

    def __init__(self, known_bytes: float) -> None:
        spread = np.linspace(-_WIDTH, _WIDTH, _POINTS)
        self._at: Array = math.log(known_bytes) + _DOUBT * spread
        self._weight: Array = np.exp(-0.5 * spread**2)
        self._weight /= self._weight.sum()

    def held(self, log_bytes: float) -> None:
        """A trial that needed so much ran."""
        self._times(np.where(self._at >= log_bytes, 1.0, 1e-6))

    def ran_out(self, mean: float, deviation: float) -> None:
        """A trial that needs about so much did not."""
        self._times(np.maximum(normal_cdf((mean - self._at) / deviation), 1e-6))

    @property
    def mean(self) -> float:
        return float(self._at @ self._weight)

    def fits(self, sizes: Guess) -> Array:
        """Probabilities, of each."""
        scaled = (self._at[None, :] - sizes.mean[:, None]) / sizes.deviation[:, None]
        return np.asarray(normal_cdf(scaled.ravel()).reshape(scaled.shape) @ self._weight)

    def _times(self, likelihood: Array) -> None:
        self._weight = self._weight * likelihood
        self._weight /= self._weight.sum()
