"""A product with a number on the device, rounded once."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from paceline.kernels.scaling import scale_in_place, scale_in_place_reference
from tests.kernels.interpreter import interpreted_modules

SIZES = ((0,), (1,), (3, 7), (4096,), (5, 1021))
FACTOR = 1.0030
"""Rounds to 1 in bf16."""


def _expected(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    return (tensor.double() * torch.tensor(factor).double()).to(tensor.dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_factor_is_not_rounded(size: tuple[int, ...], dtype: torch.dtype) -> None:
    for scale in (scale_in_place, scale_in_place_reference):
        tensor = torch.randn(size).to(dtype)
        expected = _expected(tensor, FACTOR)
        scale(tensor, torch.tensor(FACTOR))
        torch.testing.assert_close(tensor, expected, rtol=1e-6 if dtype == torch.float32 else 0, atol=0)


@pytest.fixture
def interpreted() -> Iterator[ModuleType]:
    with interpreted_modules("scaling_triton") as (module,):
        yield module


@pytest.mark.parametrize("size", SIZES)
def test_the_kernel_in_the_interpreter(interpreted: ModuleType, size: tuple[int, ...]) -> None:
    # the interpreter does not round to bf16 as hardware does (Triton 3.6)
    tensor = torch.randn(size)
    expected = _expected(tensor, FACTOR)
    interpreted.scale_in_place_triton(tensor, torch.tensor(FACTOR))
    torch.testing.assert_close(tensor, expected, rtol=1e-6, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [*SIZES, (1003, 1024)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_on_a_gpu(size: tuple[int, ...], dtype: torch.dtype) -> None:
    tensor = torch.randn(size, device="cuda").to(dtype)
    expected = _expected(tensor.cpu(), FACTOR)
    scale_in_place(tensor, torch.tensor(FACTOR, device="cuda"))
    torch.testing.assert_close(tensor.cpu(), expected, rtol=0, atol=0)
