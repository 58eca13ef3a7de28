"""Muon over any sharding equals Muon in one process, and that equals the definition."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distributed import run
from paceline.config.optim import OptimConfig
from paceline.config.parallel import ParallelConfig
from paceline.optim.build import build_optimizer
from paceline.optim.groups import parameter_kind
from paceline.optim.muon import orthogonalize
from paceline.parallel.mesh import ParallelMesh
from tests.optim.engines import Layout, ToyEngine, max_difference, toy_values

CONFIG = OptimConfig(name="muon", lr=1e-2, muon_lr=0.05, grad_clip=1.0)
STEPS = 3


def _newton_schulz(matrix: Tensor, steps: int) -> Tensor:
    x = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


def _reference() -> dict[str, Tensor]:
    """One process, one matrix at a time, as the definition says."""
    weights = toy_values(0)
    momenta = {name: torch.zeros_like(value) for name, value in weights.items()}
    for index in range(STEPS):
        gradients = toy_values(index + 1)
        norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))
        for name, weight in weights.items():
            if parameter_kind(name, weight.shape) != "matrix":
                continue
            gradient = gradients[name] / max(1.0, norm + 1e-6)
            momenta[name] = 0.95 * momenta[name] + 0.05 * gradient
            update = 0.05 * gradient + 0.95 * momenta[name]
            rows, columns = weight.shape[-2:]
            step = torch.stack([_newton_schulz(m, 5) for m in update.reshape(-1, rows, columns)]).view_as(weight)
            weight.mul_(1 - 0.05 * 0.1).sub_(step, alpha=0.05 * math.sqrt(max(1.0, rows / columns)))
    return weights


def _train(engine: ToyEngine, mesh: ParallelMesh | None) -> None:
    optimizer = build_optimizer(CONFIG, engine.as_engine(), mesh)
    for index in range(STEPS):
        engine.set_gradients(toy_values(index + 1))
        optimizer.step(1.0, optimizer.gradient_norm())
    assert optimizer.step_count == STEPS


def _single() -> dict[str, Tensor]:
    engine = ToyEngine(toy_values(0))
    _train(engine, None)
    return {parameter.name: parameter.param.detach() for parameter in engine.main_parameters()}


def test_one_process_equals_the_definition() -> None:
    trained = _single()
    for name, expected in _reference().items():
        if parameter_kind(name, expected.shape) == "matrix":
            torch.testing.assert_close(trained[name], expected, rtol=1e-4, atol=1e-5)


def _sharded(rank: int, world_size: int, layout: Layout) -> float:
    mesh = ParallelMesh(ParallelConfig(), world_size=world_size, rank=rank, device_type="cpu")
    engine = ToyEngine(toy_values(0), layout, rank, world_size, mesh["dp_shard_cp"])
    _train(engine, mesh)
    expected = _single()
    assert dist.is_initialized()
    return max(max_difference(value, expected[name]) for name, value in engine.weights().items() if value.pieces)


@pytest.mark.parametrize("layout", ["whole", "flat", "rows"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_any_sharding_equals_one_process(layout: Layout, world_size: int) -> None:
    assert max(run(_sharded, world_size, layout)) < 1e-5


@pytest.mark.parametrize("shape", [(16, 16), (8, 24), (24, 8), (3, 8, 24)])
def test_orthogonalized_matrices_have_singular_values_near_one(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.linalg.svdvals(orthogonalize(torch.randn(shape, generator=generator), 8))
    assert float(values.min()) > 0.6 and float(values.max()) < 1.3


def test_zero_stays_zero() -> None:
    assert torch.equal(orthogonalize(torch.zeros(4, 6), 5), torch.zeros(4, 6))


def test_equals_torchs_muon_within_bf16() -> None:
    """torch's works in bf16 on any device, ours in fp32 on a CPU."""
    generator = torch.Generator().manual_seed(0)
    weight, gradient = torch.randn(24, 16, generator=generator), torch.randn(24, 16, generator=generator)
    engine = ToyEngine({"blocks.0.w": weight, "norm.weight": torch.ones(3)})
    config = OptimConfig(name="muon", muon_lr=0.05, grad_clip=0.0)
    optimizer = build_optimizer(config, engine.as_engine())
    engine.set_gradients({"blocks.0.w": gradient, "norm.weight": torch.zeros(3)})
    optimizer.step(1.0, optimizer.gradient_norm())

    plain = torch.nn.Parameter(weight.clone())
    plain.grad = gradient.clone()
    torch.optim.Muon([plain], lr=0.05, weight_decay=0.1, momentum=0.95).step()
    torch.testing.assert_close(engine.main_parameters()[0].param.data, plain.data, rtol=0, atol=2e-3)
