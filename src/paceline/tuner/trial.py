"""One trial: what was changed, why, what was expected, and what came of it. Plain data, one line of JSON."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from paceline.tuner.failure import Failure
from paceline.tuner.settings import TUNABLE

Outcome = Literal["measured", "rejected", "memory", "refused", "timeout", "crash"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
"""`rejected`: it ran, and its loss is not the base's within what its changes may do to numbers."""

Changes = Mapping[str, Any]
"""Values by dotted key, where they differ from the base recipe."""


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What a trial that ran to its end has measured."""

    seconds_by_step: tuple[float, ...]
    peak_bytes: float
    """Of the fullest rank."""
    logged: tuple[Mapping[str, float | None], ...]
    """Loss and gradient norm of logged steps."""
    devices: str
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def step_seconds(self) -> float:
        """The median."""
        return statistics.median(self.seconds_by_step)

    @property
    def spread(self) -> float:
        """Standard error of the median, as a share of it: 1.25 standard deviations over the root of the count, the
        deviation from the median of absolute deviations, which one slow step does not move."""
        middle, count = self.step_seconds, len(self.seconds_by_step)
        if count < 3:
            return 0.01
        deviation = 1.4826 * statistics.median(abs(value - middle) for value in self.seconds_by_step)
        return 1.25 * deviation / math.sqrt(count) / middle


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How the processes of a trial ended. Exactly one of ``measured`` and ``failure``."""

    seconds: float
    """From start to end."""
    measured: Measurement | None = None
    failure: Failure | None = None
    reason: str = ""
    findings: tuple[Mapping[str, Any], ...] = ()
    """What `explain` says of it."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A line of the journal."""

    number: int
    changes: Changes
    outcome: Outcome
    why: str
    """Why it was tried, in a sentence."""
    expected: float | None
    """Seconds of a step, as expected before it ran; None where nothing could be expected."""
    expected_bytes: float | None = None
    """The same of its peak memory."""
    ended: Ended
    rejected: str = ""
    """Why its numbers are not those of the base."""
    batch_ratio: float = 1.0
    """Sequences of a step, over those of the base."""

    @property
    def is_good(self) -> bool:
        return self.outcome == "measured"

    @property
    def step_seconds(self) -> float:
        """Raises AssertionError for one that did not run to its end."""
        assert self.ended.measured is not None
        return self.ended.measured.step_seconds

    @property
    def even_seconds(self) -> float:
        """Seconds for as many sequences as a step of the base has: what trials are compared by."""
        return self.step_seconds / self.batch_ratio

    @property
    def peak_bytes(self) -> float:
        assert self.ended.measured is not None
        return self.ended.measured.peak_bytes

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def trial_of(line: Mapping[str, Any]) -> Trial:
    """From a line of the journal.

    Raises:
        LookupError, TypeError, ValueError: it is none.
    """
    ended, measured = dict(line["ended"]), line["ended"].get("measured")
    if line["outcome"] not in OUTCOMES:
        raise ValueError(f"outcome {line['outcome']!r}")
    if (measured is None) is (line["outcome"] in ("measured", "rejected")):
        raise ValueError(f"outcome {line['outcome']!r} {'without' if measured is None else 'with'} figures")
    for key in line["changes"]:
        if key not in TUNABLE:
            raise ValueError(f"changes {key!r}")
    return Trial(
        number=int(line["number"]),
        changes={key: _frozen(value) for key, value in line["changes"].items()},
        outcome=line["outcome"],
        why=line["why"],
        expected=line["expected"],
        expected_bytes=line.get("expected_bytes"),
        rejected=line.get("rejected", ""),
        batch_ratio=float(line.get("batch_ratio", 1.0)),
        ended=Ended(
            seconds=float(ended["seconds"]),
            measured=None if measured is None else measurement_of(measured),
            failure=ended["failure"],
            reason=ended["reason"],
            findings=tuple(ended["findings"]),
        ),
    )


def measurement_of(line: Mapping[str, Any]) -> Measurement:
    seconds, size = tuple(map(float, line["seconds_by_step"])), float(line["peak_bytes"])
    if not seconds or not all(0 < value < math.inf for value in (*seconds, size)):
        raise ValueError("a time or size is no positive number")
    return Measurement(
        seconds_by_step=seconds,
        peak_bytes=float(line["peak_bytes"]),
        logged=tuple(line["logged"]),
        devices=line["devices"],
        versions=line["versions"],
    )


def _frozen(value: Any) -> Any:
    """Lists of JSON as the tuples of a recipe."""
    return tuple(value) if isinstance(value, list) else value
