"""How many GPUs does a training run take? The four steps that buyers do by hand, with predictions in place of guesses.

1. what is trained: parameters, sequence, batch, tokens, precision, deadline;
2. what a token costs: FLOPs, forward and backward;
3. all tokens, and a reserve for failures, restarts and evaluation;
4. divided by what a GPU really does: not its peak, but the predicted speed of the best layout on so many GPUs.

Speed a GPU falls as GPUs grow, so step 4 is repeated until (nearly) the fewest nodes that meet the deadline are found.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from paceline.config.run import RunConfig
from paceline.costs.adapters import step_flops_per_token
from paceline.costs.profiles import PACELINE, Profile
from paceline.costs.workload import Cluster
from paceline.planner.rank import Candidate, rank

_FIRST_GUESS = 0.4
"""MFU with which the search begins; it decides nothing but where."""
_KEPT, _PROBED = 8, 120
_MOST_GPUS = 2**17
_LARGEST_FACTOR = 13
"""Of a number of nodes between common ones: with a larger one, few degrees divide it."""
_WORTH_ANOTHER_BATCH = 0.05
"""Rows are compared at the batch that was asked for, unless its divisors cost more than this of the speed."""


@dataclass(frozen=True, kw_only=True)
class Sizing:
    """What was found."""

    tokens: float
    flops_per_token: float
    reserve: float
    """Share of the time that is not training."""
    days: float
    """Asked for."""
    needed_tokens_per_second: float
    tried: tuple[tuple[int, Candidate | None], ...]
    """By number of GPUs: the best layout, None where nothing fits."""
    chosen: Candidate | None
    """On the fewest GPUs that meet the deadline; None if none of those tried does."""

    def days_of(self, candidate: Candidate) -> float:
        """With the reserve."""
        return self.tokens / candidate.tokens_per_second / (1 - self.reserve) / 86400


def size(
    config: RunConfig,
    machines: Callable[[int], Cluster],
    *,
    tokens: float,
    days: float,
    reserve: float,
    gpus_per_node: int,
    profile: Profile = PACELINE,
) -> Sizing:
    """Near the fewest GPUs, in whole nodes, on which ``tokens`` take ``days`` or less.

    Common numbers of nodes first, then those between the last that is too few and the first that is enough, but for
    numbers that divide badly: more GPUs are taken to be faster there, which a few misfits are not.

    Args:
        machines: the cluster of so many GPUs.
    """
    flops = step_flops_per_token(config)
    needed = tokens / (days * 86400 * (1 - reserve))
    peak = machines(1).gpu.peak_tflops("fp8" if config.train.precision == "fp8" else "bf16") or 100.0
    counts = _counts(gpus_per_node)
    found: dict[int, Candidate | None] = {}

    def best(count: int) -> Candidate | None:
        if count not in found:
            found[count] = on_gpus(config, machines(count), profile)
        return found[count]

    def is_enough(count: int) -> bool:
        candidate = best(count)
        return candidate is not None and candidate.tokens_per_second >= needed

    guess = needed * flops / (_FIRST_GUESS * 1e12 * peak)
    at = next((index for index, count in enumerate(counts) if count >= guess), len(counts) - 1)
    low, high = _bracket(at, lambda index: is_enough(counts[index]), _last(counts, guess, gpus_per_node))
    while high - low > 1:  # more GPUs are faster, but for what divides badly
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(counts[middle]) else (middle, high)
    if high and is_enough(counts[high]):
        between = _between(counts[high - 1], counts[high], gpus_per_node)
        first, last = -1, len(between)
        while last - first > 1:
            middle = (first + last) // 2
            first, last = (first, middle) if is_enough(between[middle]) else (middle, last)
    enough = [count for count in sorted(found) if is_enough(count)]
    return Sizing(
        tokens=tokens,
        flops_per_token=flops,
        reserve=reserve,
        days=days,
        needed_tokens_per_second=needed,
        tried=tuple(sorted(found.items())),
        chosen=best(enough[0]) if enough else None,
    )


def _last(counts: list[int], guess: float, gpus_per_node: int) -> int:
    """Index of the most GPUs that are tried: 64 times the guess."""
    return max(index for index, count in enumerate(counts) if index == 0 or count <= 64 * max(guess, gpus_per_node))


def _bracket(start: int, is_enough: Callable[[int], bool], last: int) -> tuple[int, int]:
    """(an index that is not enough, or -1; one that is, or ``last``), found in steps that double."""
    low, high, step = -1, last, 1
    at = min(start, last)
    if is_enough(at):
        high = at
        while at - step >= 0 and is_enough(at - step):
            at, high, step = at - step, at - step, 2 * step
        return max(low, at - step), high
    low = at
    while low < last:
        at = min(last, low + step)
        if is_enough(at):
            return low, at
        low, step = at, 2 * step
    return last - 1, last


def with_batch(config: RunConfig, gpus: int) -> RunConfig:
    """The batch as near as can be to the recipe's that many degrees of data parallelism divide."""
    train = config.train
    if train.global_batch_size % gpus == 0:
        return config
    # a multiple of the GPUs' odd part, and of as many twos as the batch can bear
    odd = gpus // (gpus & -gpus)
    unit = odd * 2 ** max(0, min(round(math.log2(gpus / odd)), int(math.log2(max(1, train.global_batch_size / odd)))))
    whole = max(1, round(train.global_batch_size / unit)) * unit
    changed = train.model_copy(update={"global_batch_size": whole, "micro_batch_size": 1})
    return config.model_copy(update={"train": changed})


def _counts(gpus_per_node: int) -> list[int]:
    """Parts of a node, then nodes: 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20 ..."""
    within = [count for count in (1, 2, 4) if count < gpus_per_node]
    nodes = sorted({base * 2**power for base in (1, 3, 5, 7) for power in range(18)})
    return within + [gpus_per_node * count for count in nodes if gpus_per_node * count <= _MOST_GPUS]


def _between(low: int, high: int, gpus_per_node: int) -> list[int]:
    """Numbers of GPUs in whole nodes between two, whose nodes have no prime factor above `_LARGEST_FACTOR`."""
    nodes = range(low // gpus_per_node + 1, -(-high // gpus_per_node))
    return [gpus_per_node * count for count in nodes if _largest_factor(count) <= _LARGEST_FACTOR]


def _largest_factor(count: int) -> int:
    largest, factor = 1, 2
    while count > 1:
        while count % factor == 0:
            largest, count = factor, count // factor
        factor += 1
    return largest


def on_gpus(config: RunConfig, cluster: Cluster, profile: Profile = PACELINE) -> Candidate | None:
    """The best layout on exactly these GPUs; with another batch only where that is `_WORTH_ANOTHER_BATCH` faster."""

    def best(asked: RunConfig) -> Candidate | None:
        ranked = rank(asked, cluster, profile=profile, keep=_KEPT, probe=_PROBED, offload=False)
        return ranked.fitting[0] if ranked.fitting else None

    own, other = best(config), with_batch(config, cluster.gpus)
    if other is config:
        return own
    changed = best(other)
    if own is None or changed is None:
        return own or changed
    return changed if changed.tokens_per_second > (1 + _WORTH_ANOTHER_BATCH) * own.tokens_per_second else own
