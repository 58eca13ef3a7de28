"""Pairs of answers: documents 2k and 2k + 1 of a row are the chosen and the rejected answer of pair k.

Dims: B rows, P pairs of a row, D = 2 P documents.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from paceline.data.batch import Batch
from paceline.tasks.documents import LABELS
from paceline.tasks.task import MEAN, mean_of

REWARD_MEANS = ("reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy")
LOG_PROB_MEANS = ("log_prob_chosen", "log_prob_rejected")


class Pair(NamedTuple):
    """One number for each answer, [B, P]."""

    chosen: Tensor
    rejected: Tensor

    @property
    def difference(self) -> Tensor:
        return self.chosen - self.rejected


def pairs(values_BD: Tensor) -> Pair:
    """Parts what there is of each document."""
    return Pair(values_BD[:, 0::2], values_BD[:, 1::2])


def are_pairs(batch: Batch) -> Tensor:
    """bool [B, P]: both answers have a label. Padding has none."""
    counts = pairs(batch.fields[LABELS])
    return (counts.chosen > 0) & (counts.rejected > 0)


def sum_over(which: Tensor, values: Tensor) -> Tensor:
    """Scalar: the sum of the values where ``which`` is true. Elsewhere they must be finite: so are their gradients."""
    return values.where(which, 0.0).sum()


def reward_stats(rewards: Pair, which: Tensor) -> dict[str, Tensor]:
    """`REWARD_MEANS`: mean rewards, their difference, and how often the chosen answer has the higher one."""
    values = (rewards.chosen, rewards.rejected, rewards.difference, (rewards.difference > 0).double())
    return {MEAN + name: mean_of(value, which) for name, value in zip(REWARD_MEANS, values, strict=True)}


def log_prob_stats(log_probs: Pair, which: Tensor) -> dict[str, Tensor]:
    """`LOG_PROB_MEANS`."""
    return {MEAN + name: mean_of(value, which) for name, value in zip(LOG_PROB_MEANS, log_probs, strict=True)}
