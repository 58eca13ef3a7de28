"""AdamW is torch's, clips and skips inside its kernel, and decays only what it should (cases 71 and 74)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from paceline.config.optim import OptimConfig
from paceline.optim.build import Optimizer, build_optimizer
from paceline.optim.groups import parameter_kind
from tests.optim.engines import ToyEngine, toy_values


def _weights(engine: ToyEngine) -> dict[str, Tensor]:
    return {parameter.name: parameter.param.detach().clone() for parameter in engine.main_parameters()}


def _step(engine: ToyEngine, optimizer: Optimizer, gradients: dict[str, Tensor], factor: float = 1.0) -> None:
    engine.set_gradients(gradients)
    optimizer.step(factor, optimizer.gradient_norm())
    optimizer.zero_grad()


def _reference(config: OptimConfig, steps: int, factor: float) -> dict[str, Tensor]:
    plain = {name: torch.nn.Parameter(value) for name, value in toy_values(0).items()}
    decayed = [p for name, p in plain.items() if parameter_kind(name, p.shape) != "vector"]
    rest = [p for name, p in plain.items() if parameter_kind(name, p.shape) == "vector"]
    reference = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": config.weight_decay}, {"params": rest, "weight_decay": 0.0}],
        lr=config.lr * factor,
        betas=config.betas,
        eps=config.eps,
        foreach=False,
    )
    for index in range(steps):
        for name, gradient in toy_values(index + 1).items():
            plain[name].grad = gradient
        if config.grad_clip:
            torch.nn.utils.clip_grad_norm_(list(plain.values()), config.grad_clip)
        reference.step()
    return {name: parameter.detach() for name, parameter in plain.items()}


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_equals_torch(clip: float) -> None:
    config = OptimConfig(lr=1e-2, grad_clip=clip)
    engine = ToyEngine(toy_values(0))
    optimizer = build_optimizer(config, engine.as_engine())
    for index in range(5):
        _step(engine, optimizer, toy_values(index + 1), factor=0.5)
    for name, expected in _reference(config, 5, 0.5).items():
        torch.testing.assert_close(_weights(engine)[name], expected, rtol=1e-5, atol=1e-6)
    assert optimizer.step_count == 5


def test_zero_gradients_shrink_matrices_by_lr_times_decay_and_nothing_else() -> None:
    engine = ToyEngine(toy_values(0))
    optimizer = build_optimizer(OptimConfig(lr=0.01, weight_decay=0.1), engine.as_engine())
    _step(engine, optimizer, {name: torch.zeros_like(value) for name, value in toy_values(0).items()})
    for name, before in toy_values(0).items():
        decays = parameter_kind(name, before.shape) != "vector"
        torch.testing.assert_close(
            _weights(engine)[name], before * (1 - 0.01 * 0.1) if decays else before, rtol=1e-7, atol=0
        )


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_with_a_bad_gradient_changes_nothing(name: str, bad: float) -> None:
    engine = ToyEngine(toy_values(0))
    optimizer = build_optimizer(OptimConfig(name=name, lr=1e-2), engine.as_engine())
    for index in range(2):
        _step(engine, optimizer, toy_values(index + 1))
    weights = _weights(engine)
    state = {key: value.pieces[0].tensor.clone() for key, value in optimizer.state().items()}
    poisoned = toy_values(9)
    poisoned["blocks.0.mlp.up.weight"][3, 3] = bad
    _step(engine, optimizer, poisoned)
    assert optimizer.step_count == 2
    for key, before in weights.items():
        assert torch.equal(_weights(engine)[key], before), key
    for key, value in optimizer.state().items():
        assert torch.equal(value.pieces[0].tensor, state[key]), key
    _step(engine, optimizer, toy_values(3))
    assert optimizer.step_count == 3
    assert all(torch.isfinite(value).all() for value in _weights(engine).values())


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_state_exists_before_the_first_step_and_carries_a_run_over(name: str) -> None:
    config = OptimConfig(name=name, lr=1e-2)
    first = ToyEngine(toy_values(0))
    optimizer = build_optimizer(config, first.as_engine())
    for index in range(3):
        _step(first, optimizer, toy_values(index + 1))

    second = ToyEngine(_weights(first))
    again = build_optimizer(config, second.as_engine())
    values, saved = again.state(), optimizer.state()
    assert values.keys() == saved.keys()
    for key, value in values.items():
        value.pieces[0].tensor.copy_(saved[key].pieces[0].tensor)
    again.load_state(values)
    again.set_step_count(optimizer.step_count)

    _step(first, optimizer, toy_values(4))
    _step(second, again, toy_values(4))
    for key, expected in _weights(first).items():
        assert torch.equal(_weights(second)[key], expected), key


def test_state_names() -> None:
    optimizer = build_optimizer(OptimConfig(name="muon"), ToyEngine(toy_values(0)).as_engine())
    names = set(optimizer.state())
    assert {"blocks.0.mlp.up.weight/momentum", "norm.weight/exp_avg", "norm.weight/exp_avg_sq"} <= names
    assert "matrices: 5 tensors" in optimizer.describe()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_step_never_waits_for_the_gpu(name: str) -> None:
    engine = ToyEngine({key: value.cuda() for key, value in toy_values(0).items()})
    optimizer = build_optimizer(OptimConfig(name=name), engine.as_engine())
    engine.set_gradients(toy_values(1))
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step(1.0, optimizer.gradient_norm())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert optimizer.step_count == 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_gpu_follows_the_cpu_and_skips_as_it_does(name: str) -> None:
    """Muon's matrices are orthogonalised in bf16 on a GPU."""
    config = OptimConfig(name=name, lr=1e-2)
    engines = [ToyEngine(toy_values(0)), ToyEngine({key: value.cuda() for key, value in toy_values(0).items()})]
    for engine in engines:
        optimizer = build_optimizer(config, engine.as_engine())
        _step(engine, optimizer, toy_values(1))
        before = _weights(engine)
        _step(engine, optimizer, {key: torch.full_like(value, math.nan) for key, value in toy_values(0).items()})
        assert all(torch.equal(value, before[key]) for key, value in _weights(engine).items())
        _step(engine, optimizer, toy_values(2))
        assert optimizer.step_count == 2
    on_cpu, on_gpu = (_weights(engine) for engine in engines)
    for key, expected in on_cpu.items():
        torch.testing.assert_close(on_gpu[key].cpu(), expected, rtol=0, atol=2e-3 if name == "muon" else 1e-5)
