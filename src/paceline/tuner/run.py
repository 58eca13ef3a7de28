"""A whole call of `tune`: the folder is taken, trials run, and what came out is written."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from paceline.errors import TrainingError
from paceline.observe.events import write_atomically
from paceline.report import units
from paceline.report.finding import Finding
from paceline.tuner import show
from paceline.tuner.ask import Ask
from paceline.tuner.calibrate import learned
from paceline.tuner.journal import Journal
from paceline.tuner.ladder import Result, result_of
from paceline.tuner.processes import ProcessRunner, Runner, end_left_over
from paceline.tuner.space import Space
from paceline.tuner.tune import Stopped, Tuning, told


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What is told. ``data``: for `--json`."""

    result: Result
    space: Space
    stopped: Stopped
    findings: tuple[Finding, ...]
    data: dict[str, Any]


def run_ask(
    ask: Ask,
    *,
    tell: Callable[[str], None] = lambda text: None,
    runner_of: Callable[[Journal, Ask], Runner] | None = None,
) -> Answer:
    """Runs trials until they end, and writes ``best.toml``, ``result.json`` and ``calibration.toml`` into the folder.

    Args:
        runner_of: what runs trials, in place of processes on this machine.

    Raises:
        TrainingError: the recipe does not run, or nothing near it fits.
        RunFolderError: the folder is another's, or cannot be written.
    """
    journal, machine = Journal(ask.folder), ask.space.machine
    with journal.claim(ask.space.base, device=machine.name, ranks=machine.ranks, warm_up=ask.warm_up, steps=ask.steps):
        _take_up(journal, tell)
        runner = (runner_of or _processes)(journal, ask)
        tuning = Tuning(
            ask.space, ask.goal, journal, runner,
            steps=journal.asked["warm_up"] + journal.asked["steps"], limits=ask.limits, tell=tell,
        )  # fmt: skip
        stopped = tuning.run()
        result = result_of(tuning.search())
        if result is None:
            raise _nothing_ran(ask, journal, stopped)
        return _written(ask, journal, result, stopped)


def _processes(journal: Journal, ask: Ask) -> Runner:
    return ProcessRunner(
        journal=journal,
        ranks=ask.space.machine.ranks,
        warm_up=journal.asked["warm_up"],
        steps=journal.asked["steps"],
    )


def _take_up(journal: Journal, tell: Callable[[str], None]) -> None:
    if journal.trials:
        tell(f"{len(journal.trials)} trials of {units.duration(journal.seconds)} are there, in {journal.folder}")
    if journal.lost:
        tell(f"{journal.lost} lines of trials.jsonl cannot be read: those trials are lost")
    left = journal.left_over
    if left is not None:
        if end_left_over(left):
            tell("a trial of a call that was killed was still running; it is ended")
        journal.end()


def _nothing_ran(ask: Ask, journal: Journal, stopped: Stopped) -> TrainingError:
    if not journal.trials:
        return TrainingError(
            f"no trial was started: one takes longer than there is time ({show.STOPPED[stopped]})",
            evidence=f"--budget is {units.duration(ask.limits.budget_seconds)}"
            + (
                f", --pause-after {units.duration(ask.limits.call_seconds)}."
                if ask.limits.call_seconds < ask.limits.budget_seconds
                else "."
            ),
            next_step="Give more time: the recipe itself has to be measured first.",
        )
    failed = "; ".join(f"trial {trial.number} {told(trial)}" for trial in journal.trials[-3:])
    return TrainingError(
        "neither the recipe nor anything near it that was tried runs on this machine",
        evidence=f"{len(journal.trials)} trials: {failed}.",
        next_step=f"`paceline plan {ask.source} --gpus {ask.space.machine.ranks}` says what would fit; more ranks, or "
        "a smaller model.",
    )


def _written(ask: Ask, journal: Journal, result: Result, stopped: Stopped) -> Answer:
    path = journal.folder / "best.toml"
    write_atomically(path, show.recipe_text(result, ask.space, ask.source))
    found = [*show.findings(result, stopped, str(path))]
    taught = learned(ask.space, journal.trials)
    if taught is not None:
        file = journal.folder / "calibration.toml"
        write_atomically(file, taught.text)
        found.append(
            Finding(
                id="tune.calibration",
                severity="note",
                subject=f"`plan` was {units.percent(taught.before)} off these trials, and is "
                f"{units.percent(taught.after)} off with the numbers they teach",
                evidence="Mean absolute error of the step, of the very trials that the numbers were fitted to.",
                next_step=f"Use them: --calibration {file}, or cluster.calibration in a recipe.",
            )
        )
    data = show.as_dict(result, ask.space, stopped, found, str(path))
    write_atomically(journal.folder / "result.json", json.dumps(data, indent=1, default=str) + "\n")
    return Answer(result=result, space=ask.space, stopped=stopped, findings=tuple(found), data=data)


@contextmanager
def ending_on_signals(tell: Callable[[], None]) -> Iterator[None]:
    """SIGTERM, SIGHUP and Ctrl-C end the call by `SystemExit`, so that no process of a trial is left behind."""
    signals = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    before = {each: signal.getsignal(each) for each in signals}

    def end(number: int, frame: object) -> None:
        for each in signals:  # a second one must not cut off the ending of the trial
            signal.signal(each, signal.SIG_IGN)
        tell()
        sys.exit(128 + number)

    try:
        for each in signals:
            signal.signal(each, end)
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
