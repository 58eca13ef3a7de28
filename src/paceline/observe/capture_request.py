"""A wish for a capture, left in the run folder of a running job: how many steps, from which one on, on which ranks.

Torch-free: `paceline explain RUN --capture 3` writes it, the run's ranks look for it.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path

from paceline.observe.events import write_atomically
from paceline.observe.telemetry.record import FOLDER

TRACES = "trace-rank-*.json.gz"


@dataclass(frozen=True, kw_only=True)
class CaptureRequest:
    """``ranks`` empty = all."""

    steps: int
    at: int
    """First step."""
    ranks: tuple[int, ...]

    def wants(self, rank: int) -> bool:
        return not self.ranks or rank in self.ranks


def request_path(folder: Path) -> Path:
    return folder / FOLDER / "capture.json"


def trace_path(folder: Path, rank: int, step: int) -> Path:
    return folder / FOLDER / f"trace-rank-{rank:05d}-step-{step:07d}.json.gz"


def first_step(trace: Path) -> int:
    """The first captured step of a trace, by its name; -1 of another name."""
    number = trace.name.removesuffix(".json.gz").rpartition("-step-")[2]
    return int(number) if number.isdecimal() else -1


def write_request(folder: Path, request: CaptureRequest) -> None:
    """Raises RunFolderError where the folder cannot be written."""
    path = request_path(folder)
    with contextlib.suppress(OSError):  # the write tells it better
        path.parent.mkdir(exist_ok=True)
    write_atomically(path, json.dumps({"steps": request.steps, "at": request.at, "ranks": list(request.ranks)}))


def read_request(folder: Path) -> CaptureRequest | None:
    """None where there is none, or none that can be read."""
    try:
        found = json.loads(request_path(folder).read_text(encoding="utf-8"))
        return CaptureRequest(steps=int(found["steps"]), at=int(found["at"]), ranks=tuple(map(int, found["ranks"])))
    except (OSError, ValueError, KeyError, TypeError):
        return None
