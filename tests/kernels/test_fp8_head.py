"""Head and loss in fp8 are those of operands rounded to fp8, slice by slice."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.kernels.cross_entropy import (
    IGNORE_INDEX,
    ChunkedHeadLoss,
    HeadProducts,
    PlainHeadProducts,
    soft_capped,
)
from paceline.kernels.fp8 import fp8_linear_reference
from paceline.kernels.fp8_cast import CastKernel, Scaling
from paceline.kernels.fp8_head import Fp8Head
from paceline.parallel.fp8_device import multiplies

TOKENS, WIDTH, VOCAB = 50, 32, 80


def inputs(device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).to(device, dtype).requires_grad_()
    weight = (torch.randn(VOCAB, WIDTH, generator=generator) * 0.5).to(device, dtype).requires_grad_()
    labels = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    labels[::7] = IGNORE_INDEX
    return hidden, weight, labels.to(device)


def twin(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int, scaling: Scaling, softcap: float) -> Tensor:
    """Plain operations on a slice after the other."""
    total = torch.zeros((), device=hidden.device)
    for part, some in zip(hidden.split(chunk), labels.split(chunk), strict=True):
        (logits,) = fp8_linear_reference(part, [weight], [None], scaling=scaling)
        capped = soft_capped(logits.float(), softcap)
        total = total + F.cross_entropy(capped, some, ignore_index=IGNORE_INDEX, reduction="sum")
    return total


def skip_without(device: str, scaling: Scaling) -> None:
    if device == "cuda" and not (torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)):
        pytest.skip("needs a GPU with fp8")
    if not multiplies(torch.device(device), scaling):
        pytest.skip(f"torch {torch.__version__} has no such products on {device}")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("chunk", [16, 21, 1000])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize(
    ("scaling", "kernel"), [("tensorwise", "torch"), ("tensorwise", "triton"), ("rowwise", "torch")]
)
def test_it_is_its_twin(device: str, chunk: int, softcap: float, scaling: Scaling, kernel: CastKernel) -> None:
    """On a CPU in fp32, to the order of sums: gradients of logits that lie between two fp8 numbers may round either
    way. GPUs write bf16."""
    skip_without(device, scaling)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    hidden, weight, labels = inputs(device, dtype)
    expected = twin(hidden, weight, labels, chunk, scaling, softcap)
    expected.backward()
    found_hidden, found_weight, _ = inputs(device, dtype)
    loss = ChunkedHeadLoss(chunk_tokens=chunk, fp8=Fp8Head(scaling=scaling, kernel=kernel))
    found, count = loss(found_hidden, found_weight, labels, logit_softcap=softcap)
    found.backward()
    assert int(count) == 50 - 8
    near = 1e-6 if device == "cpu" else 1e-2
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=near)
    for one, other in ((found_hidden, hidden), (found_weight, weight)):
        assert one.grad is not None and other.grad is not None
        assert float((one.grad - other.grad).float().norm() / other.grad.float().norm()) < (
            2e-3 if device == "cpu" else 3e-2
        )


def test_it_is_near_the_loss_without_fp8() -> None:
    hidden, weight, labels = inputs(dtype=torch.bfloat16)
    plain = ChunkedHeadLoss(chunk_tokens=16)
    losses = []
    for loss in (plain, replace(plain, fp8=Fp8Head(scaling="tensorwise"))):
        hidden.grad = weight.grad = None
        total, _ = loss(hidden, weight, labels)
        total.backward()
        assert hidden.grad is not None and weight.grad is not None
        losses.append((total.detach(), hidden.grad, weight.grad))
    (before, *gradients), (after, *found) = losses
    assert 0 < abs(float(after / before - 1)) < 0.02
    for one, other in zip(found, gradients, strict=True):
        assert 0.01 < float((one - other).norm() / other.norm()) < 0.15


def test_only_the_gradients_that_are_wanted() -> None:
    hidden, weight, labels = inputs()
    loss = ChunkedHeadLoss(chunk_tokens=16, fp8=Fp8Head(scaling="tensorwise"))
    whole, _ = loss(hidden, weight, labels)
    whole.backward()
    for frozen in ("hidden", "weight"):
        other_hidden, other_weight, _ = inputs()
        (other_hidden if frozen == "hidden" else other_weight).requires_grad_(False)
        total, _ = loss(other_hidden, other_weight, labels)
        total.backward()
        left, expected = (other_weight, weight) if frozen == "hidden" else (other_hidden, hidden)
        assert left.grad is not None and expected.grad is not None and torch.equal(left.grad, expected.grad)
    with torch.no_grad():
        assert torch.equal(loss(hidden, weight, labels)[0], whole)


@pytest.mark.parametrize("fp8", [True, False])
def test_the_first_slice_writes_what_it_would_add_to_zeros(fp8: bool) -> None:
    """And what was there before is gone, nan too."""
    generator = torch.Generator().manual_seed(5)
    hidden, weight, grad = (
        torch.randn(size, generator=generator).bfloat16() for size in ((48, 32), (64, 32), (48, 64))
    )

    def gradient(start: float, *, first: bool) -> Tensor:
        options = Fp8Head(scaling="tensorwise")
        products: HeadProducts = PlainHeadProducts(weight)
        if fp8:
            products = options.products(weight, wants_hidden=False, wants_weight=True)
        products.logits(hidden)
        found = torch.full_like(weight, start)
        products.gradients(grad, hidden, None, found, first=first)
        return found

    assert torch.equal(gradient(float("nan"), first=True), gradient(0.0, first=False))
    assert not torch.equal(gradient(1.0, first=False), gradient(0.0, first=False))
