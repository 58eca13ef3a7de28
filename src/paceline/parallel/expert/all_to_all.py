"""The dispatcher for experts spread over ranks: sort, count, exchange, sort again, and the way back.

    this rank's tokens, K copies of each, sorted by expert
      -> all-to-all over `ep`: to the rank that holds the expert; of the same index along `etp`
      -> all-gather over `etp`: to all ranks that hold a part of the expert's width
      -> sorted by expert over all sources -> experts -> the order in which they came
      -> reduce-scatter over `etp` -> all-to-all over `ep` -> the K rows of each token are added

The host waits once for the device, to learn how many rows come: nothing is padded and nothing beyond the router's own
capacity is dropped.

Dims as in `models/moe.py`; E experts in all, e experts of this rank, P ranks of `ep`, Q of `etp`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.models.moe import Dispatched, GatherRows, SpreadRows
from paceline.models.router import Routing
from paceline.parallel.collectives import Axis, all_gather
from paceline.parallel.expert.exchange import all_to_all_rows, exchange, gather_rows, reduce_scatter_rows

_EP_DISPATCH = ("ep/dispatch/all_to_all", "ep/weights/all_to_all")
_EP_COMBINE = ("ep/combine/all_to_all",)
_ETP_DISPATCH = ("etp/dispatch/all_gather", "etp/weights/all_gather")


@dataclass(frozen=True, kw_only=True)
class Route:
    """The way of one layer's tokens, there and back."""

    top_k: int
    order: Tensor
    """[A] which assignment (n * K + k) each row that is sent stands for."""
    inverse: Tensor
    """[N * K] which row each assignment is; the number of rows if it is not sent."""
    sent: list[int]
    """Rows to each rank of `ep`."""
    received: list[int]
    """Rows from each rank of `ep`."""
    gathered: list[int]
    """Rows that each rank of `etp` has received."""
    by_expert: Tensor
    """[A'] where the rows lie, as they come, sorted by expert."""
    as_came: Tensor
    """[A'] the inverse."""
    counts: Tensor
    """[e] rows of each expert of this rank."""


class AllToAllDispatcher:
    """See `TokenDispatcher`.

    Args:
        ep: ranks with different experts.
        etp: ranks with different parts of the same experts.
        experts_of_rank: how many experts each rank of `ep` has, in order.
    """

    def __init__(self, ep: Axis, etp: Axis, experts_of_rank: Sequence[int]) -> None:
        assert len(experts_of_rank) == ep.size and all(experts_of_rank), (ep.size, experts_of_rank)
        self._ep, self._etp = ep, etp
        self._experts_of_rank = list(experts_of_rank)

    def dispatch(self, x_NC: Tensor, routing: Routing) -> Dispatched:
        route = self._plan(routing)
        weights_A = routing.weights.flatten().gather(0, route.order)
        rows: tuple[Tensor, ...] = (SpreadRows.apply(x_NC, route.order, route.inverse, route.top_k), weights_A)
        if self._ep.size > 1:
            rows = all_to_all_rows(rows, self._ep, _EP_DISPATCH, sent=route.sent, received=route.received)
        if self._etp.size > 1:
            rows = gather_rows(rows, self._etp, _ETP_DISPATCH, sizes=route.gathered)
        rows_AC, weights_A = (_Permute.apply(row, route.by_expert, route.as_came) for row in rows)
        return Dispatched(rows_AC, weights_A, route.counts, route)

    def combine(self, rows_AC: Tensor, route: Any) -> Tensor:
        assert isinstance(route, Route)
        rows_AC = _Permute.apply(rows_AC, route.as_came, route.by_expert)
        if self._etp.size > 1:
            rows_AC = reduce_scatter_rows(rows_AC, self._etp, "etp/combine/reduce_scatter", sizes=route.gathered)
        if self._ep.size > 1:
            (rows_AC,) = all_to_all_rows((rows_AC,), self._ep, _EP_COMBINE, sent=route.received, received=route.sent)
        return GatherRows.apply(rows_AC, route.order, route.inverse, route.top_k)

    @torch.no_grad()
    def _plan(self, routing: Routing) -> Route:
        expert_A = routing.experts.flatten()
        counts_E = routing.load
        if routing.kept is not None:
            # behind the last expert: sorted to the end, and not sent
            expert_A = expert_A.masked_fill(~routing.kept.flatten(), len(counts_E))
            counts_E = counts_E.new_zeros(len(counts_E) + 1).scatter_add_(0, expert_A, torch.ones_like(expert_A))[:-1]
        came_QPe = self._exchange_counts(counts_E)
        # the one wait for the device
        numbers = torch.cat((counts_E, came_QPe.flatten())).tolist()
        sent = [sum(part) for part in _split(numbers[: len(counts_E)], self._experts_of_rank)]
        came = came_QPe.shape[2]
        sources = [sum(part) for part in _split(numbers[len(counts_E) :], [came] * (self._etp.size * self._ep.size))]
        received_by_etp = _split(sources, [self._ep.size] * self._etp.size)
        order_A = expert_A.argsort(stable=True)[: sum(sent)]
        inverse_A = torch.full_like(expert_A, len(order_A))
        inverse_A.scatter_(0, order_A, torch.arange(len(order_A), device=order_A.device))
        by_expert_A = _sort_by_expert(came_QPe, sum(sources))
        as_came_A = torch.empty_like(by_expert_A)
        as_came_A.scatter_(0, by_expert_A, torch.arange(len(by_expert_A), device=by_expert_A.device))
        return Route(
            top_k=routing.experts.shape[1],
            order=order_A,
            inverse=inverse_A,
            sent=sent,
            received=received_by_etp[self._etp.index],
            gathered=[sum(received) for received in received_by_etp],
            by_expert=by_expert_A,
            as_came=as_came_A,
            counts=came_QPe.sum((0, 1)),
        )

    def _exchange_counts(self, counts_E: Tensor) -> Tensor:
        """int64 [Q, P, e]: the rows that each rank of `etp` gets from each rank of `ep`, for each of our experts."""
        P, Q, e = self._ep.size, self._etp.size, self._experts_of_rank[self._ep.index]
        came_A = counts_E
        if P > 1:
            name = "ep/counts/all_to_all"
            came_A = exchange(counts_E, self._ep, name, sent=self._experts_of_rank, received=[e] * P)
        all_A = came_A.new_empty(Q * P * e)
        all_gather(all_A, came_A.contiguous(), self._etp, "etp/counts/all_gather")
        return all_A.view(Q, P, e)


def _sort_by_expert(came_QPe: Tensor, total: int) -> Tensor:
    """Rows lie by source, and within it by expert: where those of the first expert are, of the second, and so on."""
    e = came_QPe.shape[2]
    expert_QPe = torch.arange(e, device=came_QPe.device).expand_as(came_QPe)
    expert_A = expert_QPe.flatten().repeat_interleave(came_QPe.flatten(), output_size=total)
    return expert_A.argsort(stable=True)


def _split(numbers: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    parts, start = [], 0
    for size in sizes:
        parts.append(list(numbers[start : start + size]))
        start += size
    return parts


class _Permute(torch.autograd.Function):
    """Puts rows in another order. Both directions are gathers; autograd's own backward would add with atomics."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order_A: Tensor, inverse_A: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_A)
        return rows.index_select(0, order_A)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.index_select(0, ctx.saved_tensors[0]), None, None
