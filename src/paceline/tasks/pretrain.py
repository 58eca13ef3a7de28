"""Predict the next token."""

from __future__ import annotations

from torch import Tensor

from paceline.data.batch import Batch
from paceline.tasks.task import Forward, LossTerms


class Pretrain:
    """Mean cross-entropy of the next token over all tokens that have a label."""

    kind = "pretrain"

    def prepare(self, batch: Batch) -> Batch:
        return batch

    def count(self, batch: Batch) -> Tensor:
        return batch.num_tokens()

    def loss(self, model: Forward, batch: Batch) -> LossTerms:
        output = model(batch.tokens, batch.labels, **batch.places)
        assert output.loss_sum is not None and output.num_tokens is not None
        return LossTerms(output.loss_sum, output.num_tokens, output.aux_loss, output.stats)
