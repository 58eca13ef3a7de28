"""One matrix product for each group of rows: what the experts of a mixture compute."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

log = logging.getLogger(__name__)


def grouped_gemm(x_NC: Tensor, weight_EFC: Tensor, counts_E: Tensor) -> Tensor:
    """Rows are sorted by group; group e, `counts_E[e]` rows long, is multiplied by `weight_EFC[e].T`.

    Args:
        x_NC: rows; the counts sum to N.
        weight_EFC: one matrix for each group, laid out as in `nn.Linear`.
        counts_E: integer, on the device of `x_NC`; not read by the host on the fast path.

    Returns:
        y_NF, in the dtype of `x_NC`.
    """
    reason = why_not_grouped(x_NC, weight_EFC)
    if reason:
        if x_NC.is_cuda and not torch.compiler.is_compiling():
            _log_once(f"experts take the slower path: one matrix product after the other, because {reason}")
        return grouped_gemm_reference(x_NC, weight_EFC, counts_E)
    if x_NC.shape[0] == 0:  # a rank of expert parallelism that nobody sends a token to
        return grouped_gemm_reference(x_NC, weight_EFC, counts_E)
    offsets_E = counts_E.cumsum(0, dtype=torch.int32)
    y_NF = F.grouped_mm(x_NC, weight_EFC.transpose(-2, -1), offs=offsets_E)
    return _ContiguousGradient.apply(y_NF)


def grouped_gemm_reference(x_NC: Tensor, weight_EFC: Tensor, counts_E: Tensor) -> Tensor:
    """The same as a loop. Reads the counts on the host: on a GPU this waits for the device."""
    rows = x_NC.split(counts_E.tolist())
    # a group without rows still takes part, so that its weight gets a zero gradient rather than none
    return torch.cat(
        [F.linear(row_nC, weight_FC) for row_nC, weight_FC in zip(rows, weight_EFC.unbind(0), strict=True)]
    )


def why_not_grouped(x_NC: Tensor, weight_EFC: Tensor) -> str:
    """The reason why torch's grouped kernel cannot take these; empty if it can."""
    if not x_NC.is_cuda:
        return "the grouped kernel is for GPUs"
    if x_NC.dtype != torch.bfloat16 or weight_EFC.dtype != torch.bfloat16:
        return f"the grouped kernel is for bf16 (rows {x_NC.dtype}, weights {weight_EFC.dtype})"
    if any(size % 8 for size in weight_EFC.shape[-2:]):
        return f"the grouped kernel wants sizes that are multiples of 8 (weights {tuple(weight_EFC.shape)})"
    return ""


class _ContiguousGradient(torch.autograd.Function):
    """Identity whose gradient is contiguous: the backward of grouped_mm refuses expanded strides (torch 2.11, 2.13)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.contiguous()


@cache
def _log_once(message: str) -> None:
    log.info(message)
