"""How far are predictions from measured runs? Errors of time and memory, crashes foreseen, the cost of a first choice.

Two questions, two ways to ask:

- `cross_validate(runs)`: how good is the model of a framework? Every row of a source is predicted by a profile that
  was fitted without the row's model (and, for regret, without its whole cell of model and GPU count).
- `score(runs, profiles)`: how good are the profiles that are shipped, or that a calibration made, on somebody's runs?

A crash is *explained by memory* when the same model, GPU count, tp, pp and ZeRO stage ran at smaller micro-batches and
the line through their two largest (through the one and the exact bytes of its states, where there is one) exceeds the
card. Others are counted and not scored: nodes fail for many reasons.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from paceline.costs.footprint import memory_by_stage
from paceline.costs.profiles import Profile, find_profile
from paceline.costs.step import fits, predict, rank_layers
from paceline.planner.first_choice import Cell, cell_key, cells, cells_of
from paceline.planner.fit_recipes import RECIPES, Recipe
from paceline.planner.fitting import left_out
from paceline.planner.irregular import irregular
from paceline.planner.published import NotScored, PublishedRun
from paceline.planner.scored import GIB, Errors, Scored


@dataclass(frozen=True, kw_only=True)
class Fit:
    """How well is it foreseen whether a run fits?"""

    ran: int
    refused: int
    """Ran, though the prediction says that it does not fit."""
    explained: int
    """Crashes that memory explains."""
    foreseen: int
    others: int
    """Crashes that memory does not explain: not scored."""
    others_flagged: int


@dataclass(frozen=True, kw_only=True)
class SourceReport:
    """One source."""

    key: str
    title: str
    time: Errors | None
    memory: Errors | None
    fit: Fit | None
    cells: tuple[Cell, ...]
    scored: tuple[Scored, ...]
    not_scored: Mapping[str, int]
    """Rows by reason."""
    irregular: tuple[str, ...]
    """Ids of rows that `irregular` tells from their like."""
    regular_time: Errors | None
    """Without them."""


# ---- predictions


def score(runs: Sequence[PublishedRun], profiles: Mapping[str, Profile] | None = None) -> list[Scored]:
    """By the profiles as they are; ``profiles`` replaces those of that name."""
    found = []
    for run in runs:
        name = run.source.profile
        profile = (profiles or {}).get(name) or find_profile(name)
        estimate = predict(run.workload, run.cluster, profile)
        reported = estimate.stages[0].total if profile.reported == "first" else estimate.memory_bytes
        found.append(
            Scored(
                run=run,
                predicted_seconds=estimate.seconds,
                predicted_bytes=reported,
                predicted_fits=estimate.fits,
            )
        )
    return found


def cross_validate(runs: Sequence[PublishedRun]) -> tuple[list[Scored], list[Cell]]:
    """Every run predicted by a profile that never saw its model; every cell by one that never saw the cell."""
    scored, cells = [], []
    for recipe in RECIPES:
        chosen = [run for run in runs if run.source.key in recipe.sources]
        if not chosen:
            continue
        profile = find_profile(recipe.profile)
        scored += _left_out(chosen, [run.model_name for run in chosen], profile, recipe)
        cells += _cells(chosen, profile, recipe)
    return scored, cells


def _left_out(runs: Sequence[PublishedRun], groups: Sequence[str], profile: Profile, recipe: Recipe) -> list[Scored]:
    found = left_out(runs, groups, profile, recipe)
    return [
        Scored(
            run=run,
            predicted_seconds=float(seconds),
            predicted_bytes=float(memory),
            predicted_fits=fits(_most_loaded(run, profile, float(memory)), run.cluster, profile),
        )
        for run, seconds, memory in zip(runs, found.seconds, found.memory_bytes, strict=True)
    ]


def _cells(runs: Sequence[PublishedRun], profile: Profile, recipe: Recipe) -> list[Cell]:
    """Each left out of the fit as a whole."""
    wanted = set(cells_of(runs))
    if not wanted:
        return []
    groups = [key if (key := cell_key(run)) in wanted else "" for run in runs]
    return cells(_left_out(runs, groups, profile, recipe))


def _most_loaded(run: PublishedRun, profile: Profile, reported: float) -> float:
    """Bytes of the fullest rank, scaled from what was predicted for the reported one."""
    stages = memory_by_stage(run.workload, run.cluster, rank_layers(run.workload, profile), profile)
    if profile.reported == "most":
        return reported
    return reported * max(stage.total for stage in stages) / stages[0].total


# ---- crashes


def explained_crashes(scored: Sequence[Scored]) -> set[str]:
    """Ids of the crashed runs whose crash memory explains."""
    ran: dict[tuple[object, ...], dict[int, list[Scored]]] = {}
    for one in scored:
        if one.run.memory_bytes is not None:
            sizes = ran.setdefault(_same_layout(one.run), {})
            sizes.setdefault(one.run.workload.micro_batch_size, []).append(one)
    return {
        one.run.id
        for one in scored
        if one.run.crashed and _extrapolated(one.run, ran.get(_same_layout(one.run), {})) > usable_bytes(one.run)
    }


def usable_bytes(run: PublishedRun) -> float:
    """What a framework's allocator can have of the card."""
    return run.cluster.gpu.memory_bytes - find_profile(run.source.profile).context_gib * GIB


def _same_layout(run: PublishedRun) -> tuple[object, ...]:
    work = run.workload
    return run.source.key, run.model_name, run.cluster.gpus, work.tp, work.pp, work.zero, work.seq_len


def _extrapolated(run: PublishedRun, ran: Mapping[int, Sequence[Scored]]) -> float:
    """Bytes by the line through measured ones at smaller micro-batches; 0 where there are none."""
    wanted = run.workload.micro_batch_size
    smaller = sorted(size for size in ran if size < wanted)
    if not smaller:
        return 0.0
    points = [(size, fmean(one.run.memory_bytes or 0.0 for one in ran[size])) for size in smaller[-2:]]
    if len(points) == 1:
        size, measured = points[0]
        like = ran[size][0].run
        profile = find_profile(like.source.profile)
        stages = memory_by_stage(like.workload, like.cluster, rank_layers(like.workload, profile), profile)
        points = [(0, min(stages[0].states, 0.95 * measured)), *points]
    (low, at_low), (high, at_high) = points
    return at_high + (at_high - at_low) / (high - low) * (wanted - high)


def _fit(scored: Sequence[Scored]) -> Fit | None:
    crashed = [one for one in scored if one.run.crashed]
    ran = [one for one in scored if one.run.memory_bytes is not None]
    if not crashed:
        return None
    explained = explained_crashes(scored)
    by_memory = [one for one in crashed if one.run.id in explained]
    others = [one for one in crashed if one.run.id not in explained]
    return Fit(
        ran=len(ran),
        refused=sum(not one.predicted_fits for one in ran),
        explained=len(by_memory),
        foreseen=sum(not one.predicted_fits for one in by_memory),
        others=len(others),
        others_flagged=sum(not one.predicted_fits for one in others),
    )


# ---- the report


def report(scored: Sequence[Scored], cells: Sequence[Cell], not_scored: Sequence[NotScored]) -> list[SourceReport]:
    """By source, in the order of their first rows. Secondary rows are predicted, and counted nowhere."""
    found = []
    for key in dict.fromkeys(one.run.source.key for one in scored):
        rows = tuple(one for one in scored if one.run.source.key == key and not one.run.secondary)
        unlike = irregular([one.run for one in rows])
        timed = [(one.run.id, one.time_error) for one in rows if one.time_error is not None]
        reasons: dict[str, int] = {}
        for skipped in not_scored:
            if skipped.source == key:
                reasons[skipped.reason] = reasons.get(skipped.reason, 0) + 1
        found.append(
            SourceReport(
                key=key,
                title=rows[0].run.source.title if rows else key,
                time=Errors.of([error for _, error in timed]),
                memory=Errors.of([one.memory_error for one in rows if one.memory_error is not None]),
                fit=_fit(rows),
                cells=tuple(cell for cell in cells if cell.source == key),
                scored=rows,
                not_scored=reasons,
                irregular=tuple(sorted(unlike)),
                regular_time=Errors.of([error for name, error in timed if name not in unlike]),
            )
        )
    return found
