"""fp8 products against their plain twin, and what a cast does to numbers at the edges.

Bands of agreement are those of sums: both sides multiply the same fp8 numbers, and round the result to bf16 once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import get_args

import pytest
import torch
from torch import Tensor, library

from paceline.kernels.fp8 import cast_weights, fp8_linear_reference, fp8_linears, rounded, why_not_fp8
from paceline.kernels.fp8_cast import (
    E4M3,
    E5M2,
    CastKernel,
    Fp8,
    Scaling,
    cast_both,
    cast_columns,
    cast_rows,
    cast_transpose,
    multiplier,
    product,
    transposed,
)
from tests.kernels.interpreter import interpreted_modules

ROUNDING = 2.0**-8
"""Half a step of bf16: sums in another order may round a result the other way."""
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
DEVICES = ("cpu", CUDA)


def _has_rowwise(device: str) -> bool:
    """torch 2.11 has rowwise products on GPUs only, 2.13 on CPUs too."""
    values = torch.zeros(16, 16, device=device).to(E4M3)
    try:
        product(Fp8(values, torch.ones(16, 1, device=device)), Fp8(values, torch.ones(16, 1, device=device)),
                torch.bfloat16, fast=False)  # fmt: skip
    except (RuntimeError, ValueError):
        return False
    return True


@pytest.fixture(params=["tensorwise", "rowwise"])
def scaling(request: pytest.FixtureRequest) -> Scaling:
    return request.param


def _ready(device: str, scaling: Scaling) -> None:
    if device == "cuda" and not (torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)):
        pytest.skip("needs a GPU with fp8")
    if scaling == "rowwise" and not _has_rowwise(device):
        pytest.skip(f"torch {torch.__version__} has no rowwise products on {device}")


def _inputs(
    leading: Sequence[int], width: int, outputs: Sequence[int], device: str, seed: int = 0
) -> tuple[Tensor, list[Tensor], list[Tensor | None]]:
    generator = torch.Generator().manual_seed(seed)
    # a few large channels, as activations have them
    channels = torch.exp(torch.randn(width, generator=generator))
    x = (torch.randn(*leading, width, generator=generator) * channels).bfloat16().to(device)
    weights = [(torch.randn(size, width, generator=generator) * 0.02).bfloat16().to(device) for size in outputs]
    biases: list[Tensor | None] = [torch.randn(outputs[0], generator=generator).bfloat16().to(device)]
    biases += [None] * (len(outputs) - 1)
    leaves = [x, *weights, biases[0]]
    for leaf in leaves:
        assert leaf is not None
        leaf.requires_grad_()
    return x, weights, biases


def _gradients(outputs: Sequence[Tensor], inputs: Sequence[Tensor], seed: int = 1) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    # as small as gradients of a mean over a million tokens
    wanted = [(torch.randn(out.shape, generator=generator) * 1e-7).to(out) for out in outputs]
    return torch.autograd.grad(outputs, inputs, wanted)


def _close(found: Tensor, expected: Tensor) -> None:
    error = (found.float() - expected.float()).norm() / expected.float().norm()
    assert found.shape == expected.shape and found.dtype == expected.dtype
    assert float(error.detach()) <= ROUNDING, float(error.detach())


# ---- products


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("leading", "width", "outputs"),
    [
        pytest.param((2, 24), 48, (32, 16, 16), id="queries keys values"),
        # 37 tokens: the weight gradient sums over no whole 16s; single widths that are none add up to one
        pytest.param((37,), 32, (24, 8), id="odd tokens and heads"),
        pytest.param((1, 1), 16, (16,), id="one token"),
        pytest.param((3, 7, 5), 64, (80,), id="more dims"),
    ],
)
@pytest.mark.parametrize("cached", [False, True])
def test_products_equal_their_plain_twin(
    device: str, scaling: Scaling, leading: tuple[int, ...], width: int, outputs: tuple[int, ...], cached: bool
) -> None:
    _ready(device, scaling)
    x, weights, biases = _inputs(leading, width, outputs, device)
    kept = cast_weights(weights, scaling) if cached else None
    found = fp8_linears(x, weights, biases, scaling=scaling, cached=kept)
    expected = fp8_linear_reference(x, weights, biases, scaling=scaling)
    leaves = [x, *weights, *(bias for bias in biases if bias is not None)]
    for one, other in zip(
        [*found, *_gradients(found, leaves)], [*expected, *_gradients(expected, leaves)], strict=True
    ):
        _close(one, other)
    with torch.no_grad():
        without = fp8_linears(x, weights, biases, scaling=scaling, cached=kept)
    assert all(torch.equal(one, other) for one, other in zip(without, found, strict=True))


def test_fp8_is_near_bf16(scaling: Scaling) -> None:
    """3 bits of mantissa are off by 2^-4 at most, so a product of two is by a few percent; 2 bits by more."""
    _ready("cpu", scaling)
    x, weights, _ = _inputs((256,), 128, (64,), "cpu")
    found = fp8_linears(x, weights, [None], scaling=scaling)
    exact = (torch.nn.functional.linear(x, weights[0]),)
    for one, other, most in zip(
        [*found, *_gradients(found, [x, *weights])], [*exact, *_gradients(exact, [x, *weights])], (0.05, 0.09, 0.09),
        strict=True,
    ):  # fmt: skip
        error = float(((one.float() - other.float()).norm() / other.float().norm()).detach())
        assert 1e-3 < error < most, error


@pytest.mark.parametrize("frozen", ["weights", "input", "one weight"])
def test_only_what_is_asked_for_has_a_gradient(scaling: Scaling, frozen: str) -> None:
    _ready("cpu", scaling)
    x, weights, _ = _inputs((20,), 32, (16, 16), "cpu")
    still = {"weights": weights, "input": [x], "one weight": weights[:1]}[frozen]
    for leaf in still:
        leaf.requires_grad_(False)
    moving = [leaf for leaf in (x, *weights) if leaf.requires_grad]
    found = _gradients(fp8_linears(x, weights, [None, None], scaling=scaling), moving)
    expected = _gradients(fp8_linear_reference(x, weights, [None, None], scaling=scaling), moving)
    for one, other in zip(found, expected, strict=True):
        _close(one, other)


def test_inputs_and_gradients_may_lie_in_any_way(scaling: Scaling) -> None:
    _ready("cpu", scaling)
    x, weights, _ = _inputs((20,), 32, (16,), "cpu")
    across = x.detach().t().contiguous().t().requires_grad_()
    turned = weights[0].detach().t().contiguous().t().requires_grad_()
    expected = _gradients(fp8_linears(x, weights, [None], scaling=scaling), [x, *weights])
    found = _gradients(fp8_linears(across, [turned], [None], scaling=scaling), [across, turned])
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    (out,) = fp8_linears(x, weights, [None], scaling=scaling)
    out.sum().backward()  # its gradient is one number, expanded
    assert x.grad is not None and bool(x.grad.isfinite().all())


def test_a_byte_an_element_is_kept_of_the_input(scaling: Scaling) -> None:
    _ready("cpu", scaling)
    x, weights, _ = _inputs((64,), 32, (16, 16), "cpu")
    kept: list[Tensor] = []
    cached = cast_weights(weights, scaling)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        fp8_linears(x, weights, [None, None], scaling=scaling, cached=cached)
    weight_bytes = cached.columns.values.untyped_storage().data_ptr()
    own = [tensor for tensor in kept if tensor.untyped_storage().data_ptr() != weight_bytes]
    scales = 4 * (2 if scaling == "tensorwise" else 32 + 32)
    assert sum(tensor.nbytes for tensor in own) == 64 * 32 + scales


def test_why_not() -> None:
    assert why_not_fp8([torch.empty(24, 32), torch.empty(8, 32)]) is None
    assert why_not_fp8([torch.empty(24, 32)]) == "its output 24 is not a multiple of 16"
    assert why_not_fp8([torch.empty(24, 30)]) == "its input 30 and output 24 are not a multiple of 16"


# ---- numbers that are not finite


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["input", "weight", "gradient"])
def test_what_is_not_finite_stays_visible(device: str, scaling: Scaling, value: float, where: str) -> None:
    """Some casts to e4m3 saturate inf (torch 2.13 on CPUs does): the scale must tell."""
    _ready(device, scaling)
    x, weights, _ = _inputs((20,), 32, (16,), device)
    if where != "gradient":
        with torch.no_grad():
            {"input": x, "weight": weights[0]}[where].view(-1)[5] = value
    (out,) = fp8_linears(x, weights, [None], scaling=scaling)
    wanted = torch.ones_like(out)
    if where == "gradient":
        wanted[3, 2] = value
    grad_x, grad_weight = torch.autograd.grad(out, [x, weights[0]], wanted)
    if where == "gradient":
        assert not grad_x.isfinite().all() and not grad_weight.isfinite().all()
    else:
        assert not out.isfinite().all()
        assert not {"input": grad_weight, "weight": grad_x}[where].isfinite().all()


@pytest.mark.parametrize("zero", ["input", "weight", "gradient"])
def test_zeros_give_zeros(scaling: Scaling, zero: str) -> None:
    _ready("cpu", scaling)
    x, weights, _ = _inputs((20,), 32, (16,), "cpu")
    with torch.no_grad():
        for name, tensor in (("input", x), ("weight", weights[0])):
            if zero == name:
                tensor.zero_()
    (out,) = fp8_linears(x, weights, [None], scaling=scaling)
    wanted = torch.zeros_like(out) if zero == "gradient" else torch.ones_like(out)
    grad_x, grad_weight = torch.autograd.grad(out, [x, weights[0]], wanted)
    assert all(tensor.isfinite().all() for tensor in (out, grad_x, grad_weight))
    assert {"input": grad_weight, "weight": grad_x, "gradient": grad_x}[zero].abs().max() == 0


# ---- casts


def test_a_factor_is_the_largest_power_of_two_that_fits() -> None:
    edge = torch.tensor([448.0, 449.0, 447.9, 3.5, 3.4999998, 3.5000002, 1e-20, 3e38])
    factors = multiplier(edge, E4M3)
    assert torch.equal(torch.frexp(factors).mantissa, torch.full_like(factors, 0.5)), "powers of two"
    assert bool((edge.double() * factors.double() <= 448).all())
    assert bool((edge.double() * 2 * factors.double() > 448).all())
    assert bool((edge[:6].double() * multiplier(edge[:6], E5M2).double() > 57344 / 2).all())


def test_factors_at_the_edges() -> None:
    smallest = multiplier(torch.tensor([0.0, 1e-45, 2.0**-100]), E5M2)
    assert bool(smallest.isfinite().all()) and len(set(smallest.tolist())) == 1
    assert multiplier(torch.tensor(float("inf")), E4M3).item() == 0
    assert multiplier(torch.tensor(float("nan")), E4M3).isnan()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_casts_are_those_of_the_twin(scaling: Scaling, dtype: torch.dtype) -> None:
    for name, x in _hard().items():
        for kernel in get_args(CastKernel):
            rows, columns = cast_both(x, dtype, scaling, kernel)
            assert torch.equal(rows.wide(), rounded(x, dtype, scaling, over=1)), name
            turned = columns.wide()[:, : len(x)]
            assert torch.equal(turned.T, rounded(x, dtype, scaling, over=0)), name
            assert columns.values.shape == (x.shape[1], -(-len(x) // 16) * 16) and columns.values.is_contiguous()


def test_the_operation_is_what_it_says_to_the_compiler() -> None:
    x = torch.randn(37, 24).bfloat16()
    library.opcheck(cast_transpose, (x, torch.tensor(4.0), E4M3))


def _hard() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    plain = torch.randn(37, 24, generator=generator)
    spread = plain * torch.exp(torch.randn(37, 24, generator=generator) * 8)
    zero_row = plain.clone()
    zero_row[3] = 0
    zero_row[:, 5] = 0
    cases = {"plain": plain, "spread": spread, "zero rows": zero_row, "small": plain * 1e-25, "one": plain[:1, :1]}
    return {name: x.bfloat16() for name, x in cases.items()} | {"fp32": plain}


def test_matrices_that_are_joined_share_what_one_matrix_has(scaling: Scaling) -> None:
    parts = [torch.randn(size, 32).bfloat16() * factor for size, factor in ((16, 1.0), (24, 30.0))]
    for cast in (cast_rows, cast_columns):
        joined, one = cast(parts, E4M3, scaling), cast([torch.cat(parts)], E4M3, scaling)
        assert torch.equal(joined.wide(), one.wide())


# ---- the Triton kernel


@pytest.fixture
def interpreted() -> Iterator[ModuleType]:
    with interpreted_modules("turned_triton", "seen_triton", "fp8_triton") as (*_, module):
        yield module


SHAPES = ((1, 1), (5, 7), (64, 64), (100, 80), (130, 16), (16, 200))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_cast_transpose_in_the_interpreter(interpreted: ModuleType, dtype: torch.dtype) -> None:
    """Numbers that fp8 has exactly: the interpreter's cast to fp8 does not round as hardware does (Triton 3.9)."""
    for shape in SHAPES:
        generator = torch.Generator().manual_seed(1)
        powers = torch.randint(-4, 6, shape, generator=generator)
        x = torch.ldexp(torch.randint(4, 8, shape, generator=generator) / 4, powers).bfloat16()
        x *= torch.randint(2, shape, generator=generator) * 2 - 1
        _check_cast_transpose(interpreted, x, dtype)
        _check_cast_transpose(interpreted, torch.cat((x, x), dim=1)[:, : shape[1]], dtype)  # rows lie further apart


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_cast_transpose_on_a_gpu(dtype: torch.dtype) -> None:
    _ready("cuda", "tensorwise")
    from paceline.kernels import fp8_triton

    for shape in (*SHAPES, (8192, 4096), (1000, 14336)):
        _check_cast_transpose(fp8_triton, torch.randn(shape, device="cuda").bfloat16(), dtype)
    for name, x in _hard().items():
        found = cast_both(x.cuda(), dtype, "tensorwise", "triton")
        expected = cast_both(x.cuda(), dtype, "tensorwise")
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one.wide(), other.wide()), name
    for wide in (torch.randn(100, 86, device="cuda").bfloat16()[:, :80], torch.randn(64, 24, device="cuda").bfloat16()):
        for one, other in zip(
            cast_both(wide, dtype, "tensorwise", "triton"), cast_both(wide, dtype, "tensorwise"), strict=True
        ):
            assert torch.equal(one.wide(), other.wide()), wide.shape
    weights = [torch.randn(size, 48, device="cuda").bfloat16() for size in (32, 8, 24)]
    kept = cast_weights(weights, "tensorwise")
    on_cpu = cast_weights([weight.cpu() for weight in weights], "tensorwise")
    for one, other in zip(kept, on_cpu, strict=True):
        assert torch.equal(one.wide().cpu(), other.wide())


def _check_cast_transpose(module: ModuleType, x: Tensor, dtype: torch.dtype) -> None:
    """Into matrices of their own, and into parts of larger ones."""
    rows = cast_rows([x], dtype, "tensorwise")
    expected = rows.values.float(), transposed(rows).values.float()
    for more in (0, 16 if x.is_cuda else 6):  # 16: see `cast_transpose` about alignment
        whole = [
            torch.full((len(side) + more, side.shape[1] + more), 7.0, device=x.device).to(dtype) for side in expected
        ]
        values, turned = (side[: part.shape[0], : part.shape[1]] for side, part in zip(whole, expected, strict=True))
        module.cast_transpose(x, rows.scale.reciprocal(), values, turned)
        assert torch.equal(values.float(), expected[0]) and torch.equal(turned.float(), expected[1])
        assert all(bool((side[len(part) :].float() == 7).all()) for side, part in zip(whole, expected, strict=True))
        assert all(
            bool((side[:, part.shape[1] :].float() == 7).all()) for side, part in zip(whole, expected, strict=True)
        )


def test_joined_weights_are_cast_part_by_part(interpreted: ModuleType) -> None:
    from paceline.kernels import fp8_cast

    for sizes in ((32, 8, 24), (7, 6)):
        parts = [torch.ldexp(torch.randint(4, 8, (size, 48)) / 4, torch.tensor(2)).bfloat16() for size in sizes]
        expected = cast_rows(parts, E4M3, "tensorwise")
        values, turned = fp8_cast._cast_joined(parts, expected.scale.reciprocal(), E4M3)
        assert torch.equal(values.float(), expected.values.float())
        assert torch.equal(turned.float(), transposed(expected).values.float())
