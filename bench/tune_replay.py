"""How many trials would the search have needed? It is run on the table of a sweep in place of a machine.

The machine's answer to a trial is the measured entry of that point, so what counts is what this GPU did. The number is
of trials, the base among them, until the best one measured is within 2 % of the best of the table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tune_jobs import SWEEP, SWEEP_BASE, SWEPT, Job

from paceline.config.load import load_recipe
from paceline.costs.hardware import find_hardware
from paceline.tuner.machine import Machine
from paceline.tuner.neutrality import classes_up_to
from paceline.tuner.objective import Goal
from paceline.tuner.search import Search
from paceline.tuner.space import Key, Space, key_of
from paceline.tuner.trial import Ended, Measurement, Trial

WITHIN = 0.02
GOAL = 8


@dataclass(frozen=True, kw_only=True)
class Replay:
    """``needed``: trials until within 2 %; None where the search ended before. ``path``: best so far, by trial."""

    points: int
    ran_out: int
    best: str
    best_seconds: float
    base_seconds: float
    needed: int | None
    path: tuple[float, ...]
    tried: tuple[str, ...]


def space_of(device: str, sets: Sequence[str] = SWEEP_BASE) -> Space | None:
    """Of the sweep on such a device; None where the planner does not know it."""
    card = find_hardware(device)
    if card is None:
        return None
    return Space(
        base=load_recipe(SWEPT, list(sets)).config,
        machine=Machine(name=device, on_gpu=True, ranks=1, memory_bytes=card.memory_bytes, hardware=card),
        allowed=classes_up_to("chance"),
        vary=SWEEP,
    )


def replay(jobs: Sequence[Job], entries: Mapping[str, Mapping[str, Any]], device: str) -> Replay | None:
    """None while points are missing, or where the device is not known."""
    space = space_of(device)
    table: dict[Key, tuple[Job, Mapping[str, Any]]] = {}
    for job in jobs:
        entry = entries.get(job.key)
        if space is None or entry is None or "failed" in entry:
            return None
        point = space.point(dict(job.changes))
        if point is not None:
            table[point.key] = (job, entry)
    if space is None or not table:
        return None
    times = {key: entry["bench"]["step_seconds"] for key, (_, entry) in table.items() if "bench" in entry}
    best = min(times, key=lambda key: times[key])
    trials: list[Trial] = []
    path: list[float] = []
    needed = None
    while (found := Search(space, Goal(), trials).propose()) is not None:
        trials.append(_trial(len(trials), found.point.changes, table[found.point.key][1]))
        good = [trial.step_seconds for trial in trials if trial.is_good]
        path.append(min(good, default=float("inf")))
        if needed is None and path[-1] <= (1 + WITHIN) * times[best]:
            needed = len(trials)
    return Replay(
        points=len(table),
        ran_out=len(table) - len(times),
        best=table[best][0].name,
        best_seconds=times[best],
        base_seconds=times[key_of({})],
        needed=needed,
        path=tuple(path),
        tried=tuple(table[key_of(trial.changes)][0].name for trial in trials),
    )


def _trial(number: int, changes: Mapping[str, Any], entry: Mapping[str, Any]) -> Trial:
    if "bench" not in entry:
        ended = Ended(seconds=entry["seconds"], failure="memory", reason=entry["ran_out"]["said"])
        return Trial(number=number, changes=changes, outcome="memory", why="", expected=None, ended=ended)
    bench = entry["bench"]
    measured = Measurement(
        seconds_by_step=tuple(bench["seconds_by_step"]),
        peak_bytes=bench["peak_memory_gib"] * 2.0**30,
        logged=tuple(bench["logged"]),
        devices=bench["devices"],
    )
    ended = Ended(seconds=entry["seconds"], measured=measured)
    return Trial(number=number, changes=changes, outcome="measured", why="", expected=None, ended=ended)
