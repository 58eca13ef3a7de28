"""A product that adds to a sum: against the product in float64, in all precisions, for odd and strided sizes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, library

from paceline.kernels.weight_gradient import (
    accumulate_product,
    accumulate_product_reference,
    accumulate_weight_gradient,
)

SHAPES = ((1, 1, 1), (5, 3, 7), (64, 24, 16), (130, 8, 33))
"""M, D, C"""
PRECISIONS = (
    (torch.float64, torch.float64),
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
)
"""Of the place and of the operands."""


def _operands(
    shape: tuple[int, int, int], place: torch.dtype, dtype: torch.dtype, device: str = "cpu"
) -> tuple[Tensor, ...]:
    M, D, C = shape
    generator = torch.Generator().manual_seed(M * D + C)
    wide = [torch.randn(size, generator=generator, dtype=torch.float64) for size in ((D, C), (M, D), (M, C))]
    return wide[0].to(device, place), wide[1].to(device, dtype), wide[2].to(device, dtype)


def _check(device: str, shape: tuple[int, int, int], place: torch.dtype, dtype: torch.dtype) -> None:
    sum_DC, grad_MD, x_MC = _operands(shape, place, dtype, device)
    product = grad_MD.double().T @ x_MC.double()
    # M additions in fp32, whose errors add up like a random walk (tensor cores cut off where an FPU rounds: 2^-22), and
    # one rounding to the place's precision
    bound = {torch.float64: 1e-13, torch.float32: max(1e-5, 2**-22 * shape[0] ** 0.5), torch.bfloat16: 2**-8}[place]
    for first, expected in ((True, product), (False, sum_DC.double() + product)):
        found = sum_DC.clone()
        if first:
            found.fill_(float("nan"))  # what was there is not read
        memory = found.data_ptr()
        accumulate_product(found, grad_MD, x_MC, first=first)
        assert found.data_ptr() == memory and found.dtype == place
        scale = expected.abs().max().clamp(min=1)
        # cuBLAS rounds to bf16 twice where it adds in bf16: the product, and the sum (CUDA 13, Hopper)
        roundings = 2 if device == "cuda" and place == torch.bfloat16 and not first else 1
        assert float((found.double() - expected).abs().max() / scale) < roundings * bound, (shape, place, dtype, first)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("place", "dtype"), PRECISIONS, ids=str)
def test_it_adds_the_product(shape: tuple[int, int, int], place: torch.dtype, dtype: torch.dtype) -> None:
    _check("cpu", shape, place, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (8192, 1024, 4096)], ids=str)
@pytest.mark.parametrize(("place", "dtype"), PRECISIONS, ids=str)
def test_it_adds_the_product_on_a_gpu(shape: tuple[int, int, int], place: torch.dtype, dtype: torch.dtype) -> None:
    _check("cuda", shape, place, dtype)
    if place != dtype or shape[0] > 1000:
        return
    found, grad_MD, x_MC = _operands(shape, place, dtype, "cuda")
    expected = found.clone()
    accumulate_product(found, grad_MD, x_MC, first=False)
    accumulate_product_reference(expected, grad_MD, x_MC, first=False)
    if place != torch.bfloat16:
        torch.testing.assert_close(found, expected)
        return
    # cuBLAS may round the product before it adds it: half a step of the product, and of each sum
    product = (grad_MD.double().T @ x_MC.double()).abs()
    half_a_step = 2**-8 * 1.01
    bound = half_a_step * (product + found.double().abs() + expected.double().abs()) + 1e-6
    assert bool(((found.double() - expected.double()).abs() <= bound).all())


@pytest.mark.gpu
def test_nothing_of_the_size_of_the_weight_is_allocated_on_a_gpu() -> None:
    for place in (torch.float32, torch.bfloat16):
        found, grad_MD, x_MC = _operands((256, 2048, 2048), place, torch.bfloat16, "cuda")
        accumulate_product(found, grad_MD, x_MC, first=True)  # cuBLAS takes its workspace once
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        accumulate_product(found, grad_MD, x_MC, first=False)
        assert torch.cuda.max_memory_allocated() - before < found.nbytes / 4


def test_operands_may_be_views() -> None:
    place = torch.zeros(40, dtype=torch.float64)[8:].view(4, 8)
    grad_MD = torch.randn(4, 6, dtype=torch.float64).T
    x_MC = torch.randn(6, 16, dtype=torch.float64)[:, ::2]
    accumulate_product(place, grad_MD, x_MC, first=False)
    torch.testing.assert_close(place, grad_MD.T @ x_MC)


def test_where_precisions_agree_the_order_of_additions_is_that_of_autograd() -> None:
    """Product, then sum: switching to it changes no bit on a CPU."""
    for dtype in (torch.float32, torch.float64):
        found, grad_MD, x_MC = _operands((64, 24, 16), dtype, dtype)
        expected = found.clone().add_(grad_MD.T @ x_MC)
        accumulate_product(found, grad_MD, x_MC, first=False)
        assert torch.equal(found, expected)


def test_the_operator_replaces_once_and_then_adds() -> None:
    place, grad_MD, x_MC = _operands((5, 3, 7), torch.float32, torch.float32)
    fresh = torch.ones((), dtype=torch.bool)
    expected = torch.empty_like(place)
    for index in range(3):
        accumulate_weight_gradient(place, fresh, grad_MD, x_MC)
        accumulate_product(expected, grad_MD, x_MC, first=index == 0)
        assert not fresh
        assert torch.equal(place, expected)


def test_the_operator_says_what_it_changes() -> None:
    place, grad_MD, x_MC = _operands((5, 3, 7), torch.float32, torch.float32)
    fresh = torch.ones((), dtype=torch.bool)
    library.opcheck(torch.ops.paceline.accumulate_weight_gradient.default, (place, fresh, grad_MD, x_MC))
