"""What was gained, step by step? Only what was measured, only what is more than noise; the rest is told as tried.

A rung is a trial that beat the best before it. Changes that were tried together are told together: how much of a gain
is whose was not measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from paceline.config.run import RunConfig
from paceline.tuner.neutrality import Neutrality, by_setting, worst
from paceline.tuner.noise import deviation, least_gain
from paceline.tuner.objective import Goal
from paceline.tuner.search import Search
from paceline.tuner.space import key_of, value_at
from paceline.tuner.suspects import Item
from paceline.tuner.trial import Changes, Trial


@dataclass(frozen=True, kw_only=True)
class Change:
    """One setting, from the rung below."""

    key: str
    before: Any
    after: Any
    neutrality: Neutrality
    """Against the base, as all of a recipe must be."""


@dataclass(frozen=True, kw_only=True)
class Rung:
    trial: Trial
    changes: tuple[Change, ...]
    expected: float | None
    """Times as good as the rung below: its mean, with repeats that came later, over what was expected before the trial;
    None where nothing could be expected."""
    obtained: float
    """The same as measured, repeats averaged."""


@dataclass(frozen=True, kw_only=True)
class Gain:
    """Of the best over the base."""

    times: float
    """Base over best: seconds of a step, or bytes."""
    least: float
    """What it had to be above 1 to count."""
    repeats: tuple[int, int]
    """Of the base, of the best."""

    @property
    def counts(self) -> bool:
        return self.times - 1 > self.least


@dataclass(frozen=True, kw_only=True)
class Result:
    """Everything that a tuning has to say. ``base`` is None where the recipe itself did not fit."""

    goal: Goal
    config: RunConfig
    """The best recipe; the base where nothing is better."""
    changes: Mapping[str, Change]
    """From the base to it."""
    base: Trial | None
    best: Trial
    base_value: float | None
    best_value: float
    rungs: tuple[Rung, ...]
    gain: Gain | None
    """None without a base, or where the best is the base."""
    noise: float
    """Standard deviation of repeats, relative."""
    repeated: bool
    """Whether it is known from repeats of the base and of what was best before them."""
    others: tuple[tuple[Trial, tuple[Change, ...]], ...]
    """Tried, and no rung: no better, or failed; with what differs from the best before it."""
    culprits: tuple[Item, ...]
    trials: tuple[Trial, ...]

    @property
    def neutrality(self) -> Neutrality:
        return worst(change.neutrality for change in self.changes.values())

    @property
    def seconds(self) -> float:
        """Of all trials."""
        return sum(trial.ended.seconds for trial in self.trials)


def result_of(search: Search) -> Result | None:
    """None where no trial has run to its end."""
    best = search.incumbent
    if best is None:
        return None
    space, base = search.space, search.base
    repeated = bool(best.changes) and all(_repeats(search, each) > 1 for each in (base, best) if each is not None)
    if base is not None and not _gain(search, base, best).counts:
        best = base  # repeats have shown that it was noise
    point = space.point(best.changes)
    assert point is not None
    rungs = search.rungs[: search.rungs.index(best) + 1] if best in search.rungs else [best]
    steps = {key_of(trial.changes) for trial in rungs}
    return Result(
        goal=search.goal,
        config=point.config,
        changes=_changes(search, {}, best.changes),
        base=base,
        best=best,
        base_value=None if base is None else search.value_of(base),
        best_value=search.value_of(best),
        rungs=tuple(_rungs(search, rungs)),
        gain=None if base is None or best is base else _gain(search, base, best),
        noise=deviation(search.trials, search.goal),
        repeated=repeated,
        others=tuple(
            (trial, tuple(_changes(search, _best_before(rungs, trial), trial.changes).values()))
            for trial in search.trials
            if key_of(trial.changes) not in steps
        ),
        culprits=search.suspects.culprits(),
        trials=tuple(search.trials),
    )


def _gain(search: Search, base: Trial, best: Trial) -> Gain:
    before, after = _repeats(search, base), _repeats(search, best)
    return Gain(
        times=search.value_of(base) / search.value_of(best),
        least=least_gain(search.trials, search.goal, before, after),
        repeats=(before, after),
    )


def _best_before(rungs: Sequence[Trial], trial: Trial) -> Changes:
    earlier = [rung.changes for rung in rungs if rung.number < trial.number]
    return earlier[-1] if earlier else {}


def _repeats(search: Search, of: Trial) -> int:
    return sum(trial.is_good and key_of(trial.changes) == key_of(of.changes) for trial in search.trials)


def _rungs(search: Search, trials: Sequence[Trial]) -> list[Rung]:
    found = []
    for before, trial in pairwise(trials):
        value = search.value_of(before)
        wanted = trial.expected_bytes
        if search.goal.objective == "tokens":
            wanted = None if trial.expected is None else trial.expected / trial.batch_ratio
        found.append(
            Rung(
                trial=trial,
                changes=tuple(_changes(search, before.changes, trial.changes).values()),
                expected=value / wanted if wanted else None,
                obtained=value / search.value_of(trial),
            )
        )
    return found


def _changes(search: Search, before: Changes, after: Changes) -> dict[str, Change]:
    base, ranks = search.space.base, search.space.machine.ranks
    point = search.space.point(after)
    assert point is not None
    classes = by_setting(base, point.config, ranks)
    found = {}
    for key in sorted({*before, *after}):
        values = [changes.get(key, value_at(base, key)) for changes in (before, after)]
        if values[0] != values[1]:
            kind = classes.get(key, "bits")  # as in the base again
            found[key] = Change(key=key, before=values[0], after=values[1], neutrality=kind)
    return found
