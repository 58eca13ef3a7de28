"""Do two runs learn alike? What their losses prove, and what they do not.

The first steps decide: with the same weights and data they differ by rounding alone. A gap that grows later proves
nothing by itself, and with a learning rate that amplifies rounding nothing at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from paceline.explain.cause import Cause

FIRST_STEPS = 3
_ROUNDING = 1e-2
"""Relative: bf16 and fp8 products leave less than that on a first loss."""
_WILD_LR = 0.1


def loss_causes(first: Mapping[int, float], second: Mapping[int, float], *, lr: float = math.nan) -> list[Cause]:
    """By losses of steps that both have.

    Args:
        lr: the larger peak learning rate of the two, nan where it is not known.
    """
    common = sorted(
        step for step in first.keys() & second.keys() if not math.isnan(first[step]) and not math.isnan(second[step])
    )
    if not common:
        return []
    early = [step for step in common if step <= FIRST_STEPS]
    apart = [step for step in early if abs(second[step] - first[step]) > _ROUNDING * max(abs(first[step]), 1e-9)]
    last = common[-1]
    gap = second[last] - first[last]
    if apart:
        return [
            Cause(
                id="explain.loss-apart-from-the-start",
                subject=f"the losses differ from step {apart[0]} on, before anything could have been learned apart",
                evidence=f"{first[apart[0]]:.6g} and {second[apart[0]]:.6g}.",
                next_step="The runs start from other weights or read other data, or one computes something "
                "else: compare "
                "seed, data and initialisation first.",
                share=None,
                severity="warning",
                gain="-",
            )
        ]
    if lr >= _WILD_LR:
        return [
            Cause(
                id="explain.loss-gap",
                subject=f"the losses' gap of {gap:+.3g} at step {last} proves nothing",
                evidence=f"A learning rate of {lr:g} amplifies rounding: only the first steps can be compared"
                + (f", and steps {early[0]} to {early[-1]} agree." if early else ", and neither log has them."),
                next_step="Compare step 1 to 3 with equal weights, or use a usual learning rate.",
                share=None,
                severity="note",
                gain="-",
            )
        ]
    if abs(gap) < 0.01 * max(abs(first[last]), 1e-9):
        return []
    start = f"The first steps agree ({', '.join(map(str, early))})." if early else "Neither has its first steps."
    return [
        Cause(
            id="explain.loss-gap",
            subject=f"watch: the losses are {gap:+.3g} apart at step {last}",
            evidence=f"{first[last]:.6g} and {second[last]:.6g}. {start} Lower precision leaves gaps of this "
            "kind early in a "
            "run, so this is no proven fault.",
            next_step="Not determined: go on and see whether the gap shrinks; if it grows, or a loss rises, "
            "repeat from a "
            "good checkpoint with --set train.precision=bf16.",
            share=None,
            severity="note",
            gain="-",
        )
    ]
