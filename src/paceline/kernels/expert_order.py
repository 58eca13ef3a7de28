"""In which order do experts take their tokens? Rows sorted by expert, made from the router's choice on the device.

A counting sort: each block of assignments counts its own, a running sum over blocks says where each block begins in
each expert, and every assignment finds its row by itself. Stable, so that repeats are bit-equal, and nothing is read by
the host. A full sort would go over the same numbers several times.

Dims: N tokens, K experts a token takes, A = N * K assignments (number n * K + k), E experts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class ExpertOrder(NamedTuple):
    """Where each assignment lies once rows are sorted by expert; within an expert, by assignment."""

    order: Tensor
    """int32 [A]: the assignment of each row. Rows from `ends[-1]` on are nobody's, and so is what is said of them."""
    place: Tensor
    """int32 [A]: the row of each assignment; -1 where it was dropped."""
    ends: Tensor
    """int32 [E]: where each expert's rows end."""


def expert_order_reference(experts_NK: Tensor, kept_NK: Tensor | None, num_experts: int) -> ExpertOrder:
    """With a sort.

    Args:
        experts_NK: integers.
        kept_NK: bool, False where an assignment was dropped.
    """
    expert_A = experts_NK.flatten().long()  # what scatters by it takes no narrower one everywhere (torch 2.11)
    if kept_NK is not None:
        expert_A = expert_A.masked_fill(~kept_NK.flatten(), num_experts)
    order_A = expert_A.argsort(stable=True)
    place_A = torch.empty_like(order_A).scatter_(0, order_A, torch.arange(len(order_A), device=order_A.device))
    place_A = place_A.masked_fill_(expert_A == num_experts, -1)
    counts_E = expert_A.new_zeros(num_experts + 1).scatter_add_(0, expert_A, torch.ones_like(expert_A))[:-1]
    return ExpertOrder(order_A.int(), place_A.int(), counts_E.cumsum(0, dtype=torch.int32))


def sorted_order(counts_E: Tensor, num_rows: int) -> ExpertOrder:
    """The order of rows that are sorted already, each an assignment of its own."""
    rows_A = torch.arange(num_rows, dtype=torch.int32, device=counts_E.device)
    return ExpertOrder(rows_A, rows_A, counts_E.cumsum(0, dtype=torch.int32))
