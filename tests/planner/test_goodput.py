"""Goodput equals its formula's limits and a simulation of failures."""

from __future__ import annotations

import math
import random

import pytest

from paceline.planner.goodput import best_interval, goodput


def test_without_failures_only_checkpoints_cost() -> None:
    assert goodput(1e12, 30, 600, 3600).share == pytest.approx(3600 / 3630, rel=1e-6)


def test_the_best_interval_is_near_youngs() -> None:
    found = best_interval(6 * 3600, 30, 600)
    assert found.interval_seconds == pytest.approx(math.sqrt(2 * 30 * 6 * 3600), rel=0.05)
    for factor in (0.5, 0.9, 1.1, 2.0):
        assert goodput(6 * 3600, 30, 600, factor * found.interval_seconds).share <= found.share


def test_the_formula_agrees_with_failures_at_random() -> None:
    mtbf, checkpoint, restart, interval = 7200.0, 60.0, 600.0, 900.0
    chance = random.Random(3)
    clock, done = 0.0, 0.0
    while done < 4e6:
        failure = chance.expovariate(1 / mtbf)
        if failure >= interval + checkpoint:
            clock, done = clock + interval + checkpoint, done + interval
            continue
        clock += failure
        while (again := chance.expovariate(1 / mtbf)) < restart:  # restarts fail too
            clock += again
        clock += restart
    assert goodput(mtbf, checkpoint, restart, interval).share == pytest.approx(done / clock, rel=0.02)


def test_hopeless_numbers_give_nothing() -> None:
    assert goodput(60, 30, 1e6, 3600).share == 0.0
