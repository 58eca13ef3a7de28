"""Casts by scales of earlier steps: what they give, what they find, and what they make of surprises."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, library

from paceline.kernels import fp8_delayed
from paceline.kernels.fp8 import cast_weights, fp8_linears
from paceline.kernels.fp8_cast import E4M3, E5M2, CastKernel, cast_rows, multiplier, padded_and_turned
from paceline.kernels.fp8_delayed import FACTOR, LARGEST, SCALE, Delayed, DelayedPair, cast_delayed
from paceline.kernels.fp8_gated import gated_backward_reference, gated_reference
from paceline.kernels.fp8_gated_delayed import gated_backward_cast_delayed, gated_cast_delayed
from paceline.kernels.fp8_mlp import fp8_gated_mlp
from tests.kernels.interpreter import interpreted_modules

DTYPES = (E4M3, E5M2)
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


def _delayed(factor: float = 0.0, *, told: bool = True, device: str = "cpu") -> Delayed:
    """``told``: the host knows as well."""
    state = torch.tensor([factor, 1 / factor if factor else torch.inf, 0.0, 0.0], device=device)
    return Delayed(state, torch.tensor(bool(factor) and told))


def _ready(device: str) -> None:
    if device == "cuda" and not (torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)):
        pytest.skip("needs a GPU with fp8")


def _drawn(*shape: int, device: str = "cpu") -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).bfloat16().to(device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", get_args(CastKernel))
def test_what_nothing_is_known_of_has_its_own_scale(device: str, dtype: torch.dtype, kernel: CastKernel) -> None:
    _ready(device)
    for x in (_drawn(37, 32, device=device), torch.zeros(16, 16, device=device).bfloat16()):
        delayed, expected = _delayed(device=device), cast_rows([x], dtype, "tensorwise")
        rows, columns = cast_delayed(x, dtype, delayed, kernel, turned=True)
        assert columns is not None
        assert torch.equal(rows.wide(), expected.wide()) and rows.scale == expected.scale == columns.scale
        assert torch.equal(columns.values.float(), padded_and_turned(expected.values).float())
        assert delayed.state[LARGEST] == x.abs().max() and delayed.state[FACTOR] == 0


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", get_args(CastKernel))
@pytest.mark.parametrize("told", [True, False])
def test_factors_of_earlier_steps_are_taken(device: str, dtype: torch.dtype, kernel: CastKernel, told: bool) -> None:
    """Too large ones saturate. Whether the host knows of them already changes nothing."""
    _ready(device)
    x, limit = _drawn(100, 48, device=device), torch.finfo(dtype).max
    for factor in (2.0**-3, 2.0**5, 2.0**17):
        delayed = _delayed(factor, told=told, device=device)
        rows, columns = cast_delayed(x, dtype, delayed, kernel, turned=True)
        alone, nothing = cast_delayed(x, dtype, delayed, kernel, turned=False)
        assert columns is not None and nothing is None
        expected = (x.float() * factor).clamp(-limit, limit).to(dtype)
        assert torch.equal(rows.values.float(), expected.float()) and rows.scale == 1 / factor
        assert torch.equal(columns.values.float(), padded_and_turned(expected).float())
        assert torch.equal(alone.values.float(), expected.float())
        assert delayed.state[LARGEST] == x.abs().max()
    assert bool((expected.float().abs() == limit).any()), "some did not fit"


def test_the_largest_of_several_is_kept() -> None:
    delayed, x = _delayed(4.0), _drawn(32, 16)
    for times, largest in ((1, 1), (4, 4), (2, 4)):
        cast_delayed(x * times, E4M3, delayed, "torch", turned=False)
        assert delayed.state[LARGEST] == largest * x.abs().max()
    assert delayed.state._version == 0, "what is kept for the backward has not changed, as far as autograd sees"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("factor", [0.0, 8.0])
@pytest.mark.parametrize("kernel", get_args(CastKernel))
def test_what_is_not_finite_stays_visible(device: str, value: float, factor: float, kernel: CastKernel) -> None:
    _ready(device)
    x = _drawn(64, 32, device=device)
    x[5, 7] = value
    delayed = _delayed(factor, device=device)
    rows, _ = cast_delayed(x, E4M3, delayed, kernel, turned=True)
    assert not rows.wide()[5, 7].isfinite()
    assert delayed.state[LARGEST] == torch.inf


def test_the_operations_are_what_they_say_to_the_compiler() -> None:
    """But for the largest number, which they do not speak of: see `Delayed.state`."""
    tests = ("test_faketensor",)
    operations = torch.ops.paceline
    for turned in (True, False):
        arguments = (_drawn(37, 24), torch.zeros(4), torch.tensor(False), E4M3, turned, False)
        library.opcheck(operations.fp8_cast_delayed.default, arguments, test_utils=tests)
    joined, grad = _drawn(21, 32), _drawn(21, 16)
    for gradient in (None, grad):
        arguments = (joined, gradient, torch.zeros(4), torch.tensor(False), E4M3, "silu")
        library.opcheck(operations.fp8_gated_cast_delayed.default, arguments, test_utils=tests)


# ---- products


def _pair(factor: float = 0.0, device: str = "cpu") -> DelayedPair:
    return DelayedPair(_delayed(factor, device=device), _delayed(factor, device=device))


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("kernel", get_args(CastKernel))
def test_products_without_a_past_are_those_of_tensors_own_scales(cached: bool, kernel: CastKernel) -> None:
    """And with a past that has the same largest numbers."""
    x, weights = _drawn(2, 19, 32).requires_grad_(), [_drawn(48, 32).requires_grad_(), _drawn(16, 32).requires_grad_()]

    def results(delayed: DelayedPair | None) -> list[Tensor]:
        kept = cast_weights(weights, "tensorwise") if cached else None
        outputs = fp8_linears(
            x, weights, (None, None), scaling="tensorwise", cached=kept, kernel=kernel, delayed=delayed
        )
        sums = sum((out.float() ** 2).sum() for out in outputs)
        return [*outputs, *torch.autograd.grad(sums, [x, *weights])]

    pair, expected = _pair(), results(None)
    assert all(torch.equal(one, other) for one, other in zip(results(pair), expected, strict=True))
    for delayed, dtype in zip(pair, DTYPES, strict=True):
        delayed.state[FACTOR] = multiplier(delayed.state[LARGEST], dtype)
        delayed.state[SCALE] = delayed.state[FACTOR].reciprocal()
        delayed.known.fill_(True)
    assert all(torch.equal(one, other) for one, other in zip(results(pair), expected, strict=True))


@pytest.mark.parametrize("frozen", ["weight", "input"])
def test_only_what_is_asked_for_has_a_gradient(frozen: str) -> None:
    x, weight = _drawn(16, 32), _drawn(48, 32)
    (weight if frozen == "input" else x).requires_grad_()
    pair = _pair(64.0)
    (out,) = fp8_linears(x, [weight], [None], scaling="tensorwise", delayed=pair)
    out.float().square().sum().backward()
    assert (x.grad is None) == (frozen == "input") and (weight.grad is None) == (frozen == "weight")
    assert bool(pair.gradient.state[LARGEST] > 0)


def test_evaluation_looks_at_nothing_and_leaves_nothing() -> None:
    x, weight, pair = _drawn(16, 32), _drawn(48, 32), _pair(2.0**20)
    with torch.no_grad():
        found = fp8_linears(x, [weight], [None], scaling="tensorwise", delayed=pair)
        expected = fp8_linears(x, [weight], [None], scaling="tensorwise")
    assert torch.equal(found[0], expected[0]) and pair.input.state[LARGEST] == 0


@pytest.mark.parametrize("cached", [True, False])
def test_gated_mlps_without_a_past_are_as_before(cached: bool) -> None:
    tensors = [_drawn(2, 21, 32), _drawn(48, 32) * 0.2, _drawn(48, 32) * 0.3, _drawn(32, 48) * 0.1]
    for tensor in tensors:
        tensor.requires_grad_()

    def results(**delayed: Any) -> list[Tensor]:
        x, gate, up, down = tensors
        kept = {
            "cached_first": cast_weights([gate, up], "tensorwise"),
            "cached_down": cast_weights([down], "tensorwise"),
        }
        out = fp8_gated_mlp(x, [gate, up], down, function="silu", **(kept if cached else {}), **delayed)
        return [out, *torch.autograd.grad(out.float().square().sum(), tensors)]

    first, down, expected = _pair(), _pair(), results()
    found = results(delayed_first=first, delayed_down=down)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    for delayed in (*first, *down):
        assert bool(delayed.state[LARGEST] > 0), "each of the four tensors was seen"


# ---- the kernels


@pytest.fixture
def interpreted() -> Iterator[tuple[ModuleType, ModuleType, ModuleType]]:
    names = ("expert_rows_triton", "turned_triton", "seen_triton", "fp8_triton", "fp8_gated_triton")
    with interpreted_modules(*names) as (_, _, seen, cast, gated):
        yield seen, cast, gated


SHAPES = ((1, 2), (5, 6), (64, 64), (100, 80), (130, 16), (16, 200))


def _exact(shape: tuple[int, int]) -> Tensor:
    """Numbers that fp8 has: the interpreter's cast does not round as hardware does (Triton 3.7)."""
    generator = torch.Generator().manual_seed(1)
    powers = torch.randint(-4, 6, shape, generator=generator)
    x = torch.ldexp(torch.randint(4, 8, shape, generator=generator) / 4, powers).bfloat16()
    return x * (torch.randint(2, shape, generator=generator) * 2 - 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("turns", [True, False])
def test_casts_in_the_interpreter(interpreted: Any, dtype: torch.dtype, turns: bool) -> None:
    seen, cast, _ = interpreted
    for shape in SHAPES:
        for x in (_exact(shape), torch.zeros(shape).bfloat16()):
            for factor in (1.0, 2.0**11):
                by = torch.tensor([factor, 1 / factor])
                found = seen.Seen(largest=torch.tensor(0.0), scale=torch.tensor(0.0))
                expected = fp8_delayed.saturated(x, x * factor, dtype)
                values, turned = torch.empty_like(expected), torch.empty_like(padded_and_turned(expected))
                cast.cast_transpose(x, by[0], values, turned if turns else None, found)
                assert torch.equal(values.float(), expected.float()), (shape, factor)
                assert not turns or torch.equal(turned.float(), padded_and_turned(expected).float())
                assert found.largest == x.abs().max() and found.scale == 1 / factor
                cast.cast_transpose(x / 2, by[0], values, None, found)
                assert found.largest == x.abs().max(), "the larger of both"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_largest_of_what_is_not_finite(interpreted: Any, value: float) -> None:
    seen, cast, gated = interpreted
    by = torch.tensor([1.0, 1.0])
    x = _exact((70, 80))
    x[69, 71] = value
    found = seen.Seen(largest=torch.tensor(0.0), scale=torch.tensor(0.0))
    values = torch.empty(70, 80, dtype=torch.bfloat16)
    cast.cast_transpose(x, by[0], values, None, found)
    assert found.largest == torch.inf and values[69, 71].isnan() and int((~values.isfinite()).sum()) == 1
    joined, grad = _drawn(70, 160), _drawn(70, 80)
    joined[69, 71] = value
    for backward in (False, True):
        found = seen.Seen(largest=torch.tensor(0.0), scale=torch.tensor(0.0))
        values = torch.empty(70, 160 if backward else 80, dtype=torch.bfloat16)
        turned = torch.empty_like(padded_and_turned(values))
        if backward:
            gated.gated_backward_cast(joined, grad, by[0], values, turned, "silu", found)
            wide = gated_backward_reference(joined, grad, "silu")
        else:
            gated.gated_cast(joined, by[0], values, turned, "silu", found)
            wide = gated_reference(joined, "silu")
        assert not wide[69].isfinite().all()
        assert found.largest == torch.inf and torch.equal(values.isfinite(), wide.isfinite())


@pytest.mark.parametrize("function", ["silu", "gelu_tanh"])
def test_gated_kernels_in_the_interpreter(interpreted: Any, function: str) -> None:
    seen, _, gated = interpreted
    for tokens, width in ((5, 24), (64, 64), (130, 16), (16, 200)):
        joined, grad = _drawn(tokens, 2 * width), _drawn(tokens, width)
        for backward in (False, True):
            wide = gated_backward_reference(joined, grad, function) if backward else gated_reference(joined, function)
            values = torch.empty(wide.shape, dtype=torch.float16)
            turned = torch.empty_like(padded_and_turned(values))
            factor = 2.0**15  # beyond the 65504 of fp16, which stands for fp8 here
            by = torch.tensor([factor, 1 / factor])
            found = seen.Seen(largest=torch.tensor(0.0), scale=torch.tensor(0.0))
            inputs = (joined, grad) if backward else (joined,)
            (gated.gated_backward_cast if backward else gated.gated_cast)(
                *inputs, by[0], values, turned, function, found
            )
            expected = (wide * factor).clamp(-65504, 65504)
            torch.testing.assert_close(values.float(), expected, rtol=2e-3, atol=float(expected.abs().max()) * 1e-5)
            torch.testing.assert_close(found.largest, wide.abs().max(), rtol=1e-5, atol=0)
            assert found.scale == 1 / factor and torch.equal(turned, padded_and_turned(values))
            assert bool((values.abs() == 65504).any()) or float(wide.abs().max()) < 2


@pytest.mark.gpu
def test_gated_kernels_on_a_gpu() -> None:
    _ready("cuda")
    from paceline.kernels import fp8_gated_delayed

    assert fp8_gated_delayed._kernels_are_right(torch.device("cuda", torch.cuda.current_device()))
    assert fp8_delayed._kernel_is_right(torch.device("cuda", torch.cuda.current_device()))
    for tokens, width in ((64, 64), (1000, 208), (8192, 1792)):
        joined, grad = _drawn(tokens, 2 * width, device="cuda"), _drawn(tokens, width, device="cuda")
        for factor in (1.0, 2.0**14):
            for backward in (False, True):
                delayed = _delayed(factor, device="cuda")
                if backward:
                    values, turned, scale = gated_backward_cast_delayed(joined, grad, delayed, E5M2, "silu")
                    wide = gated_backward_reference(joined, grad, "silu")
                else:
                    values, turned, scale = gated_cast_delayed(joined, delayed, E4M3, "silu")
                    wide = gated_reference(joined, "silu")
                limit, half = (57344.0, 2.0**-3) if backward else (448.0, 2.0**-4)
                exact = (wide * factor).clamp(-limit, limit)
                off = (values.float() - exact).abs() - 1.01 * half * exact.abs() - 2.0**-9
                assert float(off.max()) <= 2.0**-20 * float(exact.abs().max())
                assert torch.equal(turned.float(), padded_and_turned(values).float())
                assert scale == 1 / factor
                torch.testing.assert_close(delayed.state[LARGEST], wide.abs().max(), rtol=1e-5, atol=0)
