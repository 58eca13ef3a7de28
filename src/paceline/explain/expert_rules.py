"""Are the experts used alike?"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from paceline.explain.cause import Cause
from paceline.explain.ranks import RankReport
from paceline.explain.run_folder import RunView
from paceline.explain.shares import Shares, mean_known, of_step

UNEVEN = 1.5
"""Busiest expert's load over the mean from which on experts are called uneven."""


def _loads(view: RunView) -> list[list[float]]:
    """By logged step: the busiest expert's load over the mean, by expert layer."""
    found = [record.extra.get("moe/load_max_over_mean") for record in view.metrics[-20:]]
    return [load for load in found if isinstance(load, list) and load]


def expert_load(view: RunView) -> float | None:
    """The busiest expert's load over the mean, mean over layers and steps; None without experts."""
    known = _loads(view)
    return float(np.mean([np.mean(load) for load in known])) if known else None


def expert_causes(view: RunView, shares: Shares, report: RankReport) -> Iterator[Cause]:
    mean = expert_load(view)
    if mean is None or mean < UNEVEN:
        return
    by_layer = np.mean(np.array(_loads(view)), axis=0)
    worst = int(np.argmax(by_layer))
    seconds = _expert_excess(view, shares)
    yield Cause(
        id="explain.expert-imbalance",
        subject=f"experts are used unevenly: the busiest gets {mean:.1f} times the mean load",
        evidence=f"Worst in expert layer {worst}: {by_layer[worst]:.1f} times."
        + (f" Ranks differ by {seconds * 1e3:.1f} ms of own forward and backward." if seconds is not None else ""),
        next_step="--set model.moe.bias_balance=true balances without a loss; or a larger model.moe.aux_loss_coef.",
        share=None if seconds is None else of_step(shares, seconds),
        certain=seconds is not None,
    )


def _expert_excess(view: RunView, shares: Shares) -> float | None:
    """What the rank with the most expert work takes beyond the mean of its expert-parallel group."""
    if int(view.recipe.get("parallel.ep", 1)) < 2 or len(view.ranks) < 2:
        return None
    work = shares.own["forward"] + shares.own["backward"]
    return float(np.mean(np.nanmax(work, axis=0) - mean_known(work, axis=0)))
