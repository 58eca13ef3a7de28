"""Whole training steps whose experts take rows as they come, in many layouts: the numbers of the plain path."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from distributed import run
from paceline.config.parallel import ParallelConfig
from paceline.kernels import experts as kernels
from paceline.parallel.accumulate import AccumulatingExperts
from paceline.parallel.apply import parallelize
from paceline.parallel.expert.fuse import fuse_experts
from paceline.parallel.mesh import ParallelMesh
from tests.parallel.tiny import gradients_of_step, init, tiny_config, tiny_model
from tests.parity.layouts import EXACT, layout, worst
from tests.training.steps import run_jobs

CPU = torch.device("cpu")

LAYOUTS = (
    ("moe", layout(2, "zero=1")),
    ("switch", layout(2, "zero=1 fused_weight_gradients=true")),
    ("moe", layout(2, "ep=2 fused_weight_gradients=true recompute=selective")),
    ("switch", layout(2, "ep=2 recompute=full")),
    ("moe", layout(2, "etp=2")),
    ("moe", layout(2, "zero=3 ep=2")),
    ("moe", layout(2, "tp=2 ep=2 fused_weight_gradients=true")),
    ("switch", layout(2, "cp=2 ep=2")),
    ("moe", layout(2, "pp=2 pipeline_schedule=zero_bubble recompute=selective")),
    ("moe", layout(2, "pp=2 fused_weight_gradients=true")),
)


def test_layouts_give_the_numbers_of_the_plain_path_on_one_process() -> None:
    names = sorted({model for model, _ in LAYOUTS})
    alone = layout(1, "zero=1")
    (expected,) = run(run_jobs, 1, [alone.job(name, micro=1, steps=2) for name in names])
    fused = [item.job(model, "parallel.expert_kernels=grouped", steps=2) for model, item in LAYOUTS]
    for logs in run(run_jobs, 2, fused, timeout_seconds=300):
        for (model, item), log in zip(LAYOUTS, logs, strict=True):
            errors = worst(log, expected[names.index(model)])
            assert max(errors.values()) <= EXACT, (model, item, errors)


def test_what_cannot_be_fused_stays_plain_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    for more, device, precision, reason in (
        ({"mlp_bias": True}, "cpu", "bf16", "mlp_bias"),
        ({}, "cuda", "fp32", "train.precision"),
    ):
        model = tiny_model(tiny_config(moe=True, **more))
        with caplog.at_level(logging.INFO):
            fuse_experts(model, "grouped", precision, torch.device(device))
        assert all(layer.experts.kernels is None for layer in model.moe_layers())
        assert reason in caplog.records[-1].getMessage()
    model = tiny_model(tiny_config(moe=True))
    fuse_experts(model, "triton", "bf16", CPU)
    assert all(layer.experts.kernels == kernels.TRITON for layer in model.moe_layers())


def _compiled(rank: int, world_size: int, recompute: Any) -> dict[str, Any]:
    """Graphs of blocks with experts, whose gradients are written to the buckets themselves."""
    torch._dynamo.reset()
    counters.clear()
    written: list[int] = []
    real = kernels._add

    def record(out: Tensor, *args: Any, **kwargs: Any) -> None:
        written.append(out.data_ptr())
        real(out, *args, **kwargs)

    found: list[dict[str, Tensor]] = []
    config = tiny_config(moe=True, num_layers=2)
    for more in ({}, {"compile": True, "expert_kernels": "grouped", "fused_weight_gradients": True}):
        parallel = ParallelConfig(recompute=recompute, **more)
        mesh = ParallelMesh(parallel, world_size=world_size, rank=rank, device_type="cpu")
        engine = parallelize(tiny_model(config), parallel, mesh, "fp32", CPU).engine
        engine.materialize(init(config))
        kernels._add = record  # type: ignore[assignment]
        try:
            gradients_of_step(engine, 0, dp_rank=rank, dp_size=world_size, accumulation=2)
        finally:
            kernels._add = real
        parameters = engine.main_parameters()
        found.append({p.name: p.param.grad.clone() for p in parameters if p.param.grad is not None})
    experts = [module for module in engine.stages[0].modules() if isinstance(module, AccumulatingExperts)]
    places = {place.data_ptr() for module in experts for place in (module.up_sum, module.down_sum) if place is not None}
    return {
        "error": max(float((found[1][name] - value).abs().max()) for name, value in found[0].items()),
        "breaks": dict(counters["graph_break"]),
        "in place": set(written) == places and len(written) == 2 * len(places) == 4,
    }


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_compiled_blocks_write_experts_gradients_into_the_buckets(recompute: str) -> None:
    (found,) = run(_compiled, 1, recompute, timeout_seconds=400)
    assert found["error"] < 1e-5 and found["breaks"] == {} and found["in place"], found
