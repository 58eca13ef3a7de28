"""FlashAttention-4 (the package `flash-attn-4`): attention for Hopper and Blackwell, written in CuTe DSL.

It is compiled at its first use. Two operators wrap its forward and backward, so that a compiled graph, recomputation
and autograd see them as they see attention of torch. They are called directly: torch's own adapter
(`torch.nn.attention.activate_flash_attention_impl`) unpacks two results of the forward, and releases of the package
give two, three or five (torch 2.11 with flash-attn-4 4.0.0b36 fails there).

Within documents, rows are handed over as one, with where each document begins in it: blocks outside are not computed.

Dims: B batch, T tokens, N documents, H query heads, G key/value heads, D width of a head.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, library

WIDTHS = (64, 96, 128)
"""Of a head, that are taken: those for which all kernels exist, forward and backward, on each of the devices."""
_INTERFACE = "flash_attn.cute.interface"


def flash4(
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    *,
    causal: bool,
    scale: float,
    boundaries: Tensor | None = None,
) -> Tensor:
    """o_BTHD. For what `why_not_flash4` has nothing against, where `why_no_flash4_here` is empty.

    Args:
        boundaries: int32 [N + 1], the first token of each document in all rows laid end to end, the last B * T; empty
            documents are allowed. None = every row is one.
    """
    out: Tensor = _Flash4.apply(q_BTHD, k_BTGD, v_BTGD, boundaries, causal, scale)
    return out


def why_not_flash4(q_BTHD: Tensor, k_BSGD: Tensor, v_BSGE: Tensor, dropout: float) -> str:
    """The reason why this call cannot take it; empty if it can."""
    if dropout:
        return "FlashAttention-4 has no dropout (model.attention_dropout = 0 allows it)"
    if q_BTHD.dtype not in (torch.bfloat16, torch.float16):
        return "FlashAttention-4 is for bf16 and fp16"
    if q_BTHD.shape[-1] not in WIDTHS or v_BSGE.shape[-1] != q_BTHD.shape[-1]:
        return f"the heads are not {', '.join(map(str, WIDTHS))} wide"
    if q_BTHD.shape[1] != k_BSGD.shape[1]:
        return "there are not as many keys as queries"
    return ""


@cache
def why_no_flash4_here() -> str:
    """The reason why this process has none; empty if it has."""
    if not torch.cuda.is_available():
        return "there is no GPU"
    major, minor = torch.cuda.get_device_capability()
    if major not in (9, 10):
        return f"FlashAttention-4 is for Hopper and Blackwell (this is sm_{major}{minor})"
    try:
        # the second imports the package itself, which may be FlashAttention-2 for another torch
        if importlib.util.find_spec("flash_attn") is None or importlib.util.find_spec("flash_attn.cute") is None:
            return "the package flash-attn-4 is not installed (pip install 'flash-attn-4[cu13]')"
        interface = _interface()
    except Exception as error:  # noqa: BLE001 - of somebody else's package
        return f"it does not load here ({type(error).__name__}: {error})"
    lacking = [name for name in ("_flash_attn_fwd", "_flash_attn_bwd") if not hasattr(interface, name)]
    return f"this release of it has no {lacking[0]}" if lacking else ""


@cache
def _interface() -> ModuleType:
    return importlib.import_module(_INTERFACE)


class _Flash4(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BTHD: Tensor,
        k_BTGD: Tensor,
        v_BTGD: Tensor,
        boundaries: Tensor | None,
        causal: bool,
        scale: float,
    ) -> Tensor:
        out, lse = torch.ops.paceline.flash4.default(q_BTHD, k_BTGD, v_BTGD, boundaries, causal, scale)
        ctx.save_for_backward(q_BTHD, k_BTGD, v_BTGD, out, lse, boundaries)
        ctx.causal, ctx.scale = causal, scale
        whole: Tensor = out
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gradients = torch.ops.paceline.flash4_backward.default(grads[0], *ctx.saved_tensors, ctx.causal, ctx.scale)
        return *gradients, None, None, None


library.define(
    "paceline::flash4",
    "(Tensor q, Tensor k, Tensor v, Tensor? boundaries, bool causal, float scale) -> (Tensor, Tensor)",
)
library.define(
    "paceline::flash4_backward",
    "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? boundaries, bool causal, float scale)"
    " -> (Tensor, Tensor, Tensor)",
)


@library.impl("paceline::flash4", "CUDA")
def _forward(
    q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, boundaries: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    parts = [_end_to_end(part, boundaries) for part in (q_BTHD, k_BTGD, v_BTGD)]
    out, lse, *_ = _interface()._flash_attn_fwd(
        *parts, softmax_scale=scale, causal=causal, return_lse=True, **_lengths(boundaries)
    )
    return out.view(*q_BTHD.shape[:-1], -1), lse


@library.register_fake("paceline::flash4")
def _forward_fake(
    q_BTHD: Tensor, k_BTGD: Tensor, v_BTGD: Tensor, boundaries: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    B, T, H, _ = q_BTHD.shape
    out = q_BTHD.new_empty(B, T, H, v_BTGD.shape[-1])
    return out, q_BTHD.new_empty((B, H, T) if boundaries is None else (H, B * T), dtype=torch.float32)


@library.impl("paceline::flash4_backward", "CUDA")
def _backward(
    grad_BTHD: Tensor,
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    out_BTHD: Tensor,
    lse: Tensor,
    boundaries: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    parts = [_end_to_end(part, boundaries) for part in (q_BTHD, k_BTGD, v_BTGD, out_BTHD, grad_BTHD)]
    gradients = _interface()._flash_attn_bwd(
        *parts,
        lse,
        softmax_scale=scale,
        causal=causal,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **_lengths(boundaries),
    )
    shapes = (q_BTHD.shape, k_BTGD.shape, v_BTGD.shape)
    grad_q, grad_k, grad_v = (each.contiguous().view(shape) for each, shape in zip(gradients[:3], shapes, strict=True))
    return grad_q, grad_k, grad_v


@library.register_fake("paceline::flash4_backward")
def _backward_fake(
    grad_BTHD: Tensor,
    q_BTHD: Tensor,
    k_BTGD: Tensor,
    v_BTGD: Tensor,
    out_BTHD: Tensor,
    lse: Tensor,
    boundaries: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (x.new_empty(x.shape) for x in (q_BTHD, k_BTGD, v_BTGD))
    return q, k, v


def _end_to_end(part_BTHD: Tensor, boundaries: Tensor | None) -> Tensor:
    """All rows as one, where documents are told apart by their boundaries."""
    return part_BTHD if boundaries is None else part_BTHD.flatten(0, 1)


def _lengths(boundaries: Tensor | None) -> dict[str, Tensor]:
    return {} if boundaries is None else {"cu_seqlens_q": boundaries, "cu_seqlens_k": boundaries}


FORWARD_OPERATION = torch.ops.paceline.flash4.default
"""What recomputation keeps."""
