"""The dispatcher for experts spread over ranks: sort, count, exchange, sort again, and the way back.

    this rank's tokens, K copies of each, sorted by expert
      -> all-to-all over `ep`: to the rank that holds the expert; of the same index along `etp`
      -> all-gather over `etp`: to all ranks that hold a part of the expert's width
      -> sorted by expert over all sources -> experts -> the order in which they came
      -> reduce-scatter over `etp` -> all-to-all over `ep` -> the K rows of each token are added

Where the experts take rows as they come (`parallel.expert_kernels`), the second sort is left to them, the first one is
their counting sort, and rows are written in one pass each way.

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

from paceline.kernels.expert_order import ExpertOrder
from paceline.kernels.experts import expert_order, row_steps
from paceline.models.moe import Chosen, Dispatched, GatherRows, SpreadRows
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
    """[N * K] which row each assignment is; the number of rows, or -1, if it is not sent."""
    places: ExpertOrder | None
    """The same for kernels, where the experts take rows as they come."""
    sent: list[int]
    """Rows to each rank of `ep`."""
    received: list[int]
    """Rows from each rank of `ep`."""
    gathered: list[int]
    """Rows that each rank of `etp` has received."""
    expert_of: Tensor
    """[A'] which of this rank's experts each row is for, as they come."""
    by_expert: Tensor | None
    """[A'] where the rows lie, as they come, sorted by expert; None where they are left as they come."""
    as_came: Tensor | None
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

    def dispatch(self, x_NC: Tensor, routing: Routing, *, sort: bool = True) -> Dispatched:
        route = self._plan(routing, sort)
        weights_A = routing.weights.flatten().gather(0, route.order)
        if route.places is None:
            rows_AC = SpreadRows.apply(x_NC, route.order, route.inverse, route.top_k)
        else:
            rows_AC = _Spread.apply(x_NC, len(route.order), route.top_k, *route.places)
        rows: tuple[Tensor, ...] = (rows_AC, weights_A)
        if self._ep.size > 1:
            rows = all_to_all_rows(rows, self._ep, _EP_DISPATCH, sent=route.sent, received=route.received)
        if self._etp.size > 1:
            rows = gather_rows(rows, self._etp, _ETP_DISPATCH, sizes=route.gathered)
        if route.by_expert is None:
            chosen = Chosen(route.expert_of[:, None], None)
            return Dispatched(rows[0], rows[1][:, None], route.counts, route, chosen)
        rows_AC, weights_A = (_Permute.apply(row, route.by_expert, route.as_came) for row in rows)
        return Dispatched(rows_AC, weights_A, route.counts, route)

    def combine(self, rows_AC: Tensor, route: Any) -> Tensor:
        assert isinstance(route, Route)
        if route.by_expert is not None:
            rows_AC = _Permute.apply(rows_AC, route.as_came, route.by_expert)
        if self._etp.size > 1:
            rows_AC = reduce_scatter_rows(rows_AC, self._etp, "etp/combine/reduce_scatter", sizes=route.gathered)
        if self._ep.size > 1:
            (rows_AC,) = all_to_all_rows((rows_AC,), self._ep, _EP_COMBINE, sent=route.received, received=route.sent)
        if route.places is not None:
            return _Combine.apply(rows_AC, route.top_k, *route.places)
        return GatherRows.apply(rows_AC, route.order, route.inverse, route.top_k)

    @torch.no_grad()
    def _plan(self, routing: Routing, sort: bool) -> Route:
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
        expert_of_A = _expert_of_rows(came_QPe, sum(sources))
        by_expert_A: Tensor | None = None
        as_came_A: Tensor | None = None
        places: ExpertOrder | None = None
        if sort:
            order_A = expert_A.argsort(stable=True)[: sum(sent)]
            inverse_A = torch.full_like(expert_A, len(order_A))
            inverse_A.scatter_(0, order_A, torch.arange(len(order_A), device=order_A.device))
            by_expert_A = expert_of_A.argsort(stable=True)
            as_came_A = torch.empty_like(by_expert_A)
            as_came_A.scatter_(0, by_expert_A, torch.arange(len(by_expert_A), device=by_expert_A.device))
        else:
            places = expert_order(routing.experts, routing.kept, len(routing.load))
            order_A, inverse_A = places.order[: sum(sent)].long(), places.place
        return Route(
            top_k=routing.experts.shape[1],
            order=order_A,
            inverse=inverse_A,
            places=places,
            sent=sent,
            received=received_by_etp[self._etp.index],
            gathered=[sum(received) for received in received_by_etp],
            expert_of=expert_of_A,
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


def _expert_of_rows(came_QPe: Tensor, total: int) -> Tensor:
    """[A'] rows lie by source, and within it by expert."""
    e = came_QPe.shape[2]
    expert_QPe = torch.arange(e, device=came_QPe.device).expand_as(came_QPe)
    return expert_QPe.flatten().repeat_interleave(came_QPe.flatten(), output_size=total)


def _split(numbers: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    parts, start = [], 0
    for size in sizes:
        parts.append(list(numbers[start : start + size]))
        start += size
    return parts


class _Spread(torch.autograd.Function):
    """`SpreadRows` in one pass. Arguments after the tokens: how many rows are sent, K, an `ExpertOrder`."""

    @staticmethod
    def forward(ctx: Any, x_NC: Tensor, number: int, top_k: int, *order: Tensor) -> Tensor:
        ctx.save_for_backward(*order)
        ctx.top_k = top_k
        rows_AC: Tensor = row_steps("triton", x_NC).spread(x_NC, ExpertOrder(*order), top_k)
        return rows_AC[:number]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_AC,) = grads
        order = ExpertOrder(*ctx.saved_tensors)
        return row_steps("triton", grad_AC).combine(grad_AC.contiguous(), order, ctx.top_k), *(None,) * 5


class _Combine(torch.autograd.Function):
    """`GatherRows` in one pass: the mirror image of `_Spread`. Arguments after the rows: K, an `ExpertOrder`."""

    @staticmethod
    def forward(ctx: Any, rows_AC: Tensor, top_k: int, *order: Tensor) -> Tensor:
        ctx.save_for_backward(*order)
        ctx.top_k, ctx.number = top_k, len(rows_AC)
        out_NC: Tensor = row_steps("triton", rows_AC).combine(rows_AC.contiguous(), ExpertOrder(*order), top_k)
        return out_NC

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_NC,) = grads
        rows_AC = row_steps("triton", grad_NC).spread(grad_NC, ExpertOrder(*ctx.saved_tensors), ctx.top_k)
        return rows_AC[: ctx.number], *(None,) * 4


class _Permute(torch.autograd.Function):
    """Puts rows in another order. Both directions are gathers; autograd's own backward would add with atomics."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order_A: Tensor, inverse_A: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_A)
        return rows.index_select(0, order_A)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient.index_select(0, ctx.saved_tensors[0]), None, None
