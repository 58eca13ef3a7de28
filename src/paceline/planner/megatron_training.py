"""What a Megatron-LM command line says of the optimizer, the learning rate and the seed, as fields of a recipe.

None of it changes memory or speed, so nothing here stops a plan: a value that cannot be read is left to the recipe's
default and named by `left_out`, with the flags that a recipe has nothing for.
"""

from __future__ import annotations

from typing import Any

from paceline.planner.megatron_flags import PASSIVE, Flags

_STYLES = {"constant": "constant", "linear": "linear", "cosine": "cosine", "WSD": "wsd"}
_WSD_SHAPES = {"linear": "linear", "cosine": "cosine", "minus_sqrt": "sqrt"}
_TAKEN_NAMES = """adam-beta1 adam-beta2 adam-eps clip-grad seed weight-decay lr min-lr lr-decay-style lr-decay-iters
lr-decay-samples lr-wsd-decay-style lr-wsd-decay-iters lr-wsd-decay-samples lr-warmup-iters lr-warmup-samples
lr-warmup-fraction"""
_TAKEN = frozenset(_TAKEN_NAMES.split())
"""Flags that `optim_fields` and `run_fields` read."""
_PLACE_NAMES = """save load data-path train-data-path valid-data-path test-data-path vocab-file merge-file
tokenizer-type tokenizer-model tensorboard-dir wandb-project wandb-exp-name wandb-save-dir wandb-entity data-cache-path
distributed-backend distributed-timeout-minutes log-interval save-interval eval-interval eval-iters split num-workers"""
_OF_THE_PLACE = frozenset(_PLACE_NAMES.split())
"""Of files, logs and intervals: every recipe has its own."""


def optim_fields(flags: Flags, steps: int, batch: int) -> dict[str, Any]:
    """Of `[optim]`; Megatron's defaults where a flag is not given.

    Args:
        steps: of the run.
        batch: sequences of a global batch, by which numbers of samples become steps.
    """
    warmup = _warmup(flags, steps, batch)
    style = _STYLES.get(flags.text("lr-decay-style", "linear"), "linear")
    fields: dict[str, Any] = {
        "lr": flags.number("lr", 1e-4),
        "min_lr": flags.number("min-lr", 0.0),
        "weight_decay": flags.number("weight-decay", 0.01),
        "betas": (_number(flags, "adam-beta1", 0.9), _number(flags, "adam-beta2", 0.999)),
        "eps": _number(flags, "adam-eps", 1e-8),
        "grad_clip": _number(flags, "clip-grad", 1.0),
        "schedule": style,
        "warmup_steps": warmup,
    }
    if style == "wsd":
        decay = _steps(flags, "lr-wsd-decay-iters", "lr-wsd-decay-samples", batch)
        shape = _WSD_SHAPES.get(flags.text("lr-wsd-decay-style", "linear"), "linear")
        return fields | {"decay_steps": decay, "decay_shape": shape}
    # Megatron counts the warm-up among the iterations of decay
    decay = _steps(flags, "lr-decay-iters", "lr-decay-samples", batch)
    return fields | {"decay_steps": max(decay - warmup, 1) if decay else 0}


def run_fields(flags: Flags) -> dict[str, Any]:
    """Of `[run]`."""
    return {"seed": max(0, int(_number(flags, "seed", 1234)))}


def left_out(flags: Flags) -> tuple[str, ...]:
    """Flags that were given and that the recipe says nothing of, with their values, in alphabetical order."""
    found = [name for name in flags.given if name in PASSIVE and name not in _TAKEN | _OF_THE_PLACE]
    found += [name for name in flags.given if name in _TAKEN and _is_lost(flags, name)]
    return tuple(" ".join((f"--{name}", *flags.given[name])) for name in sorted(set(found)))


def _is_lost(flags: Flags, name: str) -> bool:
    if name in flags.open:
        return True
    if name == "lr-decay-style":
        return flags.text(name) not in _STYLES
    if name == "lr-wsd-decay-style":
        return flags.text(name) not in _WSD_SHAPES
    return _value(flags.text(name)) is None


def _warmup(flags: Flags, steps: int, batch: int) -> int:
    if fraction := _number(flags, "lr-warmup-fraction", 0.0):
        return round(fraction * (_steps(flags, "lr-decay-iters", "lr-decay-samples", batch) or steps))
    return _steps(flags, "lr-warmup-iters", "lr-warmup-samples", batch)


def _steps(flags: Flags, iterations: str, samples: str, batch: int) -> int:
    """0 where neither is given."""
    return int(_number(flags, iterations, 0.0) or _number(flags, samples, 0.0) // batch)


def _number(flags: Flags, name: str, default: float) -> float:
    found = _value(flags.text(name))
    return default if found is None else found


def _value(text: str) -> float | None:
    try:
        return float(text.replace("_", ""))
    except ValueError:
        return None
