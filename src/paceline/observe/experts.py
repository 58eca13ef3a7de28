"""How evenly are the experts of each layer used, and how much is dropped? Counted on the device, read where logged."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.observe.events import Metric


class ExpertMeter:
    """Counts of all expert layers of the model since the last reading, of which a rank may know only its own.

    Args:
        layers: names of all expert layers, in order: the rows of what `read` gives.
    """

    def __init__(self, device: torch.device, layers: Sequence[str], num_experts: int) -> None:
        self._rows = {name: row for row, name in enumerate(layers)}
        # assignments of each expert, then dropped ones
        self._counts = torch.zeros(len(layers), num_experts + 1, dtype=torch.int64, device=device)

    def add(self, layers: Sequence[str], load_LE: Tensor, dropped_L: Tensor) -> None:
        """Adds a step's counts of some layers, already summed over the ranks that have these layers."""
        for name, load_E, dropped in zip(layers, load_LE, dropped_L, strict=True):
            row = self._counts[self._rows[name]]
            row[:-1] += load_E
            row[-1] += dropped

    def read(self) -> dict[str, Metric]:
        """By expert layer: the busiest expert's load over the mean, and the share of assignments dropped. Collective.

        Waits for the device, and starts counting anew.
        """
        counts = self._counts.clone()
        self._counts.zero_()
        if dist.is_initialized() and dist.get_world_size() > 1:
            # ranks that have a layer agree on its counts, the others have 0
            dist.all_reduce(counts, op=dist.ReduceOp.MAX)
        load, dropped = counts[:, :-1].double(), counts[:, -1].double()
        imbalance = load.amax(1) / load.mean(1).clamp(min=1e-9)
        share = dropped / load.sum(1).clamp(min=1)
        return {"moe/load_max_over_mean": imbalance.tolist(), "moe/drop_share": share.tolist()}
