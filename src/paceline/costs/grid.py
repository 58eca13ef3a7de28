"""Which ranks lie along which axis? The grid of `parallel/mesh.py` as plain arithmetic, for thousands of ranks.

Dense axes are laid out in `parallel.order`; the ranks of a pipeline stage, in that order, are folded again as
edp x ep x etp for experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from paceline.config.parallel import ParallelConfig
from paceline.errors import ConfigError

EXPERT_AXES = ("edp", "ep", "etp")


@dataclass(frozen=True, kw_only=True)
class RankGrid:
    """All ranks with their coordinates.

    Raises:
        ConfigError: the degrees do not make the world size, or the experts do not fold over a stage's ranks.
    """

    parallel: ParallelConfig
    world_size: int

    def __post_init__(self) -> None:
        ranks, experts = self.ranks_of_stage, self.parallel.ep * self.parallel.etp
        if ranks % experts:
            raise ConfigError(
                f"parallel.ep * parallel.etp = {experts} does not divide the {ranks} ranks of a pipeline stage",
                evidence=f"{self.world_size} ranks / pp {self.parallel.pp}.",
                next_step=f"Choose ep and etp so that their product divides {ranks}.",
            )

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Of every axis: the dense ones in the order of the recipe, then the expert ones."""
        parallel = self.parallel
        dense = {
            "pp": parallel.pp,
            "dp_replicate": parallel.dp_replicate,
            "dp_shard": parallel.shard_degree(self.world_size),
            "cp": parallel.cp,
            "tp": parallel.tp,
        }
        experts = parallel.ep * parallel.etp
        return {axis: dense[axis] for axis in parallel.order} | {
            "edp": self.ranks_of_stage // experts,
            "ep": parallel.ep,
            "etp": parallel.etp,
        }

    @property
    def ranks_of_stage(self) -> int:
        """Ranks that share one position of the pipeline."""
        self.parallel.shard_degree(self.world_size)  # refuses degrees that do not make the world size
        return self.world_size // self.parallel.pp

    @cached_property
    def coordinates(self) -> tuple[dict[str, int], ...]:
        """Index along every axis, of every rank."""
        return tuple(self._coordinate(rank) for rank in range(self.world_size))

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """The ranks that differ along ``axis`` only: every rank in one group."""
        of_experts = axis in EXPERT_AXES
        others = ("pp", *EXPERT_AXES) if of_experts else self.parallel.order
        found: dict[tuple[int, ...], list[int]] = {}
        for rank, coordinate in enumerate(self.coordinates):
            found.setdefault(tuple(coordinate[other] for other in others if other != axis), []).append(rank)
        return [tuple(ranks) for ranks in found.values()]

    def nodes_spanned(self, axis: str, gpus_per_node: int) -> int:
        """Nodes over which the widest group of ``axis`` reaches, with ranks dealt out to nodes in order."""
        return max(len({rank // gpus_per_node for rank in group}) for group in self.groups(axis))

    def ranks_at(self, pipeline_rank: int) -> Sequence[int]:
        """The ranks of one position of the pipeline."""
        return [rank for rank, coordinate in enumerate(self.coordinates) if coordinate["pp"] == pipeline_rank]

    def _coordinate(self, rank: int) -> dict[str, int]:
        coordinate, rest = {}, rank
        for axis in reversed(self.parallel.order):
            rest, coordinate[axis] = divmod(rest, self.sizes[axis])
        place = 0
        for axis in self.parallel.order:
            if axis != "pp":
                place = place * self.sizes[axis] + coordinate[axis]
        for axis in reversed(EXPERT_AXES):
            place, coordinate[axis] = divmod(place, self.sizes[axis])
        return coordinate

    def __hash__(self) -> int:
        return hash((self.parallel, self.world_size))


def stride_of(group: Sequence[int]) -> int | None:
    """By how much neighbours of a group differ; None where that is not the same for all."""
    steps = {after - before for before, after in pairwise(group)}
    return steps.pop() if len(steps) == 1 else None
