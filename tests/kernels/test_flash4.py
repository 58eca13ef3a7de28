"""FlashAttention-4 where it is installed, and a reason where it cannot be taken."""

from __future__ import annotations

import logging

import pytest
import torch

from paceline.kernels.attention import AttentionMask, attention_core, auto_attention, reference_attention
from paceline.kernels.flash4 import why_no_flash4_here, why_not_flash4


def _inputs(dtype: torch.dtype = torch.bfloat16, width: int = 64, keys: int = 8) -> tuple[torch.Tensor, ...]:
    return (
        torch.randn(1, 8, 4, width, dtype=dtype),
        torch.randn(1, keys, 2, width, dtype=dtype),
        torch.randn(1, keys, 2, width, dtype=dtype),
    )


def test_what_it_takes() -> None:
    assert why_not_flash4(*_inputs(), 0.0) == ""
    assert "dropout" in why_not_flash4(*_inputs(), 0.1)
    assert "bf16" in why_not_flash4(*_inputs(torch.float32), 0.0)
    assert "64, 96, 128 wide" in why_not_flash4(*_inputs(width=80), 0.0)
    assert "as many keys" in why_not_flash4(*_inputs(keys=9), 0.0)
    q, k, v = _inputs()
    assert "wide" in why_not_flash4(q, k, v[..., :32], 0.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
def test_without_a_gpu_it_is_auto_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    assert why_no_flash4_here() == "there is no GPU"
    with caplog.at_level(logging.INFO):
        core = attention_core("flash4")
    assert core is auto_attention
    assert all("there is no GPU" in record.getMessage() for record in caplog.records)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(8, 2, 128), (4, 4, 64), (8, 8, 128), (6, 2, 96)])
@pytest.mark.parametrize("tokens", [257, 1024])
def test_equals_the_reference(tokens: int, heads: int, kv_heads: int, width: int) -> None:
    if reason := why_no_flash4_here():
        pytest.skip(reason)
    torch.manual_seed(0)
    leaves = [
        torch.randn(2, tokens, count, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for count in (heads, kv_heads, kv_heads)
    ]
    wide = [leaf.detach().float().requires_grad_() for leaf in leaves]
    gradient = torch.randn(2, tokens, heads, width, device="cuda", dtype=torch.bfloat16)
    out = attention_core("flash4")(*leaves, AttentionMask(), scale=width**-0.5)
    expected = reference_attention(*wide, AttentionMask(), scale=width**-0.5)
    pairs = zip(
        (out, *torch.autograd.grad(out, leaves, gradient)),
        (expected, *torch.autograd.grad(expected, wide, gradient.float())),
        strict=True,
    )
    for found, truth in pairs:
        assert float((found.float() - truth).norm() / truth.norm()) < 1e-2
