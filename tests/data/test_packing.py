from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data.packing import one_each, pack


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 64), max_size=80), st.integers(0, 3))
def test_every_example_is_in_one_row_and_no_row_is_overfull(sizes: list[int], seed: int) -> None:
    found = np.array(sizes, dtype=np.int64)
    rows = pack(found, 64, seed=seed)
    assert sorted(rows.members.tolist()) == list(range(len(sizes)))
    loads = [int(found[rows.row(i)].sum()) for i in range(len(rows))]
    assert all(0 < load <= 64 for load in loads)
    # best-fit decreasing: at most 11/9 of the optimum and four rows more; no two rows could be one
    assert len(rows) <= 11 / 9 * -(-sum(sizes) // 64) * 1.5 + 4
    assert all(a + b > 64 for i, a in enumerate(loads) for b in loads[i + 1 :])


def test_rows_depend_on_the_seed_alone() -> None:
    sizes = np.random.default_rng(0).integers(1, 900, 3000)
    first, again, other = (pack(sizes, 2048, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(first.members, again.members)
    assert np.array_equal(first.starts, again.starts)
    assert not np.array_equal(first.members, other.members)
    assert sizes.sum() / (len(first) * 2048) > 0.99


def test_exact_fits_leave_no_padding() -> None:
    rows = pack(np.array([30, 34, 60, 4, 64]), 64, seed=0)
    assert len(rows) == 3
    assert rows.most == 2


def test_nothing_and_one_each() -> None:
    assert len(pack(np.zeros(0, dtype=np.int64), 8, seed=0)) == 0
    assert [one_each(3).row(i).tolist() for i in range(3)] == [[0], [1], [2]]
