"""What does `explain` say of a trial, and which of it is a change that a trial can make?

Every trial keeps the record that every run keeps. Its findings have their price and the ``--set`` that acts on them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.config.load import parse_override
from paceline.errors import PacelineError
from paceline.explain.rules import diagnose
from paceline.explain.run_folder import read_run
from paceline.tuner.search import Advice
from paceline.tuner.settings import TUNABLE
from paceline.tuner.space import Space
from paceline.tuner.trial import Changes, Trial

_SET = re.compile(r"--set (?:'([a-z_.0-9]+=[^']+)'|([a-z_.0-9]+=(?:'[^']*'|[^\s,;]+)))")
_GAIN = re.compile(r"([\d.]+) % of the step")
_MOST = 0.5
"""Of a step, that a finding is believed to give back."""
_DOUBT = 0.7
"""Of the logarithm of what a finding promises: its standard deviation."""
_LEAST_DOUBT = 0.06


def findings_of(folder: Path) -> tuple[Mapping[str, Any], ...]:
    """Of a trial's run folder; nothing where there is no record of a settled step."""
    try:
        return tuple(finding.as_dict() for finding in diagnose(read_run(folder)).findings)
    except (PacelineError, OSError):
        return ()


def changes_in(next_step: str) -> Changes:
    """The first ``--set`` of a finding, where a trial may change that; several in a row are made together."""
    found: dict[str, Any] = {}
    for quoted, plain in _SET.findall(next_step):
        text = quoted or plain.rstrip(".:")
        try:
            ((section, values),) = parse_override(text.replace("'", "")).items()
            ((name, value),) = values.items()
        except (PacelineError, ValueError, AttributeError):
            continue
        key = f"{section}.{name}"
        if key in TUNABLE and key not in found:
            found[key] = tuple(value) if isinstance(value, list) else value
    return found


def share_in(gain: str | None) -> float | None:
    """Of the step, that a finding says would be gone."""
    found = _GAIN.search(gain or "")
    return min(float(found[1]) / 100, _MOST) if found else None


def advice_of(space: Space, trials: Sequence[Trial]) -> list[Advice]:
    """What the findings of all trials promise; their values become part of the space."""
    return [one for trial in trials if trial.is_good for one in _of_trial(space, trial)]


def _of_trial(space: Space, trial: Trial) -> Iterator[Advice]:
    for finding in trial.ended.findings:
        changes = changes_in(str(finding["next_step"]))
        share = share_in(finding["gain"])
        if not changes or not share:
            continue
        if space.vary and not all(key in space.vary for key in changes):
            continue
        space.advise(changes)
        point = space.point({**trial.changes, **changes})
        if point is None or point.changes == trial.changes:
            continue
        promised = -math.log(1 - share)
        yield Advice(
            point=point,
            log_seconds=math.log(trial.even_seconds) - promised,
            doubt=max(_LEAST_DOUBT, _DOUBT * promised),
        )
