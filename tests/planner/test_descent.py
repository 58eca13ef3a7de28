"""Least absolute residuals, capped."""

from __future__ import annotations

import numpy as np

from paceline.planner.descent import Array, descend

X = np.linspace(0.1, 3.0, 40)


def model(points: Array) -> Array:
    return np.asarray(points[:, :1] * np.exp(-points[:, 1:2] * X))


def test_finds_what_made_the_data() -> None:
    wanted = model(np.array([[2.0, 0.7]]))
    found = descend(lambda points: model(points) - wanted, np.array([0.5, 0.1]), np.ones(40))
    np.testing.assert_allclose(found, [2.0, 0.7], atol=1e-3)


def test_a_few_rows_far_off_do_not_matter_where_a_cap_is() -> None:
    wanted = model(np.array([[2.0, 0.7]]))
    wanted[:, ::8] += 5.0
    found = descend(lambda points: model(points) - wanted, np.array([0.5, 0.1]), np.ones(40), cap=0.3)
    np.testing.assert_allclose(found, [2.0, 0.7], atol=1e-2)


def test_rows_count_by_their_weights() -> None:
    """Of two answers the one that weighs more."""
    wanted = np.array([[1.0, 2.0]])
    for weights, answer in (([3.0, 1.0], 1.0), ([1.0, 3.0], 2.0)):
        found = descend(lambda points: points[:, :1] - wanted, np.array([1.4]), np.array(weights))
        np.testing.assert_allclose(found, [answer], atol=0.02)
