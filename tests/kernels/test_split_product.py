"""fp32 products from bf16 ones, against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, library

from paceline.kernels.split_product import split_product, why_not_split


def _error(found: Tensor, expected: Tensor) -> float:
    return float(((found.double().cpu() - expected).norm() / expected.norm()).detach())


def check(device: str, tokens: int, width: int, outputs: int, weight_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, width, generator=generator).bfloat16()
    weight = (torch.randn(outputs, width, generator=generator) * 0.02).to(weight_dtype)
    grad = torch.randn(tokens, outputs, generator=generator) * 1e-6
    wide = [value.double().requires_grad_() for value in (x, weight)]
    expected = wide[0] @ wide[1].T
    wanted = torch.autograd.grad(expected, wide, grad.double())
    leaves = [value.to(device).requires_grad_() for value in (x, weight)]
    out = split_product(*leaves)
    found = torch.autograd.grad(out, leaves, grad.to(device))
    assert out.dtype == torch.float32 and [value.dtype for value in found] == [torch.bfloat16, weight_dtype]
    plain = leaves[0].detach().float() @ leaves[1].detach().float().T
    # tensor cores add in fp32 and cut off where an FPU rounds
    bound = 2 * _error(plain, expected) + 1e-7 if device == "cpu" else 2**-18
    assert _error(out, expected) < bound
    assert _error(found[0], wanted[0]) < 2**-8  # rounded to bf16
    assert _error(found[1], wanted[1]) < (
        2**-8 if weight_dtype == torch.bfloat16 else 1e-6 if device == "cpu" else 2**-16
    )


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_as_exact_as_fp32(weight_dtype: torch.dtype) -> None:
    check("cpu", 50, 96, 16, weight_dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu(weight_dtype: torch.dtype) -> None:
    check("cuda", 8192, 2048, 128, weight_dtype)


def test_operators_are_what_they_say() -> None:
    ops, tests = torch.ops.paceline, ("test_schema", "test_faketensor")
    x, weight, grad = torch.randn(5, 16).bfloat16(), torch.randn(8, 16), torch.randn(5, 8)
    library.opcheck(ops.split_product.default, (x, weight), test_utils=tests)
    library.opcheck(ops.split_product_backward.default, (grad, x, weight), test_utils=tests)


def test_reasons() -> None:
    assert why_not_split(torch.zeros(2, 8), torch.zeros(8, 8))
    assert why_not_split(torch.zeros(2, 8).bfloat16(), torch.zeros(5, 8))
    assert not why_not_split(torch.zeros(2, 8).bfloat16(), torch.zeros(8, 8))
