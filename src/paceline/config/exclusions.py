"""Which options exclude each other? A table: one row less, and the pair is allowed.

What depends on sizes (heads that divide, lengths, layers) is in `layout.py` and `schedules.py`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from paceline.config.asked import error, show
from paceline.config.run import RunConfig
from paceline.report.finding import Finding


@dataclass(frozen=True, kw_only=True)
class Option:
    """Something that a recipe switches on."""

    name: str
    """As the documentation calls it."""
    key: str
    """The field whose value the message shows."""
    on: Callable[[RunConfig], bool]
    off: str
    """The nearest value that switches it off, as in TOML: ``"parallel.tp = 1"``."""
    layout: bool = True
    """Whether another way to spread the model could do without it."""
    beside: Callable[[RunConfig], str] = lambda config: ""
    """What else must then change, given the rest of the recipe: ``"parallel.stages_per_rank = 1"``."""

    def way_out(self, config: RunConfig) -> str:
        """How to switch it off in this recipe."""
        beside = self.beside(config)
        return f"{self.off} with {beside}" if beside else self.off

    def spelled(self, config: RunConfig) -> str:
        value: object = config
        for name in self.key.split("."):
            value = getattr(value, name)
        return f"{self.key} = {show(value)}"

    @property
    def switched_off(self) -> dict[str, Any]:
        """`off` as a value by its dotted key."""
        key, _, value = self.off.partition(" = ")
        return {key: tomllib.loads(f"value = {value}")["value"]}


@dataclass(frozen=True, kw_only=True)
class Exclusion:
    """Two options that do not go together, and why."""

    id: str
    options: tuple[Option, Option]
    because: str

    @property
    def of_layout(self) -> bool:
        return any(option.layout for option in self.options)

    def met(self, config: RunConfig) -> bool:
        return all(option.on(config) for option in self.options)


def _split_backward(config: RunConfig) -> bool:
    return config.parallel.splits_backward


_TENSOR = Option(
    name="tensor parallelism (`parallel.tp`)",
    key="parallel.tp",
    on=lambda config: config.parallel.tp > 1,
    off="parallel.tp = 1",
)
_EXPERT_TENSOR = Option(
    name="tensor parallelism inside experts (`parallel.etp`)",
    key="parallel.etp",
    on=lambda config: config.parallel.etp > 1,
    off="parallel.etp = 1",
)
_CONTEXT = Option(
    name="context parallelism (`parallel.cp`)",
    key="parallel.cp",
    on=lambda config: config.parallel.cp > 1,
    off="parallel.cp = 1",
)
_SPLIT_BACKWARD = Option(
    name="`parallel.pipeline_schedule` `zero_bubble` and `zbv`",
    key="parallel.pipeline_schedule",
    on=_split_backward,
    off="parallel.pipeline_schedule = '1f1b'",
    beside=lambda config: "parallel.stages_per_rank = 1" if config.parallel.stages_per_rank > 1 else "",
)
_FSDP = Option(
    name="`parallel.zero` 2 and 3",
    key="parallel.zero",
    on=lambda config: config.parallel.zero >= 2,
    off="parallel.zero = 1",
    layout=False,
    beside=lambda config: "parallel.offload = 'optimizer'" if config.parallel.offload == "parameters" else "",
)
_COMPILE = Option(
    name="`parallel.compile`",
    key="parallel.compile",
    on=lambda config: config.parallel.compile,
    off="parallel.compile = false",
    layout=False,
)
_OFFLOAD = Option(
    name="`parallel.offload`",
    key="parallel.offload",
    on=lambda config: config.parallel.offload != "none",
    off="parallel.offload = 'none'",
    layout=False,
)
_BF16_SUMS = Option(
    name='`parallel.accumulate_dtype = "bf16"`',
    key="parallel.accumulate_dtype",
    on=lambda config: config.parallel.accumulate_dtype == "bf16",
    off="parallel.accumulate_dtype = 'fp32'",
    layout=False,
)
_MUON = Option(
    name='`optim.name = "muon"`',
    key="optim.name",
    on=lambda config: config.optim.name == "muon",
    off="optim.name = 'adamw'",
    layout=False,
)
_ADAMW8BIT = Option(
    name='`optim.name = "adamw8bit"`',
    key="optim.name",
    on=lambda config: config.optim.name == "adamw8bit",
    off="optim.name = 'adamw'",
    layout=False,
)
_MTP = Option(
    name="multi-token prediction (`model.mtp_layers`)",
    key="model.mtp_layers",
    on=lambda config: config.model.mtp_layers > 0,
    off="model.mtp_layers = 0",
    layout=False,
)
_FP8 = Option(
    name='`train.precision = "fp8"`',
    key="train.precision",
    on=lambda config: config.train.precision == "fp8",
    off="train.precision = 'bf16'",
    layout=False,
)

_ALL_GATHER = Option(
    name='`parallel.expert_dispatch = "all_gather"`',
    key="parallel.expert_dispatch",
    on=lambda config: config.parallel.expert_dispatch == "all_gather" and config.model.is_moe,
    off="parallel.expert_dispatch = 'all_to_all'",
    layout=False,
)
_PLAIN_EXPERTS = Option(
    name='`parallel.expert_kernels = "plain"`',
    key="parallel.expert_kernels",
    on=lambda config: config.parallel.expert_kernels == "plain",
    off="parallel.expert_kernels = 'grouped'",
    layout=False,
)
_FP8_EXPERTS = Option(
    name="`train.fp8_experts`",
    key="train.fp8_experts",
    on=lambda config: config.train.precision == "fp8" and config.train.fp8_experts,
    off="train.fp8_experts = false",
    layout=False,
)
_LORA = Option(
    name="adapters (`lora.rank`)",
    key="lora.rank",
    on=lambda config: config.lora.on,
    off="lora.rank = 0",
    layout=False,
)
_KEPT_BASE = Option(
    name='`lora.base` `"fp8"` and `"nf4"`',
    key="lora.base",
    on=lambda config: config.lora.on and config.lora.base != "bf16",
    off="lora.base = 'bf16'",
    layout=False,
)
_FP8_BASE = Option(
    name='`lora.base = "fp8"`',
    key="lora.base",
    on=lambda config: config.lora.on and config.lora.base == "fp8",
    off="lora.base = 'bf16'",
    layout=False,
)
_NF4_BASE = Option(
    name='`lora.base = "nf4"`',
    key="lora.base",
    on=lambda config: config.lora.on and config.lora.base == "nf4",
    off="lora.base = 'bf16'",
    layout=False,
)
_NOT_FP8 = Option(
    name="`train.precision` other than `fp8`",
    key="train.precision",
    on=lambda config: config.train.precision != "fp8",
    off="train.precision = 'fp8'",
    layout=False,
)
_NO_FP8_CACHE = Option(
    name="`train.fp8_weight_cache = false`",
    key="train.fp8_weight_cache",
    on=lambda config: not config.train.fp8_weight_cache,
    off="train.fp8_weight_cache = true",
    layout=False,
)
_FP8_ALONE = Option(
    name="`train.fp8_weights_only`",
    key="train.fp8_weights_only",
    on=lambda config: config.train.precision == "fp8" and config.train.fp8_weights_only,
    off="train.fp8_weights_only = false",
    layout=False,
)

EXCLUSIONS = (
    Exclusion(
        id="config.fp8-weights-only-uncached",
        options=(_FP8_ALONE, _NO_FP8_CACHE),
        because="The cache is where the weights are: there are no others.",
    ),
    Exclusion(
        id="config.lora-muon",
        options=(_MUON, _LORA),
        because="Muon orthogonalises updates of weight matrices; the two thin matrices of an adapter are a product.",
    ),
    Exclusion(
        id="config.lora-base-fsdp",
        options=(_KEPT_BASE, _FSDP),
        because="FSDP2 shards and gathers bf16 weights. With frozen ones in 8 or 4 bits there is little left to shard.",
    ),
    Exclusion(
        id="config.lora-base-offload",
        options=(_KEPT_BASE, _OFFLOAD),
        because="Frozen weights in fewer bits with states in host memory have not been tested.",
    ),
    Exclusion(
        id="config.lora-fp8",
        options=(_FP8_BASE, _NOT_FP8),
        because="Only fp8 products read fp8 weights.",
    ),
    Exclusion(
        id="config.lora-fp8-cache",
        options=(_FP8_BASE, _NO_FP8_CACHE),
        because="The cache is where the weights are: there are no others.",
    ),
    Exclusion(
        id="config.lora-nf4-compile",
        options=(_NF4_BASE, _COMPILE),
        because="The compiler does not see through torchao's NF4 weights.",
    ),
    Exclusion(
        id="config.lora-nf4-split-backward",
        options=(_NF4_BASE, _SPLIT_BACKWARD),
        because="This schedule computes the gradients of weights apart from those of inputs; with NF4 it has not been "
        "tested.",
    ),
    Exclusion(
        id="config.lora-nf4-fp8",
        options=(_NF4_BASE, _FP8),
        because="Weights in NF4 are multiplied in bf16.",
    ),
    Exclusion(
        id="config.muon-tp",
        options=(_MUON, _TENSOR),
        because="Muon orthogonalises whole matrices, and with tp each rank has a part of every one. It works with "
        "pp, cp, ep and every parallel.zero.",
    ),
    Exclusion(
        id="config.muon-etp",
        options=(_MUON, _EXPERT_TENSOR),
        because="Muon orthogonalises whole matrices, and with etp each rank has a part of an expert's. It works with "
        "ep.",
    ),
    Exclusion(
        id="config.mtp-cp",
        options=(_MTP, _CONTEXT),
        because="Multi-token prediction looks further ahead in the sequence, which at the end of a part is on another "
        "rank.",
    ),
    Exclusion(
        id="config.split-backward-compile",
        options=(_SPLIT_BACKWARD, _COMPILE),
        because="This schedule computes the gradients of weights apart from those of inputs, and a compiled block has "
        "one backward for both (pytorch/pytorch#161904).",
    ),
    Exclusion(
        id="config.split-backward-fsdp",
        options=(_SPLIT_BACKWARD, _FSDP),
        because="This schedule computes the gradients of weights apart from those of inputs, and FSDP2 frees a block's "
        "weights after one backward.",
    ),
    Exclusion(
        id="config.accumulate-dtype",
        options=(_BF16_SUMS, _FSDP),
        because="The FSDP engine accumulates gradients in the precision of their reduction.",
    ),
    Exclusion(
        id="config.offload-8bit",
        options=(_ADAMW8BIT, _OFFLOAD),
        because="8-bit moments are updated by a GPU kernel; offloaded ones live on the host.",
    ),
    Exclusion(
        id="config.fp8-split-backward",
        options=(_FP8, _SPLIT_BACKWARD),
        because="This schedule computes the gradients of weights apart from those of inputs, and an fp8 linear has one "
        "backward for both.",
    ),
    Exclusion(
        id="config.gathered-plain-experts",
        options=(_ALL_GATHER, _PLAIN_EXPERTS),
        because="Experts that are given all tokens have to pick their own, which only the kernels do.",
    ),
    Exclusion(
        id="config.fp8-experts-etp",
        options=(_FP8_EXPERTS, _EXPERT_TENSOR),
        because="The scales of an expert's rows are those of whole rows, and with etp each rank has a part of them.",
    ),
    Exclusion(
        id="config.fp8-offload",
        options=(_FP8, _OFFLOAD),
        because="fp8 with weights or states in host memory has not been tested.",
    ),
)


def exclusions(config: RunConfig, *, of_layout: bool) -> Iterator[Finding]:
    """The rows of the table that this recipe meets: those that another layout avoids, or the others."""
    for row in EXCLUSIONS:
        if row.of_layout != of_layout or not row.met(config):
            continue
        first, second = row.options
        yield error(
            row.id,
            f"{first.spelled(config)} does not go with {second.spelled(config)}",
            row.because,
            f"Set {first.way_out(config)}, or {second.way_out(config)}.",
        )
