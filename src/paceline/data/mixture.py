"""Several datasets as one, in proportion to their weights.

The order is Megatron's: no random numbers; each step takes the dataset that is furthest behind its share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from paceline.data.sources import Sample, SampleSource
from paceline.errors import DataError

MAX_SOURCES = 32766
SURPLUS = 0.005
"""Megatron builds each dataset of a blend this much larger than its share."""

_PLAIN_LOOP_LIMIT = 12  # below this many datasets a plain loop beats numpy calls on short arrays (measured)


def normalized(weights: Sequence[float]) -> list[float]:
    """Weights as shares of 1, divided in double precision by their sum."""
    if not weights or min(weights) <= 0 or not math.isfinite(sum(weights)):
        raise DataError(
            f"blend weights {list(weights)} cannot be used",
            evidence="Each weight must be a positive number; they need not sum to 1.",
            next_step="Leave out sources that should not be read.",
        )
    if len(weights) > MAX_SOURCES:
        raise DataError(
            f"{len(weights):,} sources in one blend",
            evidence=f"The blend index has 16-bit ids: at most {MAX_SOURCES:,}.",
            next_step="Merge some of them first: `paceline data merge`.",
        )
    total = float(sum(weights))
    return [weight / total for weight in weights]


def blend_order(weights: Sequence[float], size: int) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """(dataset id, sample within that dataset) for each of ``size`` steps.

    ``weights`` sum to 1. At step i the dataset with the largest ``weight * max(i, 1) - count`` is taken, the first of
    equals.
    """
    if len(weights) <= _PLAIN_LOOP_LIMIT:
        ids = _blend_few(list(weights), size)
    else:
        ids = _blend_many(np.asarray(weights, dtype=np.float64), size)
    return ids, running_count(ids, len(weights))


def _blend_few(weights: list[float], size: int) -> NDArray[np.int16]:
    ids = np.empty(size, dtype=np.int16)
    counts = [0.0] * len(weights)
    others = list(enumerate(weights))[1:]
    first_weight = weights[0]
    block = 1 << 16
    for start in range(0, size, block):
        chosen = []
        for step in range(start, min(start + block, size)):
            at = step or 1
            best, best_error = 0, first_weight * at - counts[0]
            for source, weight in others:
                error = weight * at - counts[source]
                if error > best_error:
                    best, best_error = source, error
            counts[best] += 1.0
            chosen.append(best)
        ids[start : start + len(chosen)] = chosen
    return ids


def _blend_many(weights: NDArray[np.float64], size: int) -> NDArray[np.int16]:
    ids = np.empty(size, dtype=np.int16)
    counts = np.zeros(len(weights))
    errors = np.empty(len(weights))
    for step in range(size):
        np.multiply(weights, step or 1, out=errors)
        np.subtract(errors, counts, out=errors)
        best = errors.argmax()  # the first of equals
        counts[best] += 1.0
        ids[step] = best
    return ids


def exhaustive_order(sizes: Sequence[int]) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """Every sample of every dataset exactly once, interleaved in proportion to the sizes."""
    total = sum(sizes)
    weights = [size / total for size in sizes]
    counts = [0] * len(sizes)
    left = [source for source, size in enumerate(sizes) if size]
    ids = np.empty(total, dtype=np.int16)
    for step in range(total):
        at = step or 1
        best = max(left, key=lambda source: weights[source] * at - counts[source])
        ids[step] = best
        counts[best] += 1
        if counts[best] == sizes[best]:
            left.remove(best)
    return ids, running_count(ids, len(sizes))


def running_count(ids: NDArray[np.int16], num_sources: int) -> NDArray[np.int64]:
    """How often the id of each step came before: 0 1 0 0 -> 0 0 1 2."""
    order = np.argsort(ids, kind="stable")  # a radix sort for 16-bit ids
    sizes = np.bincount(ids, minlength=num_sources)
    firsts = np.cumsum(sizes) - sizes
    counts = np.empty(len(ids), dtype=np.int64)
    counts[order] = np.arange(len(ids)) - np.repeat(firsts, sizes)
    return counts


def blend_sizes(weights: Sequence[float], size: int) -> tuple[int, list[int]]:
    """(length of the blend, samples to build of each dataset) as Megatron asks for them.

    The second may still be too small for a dataset that is drawn more often than its share predicts: callers take the
    larger of it and the exact count from `blend_order`. Where Megatron's own is enough, the samples are therefore
    Megatron's.
    """
    shares = [math.ceil(size * weight) for weight in weights]
    return sum(shares), [math.ceil(share * (1 + SURPLUS)) for share in shares]


class Mixture:
    """Datasets read in a given order."""

    def __init__(
        self, sources: Sequence[SampleSource], source_ids: NDArray[np.int16], sample_ids: NDArray[np.int64]
    ) -> None:
        self.sources = list(sources)
        self.source_ids = source_ids
        self.sample_ids = sample_ids

    def __len__(self) -> int:
        return len(self.source_ids)

    def __getitem__(self, i: int) -> Sample:
        return self.sources[int(self.source_ids[i])][int(self.sample_ids[i])]
