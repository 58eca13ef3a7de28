"""What is learned from a batch: the contract between a task and the step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from paceline.data.batch import Batch
from paceline.models.transformer import ModelOutput

Forward = Callable[..., ModelOutput]
"""The model as a task sees it: `forward(tokens, labels, positions=..., documents=...)`."""


class LossTerms(NamedTuple):
    """What a micro-batch contributes. `training/step.py` alone divides, by counts over the whole global batch.

    `loss_sum` is the sum over the `units` (tokens, pairs, ...) of this micro-batch, `aux_loss` the sum over its
    sequences of terms that are averaged over sequences. Both are scalars that backward goes through.
    """

    loss_sum: Tensor
    units: Tensor
    aux_loss: Tensor | None
    stats: Mapping[str, Tensor]
    """Detached tensors for the metrics, summed over micro-batches and ranks."""


class Task(Protocol):
    """Knows no trainer and no mesh; the loss runs wherever the last layer is."""

    kind: str

    def prepare(self, batch: Batch) -> Batch:
        """Adds what the loss needs (reference log-probabilities, noise); on the device, before the forward."""
        ...

    def count(self, batch: Batch) -> Tensor:
        """Units of this micro-batch that the loss is averaged over: an int64 scalar, known before the forward."""
        ...

    def loss(self, model: Forward, batch: Batch) -> LossTerms:
        """Runs the model on the batch."""
        ...


TaskFactory = Callable[[Any], Task]
