"""The one shape of data that a model reads.

Legend: B = sequences of a micro-batch, T = tokens of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

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

    def num_tokens(self) -> Tensor:
        """int64 scalar: how many labels have a loss."""
        return (self.labels != IGNORE_INDEX).sum()

    def to(self, device: torch.device | str, non_blocking: bool = True) -> Batch:
        def move(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device, non_blocking=non_blocking)

        return Batch(
            tokens=self.tokens.to(device, non_blocking=non_blocking),
            labels=self.labels.to(device, non_blocking=non_blocking),
            positions=move(self.positions),
            documents=move(self.documents),
        )

    def pin_memory(self) -> Batch:
        """The same batch in page-locked host memory, from where a copy to the GPU runs beside the computation."""
        return Batch(
            tokens=self.tokens.pin_memory(),
            labels=self.labels.pin_memory(),
            positions=None if self.positions is None else self.positions.pin_memory(),
            documents=None if self.documents is None else self.documents.pin_memory(),
        )
