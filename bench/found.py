"""What a run of `paceline` left behind in its folder, checked before it becomes an entry."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jobs import Job

_RAN_OUT = re.compile(r".*(CUDA out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED).*")


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


def bench_or_ran_out(folder: Path, figures: Sequence[str]) -> dict[str, Any]:
    """Of an entry: the line of `paceline bench`, or that memory ran out.

    Raises:
        OSError, LookupError, ValueError: it left nothing usable, and not for lack of memory.
    """
    try:
        return {"bench": bench_record(folder, figures)}
    except OSError:
        if entry := ran_out(folder):
            return entry
        raise


def ran_out(folder: Path) -> dict[str, Any]:
    """What an entry says where memory ran out, by the log; empty where it did not."""
    said = _RAN_OUT.search((folder / "log").read_text(encoding="utf-8", errors="replace"))
    return {"ran_out": {"said": said.group().strip()[:300]}} if said else {}


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
