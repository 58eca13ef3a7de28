"""One true norm over all shards, and a flag on which all ranks agree (case 71)."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from distributed import run
from paceline.optim.clip import GradientNorm, gradient_norm, non_finite_parameters
from tests.optim.engines import Layout, ToyEngine, toy_values


def _measure(engine: ToyEngine, max_norm: float) -> GradientNorm:
    return gradient_norm(engine.main_parameters(), engine.as_engine(), max_norm, torch.device("cpu"))


def _global_norm(gradients: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))


def test_norm_and_divisor_are_torchs() -> None:
    engine, gradients = ToyEngine(toy_values(0)), toy_values(1)
    engine.set_gradients(gradients)
    result = _measure(engine, 0.5)
    assert float(result.norm) == pytest.approx(_global_norm(gradients), rel=1e-6)
    plain = [torch.nn.Parameter(value) for value in toy_values(0).values()]
    for parameter, gradient in zip(plain, gradients.values(), strict=True):
        parameter.grad = gradient.clone()
    torch.nn.utils.clip_grad_norm_(plain, 0.5)
    assert plain[0].grad is not None
    torch.testing.assert_close(gradients["embed.weight"] / result.divisor, plain[0].grad, rtol=1e-6, atol=0)
    assert result.finite and result.found_inf == 0


def test_gradients_in_bf16_are_measured_in_fp32() -> None:
    engine, gradients = ToyEngine(toy_values(0)), {name: value.bfloat16() for name, value in toy_values(1).items()}
    for parameter in engine.main_parameters():
        parameter.param.grad_dtype = torch.bfloat16
        parameter.param.grad = gradients[parameter.name].view_as(parameter.param)
    assert float(_measure(engine, 0.5).norm) == pytest.approx(_global_norm(gradients), rel=1e-6)


def test_small_gradients_and_clip_0_are_left_alone() -> None:
    engine = ToyEngine(toy_values(0))
    engine.set_gradients(toy_values(1))
    for max_norm in (0.0, 1e6):
        assert _measure(engine, max_norm).divisor == 1.0


def test_zero_and_missing_gradients() -> None:
    engine = ToyEngine(toy_values(0))
    result = _measure(engine, 1.0)
    assert result.norm == 0 and result.divisor == 1 and result.finite
    engine.set_gradients({name: torch.zeros_like(value) for name, value in toy_values(0).items()})
    result = _measure(engine, 1.0)
    assert result.norm == 0 and result.divisor == 1 and result.finite


def _sharded(rank: int, world_size: int, layout: Layout, poison: bool) -> tuple[float, float, float, list[str]]:
    engine, gradients = ToyEngine(toy_values(0), layout, rank, world_size), toy_values(1)
    engine.set_gradients(gradients)
    last = engine.main_parameters()[-1]
    if poison and rank == world_size - 1:
        assert last.param.grad is not None
        last.param.grad.view(-1)[0] = math.nan
    # clipping off: the flag does not depend on it
    result = _measure(engine, 0.0 if poison else 0.5)
    names = non_finite_parameters(engine.main_parameters())
    return float(result.norm), float(result.found_inf), float(result.divisor), names


@pytest.mark.parametrize("layout", ["flat", "rows"])
def test_all_ranks_have_the_norm_of_the_whole_gradient(layout: Layout) -> None:
    results = run(_sharded, 3, layout, False)
    assert len({result[:3] for result in results}) == 1
    assert results[0][0] == pytest.approx(_global_norm(toy_values(1)), rel=1e-6)


def test_one_nan_on_one_rank_is_seen_by_all() -> None:
    results = run(_sharded, 3, "flat", True)
    assert [result[1:3] for result in results] == [(1.0, 1.0)] * 3
    assert [result[3] for result in results] == [[], [], ["head.weight"]]


def test_what_another_rank_counts_is_left_out() -> None:
    engine, gradients = ToyEngine(toy_values(0)), toy_values(1)
    engine.set_gradients(gradients)
    parameters = [replace(p, counted=p.name != "norm.weight") for p in engine.main_parameters()]
    expected = _global_norm({name: value for name, value in gradients.items() if name != "norm.weight"})
    found = gradient_norm(parameters, engine.as_engine(), 0.5, torch.device("cpu"))
    assert float(found.norm) == pytest.approx(expected, rel=1e-6)
