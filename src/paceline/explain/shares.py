"""Where did each rank's steps go, and what of it is its own? Seconds by part from the columns of the record.

On a GPU times are the stream's, between marks; on a CPU the host's. A rank that waits for others does so in
collectives, in messages of the pipeline, and where ranks meet: none of that is its own work.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from paceline.explain.run_folder import Numbers, RunView
from paceline.observe.phases import PHASES
from paceline.observe.telemetry.columns import AXES

OWN = ("data", "forward", "backward", "reduce", "optimizer", "publish", "log", "evaluation", "checkpoint", "other")
"""Phases in which a rank can have work of its own; in ``sync`` and ``pipeline`` it waits."""
MEETING = ("sync", "pipeline")
_CARRIERS = ("reduce", "optimizer", "publish")
"""Phases that are short without the collectives they hold."""
_NEAREST = 2
"""Timed steps on each side, of which a step takes the median."""


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Seconds, [ranks, steps] each."""

    view: RunView

    @cached_property
    def wall(self) -> Numbers:
        """Of a step. On a GPU the stream's, from mark to mark."""
        if self.on_device:
            return sum_known([self.phase(name) for name in PHASES])
        return self.view.column("wall_us") * 1e-6

    @cached_property
    def on_device(self) -> bool:
        return self.view.knows("device_forward_us")

    def phase(self, name: str) -> Numbers:
        place = "device" if self.on_device else "host"
        return self.view.column(f"{place}_{name}_us") * 1e-6

    def blocked(self, name: str) -> Numbers:
        """Held up by collectives, messages and meetings within a phase."""
        return self.phase(name) if name in MEETING else self.phase(name) - self.own[name]

    def wait(self, axis: str) -> Numbers:
        """Held up by collectives of an axis."""
        return self._filled(self.view.column(f"wait_{axis}_us") * 1e-6)

    def _filled(self, values: Numbers) -> Numbers:
        """On a GPU collectives are timed in some steps; the others get the median of the nearest ones that were."""
        known = ~np.isnan(values)
        if known.all():
            return values
        filled = np.zeros_like(values)
        for row, there in enumerate(known):
            at = np.flatnonzero(there)
            if not len(at):
                continue
            between = np.searchsorted((at[1:] + at[:-1]) / 2, np.arange(values.shape[1]))
            near = [
                np.median(values[row, at[max(0, index - _NEAREST) : index + _NEAREST + 1]]) for index in range(len(at))
            ]
            filled[row] = np.array(near)[between]
        return filled

    @cached_property
    def waits(self) -> Numbers:
        """Everything that is not a rank's own."""
        return sum_known([self.blocked(name) for name in PHASES])

    @cached_property
    def own(self) -> dict[str, Numbers]:
        """By phase of `OWN`: without collectives. On a GPU these are known in some steps only, so single steps may be
        off, and even below 0."""
        found = {}
        for name in OWN:
            phase, blocked = self.phase(name), self.view.column(f"blocked_{name}_us") * 1e-6
            if self.on_device and name in _CARRIERS:
                # where it was not timed: what it usually is without collectives; the rest of the phase is waiting
                usual = np.nan_to_num(median_known(phase - blocked, axis=1))[:, None]
                found[name] = np.where(np.isnan(blocked), np.minimum(phase, np.maximum(usual, 0.0)), phase - blocked)
            else:
                found[name] = phase - self._filled(blocked)
        return found

    @cached_property
    def work(self) -> Numbers:
        """A rank's own part of a step."""
        return sum_known(list(self.own.values()))

    @cached_property
    def collections(self) -> Numbers:
        """Garbage collection; it lies within other phases."""
        return self._within_step("gc_us")

    @cached_property
    def queue(self) -> Numbers:
        """The training thread could run and had no processor; it lies within other phases."""
        return self._within_step("thread_queue_us")

    def _within_step(self, name: str) -> Numbers:
        """The kernel's and Python's own counters are read beside the step's clock: no step holds more than itself."""
        return np.nan_to_num(np.fmin(self.view.column(name), self.view.column("wall_us"))) * 1e-6

    @cached_property
    def axis_waits(self) -> dict[str, Numbers]:
        return {axis: self.wait(axis) for axis in AXES}

    @property
    def step_seconds(self) -> float:
        """Mean over ranks and steps."""
        return float(mean_known(self.wall))


def sum_known(parts: list[Numbers]) -> Numbers:
    """A sum in which what is unknown counts nothing, and stays unknown where all is."""
    stacked = np.stack(parts)
    total = np.nansum(stacked, axis=0)
    total[np.isnan(stacked).all(axis=0)] = np.nan
    return total


def mean_known(values: Numbers, axis: int | None = None) -> Numbers:
    """The mean of what is known; nan where nothing is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # all-nan slices are answered by nan
        return np.asarray(np.nanmean(values, axis=axis))


def median_known(values: Numbers, axis: int | None = None) -> Numbers:
    """The median of what is known; nan where nothing is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return np.asarray(np.nanmedian(values, axis=axis))


def worst_rank(values: Numbers) -> float:
    """Seconds of a mean step that the worst rank of each step takes: all wait for it."""
    return float(np.mean(np.nanmax(np.nan_to_num(values), axis=0)))


def of_step(shares: Shares, seconds: float) -> float:
    return seconds / max(float(mean_known(shares.wall)), 1e-12)
