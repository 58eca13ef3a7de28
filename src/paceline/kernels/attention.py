"""Attention: softmax(q k^T * scale) v under a causal, sliding-window or document mask.

Ways to compute the same function, all `AttentionCore`s:

- `reference_attention` materialises the scores; for tests and for what the others cannot do (softcap on a CPU).
- `sdpa_attention` calls the fused kernels of torch (cuDNN, flash, memory-efficient); a window or document mask becomes
  a boolean mask, which costs the work that a causal kernel would skip.
- `flash4_attention` calls FlashAttention-4 where it is installed and fits, also within documents, and does what `auto`
  does elsewhere;
- `flex_attention_core` (CUDA) skips whole blocks outside windows and documents, and knows softcap.

Dims: B batch, T queries, S keys, H query heads, G key/value heads, R = H / G, D width of a query or key
head, E width of a value head.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from paceline.kernels.flash4 import flash4, why_no_flash4_here, why_not_flash4
from paceline.kernels.precision import at_least_fp32

log = logging.getLogger(__name__)

_REST = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_CUDNN_FIRST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, *_REST]
_FLASH_FIRST = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, *_REST]
# under an explicit mask only these two are sure to be right and to exist
_SDPA_MASKED = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True, kw_only=True)
class AttentionMask:
    """Who sees whom. With S > T the queries are the last T of the S positions."""

    causal: bool = True
    window: int = 0
    """A query sees its own position and the `window - 1` before it; 0 = no window."""
    documents: Tensor | None = None
    """[B, S] document number of each position; only positions of one document see each other. None = one document."""
    boundaries: Tensor | None = None
    """int32 [N + 1], where these documents begin (`RowDocuments`); None where that is not known."""

    @property
    def is_plain(self) -> bool:
        """Whether a kernel's own causal switch says it all."""
        return self.window == 0 and self.documents is None

    def allowed(self, num_queries: int, num_keys: int, device: torch.device) -> Tensor | None:
        """[1 or B, 1, T, S] boolean, True where attention is allowed; None where everything is."""
        if self.is_plain and (not self.causal or num_queries == 1):
            return None
        q_T1 = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
        k_1S = torch.arange(num_keys, device=device)[None, :]
        allowed_TS = (k_1S <= q_T1) if self.causal else torch.ones_like(k_1S <= q_T1)
        if self.window:
            allowed_TS = allowed_TS & (q_T1 - k_1S < self.window)
        if self.documents is None:
            return allowed_TS[None, None]
        same_BTS = self.documents[:, num_keys - num_queries :, None] == self.documents[:, None, :]
        return (allowed_TS[None] & same_BTS)[:, None]


class RowDocuments(NamedTuple):
    """Which document each token of some rows is in."""

    numbers: Tensor
    """[B, T] integers"""
    boundaries: Tensor | None = None
    """int32 [N + 1]: where each begins in all rows laid end to end, then B * T as often as there is room. For causal
    attention of these rows among themselves, it says what the numbers say. None where it is not known."""


def mask_of(documents: RowDocuments | None, *, window: int = 0) -> AttentionMask:
    """Causal attention within these documents."""
    if documents is None:
        return AttentionMask(window=window)
    return AttentionMask(window=window, documents=documents.numbers, boundaries=documents.boundaries)


class AttentionCore(Protocol):
    """The seam of attention: context parallel and the KV cache of generation put their own in its place."""

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
        """Gives o_BTHE. H is a multiple of G: query head h reads key/value head h // (H / G)."""
        ...


AttentionKernel = Literal["auto", "reference", "sdpa", "flash4"]


def attention_core(kernel: AttentionKernel = "auto") -> AttentionCore:
    """The core that `train.attention_kernel` names."""
    if kernel == "reference":
        return reference_attention
    if kernel == "flash4":
        if not (reason := why_no_flash4_here()):
            return flash4_attention
        _log_once(f"train.attention_kernel = 'flash4' does what 'auto' does: {reason}")
    return sdpa_attention if kernel == "sdpa" else auto_attention


def auto_attention(
    q_BTHD: Tensor,
    k_BSGD: Tensor,
    v_BSGE: Tensor,
    mask: AttentionMask,
    *,
    scale: float,
    softcap: float = 0.0,
    dropout: float = 0.0,
) -> Tensor:
    """The fastest core that can do what is asked on this device; a slow choice is logged once with its reason."""
    if softcap == 0.0 and mask.is_plain:
        return sdpa_attention(q_BTHD, k_BSGD, v_BSGE, mask, scale=scale, dropout=dropout)
    reason = why_not_flex(q_BTHD, k_BSGD, v_BSGE, dropout)
    if not reason:
        return flex_attention_core(q_BTHD, k_BSGD, v_BSGE, mask, scale=scale, softcap=softcap)
    if softcap == 0.0:
        _note_fallback("SDPA with a boolean mask, which computes masked blocks too", reason)
        return sdpa_attention(q_BTHD, k_BSGD, v_BSGE, mask, scale=scale, dropout=dropout)
    _note_fallback("attention that materialises the scores", reason)
    return reference_attention(q_BTHD, k_BSGD, v_BSGE, mask, scale=scale, softcap=softcap, dropout=dropout)


def flash4_attention(
    q_BTHD: Tensor,
    k_BSGD: Tensor,
    v_BSGE: Tensor,
    mask: AttentionMask,
    *,
    scale: float,
    softcap: float = 0.0,
    dropout: float = 0.0,
) -> Tensor:
    """FlashAttention-4 for whole sequences and within documents, where `why_no_flash4_here` is empty."""
    if reason := _why_not_by_flash4(mask, softcap) or why_not_flash4(q_BTHD, k_BSGD, v_BSGE, dropout):
        _note_fallback("what 'auto' takes", reason)
        return auto_attention(q_BTHD, k_BSGD, v_BSGE, mask, scale=scale, softcap=softcap, dropout=dropout)
    return flash4(q_BTHD, k_BSGD, v_BSGE, causal=mask.causal, scale=scale, boundaries=mask.boundaries)


def _why_not_by_flash4(mask: AttentionMask, softcap: float) -> str:
    if softcap or mask.window:
        return "FlashAttention-4 is used without softcap and windows only"
    if mask.documents is not None and mask.boundaries is None:
        return "it is not known where the documents of these rows begin (parts of rows, or very many documents)"
    if mask.documents is not None and torch.are_deterministic_algorithms_enabled():
        return "FlashAttention-4 within documents is not used where runs repeat to the bit"
    return ""


def reference_attention(
    q_BTHD: Tensor,
    k_BSGD: Tensor,
    v_BSGE: Tensor,
    mask: AttentionMask,
    *,
    scale: float,
    softcap: float = 0.0,
    dropout: float = 0.0,
) -> Tensor:
    """Written out: scores [B, H, T, S] in memory, softmax in at least fp32. Keys and values are not repeated.

    Scores are in the dtype of q, scaled before they are rounded to it; only a softcap makes them fp32.
    """
    B, T, H, D = q_BTHD.shape
    S, G, E = *k_BSGD.shape[1:3], v_BSGE.shape[3]
    # one product for the query heads of a key head: M heads of keys in all, N rows of queries for each
    q_MND = q_BTHD.view(B, T, G, H // G, D).permute(0, 2, 3, 1, 4).reshape(B * G, -1, D)
    k_MDS = k_BSGD.permute(0, 2, 3, 1).reshape(B * G, D, S)
    v_MSE = v_BSGE.transpose(1, 2).reshape(B * G, S, E)
    scores_MNS = torch.baddbmm(q_MND.new_zeros(()), q_MND, k_MDS, beta=0, alpha=scale)
    if softcap:
        scores_MNS = softcap * torch.tanh(at_least_fp32(scores_MNS) / softcap)
    allowed_B1TS = mask.allowed(T, S, q_BTHD.device)
    if allowed_B1TS is not None:
        # not in place: selective recomputation keeps what products have written
        scores_BGRTS = scores_MNS.view(B, G, -1, T, S)
        scores_MNS = scores_BGRTS.masked_fill(~allowed_B1TS[:, :, None], float("-inf")).view(B * G, -1, S)
    probs_MNS = scores_MNS.softmax(-1, dtype=torch.promote_types(scores_MNS.dtype, torch.float32))
    o_MNE = torch.bmm(F.dropout(probs_MNS, dropout).to(v_BSGE.dtype), v_MSE)
    return o_MNE.view(B, G, -1, T, E).permute(0, 3, 1, 2, 4).reshape(B, T, H, E)


def sdpa_attention(
    q_BTHD: Tensor,
    k_BSGD: Tensor,
    v_BSGE: Tensor,
    mask: AttentionMask,
    *,
    scale: float,
    softcap: float = 0.0,
    dropout: float = 0.0,
) -> Tensor:
    """`scaled_dot_product_attention`, cuDNN first. Softcap is beyond it: such a call goes to the reference."""
    if softcap:
        _note_fallback("attention that materialises the scores", "scaled_dot_product_attention has no softcap")
        return reference_attention(q_BTHD, k_BSGD, v_BSGE, mask, scale=scale, softcap=softcap, dropout=dropout)
    T, H = q_BTHD.shape[1:3]
    S, G = k_BSGD.shape[1:3]
    is_causal = mask.is_plain and mask.causal and T == S and T > 1
    allowed_B1TS = None if is_causal else mask.allowed(T, S, q_BTHD.device)
    enable_gqa = H != G
    if enable_gqa and (not q_BTHD.is_cuda or allowed_B1TS is not None):
        # the CPU's flash kernel and the masked CUDA kernels want one key head for each query head
        k_BSGD, v_BSGE = (x.repeat_interleave(H // G, dim=2) for x in (k_BSGD, v_BSGE))
        enable_gqa = False
    arguments = (q_BTHD.transpose(1, 2), k_BSGD.transpose(1, 2), v_BSGE.transpose(1, 2), allowed_B1TS, dropout)
    if not q_BTHD.is_cuda:
        o_BHTE = F.scaled_dot_product_attention(*arguments, is_causal, scale=scale)
    else:
        order = sdpa_order(_major()) if allowed_B1TS is None else _SDPA_MASKED
        with sdpa_kernel(order, set_priority=True):
            o_BHTE = F.scaled_dot_product_attention(*arguments, is_causal, scale=scale, enable_gqa=enable_gqa)
    return o_BHTE.transpose(1, 2)


def sdpa_order(major: int) -> list[SDPBackend]:
    """Torch's kernels for whole sequences, the fastest first, by the major compute capability.

    On Hopper cuDNN is 1.6 to 1.8 times as fast as the FlashAttention-2 kernel that ships in torch
    (docs/measured/attention_kernels.json). That kernel has nothing newer in it than Ampere's instructions, for which
    it was written: there, and on Ada, it comes first.
    """
    return _CUDNN_FIRST if major >= 9 else _FLASH_FIRST


@torch.compiler.assume_constant_result
def _major() -> int:
    return torch.cuda.get_device_capability()[0]


# ---- FlexAttention: blocks outside the mask are never computed

_FLEX_BLOCK = 128


def why_not_flex(q_BTHD: Tensor, k_BSGD: Tensor, v_BSGE: Tensor, dropout: float) -> str:
    """The reason why FlexAttention cannot take this call; empty if it can."""
    if not q_BTHD.is_cuda:
        return "FlexAttention has no backward on this device"
    if dropout:
        return "FlexAttention has no dropout (model.attention_dropout = 0 allows it)"
    if q_BTHD.dtype == torch.float32:
        return "FlexAttention is used in bf16 only"
    if q_BTHD.shape[1] != k_BSGD.shape[1] or q_BTHD.shape[1] % _FLEX_BLOCK:
        return f"the sequence is not a multiple of {_FLEX_BLOCK} tokens"
    if any(width & (width - 1) for width in (q_BTHD.shape[-1], v_BSGE.shape[-1])):
        return "the head width is not a power of two"
    return ""


def flex_attention_core(
    q_BTHD: Tensor,
    k_BSGD: Tensor,
    v_BSGE: Tensor,
    mask: AttentionMask,
    *,
    scale: float,
    softcap: float = 0.0,
) -> Tensor:
    """FlexAttention with a block mask made from the documents without looking at single scores. T = S, CUDA."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    documents_BS, window, causal = mask.documents, mask.window, mask.causal

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        allowed = q >= k if causal else q == q
        if window:
            allowed = allowed & (q - k < window)
        return allowed if documents_BS is None else allowed & (documents_BS[b, q] == documents_BS[b, k])

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    partial_BQK, full_BQK = block_mask(mask, q_BTHD.shape[1], q_BTHD.device)
    blocks = BlockMask.from_kv_blocks(
        *_block_lists(partial_BQK), *_block_lists(full_BQK), BLOCK_SIZE=_FLEX_BLOCK, mask_mod=mask_mod
    )
    # a compiled block takes the function into its own graph; elsewhere it is compiled alone
    plain: Any = flex_attention
    attend = plain if torch.compiler.is_compiling() else _compiled_flex()
    o_BHTE = attend(
        q_BTHD.transpose(1, 2),
        k_BSGD.transpose(1, 2),
        v_BSGE.transpose(1, 2),
        score_mod=score_mod if softcap else None,
        block_mask=blocks,
        scale=scale,
        enable_gqa=q_BTHD.shape[2] != k_BSGD.shape[2],
    )
    return o_BHTE.transpose(1, 2)


def block_mask(
    mask: AttentionMask, seq_len: int, device: torch.device, block: int = _FLEX_BLOCK
) -> tuple[Tensor, Tensor]:
    """Which pairs of blocks need the mask, and which are allowed whole: two boolean [1 or B, Q, K], disjoint.

    Decided from the lowest and highest document number in each block, so at most too many pairs need the mask.
    """
    index_Q1 = torch.arange(seq_len // block, device=device)[:, None]
    index_1K = index_Q1.T
    some_QK = (index_1K <= index_Q1) if mask.causal else (index_1K == index_1K).expand(seq_len // block, -1)
    every_QK = (index_1K < index_Q1) if mask.causal else some_QK
    if mask.window:
        distance_QK = (index_Q1 - index_1K) * block
        some_QK = some_QK & (distance_QK - (block - 1) < mask.window)
        every_QK = every_QK & (distance_QK + (block - 1) < mask.window)
    some_BQK, every_BQK = some_QK[None], every_QK[None]
    if mask.documents is not None:
        low_BK, high_BK = mask.documents.unflatten(1, (-1, block)).aminmax(dim=-1)
        overlap_BQK = (low_BK[:, :, None] <= high_BK[:, None]) & (low_BK[:, None] <= high_BK[:, :, None])
        same_BQK = (low_BK[:, :, None] == high_BK[:, None]) & (low_BK[:, None] == high_BK[:, :, None])
        some_BQK, every_BQK = some_BQK & overlap_BQK, every_BQK & same_BQK
    return some_BQK & ~every_BQK, every_BQK


def _block_lists(blocks_BQK: Tensor) -> tuple[Tensor, Tensor]:
    """How many key blocks each query block reads, and which: [B, 1, Q] and [B, 1, Q, K], as BlockMask wants them."""
    counts_BQ = blocks_BQK.sum(-1, dtype=torch.int32)
    indices_BQK = blocks_BQK.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return counts_BQ[:, None].contiguous(), indices_BQK[:, None].contiguous()


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    """FlexAttention, compiled: the eager one materialises the scores."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def _note_fallback(what: str, reason: str) -> None:
    if not torch.compiler.is_compiling():
        _log_once(f"attention takes the slower path: {what}, because {reason}")


@cache
def _log_once(message: str) -> None:
    log.info(message)
