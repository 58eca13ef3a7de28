"""Which numbers of a profile explain measured runs best?

Times: the mean absolute log ratio of predicted and measured steps is minimised over a few numbers of a profile, by the
simplex method of Nelder and Mead (The Computer Journal 7, 1965), inside the ranges of `RANGES`. All rows are evaluated
at once (`costs/demand.py: stacked`), so that a fit takes a second. Memory is linear in its numbers: least absolute
relative residuals, by reweighted least squares, negative numbers dropped.

A fit that is to be judged must not have seen what it is judged on: `left_out` predicts every group of rows with a
profile fitted on all other groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.costs.demand import Demand, demand_of, stacked
from paceline.costs.footprint import LINEAR, linear_bytes
from paceline.costs.profiles import Profile
from paceline.costs.spend import seconds
from paceline.costs.step import rank_layers
from paceline.planner.irregular import irregular
from paceline.planner.published import PublishedRun

Array = npt.NDArray[np.float64]

RANGES: Mapping[str, tuple[float, float]] = {
    "gemm_efficiency": (0.5, 1.1),
    "expert_gemm_efficiency": (0.2, 1.1),
    "expert_hbm_efficiency": (0.05, 0.95),
    "attention_efficiency": (0.25, 1.1),
    "hopper_attention": (0.3, 1.2),
    "hbm_efficiency": (0.1, 0.95),
    "score_efficiency": (0.1, 0.95),
    "cast_efficiency": (0.1, 1.0),
    "optimizer_efficiency": (0.05, 1.0),
    "nvlink_efficiency": (0.2, 1.0),
    "network_efficiency": (0.05, 1.0),
    "data_network": (0.05, 1.5),
    "tensor_gather_us": (0.1, 500.0),
    "ring_step_us": (0.01, 50.0),
    "launch_us": (5.0, 4000.0),
    "call_us": (1.0, 500.0),
    "wide_call_us": (1.0, 10000.0),
    "far_loss": (0.0, 2.0),
    "call_launch_us": (0.5, 1000.0),
    "crowded_call_us": (0.1, 3000.0),
    "send_us": (1.0, 5000.0),
    "micro_batch_ms": (0.01, 50.0),
    "step_ms": (0.1, 100.0),
    "step_latency_ms": (0.01, 50.0),
    "gradient_overlap": (0.0, 1.0),
    "parameter_overlap": (0.0, 1.0),
    "tensor_overlap": (0.0, 0.9),
    "async_tensor_overlap": (0.0, 0.95),
    "expert_overlap": (0.0, 0.9),
    "send_exposed": (0.0, 1.5),
    "jitter": (0.0, 0.1),
}
"""What is physically possible. Efficiencies above 1 only where "best" is a product that others have measured."""


START: Mapping[str, float] = {
    "gemm_efficiency": 0.9,
    "expert_gemm_efficiency": 0.5,
    "expert_hbm_efficiency": 0.5,
    "attention_efficiency": 0.5,
    "hopper_attention": 0.7,
    "hbm_efficiency": 0.7,
    "score_efficiency": 0.5,
    "cast_efficiency": 0.7,
    "optimizer_efficiency": 0.7,
    "nvlink_efficiency": 0.8,
    "network_efficiency": 0.5,
    "data_network": 1.0,
    "tensor_gather_us": 10.0,
    "ring_step_us": 5.0,
    "launch_us": 500.0,
    "call_us": 20.0,
    "wide_call_us": 300.0,
    "far_loss": 0.3,
    "call_launch_us": 30.0,
    "crowded_call_us": 100.0,
    "send_us": 20.0,
    "micro_batch_ms": 0.5,
    "step_ms": 5.0,
    "step_latency_ms": 2.0,
    "gradient_overlap": 0.5,
    "parameter_overlap": 0.5,
    "tensor_overlap": 0.3,
    "async_tensor_overlap": 0.5,
    "expert_overlap": 0.3,
    "send_exposed": 0.5,
    "jitter": 0.005,
    "kept_hidden": 4.0,
    "kept_beside": 1.0,
    "kept_gathered": 1.0,
    "framework_gib": 1.0,
}
"""Where every fit of every framework starts: round numbers, so that no fit begins at what other rows have taught."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How the profile of a framework is fitted."""

    profile: str
    sources: tuple[str, ...]
    """Fitted together, each with the same weight."""
    time: tuple[str, ...]
    memory: tuple[str, ...] = ()
    cap: float = float("inf")
    """A row counts for no more than this log ratio: tables with runs that other causes slowed down."""
    regular: bool = False
    """Fitted without rows that `planner/irregular.py` finds; judged with them."""


RECIPES: tuple[Recipe, ...] = (
    Recipe(
        profile="megatron_deepspeed",
        sources=("vtrain_single", "vtrain_multi"),
        time=(
            "gemm_efficiency", "hbm_efficiency", "score_efficiency", "attention_efficiency",
            "launch_us", "call_us", "call_launch_us", "nvlink_efficiency", "network_efficiency", "send_us",
            "micro_batch_ms",
        ),
    ),
    Recipe(
        profile="nanotron",
        sources=("nanotron",),
        time=(
            "gemm_efficiency", "hbm_efficiency", "attention_efficiency", "launch_us", "call_us", "wide_call_us",
            "far_loss", "call_launch_us", "crowded_call_us", "nvlink_efficiency", "network_efficiency",
            "data_network", "tensor_gather_us", "ring_step_us", "gradient_overlap", "step_latency_ms",
        ),
        memory=("kept_beside", "kept_gathered", "framework_gib"),
        cap=0.6,
        regular=True,
    ),
    Recipe(
        profile="llm_foundry",
        sources=("llm_foundry",),
        time=(
            "gemm_efficiency", "hbm_efficiency", "attention_efficiency", "hopper_attention", "cast_efficiency",
            "nvlink_efficiency", "network_efficiency", "gradient_overlap", "parameter_overlap", "micro_batch_ms",
            "step_ms", "step_latency_ms",
        ),
    ),
    Recipe(
        profile="megatron_bridge",
        sources=("bridge",),
        time=(
            "gemm_efficiency", "expert_gemm_efficiency", "expert_hbm_efficiency", "hbm_efficiency",
            "attention_efficiency", "cast_efficiency", "network_efficiency", "tensor_overlap", "expert_overlap",
            "send_exposed", "launch_us",
        ),
    ),
    Recipe(
        profile="torchtitan",
        sources=("torchtitan",),
        time=("gemm_efficiency", "attention_efficiency", "hbm_efficiency", "cast_efficiency", "async_tensor_overlap"),
    ),
    Recipe(
        profile="megatron_2021",
        sources=("korthikanti", "sc21"),
        time=("gemm_efficiency", "score_efficiency", "send_exposed", "network_efficiency"),
    ),
)  # fmt: skip


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
    rounds: int = 2,
    steps: int = 900,
) -> Profile:
    """``profile`` with those numbers fitted."""
    low = np.array([RANGES[name][0] for name in names])
    high = np.array([RANGES[name][1] for name in names])
    logarithmic = low > 0
    log_low, log_high = np.log(np.where(logarithmic, low, 1.0)), np.log(high)

    def values(point: Array) -> Array:
        share = 1.0 / (1.0 + np.exp(-np.clip(point, -30, 30)))
        found = np.where(logarithmic, np.exp(log_low + share * (log_high - log_low)), low + share * (high - low))
        return np.asarray(found, dtype=np.float64)

    def with_values(point: Array) -> Profile:
        numbers: dict[str, Any] = dict(zip(names, map(float, values(point)), strict=True))
        return replace(profile, **numbers)

    wanted = np.log(measured)

    def loss(point: Array) -> float:
        ratio = np.abs(np.log(seconds(demand, with_values(point))) - wanted)
        return float(np.mean(np.minimum(ratio, cap) * weights))

    start = np.clip(np.array([float(getattr(profile, name)) for name in names]), low, high)
    start_log = np.log(np.where(logarithmic, start, 1.0))
    span_log = np.where(logarithmic, log_high - log_low, 1.0)
    share = np.where(logarithmic, (start_log - log_low) / span_log, (start - low) / (high - low))
    share = np.clip(share, 1e-3, 1 - 1e-3)
    point = np.log(share / (1 - share))
    for _ in range(rounds):
        point = simplex(loss, point, steps)
    return with_values(point)


def simplex(loss: Callable[[Array], float], start: Array, steps: int, size: float = 0.6) -> Array:
    """The lowest point that the method of Nelder and Mead finds in so many steps."""
    points = [start, *(start + size * row for row in np.eye(len(start)))]
    values = [loss(point) for point in points]
    for _ in range(steps):
        order = np.argsort(values, kind="stable")
        points, values = [points[i] for i in order], [values[i] for i in order]
        if values[-1] - values[0] < 1e-7:
            break
        middle = np.mean(points[:-1], axis=0)
        away = middle + (middle - points[-1])
        value = loss(away)
        if value < values[0]:
            further = middle + 2 * (middle - points[-1])
            value_further = loss(further)
            points[-1], values[-1] = (further, value_further) if value_further < value else (away, value)
        elif value < values[-2]:
            points[-1], values[-1] = away, value
        else:
            nearer = middle + 0.5 * ((away if value < values[-1] else points[-1]) - middle)
            value_nearer = loss(nearer)
            if value_nearer < min(value, values[-1]):
                points[-1], values[-1] = nearer, value_nearer
            else:
                points = [points[0], *(points[0] + 0.5 * (point - points[0]) for point in points[1:])]
                values = [values[0], *(loss(point) for point in points[1:])]
    return points[int(np.argmin(values))]


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


def left_out(
    runs: Sequence[PublishedRun], groups: Sequence[str], profile: Profile, recipe: Recipe, *, steps: int = 900
) -> LeftOut:
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
            fitted = fit_times(
                fitted, recipe.time, some(demand, timed), times[timed], weights[timed], cap=recipe.cap, steps=steps
            )
        found.seconds[asked] = seconds(some(demand, asked), fitted)
        sized = known & np.isfinite(memory) & trusted
        if recipe.memory and sized.sum() > len(recipe.memory):
            fitted = fit_memory(fitted, recipe.memory, units[sized], memory[sized])
        found.memory_bytes[asked] = units[asked] @ memory_numbers(fitted)
    return found


def _trusted(runs: Sequence[PublishedRun], recipe: Recipe) -> npt.NDArray[np.bool_]:
    """What may be fitted on."""
    unlike = irregular(runs) if recipe.regular else set()
    return np.array([not run.secondary and run.id not in unlike for run in runs])


def neutral(profile: Profile, recipe: Recipe) -> Profile:
    """With every number that is fitted at `START`."""
    numbers: dict[str, Any] = {name: START[name] for name in (*recipe.time, *recipe.memory)}
    return replace(profile, **numbers)


def fit_all(runs: Sequence[PublishedRun], profile: Profile, recipe: Recipe, *, steps: int = 2000) -> Profile:
    """On every run: the profile to ship. Never judged on these."""
    profile = neutral(profile, recipe)
    runs = [run for run, trusted in zip(runs, _trusted(runs, recipe), strict=True) if trusted]
    timed = [run for run in runs if run.step_seconds]
    fitted = fit_times(
        profile, recipe.time, demands(timed, profile), np.array([run.step_seconds for run in timed], dtype=np.float64),
        source_weights(timed), cap=recipe.cap, rounds=3, steps=steps,
    )  # fmt: skip
    sized = [run for run in runs if run.memory_bytes]
    if recipe.memory and len(sized) > len(recipe.memory):
        measured = np.array([run.memory_bytes for run in sized], dtype=np.float64)
        fitted = fit_memory(fitted, recipe.memory, memory_units(sized, profile), measured)
    return fitted


def source_weights(runs: Sequence[PublishedRun]) -> Array:
    """Each source weighs the same, and in it each model; the mean is 1 over rows with a time."""
    keys = [(run.source.key, run.model_name) for run in runs]
    timed = [key for run, key in zip(runs, keys, strict=True) if run.step_seconds]
    count = {key: max(1, timed.count(key)) for key in set(keys)}
    models = {source: len({key for key in set(timed) if key[0] == source}) or 1 for source in {k[0] for k in keys}}
    return np.array([len(timed) / len(models) / models[key[0]] / count[key] for key in keys])
