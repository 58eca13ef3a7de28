"""Do layers, stages and micro-batches fit the schedule?"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paceline.config.schedules import SCHEDULES, even_layout
from paceline.costs.pipeline import why_not
from paceline.report.finding import Finding

PP2 = "parallel.pp=2"


@pytest.mark.parametrize(
    ("schedule", "good", "bad"),
    [("1f1b", (1,), (2,)), ("interleaved_1f1b", (2, 4), (1,)), ("zero_bubble", (1, 2), ()), ("zbv", (2,), (1, 4))],
)
def test_stages_of_a_rank(
    findings: Callable[..., list[Finding]], schedule: str, good: tuple[int, ...], bad: tuple[int, ...]
) -> None:
    chosen = ("model.num_layers=8", PP2, f"parallel.pipeline_schedule={schedule}")
    for stages in good:
        assert findings(2, *chosen, f"parallel.stages_per_rank={stages}") == []
    for stages in bad:
        (refused,) = findings(2, *chosen, f"parallel.stages_per_rank={stages}")
        assert f"stages_per_rank = {stages}" in refused.subject and schedule in refused.subject
        assert f"stages_per_rank = {good[0]}" in refused.next_step
        assert f"--set parallel.stages_per_rank={good[0]}" in refused.next_step


def test_every_schedule_of_the_schema_has_its_rule() -> None:
    from typing import get_args

    from paceline.config.parallel import ParallelConfig

    assert set(SCHEDULES) == set(get_args(ParallelConfig.model_fields["pipeline_schedule"].annotation))


def test_three_layers_are_not_four_stages(findings: Callable[..., list[Finding]]) -> None:
    """Case 78."""
    (refused,) = findings(8, "model.num_layers=3", "parallel.pp=4")
    assert "num_layers = 3 is fewer than the 4" in refused.subject
    assert "up to 3" in refused.next_step and "--set parallel.pp=2" in refused.next_step
    assert findings(6, "model.num_layers=3", "parallel.pp=3") == []


@pytest.mark.parametrize(("layers", "pp"), [(46, 4), (40, 16)])
def test_layers_need_not_divide(findings: Callable[..., list[Finding]], layers: int, pp: int) -> None:
    """Case 78."""
    assert findings(pp, f"model.num_layers={layers}", f"parallel.pp={pp}", "train.global_batch_size=16") == []


@pytest.mark.parametrize(
    ("layout", "words"),
    [([12, 12, 22], "3 entries"), ([12, 12, 11, 12], "sum is 47"), ([0, 23, 11, 12], "needs a layer")],
)
def test_a_layout_that_does_not_fit(findings: Callable[..., list[Finding]], layout: list[int], words: str) -> None:
    chosen = ("model.num_layers=46", "parallel.pp=4")
    assert findings(4, *chosen, "parallel.pipeline_layout=[11, 12, 12, 11]") == []
    (refused,) = findings(4, *chosen, f"parallel.pipeline_layout={layout}")
    assert str(layout) in refused.subject and words in refused.evidence
    assert "[11, 12, 12, 11]" in refused.next_step and "--set 'parallel.pipeline_layout=[]'" in refused.next_step


def test_even_layouts_are_longest_in_the_middle() -> None:
    assert even_layout(46, 4) == [11, 12, 12, 11]
    assert even_layout(3, 3) == [1, 1, 1]
    layout = even_layout(40, 16)
    assert sum(layout) == 40 and set(layout) == {2, 3} and layout[0] == layout[-1] == 2


def test_the_schedules_admit_what_the_rules_do() -> None:
    for name, rule in SCHEDULES.items():
        for stages in range(rule.min_stages_per_rank, (rule.max_stages_per_rank or 4) + 1):
            for micro_batches in (1, 3, 5):
                assert why_not(name, 4, stages, micro_batches) == ""


def test_any_number_of_micro_batches_runs_and_few_are_told(findings: Callable[..., list[Finding]]) -> None:
    chosen = (PP2, "parallel.pipeline_schedule=interleaved_1f1b", "parallel.stages_per_rank=2")
    assert findings(2, *chosen, "train.global_batch_size=5") == []
    (warning,) = findings(4, "parallel.pp=4", "train.global_batch_size=2")
    assert warning.severity == "warning" and "60%" in warning.evidence and "to 4 or more" in warning.next_step


def test_larger_micro_batches_never_lower_the_bubble(findings: Callable[..., list[Finding]]) -> None:
    """Case 19: the number of micro-batches counts, not their size."""
    base = ("model.num_layers=8", "parallel.pp=8", "train.global_batch_size=8")
    assert findings(8, *base) == []
    (warning,) = findings(8, *base, "train.micro_batch_size=2")
    assert "4 micro-batches" in warning.subject and "64%" in warning.evidence


def test_a_schedule_without_a_pipeline_is_noted_and_stages_are_refused(
    findings: Callable[..., list[Finding]],
) -> None:
    (note,) = findings(2, "parallel.pipeline_schedule=zero_bubble")
    assert note.severity == "note" and "has no effect" in note.subject
    (refused,) = findings(2, "parallel.stages_per_rank=2")
    assert refused.severity == "error" and "parallel.pp = 1" in refused.subject
    assert findings(2, "model.num_layers=4", "parallel.pipeline_layout=[4]") == []
    (refused,) = findings(2, "model.num_layers=4", "parallel.pipeline_layout=[3]")
    assert "with all 4 layers" in refused.evidence
    (refused,) = findings(2, "parallel.pipeline_layout=[2, 2]")
    assert refused.severity == "error" and "[2, 2]" in refused.subject
