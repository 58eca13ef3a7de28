"""What is the learning rate at step s? Pure functions of the recipe: nothing is stored, so nothing is lost on resume.

Steps are counted from 1: `lr_factor(config, 1, total)` is for the first update of the run, `lr_factor(config, total,
total)` for its last, which uses exactly `min_lr` where a decay reaches to the end of the run. Changing the recipe on
resume changes peak, minimum and shape together, since the old ones are written nowhere else.
"""

from __future__ import annotations

import math

from paceline.config.optim import OptimConfig


def lr_factor(config: OptimConfig, step: int, total_steps: int) -> float:
    """Learning rate of update `step` (from 1) as a part of the peak; all parameter groups follow it.

    Warm-up: step / warmup_steps, so that update `warmup_steps` is the first at the peak. Then:

    | schedule | after warm-up |
    | --- | --- |
    | constant | 1 |
    | linear, cosine | falls over `decay_steps` updates (0 = all that are left) to min_lr / lr, and stays there |
    | wsd | 1, then falls over the last `decay_steps` updates (0 = a tenth of the run) in `decay_shape` |

    A decay never begins inside the warm-up: where wsd's would, it is shortened.
    """
    assert step >= 1, f"steps are counted from 1, got {step}"
    if step < config.warmup_steps:
        return step / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    start, length = decay_range(config, total_steps)
    if step <= start:
        return 1.0
    progress = min((step - start) / length, 1.0)
    floor = config.min_lr / config.lr
    return floor + (1.0 - floor) * _remaining(_shape(config), progress)


def learning_rate(config: OptimConfig, step: int, total_steps: int) -> float:
    """The rate of AdamW's parameters at update `step` (from 1): what `metrics.jsonl` calls `lr`."""
    return config.lr * lr_factor(config, step, total_steps)


def decay_range(config: OptimConfig, total_steps: int) -> tuple[int, int]:
    """The last update at the peak, and the number of updates of decay after it (at least 1)."""
    if config.schedule == "wsd":
        length = config.decay_steps or max(total_steps // 10, 1)
        start = max(total_steps - length, config.warmup_steps)
        return start, max(total_steps - start, 1)
    return config.warmup_steps, config.decay_steps or max(total_steps - config.warmup_steps, 1)


def _shape(config: OptimConfig) -> str:
    return config.decay_shape if config.schedule == "wsd" else config.schedule


def _remaining(shape: str, progress: float) -> float:
    """What is left of the fall from 1 to 0 at `progress` in [0, 1]; exactly 0 at 1."""
    if progress >= 1.0:
        return 0.0
    if shape == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    if shape == "sqrt":
        return 1.0 - math.sqrt(progress)
    assert shape == "linear", shape
    return 1.0 - progress
