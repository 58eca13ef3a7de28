"""Which options are given, and change nothing in this recipe? A table: harmless, and easily left behind or hoped for.

An option counts as given where its value is not the default. One sentence each, as a note; nothing is refused here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pydantic import BaseModel

from paceline.config.asked import Asked, show
from paceline.config.lora import LoraConfig
from paceline.config.model import MoEConfig
from paceline.config.observe import OF_RECORD
from paceline.config.train import TrainConfig
from paceline.report.finding import Finding


@dataclass(frozen=True, kw_only=True)
class Idle:
    """Options that do nothing under a condition."""

    keys: tuple[str, ...]
    where: Callable[[Asked], bool]
    because: str
    """Follows "... here: "."""
    verb: str = "has no effect"


def _alone(asked: Asked) -> bool:
    return asked.world_size == 1


def _one_shard(asked: Asked) -> bool:
    """No rank shares the state of dense parameters or of experts with another."""
    parallel = asked.parallel
    dense = parallel.shard_degree(asked.world_size) * parallel.cp
    experts = asked.ranks_of_stage // (parallel.ep * parallel.etp) if asked.model.is_moe else 1
    return dense == 1 and experts == 1


def _fp8(asked: Asked) -> bool:
    return asked.config.train.precision == "fp8"


def _no_layer_in_fp8(asked: Asked) -> bool:
    layers = asked.model.num_layers
    return len({index % layers for index in asked.config.train.fp8_skip_layers}) == layers


def _of_task(*kinds: str) -> Callable[[Asked], bool]:
    """Where another task is asked for than these."""
    return lambda asked: asked.config.task.kind not in kinds


OPTIONS = (
    Idle(
        keys=("task.beta",),
        where=_of_task("dpo", "orpo", "kto"),
        because="it belongs to task.kind 'dpo', 'orpo' and 'kto'.",
    ),
    Idle(
        keys=("task.dpo_loss", "task.label_smoothing"), where=_of_task("dpo"), because="it belongs to task.kind 'dpo'."
    ),
    Idle(
        keys=("task.label_smoothing",),
        where=lambda asked: asked.config.task.kind == "dpo" and asked.config.task.dpo_loss != "sigmoid",
        because="only task.dpo_loss = 'sigmoid' has it.",
    ),
    Idle(
        keys=("task.reference", "task.precompute_reference"),
        where=_of_task("dpo", "kto"),
        because="only task.kind 'dpo' and 'kto' compare with a reference model.",
    ),
    Idle(
        keys=("task.precompute_reference",),
        where=lambda asked: asked.config.task.kind == "dpo" and not asked.config.task.reads_reference,
        because="there is no reference model (task.reference = 'none').",
    ),
    Idle(keys=("task.orpo_nll",), where=_of_task("orpo"), because="it belongs to task.kind 'orpo'."),
    Idle(
        keys=("task.desirable_weight", "task.undesirable_weight"),
        where=_of_task("kto"),
        because="it belongs to task.kind 'kto'.",
    ),
    Idle(keys=("task.center_rewards",), where=_of_task("reward"), because="it belongs to task.kind 'reward'."),
    Idle(
        keys=("data.template", "data.mask", "data.packing", "data.too_long", "data.bad_rows", "data.epochs"),
        where=lambda asked: not asked.config.data.reads_rows(asked.config.task.kind),
        because="data.train is a dataset of tokens, not rows of conversations and their like.",
    ),
    Idle(
        keys=("data.order", "data.reset_at_document_ends", "data.eod_mask_loss"),
        where=lambda asked: asked.config.data.reads_rows(asked.config.task.kind),
        because="rows have an order of their own, and their documents never see each other.",
    ),
    Idle(
        keys=("checkpoint.export_interval",),
        where=lambda asked: not asked.config.checkpoint.export,
        because="nothing is exported (checkpoint.export is empty).",
    ),
    Idle(
        keys=tuple(f"lora.{name}" for name in LoraConfig.model_fields if name != "rank"),
        where=lambda asked: not asked.config.lora.on,
        because="there are no adapters (lora.rank = 0): all weights are trained.",
    ),
    Idle(
        keys=("lora.init",),
        where=lambda asked: asked.config.lora.on and bool(asked.config.lora.init_adapter),
        because="adapters begin as lora.init_adapter says.",
    ),
    Idle(
        keys=("parallel.bucket_mb",),
        where=lambda asked: asked.parallel.zero >= 2,
        because="buckets belong to the flat engine (parallel.zero 0 and 1); FSDP reduces block by block.",
    ),
    Idle(
        keys=("parallel.bucket_mb", "parallel.reduce_dtype"),
        where=lambda asked: asked.parallel.zero <= 1 and _alone(asked),
        because="one rank has nobody to sum gradients with.",
    ),
    Idle(
        keys=("parallel.zero",),
        where=lambda asked: asked.parallel.zero >= 2 and _one_shard(asked),
        because="there is no second data- or context-parallel rank to share with.",
        verb="shards nothing",
    ),
    Idle(
        keys=("parallel.cp_method",),
        where=lambda asked: asked.parallel.cp == 1,
        because="sequences are not cut (parallel.cp = 1).",
    ),
    Idle(
        keys=("parallel.pipeline_schedule",),
        where=lambda asked: asked.parallel.pp == 1,
        because="a schedule orders the work of two or more pipeline ranks (parallel.pp = 1).",
    ),
    Idle(
        keys=("parallel.fused_weight_gradients",),
        where=lambda asked: asked.parallel.zero >= 2,
        because="the buckets that products add to are the flat engine's (parallel.zero 0 and 1).",
    ),
    Idle(
        keys=("parallel.fused_weight_gradients",),
        where=lambda asked: asked.parallel.zero <= 1 and asked.parallel.splits_backward,
        because="this schedule computes gradients of weights apart from those of inputs.",
    ),
    Idle(
        keys=("train.loss_chunk_tokens",),
        where=lambda asked: asked.config.train.loss_kernel == "plain",
        because="only train.loss_kernel = 'chunked' takes slices.",
    ),
    Idle(
        keys=tuple(f"train.{name}" for name in TrainConfig.model_fields if name.startswith("fp8_")),
        where=lambda asked: asked.config.train.precision != "fp8",
        because="train.precision is not 'fp8'.",
    ),
    Idle(
        keys=("train.fp8_weight_cache", "train.fp8_weights_only"),
        where=lambda asked: _fp8(asked) and asked.parallel.zero >= 2,
        because="with parallel.zero 2 and 3 weights are gathered, and cast, for each use.",
    ),
    Idle(
        keys=("train.fp8_head",),
        where=lambda asked: _fp8(asked) and asked.config.train.loss_kernel == "plain",
        because="only train.loss_kernel = 'chunked' has a head in fp8.",
    ),
    Idle(
        keys=("train.fp8_cast_kernel",),
        where=lambda asked: _fp8(asked) and asked.config.train.fp8_scaling == "rowwise",
        because="the kernel is for tensors with one scale (train.fp8_scaling = 'tensorwise').",
    ),
    Idle(
        keys=("train.fp8_amax_history",),
        where=lambda asked: _fp8(asked) and asked.config.train.fp8_scaling != "delayed",
        because="only train.fp8_scaling = 'delayed' looks at earlier steps.",
    ),
    Idle(
        keys=("train.fp8_experts",),
        where=lambda asked: _fp8(asked) and (not asked.model.is_moe or asked.parallel.expert_kernels == "plain"),
        because="there are no experts, or parallel.expert_kernels = 'plain' computes them in bf16.",
    ),
    Idle(
        keys=("train.fp8_skip_layers",),
        where=lambda asked: _fp8(asked) and _no_layer_in_fp8(asked),
        because="it names every layer; train.precision = 'bf16' is the same.",
        verb="leaves nothing in fp8",
    ),
    Idle(
        keys=("optim.muon_momentum", "optim.muon_lr", "optim.muon_steps"),
        where=lambda asked: asked.config.optim.name != "muon",
        because="optim.name is not 'muon'.",
    ),
    Idle(
        keys=("optim.fused_update",),
        where=lambda asked: asked.config.optim.name == "adamw8bit",
        because="8-bit moments are updated by a kernel of their own.",
    ),
    Idle(
        keys=("optim.decay_shape",),
        where=lambda asked: asked.config.optim.schedule != "wsd",
        because="optim.schedule is not 'wsd' and has a shape of its own.",
    ),
    Idle(
        keys=("optim.decay_steps", "optim.min_lr"),
        where=lambda asked: asked.config.optim.schedule == "constant",
        because="optim.schedule = 'constant' does not decay.",
    ),
    Idle(
        keys=tuple(f"model.moe.{name}" for name in MoEConfig.model_fields),
        where=lambda asked: not asked.model.is_moe,
        because="the model has no experts (model.num_experts = 0).",
    ),
    Idle(
        keys=("parallel.expert_dispatch",),
        where=lambda asked: asked.parallel.ep * asked.parallel.etp == 1,
        because="all experts are on every rank (parallel.ep = 1).",
    ),
    Idle(
        keys=("parallel.expert_kernels", "parallel.expert_dispatch"),
        where=lambda asked: asked.model.is_moe and (asked.model.mlp_bias or asked.model.moe.expert_dropout > 0),
        because="experts with biases (model.mlp_bias) or dropout (model.moe.expert_dropout) are computed by operations "
        "of torch, which all-to-all brings tokens to.",
    ),
    Idle(
        keys=("parallel.expert_kernels",),
        where=lambda asked: not asked.model.is_moe,
        because="the model has no experts (model.num_experts = 0).",
    ),
    Idle(
        keys=("model.moe.bias_update_rate",),
        where=lambda asked: asked.model.is_moe and not asked.model.moe.bias_balance,
        because="model.moe.bias_balance is off.",
    ),
    Idle(
        keys=("model.mtp_loss_coef",),
        where=lambda asked: not asked.model.mtp_layers,
        because="there is no multi-token prediction (model.mtp_layers = 0).",
    ),
    Idle(
        keys=("model.sliding_window_period",),
        where=lambda asked: not asked.model.sliding_window,
        because="there is no window (model.sliding_window = 0).",
    ),
    Idle(
        keys=("observe.sample_tokens", "observe.sample_temperature", "observe.sample_interval"),
        where=lambda asked: not asked.config.observe.sample_prompts,
        because="there are no observe.sample_prompts to continue.",
    ),
    Idle(
        keys=("observe.sample_interval",),
        where=lambda asked: bool(asked.config.observe.sample_prompts) and not asked.config.train.eval_interval,
        because="it counts evaluations, and there are none while the run trains (train.eval_interval = 0).",
    ),
    Idle(
        keys=tuple(f"observe.{name}" for name in OF_RECORD),
        where=lambda asked: not asked.config.observe.record,
        because="there is no record (observe.record = false).",
    ),
)


def idle_options(asked: Asked) -> Iterator[Finding]:
    """A note for each option that is given and does nothing."""
    for row in OPTIONS:
        if not row.where(asked):
            continue
        given = [f"{key} = {show(value)}" for key in row.keys if (value := _given(asked, key)) is not None]
        if given:
            verb = row.verb if len(given) == 1 else row.verb.replace("has", "have", 1)
            yield Finding(
                id="config.idle-option",
                severity="note",
                subject=f"{' and '.join(given)} {verb} here: {row.because}",
                evidence="",
                next_step="",
            )


def _given(asked: Asked, key: str) -> object:
    """The value of ``key`` where it is not the default; else None (which is no value of the schema)."""
    section: BaseModel = asked.config
    *path, name = key.split(".")
    for part in path:
        section = getattr(section, part)
    value = getattr(section, name)
    return None if value == type(section).model_fields[name].get_default() else value
