"""Which ranks lie along which axis? The grid of `parallel/mesh.py` as plain arithmetic, for thousands of ranks.

The arithmetic is `config/ranks.py`; here are the refusals, and every rank's coordinates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from paceline.config.parallel import ParallelConfig
from paceline.config.ranks import EXPERT_AXES, RankOrder
from paceline.errors import ConfigError

__all__ = ["EXPERT_AXES", "RankGrid", "stride_of"]


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
    def order(self) -> RankOrder:
        return RankOrder(parallel=self.parallel, world_size=self.world_size)

    @property
    def sizes(self) -> dict[str, int]:
        """Of every axis: the dense ones in the order of the recipe, then the expert ones."""
        return self.order.sizes

    @property
    def ranks_of_stage(self) -> int:
        """Ranks that share one position of the pipeline."""
        self.parallel.shard_degree(self.world_size)  # refuses degrees that do not make the world size
        return self.world_size // self.parallel.pp

    @cached_property
    def coordinates(self) -> tuple[dict[str, int], ...]:
        """Index along every axis, of every rank."""
        return tuple(self.coordinate(rank) for rank in range(self.world_size))

    def coordinate(self, rank: int) -> dict[str, int]:
        """Index along every axis."""
        return {axis: self.order.index(axis, rank) for axis in self.sizes}

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """The ranks that differ along ``axis`` only: every rank in one group."""
        return [tuple(group) for group in self.order.groups(axis)]

    def __hash__(self) -> int:
        return hash((self.parallel, self.world_size))


def stride_of(group: Sequence[int]) -> int | None:
    """By how much neighbours of a group differ; None where that is not the same for all."""
    if isinstance(group, range):
        return group.step if len(group) > 1 else None
    steps = {after - before for before, after in pairwise(group)}
    return steps.pop() if len(steps) == 1 else None
