"""Do the sections fit each other, and the number of ranks? Answered before any process starts.

Every finding of severity `error` refuses the run. What the schema knows but this version cannot do yet is refused here
by name, in `_not_yet`, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator

from paceline.config.plugins import Registry
from paceline.config.run import RunConfig
from paceline.errors import ConfigError
from paceline.report.finding import Finding

UNREAD = (
    ("parallel", "pipeline_schedule"),
    ("parallel", "stages_per_rank"),
    ("parallel", "pipeline_layout"),
    ("parallel", "cp_method"),
    ("cluster", "nodes"),
    ("cluster", "gpus_per_node"),
    ("cluster", "calibration"),
)
"""Fields of the schema that belong to parts which are not there yet; anything but the default is refused."""


def check(config: RunConfig, registry: Registry, world_size: int) -> list[Finding]:
    """Everything that is known to be wrong or doubtful about this recipe on so many ranks.

    Raises:
        ConfigError: the degrees of `[parallel]` do not make the world size.
    """
    missing = list(_not_yet(config, registry))
    if missing:
        # first: what is not there cannot be made to fit either
        return missing
    return [
        *_lengths(config),
        *_recompute(config),
        *_batch(config, config.parallel.dp_degree(world_size)),
        *_zero(config, world_size),
        *_optimizer(config),
        *_router(config),
    ]


def refuse_errors(findings: list[Finding]) -> None:
    """Raises a ConfigError for the errors among the findings, if there are any."""
    errors = [finding for finding in findings if finding.severity == "error"]
    if not errors:
        return
    first, *rest = errors
    also = "".join(f"\n  Also: {finding.subject}. {finding.next_step}" for finding in rest)
    raise ConfigError(first.subject, evidence=first.evidence, next_step=first.next_step + also)


def _error(id_: str, subject: str, evidence: str, next_step: str) -> Finding:
    return Finding(id=id_, severity="error", subject=subject, evidence=evidence, next_step=next_step)


def _not_yet(config: RunConfig, registry: Registry) -> Iterator[Finding]:
    parallel = config.parallel
    for axis in ("tp", "pp", "cp", "ep", "etp"):
        if getattr(parallel, axis) > 1:
            yield _error(
                "config.not-yet",
                f"parallel.{axis} = {getattr(parallel, axis)} is not available in this version",
                "Data parallelism is: parallel.dp_replicate, parallel.dp_shard and parallel.zero.",
                f"Set parallel.{axis} = 1; parallel.zero = 3 shards parameters where they do not fit.",
            )
    for section, name in UNREAD:
        values, default = getattr(config, section), type(getattr(config, section)).model_fields[name].default
        if (value := getattr(values, name)) != default:
            yield _error(
                "config.not-yet",
                f"{section}.{name} = {list(value) if isinstance(value, tuple) else value!r} is not available in this "
                "version",
                "Nothing reads it yet, so it would change nothing.",
                f"Leave {section}.{name} out.",
            )
    if config.train.precision == "fp8":
        yield _error(
            "config.not-yet",
            "train.precision = 'fp8' is not available in this version",
            "",
            "Set train.precision = 'bf16'.",
        )
    kinds = ["pretrain", *registry.tasks]
    if config.task.kind not in kinds:
        yield _error(
            "config.not-yet",
            f"task.kind = {config.task.kind!r} is not available",
            f"This version and its plugins know: {', '.join(kinds)}.",
            "Set task.kind = 'pretrain', or register the task in a plugin (run.plugins).",
        )


def _lengths(config: RunConfig) -> Iterator[Finding]:
    seq_len, longest = config.train.seq_len, config.model.max_seq_len
    if seq_len > longest:
        yield _error(
            "config.seq-len",
            f"train.seq_len = {seq_len} is longer than model.max_seq_len = {longest}",
            "The model's positions are made for max_seq_len tokens.",
            f"Set train.seq_len = {longest}, or raise model.max_seq_len"
            + (" (with model.rope_scaling)." if config.model.position == "rope" else "."),
        )


def _recompute(config: RunConfig) -> Iterator[Finding]:
    modes, layers = config.parallel.recompute, config.model.num_layers
    if not isinstance(modes, str) and len(modes) != layers:
        yield _error(
            "config.recompute",
            f"parallel.recompute lists {len(modes)} layers, the model has {layers}",
            "A list names the mode of each layer.",
            "Give one entry a layer, or one mode for all.",
        )


def _batch(config: RunConfig, dp: int) -> Iterator[Finding]:
    micro, whole = config.train.micro_batch_size, config.train.global_batch_size
    portion = micro * dp
    if whole % portion:
        below = whole // portion * portion
        nearest = [str(value) for value in (below, below + portion) if value]
        yield _error(
            "config.batch",
            f"train.global_batch_size = {whole} is not a multiple of micro_batch_size {micro} x {dp} "
            f"data-parallel ranks = {portion}",
            "Every rank computes the same number of micro-batches in a step.",
            f"The nearest global batch size{'s are' if len(nearest) > 1 else ' is'} {' and '.join(nearest)}.",
        )


def _zero(config: RunConfig, world_size: int) -> Iterator[Finding]:
    parallel = config.parallel
    shard = parallel.shard_degree(world_size)
    if parallel.zero >= 2 and parallel.accumulate_dtype == "bf16":
        yield _error(
            "config.accumulate-dtype",
            f"parallel.accumulate_dtype = 'bf16' does not go with parallel.zero = {parallel.zero}",
            "The FSDP engine accumulates gradients in the precision of their reduction.",
            "Set parallel.reduce_dtype = 'bf16' instead, or parallel.zero = 1.",
        )
    if parallel.zero == 0 and shard > 1 and parallel.dp_shard > 1:
        yield Finding(
            id="config.zero-0",
            severity="note",
            subject=f"parallel.dp_shard = {parallel.dp_shard} with parallel.zero = 0 shards nothing",
            evidence="Every rank keeps all weights and optimizer state.",
            next_step="Set parallel.zero = 1 to shard the optimizer state at no cost in traffic.",
        )


def _optimizer(config: RunConfig) -> Iterator[Finding]:
    if config.optim.warmup_steps > config.train.steps:
        yield Finding(
            id="config.warmup",
            severity="warning",
            subject=f"optim.warmup_steps = {config.optim.warmup_steps} lasts all {config.train.steps} steps",
            evidence="The learning rate never reaches optim.lr.",
            next_step=f"Set optim.warmup_steps to about {max(1, config.train.steps // 50)}.",
        )
    if config.optim.name == "adamw8bit" and config.parallel.offload != "none":
        yield _error(
            "config.offload-8bit",
            "optim.name = 'adamw8bit' does not go with parallel.offload",
            "8-bit moments are updated by a GPU kernel; offloaded ones live on the host.",
            "Set parallel.offload = 'none', or optim.name = 'adamw'.",
        )


def _router(config: RunConfig) -> Iterator[Finding]:
    model = config.model
    if model.is_moe and model.top_k == 1 and model.moe.normalize_top_k:
        yield Finding(
            id="config.untrained-router",
            severity="warning",
            subject="model.top_k = 1 with model.moe.normalize_top_k = true leaves the router untrained by the loss",
            evidence="One chosen score divided by itself is always 1, so no gradient reaches the router.",
            next_step="Set model.moe.normalize_top_k = false, as Switch does.",
        )
