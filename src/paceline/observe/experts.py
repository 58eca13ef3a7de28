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
        # assignments of each expert, then dropped ones, then the routers' entropy; whole numbers are exact to 2^53
        self._counts = torch.zeros(len(layers), num_experts + 2, dtype=torch.float64, device=device)

    def add(self, layers: Sequence[str], load_LE: Tensor, dropped_L: Tensor, entropy_L: Tensor) -> None:
        """Adds a step's counts of some layers, already summed over the ranks that have these layers.

        Args:
            entropy_L: summed over assignments, in nats.
        """
        rows = torch.cat((load_LE.double(), dropped_L[:, None].double(), entropy_L[:, None].double()), dim=1)
        for name, row in zip(layers, rows, strict=True):
            self._counts[self._rows[name]] += row

    def read(self) -> dict[str, Metric]:
        """By expert layer: the busiest expert's load over the mean, the share of assignments dropped, and the mean
        entropy of a token's probabilities, in nats. Collective.

        Waits for the device, and starts counting anew.
        """
        counts = self._counts.clone()
        self._counts.zero_()
        if dist.is_initialized() and dist.get_world_size() > 1:
            # ranks that have a layer agree on its counts, the others have 0
            dist.all_reduce(counts, op=dist.ReduceOp.MAX)
        load, dropped, entropy = counts[:, :-2], counts[:, -2], counts[:, -1]
        imbalance = load.amax(1) / load.mean(1).clamp(min=1e-9)
        total = load.sum(1).clamp(min=1)
        return {
            "moe/load_max_over_mean": imbalance.tolist(),
            "moe/drop_share": (dropped / total).tolist(),
            "moe/router_entropy": (entropy / total).tolist(),
        }
