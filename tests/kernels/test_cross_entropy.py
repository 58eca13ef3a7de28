"""The chunked head and loss equals the plain one, in value and in both gradients (case 30)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.kernels.cross_entropy import (
    IGNORE_INDEX,
    ChunkedHeadLoss,
    HeadLoss,
    PlainHeadLoss,
    fusible_slice_loss,
    head_logits,
    slice_loss,
)


def inputs(tokens: int = 50, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(tokens, 24, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(77, 24, generator=generator) * 0.5).to(dtype).requires_grad_()
    labels = torch.randint(0, 77, (tokens,), generator=generator)
    labels[::7] = IGNORE_INDEX
    return hidden, weight, labels


def run(loss: HeadLoss, hidden: Tensor, weight: Tensor, labels: Tensor, factor: float, softcap: float) -> list[Tensor]:
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    loss_sum, count = loss(hidden, weight, labels, logit_softcap=softcap)
    (loss_sum * factor).backward()
    assert hidden.grad is not None and weight.grad is not None
    return [loss_sum.detach(), count, hidden.grad, weight.grad]


@pytest.mark.parametrize("chunk", [1, 7, 16, 50, 1000])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("factor", [1.0, -0.25, 1e-3])
def test_chunked_equals_plain(chunk: int, softcap: float, factor: float) -> None:
    plain = run(PlainHeadLoss(), *inputs(), factor, softcap)
    chunked = run(ChunkedHeadLoss(chunk_tokens=chunk), *inputs(), factor, softcap)
    torch.testing.assert_close(chunked, plain, atol=1e-5 * abs(factor), rtol=1e-5)
    assert int(plain[1]) == 50 - 8


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fusible_form_equals_the_plain_one(softcap: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = (torch.randn(33, 77, generator=generator) * 4).to(dtype)
    _, _, labels = inputs(33)
    plain, fusible = (form(logits.clone(), labels, softcap) for form in (slice_loss, fusible_slice_loss))
    torch.testing.assert_close(fusible, plain, atol=1e-6, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_compiled_equals_plain(softcap: float) -> None:
    """Inductor on the CPU; 50 tokens leave a shorter last slice."""
    plain = run(PlainHeadLoss(), *inputs(), 0.5, softcap)
    compiled = run(ChunkedHeadLoss(chunk_tokens=16, compiled=True), *inputs(), 0.5, softcap)
    torch.testing.assert_close(compiled, plain, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("softcap", [0.0, 30.0])
def test_compiled_equals_plain_on_a_gpu(softcap: float) -> None:
    """bf16 hidden states; the plain twin reads the same bf16 logits."""
    generator = torch.Generator(device="cuda").manual_seed(1)
    hidden, weight = (
        torch.randn(rows, 256, device="cuda", generator=generator).to(torch.bfloat16) for rows in (1000, 5003)
    )
    labels = torch.randint(0, 5003, (1000,), device="cuda", generator=generator)
    labels[::9] = IGNORE_INDEX
    plain = run(ChunkedHeadLoss(chunk_tokens=300), hidden, weight * 0.1, labels, 1.0, softcap)
    compiled = run(ChunkedHeadLoss(chunk_tokens=300, compiled=True), hidden, weight * 0.1, labels, 1.0, softcap)
    torch.testing.assert_close(compiled[:2], plain[:2], atol=0, rtol=1e-5)
    for ours, reference in zip(compiled[2:], plain[2:], strict=True):
        # a rounding of bf16 may fall the other way
        assert (ours - reference).float().norm() <= 1e-3 * reference.float().norm()


def test_plain_is_torchs() -> None:
    hidden, weight, labels = inputs()
    loss_sum, _ = PlainHeadLoss()(hidden, weight, labels)
    torch.testing.assert_close(loss_sum, F.cross_entropy(hidden @ weight.T, labels, reduction="sum"))


@pytest.mark.parametrize("loss", [PlainHeadLoss(), ChunkedHeadLoss(chunk_tokens=8)])
def test_nothing_to_predict_gives_zero(loss: HeadLoss) -> None:
    hidden, weight, labels = inputs()
    loss_sum, count, *gradients = run(loss, hidden, weight, torch.full_like(labels, IGNORE_INDEX), 1.0, 0.0)
    assert float(loss_sum) == 0.0 and int(count) == 0
    assert all(not gradient.any() for gradient in gradients)


def test_only_the_gradients_that_are_wanted() -> None:
    hidden, weight, labels = inputs()
    loss = ChunkedHeadLoss(chunk_tokens=16)
    expected = run(loss, hidden, weight, labels, 1.0, 0.0)
    loss(hidden, weight.detach(), labels)[0].backward()
    torch.testing.assert_close(hidden.grad, expected[2])
    assert weight.grad is None
    with torch.no_grad():
        torch.testing.assert_close(loss(hidden, weight, labels)[0], expected[0])


def test_bf16_gradients_are_near_fp32() -> None:
    """bf16 keeps 8 bits: 1 % of the largest gradient after 7 slices."""
    exact = run(
        PlainHeadLoss(), *(x.float() if x.is_floating_point() else x for x in inputs(dtype=torch.bfloat16)), 1, 0
    )
    low = run(ChunkedHeadLoss(chunk_tokens=8), *inputs(dtype=torch.bfloat16), 1.0, 0.0)
    assert low[0].dtype == torch.float32 and low[2].dtype == low[3].dtype == torch.bfloat16
    torch.testing.assert_close(low[0], exact[0], rtol=1e-2, atol=0)
    for got, want in zip(low[2:], exact[2:], strict=True):
        assert (got.float() - want).abs().max() < 0.02 * want.abs().max()


def test_large_logits_stay_finite() -> None:
    hidden, weight, labels = inputs()
    result = run(ChunkedHeadLoss(chunk_tokens=16), hidden * 1e4, weight, labels, 1.0, 0.0)
    assert all(torch.isfinite(value).all() for value in result)


def test_softcapped_logits() -> None:
    hidden, weight, _ = inputs()
    torch.testing.assert_close(
        head_logits(hidden, weight, logit_softcap=2.0), 2.0 * torch.tanh(hidden @ weight.T / 2.0)
    )


@pytest.mark.gpu
def test_peak_memory_is_lower_by_half_of_the_logits() -> None:
    tokens, hidden_size, vocab = 8192, 512, 64000
    logits_bytes = 4 * tokens * vocab
    peaks = []
    for loss in (PlainHeadLoss(), ChunkedHeadLoss(chunk_tokens=1024)):
        hidden = torch.randn(tokens, hidden_size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(vocab, hidden_size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        labels = torch.randint(0, vocab, (tokens,), device="cuda")
        torch.cuda.reset_peak_memory_stats()
        loss(hidden, weight, labels)[0].backward()
        peaks.append(torch.cuda.max_memory_allocated())
    assert peaks[0] - peaks[1] > logits_bytes / 2
