"""Which changes make trials fail?

Each change is faulty here with a small probability of its own; a trial with a faulty one fails. Trials that ran acquit
their changes. What is left is weighed by Bayes' rule: of all sets of up to three faulty changes that explain every
failure, those of few and of risky changes are the likely ones. One change that was in two failed trials is so far more
suspect than two that were in one each. Of a trial that failed and is left with no suspect, it was the combination: what
contains all of it fails too.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

from paceline.tuner.settings import setting_of
from paceline.tuner.trial import Changes, Trial

_SURE = 0.97
"""How sure a failure is one of the changes': some are the machine's, and would not come again."""
_COST = 0.2
"""Of what a trial may bring, that its failure costs: the next one brings the rest."""
_MOST_FAULTS, _MOST_SETS = 3, 64

Item = tuple[str, Any]


def items(changes: Changes) -> frozenset[Item]:
    return frozenset(changes.items())


class Suspects:
    """Built from all trials. Lack of memory is judged elsewhere (`belief.py`, `room.py`)."""

    def __init__(self, trials: Sequence[Trial]) -> None:
        self._acquitted: set[Item] = set()
        self._risks: dict[Item, float] = {}
        for trial in trials:
            if trial.is_good:
                self._acquitted |= items(trial.changes)
        failed = [items(one.changes) for one in trials if one.outcome in ("crash", "refused", "timeout", "rejected")]
        self._together = [whole for whole in failed if whole <= self._acquitted]
        cases = [whole - self._acquitted for whole in failed]
        self._faults = self._explanations([case for case in cases if case])

    def _explanations(self, cases: Sequence[frozenset[Item]]) -> list[tuple[frozenset[Item], float]]:
        """Sets of faulty changes that explain every case, with their probabilities, the likeliest first."""
        if not cases:
            return []
        # in a fixed order: the same trials give the same search
        suspects = sorted({item for case in cases for item in case}, key=repr)
        found = []
        for size in range(1, _MOST_FAULTS + 1):
            for chosen in combinations(suspects, size):
                faulty = frozenset(chosen)
                if all(faulty & case for case in cases):
                    odds = 1.0
                    for item in chosen:
                        odds *= self._risk(item) / (1 - self._risk(item))
                    found.append((faulty, odds))
        if not found:  # four faults or more: each case by itself
            return [(case, 1 / len(cases)) for case in cases]
        found.sort(key=lambda pair: -pair[1])
        total = sum(odds for _, odds in found)
        return [(faulty, odds / total) for faulty, odds in found[:_MOST_SETS]]

    def runs(self, changes: Changes) -> float:
        """The probability that a trial of these changes does not fail, 0 ... 1."""
        asked, probability = items(changes), 1.0
        probability -= _SURE * sum(weight for faulty, weight in self._faults if not faulty.isdisjoint(asked))
        if any(whole <= asked for whole in self._together):
            probability *= 1 - _SURE
        for item in asked - self._acquitted:
            probability *= 1 - _COST * self._risk(item)
        return max(probability, 0.0)

    def culprits(self) -> tuple[Item, ...]:
        """Changes of whose fault little doubt is left."""
        blame: dict[Item, float] = {}
        for faulty, weight in self._faults:
            for item in faulty:
                blame[item] = blame.get(item, 0.0) + weight
        return tuple(sorted((item for item, share in blame.items() if share > 0.95), key=repr))

    def _risk(self, item: Item) -> float:
        if item not in self._risks:
            self._risks[item] = setting_of(*item).risk
        return self._risks[item]
