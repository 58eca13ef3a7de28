"""Which layouts close to the one asked for would work? A small search over the same rules that refuse.

A layout is a choice along each axis; its distance is the number of doublings or halvings from what was asked for. The
search takes layouts in the order of distance and stops at the third that passes. What no layout mends is set right
beside it, and the global batch where no layout fits it: whatever is proposed passes every rule.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from paceline.config.asked import Asked, divisors, show
from paceline.config.layout import nearest_batch
from paceline.config.parallel import ParallelConfig
from paceline.config.refusals import mends, refusals
from paceline.config.run import RunConfig
from paceline.config.schedules import SCHEDULES

SHOWN = 3
LOOKED_AT = 1000
"""Combinations after which the search gives up: some ten milliseconds."""
AXES = ("tp", "pp", "cp", "ep", "etp", "dp_replicate")

Fields = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Fields of `[parallel]`, and how far they are from those asked for."""

    fields: Fields
    distance: float
    ranks: int = 1
    """By how much the choice multiplies the ranks that one copy of the model takes."""


def nearest_layouts(asked: Asked, *, keep_batch: bool = False) -> list[str]:
    """Up to three layouts on the same ranks that work, nearest first, each as the ``--set``s that lead to it.

    Args:
        keep_batch: none that needs another `train.global_batch_size`.
    """
    others = mends(asked)
    base = asked.with_changes(others)
    found: list[str] = []
    with_batch: list[str] = []
    for fields in _candidates(base):
        other = base.with_parallel(base.parallel.model_copy(update=fields))
        refused = {finding.id for finding in islice(refusals(other), 2)}
        if refused - {"config.batch"}:
            continue
        changes = {f"parallel.{name}": value for name, value in fields.items()} | others
        if refused:
            changes["train.global_batch_size"] = nearest_batch(other)
        proposals = with_batch if refused else found
        text = as_sets(asked.config, changes)
        if text and text not in proposals:
            proposals.append(text)
        if len(found) == SHOWN:
            break
    return found or ([] if keep_batch else with_batch[:SHOWN])


def nearest_sentence(asked: Asked) -> str:
    """For the end of a refusal: what works on the same ranks."""
    found, ranks = nearest_layouts(asked), f"{asked.world_size} rank{'s' * (asked.world_size > 1)}"
    if not found:
        return f"No layout near it works on {ranks}."
    return (
        f"Nearest layout{'s' * (len(found) > 1)} that work{'s' * (len(found) == 1)} on {ranks}: {'; or '.join(found)}"
    )


def _candidates(asked: Asked) -> Iterator[Fields]:
    """Layouts that make the world size, by growing distance, then those that keep the model on as many ranks; at the
    very end data parallelism alone."""
    yield from _near(asked)
    yield (
        dict.fromkeys(AXES, 1)
        | {"pipeline_schedule": "1f1b", "stages_per_rank": 1, "pipeline_layout": ()}
        | {"dp_shard": asked.world_size if asked.parallel.dp_shard else 0}
    )


def _near(asked: Asked) -> Iterator[Fields]:
    axes = _choices(asked)
    wanted = asked.parallel.model_ranks * asked.parallel.dp_replicate
    start = (0,) * len(axes)
    waiting = [(0.0, 0.0, start)]
    seen = {start}
    for _ in range(LOOKED_AT):
        if not waiting:
            return
        distance, _, indices = heapq.heappop(waiting)
        ranks = math.prod(axis[index].ranks for axis, index in zip(axes, indices, strict=True))
        if asked.world_size % ranks == 0:
            yield _fields(asked, axes, indices, ranks)
        for position, axis in enumerate(axes):
            index = indices[position]
            following = (*indices[:position], index + 1, *indices[position + 1 :])
            if index + 1 == len(axis) or following in seen:
                continue
            seen.add(following)
            old, new = axis[index], axis[index + 1]
            moved = abs(math.log2(ranks // old.ranks * new.ranks / wanted))
            heapq.heappush(waiting, (distance - old.distance + new.distance, moved, following))


def _fields(asked: Asked, axes: list[list[Choice]], indices: tuple[int, ...], ranks: int) -> Fields:
    """The chosen fields, with the `dp_shard` that makes the world size."""
    fields: Fields = {}
    for axis, index in zip(axes, indices, strict=True):
        fields |= axis[index].fields
    return fields | {"dp_shard": asked.world_size // ranks if asked.parallel.dp_shard else 0}


def _choices(asked: Asked) -> list[list[Choice]]:
    """Along each axis, what may be chosen, the nearest first."""
    parallel, experts = asked.parallel, asked.model.is_moe
    degrees = divisors(asked.world_size)
    choices = []
    for name in AXES:
        old: int = getattr(parallel, name)
        values = degrees
        if not experts and name in ("ep", "etp"):
            values = [1]
        if name == "dp_replicate":  # a matter of sharding and locality: more of it never mends a layout
            values = [value for value in degrees if value <= old]
        of_experts = name in ("ep", "etp")
        options = [
            Choice(fields={name: value}, distance=abs(math.log2(value / old)), ranks=1 if of_experts else value)
            for value in values
        ]
        choices.append(sorted(options, key=lambda choice: choice.distance))
    choices.append(_pipelines(parallel))
    other = "ulysses" if parallel.cp_method == "ring" else "ring"
    methods = [Choice(fields={"cp_method": parallel.cp_method}, distance=0)]
    if parallel.cp > 1:
        methods.append(Choice(fields={"cp_method": other}, distance=1))
    choices.append(methods)
    return choices


def _pipelines(parallel: ParallelConfig) -> list[Choice]:
    """The schedule asked for; its layers cut by cost; with the stages it needs; 1F1B."""
    names = ("pipeline_schedule", "stages_per_rank", "pipeline_layout")
    schedule = parallel.pipeline_schedule
    plans: dict[tuple[str, int, tuple[int, ...]], float] = {}
    for plan, distance in (
        ((schedule, parallel.stages_per_rank, parallel.pipeline_layout), 0.0),
        ((schedule, parallel.stages_per_rank, ()), 0.5),
        ((schedule, SCHEDULES[schedule].min_stages_per_rank, ()), 0.5),
        (("1f1b", 1, parallel.pipeline_layout), 1.0),
        (("1f1b", 1, ()), 1.5),
    ):
        plans.setdefault(plan, distance)
    return [Choice(fields=dict(zip(names, plan, strict=True)), distance=distance) for plan, distance in plans.items()]


def as_sets(config: RunConfig, changes: dict[str, Any]) -> str:
    """What differs, as the command line takes it."""
    parts = []
    for key, value in changes.items():
        section, _, name = key.partition(".")
        if value != getattr(getattr(config, section), name):
            text = str(value).lower() if isinstance(value, bool) else str(value)
            parts.append(f"--set '{key}={show(value)}'" if isinstance(value, tuple) else f"--set {key}={text}")
    return " ".join(parts)
