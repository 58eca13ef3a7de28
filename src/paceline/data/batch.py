"""The one shape of data that a model reads.

Legend: B = sequences of a micro-batch, T = tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

IGNORE_INDEX = -100
"""A label with this value has no loss."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A micro-batch. Labels are shifted here, in one place: nothing downstream shifts again."""

    tokens: Tensor
    """int64 [B, T]"""
    labels: Tensor
    """int64 [B, T]; ``labels[b, t]`` is the token after ``tokens[b, t]``, or `IGNORE_INDEX`"""
    positions: Tensor | None = None
    """int64 [B, T], or None for 0..T-1 in every row"""
    documents: Tensor | None = None
    """int32 [B, T], number of the document within the row, or None where attention may see the whole row"""
    boundaries: Tensor | None = None
    """int32 [N + 1], where ``documents`` begin (`boundaries.document_boundaries`); None where that is not known"""
    answers: Tensor | None = None
    """bool [B, T], for a task that marks some tokens of its own (`tasks/orpo.py`, `tasks/reward.py`)"""

    fields: Mapping[str, Tensor] = field(default_factory=dict)
    """What a task's data says of each document: [B, D] tensors, ``fields[name][b, d]`` of the document numbered ``d``
    in row b; D is the same for all rows of a dataset. Whole on each rank of context parallelism"""

    @property
    def places(self) -> dict[str, Tensor | None]:
        """What a model is told of where each token stands, by the names of its arguments."""
        found = {"positions": self.positions, "documents": self.documents}
        return found if self.boundaries is None else {**found, "boundaries": self.boundaries}

    def num_tokens(self) -> Tensor:
        """int64 scalar: how many labels have a loss."""
        return (self.labels != IGNORE_INDEX).sum()

    def to(self, device: torch.device | str, non_blocking: bool = True) -> Batch:
        return self._each(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """The same batch in page-locked host memory, from where a copy to the GPU runs beside the computation."""
        return self._each(lambda tensor: tensor.pin_memory())

    def _each(self, move: Callable[[Tensor], Tensor]) -> Batch:
        return Batch(
            tokens=move(self.tokens),
            labels=move(self.labels),
            positions=None if self.positions is None else move(self.positions),
            documents=None if self.documents is None else move(self.documents),
            boundaries=None if self.boundaries is None else move(self.boundaries),
            answers=None if self.answers is None else move(self.answers),
            fields={name: move(value) for name, value in self.fields.items()},
        )
