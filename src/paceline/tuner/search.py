"""Which recipe is tried next? A pure function of the trials so far.

The first trial is the base. Then always the point of the largest expected improvement, times the probability that it
fits and runs. At the start the planner knows most, so the first try has all changes that it is sure of at once; where
such a group disappoints, the blame is shared out by how sure each change was, and where it fails, halves of it are the
likeliest to improve: a bisection that nobody had to write down.

The search ends when the largest expected improvement is small beside the noise of repeats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from paceline.tuner.belief import Array, Belief, Guess, Seen, expected_improvement, normal_cdf
from paceline.tuner.noise import deviation, least_gain
from paceline.tuner.objective import Goal
from paceline.tuner.room import Room
from paceline.tuner.space import Point, Space, key_of
from paceline.tuner.suspects import Suspects
from paceline.tuner.trial import Trial
from paceline.tuner.walk import pool

ENOUGH = 0.003
"""Expected improvement, relative, that is worth a trial on a quiet machine."""
PATIENCE, DOUBTFUL = 5, 0.008
"""After so many trials in a row that did not help, what is worth another one."""
FITS_GPU, FITS_HOST = 0.3, 0.9
"""Least probability of fitting that a trial is started with. A GPU that runs out loses half a minute; a host that runs
out ends other programs."""
_PER_CHANGE = 0.001
"""Improvement that each change must bring, in logarithms: of two alike the plainer recipe is tried."""
_WORTH_NAMING = 0.01
"""Of a step: what a part must save to be named."""
_PARTS = {
    "gemm": "matrix products",
    "memory_bound": "memory-bound operators",
    "launch": "kernel launches",
    "recompute": "recomputation",
    "bubble": "the pipeline's bubble",
    "optimizer": "the optimizer",
    "offload": "copies to host memory",
    "overhead": "the host",
    **{f"{axis}_communication": f"communication of {axis}" for axis in ("tp", "cp", "ep", "pp", "dp")},
}
"""Parts of `costs.step.PARTS` for people."""


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """The next trial."""

    point: Point
    why: str
    expected: float | None
    """Seconds of a step."""
    expected_bytes: float | None
    improvement: float
    """Expected, relative, with all doubts counted in."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What `explain` says that a change would bring, of a trial."""

    point: Point
    log_seconds: float
    doubt: float


class Search:
    """Everything that is decided from the trials. ``advice`` is of `explain`."""

    def __init__(self, space: Space, goal: Goal, trials: Sequence[Trial], advice: Sequence[Advice] = ()) -> None:
        self.space, self.goal = space, goal
        # a folder may hold trials of a wider search: with `--allow precision`, or without `--hold`
        self.trials = tuple(trial for trial in trials if space.point(trial.changes) is not None)
        self.time = Belief(space.base, space.machine)
        self.memory = Belief(space.base, space.machine, of_memory=True)
        self.suspects = Suspects(trials)
        self.base = next((trial for trial in self.trials if not trial.changes and trial.is_good), None)
        self._learn(advice)

    # ---- what is known

    def _learn(self, advice: Sequence[Advice]) -> None:
        noise = max(deviation(self.trials, Goal()), 1e-4)
        times, sizes, short = [], [], []
        for trial in self.trials:
            point = self.space.point(trial.changes)
            if point is None or trial.outcome not in ("measured", "rejected", "memory"):
                continue
            if trial.ended.measured is not None:
                own = math.hypot(noise, trial.ended.measured.spread)
                times.append(Seen(point=point, log_value=math.log(trial.even_seconds), noise=own))
                sizes.append(Seen(point=point, log_value=math.log(trial.peak_bytes), noise=0.005))
            else:
                short.append(point)
        times += [Seen(point=one.point, log_value=one.log_seconds, noise=one.doubt) for one in advice]
        self.time.learn(times)
        self.memory.learn(sizes)
        self._learn_shortage(sizes, short)

    def _learn_shortage(self, sizes: list[Seen], short: Sequence[Point]) -> None:
        """A trial that ran out needs more than there is: the mean and deviation of a normal number, known to be above.

        With z = (limit - mean) / deviation and h = density(z) / (1 - cumulative(z)): mean + deviation h, and
        deviation sqrt(1 + z h - h^2) (a truncated normal distribution).
        """
        self.room = Room(self.space.machine.room_bytes)
        for one in sizes:
            self.room.held(one.log_value)
        for point in short:
            guess = self.memory.guess([point])
            mean, deviation = float(guess.mean[0]), float(guess.deviation[0])
            self.room.ran_out(mean, deviation)
            limit = self.room.mean
            z = min(max((limit - mean) / deviation, -4.0), 4.0)
            hazard = math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi) / (0.5 * math.erfc(z / math.sqrt(2)))
            narrowed = deviation * math.sqrt(max(1 + z * hazard - hazard**2, 0.01))
            # with the cut at 4 deviations the mean may still lie below
            value = max(mean + deviation * hazard, limit)
            sizes.append(Seen(point=point, log_value=value, noise=narrowed))
            self.memory.learn(sizes)

    @cached_property
    def incumbent(self) -> Trial | None:
        """The best that is better than the one before it by more than noise, from the base on; None before any ran."""
        return self.rungs[-1] if self.rungs else None

    @cached_property
    def rungs(self) -> list[Trial]:
        """Trials that each beat the one before, in the order of trying. The first is the base, if it ran.

        In the place of the last stands the plainest that is as good, within noise: a change that was tried along and
        brought nothing is left out again.
        """
        found = self._climbed()
        if len(found) < 2:
            return found
        noise = deviation(self.trials, self.goal)
        alike = [
            trial
            for trial in self.trials
            if trial.is_good
            and self.goal.admits(trial, self.base)
            and self.value_of(trial) <= (1 + noise) * self.value_of(found[-1])
            and self.value_of(found[-2]) / self.value_of(trial) - 1 > least_gain(self.trials, self.goal)
        ]
        plainest = min(alike, key=lambda one: (len(one.changes), self.value_of(one)), default=found[-1])
        return [*found[:-1], plainest if len(plainest.changes) < len(found[-1].changes) else found[-1]]

    def _climbed(self) -> list[Trial]:
        found: list[Trial] = []
        for trial in self.trials:
            if not trial.is_good:
                continue
            if not found:
                if not trial.changes or self.base is None:
                    found.append(trial)
                continue
            if any(key_of(trial.changes) == key_of(one.changes) for one in found):
                continue
            gain = self.value_of(found[-1]) / self.value_of(trial) - 1
            if gain > least_gain(self.trials, self.goal) and self.goal.admits(trial, self.base):
                found.append(trial)
        return found

    def value_of(self, trial: Trial) -> float:
        """Mean over repeats of the same recipe."""
        values = [
            self.goal.value(one) for one in self.trials if one.is_good and key_of(one.changes) == key_of(trial.changes)
        ]
        return sum(values) / len(values)

    # ---- what is next

    def propose(self) -> Proposal | None:
        """None where nothing is worth a trial any more."""
        # also where its line in the journal was lost
        if all(trial.changes for trial in self.trials):
            point = self.space.origin
            seconds = float(np.exp(self.time.guess([point]).mean[0]))
            known = self.space.machine.hardware is not None
            return Proposal(
                point=point,
                why="measured first",
                expected=seconds if known else None,
                expected_bytes=point.estimate.memory_bytes if known else None,
                improvement=math.inf,
            )
        near = self._near()
        if not near:
            return None
        worth = self._worth(near)
        best = int(np.argmax(worth))
        if worth[best] < self._enough():
            return None
        point = near[best]
        guess = self.time.guess([point])
        return Proposal(
            point=point,
            why=self._why(point),
            expected=float(np.exp(guess.mean[0])) * point.batch_ratio,
            expected_bytes=float(np.exp(self.memory.guess([point]).mean[0])),
            improvement=float(worth[best]),
        )

    def _enough(self) -> float:
        noise = deviation(self.trials, self.goal)
        idle = 0
        last = self.incumbent
        for trial in reversed(self.trials):
            if last is not None and key_of(trial.changes) == key_of(last.changes):
                break
            idle += 1
        return max(DOUBTFUL if idle >= PATIENCE else ENOUGH, noise)

    def _worth(self, points: Sequence[Point]) -> Array:
        """Expected improvement over the best so far, times the probabilities that it counts."""
        times, sizes = self.time.guess(points), self.memory.guess(points)
        if self.incumbent is None:  # nothing has run: whatever does is an improvement, the likeliest first
            gain = np.exp(-times.mean + times.mean.min()) if self.goal.objective == "tokens" else np.ones(len(points))
        else:
            best = math.log(self.value_of(self.incumbent))
            main = times if self.goal.objective == "tokens" else sizes
            mine = len(self.incumbent.changes)
            more = np.array([len(point.changes) - mine for point in points])
            gain = expected_improvement(best, Guess(mean=main.mean + _PER_CHANGE * more, deviation=main.deviation))
        fits = self._fits(sizes)
        least = FITS_GPU if self.space.machine.on_gpu else FITS_HOST
        runs = np.array([self.suspects.runs(point.changes) for point in points])
        fast = self._fast_enough(times)
        return np.asarray(gain * runs * fast * fits * (fits >= least))

    def fits(self, point: Point) -> float:
        """The probability that its tensors find room, 0 ... 1."""
        return float(self._fits(self.memory.guess([point]))[0])

    def _fits(self, sizes: Guess) -> Array:
        return self.room.fits(sizes)

    def _fast_enough(self, times: Guess) -> Array:
        if self.goal.objective == "tokens" or self.base is None:
            return np.ones(len(times.mean))
        limit = math.log(self.base.even_seconds / self.goal.speed)
        return normal_cdf((limit - times.mean) / times.deviation)

    def _near(self) -> list[Point]:
        """What has not been tried, around the base and the best so far."""
        best = None
        if self.incumbent is not None and self.incumbent.changes:
            best = self.space.point(self.incumbent.changes)
        tried = {key_of(trial.changes) for trial in self.trials}
        return pool(self.space, best, tried, score=self._score, runs=self.suspects.runs)

    def _score(self, points: Sequence[Point], optimism: float) -> Array:
        """What a walk goes down: the value expected, with doubts of memory and of running as a price."""
        times, sizes = self.time.guess(points), self.memory.guess(points)
        main = times if self.goal.objective == "tokens" else sizes
        runs = np.array([self.suspects.runs(point.changes) for point in points])
        price = np.log(np.maximum(self._fits(sizes) * self._fast_enough(times), 1e-6)) + 0.3 * np.log(runs + 1e-6)
        changes = np.array([len(point.changes) for point in points])
        return np.asarray(main.mean - optimism * main.deviation - 0.3 * price + _PER_CHANGE * changes)

    def _why(self, point: Point) -> str:
        last = self.incumbent
        if last is None:
            return "nothing has run yet; this is expected to"
        seconds = float(np.exp(self.time.guess([point]).mean[0]))
        doubt = float(self.time.guess([point]).deviation[0])
        if self.goal.objective == "memory":
            size = float(np.exp(self.memory.guess([point]).mean[0]))
            return f"expected to need {1 - size / self.value_of(last):.0%} less memory than the best so far"
        ratio = last.even_seconds / seconds
        if ratio > 1:
            faster = f"expected to be {ratio:.2f} times as fast as the best so far, give or take {doubt:.0%}"
            return faster + self._saved(last, point)
        return f"expected to be no faster than the best so far, but that is known to {doubt:.0%} only"

    def _saved(self, last: Trial, point: Point) -> str:
        """The parts of a step that the planner expects to save most of, for as many sequences; empty where none."""
        best = self.space.point(last.changes)
        if best is None:
            return ""
        whole = best.estimate.seconds / best.batch_ratio
        saved = {
            name: (seconds / best.batch_ratio - point.estimate.parts[name] / point.batch_ratio) / whole
            for name, seconds in best.estimate.parts.items()
        }
        most = sorted((name for name in saved if saved[name] >= _WORTH_NAMING), key=lambda name: -saved[name])[:2]
        told = " and ".join(f"{saved[name]:.0%} of its step in {_PARTS.get(name, name)}" for name in most)
        return f"; `plan` saves {told}" if told else ""
