"""Ring attention: keys and values travel round the ranks, queries stay.

    step            0        1        2        3       (4 ranks)
    rank 0 has kv   0        3        2        1       of which rank
    rank 1 has kv   1        0        3        2

At step s rank i has the keys and values of rank i - s and attends to them; the next ones arrive meanwhile. Results are
merged by their log-sum-exp. With two mirrored chunks a rank (`sequence.py`) and a causal mask, half of every pair of
ranks is masked, and always a rectangle: all queries to the early chunk of a rank before, or the late queries to all
keys of a rank behind. So each step is one unmasked call, the same work on every rank; only the own keys (step 0) need a
causal one.

Backward is a second ring: keys and values travel again, and behind them the sums of their gradients, which arrive at
home after n steps. Nothing but a rank's own q, k, v, o and lse is stored. Sums travel in fp32: n rounded additions in
bf16 would cost accuracy, while their transfer runs beside the computation.

Both passes are custom operators: activation recompute sees one operation whose output it may keep, the compiler one
node. Source: Ring Attention, arXiv:2310.01889; mirrored chunks: zhuzilin/ring-flash-attention, its "zigzag" variant.

Dims: B batch, T tokens of this rank, H query heads, G key/value heads, D and E their widths, N ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, library

# operators take a group by name; only this finds it again (torch 2.11 - 2.13; its own functional collectives do so too)
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.profiler import record_function

from paceline.kernels.attention import AttentionMask
from paceline.kernels.attention_parts import PartKernel, PartMask, Scores, merge_parts, part_kernel
from paceline.kernels.precision import wide_dtype
from paceline.parallel.collectives import Axis
from paceline.parallel.regions import gather_replicated
from paceline.parallel.sequence import SequenceLayout

RING_NAME = "cp/attention/ring"
_KEYS, _GRADIENTS = 0, 1
"""Tags of the two kinds of messages, which may be under way between the same two ranks at once."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """Some of a rank's queries against some of the keys it has: slices of their T tokens each."""

    queries: slice
    keys: slice
    kind: Literal["full", "causal", "masked"]


def ring_blocks(
    index: int, source: int, size: int, length: int, *, causal: bool = True, window: int = 0, documents: bool = False
) -> list[Block]:
    """What rank ``index`` computes with the keys of rank ``source``; pairs that are masked whole are left out.

    Args:
        length: tokens of a rank, T.
        documents: whether the rest needs a document mask. Documents leave no block out: the host does not know them.
    """
    everything, early, late = slice(0, length), slice(0, length // 2), slice(length // 2, length)
    if window == 0 and not documents:
        if not causal:
            return [Block(queries=everything, keys=everything, kind="full")]
        if index == source:
            return [Block(queries=everything, keys=everything, kind="causal")]
        if source < index:
            return [Block(queries=everything, keys=early, kind="full")]
        return [Block(queries=late, keys=everything, kind="full")]
    layout, half = SequenceLayout(size, "ring"), length // 2
    blocks = []
    for queries, q_chunk in zip((early, late), layout.chunks(index), strict=True):
        for keys, k_chunk in zip((early, late), layout.chunks(source), strict=True):
            nearest, farthest = (q_chunk - k_chunk - 1) * half + 1, (q_chunk - k_chunk + 1) * half - 1
            if (causal and k_chunk > q_chunk) or (window and nearest >= window):
                continue
            inside = (not causal or k_chunk < q_chunk) and (not window or farthest < window)
            blocks.append(Block(queries=queries, keys=keys, kind="full" if inside and not documents else "masked"))
    return blocks


class RingAttention:
    """An `AttentionCore` over the tokens of all ranks of an axis, which hold them as `SequenceLayout` "ring" says.

    Dropout is drawn block by block from generators of their own, seeded from this rank's CPU generator and its place
    on the ring, so backward draws the same numbers again.
    """

    def __init__(self, axis: Axis, *, reference: bool = False) -> None:
        assert axis.group is not None, "a ring of one rank is the plain core"
        self.axis, self.reference = axis, reference

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
        assert q_BTHD.shape[1] == k_BSGD.shape[1], "queries and keys are the same tokens"
        documents_BS = None
        if mask.documents is not None:
            documents = mask.documents.to(torch.int32)
            documents_BS = gather_replicated(documents, self.axis, "cp/attention/documents", dim=1)
        seed = torch.randint(2**62, (), device="cpu") if dropout else None
        o_BTHE: Tensor = _Ring.apply(
            q_BTHD,
            k_BSGD,
            v_BSGE,
            documents_BS,
            seed,
            self.axis,
            (mask.causal, mask.window, scale, softcap, dropout, self.reference),
        )
        return o_BTHE


_Options = tuple[bool, int, float, float, float, bool]
"""causal, window, scale, softcap, dropout, reference"""


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        documents: Tensor | None,
        seed: Tensor | None,
        axis: Axis,
        options: Any,
    ) -> Tensor:
        assert axis.group is not None
        # a selective recompute finds the output stored and sends nothing, but counts again
        _count(axis, (axis.size - 1) * (k.nbytes + v.nbytes), axis.size - 1)
        o, lse = torch.ops.paceline.ring_attention(q, k, v, documents, seed, axis.group.group_name, *options)
        ctx.save_for_backward(q, k, v, documents, seed, o, lse)
        ctx.axis, ctx.options = axis, options
        return o

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, documents, seed, o, lse = ctx.saved_tensors
        axis: Axis = ctx.axis
        assert axis.group is not None
        sums = (k.numel() + v.numel()) * wide_dtype(k.dtype).itemsize
        _count(axis, (axis.size - 1) * (k.nbytes + v.nbytes) + axis.size * sums, 2 * axis.size - 1)
        dq, dk, dv = torch.ops.paceline.ring_attention_backward(
            grad, q, k, v, o, lse, documents, seed, axis.group.group_name, *ctx.options
        )
        return dq, dk, dv, None, None, None, None


def _count(axis: Axis, num_bytes: int, messages: int) -> None:
    if not torch.compiler.is_compiling():
        axis.traffic.calls[RING_NAME] += messages
        axis.traffic.bytes[RING_NAME] += num_bytes


# ---- the two operators


@library.custom_op("paceline::ring_attention", mutates_args=())
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    seed: Tensor | None,
    group_name: str,
    causal: bool,
    window: int,
    scale: float,
    softcap: float,
    dropout: float,
    reference: bool,
) -> tuple[Tensor, Tensor]:
    """o [B, T, H, E] and lse [B, H, T] of this rank's queries and the keys of all ranks.

    ``documents``: int32 [B, N * T], the parts of all ranks one after the other. ``seed``: int64 scalar on the CPU.
    """
    ring = _RingPass(
        q, documents, seed, group_name, causal, window, Scores(scale=scale, softcap=softcap, dropout=dropout), reference
    )
    B, T, H, _ = q.shape
    o = q.new_zeros(B, T, H, v.shape[-1], dtype=wide_dtype(q.dtype))
    lse = o.new_full((B, H, T), float("-inf"))
    for source, k_BSGD, v_BSGE in ring.visit(k, v):
        for block, mask, generator in ring.blocks(source):
            q_part, k_part, v_part = q[:, block.queries], k_BSGD[:, block.keys], v_BSGE[:, block.keys]
            kernel = ring.kernel(q_part, k_part, v_part, mask)
            part_o, part_lse = kernel.forward(q_part, k_part, v_part, mask, ring.scores, generator)
            merge_parts(o[:, block.queries], lse[:, :, block.queries], part_o, part_lse)
    return o.to(q.dtype), lse


@ring_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    B, T, H, _ = q.shape
    return q.new_empty(B, T, H, v.shape[-1]), q.new_empty(B, H, T, dtype=wide_dtype(q.dtype))


RING_OPERATION: Any = torch.ops.paceline.ring_attention.default
"""For selective recompute: its output is stored, so that nothing travels twice."""


@library.custom_op("paceline::ring_attention_backward", mutates_args=())
def ring_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    documents: Tensor | None,
    seed: Tensor | None,
    group_name: str,
    causal: bool,
    window: int,
    scale: float,
    softcap: float,
    dropout: float,
    reference: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of this rank's q, k and v."""
    ring = _RingPass(
        q, documents, seed, group_name, causal, window, Scores(scale=scale, softcap=softcap, dropout=dropout), reference
    )
    grad = grad.contiguous()
    dq = torch.zeros_like(q, dtype=wide_dtype(q.dtype), memory_format=torch.contiguous_format)
    sums: Tensor | None = None  # of the keys that this rank has at this step: gradients from the ranks that had them
    arriving: _Exchange | None = None
    for source, k_BSGD, v_BSGE in ring.visit(k, v):
        found: list[tuple[Block, Tensor, Tensor]] = []
        for block, mask, generator in ring.blocks(source):
            rows = block.queries
            q_part, k_part, v_part = q[:, rows], k_BSGD[:, block.keys], v_BSGE[:, block.keys]
            kernel = ring.kernel(q_part, k_part, v_part, mask)
            dq_part, dk_part, dv_part = kernel.backward(
                grad[:, rows], q_part, k_part, v_part, o[:, rows], lse[:, :, rows], mask, ring.scores, generator
            )
            dq[:, rows] += dq_part
            found.append((block, dk_part, dv_part))
        # only now: while the gradients were computed the sums of the step before were on their way here
        sums = (
            torch.zeros(k.numel() + v.numel(), dtype=dq.dtype, device=k.device) if arriving is None else arriving.wait()
        )
        dk, dv = _unpack(sums, k.shape, v.shape)
        for block, dk_part, dv_part in found:
            dk[:, block.keys] += dk_part
            dv[:, block.keys] += dv_part
        arriving = ring.exchange(sums, _GRADIENTS)
    assert arriving is not None
    dk, dv = _unpack(arriving.wait(), k.shape, v.shape)
    return dq.to(q.dtype), _own_memory(dk, k.dtype), _own_memory(dv, v.dtype)


@ring_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return dq, dk, dv


# ---- one pass round the ring


class _RingPass:
    def __init__(
        self,
        q: Tensor,
        documents: Tensor | None,
        seed: Tensor | None,
        group_name: str,
        causal: bool,
        window: int,
        scores: Scores,
        reference: bool,
    ) -> None:
        self.group = _resolve_process_group(cast(Any, group_name))
        self.ranks = dist.get_process_group_ranks(self.group)
        self.size, self.index = len(self.ranks), dist.get_rank(self.group)
        self.length, self.device = q.shape[1], q.device
        self.causal, self.window, self.scores, self.reference = causal, window, scores, reference
        self.seed = None if seed is None else int(seed)
        self.documents = None if documents is None else documents.unflatten(1, (self.size, self.length))
        self.layout = SequenceLayout(self.size, "ring")

    def visit(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(rank whose keys these are, its keys, its values); the next ones travel while these are used."""
        packed = torch.cat((k.flatten(), v.flatten()))
        for step in range(self.size):
            following = self.exchange(packed, _KEYS) if step < self.size - 1 else None
            yield (self.index - step) % self.size, *_unpack(packed, k.shape, v.shape)
            if following is not None:
                packed = following.wait()

    def blocks(self, source: int) -> Iterator[tuple[Block, PartMask, torch.Generator | None]]:
        described = ring_blocks(
            self.index,
            source,
            self.size,
            self.length,
            causal=self.causal,
            window=self.window,
            documents=self.documents is not None,
        )
        q_positions, k_positions = (
            self.layout.positions(rank, self.length, self.device) for rank in (self.index, source)
        )
        for number, block in enumerate(described):
            q_documents, k_documents = None, None
            if self.documents is not None:
                q_documents = self.documents[:, self.index, block.queries]
                k_documents = self.documents[:, source, block.keys]
            mask = PartMask(
                kind=block.kind,
                q_positions=q_positions[block.queries],
                k_positions=k_positions[block.keys],
                causal=self.causal,
                window=self.window,
                q_documents=q_documents,
                k_documents=k_documents,
            )
            yield block, mask, self._generator(source, number)

    def kernel(self, q: Tensor, k: Tensor, v: Tensor, mask: PartMask) -> PartKernel:
        return part_kernel(q, k, v, mask, self.scores, reference=self.reference)

    def exchange(self, sent: Tensor, tag: int) -> _Exchange:
        """``sent`` goes to the next rank; what `wait` gives comes from the one before."""
        received = torch.empty_like(sent)
        following, before = self.ranks[(self.index + 1) % self.size], self.ranks[(self.index - 1) % self.size]
        with record_function(RING_NAME):
            works = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, sent, following, group=self.group, tag=tag),
                    dist.P2POp(dist.irecv, received, before, group=self.group, tag=tag),
                ]
            )
        return _Exchange(works, sent, received)

    def _generator(self, source: int, number: int) -> torch.Generator | None:
        if self.seed is None:
            return None
        place = (self.index * self.size + source) * 4 + number  # at most four blocks for a pair of ranks
        return torch.Generator(self.device).manual_seed((self.seed + place * 0x9E3779B97F4A7C15) % 2**63)


class _Exchange:
    """Messages under way. What is sent is kept in memory until it is gone."""

    def __init__(self, works: list[dist.Work], sent: Tensor, received: Tensor) -> None:
        self._works, self._sent, self._received = works, sent, received

    def wait(self) -> Tensor:
        for work in self._works:
            work.wait()
        return self._received


def _unpack(packed: Tensor, k_shape: torch.Size, v_shape: torch.Size) -> tuple[Tensor, Tensor]:
    k, v = packed.split([k_shape.numel(), v_shape.numel()])
    return k.view(k_shape), v.view(v_shape)


def _own_memory(part: Tensor, dtype: torch.dtype) -> Tensor:
    """An operator's outputs may not share memory."""
    return part.to(dtype) if part.dtype != dtype else part.clone()
