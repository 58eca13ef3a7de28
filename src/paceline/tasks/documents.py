"""What a row of several documents adds up to, document by document.

A loss over whole answers (a preference, a reward) needs sums over the tokens of a document, of which context
parallelism gives each rank a part. `prepare` sees whole rows and counts there; the loss adds up what is on this rank,
and ``sum_parts`` what others have.

Dims: B rows, T tokens (of this rank's part of the rows), D documents of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from paceline.data.batch import IGNORE_INDEX, Batch
from paceline.models.transformer import ModelOutput

SumParts = Callable[[Tensor], Tensor]
"""The sum over the ranks that hold parts of the same sequences. All go on alike with it: gradients pass unchanged."""

LABELS = "labels"
"""Field of a batch: int64 [B, D], labels of each document in its whole row."""
LENGTHS = "lengths"
"""Field of a batch: int64 [B, D], tokens of each document in its whole row."""
REFERENCE = "reference_logps"
"""Field of a batch: [B, D], log-probability of each document's labels under the reference model."""


def alone(value: Tensor) -> Tensor:
    """`SumParts` where sequences are whole."""
    return value


def with_label_counts(batch: Batch) -> Batch:
    """Adds `LABELS` to a batch of whole rows, and makes the number of documents even, for pairs.

    D is that of the other fields. Where there are none it is T, which no row can exceed: nothing of that size costs
    anything, and to look for the true number would wait for the device.
    """
    width = next((field.shape[1] for field in batch.fields.values()), batch.tokens.shape[1])
    width += width % 2
    has_label = batch.labels != IGNORE_INDEX
    counted = {LABELS: _sums(has_label.long(), documents_of(batch), width)}
    return replace(batch, fields=_widened(batch.fields, width) | counted)


def with_lengths(batch: Batch) -> Batch:
    """Adds `LENGTHS` to a batch of whole rows; padding beyond the other fields' documents is not counted."""
    width = next((field.shape[1] for field in batch.fields.values()), batch.tokens.shape[1])
    lengths = _sums(torch.ones_like(batch.tokens), documents_of(batch), width)
    return replace(batch, fields={**batch.fields, LENGTHS: lengths})


def documents_of(batch: Batch) -> Tensor:
    """int64 [B, T]; 0 everywhere where the whole row is one document."""
    return torch.zeros_like(batch.tokens) if batch.documents is None else batch.documents.long()


def document_sums(values_BT: Tensor, batch: Batch, sum_parts: SumParts) -> Tensor:
    """float64 [B, D], D as in `LABELS`: the sum of the values over each document's tokens, whole on every rank.

    In float64: what is compared are small differences of sums over thousands of tokens.
    """
    width = batch.fields[LABELS].shape[1]
    return sum_parts(_sums(values_BT.double(), documents_of(batch), width))


def log_prob_sums(output: ModelOutput, batch: Batch, sum_parts: SumParts) -> Tensor:
    """float64 [B, D]: the log-probability of each document's labels."""
    assert output.log_probs is not None, "the model was not asked for log-probabilities"
    return document_sums(output.log_probs, batch, sum_parts)


def _sums(values_BT: Tensor, documents_BT: Tensor, width: int) -> Tensor:
    """[B, width]; documents of higher numbers (padding) are left out.

    Along one dim: there torch has a form that gives the same bits each time, where it is asked to.
    """
    rows, places = len(values_BT), width + 1
    firsts = torch.arange(rows, device=values_BT.device)[:, None] * places
    index = documents_BT.clamp(max=width) + firsts
    total = values_BT.new_zeros(rows * places).index_add(0, index.flatten(), values_BT.flatten())
    return total.view(rows, places)[:, :width]


def _widened(fields: Mapping[str, Tensor], width: int) -> dict[str, Tensor]:
    return {
        name: torch.nn.functional.pad(field, (0, width - field.shape[1])) if field.shape[1] < width else field
        for name, field in fields.items()
    }
