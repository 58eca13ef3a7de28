"""The arithmetic of ranks against plain counting, in every order of the axes."""

from __future__ import annotations

import itertools
import time

import pytest

from paceline.config.parallel import ParallelConfig
from paceline.config.ranks import EXPERT_AXES, RankOrder

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def _counted(order: RankOrder) -> dict[str, list[list[int]]]:
    """Groups of every axis, by listing all coordinates."""
    parallel, found = order.parallel, {}
    places = list(itertools.product(*(range(order.sizes[axis]) for axis in parallel.order)))
    coordinates = [dict(zip(parallel.order, place, strict=True)) for place in places]
    for stage in range(parallel.pp):
        members = [rank for rank, place in enumerate(coordinates) if place["pp"] == stage]
        folded = itertools.product(*(range(order.sizes[axis]) for axis in EXPERT_AXES))
        for rank, place in zip(members, folded, strict=True):
            coordinates[rank] |= dict(zip(EXPERT_AXES, place, strict=True))
    for axis in (*AXES, *EXPERT_AXES):
        others = [name for name in ("pp", *EXPERT_AXES) if name != axis] if axis in EXPERT_AXES else AXES
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, place in enumerate(coordinates):
            groups.setdefault(tuple(place[name] for name in others if name != axis), []).append(rank)
        found[axis] = list(groups.values())
        assert all(coordinates[rank][axis] == order.index(axis, rank) for rank in range(order.world_size))
    return found


@pytest.mark.parametrize("axes", list(itertools.permutations(AXES))[::7], ids="-".join)
def test_groups_stages_and_nodes_are_those_that_counting_finds(axes: tuple[str, ...]) -> None:
    parallel = ParallelConfig(tp=2, pp=3, cp=2, dp_replicate=2, ep=3, etp=2, order=axes)
    order = RankOrder(parallel=parallel, world_size=72)
    for axis, groups in _counted(order).items():
        assert sorted(map(list, order.groups(axis))) == sorted(groups)
        assert all(list(order.group(axis, rank)) == group for group in groups for rank in group)
        for per_node in (1, 2, 3, 4, 5, 8, 24, 72, 100):
            widest = max(len({rank // per_node for rank in group}) for group in groups)
            assert order.nodes_spanned(axis, per_node) == widest, (axis, per_node)
    for stage in range(3):
        assert list(order.stage(stage)) == [rank for rank in range(72) if order.index("pp", rank) == stage]


def test_a_million_ranks_cost_little() -> None:
    order = RankOrder(parallel=ParallelConfig(tp=8, pp=16, ep=64), world_size=2**20)
    began = time.process_time()
    assert order.nodes_spanned("tp", 8) == 1 and order.nodes_spanned("dp_shard", 8) == 8192
    assert order.nodes_spanned("ep", 8) == 8 and len(order.group("edp", 5)) == 1024
    assert time.process_time() - began < 0.5
