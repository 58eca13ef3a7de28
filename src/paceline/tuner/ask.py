"""What was asked for on the command line? What can be refused is refused here, before anything is started."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

from paceline.config.check import check, refuse_errors
from paceline.config.load import Recipe, field_names, load_recipe, parse_override, validate
from paceline.config.run import RunConfig
from paceline.errors import ConfigError
from paceline.planner.request import calibrated
from paceline.runtime.launcher import process_info
from paceline.tuner.machine import Machine, find_machine
from paceline.tuner.neutrality import ALLOWABLE, Neutrality, classes_with
from paceline.tuner.objective import Goal, Objective
from paceline.tuner.settings import TUNABLE
from paceline.tuner.space import Space, value_at
from paceline.tuner.tune import Limits

WARM_UP, STEPS = 3, 8
"""Steps of a trial: the first compiles, the next two fill caches; the median of eight is known to half a deviation."""
SHORT_WARM_UP, SHORT_STEPS = 2, 3
LONG_SECONDS = 90.0
"""Of a trial's steps, beyond which the short numbers are taken."""
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One call of `tune`."""

    source: str
    recipe: Recipe
    space: Space
    goal: Goal
    limits: Limits
    folder: Path
    warm_up: int
    steps: int


def make_ask(
    source: str,
    overrides: Sequence[str],
    *,
    ranks: int,
    budget: str,
    objective: str,
    speed: float,
    allow: Sequence[str],
    vary: Sequence[str],
    hold: Sequence[str],
    out: Path | None,
    pause_after: str,
    trials: int,
    steps: int,
    machine: Machine | None = None,
) -> Ask:
    """Reads the recipe, looks at the machine, and checks every word.

    Args:
        machine: in place of this host.

    Raises:
        ConfigError: something is not known, or the recipe may not run on so many ranks.
        LaunchError: there are fewer GPUs.
    """
    info = process_info()
    if info.launcher != "single":
        raise ConfigError(
            f"`paceline tune` under {info.launcher}, which has already started {info.world_size} processes",
            evidence="It starts the processes of every trial itself, on one host.",
            next_step="Start it by hand, once, with --nproc N.",
        )
    limits = Limits(
        budget_seconds=seconds_of("--budget", budget),
        call_seconds=seconds_of("--pause-after", pause_after) if pause_after else math.inf,
        trials=trials,
    )
    goal = Goal(objective=_objective(objective), speed=speed)
    allowed = _allowed(allow)
    recipe = load_recipe(source, overrides)
    base = recipe.config
    refuse_errors(check(base, recipe.registry, ranks))
    wanted = _varied(base, vary)
    if "train.global_batch_size" in wanted and "batch" not in allowed:
        raise ConfigError(
            "--vary train.global_batch_size changes what a step learns from",
            evidence="More sequences a step are fewer updates for as many tokens.",
            next_step="Add --allow batch if that is meant.",
        )
    for key in hold:
        _known(key, "--hold")
    if machine is None:
        profile = calibrated("paceline", base.cluster.calibration)
        machine = find_machine(base, ranks, profile=profile)
    space = Space(
        base=base,
        machine=machine,
        allowed=classes_with(allowed),
        vary=wanted,
        held=frozenset(hold),
    )
    _refuse_nothing(space)
    warm_up, measured = _steps(space, steps)
    return Ask(
        source=source,
        recipe=recipe,
        space=space,
        goal=goal,
        limits=limits,
        folder=out or Path("runs") / f"tune-{base.run.name}",
        warm_up=warm_up,
        steps=measured,
    )


def seconds_of(option: str, text: str) -> float:
    """``20m``, ``90s``, ``1h30m``.

    Raises:
        ConfigError: it is no positive time.
    """
    parts = re.findall(r"(\d+(?:\.\d+)?)\s*([smh])", text)
    whole = "".join(f"{number}{unit}" for number, unit in parts)
    seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    if whole != text.replace(" ", "") or seconds <= 0:
        raise ConfigError(
            f"{option} {text} is no time",
            evidence="A number needs its unit: s, m or h.",
            next_step=f"For example: {option} 20m, or 1h30m.",
        )
    return seconds


def _objective(text: str) -> Objective:
    if text not in get_args(Objective):
        raise ConfigError(
            f"--objective {text} is not known", next_step=f"Take one of {', '.join(get_args(Objective))}."
        )
    return cast(Objective, text)


def _allowed(words: Sequence[str]) -> frozenset[Neutrality]:
    """What may be tried beside that which leaves training as it is."""
    for word in words:
        if word not in ALLOWABLE:
            raise ConfigError(
                f"--allow {word} is not known",
                evidence="What leaves training as it is is allowed anyway; model and optimizer never change.",
                next_step=f"What can be allowed: {', '.join(ALLOWABLE)}.",
            )
    return frozenset(cast(Sequence[Neutrality], words))


def _known(key: str, option: str) -> None:
    if key in TUNABLE:
        return
    near = difflib.get_close_matches(key, sorted(TUNABLE), n=1, cutoff=0.6)
    same = [each for each in sorted(TUNABLE) if each.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
    exists = key in set(field_names(RunConfig))
    raise ConfigError(
        f"{option} {key}: {'trials do not change that setting' if exists else 'there is no such setting'}",
        evidence=f"Trials may change {', '.join(sorted(TUNABLE))}.",
        next_step=f"Did you mean {(same or near)[0]}?" if same or near else "Give one of these.",
    )


def _varied(base: RunConfig, texts: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """``train.micro_batch_size=1,2,4`` as settings with their values; commas inside brackets part nothing."""
    found: dict[str, tuple[Any, ...]] = {}
    for text in texts:
        key, equals, values = (part.strip() for part in text.partition("="))
        if not equals or not values:
            raise ConfigError(
                f"--vary {text} is not of the form SECTION.KEY=A,B",
                next_step="For example: --vary train.micro_batch_size=1,2,4",
            )
        _known(key, "--vary")
        each = [part.strip() for part in re.split(r",(?![^\[]*\])", values)]
        found[key] = (*found.get(key, ()), *(_value(base, key, part) for part in each))
    return found


def _value(base: RunConfig, key: str, text: str) -> Any:
    """As the recipe would read it.

    Raises:
        ConfigError: the field does not take it, or no recipe of this batch can have it.
    """
    section, _, name = key.partition(".")
    value = parse_override(f"{key}={text}")[section][name]
    tables = base.model_dump(mode="json")
    tables[section][name] = value
    return value_at(validate(tables), key)


def _refuse_nothing(space: Space) -> None:
    """What was named must leave something to try."""
    for key, values in space.vary.items():
        before = value_at(space.base, key)
        others = [value for value in values if value != before]
        alone = len(space.vary) == 1
        if others and alone and all(space.point({key: value}) is None for value in others):
            raise ConfigError(
                f"--vary {key}: no recipe with {' or '.join(map(str, others))} may run on {space.machine.ranks} ranks",
                evidence="It does not divide, another rule of recipes refuses it, or it alters what is not allowed to.",
                next_step=f"`paceline train --dry-run --set {key}=...` says which rule.",
            )


def _steps(space: Space, asked: int) -> tuple[int, int]:
    """(warm-up, measured): fewer where the planner says that steps are long."""
    if asked:
        return WARM_UP, asked
    seconds = space.origin.estimate.seconds if space.machine.hardware is not None else 0.0
    if (WARM_UP + STEPS) * seconds > LONG_SECONDS:
        return SHORT_WARM_UP, SHORT_STEPS
    return WARM_UP, STEPS
