"""Schedules: complete, never stalled, with the bubble and the memory that their papers promise."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest

from paceline.config.parallel import ParallelConfig
from paceline.costs.pipeline import (
    SCHEDULES,
    Action,
    ActionSeconds,
    StalledError,
    bubble,
    peak_in_flight,
    rank_of,
    schedule,
    simulate,
    stages_of,
    why_not,
)
from paceline.costs.stages import stages_of_rank

ALL = [
    (name, p, v, m)
    for name, p, v, m in product(SCHEDULES, (1, 2, 3, 4, 5, 8), (1, 2, 3), (1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 30))
    if not why_not(name, p, v, m)
]


def test_every_list_is_complete_and_in_place_and_never_stalls() -> None:
    """Over 480 combinations: each pair once forward and once backward, on its own rank; also with slow transfers."""
    assert len(ALL) > 400
    for name, p, v, m in ALL:
        lists = schedule(name, p, v, m)
        seen = Counter(action for actions in lists for action in actions)
        backward = {"1f1b": "B", "interleaved_1f1b": "B"}.get(name, "IW")
        expected = {Action(kind, s, k) for kind in "F" + backward for s in range(p * v) for k in range(m)}  # type: ignore[arg-type]
        assert set(seen) == expected and set(seen.values()) == {1}, (name, p, v, m)
        for rank, actions in enumerate(lists):
            assert {action.stage for action in actions} == set(stages_of(name, p, v, rank))
            assert all(rank_of(name, p, action.stage) == rank for action in actions)
            for stage, kind in product(stages_of(name, p, v, rank), "F" + backward):
                order = [a.micro_batch for a in actions if (a.kind, a.stage) == (kind, stage)]
                assert order == list(range(m)), "micro-batches of a stage in order"
        for seconds in (ActionSeconds(), ActionSeconds(send=0.7, input_gradient=1.3, stage_scale=(0.5,) * (p * v))):
            timeline = simulate(lists, seconds)
            assert 0.0 <= timeline.bubble < 1.0


def test_lists_that_wait_for_each_other_are_found() -> None:
    crossed = ((Action("F", 0, 0), Action("B", 0, 0)), (Action("B", 1, 0), Action("F", 1, 0)))
    with pytest.raises(StalledError, match=r"rank 0 at B0\.0; rank 1 at B1\.0"):
        simulate(crossed)


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 1), (2, 8), (4, 3), (4, 4), (4, 16), (8, 32)])
def test_1f1b_has_the_bubble_and_the_memory_of_the_paper(p: int, m: int) -> None:
    assert bubble("1f1b", p, 1, m) == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)
    lists = schedule("1f1b", p, 1, m)
    assert [peak_in_flight(actions) for actions in lists] == [min(m, p - rank) for rank in range(p)]


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (4, 2, 8), (4, 3, 16), (8, 2, 32)])
def test_interleaving_divides_the_bubble_by_the_stages_of_a_rank(p: int, v: int, m: int) -> None:
    assert bubble("interleaved_1f1b", p, v, m) == pytest.approx((p - 1) / (v * m + p - 1), abs=1e-12)
    peaks = [peak_in_flight(actions) for actions in schedule("interleaved_1f1b", p, v, m)]
    assert peaks == [min(m * v, (v - 1) * p + 2 * (p - 1 - rank) + 1) for rank in range(p)]


@pytest.mark.parametrize(("p", "v", "m"), [(2, 1, 2), (2, 1, 8), (4, 1, 8), (8, 1, 32), (4, 2, 8), (8, 2, 16)])
def test_zero_bubble_is_a_third_of_1f1b_at_the_same_peak(p: int, v: int, m: int) -> None:
    """H1: (p - 1)(F + I - W) beside 3 v m of work."""
    assert bubble("zero_bubble", p, v, m) == pytest.approx((p - 1) / (3 * v * m + p - 1), abs=1e-12)
    plain = "1f1b" if v == 1 else "interleaved_1f1b"
    assert bubble("zero_bubble", p, v, m) < bubble(plain, p, v, m)
    peaks = {peak_in_flight(actions) for actions in schedule("zero_bubble", p, v, m)}
    assert peaks == {min(m * v, (v - 1) * p + p)}
    assert max(peaks) <= peak_in_flight(schedule(plain, p, v, m)[0])


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 7), (4, 8), (8, 16), (8, 64)])
def test_the_v_schedule_has_half_of_zero_bubbles_bubble_at_the_same_memory(p: int, m: int) -> None:
    """A stage is half as long as with one stage a rank: (p - 1) F of it, beside 6 m of work."""
    assert bubble("zbv", p, 2, m) == pytest.approx((p - 1) / (6 * m + p - 1), abs=1e-12)
    assert {peak_in_flight(actions) for actions in schedule("zbv", p, 2, m)} == {2 * p}


def test_memory_never_exceeds_the_table() -> None:
    for name, p, v, m in ALL:
        g = -(-m // max(1, m // p))
        for rank, actions in enumerate(schedule(name, p, v, m)):
            limit = {
                "1f1b": p - rank,
                "interleaved_1f1b": (v - 1) * g + (2 if v > 1 else 1) * (p - 1 - rank) + 1,
                "zero_bubble": (v - 1) * g + p,
                "zbv": 2 * p,
            }[name]
            assert peak_in_flight(actions) <= min(m * v, limit), (name, p, v, m, rank)


def test_numbers_that_a_schedule_does_not_admit_are_explained() -> None:
    assert "one stage a rank" in why_not("1f1b", 4, 2, 8)
    assert "two stages a rank" in why_not("zbv", 4, 3, 8)
    assert "micro-batch" in why_not("zbv", 4, 2, 0)
    assert "no schedule 'gpipe'" in why_not("gpipe", 4, 1, 8)


def test_placement_is_that_of_the_cut() -> None:
    for name, v in (("1f1b", 1), ("interleaved_1f1b", 3), ("zbv", 2)):
        parallel = ParallelConfig(pp=4, pipeline_schedule=name, stages_per_rank=v)  # type: ignore[arg-type]
        assert [stages_of(name, 4, v, r) for r in range(4)] == [stages_of_rank(parallel, r) for r in range(4)]


@pytest.mark.parametrize(("p", "v", "m"), [(2, 2, 4), (4, 2, 8), (4, 2, 10), (4, 3, 3), (4, 3, 12)])
def test_the_library_orders_interleaved_1f1b_alike(p: int, v: int, m: int) -> None:
    """Its own generator, on an object without stages; skipped where a torch version has it elsewhere."""
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    theirs = object.__new__(schedules.ScheduleInterleaved1F1B)
    if not hasattr(theirs, "_calculate_single_rank_operations"):
        pytest.skip("this torch has no such generator")
    rounds = max(1, m // p)
    vars(theirs).update(pp_group_size=p, n_local_stages=v, _n_microbatches=m, microbatches_per_round=m // rounds)
    kinds = {"FORWARD": "F", "FULL_BACKWARD": "B"}
    for rank, actions in enumerate(schedule("interleaved_1f1b", p, v, m)):
        operations = [a for a in theirs._calculate_single_rank_operations(rank) if a is not None]
        converted = [(kinds[a.computation_type.name], a.stage_index, a.microbatch_index) for a in operations]
        assert converted == [tuple(action) for action in actions]
