"""Which numbers of a profile explain measured runs best?

Times: the mean absolute log ratio of predicted and measured steps is minimised over a few numbers of a profile
(`planner/descent.py`), inside the ranges of `planner/fit_recipes.py`. All rows are evaluated at once
(`costs/demand.py: stacked`), so that a fit takes a tenth of a second. Memory is linear in its numbers: least absolute
relative residuals, by reweighted least squares, negative numbers dropped.

A fit that is to be judged must not have seen what it is judged on: `left_out` predicts every group of rows with a
profile fitted on all other groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.costs.demand import Demand, demand_of, stacked
from paceline.costs.footprint import LINEAR, linear_bytes
from paceline.costs.profiles import Profile
from paceline.costs.spend import seconds
from paceline.costs.step import rank_layers
from paceline.planner.descent import Array, descend
from paceline.planner.fit_recipes import RANGES, START, Recipe
from paceline.planner.irregular import irregular
from paceline.planner.published import PublishedRun

# ---- times


def demands(runs: Sequence[PublishedRun], profile: Profile) -> Demand:
    """Of many runs, in arrays."""
    return stacked([demand_of(run.workload, run.cluster, rank_layers(run.workload, profile)) for run in runs])


def some(demand: Demand, chosen: npt.NDArray[np.bool_]) -> Demand:
    """Rows of a stacked demand."""
    return Demand(**{field.name: getattr(demand, field.name)[chosen] for field in fields(Demand)})


def fit_times(
    profile: Profile,
    names: Sequence[str],
    demand: Demand,
    measured: Array,
    weights: Array,
    *,
    cap: float = float("inf"),
    steps: int = 60,
) -> Profile:
    """``profile`` with those numbers fitted."""
    scale = _Scale.of(names)

    def residuals(points: Array) -> Array:
        numbers = scale.values(points)
        columns: dict[str, Any] = {name: numbers[:, [i]] for i, name in enumerate(names)}
        many = replace(profile, **columns)
        return np.asarray(np.log(seconds(demand, many)) - np.log(measured) + 0.0 * points[:, :1], dtype=np.float64)

    start = scale.point(np.array([float(getattr(profile, name)) for name in names]))
    found = scale.values(descend(residuals, start, weights, cap=cap, steps=steps)[None])[0]
    numbers: dict[str, Any] = dict(zip(names, map(float, found), strict=True))
    return replace(profile, **numbers)


@dataclass(frozen=True, kw_only=True)
class _Scale:
    """Numbers inside their ranges as points without bounds: the logistic of their place between both ends, in
    logarithms where the lower end is not zero."""

    low: Array
    high: Array
    logarithmic: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, names: Sequence[str]) -> _Scale:
        low = np.array([RANGES[name][0] for name in names])
        high = np.array([RANGES[name][1] for name in names])
        logarithmic = low > 0
        ends = (np.where(logarithmic, np.log(np.where(logarithmic, end, 1.0)), end) for end in (low, high))
        return cls(low=next(ends), high=next(ends), logarithmic=logarithmic)

    def values(self, points: Array) -> Array:
        found = self.low + (self.high - self.low) / (1.0 + np.exp(-np.clip(points, -30, 30)))
        return np.asarray(np.where(self.logarithmic, np.exp(np.where(self.logarithmic, found, 0.0)), found))

    def point(self, values: Array) -> Array:
        flat = np.where(self.logarithmic, np.log(np.where(self.logarithmic, values, 1.0)), values)
        share = np.clip((flat - self.low) / (self.high - self.low), 1e-3, 1 - 1e-3)
        return np.asarray(np.log(share / (1 - share)))


def fit_in_turn(
    profile: Profile, recipe: Recipe, demand: Demand, measured: Array, weights: Array, experts: npt.NDArray[np.bool_]
) -> Profile:
    """The recipe's numbers: those of experts, if it has them apart, on rows with ``experts`` after all others on rows
    without."""
    if not recipe.experts or experts.all() or not experts.any():
        return fit_times(profile, (*recipe.time, *recipe.experts), demand, measured, weights, cap=recipe.cap)
    for names, rows in ((recipe.time, ~experts), (recipe.experts, experts)):
        profile = fit_times(profile, names, some(demand, rows), measured[rows], weights[rows], cap=recipe.cap)
    return profile


# ---- memory


def memory_units(runs: Sequence[PublishedRun], profile: Profile) -> Array:
    """[runs, `LINEAR`]: bytes for each unit, of the rank whose memory the source reports."""
    rows = []
    for run in runs:
        layers = rank_layers(run.workload, profile)
        ranks = [0] if profile.reported == "first" else sorted({0, run.workload.pp - 1})
        units = [linear_bytes(run.workload, run.cluster, layers, rank, profile) for rank in ranks]
        totals = [sum(getattr(profile, name) * found[name] for name in LINEAR) for found in units]
        most = units[int(np.argmax(totals))]
        rows.append([most[name] for name in LINEAR])
    return np.array(rows).reshape(len(runs), len(LINEAR))


def memory_numbers(profile: Profile) -> Array:
    return np.array([float(getattr(profile, name)) for name in LINEAR])


def fit_memory(profile: Profile, names: Sequence[str], units: Array, measured: Array) -> Profile:
    """``profile`` with those of its linear numbers fitted; the others stay."""
    numbers = memory_numbers(profile)
    columns = [LINEAR.index(name) for name in names]
    rest = units @ np.where(np.isin(np.arange(len(LINEAR)), columns), 0.0, numbers)
    wanted = 1.0 - rest / measured
    weights = np.ones(len(measured))
    found: npt.NDArray[Any] = np.zeros(len(columns))
    for _ in range(60):
        scaled = units[:, columns] / measured[:, None]
        found, *_ = np.linalg.lstsq(scaled * np.sqrt(weights)[:, None], wanted * np.sqrt(weights), rcond=None)
        if (found < 0).any():
            columns.pop(int(np.argmin(found)))
            continue
        weights = 1.0 / np.maximum(np.abs(scaled @ found - wanted), 0.02)
    fitted: dict[str, Any] = dict.fromkeys(names, 0.0) | {
        LINEAR[c]: float(value) for c, value in zip(columns, found, strict=True)
    }
    return replace(profile, **fitted)


# ---- with rows left out


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """Every run predicted by a profile that saw nothing of its group; NaN where nothing could be fitted."""

    seconds: Array
    memory_bytes: Array


def left_out(runs: Sequence[PublishedRun], groups: Sequence[str], profile: Profile, recipe: Recipe) -> LeftOut:
    """Fits once for each group, on the runs of all other groups, and predicts the group's runs, crashed ones too."""
    profile = neutral(profile, recipe)
    group_of = np.array(groups)
    demand, units = demands(runs, profile), memory_units(runs, profile)
    times = np.array([run.step_seconds or np.nan for run in runs])
    memory = np.array([run.memory_bytes or np.nan for run in runs])
    trusted = _trusted(runs, recipe)
    weights = source_weights(runs)
    found = LeftOut(seconds=np.full(len(runs), np.nan), memory_bytes=np.full(len(runs), np.nan))
    for group in sorted(set(groups)):
        asked, known = group_of == group, group_of != group
        timed = known & np.isfinite(times) & trusted
        fitted = profile
        if timed.any():
            fitted = fit_in_turn(
                fitted, recipe, some(demand, timed), times[timed], weights[timed], has_experts(runs)[timed]
            )
        found.seconds[asked] = seconds(some(demand, asked), fitted)
        sized = known & np.isfinite(memory) & trusted
        if recipe.memory and sized.sum() > len(recipe.memory):
            fitted = fit_memory(fitted, recipe.memory, units[sized], memory[sized])
        found.memory_bytes[asked] = units[asked] @ memory_numbers(fitted)
    return found


def has_experts(runs: Sequence[PublishedRun]) -> npt.NDArray[np.bool_]:
    return np.array([run.workload.model.is_moe for run in runs])


def _trusted(runs: Sequence[PublishedRun], recipe: Recipe) -> npt.NDArray[np.bool_]:
    """What may be fitted on."""
    unlike = irregular(runs) if recipe.regular else set()
    return np.array([not run.secondary and run.id not in unlike for run in runs])


def neutral(profile: Profile, recipe: Recipe) -> Profile:
    """With every number that is fitted at `START`."""
    numbers: dict[str, Any] = {name: START[name] for name in (*recipe.time, *recipe.experts, *recipe.memory)}
    return replace(profile, **numbers)


def fit_all(runs: Sequence[PublishedRun], profile: Profile, recipe: Recipe) -> Profile:
    """On every run: the profile to ship. Never judged on these."""
    profile = neutral(profile, recipe)
    runs = [run for run, trusted in zip(runs, _trusted(runs, recipe), strict=True) if trusted]
    timed = [run for run in runs if run.step_seconds]
    measured = np.array([run.step_seconds for run in timed], dtype=np.float64)
    demand, weights = demands(timed, profile), source_weights(timed)
    fitted = fit_in_turn(profile, recipe, demand, measured, weights, has_experts(timed))
    sized = [run for run in runs if run.memory_bytes]
    if recipe.memory and len(sized) > len(recipe.memory):
        bytes_of = np.array([run.memory_bytes for run in sized], dtype=np.float64)
        fitted = fit_memory(fitted, recipe.memory, memory_units(sized, profile), bytes_of)
    return fitted


def source_weights(runs: Sequence[PublishedRun]) -> Array:
    """Each source weighs the same, and in it each model; the mean is 1 over rows with a time."""
    keys = [(run.source.key, run.model_name) for run in runs]
    timed = [key for run, key in zip(runs, keys, strict=True) if run.step_seconds]
    count = {key: max(1, timed.count(key)) for key in set(keys)}
    models = {source: len({key for key in set(timed) if key[0] == source}) or 1 for source in {k[0] for k in keys}}
    return np.array([len(timed) / len(models) / models[key[0]] / count[key] for key in keys])
