"""How many layers lie on each pipeline rank, in each framework's way of cutting?"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

from paceline.costs.stages import partition

Cut = Literal["cost", "even", "greedy"]


@lru_cache(maxsize=4096)
def layers_by_rank(
    layers: int, pp: int, cut: Cut, head_layers: float, stages_per_rank: int = 1, *, v_shaped: bool = False
) -> tuple[float, ...]:
    """Layers on each pipeline rank.

    even: the same number for each; where that does not divide, embedding and head count as a layer each if that
    helps, else the first ranks have one more. cost: the fullest rank as empty as can be, the head as costly as
    ``head_layers`` layers. greedy: ranks in turn take layers until they pass their share of the whole cost (nanotron).
    """
    if pp == 1:
        return (float(layers),)
    stages = pp * stages_per_rank
    if cut == "even":
        if layers % stages and (layers + 2) % stages == 0:
            each = (layers + 2) // pp
            return (float(each - 1), *[float(each)] * (pp - 2), float(each - 1))
        base, longer = divmod(layers, pp)
        return tuple(float(base + (rank < longer)) for rank in range(pp))
    if cut == "greedy":
        return _greedy(layers, pp, head_layers)
    if stages > layers:
        return tuple(float(layers) / pp for _ in range(pp))
    by_stage = list(partition([1000] * layers, round(1000 * head_layers), stages))
    return sum_by_rank(by_stage, pp, v_shaped=v_shaped)


def sum_by_rank(by_stage: Sequence[int], pp: int, *, v_shaped: bool) -> tuple[float, ...]:
    """Layers of stages on the ranks that hold them: in turns, or, in a V, down the ranks and back up."""
    if v_shaped:
        return tuple(float(by_stage[rank] + by_stage[2 * pp - 1 - rank]) for rank in range(pp))
    return tuple(float(sum(by_stage[rank::pp])) for rank in range(pp))


def _greedy(layers: int, pp: int, head_layers: float) -> tuple[float, ...]:
    whole, passed, rank = layers + head_layers, 0.0, 0
    found = [0.0] * pp
    for _ in range(layers):
        found[rank] += 1
        passed += 1
        if passed > whole * (rank + 1) / pp and rank + 1 < pp:
            rank += 1
    return tuple(found)
