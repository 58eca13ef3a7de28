"""A reward model: the chosen answer scores higher than the rejected one.

    - log s(score(chosen) - score(rejected) - margin)  +  c (score(chosen) + score(rejected))^2

An answer's score is that of the last token of its document. ``margin`` is what the data says of a pair, 0 if nothing;
c is `task.center_rewards`, which keeps scores about 0 (arXiv:2312.09244). Source: arXiv:2204.05862, section 3.1.

Dims: B rows, T tokens, P pairs, D = 2 P documents.
"""

from __future__ import annotations

from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from paceline.config.task import TaskConfig
from paceline.data.batch import Batch
from paceline.tasks.documents import SumParts, alone, document_sums, documents_of, with_label_counts
from paceline.tasks.pairs import REWARD_MEANS, are_pairs, pairs, reward_stats, sum_over
from paceline.tasks.task import Forward, LossTerms

MARGIN = "margin"
"""Field of a batch, if there is one: float [B, D], read at the chosen document of each pair."""


class Reward:
    """The mean loss of the pairs."""

    kind = "reward"
    units = ("pairs",)
    whole = True
    means = REWARD_MEANS

    def __init__(self, config: TaskConfig, sum_parts: SumParts = alone) -> None:
        self._config, self._sum_parts = config, sum_parts

    def prepare(self, batch: Batch) -> Batch:
        documents = documents_of(batch)
        ends = F.pad(documents[:, 1:], (0, 1), value=-1) != documents
        return replace(with_label_counts(batch), answers=ends)

    def count(self, batch: Batch) -> Tensor:
        return are_pairs(batch).sum()

    def loss(self, model: Forward, batch: Batch) -> LossTerms:
        output = model(batch.tokens, **batch.places)
        assert output.scores is not None and batch.answers is not None, "the model has no score (model.head)"
        scores = pairs(document_sums(output.scores * batch.answers, batch, self._sum_parts))
        which, margins_BP = are_pairs(batch), scores.difference
        if MARGIN in batch.fields:
            margins_BP = margins_BP - pairs(batch.fields[MARGIN]).chosen
        losses_BP = -F.logsigmoid(margins_BP)
        if self._config.center_rewards:
            losses_BP = losses_BP + self._config.center_rewards * (scores.chosen + scores.rejected).square()
        stats = output.stats | reward_stats(scores, which)
        return LossTerms(sum_over(which, losses_BP), which.sum(), output.aux_loss, stats)
