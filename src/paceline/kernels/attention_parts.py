"""Attention of some queries to some of their keys: a partial result, and how partial results become the whole one.

The softmax over all keys can be put together from parts, if each part also gives the logarithm of the sum of its
exponentials (lse): `merge_parts`. Backward works part by part too: with the *merged* output and lse, a part's own
probabilities are exp(score - lse), and the gradients of a query, key or value are the sum over the parts it was in.
Source: FlashAttention, arXiv:2205.14135, sections 3.1 and B.2; over ranks: Ring Attention, arXiv:2310.01889.

Two kinds of kernels, both `PartKernel`s:

- `ReferencePart` computes scores in at least fp32, a bounded number of rows at a time; the only one with softcap,
  dropout and float64.
- `FusedPart` calls torch's fused kernels through their operators, since only those give the lse out: cuDNN and flash
  where no mask is needed but a kernel's own causal one, memory-efficient (on the CPU: flash) under any mask. A mask is
  a bias in memory there, and masked scores are computed as well.

Dims: B batch, T queries, S keys, H query heads, G key/value heads, R = H / G, D width of a query or key head, E width
of a value head. lse is [B, H, T], in at least fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from paceline.kernels.attention import sdpa_order
from paceline.kernels.precision import at_least_fp32, wide_dtype

_MAX_SCORES = 2**26
"""Scores (of a fused kernel: elements of the bias) in memory at a time: 256 MiB in fp32."""
_FAR = -30000.0
"""Bias of what is not seen: exp of it is exactly 0. Not -inf, which makes NaN of a row that sees nothing of a part."""


@dataclass(frozen=True, kw_only=True)
class PartMask:
    """Who sees whom. Positions and documents are those of the whole sequence."""

    kind: Literal["full", "causal", "masked"]
    """full: everyone sees everyone. causal: T = S, query t sees keys 0..t. masked: look at the rest."""
    q_positions: Tensor
    """[T]"""
    k_positions: Tensor
    """[S]"""
    causal: bool = True
    window: int = 0
    q_documents: Tensor | None = None
    """[B, T]"""
    k_documents: Tensor | None = None
    """[B, S]"""

    def allowed(self, rows: slice) -> Tensor | None:
        """[1 or B, 1, t, S] boolean for some of the queries; None = all allowed."""
        if self.kind == "full":
            return None
        q_T1, k_1S = self.q_positions[rows, None], self.k_positions[None]
        allowed_TS = q_T1 >= k_1S if self.causal else torch.ones_like(q_T1 >= k_1S)
        if self.window:
            allowed_TS = allowed_TS & (q_T1 - k_1S < self.window)
        if self.q_documents is None or self.k_documents is None:
            return allowed_TS[None, None]
        return (allowed_TS & (self.q_documents[:, rows, None] == self.k_documents[:, None]))[:, None]

    def bias(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """[1 or B, 1, t, S]: 0 where allowed. Rows lie 16 elements apart or a multiple, as the kernel loads them."""
        allowed_B1TS = self.allowed(rows)
        assert allowed_B1TS is not None
        bias_B1TS = torch.zeros_like(allowed_B1TS, dtype=dtype).masked_fill_(~allowed_B1TS, _FAR)
        S = bias_B1TS.shape[-1]
        return F.pad(bias_B1TS, (0, -S % 16))[..., :S] if S % 16 else bias_B1TS


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What happens to q k^T: ``softcap * tanh(q k^T * scale / softcap)``, and dropout of the probabilities."""

    scale: float
    softcap: float = 0.0
    dropout: float = 0.0


class PartKernel(Protocol):
    """Computes parts. With dropout, `backward` is handed a generator in the state that `forward` was handed."""

    def forward(
        self,
        q_BTHD: Tensor,
        k_BSGD: Tensor,
        v_BSGE: Tensor,
        mask: PartMask,
        scores: Scores,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Gives o_BTHE, and lse_BHT. A row that sees nothing has a finite o and an lse near or at -inf."""
        ...

    def backward(
        self,
        do_BTHE: Tensor,
        q_BTHD: Tensor,
        k_BSGD: Tensor,
        v_BSGE: Tensor,
        o_BTHE: Tensor,
        lse_BHT: Tensor,
        mask: PartMask,
        scores: Scores,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """This part's dq, dk, dv, where ``do``, ``o`` and ``lse`` are those of the merged result."""
        ...


def part_kernel(
    q_BTHD: Tensor, k_BSGD: Tensor, v_BSGE: Tensor, mask: PartMask, scores: Scores, *, reference: bool = False
) -> PartKernel:
    """The fastest kernel for this call, or the reference if it is asked for. The same choice in both passes."""
    if reference or scores.softcap or scores.dropout or q_BTHD.dtype == torch.float64:
        return ReferencePart()
    if v_BSGE.shape[-1] > q_BTHD.shape[-1]:
        return ReferencePart()
    if not q_BTHD.is_cuda:
        return FusedPart("cpu")
    if q_BTHD.shape[-1] % 8 or v_BSGE.shape[-1] % 8:  # 16 bytes in bf16, as the kernels load them
        return ReferencePart()
    if mask.kind == "masked" or q_BTHD.dtype == torch.float32:
        return FusedPart("efficient")
    q, k, v = (x.detach().transpose(1, 2) for x in (q_BTHD, k_BSGD, v_BSGE))
    gqa = q.shape[1] != k.shape[1]
    rest = (None, 0.0, mask.kind == "causal", gqa)
    cudnn = torch.backends.cuda.can_use_cudnn_attention(torch.backends.cuda.SDPAParams(q, k, v, *rest))
    padded = F.pad(v, (0, q.shape[-1] - v.shape[-1]))
    flash = torch.backends.cuda.can_use_flash_attention(torch.backends.cuda.SDPAParams(q, k, padded, *rest))
    for backend in sdpa_order(torch.cuda.get_device_capability(q.device)[0]):
        if backend == SDPBackend.CUDNN_ATTENTION and cudnn:
            return FusedPart("cudnn")
        if backend == SDPBackend.FLASH_ATTENTION and flash:
            return FusedPart("flash")
    return FusedPart("efficient")


def merge_parts(o_BTHE: Tensor, lse_BHT: Tensor, part_o_BTHE: Tensor, part_lse_BHT: Tensor) -> None:
    """Adds a part to what was merged so far, in place. Begins with o = 0 and lse = -inf, in at least fp32."""
    merged_BHT = torch.logaddexp(lse_BHT, part_lse_BHT)
    # where neither side has seen anything both are -inf and their difference is NaN: that row stays 0
    old_BTH1 = (lse_BHT - merged_BHT).exp().nan_to_num(0.0).transpose(1, 2).unsqueeze(-1)
    new_BTH1 = (part_lse_BHT - merged_BHT).exp().nan_to_num(0.0).transpose(1, 2).unsqueeze(-1)
    o_BTHE.mul_(old_BTH1).addcmul_(part_o_BTHE.to(o_BTHE.dtype), new_BTH1)
    lse_BHT.copy_(merged_BHT)


class ReferencePart:
    """Written out. Memory is bounded by `max_scores`, whatever T and S are."""

    def __init__(self, max_scores: int = _MAX_SCORES) -> None:
        self.max_scores = max_scores

    def forward(
        self,
        q_BTHD: Tensor,
        k_BSGD: Tensor,
        v_BSGE: Tensor,
        mask: PartMask,
        scores: Scores,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:
        B, T, H, _ = q_BTHD.shape
        k_BGSD, v_BGSE = (at_least_fp32(x).transpose(1, 2) for x in (k_BSGD, v_BSGE))
        o_BTHE = q_BTHD.new_empty(B, T, H, v_BSGE.shape[-1])
        lse_BHT = q_BTHD.new_empty(B, H, T, dtype=wide_dtype(q_BTHD.dtype))
        for rows in self._rows(q_BTHD, k_BSGD):
            q_BGRTD = _by_group(q_BTHD[:, rows], k_BSGD.shape[2])
            s_BGRTS, _ = _scores(q_BGRTD, k_BGSD, mask, scores, rows)
            lse_BGRT = s_BGRTS.logsumexp(-1)
            p_BGRTS = _probabilities(s_BGRTS, lse_BGRT)
            keep = _keep(p_BGRTS, scores, generator)
            o_BGRTE = (p_BGRTS if keep is None else p_BGRTS * keep) @ v_BGSE[:, :, None]
            o_BTHE[:, rows] = _by_head(o_BGRTE).to(o_BTHE.dtype)
            lse_BHT[:, :, rows] = lse_BGRT.flatten(1, 2)
        return o_BTHE, lse_BHT

    def backward(
        self,
        do_BTHE: Tensor,
        q_BTHD: Tensor,
        k_BSGD: Tensor,
        v_BSGE: Tensor,
        o_BTHE: Tensor,
        lse_BHT: Tensor,
        mask: PartMask,
        scores: Scores,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        G = k_BSGD.shape[2]
        k_BGSD, v_BGSE = (at_least_fp32(x).transpose(1, 2) for x in (k_BSGD, v_BSGE))
        dq_BTHD, dk_BGSD, dv_BGSE = torch.empty_like(q_BTHD), torch.zeros_like(k_BGSD), torch.zeros_like(v_BGSE)
        for rows in self._rows(q_BTHD, k_BSGD):
            q_BGRTD, do_BGRTE, o_BGRTE = (_by_group(x[:, rows], G) for x in (q_BTHD, do_BTHE, o_BTHE))
            s_BGRTS, slope_BGRTS = _scores(q_BGRTD, k_BGSD, mask, scores, rows)
            p_BGRTS = _probabilities(s_BGRTS, lse_BHT[:, :, rows].unflatten(1, (G, -1)))
            keep = _keep(p_BGRTS, scores, generator)
            dp_BGRTS = do_BGRTE @ v_BGSE[:, :, None].transpose(-1, -2)
            dropped_BGRTS = p_BGRTS
            if keep is not None:
                dp_BGRTS, dropped_BGRTS = dp_BGRTS * keep, p_BGRTS * keep
            # sum_s p dp = do . o, also where probabilities are dropped
            ds_BGRTS = p_BGRTS * (dp_BGRTS - (do_BGRTE * o_BGRTE).sum(-1, keepdim=True)) * scores.scale
            if slope_BGRTS is not None:
                ds_BGRTS *= slope_BGRTS
            dq_BTHD[:, rows] = _by_head(ds_BGRTS @ k_BGSD[:, :, None]).to(dq_BTHD.dtype)
            dk_BGSD += _keys_times_rows(ds_BGRTS, q_BGRTD)
            dv_BGSE += _keys_times_rows(dropped_BGRTS, do_BGRTE)
        return dq_BTHD, dk_BGSD.transpose(1, 2), dv_BGSE.transpose(1, 2)

    def _rows(self, q_BTHD: Tensor, k_BSGD: Tensor) -> Iterator[slice]:
        B, T, H, _ = q_BTHD.shape
        return _row_chunks(T, B * H * k_BSGD.shape[1], self.max_scores)


@dataclass(frozen=True)
class FusedPart:
    """One of torch's fused kernels, by its operators (torch 2.11 - 2.13 give the lse out in no public way)."""

    name: Literal["cudnn", "flash", "efficient", "cpu"]
    max_scores: int = _MAX_SCORES

    def forward(
        self,
        q_BTHD: Tensor,
        k_BSGD: Tensor,
        v_BSGE: Tensor,
        mask: PartMask,
        scores: Scores,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:
        assert not scores.softcap and not scores.dropout, "fused kernels have neither softcap nor, here, dropout"
        B, _, H, _ = q_BTHD.shape
        k_BHSD, v_BHSE = self._keys_and_values(q_BTHD, k_BSGD, v_BSGE)
        outs, sums = [], []
        for rows in self._rows(q_BTHD, k_BSGD, mask):
            q_BHTD = q_BTHD[:, rows].transpose(1, 2)
            o_BHTE, lse = self._forward(q_BHTD, k_BHSD, v_BHSE, mask, rows, scores.scale)
            outs.append(o_BHTE.transpose(1, 2)[..., : v_BSGE.shape[-1]])
            sums.append(lse[:, :, : q_BHTD.shape[2]].reshape(B, H, -1))
        return (outs[0], sums[0]) if len(outs) == 1 else (torch.cat(outs, dim=1), torch.cat(sums, dim=2))

    def backward(
        self,
        do_BTHE: Tensor,
        q_BTHD: Tensor,
        k_BSGD: Tensor,
        v_BSGE: Tensor,
        o_BTHE: Tensor,
        lse_BHT: Tensor,
        mask: PartMask,
        scores: Scores,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        G, E = v_BSGE.shape[2:]
        k_BHSD, v_BHSE = self._keys_and_values(q_BTHD, k_BSGD, v_BSGE)
        do_BTHE, o_BTHE = (F.pad(x, (0, v_BHSE.shape[-1] - E)) for x in (do_BTHE, o_BTHE))
        dq, dk_BHSD, dv_BHSE = [], None, None
        for rows in self._rows(q_BTHD, k_BSGD, mask):
            q_BHTD, do_BHTE, o_BHTE = (x[:, rows].transpose(1, 2) for x in (q_BTHD, do_BTHE, o_BTHE))
            lse = lse_BHT[:, :, rows].contiguous()
            dq_BHTD, dk, dv = self._backward(do_BHTE, q_BHTD, k_BHSD, v_BHSE, o_BHTE, lse, mask, rows, scores.scale)
            dq.append(dq_BHTD.transpose(1, 2))
            dk_BHSD = dk if dk_BHSD is None else at_least_fp32(dk_BHSD).add_(dk)
            dv_BHSE = dv if dv_BHSE is None else at_least_fp32(dv_BHSE).add_(dv)
        assert dk_BHSD is not None and dv_BHSE is not None
        return torch.cat(dq, dim=1), _sum_groups(dk_BHSD, G), _sum_groups(dv_BHSE, G)[..., :E]

    def _keys_and_values(self, q_BTHD: Tensor, k_BSGD: Tensor, v_BSGE: Tensor) -> tuple[Tensor, Tensor]:
        """As the kernel wants them: heads first; repeated for each query head, and v as wide as k, where it must be."""
        if self.name in ("efficient", "cpu"):
            R = q_BTHD.shape[2] // k_BSGD.shape[2]
            k_BSGD, v_BSGE = (x.repeat_interleave(R, dim=2) if R > 1 else x for x in (k_BSGD, v_BSGE))
        if self.name in ("flash", "cpu"):
            v_BSGE = F.pad(v_BSGE, (0, k_BSGD.shape[-1] - v_BSGE.shape[-1]))
        return k_BSGD.transpose(1, 2), v_BSGE.transpose(1, 2)

    def _rows(self, q_BTHD: Tensor, k_BSGD: Tensor, mask: PartMask) -> Iterator[slice]:
        T = q_BTHD.shape[1]
        if mask.kind != "masked":
            return iter([slice(0, T)])
        return _row_chunks(T, q_BTHD.shape[0] * k_BSGD.shape[1], self.max_scores)

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: PartMask, rows: slice, scale: float
    ) -> tuple[Tensor, Tensor]:
        """o, and the kernel's lse: [B, H, T], [B, H, T, 1] or [B, H, T rounded up]."""
        aten: Any = torch.ops.aten
        bias, causal = self._bias(q, mask, rows), mask.kind == "causal"
        if self.name == "cudnn":
            out = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
        elif self.name == "flash":
            out = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        elif self.name == "efficient":
            out = aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, causal, scale=scale)
        else:
            out = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
        return out[0], out[1]

    def _backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        mask: PartMask,
        rows: slice,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        aten: Any = torch.ops.aten
        bias, causal = self._bias(q, mask, rows), mask.kind == "causal"
        T, S = q.shape[2], k.shape[2]
        if self.name == "cpu":
            grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                do, q, k, v, o, lse, 0.0, causal, attn_mask=bias, scale=scale
            )
            return grads[0], grads[1], grads[2]
        # the state of the kernel's random numbers: never read without dropout, but it must be there
        seed = torch.zeros((), dtype=torch.int64, device=q.device)
        if self.name == "cudnn":
            grads = aten._scaled_dot_product_cudnn_attention_backward(
                do, q, k, v, o, lse[..., None], seed, seed, None, None, None, T, S, 0.0, causal, scale=scale
            )
        elif self.name == "flash":
            state = torch.zeros(2, dtype=torch.uint64, device=q.device)
            grads = aten._scaled_dot_product_flash_attention_backward(
                do, q, k, v, o, lse, None, None, T, S, 0.0, causal, state, state[0], scale=scale
            )
        else:
            # its rows are 32 apart; exp(score - inf) = 0 in those that do not exist
            lse = F.pad(lse, (0, -T % 32), value=float("inf"))
            needed = [True, True, True, False]
            grads = aten._scaled_dot_product_efficient_attention_backward(
                do, q, k, v, bias, o, lse, seed, seed, 0.0, needed, causal, scale=scale
            )
        return grads[0], grads[1], grads[2]

    def _bias(self, q_BHTD: Tensor, mask: PartMask, rows: slice) -> Tensor | None:
        if mask.kind != "masked":
            return None
        B, H = q_BHTD.shape[:2]
        return mask.bias(rows, q_BHTD.dtype).expand(B, H, -1, -1)


def _row_chunks(num_rows: int, row_size: int, limit: int) -> Iterator[slice]:
    """Cuts of the rows, of at most ``limit`` elements each where one row allows it."""
    step = max(1, min(num_rows, limit // max(1, row_size)))
    return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))


def _by_group(x_BTHD: Tensor, groups: int) -> Tensor:
    """[B, G, R, T, D], in at least fp32."""
    return at_least_fp32(x_BTHD).unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4)


def _by_head(x_BGRTD: Tensor) -> Tensor:
    """[B, T, H, D]"""
    return x_BGRTD.permute(0, 3, 1, 2, 4).flatten(2, 3)


def _scores(
    q_BGRTD: Tensor, k_BGSD: Tensor, mask: PartMask, scores: Scores, rows: slice
) -> tuple[Tensor, Tensor | None]:
    """Scores, -inf where masked, and the slope of the softcap (None without one)."""
    s_BGRTS = q_BGRTD @ k_BGSD[:, :, None].transpose(-1, -2) * scores.scale
    slope_BGRTS = None
    if scores.softcap:
        tanh_BGRTS = torch.tanh(s_BGRTS / scores.softcap)
        s_BGRTS, slope_BGRTS = scores.softcap * tanh_BGRTS, 1 - tanh_BGRTS.square()
    allowed_B1TS = mask.allowed(rows)
    if allowed_B1TS is not None:
        s_BGRTS = s_BGRTS.masked_fill(~allowed_B1TS[:, :, None], float("-inf"))
    return s_BGRTS, slope_BGRTS


def _probabilities(s_BGRTS: Tensor, lse_BGRT: Tensor) -> Tensor:
    """exp(score - lse); 0 in a row that sees nothing, whose score and lse are both -inf."""
    return (s_BGRTS - lse_BGRT[..., None].clamp_min(torch.finfo(lse_BGRT.dtype).min)).exp()


def _keep(p_BGRTS: Tensor, scores: Scores, generator: torch.Generator | None) -> Tensor | None:
    """What dropout multiplies each probability by: 0, or 1 / (1 - dropout)."""
    if not scores.dropout:
        return None
    assert generator is not None, "dropout is drawn from a generator that backward can have again"
    kept = 1.0 - scores.dropout
    if kept <= 0.0:
        return torch.zeros_like(p_BGRTS)
    return torch.empty_like(p_BGRTS).bernoulli_(kept, generator=generator).div_(kept)


def _keys_times_rows(x_BGRTS: Tensor, y_BGRTD: Tensor) -> Tensor:
    """[B, G, S, D]: x^T y, summed over the R query heads of a group."""
    return x_BGRTS.flatten(2, 3).transpose(-1, -2) @ y_BGRTD.flatten(2, 3)


def _sum_groups(x_BHSD: Tensor, groups: int) -> Tensor:
    """[B, S, G, D]: gradients of repeated heads summed, in at least fp32 where there is something to sum."""
    x_BSHD = x_BHSD.transpose(1, 2)
    if x_BSHD.shape[2] == groups:
        return x_BSHD
    return at_least_fp32(x_BSHD).unflatten(2, (groups, -1)).sum(3)
