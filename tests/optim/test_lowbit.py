"""8-bit moments: nearly AdamW, a quarter of its memory, any shard size, checkpoints in fp32."""

from __future__ import annotations

import builtins
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.config.optim import OptimConfig
from paceline.errors import ConfigError
from paceline.optim.build import build_optimizer
from paceline.optim.groups import parameter_groups
from paceline.optim.lowbit import AdamW8bitRule
from tests.optim.engines import Layout, ToyEngine, toy_values

# 8200 is no multiple of a block of 256; a flat third of it is not either
SHAPES = {"blocks.0.w": (100, 82), "blocks.0.bias": (82,), "head.weight": (64, 128)}
CONFIG = OptimConfig(name="adamw8bit", lr=1e-2, grad_clip=0.0)


def _values(seed: int) -> dict[str, Tensor]:
    return toy_values(seed, SHAPES)


def _train(engine: ToyEngine, config: OptimConfig, steps: int) -> Any:
    pytest.importorskip("torchao")
    optimizer = build_optimizer(config, engine.as_engine())
    for index in range(steps):
        engine.set_gradients(_values(index + 1))
        optimizer.step(1.0, optimizer.gradient_norm())
    return optimizer


def _weights(engine: ToyEngine) -> dict[str, Tensor]:
    return {parameter.name: parameter.param.detach().clone() for parameter in engine.main_parameters()}


@pytest.mark.parametrize("layout", ["whole", "flat"])
def test_follows_adamw(layout: Layout) -> None:
    low, full = ToyEngine(_values(0), layout, 1, 3), ToyEngine(_values(0), layout, 1, 3)
    if layout == "whole":
        low, full = ToyEngine(_values(0)), ToyEngine(_values(0))
    steps = 10
    # one rank of three, without the others: no clipping, so that no norm is needed
    low.world_size = full.world_size = 1
    _train(low, CONFIG, steps)
    _train(full, CONFIG.model_copy(update={"name": "adamw"}), steps)
    start = {p.name: p.param for p in ToyEngine(_values(0), layout, 1, 3 if layout == "flat" else 1).main_parameters()}
    for name, expected in _weights(full).items():
        moved = (expected - start[name]).norm()
        assert (_weights(low)[name] - expected).norm() < 0.05 * moved, name


def test_moments_take_about_two_bytes_a_parameter() -> None:
    pytest.importorskip("torchao")
    parameters = ToyEngine(_values(0)).main_parameters()
    rule = AdamW8bitRule(CONFIG, parameter_groups(CONFIG, parameters))
    elements = sum(parameter.param.numel() for parameter in parameters)
    # codes 2 x 1, scales 2 x 4/256; the bias and the remainder of 8 elements stay in fp32
    fp32 = 82 + 8200 % 256
    assert rule.num_state_bytes() == (elements - fp32) * 2 + (elements - fp32) // 256 * 8 + fp32 * 8
    assert rule.num_state_bytes() < 0.3 * 8 * elements


def test_a_step_with_a_bad_gradient_changes_nothing() -> None:
    engine = ToyEngine(_values(0))
    optimizer = _train(engine, CONFIG, 2)
    weights = _weights(engine)
    state = {key: value.pieces[0].tensor for key, value in optimizer.state().items()}
    poisoned = _values(9)
    poisoned["head.weight"][3, 3] = math.nan
    engine.set_gradients(poisoned)
    optimizer.step(1.0, optimizer.gradient_norm())
    assert optimizer.step_count == 2
    assert all(torch.equal(value, weights[name]) for name, value in _weights(engine).items())
    assert all(torch.equal(value.pieces[0].tensor, state[key]) for key, value in optimizer.state().items())


def test_state_is_saved_in_fp32_and_carries_a_run_over() -> None:
    first = ToyEngine(_values(0))
    optimizer = _train(first, CONFIG, 3)
    second = ToyEngine(_weights(first))
    again = build_optimizer(CONFIG, second.as_engine())
    values, saved = again.state(), optimizer.state()
    assert {value.dtype for value in saved.values()} == {torch.float32}
    for key, value in values.items():
        value.pieces[0].tensor.copy_(saved[key].pieces[0].tensor)
    again.load_state(values)
    again.set_step_count(optimizer.step_count)
    for key, value in again.state().items():
        torch.testing.assert_close(value.pieces[0].tensor, saved[key].pieces[0].tensor, rtol=3e-7, atol=0)
    for engine, one in ((first, optimizer), (second, again)):
        engine.set_gradients(_values(4))
        one.step(1.0, one.gradient_norm())
    for key, expected in _weights(first).items():
        torch.testing.assert_close(_weights(second)[key], expected, rtol=1e-6, atol=1e-7)


def test_without_torchao_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("torchao"):
            raise ImportError("No module named 'torchao'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match="torchao") as caught:
        build_optimizer(CONFIG, ToyEngine(_values(0)).as_engine())
    assert "-e '.[lowbit]'" in caught.value.next_step
