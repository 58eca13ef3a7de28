"""The closed form of a pipeline's idle time, beside the timelines of its schedules."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paceline.config.load import load_recipe
from paceline.costs.hardware import find_hardware
from paceline.costs.pipeline import ActionSeconds, schedule, simulate
from paceline.costs.spend import _idle_share, _Pass
from paceline.costs.step import predict
from paceline.costs.workload import Cluster

_NOTHING = dict.fromkeys(("attention", "memory", "again", "tp", "cp", "ep", "launch"), 0.0)
_FORWARD, _BACKWARD = _Pass(gemm=1.0, **_NOTHING), _Pass(gemm=2.0, **_NOTHING)
_SPLITS = {"1f1b": 0.0, "interleaved_1f1b": 0.0, "zero_bubble": 1.0, "zbv": 2.0}


def closed_form(name: str, p: int, v: int, m: int) -> float:
    """Idle time of a rank whose micro-batch takes 3."""
    demand: Any = SimpleNamespace(pipeline=p, micro_batches=m, interleaved=v, splits=_SPLITS[name])
    return float((p - 1) * 3 * _idle_share(demand, _FORWARD, _BACKWARD))


def of_timeline(name: str, p: int, v: int, m: int) -> float:
    seconds = ActionSeconds(forward=1 / v, input_gradient=1 / v, weight_gradient=1 / v)
    return simulate(schedule(name, p, v, m), seconds).makespan - 3 * m


@pytest.mark.parametrize(
    ("name", "stages"), [("1f1b", (1,)), ("interleaved_1f1b", (2, 3, 8)), ("zero_bubble", (1,)), ("zbv", (2,))]
)
def test_it_is_that_of_the_schedule(name: str, stages: tuple[int, ...]) -> None:
    for p, v, m in product((2, 3, 4, 8), stages, (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 24)):
        assert closed_form(name, p, v, m) == pytest.approx(of_timeline(name, p, v, m)), (p, v, m)


def test_zero_bubble_with_several_stages_is_never_less_idle_than_said() -> None:
    for p, v, m in product((2, 3, 4, 8), (2, 4), (1, 2, 3, 4, 8, 16)):
        found, truth = closed_form("zero_bubble", p, v, m), of_timeline("zero_bubble", p, v, m)
        assert truth - 1e-9 <= found <= 1.62 * truth, (p, v, m)


def test_whole_columns_at_once() -> None:
    columns: Any = SimpleNamespace(
        pipeline=np.array([2.0, 4.0]), micro_batches=np.array([1.0, 8.0]), interleaved=np.array([8.0, 4.0]),
        splits=np.array([0.0, 0.0]),
    )  # fmt: skip
    assert _idle_share(columns, _FORWARD, _BACKWARD) == pytest.approx([1.0, 0.25])


def test_one_micro_batch_takes_the_work_of_all_ranks_one_after_the_other() -> None:
    """Two stages, a single micro-batch: half of the time of each rank is idle, however it is interleaved."""
    card = find_hardware("H100 SXM")
    assert card is not None
    sets = ["train.micro_batch_size=1", "train.global_batch_size=1", "parallel.pp=2"]
    sets += ["parallel.pipeline_schedule=interleaved_1f1b", "parallel.stages_per_rank=8"]
    config = load_recipe("recipes/llama3_8b.toml", sets).config
    parts = predict(config, Cluster(gpu=card, gpus=2)).parts
    work = sum(parts[name] for name in ("gemm", "attention", "memory_bound", "launch", "recompute"))
    assert parts["bubble"] > 0.9 * work
