"""Which settings may a trial change, to which values? A table: what each is worth beyond what `plan` predicts, how sure
that is, and how likely it is that a trial fails of it.

Never in it: the model, the data, sequence length, and the optimizer's mathematics. `structure` settings (layout,
micro-batch, batch where it may grow, recomputation) decide memory together and are tried in combination; the others one
by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.config.run import RunConfig
from paceline.tuner.machine import Machine


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One field of the recipe."""

    key: str
    values: tuple[Any, ...]
    """The base's own is always one more."""
    where: Callable[[RunConfig, Machine], bool] = lambda config, machine: True
    """Whether anything reads the field in this recipe; where nothing does, it stays as it is in the base."""
    gain: Mapping[Any, float] = field(default_factory=dict)
    """By value: log of the step's time that is expected beyond what `plan` predicts (-0.03 = 3 % less)."""
    spread: float = 0.03
    """Standard deviation of that."""
    risk: float = 0.02
    """How likely a trial fails because of it."""


def _on_gpu(config: RunConfig, machine: Machine) -> bool:
    return machine.on_gpu


def _fp8_device(config: RunConfig, machine: Machine) -> bool:
    return machine.on_gpu and machine.hardware is not None and machine.hardware.fp8 is not None


def _in_fp8(config: RunConfig, machine: Machine) -> bool:
    return config.train.precision == "fp8"


def _cached(config: RunConfig, machine: Machine) -> bool:
    """Whether weights are kept in fp8 over a step."""
    return _in_fp8(config, machine) and config.parallel.engine == "flat"


def _tensorwise(config: RunConfig, machine: Machine) -> bool:
    return _in_fp8(config, machine) and machine.on_gpu and config.train.fp8_own_scaling == "tensorwise"


def _delayed(config: RunConfig, machine: Machine) -> bool:
    """Whether to cast without a look for the largest number saves a reading."""
    return _tensorwise(config, machine) and config.train.fp8_cast_kernel == "triton"


def _flat(config: RunConfig, machine: Machine) -> bool:
    return config.parallel.engine == "flat"


def _experts(config: RunConfig, machine: Machine) -> bool:
    return config.model.is_moe and not config.model.mlp_bias and not config.model.moe.expert_dropout


def _flash4(config: RunConfig, machine: Machine) -> bool:
    return machine.has_flash4 and config.train.precision != "fp32" and not config.model.attention_dropout


SWITCHES: tuple[Setting, ...] = (
    Setting(key="train.attention_kernel", values=("auto",), spread=0.08),
    Setting(
        key="train.attention_kernel", values=("flash4",), where=_flash4, gain={"flash4": -0.01}, spread=0.03, risk=0.1
    ),
    Setting(key="train.loss_kernel", values=("chunked",), gain={"chunked": -0.01}, spread=0.04),
    Setting(
        key="train.loss_chunk_tokens", values=(1024, 4096), spread=0.01,
        where=lambda config, machine: config.train.loss_kernel == "chunked",
    ),
    Setting(
        key="parallel.offload", values=("optimizer",), spread=0.2, risk=0.1,
        where=lambda config, machine: machine.on_gpu and config.parallel.offload != "parameters",
    ),
    Setting(key="parallel.compile", values=(True, False), spread=0.1, risk=0.1),
    Setting(
        key="optim.fused_update", values=(True,), spread=0.02,
        where=lambda config, machine: config.optim.name != "adamw8bit" and config.parallel.offload == "none",
    ),
    Setting(
        key="parallel.fused_weight_gradients", values=(True,), spread=0.02,
        where=lambda config, machine: config.parallel.engine == "flat" and not config.parallel.splits_backward,
    ),
    Setting(key="parallel.expert_kernels", values=("grouped", "triton"), where=_experts, spread=0.12, risk=0.1),
    Setting(
        key="parallel.expert_dispatch", values=("all_gather",), spread=0.08,
        where=lambda config, machine: _experts(config, machine) and config.parallel.ep * config.parallel.etp > 1
        and config.parallel.expert_kernels != "plain",
    ),
    Setting(key="train.precision", values=("bf16",), where=_on_gpu, spread=0.1),
    Setting(key="train.precision", values=("fp8",), where=_fp8_device, spread=0.1, risk=0.1),
    Setting(key="train.fp8_scaling", values=("tensorwise",), where=_in_fp8, spread=0.05),
    Setting(key="train.fp8_scaling", values=("delayed",), where=_delayed, spread=0.02, risk=0.1),
    Setting(
        key="train.fp8_cast_kernel", values=("triton",), where=_tensorwise, gain={"triton": -0.04}, spread=0.05,
        risk=0.2,
    ),
    Setting(key="train.fp8_weight_cache", values=(False,), where=_cached, spread=0.03),
    Setting(
        key="train.fp8_weights_only", values=(True,), spread=0.05, risk=0.1,
        where=lambda config, machine: _cached(config, machine) and config.train.fp8_weight_cache,
    ),
    Setting(
        key="train.fp8_head", values=(True,), gain={True: -0.02}, spread=0.03,
        where=lambda config, machine: _in_fp8(config, machine) and config.train.loss_kernel == "chunked",
    ),
    Setting(
        key="train.fp8_experts", values=(True,), spread=0.08,
        where=lambda config, machine: _in_fp8(config, machine) and _experts(config, machine)
        and config.parallel.expert_kernels != "plain",
    ),
    Setting(
        key="parallel.reduce_dtype", values=("bf16",), spread=0.02,
        where=lambda config, machine: machine.ranks > 1 and config.train.precision != "fp32",
    ),
    Setting(
        key="parallel.accumulate_dtype", values=("bf16",), spread=0.02,
        where=lambda config, machine: _flat(config, machine) and config.train.precision != "fp32",
    ),
)  # fmt: skip
"""Not of the layout."""

STRUCTURE = (
    "parallel.tp",
    "parallel.pp",
    "parallel.cp",
    "parallel.ep",
    "parallel.etp",
    "parallel.zero",
    "parallel.dp_replicate",
    "parallel.pipeline_schedule",
    "parallel.stages_per_rank",
    "train.micro_batch_size",
    "train.global_batch_size",
    "parallel.recompute",
)
"""Of the layout and what a rank keeps; `tuner/space.py` combines them."""

ADVISED = ("parallel.bucket_mb", "train.gc_interval", "parallel.cp_method", "parallel.pipeline_layout")
"""Tried only where `explain` proposes them."""

FOLLOWING = ("parallel.dp_shard", "parallel.accumulate_dtype", "parallel.pipeline_layout")
"""Change with others, where the base's value does not go with the new one."""

TUNABLE = frozenset({*(setting.key for setting in SWITCHES), *STRUCTURE, *ADVISED})
"""Everything that a trial may change."""

_LAYOUT_SPREAD = 0.05
_ADVISED_SPREAD = 0.05


def setting_of(key: str, value: Any) -> Setting:
    """What is known of a setting at a value; of a field that is not a switch, a cautious guess."""
    for setting in SWITCHES:
        if setting.key == key and value in setting.values:
            return setting
    spread = _LAYOUT_SPREAD if key in STRUCTURE else _ADVISED_SPREAD
    plain = key in ("train.micro_batch_size", "train.global_batch_size", "parallel.recompute", *ADVISED)
    return Setting(key=key, values=(value,), spread=spread, risk=0.01 if plain else 0.05)


def alternatives(advised: Mapping[str, Sequence[Any]]) -> list[Setting]:
    """The switches, and what was advised beside them."""
    found = [*SWITCHES]
    for key, values in advised.items():
        if key not in STRUCTURE:
            found.append(Setting(key=key, values=tuple(values), spread=_ADVISED_SPREAD))
    return found
