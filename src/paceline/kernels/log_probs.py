"""The log-probability of each label, through the head: what losses over whole answers are made of.

As `cross_entropy.py`, but one number for each token, whose gradient is known only later: so nothing but the logsumexp
of a token is kept, and the backward pass computes the logits of a slice again. One more product with the head's weight,
a third of what the head costs, instead of 2 N V bytes.

Dims: N tokens, n tokens of a slice, C hidden, V vocabulary, R rows of it that are here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.kernels.cross_entropy import (
    IGNORE_INDEX,
    HeadProducts,
    PlainHeadProducts,
    head_logits,
    soft_capped,
    unwritten_gradient,
)
from paceline.kernels.fp8_head import Fp8Head
from paceline.kernels.precision import at_least_fp32, wide_dtype


class Columns(Protocol):
    """Which of the vocabulary's logits are here, and how those of other ranks come in."""

    def local(self, labels_n: Tensor) -> tuple[Tensor, Tensor]:
        """Column numbers among those that are here, 0 for others, and which are here."""
        ...

    def join(self, own_2n: Tensor) -> tuple[Tensor, Tensor]:
        """Logsumexp over the whole vocabulary, and the label's logit, from `partial_statistics` of what is here."""
        ...


@dataclass(frozen=True)
class AllColumns:
    """The whole vocabulary is here."""

    def local(self, labels_n: Tensor) -> tuple[Tensor, Tensor]:
        return labels_n.clamp_min(0), labels_n >= 0

    def join(self, own_2n: Tensor) -> tuple[Tensor, Tensor]:
        lse_n, target_n = own_2n.unbind(0)
        return lse_n, target_n


@dataclass(frozen=True, kw_only=True)
class LabelLogProbs:
    """The seam beside `HeadLoss`, called the same way; tensor parallel gives it other `columns`.

    Gradients are those of the rows that are here: exact for the weight, partial for hidden states.
    """

    chunk_tokens: int = 2048
    """Tokens whose logits are there at a time; 0 = all."""
    compiled: bool = False
    """Fuse what lies between the matrix products with torch.compile."""
    fp8: Fp8Head | None = None
    """Multiply in fp8."""
    columns: Columns = AllColumns()

    def __call__(
        self, hidden_NC: Tensor, weight_VC: Tensor, labels_N: Tensor, *, logit_softcap: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """[N], at least fp32, 0 where there is no label; and the number of labels. Of the weight, the rows here."""
        log_probs_N: Tensor = _LabelLogProbs.apply(hidden_NC, weight_VC, labels_N, self, logit_softcap)
        return log_probs_N, (labels_N != IGNORE_INDEX).sum()

    @property
    def parts(self) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
        """What is computed of a slice's logits: on the way forward, and back."""
        return compiled_parts() if self.compiled else (partial_statistics, logit_gradient)

    def products(self, weight_RC: Tensor, *, wants_hidden: bool, wants_weight: bool) -> HeadProducts:
        if self.fp8 is None:
            return PlainHeadProducts(weight_RC)
        return self.fp8.products(weight_RC, wants_hidden=wants_hidden, wants_weight=wants_weight)

    def slices(self, num_tokens: int) -> list[slice]:
        step = self.chunk_tokens or max(1, num_tokens)
        return [slice(start, start + step) for start in range(0, num_tokens, step)]


def reference_log_probs(
    hidden_NC: Tensor, weight_VC: Tensor, labels_N: Tensor, *, logit_softcap: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The same, written out: all logits at once, and torch's own gradients."""
    logits_NV = at_least_fp32(head_logits(hidden_NC, weight_VC, logit_softcap=logit_softcap))
    log_probs_N = -F.cross_entropy(logits_NV, labels_N, ignore_index=IGNORE_INDEX, reduction="none")
    return log_probs_N, (labels_N != IGNORE_INDEX).sum()


class _LabelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NC: Tensor, weight_RC: Tensor, labels_N: Tensor, how: LabelLogProbs, logit_softcap: float
    ) -> Tensor:
        statistics, _ = how.parts
        products = how.products(weight_RC, wants_hidden=False, wants_weight=False)
        lse_N = hidden_NC.new_empty(labels_N.shape, dtype=wide_dtype(hidden_NC.dtype))
        target_N = torch.empty_like(lse_N)
        for part in how.slices(len(labels_N)):
            own_2n = statistics(products.logits(hidden_NC[part]), *how.columns.local(labels_N[part]), logit_softcap)
            lse_N[part], target_N[part] = how.columns.join(own_2n)
        ctx.save_for_backward(hidden_NC, weight_RC, labels_N, lse_N)
        ctx.how, ctx.logit_softcap = how, logit_softcap
        return (target_N - lse_N) * (labels_N != IGNORE_INDEX)

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NC, weight_RC, labels_N, lse_N = ctx.saved_tensors
        how: LabelLogProbs = ctx.how
        _, gradient = how.parts
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        products = how.products(weight_RC, wants_hidden=wants_hidden, wants_weight=wants_weight)
        grad_hidden_NC = torch.empty_like(hidden_NC) if wants_hidden else None
        grad_weight_RC = unwritten_gradient(weight_RC, len(labels_N)) if wants_weight else None
        # the gradient of a loss, which is less than nothing, of a log-probability
        factor_N = -grad_N * (labels_N != IGNORE_INDEX)
        for part in how.slices(len(labels_N)):
            ids_n, is_own_n = how.columns.local(labels_N[part])
            logits_nR = products.logits(hidden_NC[part])
            grad_nR = gradient(logits_nR, ids_n, is_own_n, factor_N[part], lse_N[part], ctx.logit_softcap)
            grad_nC = None if grad_hidden_NC is None else grad_hidden_NC[part]
            products.gradients(grad_nR, hidden_NC[part], grad_nC, grad_weight_RC, first=part.start == 0)
        return grad_hidden_NC, grad_weight_RC, None, None, None


def partial_statistics(logits_nR: Tensor, ids_n: Tensor, is_own_n: Tensor, logit_softcap: float) -> Tensor:
    """[2, n], at least fp32: logsumexp over the columns here, and the label's logit where it is among them, or 0."""
    capped_nR = soft_capped(at_least_fp32(logits_nR), logit_softcap)
    target_n = capped_nR.gather(1, ids_n[:, None])[:, 0]
    return torch.stack((capped_nR.logsumexp(-1), torch.where(is_own_n, target_n, 0.0)))


def logit_gradient(
    logits_nR: Tensor, ids_n: Tensor, is_own_n: Tensor, factor_n: Tensor, lse_n: Tensor, logit_softcap: float
) -> Tensor:
    """[n, R] in the dtype of the logits: probabilities, less 1 at the label, times the token's factor (or whether it
    is kept): the gradient of the token's cross entropy.

    Written without scatters, so that a compiler makes one pass of it.
    """
    capped_nR = soft_capped(at_least_fp32(logits_nR), logit_softcap)
    columns_1R = torch.arange(logits_nR.shape[1], device=logits_nR.device)[None]
    is_label_nR = (columns_1R == ids_n[:, None]) & is_own_n[:, None]
    gradient_nR = ((capped_nR - lse_n[:, None]).exp() - is_label_nR.to(capped_nR.dtype)) * factor_n[:, None]
    if logit_softcap:
        gradient_nR = gradient_nR * (1.0 - (capped_nR / logit_softcap).square())
    return gradient_nR.to(logits_nR.dtype)


@functools.cache
def compiled_parts() -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """`partial_statistics` and `logit_gradient` through torch.compile, once for each size of slice."""
    return torch.compile(partial_statistics, dynamic=False), torch.compile(logit_gradient, dynamic=False)
