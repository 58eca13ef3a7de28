"""Trials, one after another, until nothing is worth one any more or the time for them is over.

Recorded the moment each ends; the same call goes on where the last one was cut off. The time is of trials alone, over
all calls in a folder. At the end the best recipe and the base are repeated, so that the noise is known.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.errors import TrainingError
from paceline.report import units
from paceline.tuner.advice import advice_of
from paceline.tuner.journal import Journal
from paceline.tuner.neutrality import loss_apart
from paceline.tuner.objective import Goal
from paceline.tuner.processes import Runner
from paceline.tuner.search import Proposal, Search
from paceline.tuner.space import Point, Space, key_of, value_at
from paceline.tuner.trial import Ended, Trial

REPEATS = 2
"""Runs of the base and of the best recipe, at least: without a second one nothing is known of noise."""
START_GPU, START_HOST = 45.0, 10.0
"""Seconds of a trial beside its steps (imports, model, compilation, end), until trials have told."""
_PATIENCE = 3.0
"""Times the expected duration, after which a trial is stopped; and ..."""
_LEAST_LIMIT = 240.0
"""... seconds that each has anyway: the first compilation of a large model is slow."""

_GRACE = 10.0
"""Seconds that a trial may go on after the time of its call."""
_HOPELESS = 0.01
"""Probability of fitting below which the recipe itself is not tried."""

_NOTHING = object()

Stopped = Literal["done", "budget", "pause", "trials"]
SAID = {
    "done": "no other change is expected to bring more than what repeats differ by",
    "budget": "the time for trials is over; a larger --budget goes on from here",
    "pause": "this call's time is over; the same command goes on from here",
    "trials": "the number of trials is reached; a larger --trials goes on from here",
}


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When trials end."""

    budget_seconds: float
    """Of trials, in all calls together."""
    call_seconds: float = math.inf
    """Of this call."""
    trials: int = 200
    """In all calls together."""


@dataclass(frozen=True, kw_only=True)
class _Next:
    point: Point
    why: str
    expected: float | None
    expected_bytes: float | None


class Tuning:
    """The loop. ``tell`` gets a line for each trial that begins, and one for each that has ended."""

    def __init__(
        self,
        space: Space,
        goal: Goal,
        journal: Journal,
        runner: Runner,
        *,
        steps: int,
        limits: Limits,
        tell: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.space, self.goal, self.journal, self.runner = space, goal, journal, runner
        self.steps, self.limits, self.tell, self.clock = steps, limits, tell, clock
        self._began = clock()

    @property
    def trials(self) -> Sequence[Trial]:
        return self.journal.trials

    def search(self) -> Search:
        return Search(self.space, self.goal, self.trials, advice_of(self.space, self.trials))

    def run(self) -> Stopped:
        """Returns why it ended.

        Raises:
            TrainingError: the recipe itself does not run, and not for lack of memory.
            RunFolderError: a trial cannot be written down.
        """
        while True:
            self._refuse_broken_base()
            search = self.search()
            if len(self.trials) >= self.limits.trials:
                return "trials"
            confirming = self._to_confirm(search)
            reserve = sum(self._cost(trial.step_seconds) for trial in confirming)
            proposal = search.propose()
            if proposal is not None and self._fits(self._cost_of(proposal), reserve):
                if not self._try(_of_proposal(proposal)):
                    return "pause"
                continue
            if not confirming:
                return "done" if proposal is None else self._over(self._cost_of(proposal))
            if not self._fits(self._cost(confirming[0].step_seconds), 0.0):
                return self._over(self._cost(confirming[0].step_seconds))
            if not self._try(self._again(confirming[0])):
                return "pause"

    # ---- one trial

    def _try(self, wanted: _Next) -> bool:
        """False where this call's time was over before the trial was: it counts for nothing then."""
        number = len(self.trials) + self.journal.lost
        takes = f"; takes about {units.duration(self._cost(wanted.expected))}"
        self.tell(f"trial {number}: {self._shown(wanted.point)}; {wanted.why}{takes}")
        if not self.trials and (hopeless := self._hopeless(wanted.point)):
            self.journal.append(self._judged(number, wanted, Ended(seconds=0.0, failure="memory", reason=hopeless)))
            self.tell(f"trial {number}: {told(self.trials[-1])}")
            return True
        expected = self._cost(wanted.expected) if wanted.expected else 0.0
        limit = max(_LEAST_LIMIT, _PATIENCE * expected, _PATIENCE * self._start_seconds())
        of_call = max(1.0, self.limits.call_seconds - (self.clock() - self._began) + _GRACE)
        ended = self.runner.run(number, wanted.point.config, limit_seconds=min(limit, of_call))
        if ended.failure == "timeout" and of_call < limit:
            self.tell(f"trial {number}: not over when the time of this call was; it begins anew in the next one")
            return False
        trial = self._judged(number, wanted, ended)
        self.journal.append(trial)
        self.tell(f"trial {number}: {told(trial)}")
        return True

    def _shown(self, point: Point) -> str:
        """What differs from the best so far."""
        best = self.search().incumbent
        before = {} if best is None else best.changes
        back = {key: value_at(self.space.base, key) for key in before if key not in point.changes}
        new = {key: value for key, value in point.changes.items() if before.get(key, _NOTHING) != value}
        if not point.changes:
            return "the recipe as it is"
        return ("best so far, and " if before else "") + (settings_text({**new, **back}) or "nothing else")

    def _hopeless(self, base: Point) -> str:
        """Why the recipe itself is not even started; empty where it may fit."""
        search, room = self.search(), self.space.machine.room_bytes
        if search.fits(base) >= _HOPELESS:
            return ""
        needs = math.exp(float(search.memory.guess([base]).mean[0]))
        return f"not started: predicted to need {units.gib(needs)} of {units.gib(room)}"

    def _judged(self, number: int, wanted: _Next, ended: Ended) -> Trial:
        rejected = "" if ended.measured is None else self._apart(wanted.point, ended)
        outcome = ended.failure or ("rejected" if rejected else "measured")
        return Trial(
            number=number,
            changes=wanted.point.changes,
            outcome=outcome,
            why=wanted.why,
            expected=wanted.expected,
            expected_bytes=wanted.expected_bytes,
            ended=ended,
            rejected=rejected,
            batch_ratio=wanted.point.batch_ratio,
        )

    def _apart(self, point: Point, ended: Ended) -> str:
        """Why its numbers are not the base's; of the first trial, whether they are numbers at all."""
        assert ended.measured is not None
        reference = self._reference()
        if reference is None or reference.ended.measured is None:
            return ""
        before = self.space.point(reference.changes)
        assert before is not None
        return loss_apart(
            before.config, point.config, point.neutrality, reference.ended.measured.logged, ended.measured.logged
        )

    def _reference(self) -> Trial | None:
        """Whose losses others are held to: the base's, or where that did not run, those of the first that did."""
        # a folder may hold trials of a wider search, whose recipes this one does not make
        good = [trial for trial in self.trials if trial.is_good and self.space.point(trial.changes) is not None]
        return next((trial for trial in good if not trial.changes), good[0] if good else None)

    def _refuse_broken_base(self) -> None:
        first = next((trial for trial in self.trials if not trial.changes), None)
        if first is None or first.outcome in ("measured", "memory") or any(trial.is_good for trial in self.trials):
            return
        raise TrainingError(
            "the recipe itself does not run, so there is nothing to tune",
            evidence=f"{told(first)}. The whole log is {self.journal.trial_folder(first.number) / 'log'}.",
            next_step=f"Mend it first (`paceline train` and `paceline doctor` say more), then remove "
            f"{self.journal.folder} or choose another --out.",
        )

    # ---- repeats

    def _to_confirm(self, search: Search) -> list[Trial]:
        """What has to run again before a gain may be told: the best, then the base."""
        best = search.incumbent
        if best is None or (not best.changes and search.base is not None):
            return []
        wanted = [best, *([search.base] if search.base is not None else [])]
        return [trial for trial in wanted if self._count(trial) < REPEATS]

    def _count(self, of: Trial) -> int:
        """Repeats that failed count too: another one would not be the last."""
        return sum(key_of(trial.changes) == key_of(of.changes) for trial in self.trials)

    def _again(self, trial: Trial) -> _Next:
        point = self.space.point(trial.changes)
        assert point is not None
        which = "the best so far" if trial.changes else "this one"
        return _Next(
            point=point,
            why=f"{which} once more, to know how much repeats differ",
            expected=trial.step_seconds,
            expected_bytes=trial.peak_bytes,
        )

    # ---- time

    def _cost_of(self, proposal: Proposal) -> float:
        return self._cost(proposal.expected)

    def _cost(self, step_seconds: float | None) -> float:
        """Seconds of a trial from start to end."""
        return self._start_seconds() + self.steps * (step_seconds or 0.0)

    def _start_seconds(self) -> float:
        """Of a trial beside its steps: the larger ones of those that were seen."""
        seen = [
            max(0.0, trial.ended.seconds - self.steps * trial.step_seconds) for trial in self.trials if trial.is_good
        ]
        if not seen:
            return START_GPU if self.space.machine.on_gpu else START_HOST
        return statistics.median(sorted(seen)[len(seen) // 2 :])

    def _fits(self, seconds: float, reserve: float) -> bool:
        left = self.limits.budget_seconds - self.journal.seconds - reserve
        call = self.limits.call_seconds - (self.clock() - self._began)
        return seconds <= left and seconds <= call

    def _over(self, seconds: float) -> Stopped:
        return "pause" if seconds <= self.limits.budget_seconds - self.journal.seconds else "budget"


def _of_proposal(proposal: Proposal) -> _Next:
    return _Next(
        point=proposal.point, why=proposal.why, expected=proposal.expected, expected_bytes=proposal.expected_bytes
    )


def settings_text(changes: object) -> str:
    """``parallel.tp=2 train.micro_batch_size=4``, as `--set` takes them."""
    assert hasattr(changes, "items")
    return " ".join(f"{key}={value_text(value)}" for key, value in sorted(changes.items()))


def value_text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return "[" + ",".join(f'"{item}"' if isinstance(item, str) else str(item) for item in value) + "]"
    return str(value)


_OUTCOMES = {
    "memory": "ran out of memory",
    "refused": "was refused",
    "timeout": "did not end in time",
    "crash": "failed",
    "rejected": "is not the same training",
}


def told(trial: Trial) -> str:
    """What came of it, in a line."""
    if trial.is_good:
        return (
            f"{units.duration(trial.step_seconds)} a step, {units.gib(trial.peak_bytes)} ({trial.ended.seconds:.0f} s)"
        )
    return f"{_OUTCOMES[trial.outcome]}: {trial.rejected or trial.ended.reason} ({trial.ended.seconds:.0f} s)"
