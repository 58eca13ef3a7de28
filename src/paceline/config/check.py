"""Do the sections fit each other, and the number of ranks? Answered before any process starts.

Every finding of severity `error` refuses the run. What the schema knows but this version cannot do yet is refused here
by name, in `_not_yet`, and nowhere else. The rules of layouts are in files of their own:

    layout       degrees against the sizes of model, sequence and batch
    schedules    layers and stages against the pipeline schedule
    exclusions   the table of options that do not go together
    locality     groups of ranks that cross machines
    refusals     all that refuses, together
    task_fit     the task against model and data
    nearest      which layouts close by would work
    idle         options that change nothing
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from paceline.config.adapters import adapter_errors, adapter_notes
from paceline.config.asked import Asked, error
from paceline.config.hub import config_of
from paceline.config.idle import idle_options
from paceline.config.layout import batch, layout_errors
from paceline.config.locality import locality
from paceline.config.nearest import nearest_layouts, nearest_sentence
from paceline.config.plugins import Registry
from paceline.config.refusals import others, refusals
from paceline.config.run import RunConfig
from paceline.config.schedules import few_micro_batches
from paceline.config.task import TASK_KINDS
from paceline.config.task_fit import task_errors
from paceline.errors import ConfigError
from paceline.report.finding import Finding

UNREAD: tuple[tuple[str, str], ...] = ()
"""Fields of the schema that belong to parts which are not there yet; anything but the default is refused."""

MAX_RANKS = 2**20
"""Several times the largest clusters of 2026."""


def check(config: RunConfig, registry: Registry, world_size: int) -> list[Finding]:
    """Everything that is known to be wrong or doubtful about this recipe on so many ranks.

    Raises:
        ConfigError: the degrees of `[parallel]` do not make the world size.
    """
    _refuse_too_many(world_size)
    missing = list(_not_yet(config, registry))
    if missing:
        # first: what is not there cannot be made to fit either
        return missing
    asked = Asked.of(config, world_size)
    _refuse_world_size(asked)
    refused = _refused(asked)
    return [
        *refused,
        *(locality(asked) if not refused else ()),
        *idle_options(asked),
        *few_micro_batches(asked),
        *_zero(config, world_size),
        *_optimizer(config),
        *_router(config),
        *_fp8(config),
        *adapter_notes(config),
    ]


def refuse_errors(findings: list[Finding]) -> None:
    """Raises a ConfigError for the errors among the findings, if there are any."""
    errors = [finding for finding in findings if finding.severity == "error"]
    if not errors:
        return
    first, *rest = errors
    also = "".join(f"\n  Also: {finding.subject}. {finding.next_step}" for finding in rest)
    raise ConfigError(first.subject, evidence=first.evidence, next_step=first.next_step + also)


def _refuse_too_many(world_size: int) -> None:
    if world_size > MAX_RANKS:
        raise ConfigError(
            f"{world_size:,} ranks are more than {MAX_RANKS:,}",
            evidence="No cluster has as many GPUs; rules and tables are made for those there are.",
            next_step="Look at --nproc, cluster.nodes and the degrees of [parallel]: one is too large.",
        )


def _refuse_world_size(asked: Asked) -> None:
    try:
        asked.parallel.shard_degree(asked.world_size)
    except ConfigError as problem:
        steps = (_start_so_many(asked), nearest_sentence(asked))
        raise ConfigError(problem.subject, evidence=problem.evidence, next_step=" ".join(filter(None, steps))) from None


def _start_so_many(asked: Asked) -> str:
    """The numbers of ranks next to the one asked for on which the recipe runs as it is; empty if there are none."""
    parallel = asked.parallel
    copy = parallel.model_ranks * parallel.dp_replicate * max(1, parallel.dp_shard)
    below = asked.world_size // copy * copy
    sizes = [copy] if parallel.dp_shard else sorted({copy, below, below + copy} - {0})
    fit = [size for size in sizes if next(refusals(replace(asked, world_size=size)), None) is None]
    if not fit:
        return ""
    if asked.world_size == 1:
        return f"Was it started without a launcher? Use --nproc {fit[0]}, torchrun or srun."
    return f"As it is, the recipe runs on {' or '.join(map(str, fit))} ranks."


def _refused(asked: Asked) -> list[Finding]:
    """All errors; the first that another layout mends names the nearest layouts that work."""
    unmended = [*task_errors(asked.config), *others(asked)]
    portions, misfits = list(batch(asked)), list(layout_errors(asked))
    if misfits:
        misfits[0] = _with(misfits[0], nearest_sentence(asked))
    elif portions:
        near = nearest_layouts(asked, keep_batch=True)
        portions[0] = _with(portions[0], f"Or another layout: {'; or '.join(near)}" if near else "")
    return [*unmended, *misfits, *portions]


def _with(finding: Finding, more: str) -> Finding:
    return replace(finding, next_step=f"{finding.next_step} {more}".strip())


def _not_yet(config: RunConfig, registry: Registry) -> Iterator[Finding]:
    for section, name in UNREAD:
        values, default = getattr(config, section), type(getattr(config, section)).model_fields[name].default
        if (value := getattr(values, name)) != default:
            yield error(
                "config.not-yet",
                f"{section}.{name} = {list(value) if isinstance(value, tuple) else value!r} is not available in this "
                "version",
                "Nothing reads it yet, so it would change nothing.",
                f"Leave {section}.{name} out.",
            )
    yield from _export(config, registry)
    yield from adapter_errors(config)
    kinds = [*TASK_KINDS, *registry.tasks]
    if config.task.kind not in kinds:
        yield error(
            "config.not-yet",
            f"task.kind = {config.task.kind!r} is not available",
            f"This version and its plugins know: {', '.join(kinds)}.",
            "Set task.kind to one of them, or register the task in a plugin (run.plugins).",
        )


def _export(config: RunConfig, registry: Registry) -> Iterator[Finding]:
    """What cannot be written at the end is refused at the beginning."""
    name = config.checkpoint.export
    if not name or name == "peft" or (name in registry.exports and name != "hf"):
        return  # peft: `adapter_errors` judges it
    if name != "hf":
        yield error(
            "config.export",
            f"checkpoint.export = {name!r} is not a format that can be written",
            f"This version and its plugins know: {', '.join(dict.fromkeys(['hf', 'peft', *registry.exports]))}.",
            "Set checkpoint.export = 'hf', or leave it out.",
        )
        return
    try:
        config_of(config.model)
    except ConfigError as problem:
        yield error("config.export", f"checkpoint.export = 'hf': {problem.subject}", problem.evidence, "Leave it out.")


def _zero(config: RunConfig, world_size: int) -> Iterator[Finding]:
    parallel = config.parallel
    shard = parallel.shard_degree(world_size)
    if parallel.zero == 0 and shard > 1 and parallel.dp_shard > 1:
        yield Finding(
            id="config.zero-0",
            severity="note",
            subject=f"parallel.dp_shard = {parallel.dp_shard} with parallel.zero = 0 shards nothing",
            evidence="Every rank keeps all weights and optimizer state.",
            next_step="Set parallel.zero = 1 to shard the optimizer state at no cost in traffic.",
        )
    micro_batches = config.train.global_batch_size // (config.train.micro_batch_size * shard * parallel.dp_replicate)
    if parallel.engine == "fsdp" and parallel.reduce_dtype == "bf16" and micro_batches > 1:
        yield Finding(
            id="config.fsdp-sums",
            severity="note",
            subject=f"with parallel.zero = {parallel.zero}, {micro_batches} micro-batches of a step are summed in bf16",
            evidence="FSDP2 sums over micro-batches in parallel.reduce_dtype; parallel.accumulate_dtype is the flat "
            "engine's (zero 0 and 1).",
            next_step="For sums in fp32 set parallel.reduce_dtype = 'fp32'.",
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


def _fp8(config: RunConfig) -> Iterator[Finding]:
    experts_too = config.train.fp8_experts and config.parallel.expert_kernels != "plain"
    if config.train.precision == "fp8" and config.model.is_moe and not experts_too:
        yield Finding(
            id="config.fp8-experts",
            severity="note",
            subject="train.precision = 'fp8' leaves experts in bf16",
            evidence="Attention and dense MLPs are in fp8; with most of the work in experts, expect little from it.",
            next_step="Set train.fp8_experts = true and parallel.expert_kernels = 'grouped' or 'triton'.",
        )
    train = config.train
    if train.precision == "fp8" and train.fp8_scaling == "delayed" and train.fp8_cast_kernel == "torch":
        yield Finding(
            id="config.fp8-delayed-torch",
            severity="note",
            subject="train.fp8_scaling = 'delayed' saves nothing with train.fp8_cast_kernel = 'torch'",
            evidence="A cast is then several operations, which the compiler does not fuse with others.",
            next_step="Set train.fp8_cast_kernel = 'triton', or train.fp8_scaling = 'tensorwise'.",
        )
