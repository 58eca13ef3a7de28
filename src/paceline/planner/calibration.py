"""What do measured runs say about this cluster? A few numbers of a profile, fitted, in a small TOML file.

    runs = 3
    [paceline]
    gemm_efficiency = 0.91
    framework_gib = 1.2

Every verb of `paceline plan` reads it (``--calibration``, or `cluster.calibration` of a recipe). As many numbers are
fitted as there are different runs to tell them apart, the most important first; the others stay as they are shipped.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import tomli_w

from paceline.config.load import load_recipe
from paceline.costs.hardware import find_hardware
from paceline.costs.profiles import PROFILES, Profile, find_profile
from paceline.costs.step import predict
from paceline.costs.workload import INTERCONNECTS, Cluster, Workload
from paceline.errors import ConfigError, PacelineError
from paceline.observe.events import read_events, read_metrics
from paceline.planner.fit_recipes import RANGES
from paceline.planner.fitting import demands, fit_memory, fit_times, memory_units
from paceline.planner.machines import usual_interconnect
from paceline.planner.published import NotScored, PublishedRun, read_run
from paceline.planner.run_sources import Source
from paceline.planner.run_tables import AT, read_tables

_WARM_UP = 2
"""Lines of metrics that are left out: compilation, first allocations, caches."""

_NEAR_BOUND = 2e-3
"""Share of an end of a range, which a fit nears without reaching it."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was learned."""

    profile: Profile
    numbers: Mapping[str, float]
    before: tuple[float, ...]
    """Relative errors of the step by run, with the shipped numbers."""
    after: tuple[float, ...]
    """The same on the same runs with the fitted ones: how well they can be explained, not how good predictions are."""
    memory_before: tuple[float, ...]
    memory_after: tuple[float, ...]

    @property
    def at_bounds(self) -> tuple[str, ...]:
        """The numbers that ended at an end of their range: the runs ask for more than is physical, or cannot tell."""
        return tuple(name for name, value in self.numbers.items() if _at_end(name, value))


def range_of(name: str) -> tuple[float, float]:
    """Between which values a number of a profile is looked for."""
    return RANGES.get(name, (0.0, float("inf")))


def _at_end(name: str, value: float) -> bool:
    low, high = range_of(name)
    return value <= max(low * (1 + _NEAR_BOUND), _NEAR_BOUND) or value >= high * (1 - _NEAR_BOUND)


def calibrate(runs: Sequence[PublishedRun], profile: Profile) -> Calibration:
    """Fits as many numbers as the runs can tell apart.

    Raises:
        ConfigError: no run has a time.
    """
    timed = [run for run in runs if run.step_seconds]
    if not timed:
        raise ConfigError(
            "none of the runs has a measured step", next_step="Give run folders with ten logged steps or more."
        )
    names = _names(timed)
    measured = np.array([run.step_seconds for run in timed], dtype=np.float64)
    fitted = fit_times(profile, names, demands(timed, profile), measured, np.ones(len(timed)))
    sized = [run for run in runs if run.memory_bytes]
    if sized:
        memory = np.array([run.memory_bytes for run in sized], dtype=np.float64)
        fitted = fit_memory(fitted, ("framework_gib",), memory_units(sized, fitted), memory)
        names = (*names, "framework_gib")
    return Calibration(
        profile=fitted,
        numbers={name: round(float(getattr(fitted, name)), 5) for name in names},
        before=tuple(_errors(timed, profile)),
        after=tuple(_errors(timed, fitted)),
        memory_before=tuple(_memory_errors(sized, profile)),
        memory_after=tuple(_memory_errors(sized, fitted)),
    )


def _names(runs: Sequence[PublishedRun]) -> tuple[str, ...]:
    """The numbers that matter for these runs, as many as there are different workloads, the most important first."""
    work = [run.workload for run in runs]
    wanted = ["gemm_efficiency"]
    if any(one.model.is_moe for one in work):
        wanted.append("expert_gemm_efficiency")
    if any(run.cluster.nodes > 1 for run in runs):
        wanted.append("network_efficiency")
    wanted.append("hbm_efficiency")
    if any(one.tp > 1 for one in work):
        wanted.append("nvlink_efficiency")
    wanted += ["launch_us", "attention_efficiency", "step_ms"]
    return tuple(wanted[: len({(run.workload, run.cluster.gpus) for run in runs})])


def _errors(runs: Sequence[PublishedRun], profile: Profile) -> list[float]:
    return [
        float(predict(run.workload, run.cluster, profile).seconds) / run.step_seconds - 1
        for run in runs
        if run.step_seconds
    ]


def _memory_errors(runs: Sequence[PublishedRun], profile: Profile) -> list[float]:
    return [
        float(predict(run.workload, run.cluster, profile).memory_bytes) / run.memory_bytes - 1
        for run in runs
        if run.memory_bytes
    ]


# ---- runs


def read_measured(paths: Sequence[str], framework: str) -> tuple[list[PublishedRun], list[NotScored]]:
    """Run folders of ours, and CSV files of runs; an id that is in several tables counts once.

    Raises:
        ConfigError: there is no such file or folder.
    """
    tables: list[Path] = []
    found: list[PublishedRun | NotScored] = []
    for path in map(Path, dict.fromkeys(paths)):
        if path.is_dir():
            found.append(read_folder(path))
        elif path.is_file():
            tables.append(path)
        else:
            raise ConfigError(
                f"there is no run folder or table {path}", next_step="Give the folder that holds metrics.jsonl."
            )
    rows, again = read_tables(tables)
    found += [read_run(row, framework) for row in rows]
    runs = [one for one in found if isinstance(one, PublishedRun)]
    skipped = [one for one in found if isinstance(one, NotScored)]
    skipped += [
        NotScored(id=row["id"], source=framework or row["source"][:40], reason="the same row came before", at=row[AT])
        for row in again
    ]
    return runs, skipped


def read_folder(folder: Path) -> PublishedRun | NotScored:
    """A run folder of ours as a measured run, or why it tells nothing."""

    def skip(reason: str) -> NotScored:
        return NotScored(id=str(folder), source="paceline", reason=reason)

    try:
        config = load_recipe(folder / "recipe.toml").config
        records = read_metrics(folder / "metrics.jsonl")[_WARM_UP:]
        start = next(event for event in read_events(folder / "events.jsonl") if event["event"] == "start")
    except (PacelineError, OSError, StopIteration) as problem:
        return skip(str(problem).split("\n", 1)[0] or "it has no start in events.jsonl")
    if not records:
        return skip(f"fewer than {_WARM_UP + 1} lines of metrics")
    device = str(start.get("facts", {}).get("device", ""))
    card = find_hardware(device)
    if start.get("device") != "cuda" or card is None:
        return skip(f"its device, {device or start.get('device')}, is not in the table of hardware")
    gpus, per_node = int(start["world_size"]), config.cluster.gpus_per_node
    return PublishedRun(
        id=str(folder),
        source=Source(key="paceline", title="Paceline", prefix=(), profile="paceline"),
        model_name=config.model.preset or config.run.name,
        workload=Workload.of(config),
        cluster=Cluster(
            gpu=card,
            gpus=gpus,
            gpus_per_node=min(per_node, gpus),
            node_gb_per_s=INTERCONNECTS[usual_interconnect(card)][0],
        ),
        step_seconds=median(record.step_seconds for record in records),
        memory_bytes=max(record.memory_gib for record in records) * 2.0**30,
    )


# ---- the file


_RUNS = "runs"
"""Key of the file: of how many runs it was made."""


def calibration_text(found: Calibration, runs: Sequence[PublishedRun]) -> str:
    """The file, with what it was made of."""
    names = ", ".join(run.id for run in runs[:8]) + (f" and {len(runs) - 8} more" if len(runs) > 8 else "")
    return f"# Made by `paceline plan calibrate` from {len(runs)} runs: {names}.\n" + tomli_w.dumps(
        {_RUNS: len(runs), found.profile.name: dict(found.numbers)}
    )


def read_calibration(path: str | Path) -> dict[str, Profile]:
    """Profiles by name, with the numbers that the file replaces.

    Raises:
        ConfigError: the file is missing, or names something that is no number of a profile.
    """
    tables = _tables(path)
    known = {field.name for field in fields(Profile)} & {*RANGES, "framework_gib", "logit_bytes", "states"}
    found = {}
    for name, numbers in tables.items():
        if name == _RUNS:
            continue
        if name not in {profile.name for profile in PROFILES} or not isinstance(numbers, dict):
            raise ConfigError(
                f"{path}: {name} is no framework",
                evidence=f"There are {', '.join(profile.name for profile in PROFILES)}.",
                next_step="Name its table after one of these.",
            )
        for key, value in numbers.items():
            low, high = range_of(key)
            if key not in known or isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(
                    f"{path}: {name}.{key} = {value!r} is no number of a profile",
                    evidence=f"There are {', '.join(sorted(known))}.",
                    next_step="Leave it out.",
                )
            if not low <= value <= high:
                raise ConfigError(
                    f"{path}: {name}.{key} = {value} is not between {low:g} and {high:g}",
                    next_step="Measure again; nothing physical lies outside.",
                )
        found[name] = replace(find_profile(name), **numbers)
    return found


def _tables(path: str | Path) -> dict[str, Any]:
    """The file as it is written.

    Raises:
        ConfigError: the file is missing, or no TOML.
    """
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"there is no calibration {path}", evidence=str(error), next_step="paceline plan calibrate makes one."
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML", evidence=str(error), next_step="Make it again.") from error


def calibration_note(path: str | Path, framework: str) -> str:
    """What the file changes about a framework's predictions, as a sentence.

    Raises:
        ConfigError: as `read_calibration`.
    """
    profiles, tables = read_calibration(path), _tables(path)
    if framework not in profiles:
        others = " and ".join(f"[{name}]" for name in profiles) or "nothing"
        return f"Calibration: {path} changes nothing here: it has {others}, and this is predicted by [{framework}]."
    count = tables.get(_RUNS)
    made = f", of {count} run{'s' * (count != 1)}" if isinstance(count, int) else ""
    numbers = ", ".join(f"{name} {value:.4g}" for name, value in tables[framework].items())
    return f"Calibration: {path}{made}: {numbers}."
