"""Lines of ranks are joined by their steps, also where ranks gather different numbers of steps in a line."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.explain.run_folder import _join
from paceline.observe.telemetry.columns import COLUMNS, UNKNOWN
from paceline.observe.telemetry.record import RankRecord

WALL, STEPS, CLOCK, WAIT, TIMED = (
    COLUMNS.index(name) for name in ("wall_us", "steps", "gpu_clock_mhz", "wait_dp_us", "timed_steps")
)


def record(rank: int, ends: list[int], *, wall: dict[int, int] | None = None, first: int = 0) -> RankRecord:
    """Lines that end at these steps and begin after the one before; a step lasts as many microseconds as its number,
    or as ``wall`` says."""
    values = np.zeros((len(ends), len(COLUMNS)), dtype=np.int64)
    for line, (before, end) in enumerate(zip([first, *ends], ends, strict=False)):
        of_line = range(before + 1, end + 1)
        values[line, 0], values[line, STEPS] = end, len(of_line)
        values[line, WALL] = sum((wall or {}).get(step, step) for step in of_line)
        values[line, CLOCK] = 1000 + end
    return RankRecord(rank=rank, facts={}, values=values)


def test_lines_of_one_step_stay_as_they_are() -> None:
    steps, table = _join([record(0, [1, 2, 3]), record(1, [1, 2, 3])])
    assert steps.tolist() == [1, 2, 3] and table[WALL].tolist() == [[1, 2, 3], [1, 2, 3]]


def test_a_rank_that_gathers_steps_sooner_is_held_against_the_same_steps_of_the_others() -> None:
    """Rank 1 gathers two steps from the third on. A pause of all ranks in step 5 is no difference between them."""
    pause = {5: 1005}
    steps, table = _join([record(0, list(range(1, 9)), wall=pause), record(1, [1, 2, 4, 6, 8], wall=pause)])
    assert steps.tolist() == [1, 2, 4, 6, 8]
    assert table[WALL, 0].tolist() == table[WALL, 1].tolist() == [1, 2, 3.5, 505.5, 7.5]
    assert table[CLOCK, 0].tolist() == [1001, 1002, 1004, 1006, 1008], "levels are of the last line"


def test_one_of_many_ranks_does_not_take_steps_from_all() -> None:
    steps, table = _join([*(record(rank, [1, 2, 3, 4]) for rank in range(19)), record(19, [2, 4])])
    assert steps.tolist() == [1, 2, 3, 4]
    assert np.isnan(table[WALL, 19, [0, 2]]).all() and table[WALL, 19, [1, 3]].tolist() == [1.5, 3.5]


def test_ranks_that_begin_later_or_end_sooner_leave_steps_to_the_others() -> None:
    steps, table = _join([record(0, [1, 2, 3, 4]), record(1, [2, 3], first=1), record(2, [1, 2, 3, 4])])
    assert steps.tolist() == [1, 2, 3, 4] and np.isnan(table[WALL, 1, [0, 3]]).all()


def test_a_step_that_a_rank_is_still_at_is_left_to_its_peers_and_half_must_have_it() -> None:
    steps, _ = _join([record(0, [1, 2, 3]), record(1, [1, 2]), record(2, [1, 2])])
    assert steps.tolist() == [1, 2]


@pytest.mark.parametrize("gathered", [True, False])
def test_waits_are_means_of_the_steps_in_which_they_were_timed(gathered: bool) -> None:
    """On a GPU every 16th step: 160 us in step 16, 480 in step 32, and nothing is known of the others."""
    ends = [16, 32, 48] if gathered else list(range(1, 49))
    one, other = record(0, ends), record(1, [16, 32, 48])
    for each in (one, other):
        each.values[:, [WAIT, TIMED]] = UNKNOWN, 0
        for end, wait in ((16, 160), (32, 480)):
            each.values[each.values[:, 0] == end, WAIT] = wait
            each.values[each.values[:, 0] == end, TIMED] = 1
    steps, table = _join([one, other])
    assert steps.tolist() == [16, 32, 48]
    for rank in (0, 1):
        assert table[WAIT, rank, :2].tolist() == [160, 480] and np.isnan(table[WAIT, rank, 2])
        assert table[WALL, rank].tolist() == [8.5, 24.5, 40.5]


def test_nothing_is_joined_to_nothing() -> None:
    assert _join([])[0].tolist() == []
    assert _join([record(0, [1]), record(1, [2], first=1), record(2, [3], first=2)])[0].tolist() == []
