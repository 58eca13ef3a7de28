"""A gated MLP as one fp8 operation: against the plain twin, and against the two layers one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.kernels import fp8_gated
from paceline.kernels.expert_rows import value_and_slope
from paceline.kernels.fp8 import cast_weights, fp8_linears
from paceline.kernels.fp8_cast import E4M3, E5M2, multiplier, padded_and_turned
from paceline.kernels.fp8_gated import gated_backward_reference, gated_reference
from paceline.kernels.fp8_mlp import fp8_gated_mlp, fp8_gated_mlp_reference
from tests.kernels.interpreter import interpreted_modules

FUNCTIONS = ("silu", "gelu_tanh")
SHAPES = ((1, 16), (5, 24), (64, 64), (100, 80), (130, 16), (16, 200))
"""Tokens, width."""


def _tensors(tokens: int, hidden: int, width: int, device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*size: int, scale: float) -> Tensor:
        made = torch.randn(size, generator=generator) * scale
        return made.bfloat16().to(device).requires_grad_()

    weights = [draw(width, hidden, scale=0.2), draw(width, hidden, scale=0.3), draw(hidden, width, scale=0.1)]
    return [draw(2, tokens, hidden, scale=1.0), *weights]


def _results(call: Any, tensors: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    out = call(*tensors)
    gradient = torch.randn(out.shape, generator=generator).bfloat16().to(out.device)
    return [out.detach(), *torch.autograd.grad(out, tensors, gradient)]


def _whole(function: str, *, cached: bool) -> Any:
    def call(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        first = cast_weights([gate, up], "tensorwise") if cached else None
        second = cast_weights([down], "tensorwise") if cached else None
        return fp8_gated_mlp(x, [gate, up], down, function=function, cached_first=first, cached_down=second)

    return call


def _twin(function: str) -> Any:
    return lambda x, gate, up, down: fp8_gated_mlp_reference(x, [gate, up], down, function=function)


def _apart(function: str) -> Any:
    def call(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        first, second = fp8_linears(x, [gate, up], [None, None], scaling="tensorwise")
        hidden = value_and_slope(first.float(), function)[0].to(first.dtype) * second  # type: ignore[arg-type]
        return fp8_linears(hidden, [down], [None], scaling="tensorwise")[0]

    return call


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("tokens", [8, 21])
def test_equals_the_twin(function: str, cached: bool, tokens: int) -> None:
    tensors = _tensors(tokens, 32, 48)
    expected = _results(_twin(function), tensors)
    for found, truth in zip(_results(_whole(function, cached=cached), tensors), expected, strict=True):
        # sums in another order round a bf16 the other way now and then, and with it an fp8 number
        assert _error(found, truth) < 4e-3


def test_is_the_two_layers_but_for_roundings() -> None:
    tensors = _tensors(24, 32, 48)
    for found, apart in zip(
        _results(_whole("silu", cached=True), tensors), _results(_apart("silu"), tensors), strict=True
    ):
        assert 0 < _error(found, apart) < 4e-2


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", range(4))
def test_what_is_not_finite_stays_so(poison: float, where: int) -> None:
    tensors = _tensors(8, 32, 48)
    with torch.no_grad():
        tensors[where].view(-1)[3] = poison
    found = _results(_whole("silu", cached=True), tensors)
    assert not found[0].isfinite().any()
    # the gradient that is handed in here is finite, and down's own does not depend on down
    spoiled = found[2:4] if where == 3 else found[2:]
    assert not any(each.isfinite().any() for each in spoiled)


# ---- the kernels


@pytest.fixture
def interpreted() -> Iterator[ModuleType]:
    names = ("expert_rows_triton", "turned_triton", "seen_triton", "fp8_gated_triton")
    with interpreted_modules(*names) as (*_, module):
        yield module


def _inputs(tokens: int, width: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    joined, grad = (torch.randn(tokens, size, generator=generator).bfloat16() for size in (2 * width, width))
    return joined.to(device), grad.to(device)


def _check(module: ModuleType, tokens: int, width: int, function: str, device: str, *, in_fp8: bool) -> None:
    """Without fp8 in bf16: the interpreter's cast to fp8 does not round as hardware does (Triton 3.7)."""
    joined, grad = _inputs(tokens, width, device)
    forward, backward = gated_reference(joined, function), gated_backward_reference(joined, grad, function)
    for wide, largest, cast, low, inputs in (
        (forward, module.gated_largest, module.gated_cast, E4M3, (joined,)),
        (backward, module.gated_backward_largest, module.gated_backward_cast, E5M2, (joined, grad)),
    ):
        found, dtype = largest(*inputs, function), low if in_fp8 else torch.bfloat16
        torch.testing.assert_close(found, wide.abs().amax(), rtol=1e-5, atol=1e-7)
        factor = multiplier(found, low)
        values = torch.empty(wide.shape, dtype=dtype, device=device)
        turned = torch.full(padded_and_turned(values).shape, 7.0, device=device).to(dtype)
        cast(*inputs, factor, values, turned, function)
        # half a step (of bf16, which the interpreter cuts off, a whole one) and a little: sums in another order
        half = {E4M3: 2.0**-4, E5M2: 2.0**-3, torch.bfloat16: 2.0**-7}[dtype]
        smallest = {E4M3: 2.0**-6, E5M2: 2.0**-14, torch.bfloat16: 2.0**-20}[dtype]
        exact = wide * factor
        # where terms as large as the largest number cancel, what fp32 has lost of them is left
        lost = 2.0**-20 * exact.abs().amax()
        off = (values.float() - exact).abs() - 1.01 * half * exact.abs().clamp(min=smallest)
        assert float(off.max()) <= lost
        assert torch.equal(turned.float(), padded_and_turned(values).float())


@pytest.mark.parametrize("function", FUNCTIONS)
def test_kernels_in_the_interpreter(interpreted: ModuleType, function: str) -> None:
    for tokens, width in SHAPES:
        _check(interpreted, tokens, width, function, "cpu", in_fp8=False)


def test_the_largest_of_what_is_not_finite(interpreted: ModuleType) -> None:
    joined, grad = _inputs(70, 72)
    joined[69, 71] = float("nan")
    assert not interpreted.gated_largest(joined, "silu").isfinite()
    assert not interpreted.gated_backward_largest(joined, grad, "silu").isfinite()


def _ready() -> None:
    if not (torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)):
        pytest.skip("needs a GPU with fp8")


@pytest.mark.gpu
@pytest.mark.parametrize("function", FUNCTIONS)
def test_kernels_on_a_gpu(function: str) -> None:
    _ready()
    from paceline.kernels import fp8_gated_triton

    for tokens, width in (*SHAPES, (8192, 1792)):
        _check(fp8_gated_triton, tokens, width, function, "cuda", in_fp8=True)


@pytest.mark.gpu
@pytest.mark.parametrize("cached", [True, False])
def test_equals_the_twin_on_a_gpu(cached: bool) -> None:
    _ready()
    assert fp8_gated.by_triton(torch.ones(1, device="cuda"))
    tensors = _tensors(512, 256, 704, "cuda")
    expected = _results(_twin("silu"), tensors)
    for found, truth in zip(_results(_whole("silu", cached=cached), tensors), expected, strict=True):
        assert _error(found, truth) < 1e-2
