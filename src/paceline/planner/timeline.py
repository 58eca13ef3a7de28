"""A step as a timeline of one pipeline's ranks, with slow ranks and slow links, and as a Perfetto trace.

The action lists are the ones that the runtime executes (`costs/pipeline.py`); durations come from a prediction
(`costs/step.py`): a stage's share of the work by its FLOPs, backward twice forward and what is recomputed. Durations
are scaled once so that the timeline without slow parts takes as long as predicted; a slow part then shows what it
costs. Every rank of a tensor- or context-parallel group waits for its slowest, so a slow rank slows its whole position
in the pipeline; the other pipelines wait for it where gradients are summed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.config.ranks import EXPERT_AXES, RankOrder
from paceline.config.run import RunConfig
from paceline.costs.pipeline import Action, schedule
from paceline.costs.stages import cut_stages, stage_costs
from paceline.costs.step import StepEstimate
from paceline.errors import ConfigError

_WORK = ("gemm", "attention", "memory_bound", "launch", "recompute")
_IN_LAYERS = ("tp_communication", "cp_communication", "ep_communication")


@dataclass(frozen=True, kw_only=True)
class Span:
    """Something that a rank of the pipeline does."""

    rank: int
    """Position in the pipeline."""
    name: str
    kind: str
    """forward, backward, weights, gradients, optimizer."""
    start: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Slow:
    """What is slower than it should be."""

    positions: Mapping[int, float] = field(default_factory=dict)
    """Position in the pipeline -> how many times longer its work takes."""
    hops: Mapping[tuple[int, int], float] = field(default_factory=dict)
    """Two neighbouring positions -> how many times longer what is sent between them takes."""
    axes: Mapping[str, float] = field(default_factory=dict)
    """tp, cp, ep or dp -> how many times longer its communication takes."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One step."""

    spans: tuple[Span, ...]
    seconds: float
    busy: tuple[float, ...]
    """By position: seconds of work and of communication within layers."""


@dataclass(frozen=True, kw_only=True)
class _Durations:
    forward: tuple[float, ...]
    """By stage."""
    backward: tuple[float, ...]
    weights: tuple[float, ...]
    """Of the backward: gradients of weights, where the schedule splits it."""
    hop: float
    gradients: float
    rest: float


def timeline(config: RunConfig, estimate: StepEstimate, slow: Slow | None = None) -> Timeline:
    """The step of a prediction, with what is slow in it."""
    plain = _durations(config, estimate, Slow())
    lists = _lists(config, estimate)
    scale = 1.0
    for _ in range(20):  # the tail is not scaled, so a few rounds bring the timeline to the predicted length
        length = _run(config, lists, plain, Slow(), scale).seconds
        scale *= max(0.05, (estimate.seconds - plain.gradients - plain.rest) / (length - plain.gradients - plain.rest))
    slow = slow or Slow()
    return _run(config, lists, _durations(config, estimate, slow), slow, scale)


def _lists(config: RunConfig, estimate: StepEstimate) -> Sequence[Sequence[Action]]:
    parallel = config.parallel
    if parallel.pp == 1:
        pairs = (Action(kind, 0, index) for index in range(estimate.micro_batches) for kind in ("F", "B"))
        return (tuple(pairs),)
    return schedule(parallel.pipeline_schedule, parallel.pp, parallel.stages_per_rank, estimate.micro_batches)


def _durations(config: RunConfig, estimate: StepEstimate, slow: Slow) -> _Durations:
    parts, count = estimate.parts, estimate.micro_batches
    stages = cut_stages(config, config.parallel.stages)
    costs = stage_costs(config, stages)
    shares = [cost * config.parallel.pp / sum(costs) for cost in costs]
    layers = sum(parts[name] * slow.axes.get(name.partition("_")[0], 1.0) for name in _IN_LAYERS)
    again = parts["recompute"] / count
    work = (sum(parts[name] for name in _WORK) + layers) / count - again
    hop = parts["pp_communication"] / max(1, count * (config.parallel.stages - 1)) if config.parallel.pp > 1 else 0.0
    return _Durations(
        forward=tuple(share * work / 3 for share in shares),
        backward=tuple(share * (work * 2 / 3 + again) for share in shares),
        weights=tuple(share * parts["gemm"] / count / 3 for share in shares),
        hop=hop,
        gradients=parts["dp_communication"] * slow.axes.get("dp", 1.0),
        rest=parts["optimizer"] + parts["offload"] + parts["overhead"],
    )


def _run(
    config: RunConfig, lists: Sequence[Sequence[Action]], durations: _Durations, slow: Slow, scale: float
) -> Timeline:
    home = {action.stage: rank for rank, actions in enumerate(lists) for action in actions}
    last = len(home) - 1
    end: dict[tuple[str, int, int], float] = {}
    clock, position = [0.0] * len(lists), [0] * len(lists)
    spans: list[Span] = []
    left = sum(map(len, lists))
    while left:
        before = left
        for rank, actions in enumerate(lists):
            factor = scale * slow.positions.get(rank, 1.0)
            while position[rank] < len(actions):
                action = actions[position[rank]]
                ready = _ready(action, end, home, last, durations.hop * scale, slow)
                if ready is None:
                    break
                start = max(clock[rank], ready)
                seconds = factor * _seconds(action, durations)
                clock[rank] = start + seconds
                end["B" if action.kind == "I" else action.kind, action.stage, action.micro_batch] = clock[rank]
                spans.append(_span(rank, action, start, seconds, home))
                position[rank] += 1
                left -= 1
        assert left < before, "the action lists stall"
    finish = max(clock)
    tail = durations.gradients + durations.rest
    for rank in range(len(lists)):
        if durations.gradients:
            spans.append(Span(rank=rank, name="gradients", kind="gradients", start=finish, seconds=durations.gradients))
        spans.append(
            Span(
                rank=rank,
                name="optimizer",
                kind="optimizer",
                start=finish + durations.gradients,
                seconds=durations.rest,
            )
        )
    busy = [0.0] * len(lists)
    for span in spans:
        if span.kind in ("forward", "backward", "weights"):
            busy[span.rank] += span.seconds
    return Timeline(spans=tuple(spans), seconds=finish + tail, busy=tuple(busy))


def _ready(
    action: Action,
    end: Mapping[tuple[str, int, int], float],
    home: Mapping[int, int],
    last: int,
    hop: float,
    slow: Slow,
) -> float | None:
    """When everything that an action reads is here; None while something is not done."""
    kind, stage, micro_batch = action
    needed: list[tuple[str, int, int]] = []
    if kind == "F" and stage > 0:
        needed.append(("F", stage - 1, micro_batch))
    elif kind in ("B", "I"):
        needed.append(("F", stage, micro_batch))
        if stage < last:
            needed.append(("B", stage + 1, micro_batch))
    elif kind == "W":
        needed.append(("B", stage, micro_batch))
    ready = 0.0
    for source in needed:
        if source not in end:
            return None
        here, there = home[stage], home[source[1]]
        factor = slow.hops.get((min(here, there), max(here, there)), 1.0)
        ready = max(ready, end[source] + (hop * factor if here != there else 0.0))
    return ready


def _seconds(action: Action, durations: _Durations) -> float:
    stage = action.stage
    forward, backward, weights = durations.forward[stage], durations.backward[stage], durations.weights[stage]
    return {"F": forward, "B": backward, "I": backward - weights, "W": weights}[action.kind]


_KINDS = {"F": "forward", "B": "backward", "I": "backward", "W": "weights"}


def _span(rank: int, action: Action, start: float, seconds: float, home: Mapping[int, int]) -> Span:
    stage = f" stage {action.stage}" if len(home) > 1 and max(home.values()) + 1 < len(home) else ""
    name = f"{_KINDS[action.kind]} {action.micro_batch}{stage}"
    return Span(rank=rank, name=name, kind=_KINDS[action.kind], start=start, seconds=seconds)


# ---- what is slow, from ranks


_SPOKEN = {"edp": "the data parallelism of experts (edp)", "dp_shard": "dp", "dp_replicate": "dp"}


def slow_parts(config: RunConfig, gpus: int, ranks: Sequence[str], links: Sequence[str]) -> tuple[Slow, list[str]]:
    """(what is slow, sentences that say where it is) from ``RANK:FACTOR`` and ``RANK-RANK:FACTOR``.

    Raises:
        ConfigError: no such rank, or no group in which both are.
    """
    order = RankOrder(parallel=config.parallel, world_size=gpus)
    # a dense model has no groups of experts, whatever their sizes would be
    used = [name for name in order.sizes if config.model.is_moe or name not in EXPERT_AXES]
    positions: dict[int, float] = {}
    hops: dict[tuple[int, int], float] = {}
    axes: dict[str, float] = {}
    told = []
    for text in ranks:
        (rank,), factor = _parsed(text, "--slow-rank", 1, gpus)
        position = order.index("pp", rank)
        positions[position] = max(factor, positions.get(position, 1.0))
        told.append(f"rank {rank} is at position {position} of its pipeline: {factor:g} times slower")
    for text in links:
        (first, second), factor = _parsed(text, "--slow-link", 2, gpus)
        axis = next((name for name in used if second in order.group(name, first)), None)
        if axis is None or first == second:
            raise ConfigError(
                f"--slow-link {text}: ranks {first} and {second} never talk to each other",
                evidence="They share no group of tensor, context, expert, data or pipeline parallelism.",
                next_step="Give two ranks of one group; `paceline train RECIPE --dry-run` shows the groups of rank 0.",
            )
        if axis == "pp":
            pair = sorted((order.index("pp", first), order.index("pp", second)))
            hops[pair[0], pair[1]] = factor
            told.append(f"the link {first}-{second} carries what positions {pair[0]} and {pair[1]} send each other")
            continue
        name = {"dp_shard": "dp", "dp_replicate": "dp", "edp": "dp", "etp": "tp"}.get(axis, axis)
        axes[name] = max(factor, axes.get(name, 1.0))
        told.append(
            f"the link {first}-{second} is in a group of {_SPOKEN.get(axis, axis)}, which goes as fast as its slowest "
            "link (exposed communication of that axis is taken to be that many times longer; what is hidden now may "
            "show too)"
        )
    return Slow(positions=positions, hops=hops, axes=axes), told


def _parsed(text: str, option: str, count: int, gpus: int) -> tuple[list[int], float]:
    places, _, factor = text.partition(":")
    try:
        ranks = [int(place) for place in places.split("-")]
        times = float(factor)
    except ValueError:
        ranks, times = [], 0.0
    form = "R:1.2" if count == 1 else "R-R:2"
    if len(ranks) != count or times < 1 or not all(0 <= rank < gpus for rank in ranks):
        raise ConfigError(
            f"{option} {text} is not {form} with ranks 0 to {gpus - 1} and a factor of 1 or more",
            next_step=f"For example: {option} {'3:1.2' if count == 1 else '0-8:2'}.",
        )
    return ranks, times


# ---- the trace


def perfetto(found: Timeline, title: str) -> dict[str, Any]:
    """For ui.perfetto.dev or chrome://tracing: one process a position of the pipeline, times in microseconds."""
    return {"displayTimeUnit": "ms", "traceEvents": list(_events(found, title))}


def _events(found: Timeline, title: str) -> Iterator[dict[str, Any]]:
    for rank in range(len(found.busy)):
        name = {"name": f"pipeline rank {rank} ({title})"}
        yield {"name": "process_name", "ph": "M", "pid": rank, "tid": 0, "args": name}
        yield {"name": "process_sort_index", "ph": "M", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
    for span in found.spans:
        yield {
            "name": span.name,
            "cat": span.kind,
            "ph": "X",
            "pid": span.rank,
            "tid": 0,
            "ts": round(span.start * 1e6, 3),
            "dur": round(span.seconds * 1e6, 3),
        }
