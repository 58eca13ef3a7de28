"""Kahneman-Tversky optimisation: single answers that are desirable or not, beside a reference model.

With the log-ratio r of an answer, policy over reference, and a baseline z:

    desirable     w_d (1 - s(beta (r - z)))
    undesirable   w_u (1 - s(beta (z - r)))

z estimates the divergence of the policy from the reference, and has no gradient: the mean log-ratio of *mismatched*
answers (prompts with the answer of another), at least 0. Document 2k of a row is example k, document 2k + 1 its prompt
with a mismatched answer. The mean is over one row: whatever the micro-batches, ranks and cuts, z is the same. TRL takes
it over the micro-batches of all ranks, so that its losses depend on how many GPUs there are; both agree where a batch
is one row. Source: arXiv:2402.01306, equation 8.

Dims: B rows, E examples of a row, D = 2 E documents.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.config.task import TaskConfig
from paceline.data.batch import Batch
from paceline.tasks.documents import LABELS, REFERENCE, SumParts, alone, log_prob_sums, with_label_counts
from paceline.tasks.pairs import pairs, sum_over
from paceline.tasks.task import MEAN, Forward, LossTerms, mean_of

DESIRABLE = "desirable"
"""Field of a batch: int8 [B, D], 1 or 0 for examples; read at their documents."""


class Kto:
    """The mean loss of the examples."""

    kind = "kto"
    units = ("examples",)
    whole = True
    needs_reference = True
    means = ("reward_desirable", "reward_undesirable", "log_prob_desirable", "log_prob_undesirable", "kl")

    def __init__(self, config: TaskConfig, sum_parts: SumParts = alone) -> None:
        self._config, self._sum_parts = config, sum_parts

    def prepare(self, batch: Batch) -> Batch:
        return with_label_counts(batch)

    def count(self, batch: Batch) -> Tensor:
        return (pairs(batch.fields[LABELS]).chosen > 0).sum()

    def loss(self, model: Forward, batch: Batch) -> LossTerms:
        output = model(batch.tokens, batch.labels, **batch.places, log_probs=True)
        sums_BD = log_prob_sums(output, batch, self._sum_parts)
        ratios_BE, mismatched_BE = pairs(sums_BD - batch.fields[REFERENCE].double())
        counts, desirable_BE = pairs(batch.fields[LABELS]), pairs(batch.fields[DESIRABLE]).chosen == 1
        which = counts.chosen > 0
        baseline_B = divergence(mismatched_BE.detach(), counts.rejected > 0)
        beta, config = self._config.beta, self._config
        gains_BE = beta * (ratios_BE - baseline_B[:, None])
        losses_BE = torch.where(
            desirable_BE,
            config.desirable_weight * (1 - gains_BE.sigmoid()),
            config.undesirable_weight * (1 - (-gains_BE).sigmoid()),
        )
        stats = {MEAN + "kl": mean_of(baseline_B, which.any(dim=1))}
        log_probs_BE = pairs(sums_BD).chosen
        for name, chosen in (("desirable", which & desirable_BE), ("undesirable", which & ~desirable_BE)):
            stats[f"{MEAN}reward_{name}"] = mean_of(beta * ratios_BE, chosen)
            stats[f"{MEAN}log_prob_{name}"] = mean_of(log_probs_BE, chosen)
        return LossTerms(sum_over(which, losses_BE), which.sum(), output.aux_loss, output.stats | stats)


def divergence(ratios_BE: Tensor, which: Tensor) -> Tensor:
    """[B]: the mean log-ratio of a row's mismatched answers, at least 0; 0 in a row without one."""
    return (ratios_BE.where(which, 0.0).sum(1) / which.sum(1).clamp(min=1)).clamp(min=0)
