"""How well does a model predict a text it is given?

The text is one stream of tokens, cut into windows. Each token but the first is predicted once, from what comes before
it in its window; documents are not separated, as in training. Longer windows give lower losses: compare at one length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.errors import DataError
from paceline.kernels.cross_entropy import IGNORE_INDEX
from paceline.models.transformer import Transformer


@dataclass(frozen=True, kw_only=True)
class Score:
    """What came of it."""

    num_tokens: int
    """That were predicted."""
    loss_sum: float
    """Nats."""

    @property
    def loss(self) -> float:
        """Nats a token."""
        return self.loss_sum / self.num_tokens

    @property
    def perplexity(self) -> float:
        """e to the loss; infinite where a float cannot hold it."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    def bits_per_byte(self, bytes_per_token: float) -> float:
        """Comparable between tokenizers, unlike perplexity."""
        return self.loss / math.log(2) / bytes_per_token


def score(
    model: Transformer,
    parts: Iterator[NDArray],
    *,
    seq_len: int,
    micro_batch_size: int,
    max_tokens: int = 0,
    advance: Callable[[int], object] = lambda num_tokens: None,
) -> Score:
    """Loss of the model on a stream of tokens.

    Args:
        parts: consecutive parts of the stream, of any lengths.
        seq_len: tokens of a window.
        max_tokens: stop after so many predictions; 0 = all.
        advance: told how many tokens were predicted, batch after batch.

    Raises:
        DataError: there is nothing to predict, or an id is outside the model's vocabulary.
    """
    device = next(model.parameters()).device
    loss_sum, num_tokens = 0.0, 0
    with torch.inference_mode():
        for windows in _batches(_windows(parts, seq_len, max_tokens), micro_batch_size):
            tokens, labels = _padded(windows, seq_len, model.config.vocab_size)
            output = model(tokens.to(device), labels.to(device))
            assert output.num_tokens is not None
            loss_sum += float(output.stats["loss_sum_main"])
            num_tokens += int(output.num_tokens)
            advance(int(output.num_tokens))
    if not num_tokens:
        raise DataError("there is no token to predict", next_step="Give a text of at least two tokens.")
    return Score(num_tokens=num_tokens, loss_sum=loss_sum)


def _windows(parts: Iterator[NDArray], seq_len: int, max_tokens: int) -> Iterator[NDArray]:
    """Windows of seq_len + 1 tokens that share their ends; the last may be shorter."""
    left = max_tokens or None
    kept = np.empty(0, dtype=np.int64)
    for part in parts:
        kept = np.concatenate((kept, part.astype(np.int64)))
        while len(kept) > seq_len:
            window = kept[: seq_len + 1]
            if left is not None:
                window = window[: left + 1]
                left -= len(window) - 1
            yield window
            kept = kept[seq_len:]
            if left == 0:
                return
    if len(kept) > 1:
        yield kept[: None if left is None else left + 1]


def _batches(windows: Iterator[NDArray], size: int) -> Iterator[list[NDArray]]:
    batch: list[NDArray] = []
    for window in windows:
        batch.append(window)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


def _padded(windows: list[NDArray], seq_len: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """(tokens, labels), both int64 [B, T]; what pads a short window has no label, and nothing before it sees it."""
    length = min(seq_len, max(len(window) for window in windows) - 1)
    tokens = torch.zeros(len(windows), length, dtype=torch.int64)
    labels = torch.full((len(windows), length), IGNORE_INDEX, dtype=torch.int64)
    for row, window in enumerate(windows):
        largest = int(window.max())
        if largest >= vocab_size or int(window.min()) < 0:
            raise DataError(
                f"the text has the token id {largest}, the model's vocabulary is {vocab_size}",
                evidence="It was made with another tokenizer.",
                next_step="Build the dataset with the tokenizer of the model.",
            )
        tokens[row, : len(window) - 1] = torch.from_numpy(window[:-1])
        labels[row, : len(window) - 1] = torch.from_numpy(window[1:])
    return tokens, labels
