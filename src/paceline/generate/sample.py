"""Which token comes next, given the logits? Pure functions.

Applied in this order, as most programs do: repetition penalty, temperature, top-k, top-p, min-p, then a draw.

Dims: B sequences, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.errors import ConfigError

_NEVER = float("-inf")
_LEAST, _MOST = 1e-30, 1e30
"""Temperatures beyond these are as these: all but the most likely token have probability 0, or all have the same. The
inverse of some of them is no number in fp32."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a token is drawn. The defaults draw from the model's own distribution.

    Raises:
        ConfigError: a value is outside its range.
    """

    temperature: float = 1.0
    """Logits are divided by it; 0 = greedy: always the most likely token."""
    top_k: int = 0
    """Only the k most likely; 0 = all."""
    top_p: float = 1.0
    """Only the most likely ones that together reach this probability (nucleus sampling, arXiv:1904.09751)."""
    min_p: float = 0.0
    """Only those at least this fraction as likely as the most likely one (arXiv:2407.01082)."""
    repetition_penalty: float = 1.0
    """Above 1, tokens that were seen become less likely (CTRL, arXiv:1909.05858)."""

    def __post_init__(self) -> None:
        _refuse("temperature", self.temperature, 0 <= self.temperature < math.inf, "0 (greedy) or above, and finite")
        _refuse("top-k", self.top_k, self.top_k >= 0, "0 (all) or above")
        _refuse("top-p", self.top_p, 0 < self.top_p <= 1, "above 0, at most 1 (all)")
        _refuse("min-p", self.min_p, 0 <= self.min_p <= 1, "between 0 (off) and 1")
        penalty = self.repetition_penalty
        _refuse("repetition-penalty", penalty, 1e-6 <= penalty <= 1e6, "between 1e-6 and 1e6; 1 = off")


def _refuse(name: str, value: float, fits: bool, allowed: str) -> None:
    if not fits:
        raise ConfigError(f"--{name} {value} is out of range", next_step=f"It must be {allowed}.")


def penalize_seen(logits_BV: Tensor, seen_BV: Tensor, penalty: float) -> Tensor:
    """Divides positive logits of seen tokens by ``penalty`` and multiplies negative ones by it."""
    if penalty == 1.0:
        return logits_BV
    penalized = torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
    return torch.where(seen_BV, penalized, logits_BV)


def tempered(logits_BV: Tensor, temperature: float) -> Tensor:
    """Logits divided by ``temperature``, above 0. The largest becomes 0, so that however low it is none is infinite."""
    from_largest_BV = logits_BV - logits_BV.amax(-1, keepdim=True)
    return from_largest_BV / min(max(temperature, _LEAST), _MOST)


def keep_top_k(logits_BV: Tensor, k: int) -> Tensor:
    """Sets all but the k largest to minus infinity; ties at the border are kept."""
    if k == 0 or k >= logits_BV.shape[-1]:
        return logits_BV
    smallest_kept_B1 = logits_BV.topk(k, dim=-1).values[:, -1:]
    return logits_BV.masked_fill(logits_BV < smallest_kept_B1, _NEVER)


def keep_top_p(logits_BV: Tensor, p: float) -> Tensor:
    """Keeps the fewest most likely tokens whose probabilities sum to at least ``p``; at least one."""
    if p >= 1.0:
        return logits_BV
    sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True)
    probs_BV = sorted_BV.softmax(-1)
    # a token is dropped if those before it already reach p
    dropped_BV = probs_BV.cumsum(-1) - probs_BV >= p
    return logits_BV.masked_fill(torch.zeros_like(dropped_BV).scatter(-1, order_BV, dropped_BV), _NEVER)


def keep_min_p(logits_BV: Tensor, min_p: float) -> Tensor:
    """Keeps tokens at least ``min_p`` times as likely as the most likely one."""
    if min_p <= 0.0:
        return logits_BV
    probs_BV = logits_BV.softmax(-1)
    return logits_BV.masked_fill(probs_BV < min_p * probs_BV.amax(-1, keepdim=True), _NEVER)


def next_tokens(
    logits_BV: Tensor, params: SamplingParams, uniform_B: Sequence[float], seen_BV: Tensor | None = None
) -> Tensor:
    """One token for each sequence, int64 [B].

    Args:
        uniform_B: a random number in [0, 1) for each sequence. Drawing by it (the inverse of the cumulative
            distribution) makes a sequence depend on its own seed alone, not on what else is in the batch.
        seen_BV: boolean, tokens that the repetition penalty applies to.
    """
    logits_BV = logits_BV.float()
    if seen_BV is not None:
        logits_BV = penalize_seen(logits_BV, seen_BV, params.repetition_penalty)
    if params.temperature == 0.0:
        return logits_BV.argmax(-1)
    logits_BV = keep_top_k(tempered(logits_BV, params.temperature), params.top_k)
    logits_BV = keep_min_p(keep_top_p(logits_BV, params.top_p), params.min_p)
    # in double: with 100 thousand tokens, fp32 sums would shift the borders
    cumulative_BV = logits_BV.double().softmax(-1).cumsum(-1)
    drawn_B1 = torch.tensor(uniform_B, dtype=torch.float64, device=logits_BV.device)[:, None] * cumulative_BV[:, -1:]
    # right: a token of probability 0 (an interval of no width) is never taken
    tokens_B = torch.searchsorted(cumulative_BV, drawn_B1, right=True)[:, 0]
    return tokens_B.clamp_max(logits_BV.shape[-1] - 1)
