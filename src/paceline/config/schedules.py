"""Do the layers and the stages fit the pipeline schedule, and are there micro-batches enough to fill it?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.config.asked import Asked, error, show
from paceline.report.finding import Finding


@dataclass(frozen=True, kw_only=True)
class ScheduleRule:
    """What a schedule asks for."""

    min_stages_per_rank: int
    max_stages_per_rank: int | None
    """None = as many as there are layers."""
    because: str


SCHEDULES = {
    "1f1b": ScheduleRule(
        min_stages_per_rank=1,
        max_stages_per_rank=1,
        because="1F1B gives each rank one run of layers; 'interleaved_1f1b' gives it several.",
    ),
    "interleaved_1f1b": ScheduleRule(
        min_stages_per_rank=2,
        max_stages_per_rank=None,
        because="Interleaving gives each rank two or more runs of layers; with one it would be '1f1b'.",
    ),
    "zero_bubble": ScheduleRule(
        min_stages_per_rank=1,
        max_stages_per_rank=None,
        because="With one run of layers a rank it keeps the memory of 1F1B; several are interleaved.",
    ),
    "zbv": ScheduleRule(
        min_stages_per_rank=2,
        max_stages_per_rank=2,
        because="Its path goes down the ranks and up again, like a V: each has exactly two runs of layers.",
    ),
}


def pipeline(asked: Asked) -> Iterator[Finding]:
    """Everything that forbids these stages. Any number of micro-batches is admitted by every schedule."""
    if asked.parallel.pp == 1:
        yield from _without_stages(asked)
        return
    misfit = list(_stages_per_rank(asked))
    yield from misfit
    if not misfit:  # first the right number of stages, then whether there are layers for them
        yield from _enough_layers(asked)
        yield from _pipeline_layout(asked)


def few_micro_batches(asked: Asked) -> Iterator[Finding]:
    """Ranks of a pipeline idle while it fills and empties: the more, the fewer micro-batches there are."""
    parallel, train = asked.parallel, asked.config.train
    portion = train.micro_batch_size * parallel.dp_degree(asked.world_size)
    count = train.global_batch_size // portion
    if parallel.pp == 1 or train.global_batch_size % portion or count >= parallel.pp:
        return
    idle = (parallel.pp - 1) / (count + parallel.pp - 1)
    yield Finding(
        id="config.few-micro-batches",
        severity="warning",
        subject=f"{count} micro-batch{'es' * (count > 1)} a step for parallel.pp = {parallel.pp} pipeline ranks",
        evidence="Ranks wait while the pipeline fills and empties: with 1F1B (pp - 1) / (micro-batches + pp - 1) = "
        f"{idle:.0%} of the time; no schedule fills so few.",
        next_step=f"Raise train.global_batch_size to {portion * parallel.pp} or more, "
        + ("lower train.micro_batch_size, " if train.micro_batch_size > 1 else "")
        + "or lower parallel.pp.",
    )


def _without_stages(asked: Asked) -> Iterator[Finding]:
    parallel = asked.parallel
    if parallel.stages_per_rank > 1:
        yield error(
            "config.stages-without-pipeline",
            f"parallel.stages_per_rank = {parallel.stages_per_rank} with parallel.pp = 1",
            "One rank that holds all layers has nothing to interleave.",
            "Set parallel.stages_per_rank = 1"
            + (
                f", or parallel.pp = 2 or more with {_interleaved(parallel.stages_per_rank)}."
                if asked.world_size > 1
                else "."
            ),
        )
    if parallel.pipeline_layout not in ((), (asked.config.model.num_layers,)):
        yield error(
            "config.layout-without-pipeline",
            f"parallel.pipeline_layout = {show(parallel.pipeline_layout)} with parallel.pp = 1",
            f"It gives the layers of each stage, and there is one, with all {asked.config.model.num_layers} layers.",
            "Leave parallel.pipeline_layout out, or set parallel.pp.",
        )


def _interleaved(stages: int) -> str:
    """The schedules that take so many stages a rank."""
    names = [
        show(name)
        for name, rule in SCHEDULES.items()
        if rule.min_stages_per_rank <= stages <= (rule.max_stages_per_rank or stages)
    ]
    return f"parallel.pipeline_schedule = {' or '.join(names)}"


def _stages_per_rank(asked: Asked) -> Iterator[Finding]:
    parallel = asked.parallel
    rule = SCHEDULES[parallel.pipeline_schedule]
    stages, most = parallel.stages_per_rank, rule.max_stages_per_rank
    if stages < rule.min_stages_per_rank or (most is not None and stages > most):
        choices = str(rule.min_stages_per_rank) + ("" if most == rule.min_stages_per_rank else " or more")
        yield error(
            "config.stages-per-rank",
            f"parallel.stages_per_rank = {stages} does not go with parallel.pipeline_schedule = "
            f"{show(parallel.pipeline_schedule)}",
            rule.because,
            f"Set parallel.stages_per_rank = {choices}, or another parallel.pipeline_schedule.",
        )


def _enough_layers(asked: Asked) -> Iterator[Finding]:
    layers, parallel = asked.model.num_layers, asked.parallel
    if layers < parallel.stages:
        product = f"pp {parallel.pp} * stages_per_rank {parallel.stages_per_rank} = " * (parallel.stages_per_rank > 1)
        yield error(
            "config.few-layers",
            f"model.num_layers = {layers} is fewer than the {product}{parallel.stages} pipeline stages",
            "Each stage holds one layer or more; stages need not be equally long.",
            _fewer_stages(asked),
        )


def _fewer_stages(asked: Asked) -> str:
    """Ways to no more stages than layers, of those that the schedule admits."""
    layers, parallel = asked.model.num_layers, asked.parallel
    least = SCHEDULES[parallel.pipeline_schedule].min_stages_per_rank
    most_ranks, most_stages = layers // parallel.stages_per_rank, layers // parallel.pp
    ways = []
    if most_ranks > 1:
        ways.append(f"parallel.pp may be up to {most_ranks}")
    if parallel.stages_per_rank > most_stages >= least:
        ways.append(f"parallel.stages_per_rank up to {most_stages}")
    if parallel.stages_per_rank > 1 and layers >= parallel.pp:
        ways.append("parallel.pipeline_schedule = '1f1b' with parallel.stages_per_rank = 1 fits")
    if not ways:
        alone = "the model has one layer" if layers == 1 else "there are too few layers for a pipeline like this"
        return f"Set parallel.pp = 1 (and parallel.stages_per_rank = 1): {alone}."
    return f"{'; or '.join(ways)}."


def _pipeline_layout(asked: Asked) -> Iterator[Finding]:
    layout, parallel, layers = asked.parallel.pipeline_layout, asked.parallel, asked.model.num_layers
    if not layout:
        return
    faults = []
    if len(layout) != parallel.stages:
        faults.append(f"It has {len(layout)} entries for pp * stages_per_rank = {parallel.stages} stages")
    if sum(layout) != layers:
        faults.append(f"Its sum is {sum(layout)}, model.num_layers is {layers}")
    if min(layout) < 1:
        faults.append("Every stage needs a layer")
    if faults:
        example = f", for example {even_layout(layers, parallel.stages)}" if layers >= parallel.stages else ""
        yield error(
            "config.pipeline-layout",
            f"parallel.pipeline_layout = {show(layout)} does not fit",
            f"{'. '.join(faults)}.",
            f"Give the layers of each stage{example}, or leave it out: layers are then cut by cost.",
        )


def even_layout(layers: int, stages: int) -> list[int]:
    """Layers of each stage, as equal as can be; longer ones in the middle, since embedding and head are at the ends."""
    base, more = divmod(layers, stages)
    first = (stages - more) // 2
    return [base + (first <= stage < first + more) for stage in range(stages)]
