"""The tables of a dry run that show a layout: the mesh, the pipeline's stages, and what each rank holds."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.config.run import RunConfig
from paceline.costs.grid import EXPERT_AXES, RankGrid, stride_of
from paceline.costs.layers import count_parameters
from paceline.costs.memory import MemoryEstimate
from paceline.costs.parameters import Holdings, part_shapes, shapes_numel
from paceline.costs.stages import cut_stages, stage_costs, stages_of_rank
from paceline.report import units
from paceline.report.table import Table, table

_SHARDED = (
    "nothing is sharded",
    "optimizer state",
    "optimizer state, gradients",
    "optimizer state, gradients, weights",
)


def mesh_table(config: RunConfig, grid: RankGrid) -> Table:
    """Every axis with its degree, the group of rank 0, the nodes that a group reaches over, and what travels."""
    travels = _travels(config)
    per_node = config.cluster.gpus_per_node
    axes = [axis for axis in grid.sizes if config.model.is_moe or axis not in EXPERT_AXES]
    rows = []
    for axis in axes:
        group = next(group for group in grid.groups(axis) if 0 in group)
        spanned = grid.nodes_spanned(axis, per_node)
        alone = len(group) == 1
        rows.append(
            (
                axis,
                str(grid.sizes[axis]),
                "" if alone else f"{stride_of(group) or 'various'}",
                show_ranks(group),
                "" if alone else "inside a node" if spanned == 1 else f"over {spanned} nodes",
                travels[axis],
            )
        )
    world = grid.world_size
    notes = [f"Nodes of cluster.gpus_per_node = {per_node}, filled in the order of the ranks."]
    if config.model.is_moe:
        notes.append("edp, ep and etp are the ranks of a pipeline stage once more, folded for experts.")
    return table(
        ("axis", ">degree", ">step", "ranks with rank 0", "reaches", "what lies along it, and travels"),
        rows,
        title=f"Mesh: {world:,} rank{'s' if world > 1 else ''}, neighbours differ in the last dense axis",
        notes=notes,
    )


def _travels(config: RunConfig) -> dict[str, str]:
    parallel = config.parallel
    reduced = "gradients, summed once a step"
    if parallel.zero:
        reduced = f"{_SHARDED[parallel.zero]} (zero {parallel.zero}): gradients, and weights where they are needed"
    ring = parallel.cp_method == "ring"
    return {
        "pp": "pipeline stages: activations on, their gradients back",
        "dp_replicate": "copies of the sharded state: gradients, summed once a step",
        "dp_shard": reduced,
        "cp": "parts of a sequence: " + ("keys and values, around a ring" if ring else "heads for tokens, all-to-all"),
        "tp": "parts of a matrix and of a sequence: activations, gathered and summed in every layer",
        "edp": "copies of the same experts: gradients, once a step",
        "ep": "experts: tokens, to their experts and back in every expert layer",
        "etp": "parts of an expert: its tokens, gathered and summed",
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
        rows,
        title=f"Pipeline stages ({parallel.pipeline_schedule}), {given}",
        notes=(
            f"parallel.pipeline_layout = [{layout}]",
            f"The slowest rank takes {units.percent(slowest / mean - 1)} longer than the mean.",
        ),
    )


def _ends(config: RunConfig, shapes: dict[str, tuple[int, ...]]) -> list[str]:
    ends = ["embedding"] if "embed.weight" in shapes else []
    if any(name.startswith("norm.") for name in shapes):
        ends.append("head (tied)" if config.model.tie_embeddings else "head")
    if any(name.startswith("mtp.") for name in shapes):
        ends.append("multi-token prediction")
    return ends


def holdings_table(config: RunConfig, holdings: Holdings, memory: Sequence[MemoryEstimate]) -> Table:
    """Parameters and memory of the ranks at each position of the pipeline, and whether all of it adds up.

    Args:
        memory: of the most loaded rank at each position.
    """
    rows = []
    for pipeline_rank, found in enumerate(memory):
        ranks = holdings.grid.ranks_at(pipeline_rank)
        held = [holdings.of_rank(rank) for rank in ranks]
        most = max(held, key=lambda one: one.total)
        least = min(one.total for one in held)
        rows.append(
            (
                str(pipeline_rank),
                show_ranks(ranks),
                f"{most.total:,}",
                "the same" if least == most.total else f"{least:,}",
                *((units.count(most.experts),) if config.model.is_moe else ()),
                units.gib(found.states + found.gathered),
                units.gib(found.activations + found.logits),
                units.gib(found.total),
            )
        )
    experts = (">of experts",) if config.model.is_moe else ()
    return table(
        ("pp", "ranks", ">parameters", ">least", *experts, ">states", ">activations", ">memory"),
        rows,
        title="What each rank holds: parameters before ZeRO shards them, memory after",
        notes=_sums(config, holdings),
    )


def _sums(config: RunConfig, holdings: Holdings) -> tuple[str, ...]:
    held, again = holdings.one_copy
    model = count_parameters(config.model).total
    assert held - again == model, f"{held:,} - {again:,} parameters on the ranks, {model:,} in the model"
    everywhere = sum(holdings.of_rank(rank).total for rank in range(holdings.grid.world_size))
    return (
        f"One copy of the model: {held:,} parameters on its ranks - {again:,} held more than once = {model:,}, "
        "the model's.",
        f"All ranks together: {everywhere:,}, {everywhere / model:.2f} times the model.",
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
