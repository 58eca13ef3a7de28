"""What the micro-batches of a step add up to, kept on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.tasks.task import MEAN
from paceline.training.staged import StageTerms


class Totals:
    """Sums over micro-batches: of the rank for losses, by stage of the rank for the model's statistics."""

    def __init__(self, num_stages: int) -> None:
        self.aux_loss: Tensor | None = None
        """Router losses of this rank; None if no layer here has any."""
        self.losses: list[Tensor] = []
        """Loss sum of each micro-batch, on the rank of the last stage."""
        self._stats: list[dict[str, Tensor]] = [{} for _ in range(num_stages)]

    def add(self, found: StageTerms) -> None:
        """Adds a micro-batch that passed a stage."""
        terms = found.terms
        if found.is_last:
            self.losses.append(terms.loss_sum.detach())
        if terms.aux_loss is not None:
            aux_loss = terms.aux_loss.detach()
            self.aux_loss = aux_loss if self.aux_loss is None else self.aux_loss + aux_loss
        stats = self._stats[found.stage]
        for name, value in terms.stats.items():
            stats[name] = value if name not in stats else stats[name] + value

    def main_loss_sum(self, device: torch.device) -> Tensor:
        """Scalar in the precision of the loss: the next token's, which is reported; 0 where there is none."""
        if not self.losses:
            return torch.zeros((), device=device)
        # with multi-token prediction the loss of the task holds more than the next token's
        main = None if self.stat("loss_sum_mtp") is None else self.stat("loss_sum_main")
        return torch.stack(self.losses).sum() if main is None else main

    def means(self, names: Sequence[str]) -> dict[str, Tensor]:
        """By name: [2], a sum and its number; those that a stage here has."""
        found = ((name, self.stat(MEAN + name)) for name in names)
        return {name: value for name, value in found if value is not None}

    def stat(self, name: str, stage: int | None = None) -> Tensor | None:
        """A statistic of one stage, or of whichever has it."""
        stages = self._stats if stage is None else [self._stats[stage]]
        return next((stats[name] for stats in stages if name in stats), None)
