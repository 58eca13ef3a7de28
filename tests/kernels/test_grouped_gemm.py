"""A product for each group of rows, with empty groups and expanded gradients."""

from __future__ import annotations

import pytest
import torch

from paceline.kernels.grouped_gemm import grouped_gemm, why_not_grouped


@pytest.mark.parametrize("counts", [[3, 0, 5, 2], [0, 0, 10, 0], [10, 0, 0, 0]])
def test_equals_one_product_after_the_other(counts: list[int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(10, 6, requires_grad=True)
    weight = torch.randn(4, 8, 6, requires_grad=True)
    out = grouped_gemm(x, weight, torch.tensor(counts))
    group = torch.repeat_interleave(torch.arange(4), torch.tensor(counts))
    expected = torch.einsum("nc,nfc->nf", x, weight[group])
    torch.testing.assert_close(out, expected)
    got = torch.autograd.grad(out.sum(), (x, weight))  # .sum() sends an expanded gradient back
    torch.testing.assert_close(got, torch.autograd.grad(expected.sum(), (x, weight)))


def test_reasons() -> None:
    assert why_not_grouped(torch.zeros(2, 8), torch.zeros(1, 8, 8))


@pytest.mark.gpu
@pytest.mark.parametrize("counts", [[100, 0, 56, 100], [0, 0, 256, 0]])
def test_grouped_kernel_equals_the_reference(counts: list[int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(4, 96, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    assert not why_not_grouped(x, weight)
    out = grouped_gemm(x, weight, torch.tensor(counts, device="cuda"))
    group = torch.repeat_interleave(torch.arange(4), torch.tensor(counts)).cuda()
    expected = torch.einsum("nc,nfc->nf", x.float(), weight.float()[group])
    torch.testing.assert_close(out.float(), expected, atol=0.2, rtol=2e-2)
    got = torch.autograd.grad(out.sum(), (x, weight))
    wanted = torch.autograd.grad(expected.sum(), (x, weight))
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine.float(), theirs.float(), atol=0.5, rtol=3e-2)
