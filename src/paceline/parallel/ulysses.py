"""All-to-all attention ("Ulysses"): each rank changes its tokens of all heads for all tokens of its heads, and back.

Between the two exchanges the plain core runs on whole sequences, so it is as exact and as fast as without context
parallelism; the heads of a rank must divide by the ranks. Fewer key/value heads than ranks are copied to those that
need them; the gradients of copies are summed.

Source: DeepSpeed-Ulysses, arXiv:2309.14509.

Dims: B batch, T tokens of this rank, H query heads, G key/value heads, D and E their widths, N ranks.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# the traceable collectives are documented only there (torch 2.11 - 2.13); a public path does not exist yet
from torch.distributed import _functional_collectives as functional

from paceline.kernels.attention import AttentionCore, AttentionMask
from paceline.parallel.collectives import Axis, span
from paceline.parallel.regions import gather_replicated

EXCHANGE_NAME = "cp/attention/all_to_all"


class UlyssesAttention:
    """An `AttentionCore` over the tokens of all ranks of an axis, each with one contiguous part of every sequence.

    Dropout is drawn by the plain core from this rank's generators, which must differ between the ranks of the axis:
    each has other heads.
    """

    def __init__(self, axis: Axis, core: AttentionCore) -> None:
        assert axis.group is not None, "on one rank it is the plain core"
        self.axis, self.core = axis, core

    def __call__(
        self,
        q_BTHD: Tensor,
        k_BSGD: Tensor,
        v_BSGE: Tensor,
        mask: AttentionMask,
        *,
        scale: float,
        softcap: float = 0.0,
        dropout: float = 0.0,
    ) -> Tensor:
        axis, (H, G) = self.axis, (q_BTHD.shape[2], k_BSGD.shape[2])
        assert H % axis.size == 0, f"{H} query heads of this rank do not divide by {axis.size} ranks of {axis.name}"
        # the fewest copies with which rank r's query heads read exactly the r-th part of the key heads
        copies = math.lcm(G, axis.size) // G
        if copies > 1:
            k_BSGD, v_BSGE = (x.repeat_interleave(copies, dim=2) for x in (k_BSGD, v_BSGE))
        if mask.documents is not None:
            documents = mask.documents.to(torch.int32)
            mask = replace(mask, documents=gather_replicated(documents, axis, "cp/attention/documents", dim=1))
        q, k, v = _tokens_to_heads([q_BTHD, k_BSGD, v_BSGE], axis)
        return _heads_to_tokens(self.core(q, k, v, mask, scale=scale, softcap=softcap, dropout=dropout), axis)


def _tokens_to_heads(parts_BTHD: list[Tensor], axis: Axis) -> list[Tensor]:
    """[B, T, H, D] each, of all heads -> [B, N * T, H / N, D], of this rank's heads; in one exchange."""
    pieces = [x.unflatten(2, (axis.size, -1)).movedim(2, 0) for x in parts_BTHD]
    received = _AllToAll.apply(torch.cat([piece.flatten(1) for piece in pieces], dim=1), axis)
    split = received.split([piece[0].numel() for piece in pieces], dim=1)
    return [flat.view(piece.shape).movedim(0, 1).flatten(1, 2) for flat, piece in zip(split, pieces, strict=True)]


def _heads_to_tokens(o_BSHE: Tensor, axis: Axis) -> Tensor:
    """[B, N * T, H / N, E] -> [B, T, H, E]"""
    sent_NBTHE = o_BSHE.unflatten(1, (axis.size, -1)).movedim(1, 0).contiguous()
    received: Tensor = _AllToAll.apply(sent_NBTHE, axis)
    return received.movedim(0, 2).flatten(2, 3)


class _AllToAll(torch.autograd.Function):
    """Row i of dim 0 goes to rank i; row j of the result came from rank j. Its own transpose, so its own backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return _all_to_all(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(grad, ctx.axis), None


def _all_to_all(x: Tensor, axis: Axis) -> Tensor:
    assert axis.group is not None
    x = x.contiguous()
    if torch.compiler.is_compiling():
        return functional.wait_tensor(functional.all_to_all_single(x, None, None, axis.group))
    received = torch.empty_like(x)
    with span(axis, EXCHANGE_NAME, x.nbytes):
        dist.all_to_all_single(received, x, group=axis.group)
    return received
