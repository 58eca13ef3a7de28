"""Log-probabilities of labels: equal to torch's, in value and in both gradients, and no logits kept."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.kernels.cross_entropy import IGNORE_INDEX
from paceline.kernels.log_probs import LabelLogProbs, reference_log_probs

N, C, V = 50, 24, 77


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, labels, and the gradient that comes back for each token."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(N, C, generator=generator).to(dtype)
    weight = (torch.randn(V, C, generator=generator) * 0.5).to(dtype)
    labels = torch.randint(0, V, (N,), generator=generator)
    labels[::7] = IGNORE_INDEX
    return hidden, weight, labels, torch.randn(N, generator=generator).to(torch.promote_types(dtype, torch.float32))


def run(log_probs: object, softcap: float, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    hidden, weight, labels, seed = inputs(dtype)
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    found, count = log_probs(hidden, weight, labels, logit_softcap=softcap)  # type: ignore[operator]
    found.backward(seed)
    assert hidden.grad is not None and weight.grad is not None
    return [found.detach(), count, hidden.grad, weight.grad]


@pytest.mark.parametrize("chunk", [0, 1, 7, 50, 1000])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_equals_the_reference(chunk: int, softcap: float) -> None:
    expected = run(reference_log_probs, softcap, torch.float64)
    found = run(LabelLogProbs(chunk_tokens=chunk), softcap, torch.float64)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    assert int(found[1]) == N - 8 and bool((found[0][::7] == 0).all())
    assert found[0].dtype == torch.float64


def test_bf16_is_as_far_from_the_truth_as_torch_itself() -> None:
    truth = run(reference_log_probs, 0.0, torch.float64)
    found, torchs = (run(each, 0.0, torch.bfloat16) for each in (LabelLogProbs(chunk_tokens=16), reference_log_probs))
    assert found[0].dtype == torch.float32 and found[2].dtype == torch.bfloat16
    for ours, theirs, exact in zip(found[::2], torchs[::2], truth[::2], strict=True):
        error, usual = ((each.double() - exact).norm() for each in (ours, theirs))
        # slices round the sum of the weight's gradient once each
        assert float(error) < 1.5 * float(usual) + 1e-6


def test_a_frozen_weight_gets_no_gradient_and_no_product() -> None:
    hidden, weight, labels, seed = inputs()
    found, _ = LabelLogProbs(chunk_tokens=16)(hidden.requires_grad_(), weight, labels)
    found.backward(seed)
    assert weight.grad is None and hidden.grad is not None


def test_nothing_as_large_as_the_logits_is_kept() -> None:
    hidden, weight, labels, _ = inputs()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        LabelLogProbs(chunk_tokens=16)(hidden.requires_grad_(), weight.requires_grad_(), labels)
    assert {tuple(t.shape) for t in kept} <= {(N, C), (V, C), (N,)}


def test_a_wrong_gradient_would_be_noticed() -> None:
    """The gradient of a sum of log-probabilities is minus that of the cross entropy."""
    hidden, weight, labels, _ = inputs()
    hidden.requires_grad_()
    (ours,) = torch.autograd.grad(LabelLogProbs(chunk_tokens=9)(hidden, weight, labels)[0].sum(), hidden)
    loss = F.cross_entropy(hidden @ weight.T, labels, ignore_index=IGNORE_INDEX, reduction="sum")
    (theirs,) = torch.autograd.grad(loss, hidden)
    torch.testing.assert_close(ours, -theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_compiled_equals_plain(softcap: float) -> None:
    plain, compiled = (run(LabelLogProbs(chunk_tokens=16, compiled=on), softcap) for on in (False, True))
    torch.testing.assert_close(compiled, plain, atol=1e-5, rtol=1e-5)
