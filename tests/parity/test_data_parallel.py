"""Every data-parallel engine and layout trains like one process: 20 steps, 2 micro-batches, clipping on, AdamW."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from distributed import run
from paceline.config.parallel import ParallelConfig
from paceline.parallel.apply import parallelize
from paceline.parallel.mesh import ParallelMesh
from tests.parallel.tiny import Log, init, tiny_config, tiny_model, train

STEPS = 20
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero0": {"zero": 0},
    "zero1": {"zero": 1},
    "zero2": {"zero": 2},
    "zero3": {"zero": 3},
    "zero1 replicated": {"zero": 1, "dp_replicate": 2},
    "hsdp": {"zero": 3, "dp_replicate": 2},
    "zero1 offload": {"zero": 1, "offload": "optimizer"},
    "zero3 offload": {"zero": 3, "offload": "parameters"},
}
# vocabularies that do not divide by 4 or 2 (pytorch/torchtitan#1136), tied and not, dense and expert layers
MODELS: dict[str, dict[str, Any]] = {
    "tied": {"tied": True, "vocab": 67},
    "untied": {"vocab": 1003},
    "experts": {"moe": True, "vocab": 67},
}


def _train(rank: int, world_size: int, model: str, layout: str) -> Log:
    shape = MODELS[model]
    config = ParallelConfig(**LAYOUTS[layout])
    mesh = ParallelMesh(config, world_size=world_size, rank=rank, device_type="cpu")
    applied = parallelize(tiny_model(tiny_config(**shape)), config, mesh, "fp32", torch.device("cpu"))
    applied.engine.materialize(init)
    return train(
        applied.engine,
        STEPS,
        dp_rank=mesh.dp_rank,
        dp_size=mesh.dp_size,
        sum_over_dp=lambda loss: dist.all_reduce(loss),
        vocab=shape["vocab"],
    )


def _train_all(rank: int, world_size: int, jobs: list[tuple[str, str]]) -> dict[tuple[str, str], Log]:
    return {job: _train(rank, world_size, *job) for job in jobs}


@pytest.fixture(scope="module")
def one_process() -> dict[str, Log]:
    (logs,) = run(_train_all, 1, [(model, "zero0") for model in MODELS])
    return {model: log for (model, _), log in logs.items()}


@pytest.mark.parametrize(
    ("world_size", "jobs"),
    [
        (
            4,
            [("untied", layout) for layout in LAYOUTS]
            + [("tied", "zero3"), ("experts", "zero1"), ("experts", "zero2")],
        ),
        (2, [("tied", "zero1"), ("tied", "zero2"), ("tied", "hsdp"), ("experts", "zero3"), ("untied", "zero3")]),
    ],
)
def test_losses_equal_those_of_one_process(
    world_size: int, jobs: list[tuple[str, str]], one_process: dict[str, Log]
) -> None:
    results = run(_train_all, world_size, jobs, timeout_seconds=240)
    for model, layout in jobs:
        expected = one_process[model]
        assert max(expected.norms) > 0.5, "clipping has nothing to do"
        for logs in results:
            found = logs[model, layout]
            assert found.losses == pytest.approx(expected.losses, abs=1e-5), (model, layout)
            # norms are up to a few units large: fp32 sums in another order
            assert found.norms == pytest.approx(expected.norms, rel=1e-4), (model, layout)
        assert all(logs[model, layout].norms == results[0][model, layout].norms for logs in results), "ranks differ"


def _twice(rank: int, world_size: int) -> bool:
    return all(
        _train(rank, world_size, "tied", layout) == _train(rank, world_size, "tied", layout)
        for layout in ("zero1", "zero3")
    )


def test_repeated_runs_are_bit_equal() -> None:
    assert all(run(_twice, 2))
