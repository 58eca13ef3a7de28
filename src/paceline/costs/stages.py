"""How is the model cut into pipeline stages? By cost: the slowest, which all others wait for, is as fast as can be.

Costs are FLOPs of a token: of each block with its own attention and MLP or experts at the recipe's sequence length, a
block that is recomputed in full one forward more, and on the last stage the head's product with its loss and
multi-token prediction. An embedding is a lookup and costs nothing. `parallel.pipeline_layout` overrides the cut.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from paceline.config.model import BlockSpec, ModelConfig, MoESpec
from paceline.config.parallel import ParallelConfig
from paceline.config.run import RunConfig
from paceline.costs.layers import attention_weights, expert_flops, feed_forward_weights, score_flops
from paceline.costs.pipeline import stages_of
from paceline.errors import ConfigError


def stages_of_rank(parallel: ParallelConfig, rank: int) -> tuple[int, ...]:
    """The stages that lie on rank ``rank`` of the pipeline, in the order of the model."""
    if parallel.pp == 1:
        return tuple(range(parallel.stages))
    return stages_of(parallel.pipeline_schedule, parallel.pp, parallel.stages_per_rank, rank)


@lru_cache(maxsize=8)
def cut_stages(config: RunConfig, num_stages: int) -> tuple[range, ...]:
    """The blocks of each of ``num_stages`` stages (`parallel.stages`): contiguous, in order, at least one a stage.

    Raises:
        ConfigError: more stages than layers, or a layout that does not fit stages or layers.
    """
    layers, layout = config.model.num_layers, config.parallel.pipeline_layout
    if layout:
        _check_layout(config.parallel, layout, layers, num_stages)
        return _ranges(layout)
    if num_stages > layers:
        raise ConfigError(
            f"{layers} layers cannot be cut into {num_stages} pipeline stages",
            evidence=f"parallel.pp = {config.parallel.pp} with {num_stages // config.parallel.pp} stages a rank; every "
            "stage needs a layer.",
            next_step=f"Take at most {layers} stages: lower parallel.pp or parallel.stages_per_rank.",
        )
    return _ranges(partition([round(cost) for cost in block_costs(config)], round(last_cost(config)), num_stages))


def stage_costs(config: RunConfig, stages: Sequence[range]) -> tuple[float, ...]:
    """FLOPs of a token's forward and backward pass in each stage, recomputation included."""
    blocks = block_costs(config)
    costs = [sum(blocks[index] for index in stage) for stage in stages]
    costs[-1] += last_cost(config)
    return tuple(costs)


def block_costs(config: RunConfig) -> list[float]:
    """FLOPs of a token's forward and backward pass in each block."""
    modes = config.parallel.recompute
    mode_of = [modes] * config.model.num_layers if isinstance(modes, str) else list(modes)
    return [
        (4 if mode == "full" else 3) * block_flops(block, config.train.seq_len)
        for block, mode in zip(config.model.blocks(), mode_of, strict=True)
    ]


def last_cost(config: RunConfig) -> float:
    """What comes after the last block: the head, and for each depth of multi-token prediction a block and the head."""
    return 3 * after_blocks_flops(config.model, config.train.seq_len)


def block_flops(block: BlockSpec, seq_len: int) -> float:
    """Forward FLOPs of one token, causal."""
    flops = 2 * attention_weights(block.attention) + score_flops(block.attention, seq_len, "causal")
    feed_forward = block.feed_forward
    if isinstance(feed_forward, MoESpec):
        return flops + expert_flops(feed_forward) + 2 * feed_forward.hidden_size * feed_forward.num_experts
    return flops + 2 * feed_forward_weights(feed_forward)


def after_blocks_flops(model: ModelConfig, seq_len: int) -> float:
    """Forward FLOPs of one token after the last block."""
    head = 2.0 * model.hidden_size * model.head_rows
    return head + sum(head + 4 * model.hidden_size**2 + block_flops(block, seq_len) for block in model.mtp_blocks())


def partition(costs: Sequence[int], last: int, parts: int) -> tuple[int, ...]:
    """How many items each of ``parts`` contiguous parts takes, so that the costliest part is as cheap as can be.

    The last part costs ``last`` more. Among equally good cuts the evenest is taken (least sum of squares), and among
    these the one with fewer items in front, where a pipeline holds the most activations.
    """
    prefix = [0, *accumulate(costs)]
    low, high = max(max(costs), costs[-1] + last), prefix[-1] + last
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _latest_ends(prefix, last, parts, middle) else (middle + 1, high)
    ends = _latest_ends(prefix, last, parts, low)
    assert ends is not None
    return _evenest(prefix, last, low, _earliest_starts(prefix, last, parts, low), ends)


def _latest_ends(prefix: Sequence[int], last: int, parts: int, limit: int) -> list[int] | None:
    """Where each part ends at the latest with no part above ``limit``; None if that cannot be."""
    items, ends = len(prefix) - 1, [0]
    for part in range(parts - 1):
        # one item at least is left for each part to come
        end = min(bisect_right(prefix, prefix[ends[-1]] + limit) - 1, items - (parts - 1 - part))
        if end == ends[-1]:
            return None
        ends.append(end)
    if prefix[items] - prefix[ends[-1]] + last > limit:
        return None
    return [*ends[1:], items]


def _earliest_starts(prefix: Sequence[int], last: int, parts: int, limit: int) -> list[int]:
    """Where each part starts at the earliest with no later part above ``limit``."""
    starts = [len(prefix) - 1]
    for part in reversed(range(parts)):
        budget = limit - (last if part == parts - 1 else 0)
        starts.append(bisect_left(prefix, prefix[starts[-1]] - budget, part) if part else 0)
    return starts[:0:-1]


def _evenest(
    prefix: Sequence[int], last: int, limit: int, starts: Sequence[int], ends: Sequence[int]
) -> tuple[int, ...]:
    """Of the cuts with no part above ``limit`` the one with the least sum of squares."""
    parts, items = len(ends), len(prefix) - 1
    # by start of the part: (sum of squares from there on, end of the part)
    best: list[dict[int, tuple[int, int]]] = [{} for _ in range(parts)]
    for part in reversed(range(parts)):
        more = last if part == parts - 1 else 0
        latest_start = ends[part - 1] if part else 0
        after = [items] if part == parts - 1 else list(best[part + 1])  # ascending, as they were found
        for start in range(starts[part] if part else 0, latest_start + 1):
            farthest = bisect_right(prefix, prefix[start] + limit - more) - 1
            options = [
                ((prefix[end] - prefix[start] + more) ** 2 + (best[part + 1][end][0] if part < parts - 1 else 0), end)
                for end in after[bisect_right(after, start) : bisect_right(after, farthest)]
            ]
            if options:
                best[part][start] = min(options)
    sizes, start = [], 0
    for part in range(parts):
        end = best[part][start][1]
        sizes.append(end - start)
        start = end
    return tuple(sizes)


def _ranges(sizes: Sequence[int]) -> tuple[range, ...]:
    return tuple(range(start, stop) for start, stop in pairwise([0, *accumulate(sizes)]))


def _check_layout(parallel: ParallelConfig, layout: Sequence[int], layers: int, num_stages: int) -> None:
    shown = f"parallel.pipeline_layout = {list(layout)}"
    if len(layout) != num_stages:
        raise ConfigError(
            f"{shown} names {len(layout)} stages, the pipeline has {num_stages}",
            evidence=f"parallel.pp = {parallel.pp}, {num_stages // parallel.pp} stages a rank.",
            next_step=f"List {num_stages} numbers, or leave parallel.pipeline_layout out: stages are then cut by cost.",
        )
    if sum(layout) != layers:
        raise ConfigError(
            f"{shown} places {sum(layout)} layers, the model has {layers}",
            next_step="Make the numbers add up to model.num_layers, or leave parallel.pipeline_layout out.",
        )
    if min(layout) < 1:
        raise ConfigError(
            f"{shown} has a stage without layers",
            next_step="Give every stage a layer, or leave parallel.pipeline_layout out.",
        )
