"""Output head and cross entropy: hidden states in, summed loss and number of predicted tokens out.

Dims: N tokens, C hidden, V vocabulary. Labels of IGNORE_INDEX have no loss and no gradient.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.kernels.fp8_head import Fp8Head
from paceline.kernels.precision import at_least_fp32, wide_dtype
from paceline.kernels.scaling import scale_in_place

# the same value as data.batch.IGNORE_INDEX, which lies on a higher floor; tests/models compares them
IGNORE_INDEX = -100


class HeadLoss(Protocol):
    """The seam of head and loss: tensor parallel puts a vocabulary-parallel one in its place."""

    def __call__(
        self, hidden_NC: Tensor, weight_VC: Tensor, labels_N: Tensor, *, logit_softcap: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Gives the sum of the token losses (scalar, at least fp32) and the number of tokens that have one (int64)."""
        ...


@dataclass(frozen=True, kw_only=True)
class PlainHeadLoss:
    """Materialises all logits in fp32: 4 * N * V bytes, and their gradient."""

    def __call__(
        self, hidden_NC: Tensor, weight_VC: Tensor, labels_N: Tensor, *, logit_softcap: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        logits_NV = at_least_fp32(head_logits(hidden_NC, weight_VC, logit_softcap=logit_softcap))
        loss_sum = F.cross_entropy(logits_NV, labels_N, ignore_index=IGNORE_INDEX, reduction="sum")
        return loss_sum, (labels_N != IGNORE_INDEX).sum()


@dataclass(frozen=True, kw_only=True)
class ChunkedHeadLoss:
    """Computes logits, loss and both gradients slice by slice already in the forward pass; logits never exist whole.

    The backward pass only multiplies by the incoming gradient. The gradient of the weight is summed over slices in the
    weight's dtype (each product accumulates in fp32; a slice adds one rounding to bf16 weights, so keep slices large).
    """

    chunk_tokens: int = 2048
    compiled: bool = False
    """Fuse what lies between the matrix products with torch.compile."""
    fp8: Fp8Head | None = None
    """Multiply in fp8."""

    def __call__(
        self, hidden_NC: Tensor, weight_VC: Tensor, labels_N: Tensor, *, logit_softcap: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        of_slice = compiled_slice_loss() if self.compiled else slice_loss
        loss_sum = chunked_loss(hidden_NC, weight_VC, labels_N, self.chunk_tokens, logit_softcap, of_slice, self.fp8)
        return loss_sum, (labels_N != IGNORE_INDEX).sum()


def head_logits(hidden_NC: Tensor, weight_VC: Tensor, *, logit_softcap: float = 0.0) -> Tensor:
    """Logits in the dtype of the hidden states; softcap is computed in at least fp32."""
    logits_NV = F.linear(hidden_NC, weight_VC)
    if not logit_softcap:
        return logits_NV
    return soft_capped(at_least_fp32(logits_NV), logit_softcap).to(logits_NV.dtype)


def soft_capped(logits: Tensor, logit_softcap: float) -> Tensor:
    """cap * tanh(logits / cap); 0 leaves them as they are."""
    return logit_softcap * torch.tanh(logits / logit_softcap) if logit_softcap else logits


def chunked_loss(
    hidden_NC: Tensor,
    weight_VC: Tensor,
    labels_N: Tensor,
    chunk_tokens: int,
    logit_softcap: float,
    of_slice: SliceLoss,
    fp8: Fp8Head | None = None,
) -> Tensor:
    """The sum of the losses that ``of_slice`` gives for the logits of ``chunk_tokens`` tokens at a time."""
    loss_sum: Tensor = _ChunkedLoss.apply(hidden_NC, weight_VC, labels_N, chunk_tokens, logit_softcap, of_slice, fp8)
    return loss_sum


class HeadProducts(Protocol):
    """The matrix products of a slice with one weight: those of its logits first, then those of its gradients."""

    def logits(self, hidden_nC: Tensor) -> Tensor:
        """[n, V] in the dtype of the hidden states."""
        ...

    def gradients(
        self,
        grad_logits_nV: Tensor,
        hidden_nC: Tensor,
        grad_hidden_nC: Tensor | None,
        grad_weight_VC: Tensor | None,
        *,
        first: bool,
    ) -> None:
        """Writes the one, adds to the other, or with ``first`` writes it too; of what is asked for."""
        ...


def unwritten_gradient(weight_VC: Tensor, num_tokens: int) -> Tensor:
    """For the first slice's product to write; zeros if there is no slice."""
    return torch.empty_like(weight_VC) if num_tokens else torch.zeros_like(weight_VC)


class PlainHeadProducts:
    """In the dtype of hidden states and weight."""

    def __init__(self, weight_VC: Tensor) -> None:
        self._weight_VC = weight_VC

    def logits(self, hidden_nC: Tensor) -> Tensor:
        return hidden_nC @ self._weight_VC.T

    def gradients(
        self,
        grad_logits_nV: Tensor,
        hidden_nC: Tensor,
        grad_hidden_nC: Tensor | None,
        grad_weight_VC: Tensor | None,
        *,
        first: bool,
    ) -> None:
        if grad_hidden_nC is not None:
            torch.mm(grad_logits_nV, self._weight_VC, out=grad_hidden_nC)
        if grad_weight_VC is not None:
            grad_weight_VC.addmm_(grad_logits_nV.T, hidden_nC, beta=0 if first else 1)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NC: Tensor,
        weight_VC: Tensor,
        labels_N: Tensor,
        chunk_tokens: int,
        logit_softcap: float,
        of_slice: SliceLoss,
        fp8: Fp8Head | None,
    ) -> Tensor:
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        products: HeadProducts = PlainHeadProducts(weight_VC)
        if fp8 is not None:
            products = fp8.products(weight_VC, wants_hidden=wants_hidden, wants_weight=wants_weight)
        grad_hidden_NC = torch.empty_like(hidden_NC) if wants_hidden else None
        grad_weight_VC = unwritten_gradient(weight_VC, len(hidden_NC)) if wants_weight else None
        loss_sum = torch.zeros((), dtype=wide_dtype(hidden_NC.dtype), device=hidden_NC.device)
        for start in range(0, hidden_NC.shape[0], chunk_tokens):
            part = slice(start, start + chunk_tokens)
            logits_nV = products.logits(hidden_NC[part])
            loss, grad_logits_nV = of_slice(
                logits_nV, labels_N[part], logit_softcap, with_gradient=wants_hidden or wants_weight
            )
            loss_sum += loss
            if grad_logits_nV is None:
                continue
            grad_hidden_nC = None if grad_hidden_NC is None else grad_hidden_NC[part]
            products.gradients(grad_logits_nV, hidden_NC[part], grad_hidden_nC, grad_weight_VC, first=start == 0)
        ctx.gradients = (grad_hidden_NC, grad_weight_VC)
        return loss_sum

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        assert ctx.gradients is not None, (
            "the chunked loss can be back-propagated once: its gradients are scaled in place"
        )
        grad_hidden_NC, grad_weight_VC = ctx.gradients
        ctx.gradients = None
        for gradient in (grad_hidden_NC, grad_weight_VC):
            if gradient is not None:
                scale_in_place(gradient, grad_output)
        return grad_hidden_NC, grad_weight_VC, None, None, None, None, None


class SliceLoss(Protocol):
    """The loss of some tokens from their logits."""

    def __call__(
        self, logits_nV: Tensor, labels_n: Tensor, logit_softcap: float, *, with_gradient: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Gives the sum of the losses (at least fp32) and its gradient with respect to the logits, in their dtype."""
        ...


def slice_loss(
    logits_nV: Tensor, labels_n: Tensor, logit_softcap: float, *, with_gradient: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Loss of a slice and its gradient, operator by operator: about ten passes over the logits in fp32."""
    capped_nV, dtype = soft_capped(at_least_fp32(logits_nV), logit_softcap), logits_nV.dtype
    if not with_gradient:
        return F.cross_entropy(capped_nV, labels_n, ignore_index=IGNORE_INDEX, reduction="sum"), None
    kept_n1 = (labels_n != IGNORE_INDEX)[:, None]
    index_n1 = labels_n[:, None].clamp_min(0)
    lse_n1 = capped_nV.logsumexp(-1, keepdim=True)
    loss = ((lse_n1 - capped_nV.gather(1, index_n1)) * kept_n1).sum()
    gradient_nV = (capped_nV - lse_n1).exp_()
    gradient_nV.scatter_add_(1, index_n1, torch.full_like(lse_n1, -1.0))
    gradient_nV.mul_(kept_n1)
    if logit_softcap:
        gradient_nV.mul_(1.0 - (capped_nV / logit_softcap).square())
    return loss, gradient_nV.to(dtype)


def fusible_slice_loss(
    logits_nV: Tensor, labels_n: Tensor, logit_softcap: float, *, with_gradient: bool = True
) -> tuple[Tensor, Tensor | None]:
    """The same without scatters and in-place steps, so that a compiler fuses it into a reduction and one write.

    An element is read in the logits' own dtype and written once as its gradient; nothing of size [n, V] lies between.
    """
    capped_nV = soft_capped(at_least_fp32(logits_nV), logit_softcap)
    kept_n1 = (labels_n != IGNORE_INDEX)[:, None]
    lse_n1 = capped_nV.logsumexp(-1, keepdim=True)
    loss = ((lse_n1 - capped_nV.gather(1, labels_n[:, None].clamp_min(0))) * kept_n1).sum()
    if not with_gradient:
        return loss, None
    is_label_nV = torch.arange(logits_nV.shape[1], device=logits_nV.device)[None] == labels_n[:, None]
    gradient_nV = ((capped_nV - lse_n1).exp() - is_label_nV.to(capped_nV.dtype)) * kept_n1
    if logit_softcap:
        gradient_nV = gradient_nV * (1.0 - (capped_nV / logit_softcap).square())
    return loss, gradient_nV.to(logits_nV.dtype)


@functools.cache
def compiled_slice_loss() -> SliceLoss:
    """`fusible_slice_loss` through torch.compile; compiled at its first call, once for each size of slice."""
    return torch.compile(fusible_slice_loss, dynamic=False)
