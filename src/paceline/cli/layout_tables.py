"""The tables of a dry run that show a layout: the mesh, the pipeline's stages, and what each rank holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TypeVar

from paceline.config.run import RunConfig
from paceline.costs.adapters import count_adapters
from paceline.costs.grid import EXPERT_AXES, RankGrid, stride_of
from paceline.costs.layers import count_parameters
from paceline.costs.memory import MemoryEstimate
from paceline.costs.parameters import Holdings, part_shapes, shapes_numel
from paceline.costs.stages import cut_stages, stage_costs, stages_of_rank
from paceline.report import units
from paceline.report.table import Table, table

Item = TypeVar("Item")

MOST_ROWS = 32
"""Of a table; longer ones lose their middle."""

_SHARDED = ("nothing", "optimizer state", "optimizer state and gradients", "all state and the weights")
"""By `parallel.zero`."""


def mesh_table(config: RunConfig, grid: RankGrid) -> Table:
    """Every axis with its degree, the group of rank 0, the nodes that a group reaches over, and what travels."""
    travels = _travels(config)
    per_node = config.cluster.gpus_per_node
    axes = [axis for axis in grid.sizes if config.model.is_moe or axis not in EXPERT_AXES]
    rows = []
    for axis in axes:
        group = grid.order.group(axis, 0)
        if len(group) == 1:
            rows.append((axis, "1", "", "", "", ""))
            continue
        spanned = grid.order.nodes_spanned(axis, per_node)
        rows.append(
            (
                axis,
                f"{len(group):,}",
                f"{stride_of(group) or 'various'}",
                show_ranks(group),
                "inside a node" if spanned == 1 else f"over {spanned:,} nodes",
                travels[axis],
            )
        )
    world = grid.world_size
    notes = [f"Nodes of cluster.gpus_per_node = {per_node}, filled in the order of the ranks."]
    notes.append(f"parallel.zero = {config.parallel.zero} shards {_SHARDED[config.parallel.zero]} over dp_shard x cp.")
    if config.model.is_moe:
        notes.append("edp, ep and etp are the ranks of a pipeline stage once more, folded for experts.")
    return table(
        ("axis", ">degree", ">step", "ranks with rank 0", "reaches", "what travels"),
        rows,
        title=f"Mesh: {world:,} rank{'s' if world > 1 else ''}, neighbours differ in the last dense axis",
        notes=notes,
    )


def _travels(config: RunConfig) -> dict[str, str]:
    parallel = config.parallel
    reduced = "gradients, summed once a step"
    if parallel.zero:
        reduced = "gradients, and weights where they are needed"
    ring = parallel.cp_method == "ring"
    return {
        "pp": "hidden states on, their gradients back",
        "dp_replicate": "gradients, summed once a step",
        "dp_shard": reduced,
        "cp": "keys and values, around a ring" if ring else "heads for tokens, all-to-all",
        "tp": "activations, gathered and summed in a layer",
        "edp": "gradients of experts, once a step",
        "ep": "tokens, to their experts and back",
        "etp": "tokens of an expert, gathered and summed",
    }


def stages_table(config: RunConfig) -> Table:
    """Layers, parameters and work of each pipeline stage."""
    parallel, model = config.parallel, config.model
    stages = cut_stages(config, parallel.stages)
    costs = stage_costs(config, stages)
    rank_of = {stage: rank for rank in range(parallel.pp) for stage in stages_of_rank(parallel, rank)}
    rows = []
    for stage, blocks in enumerate(stages):
        first, last = stage == 0, stage == len(stages) - 1
        shapes = part_shapes(model, blocks, first=first, last=last)
        rows.append(
            (
                str(stage),
                str(rank_of[stage]),
                str(len(blocks)),
                f"{blocks.start}-{blocks.stop - 1}" if len(blocks) > 1 else str(blocks.start),
                ", ".join(_ends(config, shapes)),
                units.count(shapes_numel(shapes)),
                units.percent(costs[stage] / sum(costs)),
            )
        )
    by_rank = [sum(costs[stage] for stage in stages_of_rank(parallel, rank)) for rank in range(parallel.pp)]
    slowest, mean = max(by_rank), sum(by_rank) / len(by_rank)
    given = "as the recipe says" if parallel.pipeline_layout else "cut by cost"
    layout = ", ".join(str(len(blocks)) for blocks in stages)
    return table(
        ("stage", ">on rank", ">layers", "which", "and", ">parameters", ">share of FLOPs"),
        _shortened(rows),
        title=f"Pipeline stages ({parallel.pipeline_schedule}), {given}",
        notes=(
            *((f"parallel.pipeline_layout = [{layout}]",) if len(stages) <= MOST_ROWS else ()),
            f"The slowest rank takes {units.percent(slowest / mean - 1)} longer than the mean.",
        ),
    )


def _ends(config: RunConfig, shapes: dict[str, tuple[int, ...]]) -> list[str]:
    ends = ["embedding"] if "embed.weight" in shapes else []
    if any(name.startswith("norm.") for name in shapes):
        tied = " (tied)" if config.model.ties_head else ""
        ends.append("score" if config.model.has_score else f"head{tied}")
    if any(name.startswith("mtp.") for name in shapes):
        ends.append("multi-token")
    return ends


def parameters_table(config: RunConfig, holdings: Holdings) -> Table:
    """Parameters on the ranks at each position of the pipeline, and whether all of it adds up."""
    rows = []
    for first, last, (most, least, experts) in _runs([_held(holdings, stage) for stage in range(config.parallel.pp)]):
        begin, end = holdings.grid.order.stage(first), holdings.grid.order.stage(last)
        alone = first == last or not isinstance(begin, range)  # stages that lie side by side join to one range
        rows.append(
            (
                show_run(first, last),
                show_ranks(begin if alone else range(begin[0], end[-1] + 1)),
                f"{most:,}",
                "the same" if least == most else f"{least:,}",
                *((units.count(experts),) if config.model.is_moe else ()),
            )
        )
    experts_too = (">of experts",) if config.model.is_moe else ()
    return table(
        ("pp", "ranks", ">parameters", ">least", *experts_too),
        _shortened(rows),
        title="Parameters on each rank, before ZeRO shards them",
        notes=_sums(config, holdings),
    )


def _held(holdings: Holdings, stage: int) -> tuple[int, int, int]:
    """The most and the least that a rank of the stage holds, and of the most the part of experts."""
    ranks = holdings.grid.order.stage(stage)
    most, least = holdings.of_rank(ranks[0]), holdings.of_rank(ranks[-1])
    return most.total, least.total, most.experts


def memory_table(memory: Sequence[MemoryEstimate]) -> Table:
    """Bytes by kind at each position of the pipeline.

    Args:
        memory: of the most loaded rank at each position.
    """
    kinds = [kind for kind in memory[0].as_dict() if kind != "host" and any(found.as_dict()[kind] for found in memory)]
    unit, divisor = byte_unit(max(found.total for found in memory))
    cells = [tuple(f"{found.as_dict()[kind] / divisor:.2f}" for kind in kinds) for found in memory]
    rows = [(show_run(first, last), *cell) for first, last, cell in _runs(cells)]
    return table(
        ("pp", *(f">{kind}" for kind in kinds)), _shortened(rows), title=f"Memory of a rank by position, in {unit}"
    )


def byte_unit(largest: int) -> tuple[str, int]:
    """(name, bytes) of the unit for numbers that are compared, so that the largest is seen."""
    return next((name, size) for name, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 1024)) if largest >= size / 2)


def _runs(values: Sequence[Item]) -> Iterator[tuple[int, int, Item]]:
    """(first, last, value) of every run of equal values."""
    start = 0
    for value, run in groupby(values):
        length = len(list(run))
        yield start, start + length - 1, value
        start += length


def show_run(first: int, last: int) -> str:
    """``3``, ``1-14``."""
    return str(first) if first == last else f"{first}-{last}"


def _shortened(rows: Sequence[tuple[str, ...]]) -> Sequence[tuple[str, ...]]:
    """Long tables lose their middle."""
    if len(rows) <= MOST_ROWS:
        return rows
    ends = MOST_ROWS // 2
    gap = (f"... {len(rows) - 2 * ends} more", *("" for _ in rows[0][1:]))
    return [*rows[:ends], gap, *rows[-ends:]]


def _sums(config: RunConfig, holdings: Holdings) -> tuple[str, ...]:
    held, again = holdings.one_copy
    adapters = count_adapters(config.model, config.lora)
    model = count_parameters(config.model).total + adapters
    assert held - again == model, f"{held:,} - {again:,} parameters on the ranks, {model:,} in the model"
    everywhere = holdings.of_all_ranks
    return (
        f"One copy of the model: {held:,} on its ranks - {again:,} held more than once",
        f"= {model:,}, the model's" + (f", {adapters:,} of them adapters'." if adapters else "."),
        f"All ranks together: {everywhere:,}, {everywhere / model:,.2f} times the model.",
    )


def show_ranks(ranks: Sequence[int]) -> str:
    """``0-7``; ``0, 8 ... 56``; ``0, 64``; ``0, 1, 8 ... 25`` where steps differ."""
    step = stride_of(ranks)
    if len(ranks) == 1:
        return str(ranks[0])
    if step == 1 and len(ranks) > 2:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) <= 3:
        return ", ".join(map(str, ranks))
    return f"{', '.join(map(str, ranks[: 2 if step else 3]))} ... {ranks[-1]}"
