"""A gated MLP's wide numbers in one pass each way: rounded once, with the largest of what was rounded."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, library

from paceline.kernels import gated, gated_delayed
from paceline.kernels.fp8_cast import E4M3, E5M2, cast_rows
from paceline.kernels.fp8_delayed import LARGEST, Delayed, cast_delayed, saturated
from paceline.kernels.fp8_gated import gated_backward_reference, gated_reference
from paceline.kernels.gated import gated_backward, gated_forward
from paceline.kernels.gated_delayed import gated_backward_delayed, gated_forward_delayed
from tests.kernels.interpreter import interpreted_modules

FUNCTIONS = ("silu", "gelu_tanh")
SHAPES = ((1, 16), (5, 24), (9, 1100), (130, 16))
"""Tokens, width; more columns than a tile has, and numbers that divide by nothing."""
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


def _inputs(tokens: int, width: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    joined, grad = (torch.randn(tokens, size, generator=generator).to(dtype) for size in (2 * width, width))
    return joined.to(device), grad.to(device)


def _delayed(factor: float, device: str = "cpu") -> Delayed:
    """``factor`` 0: nothing is known."""
    state = torch.tensor([factor, 1 / factor if factor else torch.inf, 0.0, 0.0], device=device)
    return Delayed(state, torch.tensor(bool(factor)))


def _ready(device: str) -> None:
    if device == "cuda" and not (torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)):
        pytest.skip("needs a GPU with fp8")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("function", ["silu", "gelu", "gelu_tanh", "relu"])
def test_what_autograd_makes_of_it_in_float64(function: Any, dtype: torch.dtype) -> None:
    """To one rounding."""
    joined, grad = _inputs(7, 24, dtype)
    exact = joined.double().requires_grad_()
    gate, up = exact.chunk(2, dim=1)
    act = {
        "silu": torch.nn.functional.silu,
        "gelu": torch.nn.functional.gelu,
        "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        "relu": torch.relu,
    }[function]
    truth = act(gate) * up
    (truth_grad,) = torch.autograd.grad(truth, exact, grad.double())
    hidden, largest = gated_forward(joined, function)
    grad_joined, largest_grad, again = gated_backward(joined, grad, function, wants_hidden=True)
    rounding = {torch.bfloat16: 1.001 * 2.0**-8, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(hidden.double(), truth.detach(), rtol=rounding, atol=1e-6 if rounding > 1e-9 else 1e-15)
    torch.testing.assert_close(grad_joined.double(), truth_grad, rtol=rounding, atol=1e-6 if rounding > 1e-9 else 1e-15)
    assert hidden.dtype == grad_joined.dtype == dtype and torch.equal(again, hidden)
    assert largest == hidden.abs().max().float() and largest_grad == grad_joined.abs().max().float()
    assert largest.dtype == largest_grad.dtype == torch.float32
    assert not gated_backward(joined, grad, function, wants_hidden=False)[2].numel()


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_is_not_finite_spoils_the_largest(poison: float) -> None:
    joined, grad = _inputs(7, 24)
    joined[3, 5] = poison
    assert not gated_forward(joined, "silu")[1].isfinite()
    assert not gated_backward(joined, grad, "silu", wants_hidden=False)[1].isfinite()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("factor", [0.0, 0.5, 2.0**9])
@pytest.mark.parametrize("width", [16, 24, 1104])
def test_by_earlier_scales_it_is_a_cast_of_what_was_rounded(device: str, factor: float, width: int) -> None:
    """Bit for bit, also of what is beyond the range; what is found is noted."""
    _ready(device)
    joined, grad = _inputs(13, width, device=device)
    ours, theirs = _delayed(factor, device), _delayed(factor, device)
    hidden, rows = gated_forward_delayed(joined, ours, E4M3, "silu")
    grad_ours, grad_theirs = _delayed(factor, device), _delayed(factor, device)
    grad_joined, grad_rows, again = gated_backward_delayed(joined, grad, grad_ours, E5M2, "silu", wants_hidden=True)
    for wide, cast, mine, other, dtype in (
        (hidden, rows, ours, theirs, E4M3),
        (grad_joined, grad_rows, grad_ours, grad_theirs, E5M2),
    ):
        expected, _ = cast_delayed(wide, dtype, other, "triton", turned=False)
        assert torch.equal(cast.values.float(), expected.values.float()) and cast.scale == expected.scale
        assert torch.equal(mine.state, other.state) and mine.state[LARGEST] == wide.abs().max()
        if not factor:
            assert torch.equal(cast.wide(), cast_rows([wide], dtype, "tensorwise").wide())
    assert torch.equal(hidden, gated_forward(joined, "silu")[0]) and torch.equal(again, hidden)
    assert torch.equal(grad_joined, gated_backward(joined, grad, "silu", wants_hidden=False)[0])


def test_the_operators_say_what_they_give() -> None:
    joined, grad = _inputs(4, 24)
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    library.opcheck(torch.ops.paceline.gated_forward.default, (joined, "silu"))
    for wants in (True, False):
        library.opcheck(torch.ops.paceline.gated_backward.default, (joined, grad, "silu", wants))
        for gradient in (grad, None):
            arguments = (joined, gradient, *_delayed(1.0), E5M2, "silu", wants and gradient is not None)
            # not test_schema: it compares inputs before and after, and the state is written behind everybody's back
            library.opcheck(torch.ops.paceline.gated_cast_delayed.default, arguments, test_utils=tests)


# ---- the kernels


@pytest.fixture
def interpreted() -> Iterator[tuple[ModuleType, ModuleType]]:
    with interpreted_modules("expert_rows_triton", "seen_triton", "gated_triton") as (_, seen, module):
        yield seen, module


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_kernels_in_the_interpreter(interpreted: Any, function: str, dtype: torch.dtype) -> None:
    """In fp16, to which it rounds as hardware does; its bf16 is cut off (Triton 3.7)."""
    _, module = interpreted
    rounding = {torch.float16: 1.001 * 2.0**-11, torch.float32: 2e-6}[dtype]
    for tokens, width in SHAPES:
        joined, grad = _inputs(tokens, width, dtype)
        hidden, again = torch.full_like(grad, 7.0), torch.full_like(grad, 7.0)
        largest = module.gated_forward(joined, hidden, function)
        torch.testing.assert_close(hidden.float(), gated_reference(joined, function), rtol=rounding, atol=1e-6)
        assert largest == hidden.abs().max()
        grad_joined = torch.full_like(joined, 7.0)
        for place in (again, None):
            largest = module.gated_backward(joined, grad, grad_joined, place, function)
            expected = gated_backward_reference(joined, grad, function)
            torch.testing.assert_close(grad_joined.float(), expected, rtol=rounding, atol=1e-6)
            assert largest == grad_joined.abs().max()
        assert torch.equal(again, hidden)


@pytest.mark.parametrize("factor", [0.5, 2.0**15])
def test_casts_in_the_interpreter(interpreted: Any, factor: float) -> None:
    """fp16 stands for fp8, whose cast does not round there; 2^15 is beyond its range."""
    seen, module = interpreted
    for tokens, width in SHAPES:
        joined, grad = _inputs(tokens, width, torch.float32)
        by = torch.tensor([factor, 1 / factor])
        for backward in (False, True):
            wide = torch.empty_like(joined if backward else grad)
            values = torch.empty(wide.shape, dtype=torch.float16)
            found = seen.Seen(largest=torch.tensor(0.25), scale=torch.tensor(0.0))
            cast = module.Cast(values, by[0], found)
            if backward:
                module.gated_backward(joined, grad, wide, None, "silu", cast)
            else:
                module.gated_forward(joined, wide, "silu", cast)
            assert found.scale == 1 / factor and found.largest == max(0.25, float(wide.abs().max()))
            assert torch.equal(values, saturated(wide, wide * factor, torch.float16))


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_what_is_not_finite_in_the_interpreter(interpreted: Any, poison: float) -> None:
    seen, module = interpreted
    joined, grad = _inputs(9, 1100, torch.float32)
    joined[8, 1099] = poison
    hidden, grad_joined = torch.empty_like(grad), torch.empty_like(joined)
    assert module.gated_forward(joined, hidden, "silu") == torch.inf
    assert module.gated_backward(joined, grad, grad_joined, None, "silu") == torch.inf
    found = seen.Seen(largest=torch.tensor(0.0), scale=torch.tensor(0.0))
    values = torch.empty(hidden.shape, dtype=torch.float16)
    module.gated_forward(joined, hidden, "silu", module.Cast(values, torch.tensor([1.0, 1.0])[0], found))
    assert found.largest == torch.inf and values[8, 1099].isnan() and int((~values.isfinite()).sum()) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_kernels_on_a_gpu(function: str, dtype: torch.dtype) -> None:
    _ready("cuda")
    device = torch.device("cuda", torch.cuda.current_device())
    assert gated._kernels_are_right(device) and gated_delayed._kernels_are_right(device)
    half = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2e-6}[dtype]
    for tokens, width in (*SHAPES, (1003, 1792), (8192, 14336)):
        joined, grad = _inputs(tokens, width, dtype, "cuda")
        hidden, largest = gated_forward(joined, function)
        grad_joined, largest_grad, again = gated_backward(joined, grad, function, wants_hidden=True)
        for found, wide in (
            (hidden, gated_reference(joined, function)),
            (grad_joined, gated_backward_reference(joined, grad, function)),
        ):
            off = (found.float() - wide).abs() - 1.02 * half * wide.abs()
            # what fp32 and fp16's denormals lose where terms cancel
            assert float(off.max()) <= 2.0**-20 * float(wide.abs().max())
        assert torch.equal(again, hidden)
        assert largest == hidden.abs().max() and largest_grad == grad_joined.abs().max()


@pytest.mark.gpu
def test_more_numbers_than_32_bits_count_on_a_gpu() -> None:
    """And more rows of tiles than a second dim of programs may have."""
    _ready("cuda")
    if torch.cuda.get_device_properties(0).total_memory < 60 * 2**30:
        pytest.skip("needs 50 GB")
    tokens, width = 270_000, 4096
    joined = torch.randn(tokens, 2 * width, device="cuda", dtype=torch.bfloat16)
    grad = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
    joined[-1, -1] = joined[-1, width - 1] = 300.0
    grad_joined, largest, hidden = gated_backward(joined, grad, "silu", wants_hidden=True)
    assert hidden[-1, -1] == gated_forward(joined, "silu")[1] == 90112.0  # 300 * 300, as bf16 has it
    assert largest == grad_joined.abs().max()
    for part in (slice(0, 8), slice(tokens - 8, tokens)):
        expected = gated_backward_reference(joined[part], grad[part], "silu")
        torch.testing.assert_close(grad_joined[part].float(), expected, rtol=2.0**-7, atol=1e-5)
