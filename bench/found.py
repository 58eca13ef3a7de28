"""What a run of `paceline` left behind in its folder, checked before it becomes an entry."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jobs import Job


def an_object(text: str) -> dict[str, Any]:
    """
    Raises:
        ValueError: other JSON, or none.
    """
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError(f"not an object: {text[:40]}")
    return found


def bench_record(folder: Path, figures: Sequence[str]) -> dict[str, Any]:
    """The line of `paceline bench --out`, with everything that the pages show.

    Raises:
        OSError, LookupError, ValueError: it is not there, or not whole.
    """
    record = an_object((folder / "line.jsonl").read_text().splitlines()[-1])
    if missing := [name for name in figures if name not in record]:
        raise LookupError(f"no {', '.join(missing)}")
    del record["recipe"]  # recipe and command say it
    return record


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def every_step(job: Job, folder: Path) -> list[dict[str, Any]]:
    """The metrics of each step of a `paceline train`.

    Raises:
        OSError, LookupError, TypeError, ValueError: they are not all there.
    """
    records = metrics(folder)
    if [record["step"] for record in records] != list(range(1, wanted_steps(job) + 1)):
        raise ValueError(f"{len(records)} of {wanted_steps(job)} steps")
    return records


def wanted_steps(job: Job) -> int:
    return [int(item.partition("=")[2]) for item in job.sets if item.startswith("train.steps=")][-1]


def rounded(value: float | None, digits: int) -> float | None:
    """None also of what is not finite: a step that was skipped."""
    return None if value is None or not math.isfinite(value) else round(value, digits)
