"""The optimizers over the real engines: every way of sharding gives the weights of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from distributed import run
from paceline.config.optim import OptimConfig
from paceline.config.parallel import ParallelConfig
from paceline.optim.build import Optimizer, build_optimizer
from paceline.optim.groups import parameter_kind
from paceline.optim.schedule import lr_factor
from paceline.parallel.apply import parallelize
from paceline.parallel.engine import Engine
from paceline.parallel.mesh import ParallelMesh
from tests.parallel.tiny import full_weights, gradients_of_step, init, tiny_config, tiny_model

STEPS = 4
MODEL: dict[str, Any] = {"moe": True}
LAYOUTS: list[dict[str, Any]] = [{"zero": 0}, {"zero": 1}, {"zero": 2}, {"zero": 3}, {"zero": 1, "dp_replicate": 2}]


def _optim(name: str) -> OptimConfig:
    return OptimConfig(name=name, lr=1e-2, muon_lr=0.02, grad_clip=0.5, warmup_steps=2)


def _build(rank: int, world_size: int, name: str, parallel: dict[str, Any]) -> tuple[Engine, Optimizer, ParallelMesh]:
    config = ParallelConfig(**parallel)
    mesh = ParallelMesh(config, world_size=world_size, rank=rank, device_type="cpu")
    engine = parallelize(tiny_model(tiny_config(**MODEL)), config, mesh, "fp32", torch.device("cpu")).engine
    engine.materialize(init(tiny_config(**MODEL)))
    return engine, build_optimizer(_optim(name), engine, mesh), mesh


def _train(
    rank: int, world_size: int, name: str, parallel: dict[str, Any]
) -> tuple[dict[str, Tensor], list[float], int, str]:
    engine, optimizer, mesh = _build(rank, world_size, name, parallel)
    norms = []
    for step in range(STEPS):
        gradients_of_step(engine, step, dp_rank=mesh.dp_rank, dp_size=mesh.dp_size)
        gradients = optimizer.gradient_norm()
        optimizer.step(lr_factor(_optim(name), step + 1, STEPS), gradients)
        engine.publish_weights()
        norms.append(float(gradients.norm))
    return full_weights(engine), norms, optimizer.step_count, optimizer.describe()


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_every_engine_equals_one_process(name: str) -> None:
    ((expected, norms, count, report),) = run(_train, 1, name, {"zero": 0})
    assert count == STEPS
    for parallel in LAYOUTS:
        for weights, found_norms, found_count, found_report in run(_train, 4, name, parallel):
            assert found_report == report and found_count == STEPS
            assert found_norms == pytest.approx(norms, rel=1e-5), parallel
            for key, value in expected.items():
                torch.testing.assert_close(weights[key], value, rtol=0, atol=1e-5, msg=f"{parallel} {key}")


def _zero_gradients(rank: int, world_size: int, parallel: dict[str, Any]) -> dict[str, Tensor]:
    engine, optimizer, _ = _build(rank, world_size, "adamw", parallel)
    for parameter in engine.main_parameters():
        parameter.param.grad = torch.zeros_like(parameter.param)
    optimizer.step(1.0, optimizer.gradient_norm())
    engine.publish_weights()
    return full_weights(engine)


@pytest.mark.parametrize("parallel", LAYOUTS)
def test_only_matrices_decay_however_they_are_sharded(parallel: dict[str, Any]) -> None:
    """Case 74."""
    model = tiny_model(tiny_config(**MODEL), device="cpu")
    model.init_weights(7)
    weights = run(_zero_gradients, 4, parallel)[0]
    for key, before in model.named_parameters():
        factor = 1.0 if parameter_kind(key, before.shape) == "vector" else 1 - 1e-2 * 0.1
        torch.testing.assert_close(weights[key], before.detach() * factor, rtol=1e-6, atol=0)


def _poisoned(rank: int, world_size: int, name: str, parallel: dict[str, Any]) -> tuple[bool, int]:
    engine, optimizer, mesh = _build(rank, world_size, name, parallel)
    gradients_of_step(engine, 0, dp_rank=mesh.dp_rank, dp_size=mesh.dp_size)
    optimizer.step(1.0, optimizer.gradient_norm())
    engine.publish_weights()
    before = {
        key: [piece.tensor.clone() for piece in value.pieces]
        for key, value in {**engine.weights(), **optimizer.state()}.items()
    }
    gradients_of_step(engine, 1, dp_rank=mesh.dp_rank, dp_size=mesh.dp_size)
    if rank == world_size - 1:
        gradient = engine.main_parameters()[-1].param.grad
        assert gradient is not None
        gradient.view(-1)[0] = torch.nan
    gradients = optimizer.gradient_norm()
    optimizer.step(1.0, gradients)
    engine.publish_weights()
    after = {**engine.weights(), **optimizer.state()}
    same = all(
        torch.equal(piece.tensor, old)
        for key, value in after.items()
        for piece, old in zip(value.pieces, before[key], strict=True)
    )
    return same and not bool(gradients.finite), optimizer.step_count


@pytest.mark.parametrize("name", ["adamw", "muon", "adamw8bit"])
@pytest.mark.parametrize("zero", [1, 3])
def test_a_nan_on_one_rank_skips_the_step_on_all(name: str, zero: int) -> None:
    """Case 71."""
    if name == "adamw8bit":
        pytest.importorskip("torchao")
    assert run(_poisoned, 2, name, {"zero": zero}) == [(True, 1)] * 2
