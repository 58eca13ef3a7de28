"""Direct preference optimisation: the chosen answer gains on the rejected one, beside a reference model.

With the log-ratios c and r of chosen and rejected answer, policy over reference, each summed over an answer's tokens:

    sigmoid   - (1 - e) log s(beta (c - r)) - e log s(- beta (c - r))    arXiv:2305.18290; e is `task.label_smoothing`
    hinge     max(0, 1 - beta (c - r))                                   arXiv:2305.10425
    ipo       (c / |chosen| - r / |rejected| - 1 / (2 beta))^2           arXiv:2310.12036, over means of tokens

Without a reference its log-probabilities are 0: the reference is uniform.

Dims: B rows, P pairs, D = 2 P documents.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.config.task import TaskConfig
from paceline.data.batch import Batch
from paceline.tasks.documents import LABELS, REFERENCE, SumParts, alone, log_prob_sums, with_label_counts
from paceline.tasks.pairs import (
    LOG_PROB_MEANS,
    REWARD_MEANS,
    Pair,
    are_pairs,
    log_prob_stats,
    pairs,
    reward_stats,
    sum_over,
)
from paceline.tasks.task import Forward, LossTerms


class Dpo:
    """The mean loss of the pairs."""

    kind = "dpo"
    units = ("pairs",)
    whole = True
    means = (*REWARD_MEANS, *LOG_PROB_MEANS)

    def __init__(self, config: TaskConfig, sum_parts: SumParts = alone) -> None:
        self._config, self._sum_parts = config, sum_parts
        self.needs_reference = config.reads_reference

    def prepare(self, batch: Batch) -> Batch:
        return with_label_counts(batch)

    def count(self, batch: Batch) -> Tensor:
        return are_pairs(batch).sum()

    def loss(self, model: Forward, batch: Batch) -> LossTerms:
        output = model(batch.tokens, batch.labels, **batch.places, log_probs=True)
        sums_BD = log_prob_sums(output, batch, self._sum_parts)
        reference_BD = batch.fields[REFERENCE].double() if self.needs_reference else torch.zeros_like(sums_BD)
        ratios, lengths, which = pairs(sums_BD - reference_BD), pairs(batch.fields[LABELS]), are_pairs(batch)
        losses_BP = preference_losses(ratios, lengths, self._config)
        rewards = Pair(*(self._config.beta * ratio for ratio in ratios))
        stats = reward_stats(rewards, which) | log_prob_stats(pairs(sums_BD), which)
        return LossTerms(sum_over(which, losses_BP), which.sum(), output.aux_loss, output.stats | stats)


def preference_losses(ratios: Pair, lengths: Pair, config: TaskConfig) -> Tensor:
    """[B, P]: see the top of the file. ``lengths``: labels of each answer."""
    beta, smoothing = config.beta, config.label_smoothing
    if config.dpo_loss == "hinge":
        return F.relu(1 - beta * ratios.difference)
    if config.dpo_loss == "ipo":
        means = Pair(*(ratio / length.clamp(min=1) for ratio, length in zip(ratios, lengths, strict=True)))
        return (means.difference - 1 / (2 * beta)).square()
    margins = beta * ratios.difference
    losses = -F.logsigmoid(margins)
    return losses if not smoothing else (1 - smoothing) * losses - smoothing * F.logsigmoid(-margins)
