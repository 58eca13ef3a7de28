"""Odds-ratio preference optimisation: fine-tuning on the chosen answer, and a penalty on the odds of the rejected one.

    mean over tokens of - log p(token)  -  beta * mean over pairs of log s(log odds(chosen) - log odds(rejected))
    log odds(y) = m - log(1 - e^m), m = the mean log-probability of the answer's tokens

No reference model. The first mean is over the chosen documents, prompt and answer (`task.orpo_nll = "all"`, as the
reference implementation has it), or answers alone.
Source: arXiv:2403.07691, equations 4 to 7.

Dims: B rows, T tokens, P pairs, D = 2 P documents.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.config.task import TaskConfig
from paceline.data.batch import IGNORE_INDEX, Batch
from paceline.tasks.documents import (
    LABELS,
    SumParts,
    alone,
    document_sums,
    documents_of,
    log_prob_sums,
    with_label_counts,
)
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
from paceline.tasks.task import MEAN, Forward, LossTerms, mean_of

PREDICTED = "predicted"
"""Field of a batch: int64 [B, D], tokens of each document that the first mean is over, if it is a chosen one."""


class Orpo:
    """Two means, of tokens and of pairs: `count` has both numbers, tokens first."""

    kind = "orpo"
    units = ("tokens", "pairs")
    whole = True
    means = (*REWARD_MEANS, *LOG_PROB_MEANS, "nll", "log_odds_ratio")

    def __init__(self, config: TaskConfig, sum_parts: SumParts = alone) -> None:
        self._config, self._sum_parts = config, sum_parts

    def prepare(self, batch: Batch) -> Batch:
        counted = with_label_counts(batch)
        answers = batch.labels != IGNORE_INDEX
        if self._config.orpo_nll == "answer":
            return replace(counted, answers=answers, fields={**counted.fields, PREDICTED: counted.fields[LABELS]})
        whole = replace(batch, labels=with_prompt_labels(batch), fields=counted.fields)
        predicted = with_label_counts(whole).fields[LABELS]
        return replace(whole, answers=answers, fields={**counted.fields, PREDICTED: predicted})

    def count(self, batch: Batch) -> Tensor:
        which = are_pairs(batch)
        return torch.stack((pairs(batch.fields[PREDICTED]).chosen.where(which, 0).sum(), which.sum()))

    def loss(self, model: Forward, batch: Batch) -> LossTerms:
        output = model(batch.tokens, batch.labels, **batch.places, log_probs=True)
        assert output.log_probs is not None and batch.answers is not None
        which, count = are_pairs(batch), self.count(batch)
        nll_sum = -sum_over(which, pairs(log_prob_sums(output, batch, self._sum_parts)).chosen)
        of_answers = document_sums(output.log_probs * batch.answers, batch, self._sum_parts)
        # a pair that is not there takes part with finite odds: nothing of it is added up
        there_BD = which.repeat_interleave(2, dim=1)
        means = pairs((of_answers / batch.fields[LABELS].clamp(min=1)).where(there_BD, -1.0))
        ratios_BP = F.logsigmoid(log_odds(means.chosen) - log_odds(means.rejected))
        rewards = Pair(*(self._config.beta * mean for mean in means))
        stats = reward_stats(rewards, which) | log_prob_stats(means, which)
        stats[MEAN + "nll"] = torch.stack((nll_sum.detach(), count[0].double()))
        stats[MEAN + "log_odds_ratio"] = mean_of(ratios_BP, which)
        loss = torch.stack((nll_sum, -self._config.beta * sum_over(which, ratios_BP)))
        return LossTerms(loss, count, output.aux_loss, output.stats | stats)


def with_prompt_labels(batch: Batch) -> Tensor:
    """[B, T]: the labels of a batch of whole rows, and for tokens without one that of the token after it in its
    document. Padding, whose documents have no label, gets some too: it is in no pair."""
    documents = documents_of(batch)
    shifted = F.pad(batch.tokens[:, 1:], (0, 1), value=IGNORE_INDEX)
    ends = F.pad(documents[:, 1:], (0, 1), value=-1) != documents
    return batch.labels.where(batch.labels != IGNORE_INDEX, shifted.masked_fill(ends, IGNORE_INDEX))


def log_odds(means: Tensor) -> Tensor:
    """Of mean log-probabilities, which are below 0; exact also close to 0, where 1 - e^m is all that is left.

    A probability that has rounded to 1 counts as 1 - 1e-12: infinite odds have no gradient.
    """
    means = means.clamp(max=-1e-12)
    return means - torch.where(means > -0.6931, (-torch.expm1(means)).log(), torch.log1p(-means.exp()))
