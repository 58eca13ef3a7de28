"""The score of a reward model beside an adapter: learned whole, and saved with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from paceline.checkpoint.pieces import Box
from paceline.checkpoint.weights import WeightSource
from paceline.config.lora import SCORE
from paceline.errors import CheckpointError
from paceline.interop.links import whole
from paceline.interop.sources import Opened


def with_score(opened: Opened, score: Tensor, path: Path, *, take_out: bool) -> Opened:
    """The model with this score in the place of its head, or of the score that it has.

    Args:
        score: [1, hidden_size], of the adapter in the folder ``path``.
        take_out: whether the adapter is to be taken out of the model.

    Raises:
        CheckpointError: the score is of another width, or cannot be taken out.
    """
    hidden = opened.model.hidden_size
    if take_out:
        raise CheckpointError(
            f"the adapter {path} cannot be taken out: its score was learned whole",
            evidence="What the head was before is not in the merged weights.",
            next_step="Take the model that it was merged into.",
        )
    if tuple(score.shape) != (1, hidden):
        raise CheckpointError(
            f"the adapter {path} fits another model: score.weight is {list(score.shape)}, the model's would be "
            f"[1, {hidden}]",
            next_step="Take the model that its adapter_config.json names as base_model_name_or_path.",
        )
    model = opened.model.model_copy(update={"head": "score"})
    return replace(opened, model=model, weights=_Scored(opened.weights, score))


class _Scored:
    """A model with another score, or with one in the place of its head: a ``WeightSource``."""

    def __init__(self, base: WeightSource, score: Tensor) -> None:
        self._base, self._score = base, score

    def shapes(self) -> dict[str, torch.Size]:
        kept = {name: shape for name, shape in self._base.shapes().items() if name != "head.weight"}
        return kept | {SCORE: self._score.shape}

    def dtype(self, name: str) -> torch.dtype:
        return self._base.dtype("embed.weight" if name == SCORE else name)

    def read(self, name: str, box: Box | None = None) -> Tensor:
        if name != SCORE:
            return self._base.read(name, box)
        wanted = box or whole(self._score.shape)
        (_, first), (_, count) = wanted.offsets, wanted.sizes
        return self._score.narrow(1, first, count).to(self.dtype(name))
