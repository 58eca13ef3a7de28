"""Embedding, head and loss of a vocabulary whose rows are cut over tensor-parallel ranks.

Rows are dealt out as evenly as can be and never padded: 67 rows over 2 ranks are 34 and 33.

Dims: B sequences, T tokens, N = B * T, n tokens of a slice, C hidden, V rows of the whole vocabulary, R rows of this
rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.kernels.cross_entropy import IGNORE_INDEX, ChunkedHeadLoss, HeadLoss, PlainHeadLoss, chunked_loss
from paceline.kernels.fp8 import Cut
from paceline.kernels.fp8_head import Fp8Head
from paceline.kernels.log_probs import LabelLogProbs, compiled_parts, logit_gradient, partial_statistics
from paceline.kernels.precision import at_least_fp32
from paceline.parallel.collectives import Axis, all_gather
from paceline.parallel.linear_fp8 import WidestOver
from paceline.parallel.regions import gather_replicated


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows ``[start, stop)`` of ``whole`` that are this rank's; the ranks of ``axis`` share them all."""

    axis: Axis
    start: int
    stop: int
    sizes: tuple[int, ...]
    """Rows of each rank, in order."""

    def local(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Row numbers within this rank's part, 0 for those of others, and which of them are this rank's."""
        is_own = (ids >= self.start) & (ids < self.stop)
        return torch.where(is_own, ids - self.start, 0), is_own

    def join(self, own_2n: Tensor) -> tuple[Tensor, Tensor]:
        """Logsumexp over the whole vocabulary, and the label's logit, from each rank's `partial_statistics`."""
        all_2n = own_2n.new_empty(self.axis.size * 2, own_2n.shape[1])
        all_gather(all_2n, own_2n, self.axis, "tp/loss/all_gather")
        lse_rn, target_rn = all_2n.unflatten(0, (self.axis.size, 2)).unbind(1)
        return lse_rn.logsumexp(0), target_rn.sum(0)


def look_up(tokens_BT: Tensor, weight_RC: Tensor, rows: Rows) -> Tensor:
    """[B, T, C]: rows of tokens that this rank has, zeros for others; the sum over ranks is the plain look-up."""
    ids_BT, is_own_BT = rows.local(tokens_BT)
    return F.embedding(ids_BT, weight_RC).masked_fill_(~is_own_BT[..., None], 0.0)


def gather_logits(logits_BTR: Tensor, rows: Rows, name: str) -> Tensor:
    """[B, T, V] on every rank. Ranks with a row less send a column that is thrown away."""
    longest = max(rows.sizes)
    padded = F.pad(logits_BTR, (0, longest - logits_BTR.shape[-1]))
    parts = gather_replicated(padded, rows.axis, name, dim=-1).split(longest, dim=-1)
    if min(rows.sizes) == longest:
        return torch.cat(parts, dim=-1)
    return torch.cat([part[..., :size] for part, size in zip(parts, rows.sizes, strict=True)], dim=-1)


def vocabulary_head_loss(plain: HeadLoss, rows: Rows) -> HeadLoss:
    """The form of a loss of the plain model that works on a part of the vocabulary."""
    if isinstance(plain, ChunkedHeadLoss):
        fp8 = _cut_fp8(plain.fp8, rows)
        return VocabularyHeadLoss(rows=rows, chunk_tokens=plain.chunk_tokens, compiled=plain.compiled, fp8=fp8)
    assert isinstance(plain, PlainHeadLoss), f"no vocabulary-parallel form of {plain}"
    return VocabularyHeadLoss(rows=rows, chunk_tokens=0)


def vocabulary_log_probs(plain: LabelLogProbs, rows: Rows) -> LabelLogProbs:
    """The form of the plain model's log-probabilities that works on a part of the vocabulary.

    The same numbers on all ranks, bit for bit; one all-gather of two numbers a token, in the forward pass alone.
    """
    return replace(plain, columns=rows, fp8=_cut_fp8(plain.fp8, rows))


def _cut_fp8(fp8: Fp8Head | None, rows: Rows) -> Fp8Head | None:
    cut = Cut(over="outputs", widen=WidestOver(axis=rows.axis, name="tp/loss/scales"))
    return None if fp8 is None else replace(fp8, cut=cut)


@dataclass(frozen=True, kw_only=True)
class VocabularyHeadLoss:
    """Cross entropy from logits of which each rank has R columns. Is a `HeadLoss`.

    Hidden states and labels are whole on every rank, and so is the loss: the same number on all ranks, bit for bit.
    Gradients are those of this rank's rows: exact for the weight, partial (to be summed over ranks) for hidden states.
    One all-gather of two numbers a token, for each slice.
    """

    rows: Rows
    chunk_tokens: int
    """As in `ChunkedHeadLoss`; 0 = all at once, with the logits kept for the backward pass (`PlainHeadLoss`)."""
    compiled: bool = False
    """Fuse what lies between matrix products and the all-gather."""
    fp8: Fp8Head | None = None
    """Multiply in fp8, with scales compared over the ranks."""

    def __call__(
        self, hidden_NC: Tensor, weight_VC: Tensor, labels_N: Tensor, *, logit_softcap: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        num_tokens = (labels_N != IGNORE_INDEX).sum()
        if self.chunk_tokens:
            options = (self.chunk_tokens, logit_softcap, self._of_slice, self.fp8)
            return chunked_loss(hidden_NC, weight_VC, labels_N, *options), num_tokens
        logits_NR = F.linear(hidden_NC, weight_VC)
        loss_sum: Tensor = _LossOfLogits.apply(logits_NR, labels_N, logit_softcap, self._of_slice)
        return loss_sum, num_tokens

    def _of_slice(
        self, logits_nV: Tensor, labels_n: Tensor, logit_softcap: float, *, with_gradient: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """A `SliceLoss` over the columns of all ranks."""
        partial, gradient = compiled_parts() if self.compiled else (partial_statistics, logit_gradient)
        ids_n, is_own_n = self.rows.local(labels_n)
        lse_n, target_n = self.rows.join(partial(logits_nV, ids_n, is_own_n, logit_softcap))
        is_kept_n = labels_n != IGNORE_INDEX
        loss = ((lse_n - target_n) * is_kept_n).sum()
        if not with_gradient:
            return loss, None
        return loss, gradient(logits_nV, ids_n, is_own_n, is_kept_n, lse_n, logit_softcap)


class _LossOfLogits(torch.autograd.Function):
    """The sum of the losses of some logits; their gradient is made beside it, as ranks talk only once."""

    @staticmethod
    def forward(ctx: Any, logits_NR: Tensor, labels_N: Tensor, logit_softcap: float, of_slice: Any) -> Tensor:
        loss_sum, gradient_NR = of_slice(logits_NR, labels_N, logit_softcap, with_gradient=ctx.needs_input_grad[0])
        if gradient_NR is not None:
            ctx.save_for_backward(gradient_NR)
        return loss_sum

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient_NR,) = ctx.saved_tensors
        # at least fp32: beside a tensor in bf16 a GPU would round the number to bf16
        return (at_least_fp32(gradient_NR) * grad_output).to(gradient_NR.dtype), None, None, None
