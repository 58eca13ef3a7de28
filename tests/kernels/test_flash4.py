"""FlashAttention-4 where it is installed, and a reason where it cannot be taken."""

from __future__ import annotations

import logging
from itertools import pairwise
from typing import Any

import pytest
import torch

from paceline.config.model import ModelConfig
from paceline.data.boundaries import document_boundaries
from paceline.kernels import attention
from paceline.kernels.attention import (
    AttentionMask,
    RowDocuments,
    attention_core,
    auto_attention,
    flash4_attention,
    mask_of,
    reference_attention,
)
from paceline.kernels.flash4 import why_no_flash4_here, why_not_flash4
from paceline.models.transformer import Transformer


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


def _by_boundaries(
    q_BTHD: torch.Tensor,
    k_BTGD: torch.Tensor,
    v_BTGD: torch.Tensor,
    *,
    causal: bool,
    scale: float,
    boundaries: torch.Tensor | None = None,
) -> torch.Tensor:
    """What the package does with them: every document by itself."""
    assert boundaries is not None and causal
    q, k, v = (part.flatten(0, 1)[None] for part in (q_BTHD, k_BTGD, v_BTGD))
    parts = [
        reference_attention(q[:, first:end], k[:, first:end], v[:, first:end], AttentionMask(), scale=scale)
        for first, end in pairwise(boundaries.tolist())
        if first < end
    ]
    return torch.cat(parts, dim=1).view(q_BTHD.shape)


def _documents(rows: int, tokens: int) -> RowDocuments:
    numbers = torch.stack([(torch.rand(tokens) < 0.1).cumsum(0) for _ in range(rows)])
    return RowDocuments(numbers, document_boundaries(numbers))


def test_boundaries_say_what_the_numbers_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "flash4", _by_boundaries)
    torch.manual_seed(0)
    documents = _documents(3, 64)
    assert documents.boundaries is not None
    q, k, v = (torch.randn(3, 64, heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2))
    found = flash4_attention(q, k, v, mask_of(documents), scale=0.125)
    expected = reference_attention(q, k, v, mask_of(documents), scale=0.125)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_a_model_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the batch to the kernel, with windows and parts of rows as `auto` has them."""
    monkeypatch.setattr(attention, "flash4", _by_boundaries)
    monkeypatch.setattr(attention, "why_not_flash4", lambda *_: "")
    torch.manual_seed(0)
    config = ModelConfig(num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, ffn_size=48, vocab_size=64)
    model = Transformer(config, dtype=torch.float64)
    model.init_weights(0)
    tokens, documents = torch.randint(64, (2, 32)), _documents(2, 32)
    expected = model(tokens, documents=documents.numbers).logits
    calls = []

    def counted(*inputs: torch.Tensor, **options: Any) -> torch.Tensor:
        calls.append(options["boundaries"])
        return _by_boundaries(*inputs, **options)

    monkeypatch.setattr(attention, "flash4", counted)
    for block in model.blocks.values():
        block.attention.core = flash4_attention
    found = model(tokens, documents=documents.numbers, boundaries=documents.boundaries).logits
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert [each is documents.boundaries for each in calls] == [True, True]
    model(tokens, documents=documents.numbers)
    assert len(calls) == 2, "without boundaries it is not called"


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(8, 2, 128), (4, 4, 64)])
@pytest.mark.parametrize("tokens", [257, 1024])
def test_within_documents_it_equals_the_reference(tokens: int, heads: int, kv_heads: int, width: int) -> None:
    if reason := why_no_flash4_here():
        pytest.skip(reason)
    torch.manual_seed(0)
    documents = _documents(2, tokens)
    assert documents.boundaries is not None
    mask = mask_of(RowDocuments(documents.numbers.cuda(), documents.boundaries.cuda()))
    leaves = [
        torch.randn(2, tokens, count, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for count in (heads, kv_heads, kv_heads)
    ]
    wide = [leaf.detach().float().requires_grad_() for leaf in leaves]
    gradient = torch.randn(2, tokens, heads, width, device="cuda", dtype=torch.bfloat16)
    out = attention_core("flash4")(*leaves, mask, scale=width**-0.5)
    expected = reference_attention(*wide, mask, scale=width**-0.5)
    pairs = zip(
        (out, *torch.autograd.grad(out, leaves, gradient)),
        (expected, *torch.autograd.grad(expected, wide, gradient.float())),
        strict=True,
    )
    for found, truth in pairs:
        assert float((found.float() - truth).norm() / truth.norm()) < 1e-2
