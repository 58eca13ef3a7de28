"""What do the trials so far say about a recipe that was not tried? A mean and a deviation, for its time and its memory.

The planner's prediction is the starting point. Measured over predicted, in logarithms, is a sum of unknown numbers:

    one for all predictions on this machine,
    one for each part of a step (products, attention, memory traffic, ... ; of memory: activations, states, ...), times
    that part's share of the prediction: the planner's calibration,
    one for each setting that differs from the base: what the planner does not know of it,
    one of this recipe alone.

All are normal with mean 0 (or the table's `gain`) and the deviations below, so what trials say of the next recipe is
linear algebra: Gaussian-process regression with a kernel of dot products (Rasmussen and Williams, Gaussian Processes
for Machine Learning, 2006, eq. 2.25 and 2.26). A trial that ran out of memory says that it needs more than there is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.config.run import RunConfig
from paceline.costs.footprint import StageMemory
from paceline.tuner.machine import Machine
from paceline.tuner.settings import setting_of
from paceline.tuner.space import Point, value_at

Array = npt.NDArray[np.float64]
Basis = Mapping[str, float]

TIME_PARTS: Mapping[str, float] = {
    "gemm": 0.1,
    "attention": 0.2,
    "memory_bound": 0.3,
    "launch": 0.4,
    "recompute": 0.2,
    "tp_communication": 0.3,
    "cp_communication": 0.3,
    "ep_communication": 0.3,
    "pp_communication": 0.3,
    "dp_communication": 0.3,
    "bubble": 0.2,
    "optimizer": 0.2,
    "offload": 0.4,
    "overhead": 0.5,
}
"""Standard deviations, relative. Of docs/accuracy.md: steps within some 10 %, parts that are small far less."""
MEMORY_PARTS: Mapping[str, float] = {
    "weights": 0.02,
    "gradients": 0.03,
    "optimizer": 0.02,
    "gathered": 0.12,
    "activations": 0.12,
    "logits": 0.2,
    "framework": 0.5,
    "process": 0.15,
}
TIME_OFFSET, MEMORY_OFFSET = 0.1, 0.04
TIME_OWN, MEMORY_OWN = 0.02, 0.015
"""Of a recipe alone."""
_ANY = 3.0
"""In place of the first, where the device is not known: only ratios of its times are believed."""
MEMORY_SETTING = 0.03
"""Of a setting."""
_DOUBLING = 0.02
"""Of a micro-batch twice as large."""
UNKNOWN, UNKNOWN_MEMORY = 4.0, 2.0
"""Times all of these on a device that the planner does not know."""
REPEAT = 0.004
"""By how much repeats of a trial differ, until repeats have been measured: relative, one standard deviation."""


@dataclass(frozen=True, kw_only=True)
class Guess:
    """Of some points: natural logarithms of seconds (for as many sequences as a step of the base has) or bytes."""

    mean: Array
    deviation: Array


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A number that a point has, or (``weak``) that somebody says it would have."""

    point: Point
    log_value: float
    noise: float


class Belief:
    """About one quantity, of recipes near ``base`` on a machine."""

    def __init__(self, base: RunConfig, machine: Machine, *, of_memory: bool = False) -> None:
        self.base, self.of_memory, self.machine = base, of_memory, machine
        self.scale = 1.0 if machine.hardware is not None else UNKNOWN_MEMORY if of_memory else UNKNOWN
        self.own = self.scale * (MEMORY_OWN if of_memory else TIME_OWN)
        self._names: dict[str, int] = {}
        self._bases: dict[int, tuple[Point, Basis]] = {}
        self._seen: list[Seen] = []

    def learn(self, seen: Sequence[Seen]) -> None:
        """Everything that is known; replaces what was."""
        merged: dict[Any, list[Seen]] = {}
        for one in seen:
            merged.setdefault((one.point.key, one.noise > 0.05), []).append(one)
        self._seen = [_mean(group) for group in merged.values()]

    def guess(self, points: Sequence[Point]) -> Guess:
        prior = np.array([self._prior(point) for point in points])
        if not points:
            return Guess(mean=prior, deviation=prior)
        x = self._matrix(points)
        variance = (x**2).sum(axis=1) + self.own**2
        if not self._seen:
            return Guess(mean=prior, deviation=np.sqrt(variance))
        observed = self._matrix([one.point for one in self._seen])
        noise = np.array([one.noise for one in self._seen])
        residual = np.array([one.log_value - self._prior(one.point) for one in self._seen])
        width = max(x.shape[1], observed.shape[1])
        x, observed = _widened(x, width), _widened(observed, width)
        covariance = observed @ observed.T + np.diag(noise**2 + self.own**2)
        crossed = x @ observed.T
        solved = np.linalg.solve(covariance, np.column_stack([residual, crossed.T]))
        mean = prior + crossed @ solved[:, 0]
        variance = variance - np.einsum("ij,ji->i", crossed, solved[:, 1:])
        return Guess(mean=mean, deviation=np.sqrt(np.maximum(variance, 1e-10)))

    def _prior(self, point: Point) -> float:
        if self.of_memory:
            return math.log(point.estimate.memory_bytes + self.machine.process_bytes)
        gains = (setting_of(key, value).gain.get(value, 0.0) for key, value in point.changes.items())
        return math.log(point.estimate.seconds / point.batch_ratio) + sum(gains)

    def _matrix(self, points: Sequence[Point]) -> Array:
        found = [self._basis(point) for point in points]
        for basis in found:
            for name in basis:
                self._names.setdefault(name, len(self._names))
        matrix = np.zeros((len(points), len(self._names)))
        for row, basis in enumerate(found):
            for name, value in basis.items():
                matrix[row, self._names[name]] = value
        return matrix

    def _basis(self, point: Point) -> Basis:
        known = self._bases.get(id(point))
        if known is None or known[0] is not point:
            known = self._bases[id(point)] = (point, self._made_basis(point))
        return known[1]

    def _made_basis(self, point: Point) -> Basis:
        if self.of_memory:
            fullest = max(point.estimate.stages, key=lambda stage: stage.total)
            parts = _shares(fullest, self.machine.process_bytes)
            deviations, offset = MEMORY_PARTS, MEMORY_OFFSET
        else:
            parts = {name: value / point.estimate.seconds for name, value in point.estimate.parts.items()}
            deviations, offset = TIME_PARTS, TIME_OFFSET
        found = {f"part {name}": self.scale * deviations[name] * share for name, share in parts.items() if share}
        absolute = not self.of_memory and self.machine.hardware is None
        found["all"] = _ANY if absolute else self.scale * offset
        for key, value in point.changes.items():
            spread = MEMORY_SETTING if self.of_memory else setting_of(key, value).spread
            if key == "train.micro_batch_size":
                # larger ones differ the more from the base's, and each has its own tiles
                found[key] = self.scale * _DOUBLING * math.log2(value / value_at(self.base, key))
                spread = MEMORY_SETTING / 2 if self.of_memory else _DOUBLING
            found[f"{key} = {value}"] = self.scale * spread
        return found


def _mean(group: Sequence[Seen]) -> Seen:
    weights = [1 / one.noise**2 for one in group]
    mean = sum(one.log_value * weight for one, weight in zip(group, weights, strict=True)) / sum(weights)
    return Seen(point=group[0].point, log_value=mean, noise=sum(weights) ** -0.5)


def _shares(stage: StageMemory, process_bytes: float) -> dict[str, float]:
    whole = stage.total + process_bytes
    found = {name: getattr(stage, name) / whole for name in MEMORY_PARTS if name != "process"}
    return found | {"process": process_bytes / whole}


def _widened(matrix: Array, width: int) -> Array:
    return np.pad(matrix, ((0, 0), (0, width - matrix.shape[1])))


def normal_cdf(values: Array) -> Array:
    """Abramowitz and Stegun 26.2.17, off by less than 1e-7: numpy has no error function, and walks ask often."""
    z = np.abs(values)
    t = 1 / (1 + 0.2316419 * z)
    series = t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))))
    tail = np.exp(-0.5 * z * z) / math.sqrt(2 * math.pi) * series
    return np.asarray(np.where(values >= 0, 1 - tail, tail))


def expected_improvement(best: float, guess: Guess) -> Array:
    """Mean of what a point is below ``best``, in logarithms; 0 where it is above (Jones et al. 1998, eq. 15)."""
    gap = best - guess.mean
    scaled = gap / guess.deviation
    density = np.exp(-0.5 * scaled**2) / math.sqrt(2 * math.pi)
    return np.maximum(gap * normal_cdf(scaled) + guess.deviation * density, 0.0)
