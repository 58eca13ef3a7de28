"""Was the fault named first, and was its price right?"""

from __future__ import annotations

from statistics import median
from typing import Any

from paceline.explain.rules import Diagnosis

PRICE = 0.10
"""Error of a price that is still right."""


def judge(found: Diagnosis, expected: str, price: float | None) -> dict[str, Any]:
    """How `explain` did in one trial."""
    first = found.findings[0].id if found.findings else ""
    place = next((index for index, one in enumerate(found.findings) if one.id == expected), None)
    told = None if place is None else share_of(found.findings[place].gain)
    error = None if price is None or told is None else abs(told / price - 1)
    return {"first": first, "place": place, "truth": price, "told": told, "error": error}


def share_of(gain: str | None) -> float | None:
    """``"12.5 % of the step, ..."`` is 0.125."""
    number = (gain or "").replace("%", " ").split()
    try:
        return float(number[0]) / 100
    except (IndexError, ValueError):
        return None


def summarize(name: str, expected: str, outcomes: list[dict[str, Any]]) -> dict[str, Any]:
    errors = [outcome["error"] for outcome in outcomes if outcome["error"] is not None]
    wrong = [outcome["first"] for outcome in outcomes if outcome["first"] != expected]
    return {
        "fault": name,
        "expected": expected,
        "trials": len(outcomes),
        "found_first": 1 - len(wrong) / len(outcomes),
        "instead": sorted(set(wrong)),
        "median_error": median(errors) if errors else None,
        "within_10_percent": sum(error <= PRICE for error in errors) / len(errors) if errors else None,
        "outcomes": outcomes,
    }


def above_note(found: Diagnosis) -> list[str]:
    return [one.id for one in found.findings if one.severity != "note"]
