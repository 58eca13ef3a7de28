"""Routing over sequences that are cut: over `cp` in the parts that attention wants, and each of those over `tp`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.parallel.mesh import ParallelMesh
from paceline.parallel.regions import gather_replicated, sum_replicated
from paceline.parallel.sequence import SequenceLayout


class Order(NamedTuple):
    """Where tokens stand and lie, for one length."""

    natural: Tensor
    """[parts * T]: where, in the parts of all ranks one after the other, the token of each position lies."""
    own: Tensor
    """[T]: the positions of the tokens here."""


class CutSequences:
    """See `SequenceView`. All ranks of the axis hold the same number of tokens of the same sequences.

    Args:
        layout: which positions each rank of `cp` has; over `tp` each of these parts is cut into neighbouring pieces.
    """

    def __init__(self, mesh: ParallelMesh, layout: SequenceLayout) -> None:
        self._axis, self._layout, self._tp = mesh["cp_tp"], layout, mesh.size("tp")
        self.parts = self._axis.size
        assert self.parts == layout.size * self._tp, (self.parts, layout.size, self._tp)
        self._places = mesh.places("cp_tp")
        self._orders: dict[tuple[int, torch.device], Order] = {}

    def sum_over_parts(self, counts_BE: Tensor) -> Tensor:
        return sum_replicated(counts_BE, self._axis, "cp_tp/router")

    def gather(self, experts_BTK: Tensor) -> Tensor:
        T = experts_BTK.shape[1]
        as_lying_BTK = gather_replicated(experts_BTK.to(torch.int32), self._axis, "cp_tp/router", dim=1)
        return as_lying_BTK.index_select(1, self._order(T, experts_BTK.device).natural).to(experts_BTK.dtype)

    def local(self, whole_BTK: Tensor) -> Tensor:
        T = whole_BTK.shape[1] // self.parts
        return whole_BTK.index_select(1, self._order(T, whole_BTK.device).own)

    def _order(self, T: int, device: torch.device) -> Order:
        if torch.compiler.is_compiling():
            return self._make_order(T, device)  # a constant of the graph
        # kept: made anew it would be copied to the device in every layer
        if (T, device) not in self._orders:
            self._orders[T, device] = self._make_order(T, device)
        return self._orders[T, device]

    def _make_order(self, T: int, device: torch.device) -> Order:
        parts = [
            self._layout.positions(place["cp"], T * self._tp, device)[place["tp"] * T :][:T] for place in self._places
        ]
        return Order(natural=torch.cat(parts).argsort(), own=parts[self._axis.index])
