"""The search on machines that the planner is wrong about: few trials, no dead ends, no gain that is none.

Over many seeds: hidden efficiencies, limits of memory, effects of settings, noise, settings that crash or do not train
alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest

from paceline.config.load import load_recipe
from paceline.tuner.advice import advice_of
from paceline.tuner.ladder import result_of
from paceline.tuner.neutrality import classes_up_to
from paceline.tuner.objective import Goal
from paceline.tuner.search import Advice, Search
from paceline.tuner.space import Space, key_of
from paceline.tuner.trial import Trial
from tests.tuner.simulated import SPACES, Simulated, as_trial, space_of, trials_needed, two_h200s

SEEDS = 30


def searching(space: Space, goal: Goal | None = None) -> Callable[[Sequence[Trial]], Search]:
    return lambda trials: Search(space, goal or Goal(), trials, advice_of(space, trials))


def until_done(space: Space, runner: Simulated, goal: Goal | None = None, most: int = 40) -> list[Trial]:
    trials: list[Trial] = []
    while len(trials) < most:
        found = searching(space, goal)(trials).propose()
        if found is None:
            break
        trials.append(as_trial(len(trials), found.point, runner))
    return trials


@pytest.mark.slow
def test_few_trials_come_within_two_percent_of_an_exhaustive_sweep() -> None:
    """Within 2 % of the best of 60 points and more by the 8th trial, the base among them, in 95 % of the seeds."""
    needed: list[int] = []
    for number in range(len(SPACES)):
        space = space_of(number)
        assert len(list(space.named())) >= 60
        of_space = [trials_needed(searching(space), space, Simulated(space, seed)) for seed in range(SEEDS)]
        assert sum(count <= 8 for count in of_space) >= 0.9 * SEEDS, (number, sorted(of_space))
        needed += of_space
    assert sum(count <= 8 for count in needed) >= 0.95 * len(needed), sorted(needed)


def test_the_first_seeds_of_it() -> None:
    needed: list[int] = []
    for number in range(len(SPACES)):
        space = space_of(number)
        needed += [trials_needed(searching(space), space, Simulated(space, seed)) for seed in range(4)]
    assert sum(count <= 8 for count in needed) >= 0.95 * len(needed) - 1, needed


def test_nothing_is_tried_twice_and_the_end_comes() -> None:
    for seed in range(4):
        space = space_of(seed % len(SPACES))
        trials = until_done(space, Simulated(space, seed))
        keys = [key_of(trial.changes) for trial in trials]
        assert len(set(keys)) == len(keys) < 30
        assert trials[0].changes == {}


def test_sure_gains_are_tried_together_and_a_group_that_crashes_is_taken_apart() -> None:
    base = load_recipe("recipes/ladder/naive.toml").config
    space = Space(base=base, machine=two_h200s(), allowed=classes_up_to("chance"))

    class Compilers(Simulated):
        def crashes(self, changes: object) -> bool:
            return isinstance(changes, dict) and changes.get("parallel.compile") is True

    trials = until_done(space, Compilers(space, seed=3, wrong_losses=0.0, room=1.05))
    assert len(trials[1].changes) >= 5, "the planner is sure of several things: one trial for all"
    failed = [trial for trial in trials if trial.outcome == "crash"]
    assert failed and len(failed) <= 4
    assert Search(space, Goal(), trials).suspects.culprits() == (("parallel.compile", True),)
    result = result_of(Search(space, Goal(), trials))
    assert result is not None and result.gain is not None and result.gain.times > 1.5
    assert "parallel.compile" not in result.changes


def test_out_of_memory_bounds_what_comes_after() -> None:
    """Of a machine with far less room than the planner thinks, few trials run out, and none needs more than one did."""
    space = space_of(0)
    runner = Simulated(space, seed=1, faults=0.0, wrong_losses=0.0, room=0.75)
    trials = until_done(space, runner)
    short = [trial for trial in trials if trial.outcome == "memory"]
    assert 1 <= len(short) <= 4
    first = next(trial for trial in trials if trial.outcome == "memory")
    needed = {trial.number: runner.bytes_of(point_of(space, trial)) for trial in trials}
    later = [needed[trial.number] for trial in trials if trial.number > first.number]
    assert all(size < 1.1 * needed[first.number] for size in later)
    assert any(trial.is_good and trial.changes for trial in trials)


def point_of(space: Space, trial: Trial):  # type: ignore[no-untyped-def]
    point = space.point(trial.changes)
    assert point is not None
    return point.config


def test_a_base_that_does_not_fit_is_left_for_one_that_does() -> None:
    base = load_recipe(
        "recipes/llama3_8b.toml",
        ["train.micro_batch_size=8", "train.global_batch_size=16", "parallel.recompute=none"],
    ).config
    space = Space(base=base, machine=two_h200s(), allowed=classes_up_to("chance"))
    trials = until_done(space, Simulated(space, seed=2, faults=0.0, wrong_losses=0.0))
    assert trials[0].outcome == "memory" and trials[1].is_good, [trial.outcome for trial in trials]
    result = result_of(Search(space, Goal(), trials))
    assert result is not None and result.base is None and result.gain is None and result.changes


def test_a_rejected_trial_is_never_the_best() -> None:
    space = space_of(2)

    class Wrong(Simulated):
        def is_wrong(self, changes: object) -> bool:
            return isinstance(changes, dict) and changes.get("train.loss_kernel") == "chunked"

    trials = until_done(space, Wrong(space, seed=4, faults=0.0))
    assert any(trial.outcome == "rejected" for trial in trials)
    result = result_of(Search(space, Goal(), trials))
    assert result is not None and "train.loss_kernel" not in result.changes
    assert all(trial.is_good for trial in (rung.trial for rung in result.rungs))


def test_a_gain_within_noise_is_none() -> None:
    """No setting changes anything here, and repeats differ by 2 %: nothing is told as a gain."""
    space = space_of(0)

    class Flat(Simulated):
        def seconds_of(self, config: object) -> float:
            return 3.0

    told = 0
    for seed in range(6):
        trials = until_done(space, Flat(space, seed, noise=0.02, faults=0.0, wrong_losses=0.0))
        again = Flat(space, seed + 100, noise=0.02, faults=0.0, wrong_losses=0.0)
        search = Search(space, Goal(), trials)
        for one in (search.incumbent, search.base):
            assert one is not None
            point = space.point(one.changes)
            assert point is not None
            again.number = len(trials)
            trials.append(as_trial(len(trials), point, again))
        result = result_of(Search(space, Goal(), trials))
        assert result is not None
        told += result.gain is not None
    assert told <= 1, "of a dozen trials each, the luckiest was taken: twice the deviation is not always enough"


def test_least_memory_at_the_speed_asked_for() -> None:
    for seed in range(4):
        space = space_of(1)
        goal = Goal(objective="memory", speed=0.9)
        trials = until_done(space, Simulated(space, seed, faults=0.0, wrong_losses=0.0), goal)
        result = result_of(Search(space, goal, trials))
        assert result is not None and result.base is not None
        assert result.best.step_seconds <= result.base.step_seconds / 0.9
        fast = [trial for trial in trials if trial.is_good and goal.admits(trial, result.base)]
        assert result.best.peak_bytes <= 1.01 * min(trial.peak_bytes for trial in fast)


def test_advice_is_followed_where_the_planner_knows_nothing() -> None:
    """`explain` promises a fifth of the step for a setting that no prediction speaks of: it is tried."""
    base = load_recipe("recipes/llama3_8b.toml").config
    space = Space(base=base, machine=two_h200s(), allowed=classes_up_to("chance"))
    runner = Simulated(space, seed=5, faults=0.0)
    trials = [as_trial(0, space.origin, runner)]
    space.advise({"train.gc_interval": 1000})
    point = space.point({"train.gc_interval": 1000})
    assert point is not None
    log_seconds = math.log(0.8 * trials[0].step_seconds)
    found = Search(space, Goal(), trials, [Advice(point=point, log_seconds=log_seconds, doubt=0.1)]).propose()
    assert found is not None and found.point.changes["train.gc_interval"] == 1000


def test_the_same_trials_give_the_same_proposal() -> None:
    space, other = space_of(3), space_of(3)
    trials = until_done(space, Simulated(space, 7), most=2)
    first, second = Search(space, Goal(), trials).propose(), Search(other, Goal(), trials).propose()
    assert first is not None and second is not None and first.point.key == second.point.key
