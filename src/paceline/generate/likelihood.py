"""How likely is a continuation, and is it what the model itself would say?

Dims: B pairs at a time, T tokens of the longest, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.models.transformer import Transformer

LOGIT_NUMBERS = 1 << 28
"""Logits held at a time: 1 GiB in fp32, twice that with what is made of them."""


class Likelihood(NamedTuple):
    log_prob: float
    """Nats: the sum over the continuation's tokens."""
    is_greedy: bool
    """Whether each of its tokens is the likeliest one at its place."""


@dataclass(frozen=True, kw_only=True)
class _Row:
    number: int
    tokens: list[int]
    """Context and continuation, without the last token; the newest that the model can read."""
    targets: list[int]
    """The continuation."""


@torch.no_grad()
def likelihoods(
    model: Transformer,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    batch_size: int,
    advance: Callable[[int], object] = lambda number: None,
) -> list[Likelihood]:
    """Of each pair of (context, continuation) in ids; both have a token at least.

    What does not fit the model's longest sequence is cut off at the beginning. All rows of the head count, those that
    only pad the vocabulary too, as in Transformers.

    Args:
        batch_size: pairs at a time at most; fewer where their logits would be more than `LOGIT_NUMBERS`.
        advance: told how many pairs are done, batch after batch.
    """
    found: list[Likelihood | None] = [None] * len(pairs)
    rows = [_row(number, *pair, model.config.max_seq_len) for number, pair in enumerate(pairs)]
    rows.sort(key=lambda row: -len(row.tokens))  # those of like length together; the largest batch comes first
    device = next(model.parameters()).device
    model.eval()
    for batch in _batches(rows, batch_size, model.config.vocab_size):
        tokens_BT = torch.zeros(len(batch), len(batch[0].tokens), dtype=torch.int64)
        for index, row in enumerate(batch):
            tokens_BT[index, : len(row.tokens)] = torch.tensor(row.tokens)
        # padding stands behind: nothing sees it
        logits_BTV = model(tokens_BT.to(device)).logits
        assert logits_BTV is not None
        for row, logits_TV in zip(batch, logits_BTV, strict=True):
            found[row.number] = _of(row, logits_TV)
        advance(len(batch))
    return [one for one in found if one is not None]


def _row(number: int, context: Sequence[int], continuation: Sequence[int], longest: int) -> _Row:
    assert len(context) and len(continuation), "a pair has a token on each side"
    whole = [*context, *continuation]
    targets = list(continuation)[-longest:]
    return _Row(number=number, tokens=whole[:-1][-longest:], targets=targets)


def _batches(rows: Sequence[_Row], batch_size: int, vocab_size: int) -> Iterator[Sequence[_Row]]:
    """Rows in order, longest first."""
    at = 0
    while at < len(rows):
        fit = max(1, LOGIT_NUMBERS // (len(rows[at].tokens) * vocab_size))
        size = min(batch_size, fit)
        yield rows[at : at + size]
        at += size


def _of(row: _Row, logits_TV: Tensor) -> Likelihood:
    end, count = len(row.tokens), len(row.targets)
    own_NV = logits_TV[end - count : end].float()
    targets_N = torch.tensor(row.targets, device=own_NV.device)
    log_prob = own_NV.log_softmax(-1).gather(1, targets_N[:, None]).sum()
    return Likelihood(float(log_prob), bool((own_NV.argmax(-1) == targets_N).all()))
