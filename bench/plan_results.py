"""What `bench/plan.py` keeps between its calls: plan.json with predictions and entries, and the page of both."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs import Job
from results import Results, head, notes_and_failures

PREDICTIONS = "predictions"
"""Beside the entries of plan.json: by key of a job."""
AFTER = "made_after_measuring"
"""Of a prediction: its recipe had been measured when it was made. It shows nothing."""
FIGURES = ("step_seconds", "step_seconds_min", "step_seconds_max", "peak_memory_gib", "sustained_gemm_tflops")
KINDS: Mapping[str, type] = {"bench": dict, "ran_out": dict}
GOAL_TIME, GOAL_MEMORY = 0.05, 0.04


class PlanResults(Results):
    """plan.json and plan.md."""

    def __init__(self, folder: Path, name: str = "plan", kinds: Mapping[str, type] = KINDS, command: str = "") -> None:
        super().__init__(folder, name, kinds, command)
        self.data.setdefault(PREDICTIONS, {})

    @property
    def predictions(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = self.data[PREDICTIONS]
        return found

    def page(self) -> list[str]:
        return page(self.data)

    def pages_of(self, data: dict[str, Any]) -> None:
        page(data)

    def is_measured(self, job: Job) -> bool:
        return "failed" not in self.entries.get(job.key, {"failed": []})


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A recipe that was predicted first and measured after."""

    key: str
    title: str
    predicted: Mapping[str, Any]
    measured: Mapping[str, Any] | None
    """None: it ran out of memory."""

    @property
    def time_error(self) -> float | None:
        return self._error("step_seconds", "step_seconds")

    @property
    def memory_error(self) -> float | None:
        return self._error("memory_gib", "peak_memory_gib")

    def _error(self, predicted: str, measured: str) -> float | None:
        if self.measured is None:
            return None
        return float(self.predicted[predicted]) / float(self.measured[measured]) - 1


def pairs(data: Mapping[str, Any]) -> Iterator[Pair]:
    """What counts: a prediction that stood before its recipe was measured."""
    for key, entry in data["entries"].items():
        predicted = data.get(PREDICTIONS, {}).get(key)
        if predicted is None or predicted.get(AFTER) or "failed" in entry:
            continue
        yield Pair(key=key, title=entry["title"], predicted=predicted, measured=entry.get("bench"))


def page(data: Mapping[str, Any]) -> list[str]:
    found = list(pairs(data))
    lines = [
        *head("Predicted, then measured: recipes of Paceline", dict(data)),
        "Each recipe was predicted by `paceline plan`'s arithmetic and written down; then it was measured by",
        "`paceline bench train`: 10 steps after 3, their median. Errors are predicted over measured, less 1.",
        "",
        *summary(found),
        "| recipe | | predicted s | measured s | error | predicted GiB | measured GiB | error |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
        *(row(pair) for pair in found),
    ]
    shown = {pair.key for pair in found}
    for key, predicted in data.get(PREDICTIONS, {}).items():
        if key not in shown:
            why = "predicted after" if predicted.get(AFTER) else "not yet"
            seconds, gib = f"{predicted['step_seconds']:.3f}", f"{predicted['memory_gib']:.1f}"
            lines.append(f"| `{key}` | {predicted['title']} | {seconds} | {why} | | {gib} | | |")
    return lines + notes_and_failures(data["entries"])


def summary(found: list[Pair]) -> list[str]:
    times = [abs(pair.time_error) for pair in found if pair.time_error is not None]
    sizes = [abs(pair.memory_error) for pair in found if pair.memory_error is not None]
    if not times:
        return ["Nothing is measured yet.", ""]
    wrong = [pair.key for pair in found if pair.measured is None and pair.predicted["fits"]]
    right = [pair.key for pair in found if pair.measured is None and not pair.predicted["fits"]]
    refused = [pair.key for pair in found if pair.measured is not None and not pair.predicted["fits"]]
    return [
        f"- step time: mean absolute error {percent(statistics.fmean(times))} over {len(times)} recipes, worst "
        f"{percent(max(times))}; goal {percent(GOAL_TIME)}",
        f"- memory: mean {percent(statistics.fmean(sizes))}, worst {percent(max(sizes))}; goal {percent(GOAL_MEMORY)}",
        f"- said to fit, and ran out: {', '.join(wrong) or 'none'}; goal none",
        f"- said not to fit: ran out {len(right)}, ran {', '.join(refused) or 'none'}",
        "",
    ]


def row(pair: Pair) -> str:
    predicted, measured = pair.predicted, pair.measured
    cells = [f"`{pair.key}`", pair.title, f"{predicted['step_seconds']:.3f}"]
    if measured is None:
        cells += [
            "ran out",
            "",
            f"{predicted['memory_gib']:.1f}" + ("" if predicted["fits"] else ", does not fit"),
            "",
            "",
        ]
    else:
        cells += [f"{measured['step_seconds']:.3f}", signed(pair.time_error), f"{predicted['memory_gib']:.1f}"]
        cells += [f"{measured['peak_memory_gib']:.1f}", signed(pair.memory_error)]
    return "| " + " | ".join(cells) + " |"


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def signed(share: float | None) -> str:
    return "" if share is None else f"{100 * share:+.1f} %"
