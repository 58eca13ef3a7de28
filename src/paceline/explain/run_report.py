"""What is there to say of one run folder? The numbers of `rules.diagnose`, put into tables, pictures and plain data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from paceline.explain.capture_report import attribution_data, module_table
from paceline.explain.explanation import Explanation, Picture, bars
from paceline.explain.ranks import place_of
from paceline.explain.rules import Diagnosis, diagnose
from paceline.explain.run_folder import RunView, read_run
from paceline.explain.shares import Shares, mean_known
from paceline.explain.waterfall import Waterfall, own_parts
from paceline.observe.telemetry.columns import DIMENSIONS, SUMMED
from paceline.report import chart, units
from paceline.report.table import Table, table

_MOST_RANKS, _MOST_POINTS = 16, 400


def explain_run(path: Path) -> Explanation:
    """A run folder, at work, over or dead.

    Raises:
        ConfigError: it is no run folder.
    """
    return run_explanation(diagnose(read_run(path)))


def run_explanation(found: Diagnosis) -> Explanation:
    view, shares, waterfall = found.view, found.shares, found.waterfall
    tables = [_run_table(view, shares)]
    pictures = []
    if waterfall is not None:
        tables.append(waterfall_table(waterfall))
        pictures += [_waterfall_picture(view, waterfall), _steps_picture(view, shares)]
    if len(view.ranks) > 1 and waterfall is not None:
        tables.append(_ranks_table(view, shares))
        pictures.append(_ranks_picture(view, shares))
    if found.attribution is not None and found.captured is not None:
        tables.append(module_table(found.attribution, f"By module and phase ({found.captured.name})"))
    if waterfall is not None:
        tables.append(_dimensions_table(view))
    return Explanation(
        title=f"Run {view.path.name}",
        tables=tuple(tables),
        findings=found.findings,
        data=run_data(found)
        | {"attribution": [] if found.attribution is None else [attribution_data(found.attribution)]},
        pictures=tuple(pictures),
    )


def run_data(found: Diagnosis) -> dict[str, Any]:
    """Of a run, as plain data."""
    view, waterfall = found.view, found.waterfall
    last = view.metrics[-1] if view.metrics else None
    return {
        "run": str(view.path),
        "end": view.end or "at work or killed",
        "ranks": len(view.ranks),
        "world_size": view.world_size,
        "missing_ranks": view.missing_ranks,
        "steps": [int(view.steps[0]), int(view.steps[-1])] if len(view.steps) else [],
        "step_seconds": None if waterfall is None else waterfall.step_seconds,
        "tokens_per_second_per_gpu": last.tokens_per_second_per_gpu if last else None,
        "mfu": last.mfu if last else None,
        "waterfall": []
        if waterfall is None
        else [
            {
                "name": part.name,
                "seconds": part.seconds,
                "expected_seconds": part.expected,
                "measured": part.measured,
            }
            for part in waterfall.parts
        ],
        "slow_ranks": [
            {"rank": one.rank, "seconds": one.seconds, "share": one.share, "since": one.since, "cause": one.cause}
            for one in (*found.ranks.slow, *found.ranks.pausing)
        ],
        "dimensions": dimensions(view) if waterfall is not None else {},
        "problems": list(view.problems),
    }


def dimensions(view: RunView) -> dict[str, dict[str, float]]:
    """By dimension and column: the mean over ranks and steps; what is unknown is left out."""
    found: dict[str, dict[str, float]] = {}
    for dimension, names in DIMENSIONS.items():
        known = {name: float(mean_known(view.column(name))) for name in names if view.knows(name)}
        if known:
            found[dimension] = {name: round(value, 3) for name, value in known.items() if not np.isnan(value)}
    return found


def _run_table(view: RunView, shares: Shares) -> Table:
    last = view.metrics[-1] if view.metrics else None
    ranks = f"{len(view.ranks)} of {view.world_size}" if view.missing_ranks else str(len(view.ranks))
    rows = [
        ("state", {"end": "over", "stop": "stopped", "error": "failed"}.get(view.end, "at work, or killed"), ""),
        ("device", str(view.fact("device_name", "unknown")), f"{ranks} rank{'s' * (ranks != '1')}"),
    ]
    if len(view.steps):
        rows.append(("steps", f"{view.steps[0]} to {view.steps[-1]}", f"{len(view.shown_steps)} settled"))
        wall = mean_known(shares.wall, axis=0)
        low, high = np.percentile(wall, [5, 95])
        spread = f"5 to 95 %: {units.duration(float(low))} to {units.duration(float(high))}"
        rows.append(("step", units.duration(shares.step_seconds), spread))
    if last is not None:
        rows.append(("speed", units.rate(last.tokens_per_second_per_gpu, "tokens"), "a device, as last logged"))
        if last.mfu is not None:
            rows.append(("MFU", units.percent(last.mfu), f"of {units.tflops(last.peak_tflops or 0)}"))
        rows.append(("memory", f"{last.memory_gib:.2f} GiB", "highest peak of any rank"))
    return table(("run", "", ""), rows, title="Run")


def waterfall_table(waterfall: Waterfall) -> Table:
    """Every part beside what `plan` predicts for it."""
    rows = []
    for part in waterfall.parts:
        apart = "" if part.expected is None else units.apart(part.seconds - part.expected)
        rows.append(
            (
                part.name,
                units.duration(part.seconds) if part.seconds >= 0 else f"-{units.duration(-part.seconds)}",
                units.percent(part.seconds / waterfall.step_seconds),
                "-" if part.expected is None else units.duration(part.expected),
                apart,
                "measured" if part.measured else "split as predicted",
                part.note,
            )
        )
    rows.append(
        (
            "step",
            units.duration(waterfall.step_seconds),
            "100.0 %",
            "-" if waterfall.estimate is None else units.duration(waterfall.estimate.seconds),
            "",
            "",
            "",
        )
    )
    return table(
        ("where a step goes", ">time", ">share", ">plan", ">apart", "how", ""),
        rows,
        title="Waterfall",
        notes=(f"Mean over ranks and settled steps. {waterfall.basis}",),
    )


def _waterfall_picture(view: RunView, waterfall: Waterfall) -> Picture:
    names, values = ["measured"], [{part.name: part.seconds for part in waterfall.parts}]
    if waterfall.estimate is not None:
        names.append("predicted by plan")
        values.append({part.name: part.expected or 0.0 for part in waterfall.parts})
    return bars("Where a step goes", names, values)


def _steps_picture(view: RunView, shares: Shares) -> Picture:
    """A point a step, at most `_MOST_POINTS` of them: the slowest of each stretch, so that no pause is lost."""
    wall = 1e3 * np.nanmax(shares.wall, axis=0)
    stretches = np.array_split(np.arange(len(wall)), min(_MOST_POINTS, len(wall)))
    slowest = [int(part[np.argmax(wall[part])]) for part in stretches if len(part)]
    points = [
        chart.Point(
            x=float(view.shown_steps[index]),
            y=float(wall[index]),
            label=f"step {view.shown_steps[index]}: {wall[index]:.1f} ms",
        )
        for index in slowest
    ]
    svg = chart.scatter(points, x_title="step", y_title="ms", title="Time of each step")
    return Picture(title="Time of each step", svg=svg)


def _ranks_picture(view: RunView, shares: Shares) -> Picture:
    """Own work and waiting of the busiest ranks."""
    order = np.argsort(-np.nan_to_num(mean_known(shares.work, axis=1)))[:_MOST_RANKS]
    parts = own_parts(shares)
    values = [
        {name: float(seconds[position]) for name, seconds in parts.items()}
        | {"waiting": float(mean_known(shares.waits[position]))}
        for position in order
    ]
    names = [f"rank {view.ranks[position]} ({place_of(view, int(position))})" for position in order]
    return bars("What ranks do in a step", names, values)


def _ranks_table(view: RunView, shares: Shares) -> Table:
    work, waits = mean_known(shares.work, axis=1), mean_known(shares.waits, axis=1)
    order = np.argsort(-np.nan_to_num(work))[:_MOST_RANKS]
    rows = []
    parts = own_parts(shares)
    for position in order:
        own = {name: float(seconds[position]) for name, seconds in parts.items()}
        largest = sorted(own.items(), key=lambda item: -item[1])[:3]
        rows.append(
            (
                str(view.ranks[position]),
                place_of(view, int(position)),
                units.duration(float(work[position])),
                units.duration(float(waits[position])),
                ", ".join(f"{name} {units.duration(value)}" for name, value in largest),
            )
        )
    more = f"The {_MOST_RANKS} busiest of {len(view.ranks)}. " if len(view.ranks) > _MOST_RANKS else ""
    return table(
        (">rank", "place", ">own work", ">waiting", "most of its own work"),
        rows,
        title="Ranks",
        notes=(
            f"{more}Wall time of a mean step: own work is the step without collectives, messages and meetings, waiting "
            "is those. Parts are the waterfall's: host holds garbage collection and, on a CPU, waiting for a "
            "processor.",
        ),
    )


_SHOWN = {
    "us": ("ms", 1e-3),
    "pct": ("%", 1.0),
    "mhz": ("MHz", 1.0),
    "w": ("W", 1.0),
    "c": ("C", 1.0),
    "mb": ("MiB", 1.0),
    "kb": ("MB", 1.024e-3),
    "kbs": ("MB/s", 1.024e-3),
}


def _dimensions_table(view: RunView) -> Table:
    rows = []
    for dimension, values in dimensions(view).items():
        first = dimension
        for name, value in values.items():
            stem, _, unit = name.rpartition("_")
            shown, factor = _SHOWN.get(unit, ("", 1.0))
            if not value or (name in SUMMED and value * factor < 0.01):
                continue
            rows.append((first, (stem if shown else name).replace("_", " "), f"{value * factor:.4g} {shown}".strip()))
            first = ""
    return table(
        ("dimension", "", ">mean"),
        rows,
        title="Dimensions",
        notes=(
            "Means over ranks and settled steps; what is 0 or unknown is left out. Phases of the framework are wall "
            "time, with all waits in them; thread queue is waiting for a processor, within the phases. All are "
            "joined on the step: record/rank-*.csv in the run folder, which any spreadsheet opens.",
        ),
    )
