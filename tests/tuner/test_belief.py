"""What trials say of recipes that were not tried: nothing before the first, more with each, and within reason."""

from __future__ import annotations

import math

import numpy as np
import pytest

from paceline.config.load import load_recipe
from paceline.tuner.belief import Belief, Guess, Seen, expected_improvement, normal_cdf
from paceline.tuner.neutrality import classes_up_to
from paceline.tuner.noise import deviation, least_gain
from paceline.tuner.objective import Goal
from paceline.tuner.room import Room
from paceline.tuner.space import Point, Space
from paceline.tuner.suspects import Suspects
from paceline.tuner.trial import Ended, Measurement, Trial
from tests.tuner.simulated import two_h200s

SPACE = Space(
    base=load_recipe("recipes/ladder/naive.toml").config, machine=two_h200s(), allowed=classes_up_to("precision")
)


def point(**changes: object) -> Point:
    names = {"compile": "parallel.compile", "recompute": "parallel.recompute", "kernel": "train.attention_kernel",
             "loss": "train.loss_kernel", "zero": "parallel.zero"}  # fmt: skip
    found = SPACE.point({names[key]: value for key, value in changes.items()})
    assert found is not None
    return found


def seen(of: Point, factor: float, noise: float = 0.004) -> Seen:
    return Seen(point=of, log_value=math.log(factor * of.estimate.seconds), noise=noise)


def test_without_trials_it_is_the_planner() -> None:
    belief = Belief(SPACE.base, SPACE.machine)
    guess = belief.guess([point(), point(compile=True)])
    assert np.exp(guess.mean[0]) == pytest.approx(SPACE.origin.estimate.seconds)
    assert 0.08 < guess.deviation[0] < 0.2 and guess.deviation[1] > guess.deviation[0]
    memory = Belief(SPACE.base, SPACE.machine, of_memory=True).guess([point()])
    assert np.exp(memory.mean[0]) == pytest.approx(SPACE.origin.estimate.memory_bytes) and memory.deviation[0] < 0.08


def test_a_machine_that_is_slower_is_slower_for_all() -> None:
    belief = Belief(SPACE.base, SPACE.machine)
    before = belief.guess([point(compile=True)])
    belief.learn([seen(point(), 1.2)])
    base, other = belief.guess([point()]), belief.guess([point(compile=True)])
    assert np.exp(base.mean[0]) == pytest.approx(1.2 * SPACE.origin.estimate.seconds, rel=0.02)
    assert 0.1 < other.mean[0] - before.mean[0] < 0.19, "most of it, not all: the setting may be what differs"
    assert other.deviation[0] < before.deviation[0] and base.deviation[0] < 0.03


def test_a_setting_that_helped_helps_beside_others() -> None:
    belief = Belief(SPACE.base, SPACE.machine)
    belief.learn([seen(point(), 1.0)])
    before = belief.guess([point(compile=True, recompute="selective"), point(recompute="selective")])
    belief.learn([seen(point(), 1.0), seen(point(compile=True), 0.8)])
    after = belief.guess([point(compile=True, recompute="selective"), point(recompute="selective")])
    assert after.mean[0] < before.mean[0] - 0.1 and abs(after.mean[1] - before.mean[1]) < 0.08


def test_repeats_are_believed_more_than_one_trial_and_advice_less() -> None:
    def doubt(*observed: Seen) -> float:
        belief = Belief(SPACE.base, SPACE.machine)
        belief.learn(observed)
        return float(belief.guess([point(compile=True)]).deviation[0])

    of = point(compile=True)
    assert doubt(seen(of, 1.0, 0.04), seen(of, 1.01, 0.04)) < doubt(seen(of, 1.0, 0.04)) < doubt(seen(of, 1.0, 0.2))
    assert doubt(seen(of, 1.0, 0.2)) < doubt()


def test_the_normal_distribution() -> None:
    values = np.linspace(-6, 6, 241)
    exact = np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in values])
    assert np.abs(normal_cdf(values) - exact).max() < 1e-7


def test_expected_improvement() -> None:
    guess = Guess(mean=np.array([0.0, -0.5, 1.0]), deviation=np.array([1.0, 1e-6, 1e-6]))
    found = expected_improvement(0.0, guess)
    assert found == pytest.approx([1 / math.sqrt(2 * math.pi), 0.5, 0.0], abs=1e-6)
    rng = np.random.default_rng(0)
    drawn = np.maximum(0.3 - rng.normal(0.1, 0.4, 200_000), 0).mean()
    one = expected_improvement(0.3, Guess(mean=np.array([0.1]), deviation=np.array([0.4])))
    assert one[0] == pytest.approx(drawn, rel=0.01)


def test_room_follows_what_fitted_and_what_did_not() -> None:
    def fits(room: Room, size: float) -> float:
        return float(room.fits(Guess(mean=np.array([math.log(size)]), deviation=np.array([0.02])))[0])

    room = Room(100.0)
    assert fits(room, 80) > 0.99 and 0.4 < fits(room, 100) < 0.6 and fits(room, 125) < 0.01
    room.ran_out(math.log(95.0), 0.01)
    assert fits(room, 95) < 0.3 and fits(room, 80) > 0.9
    other = Room(100.0)
    other.held(math.log(104.0))
    assert fits(other, 100) > 0.9


# ---- failures and noise


def trial(changes: dict[str, object], outcome: str = "measured", seconds: float = 1.0, spread: float = 0.0) -> Trial:
    steps = (seconds * (1 - spread), seconds, seconds * (1 + spread)) * 3
    measured = Measurement(seconds_by_step=steps, peak_bytes=1e9, logged=(), devices="x")
    good = outcome in ("measured", "rejected")
    return Trial(
        number=0, changes=changes, outcome=outcome, why="", expected=None,  # type: ignore[arg-type]
        ended=Ended(seconds=30.0, measured=measured if good else None, failure=None if good else outcome),  # type: ignore[arg-type]
    )  # fmt: skip


A, B, C = {"parallel.compile": True}, {"train.attention_kernel": "flash4"}, {"train.loss_kernel": "chunked"}


def test_suspicion() -> None:
    both = Suspects([trial({}), trial({**A, **B}, "crash")])
    assert both.runs({**A, **B}) < 0.1 and 0.3 < both.runs(A) < 0.7 and both.runs(C) > 0.95
    assert not both.culprits()
    cleared = Suspects([trial({}), trial({**A, **B}, "crash"), trial(A)])
    assert cleared.culprits() == (("train.attention_kernel", "flash4"),)
    assert cleared.runs(A) == 1.0 and cleared.runs({**B, **C}) < 0.1


def test_one_culprit_of_two_failures_is_likelier_than_two() -> None:
    found = Suspects([trial({}), trial({**A, **B}, "crash"), trial({**A, **C}, "timeout")])
    assert found.runs(A) < 0.15 < 0.8 < found.runs(B)


def test_a_combination_that_fails_of_parts_that_run() -> None:
    found = Suspects([trial(A), trial(B), trial({**A, **B}, "rejected")])
    assert found.runs({**A, **B}) < 0.1 and found.runs({**A, **B, **C}) < 0.1 and found.runs(A) == 1.0
    assert not found.culprits()


def test_lack_of_memory_blames_nobody_and_clears_nobody() -> None:
    found = Suspects([trial({}), trial({**A, **B}, "crash"), trial(A, "memory")])
    assert 0.3 < found.runs(A) < 0.7


def test_noise() -> None:
    goal = Goal()
    assert 0.003 < deviation([trial({})], goal) < 0.006, "assumed, before anything was repeated"
    assert deviation([trial({}), trial({}, seconds=1.1)], goal) > 0.04
    assert deviation([trial({}), trial({})], goal) > 0.002, "two that are equal do not prove that there is none"
    assert deviation([trial({}, spread=0.2)], goal) > 0.05, "steps that differ within a trial"
    assert least_gain([trial({})], goal, 2, 2) < least_gain([trial({})], goal)
    assert least_gain([trial({})], Goal(objective="memory")) < 0.01
