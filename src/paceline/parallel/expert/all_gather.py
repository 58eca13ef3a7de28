"""The dispatcher for few ranks and many experts a token: every rank sees all tokens and takes what is for its experts.

    this rank's tokens, their experts and weights
      -> all-gather over `etp` and `ep` -> experts, which leave out what is for other ranks' experts
      -> reduce-scatter over `ep` and `etp`: each token's sum over the ranks

With K experts a token and P ranks, a token is wanted by nearly every rank as soon as K is not small beside P, and
all-to-all sends it once for each expert: K (P - 1) / P rows a token, where gathering takes P - 1. On two ranks with
K = 8 that is a quarter. Shapes do not depend on who chooses whom: the host waits for nothing, and a compiled block is
one graph. The price is room for the worst case: hidden numbers of P N K rows, of which about 1 / P are ever written.

Sums over the experts of one rank are rounded before they are added up over ranks, where all-to-all rounds once.

Dims as in `models/moe.py`; P ranks of `ep` times `etp`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.models.moe import Chosen, Dispatched
from paceline.models.router import Routing
from paceline.parallel.collectives import Axis
from paceline.parallel.regions import gather_replicated, gather_sequence, scatter_sum

_DROPPED = -1


class AllGatherDispatcher:
    """See `TokenDispatcher`; for experts that take rows as they come.

    Args:
        ep: ranks with different experts.
        etp: ranks with different parts of the same experts.
        start, end: the experts of this rank.
    """

    def __init__(self, ep: Axis, etp: Axis, start: int, end: int) -> None:
        self._ep, self._etp, self._start, self._end = ep, etp, start, end

    def dispatch(self, x_NC: Tensor, routing: Routing, *, sort: bool = True) -> Dispatched:
        assert not sort, "experts with kernels sort themselves"
        expert_NK = routing.experts.int()
        if routing.kept is not None:
            expert_NK = expert_NK.masked_fill(~routing.kept, _DROPPED)
        for axis, name in ((self._etp, "etp"), (self._ep, "ep")):
            x_NC = gather_sequence(x_NC, axis, f"{name}/dispatch", dim=0)
            weights_NK = gather_sequence(routing.weights, axis, f"{name}/weights", dim=0)
            expert_NK = gather_replicated(expert_NK, axis, f"{name}/choices", dim=0)
            routing = routing._replace(weights=weights_NK)
        here_NK = (expert_NK >= self._start) & (expert_NK < self._end)
        own_NK = torch.where(here_NK, expert_NK - self._start, 0)
        return Dispatched(x_NC, routing.weights, routing.load, None, Chosen(own_NK, here_NK))

    def combine(self, rows_AC: Tensor, route: Any) -> Tensor:
        for axis, name in ((self._ep, "ep"), (self._etp, "etp")):
            rows_AC = scatter_sum(rows_AC, axis, f"{name}/combine", dim=0)
        return rows_AC
