"""Embedding, logits and loss of a vocabulary that is cut over ranks equal those of the whole one (case 73)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from distributed import run
from paceline.config.parallel import ParallelConfig
from paceline.costs.placement import share
from paceline.kernels.cross_entropy import IGNORE_INDEX, ChunkedHeadLoss, HeadLoss, PlainHeadLoss
from paceline.kernels.log_probs import LabelLogProbs, reference_log_probs
from paceline.parallel.mesh import ParallelMesh
from paceline.parallel.regions import sum_replicated
from paceline.parallel.vocabulary import Rows, gather_logits, look_up, vocabulary_head_loss, vocabulary_log_probs

N, C = 20, 6


def _rows(rank: int, size: int, vocab: int) -> Rows:
    axis = ParallelMesh(ParallelConfig(tp=size), world_size=size, rank=rank, device_type="cpu")["tp"]
    bounds = [share(vocab, size, index) for index in range(size)]
    sizes = tuple(stop - start for start, stop in bounds)
    return Rows(axis=axis, start=bounds[rank][0], stop=bounds[rank][1], sizes=sizes)


def _inputs(vocab: int, dtype: torch.dtype, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(N, C, generator=generator, dtype=torch.float64).to(dtype) * scale
    weight = torch.randn(vocab, C, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(vocab, (N,), generator=generator)
    labels[::5] = IGNORE_INDEX
    labels[1], labels[2] = 0, vocab - 1
    return hidden, weight, labels


def _loss_and_gradients(
    loss: HeadLoss, hidden: Tensor, weight: Tensor, labels: Tensor, softcap: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    hidden, weight = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    loss_sum, num_tokens = loss(hidden, weight, labels, logit_softcap=softcap)
    (loss_sum * 0.25).backward()
    with torch.no_grad():
        alone, _ = loss(hidden, weight, labels, logit_softcap=softcap)
    torch.testing.assert_close(alone, loss_sum.detach(), rtol=1e-12 if alone.dtype == torch.float64 else 1e-6, atol=0)
    assert hidden.grad is not None and weight.grad is not None
    return loss_sum.detach(), num_tokens, hidden.grad, weight.grad


FORMS: dict[str, HeadLoss] = {
    "plain": PlainHeadLoss(),
    "chunks of 7": ChunkedHeadLoss(chunk_tokens=7),
    "one chunk": ChunkedHeadLoss(chunk_tokens=1000),
}


def _losses(rank: int, size: int, vocab: int, dtype: torch.dtype, softcap: float, scale: float, forms: Any) -> Any:
    """For each form: this rank's loss, and relative errors of loss, gradient of hidden states and of the weight."""
    rows = _rows(rank, size, vocab)
    hidden, weight, labels = _inputs(vocab, dtype, scale)
    expected = _loss_and_gradients(PlainHeadLoss(), hidden, weight, labels, softcap)
    found = {}
    for name, form in forms.items():
        own = weight[rows.start : rows.stop]
        loss, num, grad_hidden, grad_own = _loss_and_gradients(
            vocabulary_head_loss(form, rows), hidden, own, labels, softcap
        )
        assert num == expected[1] and loss.dtype == expected[0].dtype
        grad_hidden = sum_replicated(grad_hidden.float() if dtype == torch.bfloat16 else grad_hidden, rows.axis, "sum")
        pairs = ((loss, expected[0]), (grad_hidden, expected[2]), (grad_own, expected[3][rows.start : rows.stop]))
        found[name] = (float(loss), [float((a - b).abs().max() / b.abs().max()) for a, b in pairs])
    return found


def _check(size: int, *args: Any, tolerance: float, loss_tolerance: float, forms: Any = FORMS) -> None:
    results = run(_losses, size, *args, forms)
    for found in results:
        for name, (loss, (of_loss, *of_gradients)) in found.items():
            assert loss == results[0][name][0], f"{name}: ranks have different losses"
            assert of_loss <= loss_tolerance, (name, of_loss)
            assert max(of_gradients) <= tolerance, (name, of_gradients)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_float64_is_exact(size: int, softcap: float) -> None:
    _check(size, 67, torch.float64, softcap, 1.0, tolerance=1e-12, loss_tolerance=1e-14)


def test_logits_of_thousands_stay_finite_and_exact() -> None:
    _check(2, 67, torch.float64, 0.0, 1e4, tolerance=1e-9, loss_tolerance=1e-12)


def test_fp32() -> None:
    _check(2, 66, torch.float32, 0.0, 1.0, tolerance=1e-5, loss_tolerance=1e-6)


def test_bf16_loses_no_more_than_its_rounding() -> None:
    """Logits, and gradients of logits, are bf16 (8 bits) as in one process; sums and exponentials are fp32."""
    _check(2, 67, torch.bfloat16, 0.0, 1.0, tolerance=2**-6, loss_tolerance=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_compiled(softcap: float) -> None:
    forms = {"compiled": ChunkedHeadLoss(chunk_tokens=10, compiled=True)}
    _check(2, 67, torch.float64, softcap, 1.0, tolerance=1e-12, loss_tolerance=1e-14, forms=forms)


def _nothing_to_predict(rank: int, size: int) -> None:
    rows = _rows(rank, size, 67)
    hidden, weight, labels = _inputs(67, torch.float64)
    for form in FORMS.values():
        loss, num, *gradients = _loss_and_gradients(
            vocabulary_head_loss(form, rows),
            hidden,
            weight[rows.start : rows.stop],
            torch.full_like(labels, IGNORE_INDEX),
            0.0,
        )
        assert float(loss) == 0.0 and int(num) == 0
        assert not any(gradient.any() for gradient in gradients)


def test_nothing_to_predict_gives_zero() -> None:
    run(_nothing_to_predict, 2)


def _largest_tensor(rank: int, size: int) -> int:
    """Elements of the largest tensor that forward and backward make."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else (out,):
                if isinstance(tensor, Tensor):
                    self.numel = max(self.numel, tensor.numel())
            return out

    rows = _rows(rank, size, 67)
    hidden, weight, labels = _inputs(67, torch.float32)
    with Largest() as largest:
        loss = vocabulary_head_loss(ChunkedHeadLoss(chunk_tokens=7), rows)
        _loss_and_gradients(loss, hidden, weight[rows.start : rows.stop], labels, 0.0)
    return largest.numel


def test_logits_never_exist_whole() -> None:
    assert run(_largest_tensor, 2) == [7 * 34, 7 * 33]


def _ends(rank: int, size: int, vocab: int) -> None:
    rows = _rows(rank, size, vocab)
    _, weight, _ = _inputs(vocab, torch.float64)
    own = weight[rows.start : rows.stop].clone().requires_grad_()
    tokens = torch.randint(vocab, (2, 8), generator=torch.Generator().manual_seed(1))
    tokens[0, 0], tokens[0, 1] = 0, vocab - 1
    embedded = sum_replicated(look_up(tokens, own, rows), rows.axis, "sum")
    torch.testing.assert_close(embedded, F.embedding(tokens, weight), rtol=0, atol=0)

    logits = torch.randn(2, 3, vocab, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    part = logits[..., rows.start : rows.stop].clone().requires_grad_()
    whole = gather_logits(part, rows, "logits")
    torch.testing.assert_close(whole, logits, rtol=0, atol=0)
    # every rank goes on alike: the gradient is that of its columns, not a sum over ranks
    whole.backward(logits * 2)
    torch.testing.assert_close(part.grad, part.detach() * 2, rtol=0, atol=0)


@pytest.mark.parametrize(("size", "vocab"), [(2, 67), (4, 67), (4, 64)])
def test_look_up_and_logits(size: int, vocab: int) -> None:
    run(_ends, size, vocab)


def _log_probs(rank: int, size: int, vocab: int, softcap: float) -> list[float]:
    """Relative errors of this rank's log-probabilities and both gradients; float64."""
    rows, (hidden, weight, labels) = _rows(rank, size, vocab), _inputs(vocab, torch.float64)
    seed = torch.randn(N, generator=torch.Generator().manual_seed(5), dtype=torch.float64)

    def run_form(form: Any, part: Tensor) -> list[Tensor]:
        inputs = hidden.detach().requires_grad_(), part.detach().requires_grad_()
        found, count = form(*inputs, labels, logit_softcap=softcap)
        assert int(count) == int((labels != IGNORE_INDEX).sum())
        return [found.detach(), *torch.autograd.grad(found, inputs, seed)]

    expected = run_form(reference_log_probs, weight)
    own = slice(rows.start, rows.stop)
    found = run_form(vocabulary_log_probs(LabelLogProbs(chunk_tokens=7), rows), weight[own])
    found[1] = sum_replicated(found[1], rows.axis, "sum")
    pairs = zip(found, (expected[0], expected[1], expected[2][own]), strict=True)
    return [float((ours - plain).abs().max() / plain.abs().max()) for ours, plain in pairs]


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_log_probabilities_over_ranks(softcap: float) -> None:
    for size in (2, 4):
        for errors in run(_log_probs, size, 67, softcap):
            assert max(errors) < 1e-12, errors
