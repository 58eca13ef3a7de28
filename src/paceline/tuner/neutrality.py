"""What does a change of settings do to the numbers of a run, and did a trial's numbers show it?

Five classes, from harmless to not:

    bits       the same bits: work is done again, or at another time
    rounding   the same mathematics in another order, or rounded less often
    chance     the same mathematics, other numbers dropped out: equal in expectation alone
    precision  fewer bits somewhere: products, sums or what travels. Only with `--allow precision`
    batch      more sequences a step, and so other updates, fewer for as many tokens. Only with `--allow batch`

Sequence length, model, data and the optimizer's mathematics are never changed, so there is no class for that.
docs/numerics.md says what each setting does; tests/tuner/test_neutrality.py holds that every setting that may change
has a class.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, get_args

from paceline.config.load import differences
from paceline.config.run import RunConfig

Neutrality = Literal["bits", "rounding", "chance", "precision", "batch"]
CLASSES: tuple[Neutrality, ...] = get_args(Neutrality)
"""The most harmless first."""

SAID: Mapping[Neutrality, str] = {
    "bits": "the same bits",
    "rounding": "rounding only",
    "chance": "another draw of dropout",
    "precision": "alters numerics",
    "batch": "other updates",
}

Logged: TypeAlias = Sequence[Mapping[str, float | None]]
"""`step`, `loss` and `grad_norm` of logged steps."""

_SAME_BITS = frozenset(
    {
        "parallel.recompute",
        "train.fp8_weight_cache",
        "train.gc_interval",
        "data.num_workers",
        "data.prefetch",
    }
)
_FROM_EXACT: Mapping[str, tuple[object, ...]] = {
    "train.precision": ("fp32", "bf16", "fp8"),
    "train.fp8_scaling": ("rowwise", "tensorwise", "delayed"),
    "train.fp8_head": (False, True),
    "train.fp8_experts": (False, True),
    "parallel.reduce_dtype": ("fp32", "bf16"),
    "parallel.accumulate_dtype": ("fp32", "bf16"),
    "parallel.expert_dispatch": ("all_to_all", "all_gather"),
}
"""By setting: its values from the most to the least exact."""
_OF_FP8 = frozenset({"train.fp8_scaling", "train.fp8_head", "train.fp8_experts"})
_DRAWS = frozenset({"train.micro_batch_size"}) | {
    f"parallel.{name}" for name in ("tp", "pp", "cp", "ep", "etp", "dp_replicate", "dp_shard", "stages_per_rank",
                                    "pipeline_layout", "pipeline_schedule", "order")
}  # fmt: skip
"""What decides which numbers are dropped out (docs/numerics.md)."""


def classes_up_to(kind: Neutrality) -> frozenset[Neutrality]:
    return frozenset(CLASSES[: CLASSES.index(kind) + 1])


ALLOWABLE: tuple[Neutrality, ...] = ("precision", "batch")
"""What is changed only where it is allowed, each on its own."""


def classes_with(allowed: Iterable[Neutrality]) -> frozenset[Neutrality]:
    """What a trial may do to numbers, where the user allows these of `ALLOWABLE`."""
    return frozenset(CLASSES) - frozenset(ALLOWABLE) | frozenset(allowed)


def worst(classes: Iterable[Neutrality]) -> Neutrality:
    return max(classes, key=CLASSES.index, default="bits")


def by_setting(
    base: RunConfig, config: RunConfig, ranks: int, changed: Mapping[str, tuple[Any, Any]] | None = None
) -> dict[str, Neutrality]:
    """The class of each setting that differs.

    Args:
        changed: values in base and config by dotted key, if they are known: finding them takes milliseconds.
    """
    changed = differences(base, config) if changed is None else changed
    found = {key: _class_of(key, *values, base, config) for key, values in changed.items()}
    if not found:
        return {}
    if _sum_bits(config, ranks) < _sum_bits(base, ranks):
        # the setting that brought it: the engine, or how many micro-batches are summed up
        keys = [key for key in found if key in ("parallel.accumulate_dtype", "parallel.reduce_dtype", "parallel.zero")]
        found |= dict.fromkeys(keys or [key for key in found if key in _DRAWS] or list(found), "precision")
    if _router_rounds(config) and not _router_rounds(base):
        found |= {key: "precision" for key in found if key in ("parallel.zero", "train.precision")}
    return found


def _class_of(key: str, before: Any, after: Any, base: RunConfig, config: RunConfig) -> Neutrality:
    if key == "train.global_batch_size":
        return "batch"
    if key in _SAME_BITS:
        return "bits"
    order = _FROM_EXACT.get(key)
    if order is not None and before in order and after in order:
        if key in _OF_FP8 and config.train.precision != "fp8":
            return "bits"  # nothing reads it
        return "precision" if order.index(after) > order.index(before) else "rounding"
    if key in _DRAWS and _draws(config):
        return "chance"
    return "rounding"


def _draws(config: RunConfig) -> bool:
    model = config.model
    return any((model.dropout, model.attention_dropout, model.moe.jitter, model.moe.expert_dropout))


def _sum_bits(config: RunConfig, ranks: int) -> int:
    """Of the numbers in which gradients are summed over micro-batches; those of the flat engine, or FSDP's."""
    parallel, train = config.parallel, config.train
    degree = max(1, ranks // parallel.model_ranks)
    if train.global_batch_size <= degree * train.micro_batch_size:
        return 32
    dtype = parallel.accumulate_dtype if parallel.engine == "flat" else parallel.reduce_dtype
    return 16 if dtype == "bf16" else 32


def _router_rounds(config: RunConfig) -> bool:
    """FSDP casts a router's weights with their block (docs/numerics.md)."""
    return config.model.is_moe and config.parallel.engine == "fsdp" and config.train.precision != "fp32"


# ---- what the numbers of a trial show

_LOSS: Mapping[Neutrality, float] = {"bits": 2e-3, "rounding": 2e-3, "chance": 0.03, "precision": 0.02, "batch": 0.05}
_NORM: Mapping[Neutrality, float] = {"bits": 0.03, "rounding": 0.03, "chance": 0.3, "precision": 0.2, "batch": 0.7}
"""Relative differences of loss and gradient norm in the first step that a class can have with bf16 products. bf16
rounds to 2^-8 = 0.4 %; of a mean over thousands of tokens less than half is left. A gradient that is wrong by a factor
moves the norm by more. fp8: gradients of made-up numbers move by up to 15 % (docs/numerics.md). Of other samples, and
more of them, the loss of a model that has not learned is nearly the same; noise of the norm falls with their root."""
_LATER = 3.0
"""Times that after some steps: Adam's updates are as large for small gradients as for large ones, so rounding grows."""
_FP32 = 0.05
"""Times that, where products are in fp32 in both."""


def loss_apart(base: RunConfig, config: RunConfig, kind: Neutrality, reference: Logged, logged: Logged) -> str:
    """Why the numbers of a trial are not those of the base within its class; empty where they are.

    Compares loss and gradient norm of the steps that both have logged: the same samples, from the same weights.
    """
    if not _are_numbers(logged):
        return "its loss or gradient is not a finite number" if _are_numbers(reference) else ""
    shared = {int(line["step"] or 0): line for line in reference}
    exact = base.train.precision == config.train.precision == "fp32"
    for line in logged:
        step = int(line["step"] or 0)
        other = shared.get(step)
        if other is None:
            continue
        for name, allowed in (("loss", _LOSS[kind]), ("grad_norm", _NORM[kind])):
            mine, theirs = line[name], other[name]
            if mine is None or theirs is None:
                continue
            limit = allowed * (_FP32 if exact and kind in ("bits", "rounding") else 1.0) * (_LATER if step > 1 else 1.0)
            apart = abs(mine - theirs) / max(abs(theirs), 1e-12)
            if apart > limit:
                return (
                    f"{name} of step {step} is {mine:.6g}, the base's is {theirs:.6g}: {apart:.2%} apart, and "
                    f"'{SAID[kind]}' allows {limit:.2%}"
                )
    return ""


def _are_numbers(logged: Logged) -> bool:
    values = [line[name] for line in logged for name in ("loss", "grad_norm")]
    return bool(values) and all(value is not None and math.isfinite(value) for value in values)
