"""`kernels/expert_order.py` as a counting sort. Imported only where it runs: Triton does not come with a CPU build of
torch.

Dims: A assignments, B blocks of them, E experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels.expert_order import ExpertOrder

_BLOCK = 128
"""Assignments of a program, which compares each with all others: 64 comparisons a thread, in registers."""


def expert_order_triton(
    experts_NK: Tensor, kept_NK: Tensor | None, num_experts: int, *, block: int = _BLOCK
) -> ExpertOrder:
    """See `expert_order.expert_order_reference`."""
    expert_A = experts_NK.reshape(-1)
    size, device = expert_A.numel(), expert_A.device
    blocks = triton.cdiv(size, block)
    kept_A = expert_A if kept_NK is None else kept_NK.reshape(-1)
    rank_A = torch.empty(size, dtype=torch.int32, device=device)
    # by expert, then by block: a running sum over all of it is where each block's part of each expert ends
    counts_EB = torch.empty(num_experts, blocks, dtype=torch.int32, device=device)
    order_A, place_A = torch.empty_like(rank_A), torch.empty_like(rank_A)
    ends_E = torch.zeros(num_experts, dtype=torch.int32, device=device)
    if size == 0:
        return ExpertOrder(order_A, place_A, ends_E)
    shared = {"HAS_KEPT": kept_NK is not None, "BLOCK": block, "num_warps": 8}
    _expert_rank_kernel[(blocks,)](
        expert_A, kept_A, rank_A, counts_EB, size, num_experts, blocks, EXPERTS=128, **shared
    )
    until_EB = counts_EB.view(-1).cumsum(0, dtype=torch.int32)
    _expert_place_kernel[(blocks,)](
        expert_A, kept_A, rank_A, counts_EB, until_EB, order_A, place_A, ends_E, size, num_experts, blocks,
        PADDED=triton.next_power_of_2(num_experts), **shared,
    )  # fmt: skip
    return ExpertOrder(order_A, place_A, ends_E)


@triton.jit
def _experts_of(expert, kept, assignment, size, num_experts, HAS_KEPT: tl.constexpr):  # type: ignore[no-untyped-def]
    """The expert of each assignment; ``num_experts`` where there is none."""
    inside = assignment < size
    found = tl.load(expert + assignment, mask=inside, other=num_experts).to(tl.int32)
    if HAS_KEPT:
        is_kept = tl.load(kept + assignment, mask=inside, other=0)
        found = tl.where(is_kept != 0, found, num_experts)
    return found


@triton.jit
def _expert_rank_kernel(  # type: ignore[no-untyped-def]
    expert,
    kept,
    rank,
    counts,
    size,
    num_experts,
    blocks,
    HAS_KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """How many before it in its block chose the same expert; how many of the block chose each."""
    own_A = tl.arange(0, BLOCK)
    assignment_A = tl.program_id(0) * BLOCK + own_A
    expert_A = _experts_of(expert, kept, assignment_A, size, num_experts, HAS_KEPT)
    before_AA = (expert_A[:, None] == expert_A[None, :]) & (own_A[None, :] < own_A[:, None])
    tl.store(rank + assignment_A, tl.sum(before_AA.to(tl.int32), axis=1), mask=assignment_A < size)
    for start in range(0, num_experts, EXPERTS):
        number_E = start + tl.arange(0, EXPERTS)
        count_E = tl.sum((expert_A[:, None] == number_E[None, :]).to(tl.int32), axis=0)
        tl.store(counts + number_E * blocks + tl.program_id(0), count_E, mask=number_E < num_experts)


@triton.jit
def _expert_place_kernel(  # type: ignore[no-untyped-def]
    expert,
    kept,
    rank,
    counts,
    until,
    order,
    place,
    ends,
    size,
    num_experts,
    blocks,
    HAS_KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
    PADDED: tl.constexpr,
):
    assignment_A = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside_A = assignment_A < size
    expert_A = _experts_of(expert, kept, assignment_A, size, num_experts, HAS_KEPT)
    taken_A = expert_A < num_experts
    cell_A = expert_A * blocks + tl.program_id(0)
    first_A = tl.load(until + cell_A, mask=taken_A, other=0) - tl.load(counts + cell_A, mask=taken_A, other=0)
    row_A = first_A + tl.load(rank + assignment_A, mask=inside_A, other=0)
    tl.store(place + assignment_A, tl.where(taken_A, row_A, -1), mask=inside_A)
    tl.store(order + row_A, assignment_A, mask=taken_A)
    if tl.program_id(0) == 0:
        number_E = tl.arange(0, PADDED)
        end_E = tl.load(until + (number_E + 1) * blocks - 1, mask=number_E < num_experts, other=0)
        tl.store(ends + number_E, end_E, mask=number_E < num_experts)
