"""What is learned from a batch: the contract between a task and the step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from paceline.data.batch import Batch
from paceline.models.transformer import ModelOutput

Forward = Callable[..., ModelOutput]
"""The model as a task sees it: `forward(tokens, labels, **batch.places)`."""

MEAN = "mean/"
"""Prefix of those `LossTerms.stats` that are [2] tensors: a sum, and the number that it is to be divided by."""


class LossTerms(NamedTuple):
    """What a micro-batch contributes. `training/step.py` alone divides, by counts over the whole global batch.

    `loss_sum` is the sum over the `units` (tokens, pairs, ...) of this micro-batch, `aux_loss` the sum over its
    sequences of terms that are averaged over sequences. Both are scalars that backward goes through. A loss of several
    terms with units of their own has [K] tensors of both: it is the sum of the K means.
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
        """Adds what the loss needs (counts, labels); on the device, on whole rows, before the forward."""
        ...

    def count(self, batch: Batch) -> Tensor:
        """Units of this micro-batch that the loss is averaged over: an int64 scalar (or [K]), known before the
        forward."""
        ...

    def loss(self, model: Forward, batch: Batch) -> LossTerms:
        """Runs the model on the batch."""
        ...


class Traits(NamedTuple):
    """What a task may say of itself, as attributes of the same names; these are the defaults."""

    units: tuple[str, ...] = ("tokens",)
    """What `count` counts, one name for each number."""
    whole: bool = False
    """Units are of whole rows (documents, pairs): counts and losses are the same on all ranks that hold parts of the
    same sequences, and not to be added up over them."""
    means: tuple[str, ...] = ()
    """The statistics under `MEAN`."""
    needs_reference: bool = False
    """`loss` reads the batch's field `documents.REFERENCE`."""


def traits_of(task: Task) -> Traits:
    """A plugin's task may leave out what it does not need."""
    known = {name: getattr(task, name) for name in Traits._fields if hasattr(task, name)}
    return Traits()._replace(**known)


def mean_of(values: Tensor, which: Tensor) -> Tensor:
    """[2], detached: the sum of the values where ``which`` is true, and how many these are."""
    kept = torch.where(which, values.detach(), 0.0)
    return torch.stack((kept.double().sum(), which.sum().double()))


TaskFactory = Callable[[Any], Task]
