from __future__ import annotations

import numpy as np
import pytest

from paceline.data.mixture import (
    _blend_few,
    _blend_many,
    blend_order,
    blend_sizes,
    exhaustive_order,
    normalized,
)
from paceline.errors import DataError


@pytest.mark.parametrize(
    ("weights", "ids", "places"),
    [
        ([0.7, 0.3], "0100100100", "0012134256"),
        ([0.5, 0.3, 0.2], "0120102010", "0001121324"),
    ],
)
def test_published_orders(weights: list[float], ids: str, places: str) -> None:
    found, counts = blend_order(weights, 10)
    assert found.dtype == np.int16 and counts.dtype == np.int64
    assert "".join(map(str, found)) == ids and "".join(map(str, counts)) == places


@pytest.mark.parametrize(("sizes", "ids", "places"), [([4, 2, 1], "0120010", "0001213"), ([3, 3], "010101", "001122")])
def test_exhaustive(sizes: list[int], ids: str, places: str) -> None:
    found, counts = exhaustive_order(sizes)
    assert "".join(map(str, found)) == ids and "".join(map(str, counts)) == places


def test_both_loops_agree() -> None:
    random = np.random.default_rng(0)
    for count in (1, 2, 5, 20):
        weights = normalized(list(random.random(count) + 1e-6))
        assert (_blend_few(weights, 3000) == _blend_many(np.array(weights), 3000)).all()


def test_extreme_weights() -> None:
    ids, _ = blend_order(normalized([0.001, 0.999]), 1000)
    assert abs(int((ids == 0).sum()) - 1) <= 1
    ids, _ = blend_order(normalized([10, 20]), 30)
    assert np.bincount(ids).tolist() == [10, 20]
    weights = normalized([0.5, 0.3, 0.2, 0.0001])
    ids, _ = blend_order(weights, 100)
    for count, weight in zip(np.bincount(ids, minlength=4), weights, strict=True):
        assert abs(count - 100 * weight) <= 1


def test_enough_samples_for_any_size() -> None:
    weights = normalized([0.5, 0.3, 0.2, 0.0001])
    ids, places = blend_order(weights, 2100)
    for size in range(1, 2001):
        length, sizes = blend_sizes(weights, size)
        exact = np.bincount(ids[:length], minlength=4)
        built = np.maximum(sizes, exact)
        assert length >= size and (places[:length] < built[ids[:length]]).all()


@pytest.mark.parametrize("weights", [[], [0.0, 1.0], [-1.0, 2.0], [float("nan"), 1.0]])
def test_bad_weights(weights: list[float]) -> None:
    with pytest.raises(DataError):
        normalized(weights)
