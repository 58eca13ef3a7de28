"""Regret is the measured cost of the predicted first choice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.config.load import resolve
from paceline.costs.workload import Cluster, Workload
from paceline.planner.first_choice import cells
from paceline.planner.machines import find_gpu
from paceline.planner.published import PublishedRun
from paceline.planner.run_sources import Source
from paceline.planner.scored import Scored


def scored(tp: int, measured: float, predicted: float, *, fits: bool = True, memory: float | None = None) -> Scored:
    work = Workload.of(resolve({"model": {"preset": "tiny_llama"}, "train": {"seq_len": 128}}).config)
    run = PublishedRun(
        id=f"{tp}-{measured}",
        source=Source(key="mine", title="Mine", prefix=(), profile="paceline"),
        model_name="tiny",
        workload=replace(work, tp=tp),
        cluster=Cluster(gpu=find_gpu("h100"), gpus=8),
        step_seconds=measured,
        memory_bytes=memory,
    )
    return Scored(run=run, predicted_seconds=predicted, predicted_bytes=1.0, predicted_fits=fits)


def test_the_first_choice_costs_what_it_measured() -> None:
    (cell,) = cells([scored(1, 2.0, 1.0), scored(2, 1.0, 1.5), scored(4, 4.0, 3.0)])
    assert cell.regret == pytest.approx(1.0)
    assert (cell.rank, cell.rows) == (2, 3)


def test_what_is_predicted_not_to_fit_is_not_chosen_where_memory_is_known() -> None:
    rows = [scored(1, 2.0, 1.0, fits=False, memory=1e9), scored(2, 1.0, 1.5, memory=1e9)]
    (cell,) = cells(rows)
    assert cell.regret == 0.0
    (cell,) = cells([replace(one, run=replace(one.run, memory_bytes=None)) for one in rows])
    assert cell.regret == pytest.approx(1.0)


def test_one_layout_is_no_cell() -> None:
    assert cells([scored(1, 2.0, 1.0), scored(1, 2.1, 1.0)]) == []
