"""How is the result told? Tables and findings, plain data for programs, and the recipe. `page` draws them."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from paceline.config.load import dump_recipe
from paceline.config.run import RunConfig
from paceline.report import units
from paceline.report.finding import Finding, findings_dict
from paceline.report.table import Table, table
from paceline.tuner.advice import changes_in
from paceline.tuner.ladder import Change, Result, Rung
from paceline.tuner.neutrality import SAID
from paceline.tuner.noise import SURE
from paceline.tuner.space import Space, value_at
from paceline.tuner.trial import Changes, Trial
from paceline.tuner.tune import SAID as STOPPED
from paceline.tuner.tune import Stopped, settings_text, told, value_text

NOISY = 0.03
"""Standard deviation of repeats from which on a machine is called noisy."""
_SHOWN_FINDINGS = ("error", "warning")


def tables(result: Result, space: Space) -> tuple[Table, ...]:
    found = [_outcome_table(result, space), _ladder_table(result, space)]
    if result.others:
        found.append(_others_table(result))
    return tuple(found)


def _speed(space: Space, seconds: float) -> str:
    return units.rate(tokens_per_second(space, seconds), "tokens")


def tokens_per_second(space: Space, even_seconds: float) -> float:
    """A device. ``even_seconds``: for as many sequences as a step of the base has."""
    train = space.base.train
    return train.global_batch_size * train.seq_len / even_seconds / space.machine.ranks


def _value(result: Result, space: Space, value: float) -> str:
    return _speed(space, value) if result.goal.objective == "tokens" else units.gib(value)


def _outcome_table(result: Result, space: Space) -> Table:
    rows = [("device", space.machine.text, "")]
    if result.base is None:
        why = "does not fit" if any(not trial.changes for trial in result.trials) else "its trial is lost"
        rows.append(("the recipe as it is", why, "so there is no gain to tell"))
    else:
        rows.append(("the recipe as it is", *_told(result, space, result.base)))
    if result.best is not result.base:
        rows.append(("the best recipe", *_told(result, space, result.best)))
    rows.append(("gain", _gain_text(result), _basis(result)))
    if result.changes:
        rows.append(("numbers", SAID[result.neutrality], "of all changes together; each is in the ladder"))
    failed = sum(not trial.is_good for trial in result.trials)
    count = f"{len(result.trials)}" + (f", {failed} of them failed or were rejected" if failed else "")
    rows.append(("trials", count, f"{units.duration(result.seconds)} in all"))
    return table(("", "", ""), rows, title="Result")


def _told(result: Result, space: Space, trial: Trial) -> tuple[str, str]:
    seconds = [one.step_seconds for one in _same(result, trial)]
    mean = sum(seconds) / len(seconds)
    runs = f", mean of {len(seconds)} trials" if len(seconds) > 1 else ", one trial"
    speed = _speed(space, mean / trial.batch_ratio)
    return f"{speed} a device", f"{units.duration(mean)} a step{runs}; {units.gib(trial.peak_bytes)}"


def _gain_text(result: Result) -> str:
    if result.gain is None:
        return "none" if result.base is not None else "not known"
    return f"{result.gain.times:.3g}x {'faster' if result.goal.objective == 'tokens' else 'less memory'}"


def _basis(result: Result) -> str:
    if result.goal.objective == "memory":
        return f"peak memory, among recipes of at least {result.goal.speed:.0%} of the speed"
    known = "repeats differ by" if result.repeated else "not repeated: within trials, steps differ by"
    return f"{known} {units.percent(result.noise)} (one standard deviation)"


def _ladder_table(result: Result, space: Space) -> Table:
    rows: list[tuple[str, ...]] = []
    if result.base is not None and result.base_value is not None:
        rows.append(("0", "the recipe as it is", "", _value(result, space, result.base_value), "", "", ""))
    for number, rung in enumerate(result.rungs, start=1):
        for place, change in enumerate(rung.changes or (None,)):
            what = _change_text(change) if change is not None else "-"
            numbers = SAID[change.neutrality] if change is not None else ""
            if place:
                rows.append(("", what, numbers, "", "", "", ""))
                continue
            value = _mean(result, rung.trial)
            expected = "-" if rung.expected is None else f"{rung.expected:.3g}x"
            rows.append(
                (str(number), what, numbers, _value(result, space, value), expected, f"{rung.obtained:.3g}x",
                 rung.trial.why)
            )  # fmt: skip
    return table(
        ("", "change", "numbers", f">{result.goal.what}", ">expected", ">obtained", "why"),
        rows,
        title="Ladder",
        notes=(
            "Each against the step above; changes of one step were measured together. Numbers: against the recipe as "
            "it is, by kind of change, and the trial's loss and gradient norm agree with that.",
            "Speeds and bytes: means over all trials of a recipe. Expected: the step above by that mean, with repeats "
            "that came later, over what was foreseen before the trial.",
        ),
    )


def _change_text(change: Change) -> str:
    return f"{change.key} = {value_text(change.after)} (was {value_text(change.before)})"


def _others_table(result: Result) -> Table:
    rows = [
        (str(trial.number), "; ".join(map(_change_text, changes)) or "the recipe as it is", _came_of(result, trial))
        for trial, changes in result.others
    ]
    return table((">trial", "change from the best before it", "what came of it"), rows, title="Tried, and not taken")


def _came_of(result: Result, trial: Trial) -> str:
    """What was measured of it, and why that is not enough where it is better than the best before it."""
    rungs = [*([result.base] if result.base is not None else []), *(rung.trial for rung in result.rungs)]
    before = [rung for rung in rungs if rung.number < trial.number]
    if not trial.is_good or not before:
        return told(trial)
    times = _mean(result, before[-1]) / _mean(result, trial)
    if times <= 1:
        return told(trial)
    better = f"{units.percent(times - 1)} {'faster' if result.goal.objective == 'tokens' else 'less memory'}"
    least = SURE * result.noise * math.sqrt(1 / len(_same(result, before[-1])) + 1 / len(_same(result, trial)))
    if times - 1 <= least:
        return f"{told(trial)}; {better}, but within noise ({units.percent(least)})"
    return f"{told(trial)}; {better} than that, but repeats did not confirm it, or another recipe is as good"


def _mean(result: Result, trial: Trial) -> float:
    values = [result.goal.value(one) for one in _same(result, trial)]
    return sum(values) / len(values)


# ---- findings


def findings(result: Result, stopped: Stopped, recipe: str) -> list[Finding]:
    """What there is to say beside the numbers, the result first.

    Args:
        recipe: path of the written recipe.
    """
    return [*_outcome(result, stopped, recipe), *_noise(result), *_failures(result), *_of_best(result)]


def _outcome(result: Result, stopped: Stopped, recipe: str) -> Iterator[Finding]:
    sets = " ".join(f"--set {shlex.quote(item)}" for item in settings_text(result.best.changes).split())
    over = STOPPED[stopped]
    if result.base is None and all(trial.changes for trial in result.trials):
        yield Finding(
            id="tune.base-lost",
            severity="warning",
            subject="the line of the journal that told of the recipe as it is is lost, so no gain can be told",
            evidence=f"{len(result.trials)} trials of other recipes are there. The best: {told(result.best)}.",
            next_step="Give the same command more --budget or --trials: the recipe is measured again.",
        )
    elif result.base is None:
        yield Finding(
            id="tune.base-does-not-fit",
            severity="warning",
            subject="the recipe as it is does not fit this machine, and another one does",
            evidence=f"{told(result.trials[0])}. The best of those that run: {told(result.best)}.",
            next_step=f"Use {recipe}, or {sets}.",
        )
    elif result.gain is not None:
        unsure = "" if result.repeated else " It is of single trials: the time did not last for repeats."
        yield Finding(
            id="tune.gain",
            severity="note",
            subject=f"{len(result.changes)} change{'s' * (len(result.changes) > 1)} of settings: {_gain_text(result)}",
            evidence=f"Measured; to count it had to be more than {units.percent(result.gain.least)}, two standard "
            f"deviations of this comparison, one trial has {units.percent(result.noise)}.{unsure} Search: {over}.",
            next_step=f"Use {recipe}, or {sets}.",
            gain=_gain_text(result),
        )
    else:
        yield Finding(
            id="tune.no-gain",
            severity="note",
            subject="nothing that was tried is better than the recipe as it is, beyond noise",
            evidence=f"{len(result.trials)} trials; {_basis(result)}. Search: {over}.",
            next_step="Keep it. `paceline explain` says where its step goes."
            if stopped == "done"
            else "Give it more time.",
        )


def _noise(result: Result) -> Iterator[Finding]:
    if result.noise <= NOISY:
        return
    yield Finding(
        id="tune.noisy-machine",
        severity="warning",
        subject=f"steps differ by {units.percent(result.noise)} where nothing was changed, so small gains are not seen",
        evidence=f"One standard deviation, of {'repeats' if result.repeated else 'steps within trials'}; below "
        f"{units.percent(NOISY)} is usual where nothing else is at work.",
        next_step="End other programs on this machine and tune in a new folder (--out DIR); `paceline doctor` looks at "
        "clocks and neighbours.",
    )


def _failures(result: Result) -> Iterator[Finding]:
    for key, value in result.culprits:
        failed = [one for one in result.trials if one.outcome not in ("measured", "memory")]
        blamed = [one for one in failed if one.changes.get(key) == value]
        trial = min(blamed, key=lambda one: len(one.changes))
        yield Finding(
            id="tune.fails-here",
            severity="warning",
            subject=f"{key} = {value_text(value)} does not work here",
            evidence=f"Trial {trial.number}: {told(trial)}. By elimination: other trials clear its other changes.",
            next_step=f"Leave it at {value_text(_before(result, key))}.",
        )


def _before(result: Result, key: str) -> Any:
    change = result.changes.get(key)
    section_name, _, name = key.partition(".")
    return change.before if change is not None else getattr(getattr(result.config, section_name), name)


def _of_best(result: Result) -> Iterator[Finding]:
    """What `explain` says of the best trial, but for what its recipe does already."""
    for found in result.best.ended.findings:
        if found["severity"] in _SHOWN_FINDINGS and not _in_force(result, changes_in(str(found["next_step"]))):
            yield Finding(
                id=found["id"],
                severity="note" if found["severity"] == "note" else "warning",
                subject=f"in the best trial, {found['subject']}",
                evidence=found["evidence"],
                next_step=found["next_step"],
                gain=found["gain"],
            )


def _in_force(result: Result, changes: Changes) -> bool:
    return bool(changes) and all(value_at(result.config, key) == value for key, value in changes.items())


# ---- data, recipe


def as_dict(result: Result, space: Space, stopped: Stopped, found: Sequence[Finding], recipe: str) -> dict[str, Any]:
    """What `--json` prints."""
    return findings_dict(
        found,
        stopped=stopped,
        device=space.machine.text,
        objective=result.goal.objective,
        recipe=recipe,
        changes={key: change.after for key, change in result.changes.items()},
        neutrality=result.neutrality,
        gain=None if result.gain is None else result.gain.times,
        noise=result.noise,
        repeated=result.repeated,
        base=None if result.base is None else _numbers(result, space, result.base),
        best=_numbers(result, space, result.best),
        ladder=[_rung_data(rung) for rung in result.rungs],
        trials=[_trial_data(trial) for trial in result.trials],
        trial_seconds=result.seconds,
    )


def _same(result: Result, trial: Trial) -> list[Trial]:
    return [one for one in result.trials if one.is_good and one.changes == trial.changes]


def _numbers(result: Result, space: Space, trial: Trial) -> dict[str, Any]:
    seconds = [one.step_seconds for one in _same(result, trial)]
    mean = sum(seconds) / len(seconds)
    return {
        "step_seconds": mean,
        "step_seconds_of_trials": seconds,
        "tokens_per_second_per_gpu": tokens_per_second(space, mean / trial.batch_ratio),
        "peak_memory_gib": trial.peak_bytes / 2**30,
    }


def _rung_data(rung: Rung) -> dict[str, Any]:
    return {
        "trial": rung.trial.number,
        "changes": [
            {"key": one.key, "before": one.before, "after": one.after, "neutrality": one.neutrality}
            for one in rung.changes
        ],
        "why": rung.trial.why,
        "expected": rung.expected,
        "obtained": rung.obtained,
    }


def _trial_data(trial: Trial) -> dict[str, Any]:
    measured = trial.ended.measured
    return {
        "number": trial.number,
        "changes": dict(trial.changes),
        "outcome": trial.outcome,
        "reason": trial.rejected or trial.ended.reason,
        "step_seconds": None if measured is None else measured.step_seconds,
        "peak_memory_gib": None if measured is None else measured.peak_bytes / 2**30,
        "expected_step_seconds": trial.expected,
        "seconds": trial.ended.seconds,
    }


def recipe_text(result: Result, space: Space, source: str) -> str:
    """The best recipe as TOML, with what was changed and measured on top."""
    lines = [f"# {source}, tuned by `paceline tune` on {space.machine.text}.", "#"]
    if not result.changes:
        lines.append("# Nothing that was tried is better, beyond noise: this is the recipe as it was.")
    for change in result.changes.values():
        lines.append(f"#   {_change_text(change)}: {SAID[change.neutrality]}")
    if result.gain is not None:
        lines += ["#", f"# Measured: {_gain_text(result)}; {_basis(result)}."]
    return "\n".join(lines) + "\n\n" + dump_recipe(_named(result))


def _named(result: Result) -> RunConfig:
    """The recipe under a name of its own where it is another one, so that the two do not share a run folder."""
    config = result.config
    if not result.changes:
        return config
    named = {key: f"{value}-tuned" for key in ("name", "dir") if (value := getattr(config.run, key))}
    return config.model_copy(update={"run": config.run.model_copy(update=named)})
