"""What does a run folder tell, whether the run is at work, over, or dead? Reads all of it, whole or not.

Ranks are joined on the step; of a run that was started again on other ranks, the newest start tells which there are.
Where a line covers several steps, its sums are divided by them, so every number is of one
step; levels stay levels. What cannot be read is named in ``problems`` and left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.config.load import load_recipe, read_tables
from paceline.config.observe import ObserveConfig
from paceline.config.run import RunConfig
from paceline.errors import ConfigError, PacelineError
from paceline.observe.capture_request import TRACES, first_step, read_request
from paceline.observe.events import StepRecord, read_events, read_metrics
from paceline.observe.telemetry.columns import BLOCKED, COLUMNS, SUMMED, UNKNOWN, WAITS
from paceline.observe.telemetry.record import FOLDER, RankRecord, ranks_of, read_rank

Numbers = NDArray[np.float64]

_BUDGET = 1 << 30
"""Bytes of numbers that are kept; with thousands of ranks the newest steps are."""
_READ_BUDGET = 6 << 30
"""Bytes of text that are read, over all ranks."""
_WARM_UP = 3
"""Steps that may be slower for good reasons: compilation, first allocations, caches."""


@dataclass(frozen=True, kw_only=True)
class RunView:
    """A run. ``table``: float32 [columns, ranks, steps], nan where unknown."""

    path: Path
    config: RunConfig | None
    recipe: Mapping[str, Any]
    """Flat: ``"train.seq_len"`` -> value. Empty where the recipe is not valid here."""
    written: Mapping[str, Any]
    """The same as it stands in the file, checked or not. Empty where the file cannot be read."""
    metrics: tuple[StepRecord, ...]
    events: tuple[Mapping[str, Any], ...]
    facts: tuple[Mapping[str, Any], ...]
    """By position in ``ranks``."""
    ranks: tuple[int, ...]
    steps: NDArray[np.int64]
    table: NDArray[np.float32]
    newest: float
    """Unix time of the newest line of any rank, 0 without one."""
    captured: frozenset[int] = frozenset()
    """Steps that a profiler slowed, and those in which their traces were written."""
    problems: tuple[str, ...] = field(default=())

    @cached_property
    def settled(self) -> NDArray[np.bool_]:
        """[steps] whether a step tells of the run's usual speed: the first ones of each start and captured ones do
        not."""
        starts = {0, *(int(event["step"]) for event in self.events if event.get("event") in ("start", "resume"))}
        early = np.zeros(len(self.steps), dtype=bool)
        wait = min(_WARM_UP, max(1, len(self.steps) // 4)) if len(self.steps) > 1 else 0
        for start in starts:
            early |= (self.steps > start) & (self.steps <= start + wait)
        slowed = np.isin(self.steps, list(self.captured))
        kept = [~(early | slowed), ~early]
        return next((each for each in kept if each.any()), np.ones_like(early))

    def column(self, name: str) -> Numbers:
        """[ranks, settled steps]"""
        return self.table[COLUMNS.index(name)][:, self.settled].astype(np.float64)

    def knows(self, name: str) -> bool:
        return bool(len(self.ranks)) and not np.isnan(self.table[COLUMNS.index(name)]).all()

    @property
    def shown_steps(self) -> NDArray[np.int64]:
        return self.steps[self.settled]

    @property
    def on_gpu(self) -> bool:
        return bool(self.facts) and self.facts[0].get("device") == "cuda"

    @property
    def world_size(self) -> int:
        return int(self.facts[0].get("world_size", len(self.ranks))) if self.facts else 0

    @property
    def missing_ranks(self) -> list[int]:
        """Ranks of the world that left no record."""
        return sorted(set(range(self.world_size)) - set(self.ranks))

    def fact(self, name: str, default: Any = None) -> Any:
        return self.facts[0].get(name, default) if self.facts else default

    @property
    def started(self) -> float:
        """Unix time of the newest start or resume, 0 where none is told."""
        starts = [event for event in self.events if event.get("event") in ("start", "resume")]
        return float(starts[-1].get("time", 0.0)) if starts else 0.0

    @property
    def end(self) -> str:
        """``end``, ``stop``, ``error``, or ``""`` where the run is at work or was killed."""
        last = self.events[-1].get("event", "") if self.events else ""
        return last if last in ("end", "stop", "error") else ""


def is_run_folder(path: Path) -> bool:
    return path.is_dir() and any((path / name).exists() for name in ("recipe.toml", "metrics.jsonl", FOLDER))


def read_run(path: Path) -> RunView:
    """Reads what is there.

    Raises:
        ConfigError: nothing of a run is there.
    """
    if not is_run_folder(path):
        raise ConfigError(
            f"{path} is no run folder: it has no recipe.toml, no metrics.jsonl and no {FOLDER}/",
            next_step="Give the folder that `paceline train` wrote (run.dir), a trace, or a log.",
        )
    problems: list[str] = []
    config = _config(path, problems)
    metrics = _lines(path, "metrics.jsonl", problems)
    events = _events(path, problems)
    records = _of_newest_start(_records(path, problems), events)
    steps, table = _join(records)
    view = RunView(
        path=path,
        config=config,
        recipe={} if config is None else flat(config.model_dump(mode="json")),
        written=_written(path),
        metrics=tuple(metrics),
        events=tuple(events),
        facts=tuple(record.facts for record in records),
        ranks=tuple(record.rank for record in records),
        steps=steps,
        table=table,
        newest=max((float(record.values[:, _TIME_COLUMN].max()) / 1e3 for record in records), default=0.0),
        captured=_captured(path, config),
        problems=(),
    )
    if view.missing_ranks:
        shown = ", ".join(map(str, view.missing_ranks[:8])) + (" ..." if len(view.missing_ranks) > 8 else "")
        problems.append(f"{len(view.missing_ranks)} of {view.world_size} ranks left no record: {shown}")
    object.__setattr__(view, "problems", tuple(problems))
    return view


def _captured(path: Path, config: RunConfig | None) -> frozenset[int]:
    """Of every trace in the folder. How long a capture was, the request or the recipe that asked for it says."""
    asked = read_request(path)
    usual = ObserveConfig().capture_steps if config is None else config.observe.capture_steps
    found: set[int] = set()
    for first in {first_step(trace) for trace in (path / FOLDER).glob(TRACES)}:
        length = asked.steps if asked is not None and asked.at == first else usual
        # traces are written when the last step is over: their time is the next one's
        found |= set(range(first, first + length + 1))
    return frozenset(found)


def flat(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys."""
    found: dict[str, Any] = {}
    for key, value in section.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


def _config(path: Path, problems: list[str]) -> RunConfig | None:
    try:
        return load_recipe(path / "recipe.toml").config
    except (PacelineError, OSError) as error:
        problems.append(f"recipe.toml: {_first(error)}")
        return None


def _written(path: Path) -> Mapping[str, Any]:
    try:
        return flat(read_tables(path / "recipe.toml"))
    except ConfigError:
        return {}  # `_config` has told why


def _lines(path: Path, name: str, problems: list[str]) -> Sequence[StepRecord]:
    try:
        return read_metrics(path / name)
    except (PacelineError, OSError, KeyError, TypeError) as error:
        problems.append(f"{name}: {_first(error)}")
        return ()


def _events(path: Path, problems: list[str]) -> Sequence[Mapping[str, Any]]:
    try:
        return read_events(path / "events.jsonl")
    except (PacelineError, OSError) as error:
        problems.append(f"events.jsonl: {_first(error)}")
        return ()


def _first(error: Exception) -> str:
    return str(error).split("\n", 1)[0]


def _records(path: Path, problems: list[str]) -> list[RankRecord]:
    records: list[RankRecord] = []
    ranks = ranks_of(path)
    if not ranks:
        problems.append(f"{FOLDER}/: there is no record of steps (observe.record = false, or an older run)")
    most = max(1 << 16, _READ_BUDGET // max(1, len(ranks)) // 8)
    lines = max(16, _BUDGET // (4 * len(COLUMNS) * max(1, len(ranks))))
    for rank in ranks:
        try:
            record = read_rank(path, rank, most_bytes=most)
        except OSError as error:
            problems.append(f"the record of rank {rank}: {error}")
            continue
        if len(record.values):
            records.append(RankRecord(rank=rank, facts=record.facts, values=record.values[-lines:].copy()))
        else:
            problems.append(f"the record of rank {rank} holds no whole line yet")
    return records


def _of_newest_start(records: Sequence[RankRecord], events: Sequence[Mapping[str, Any]]) -> list[RankRecord]:
    """Without ranks that the newest start does not have, and without older lines of the steps that it runs again.

    A start that has no line yet does not count.
    """
    if not records:
        return []
    last = max(records, key=lambda record: int(record.values[:, _TIME_COLUMN].max()))
    newest_ms = int(last.values[:, _TIME_COLUMN].max())
    starts = [event for event in events if event.get("event") in ("start", "resume")]
    began = [event for event in starts if float(event.get("time", 0)) * 1e3 <= newest_ms]
    start = began[-1] if began else {}
    world_size = int(last.facts.get("world_size", 0)) or 1 + max(record.rank for record in records)
    step, time_ms = int(start.get("step", 0)), float(start.get("time", 0)) * 1e3
    kept = []
    for record in records:
        values = record.values
        stale = (values[:, 0] > step) & (values[:, _TIME_COLUMN] < time_ms)
        if record.rank < world_size and not stale.all():
            kept.append(RankRecord(rank=record.rank, facts=record.facts, values=values[~stale]))
    return kept


_SUMMED_COLUMNS = [
    index for index, name in enumerate(COLUMNS) if name in SUMMED and name not in ("steps", "timed_steps")
]
_IN_TIMED_STEPS = np.array([COLUMNS[index] in (*WAITS, *BLOCKED) for index in _SUMMED_COLUMNS])
"""Of `_SUMMED_COLUMNS`: what a GPU tells of some steps alone."""
_TIMED_COLUMN = COLUMNS.index("timed_steps")
_STEPS_COLUMN, _TIME_COLUMN = COLUMNS.index("steps"), COLUMNS.index("time_ms")


_MOST_RANKS = 0.9
"""Share of the ranks at work at which a step of the joined table has to end a line."""


def _join(records: Sequence[RankRecord]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """(steps, [columns, ranks, steps]) over steps that half of all ranks have, and of those at work nearly all.

    A rank whose file is full sooner gathers steps in a line sooner. Until the others do, its lines are means over more
    steps; theirs are then joined to the same.
    """
    if not records:
        return np.zeros(0, dtype=np.int64), np.zeros((len(COLUMNS), 0, 0), dtype=np.float32)
    every, counts = np.unique(np.concatenate([record.values[:, 0] for record in records]), return_counts=True)
    firsts = np.sort([record.values[0, 0] - record.values[0, _STEPS_COLUMN] + 1 for record in records])
    lasts = np.sort([record.values[-1, 0] for record in records])
    at_work = np.searchsorted(firsts, every, side="right") - np.searchsorted(lasts, every, side="left")
    steps = every[(counts * 2 >= len(records)) & (counts >= _MOST_RANKS * at_work)]
    table = np.full((len(COLUMNS), len(records), len(steps)), np.nan, dtype=np.float32)
    if not len(steps):
        return steps, table
    at_first = [record.values[record.values[:, 0] == steps[0], _STEPS_COLUMN] for record in records]
    begin = int(steps[0] - np.concatenate(at_first).max())
    for position, record in enumerate(records):
        place, values = _means(record.values[record.values[:, 0] > begin], steps)
        table[:, position, place] = values.T
    return steps, table


def _means(lines: NDArray[np.int64], steps: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """One rank's lines by place in ``steps``: what is summed over a line's steps as the mean of a step (of those in
    which it was timed), with that of the lines between; nan where unknown.

    Lines after the last step are left out, and a place without a line of its own.
    """
    place = np.searchsorted(steps, lines[:, 0])
    lines, place = lines[place < len(steps)], place[place < len(steps)]
    exact = steps[place] == lines[:, 0]
    unknown = lines == UNKNOWN
    values = lines.astype(np.float32)
    summed = np.where(unknown, 0, lines)[:, _SUMMED_COLUMNS].astype(np.float64)
    weight, known = _steps_behind(lines), ~unknown[:, _SUMMED_COLUMNS]
    if not exact.all():
        begins = np.flatnonzero(np.diff(place, prepend=-1))
        group = np.repeat(np.arange(len(begins)), np.diff(begins, append=len(place)))
        summed, weight = np.add.reduceat(summed, begins)[group], np.add.reduceat(weight, begins)[group]
        known = np.logical_or.reduceat(known, begins)[group]
    values[unknown] = np.nan
    means = summed / np.maximum(weight, 1)
    values[:, _SUMMED_COLUMNS] = np.where(known, means, np.nan)
    return place[exact], values[exact]


def _steps_behind(lines: NDArray[np.int64]) -> NDArray[np.float64]:
    """[lines, summed columns]: of how many steps a line's sum is."""
    steps, timed = lines[:, _STEPS_COLUMN], lines[:, _TIMED_COLUMN]
    timed = np.where(timed == UNKNOWN, steps, timed)
    return np.where(_IN_TIMED_STEPS, timed[:, None], steps[:, None]).astype(np.float64)
