"""Where do the ranks of an axis lie? Arithmetic over order and degrees: a million ranks cost no more than eight.

Dense axes are laid out in `parallel.order`: neighbours differ in the last one. The ranks of a pipeline stage, in
that order, are its places; experts are folded over places as edp x ep x etp. Mirrors `parallel/mesh.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from paceline.config.parallel import ParallelConfig

EXPERT_AXES = ("edp", "ep", "etp")


@dataclass(frozen=True, kw_only=True)
class RankOrder:
    """The ranks of a layout; the degrees make the world size, and the experts fold over a stage's ranks."""

    parallel: ParallelConfig
    world_size: int

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Of every axis: the dense ones in the order of the recipe, then the expert ones."""
        parallel = self.parallel
        shard = parallel.shard_degree(self.world_size)
        dense = {axis: shard if axis == "dp_shard" else getattr(parallel, axis) for axis in parallel.order}
        experts = parallel.ep * parallel.etp
        return dense | {"edp": self.ranks_of_stage // experts, "ep": parallel.ep, "etp": parallel.etp}

    @property
    def ranks_of_stage(self) -> int:
        """Ranks that share one position of the pipeline."""
        return self.world_size // self.parallel.pp

    def step(self, axis: str) -> int:
        """By how much neighbours along an axis differ: in rank, or in place for an expert axis."""
        axes = EXPERT_AXES if axis in EXPERT_AXES else self.parallel.order
        return math.prod(self.sizes[name] for name in axes[axes.index(axis) + 1 :])

    def index(self, axis: str, rank: int) -> int:
        """Where a rank stands along an axis."""
        position = self._place(rank) if axis in EXPERT_AXES else rank
        return position // self.step(axis) % self.sizes[axis]

    def group(self, axis: str, rank: int) -> Sequence[int]:
        """The ranks that differ from ``rank`` along ``axis`` only, and ``rank``."""
        step = self.step(axis)
        position = self._place(rank) if axis in EXPERT_AXES else rank
        first = position - self.index(axis, rank) * step
        members = range(first, first + self.sizes[axis] * step, step)
        if axis not in EXPERT_AXES:
            return members
        stage = self.index("pp", rank)
        return [self._rank(stage, place) for place in members]

    def stage(self, index: int) -> Sequence[int]:
        """The ranks of one position of the pipeline."""
        if self.step("pp") == self.ranks_of_stage:
            return range(index * self.ranks_of_stage, (index + 1) * self.ranks_of_stage)
        inner = self.step("pp")
        blocks = range(index * inner, self.world_size, inner * self.parallel.pp)
        return [rank for block in blocks for rank in range(block, block + inner)]

    def groups(self, axis: str) -> Iterator[Sequence[int]]:
        """Every group of an axis, by its first rank: as many as world size / degree."""
        if axis not in EXPERT_AXES:
            span = self.step(axis) * self.sizes[axis]
            for start in range(0, self.world_size, span):
                for first in range(start, start + self.step(axis)):
                    yield range(first, first + span, self.step(axis))
            return
        span = self.step(axis) * self.sizes[axis]
        for stage in range(self.parallel.pp):
            ranks = self.stage(stage)
            for start in range(0, len(ranks), span):
                for first in range(start, start + self.step(axis)):
                    yield ranks[first : start + span : self.step(axis)]

    def nodes_spanned(self, axis: str, gpus_per_node: int) -> int:
        """Nodes over which the widest group of ``axis`` reaches, with ranks dealt out to nodes in order."""
        size, step = self.sizes[axis], self.step(axis)
        if size == 1 or self.world_size <= gpus_per_node:
            return 1
        if axis in EXPERT_AXES and self.step("pp") != self.ranks_of_stage:
            return self._widest_fold(axis, gpus_per_node)
        if step >= gpus_per_node:
            return size
        # no node between the first and the last rank is left out, so the widest group begins nearest a node's end
        span, repeats = size * step, gpus_per_node // math.gcd(gpus_per_node, size * step)
        starts = (run * span % gpus_per_node for run in range(min(repeats, self.world_size // span)))
        latest = max(min(start + step, gpus_per_node) - 1 for start in starts)
        return (latest + (size - 1) * step) // gpus_per_node + 1

    def _widest_fold(self, axis: str, gpus_per_node: int) -> int:
        """`nodes_spanned` of an expert axis where stages do not lie side by side."""
        step, inner, span = self.step(axis), self.step("pp"), self.step(axis) * self.sizes[axis]
        block = inner * self.parallel.pp
        # after so many places ranks lie on nodes as before
        period = math.lcm(span, inner * (gpus_per_node // math.gcd(gpus_per_node, block)))
        widest = 1
        for stage in range(self.parallel.pp):
            nodes = [rank // gpus_per_node for rank in self.stage(stage)[:period]]
            for start in range(0, len(nodes), span):
                for first in range(start, start + step):
                    widest = max(widest, len(set(nodes[first : start + span : step])))
        return widest

    def _place(self, rank: int) -> int:
        """Position of a rank among those of its stage."""
        inner = self.step("pp")
        return rank // (inner * self.parallel.pp) * inner + rank % inner

    def _rank(self, stage: int, place: int) -> int:
        inner = self.step("pp")
        return place // inner * inner * self.parallel.pp + stage * inner + place % inner
