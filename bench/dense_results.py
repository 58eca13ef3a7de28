"""What `bench/dense.py` keeps between its calls: dense.json, the curves, and the pages written from them."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dense_jobs import Job
from dense_ladder import ladder_page
from dense_report import REFERENCE, page

OWN = Path("docs/measured")
"""Folder of the project's own results."""
LADDER_MARK = "<!-- written by bench/dense.py: the table below is not edited by hand -->"
KINDS = ("bench", "train", "curve", "profile", "ceilings")
"""Under one of these an entry has its figures."""


class DamagedFileError(Exception):
    """A file of results that cannot be read: which, why, and what to do about it."""

    def __init__(self, path: Path, why: str, next_step: str) -> None:
        super().__init__(f"{path}: {why}\n  {next_step}, or restore it from version control.")


class Results:
    """dense.json, dense.md and the curves beside them: written anew, in one piece, after every entry.

    Raises:
        DamagedFileError: a file that is there cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        # docs/ladder.md belongs to the project's own results alone
        self.folder, self.path, self.pages = folder, folder / "dense.json", folder.resolve() == OWN.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        empty: dict[str, Any] = {"command": "bench/dense.sh", "entries": {}}
        self.data = read_results(self.path) if self.path.is_file() else empty
        self.read_curves()  # before anything is measured that could not be shown beside them

    @property
    def entries(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = self.data["entries"]
        return found

    @property
    def are_tiny(self) -> bool:
        return bool(self.data.get("tiny"))

    @property
    def curves(self) -> Path:
        return self.folder / "dense_curves"

    def is_done(self, job: Job) -> bool:
        return job.key in self.entries and "failed" not in self.entries[job.key]

    def put(self, job: Job, entry: dict[str, Any], records: Sequence[dict[str, Any]] = ()) -> None:
        if records:
            self.curves.mkdir(exist_ok=True)
            lines = "".join(json.dumps(record) + "\n" for record in records)
            write_whole(self.curves / f"{job.name}.jsonl", lines)
        self.entries[job.key] = entry
        self.write()

    def write(self) -> None:
        text = json.dumps(self.data, indent=1)
        # a list of numbers takes a line, not one for each number
        text = re.sub(r"\[[-\d.,e\s]+\]", lambda match: " ".join(match.group().split()), text)
        write_whole(self.path, text + "\n")
        write_whole(self.folder / "dense.md", "\n".join(self.page()) + "\n")
        if self.pages:
            write_ladder(Path("docs/ladder.md"), self.data)

    def page(self) -> list[str]:
        picture = os.path.relpath(self.picture, self.folder) if self.picture.is_file() else ""
        return page(self.data, self.read_curves(), picture)

    @property
    def picture(self) -> Path:
        return Path("docs/pictures/dense_curves.svg") if self.pages else self.folder / "dense_curves.svg"

    def draw(self) -> None:
        """The curves, once there is one to hold the others against."""
        if (self.curves / f"{REFERENCE}.jsonl").is_file():
            script = "docs/pictures/make_curves_picture.py"
            subprocess.run([sys.executable, script, str(self.curves), str(self.picture)], check=True)

    def read_curves(self) -> dict[str, list[float | None]]:
        return {file.stem: read_curve(file) for file in sorted(self.curves.glob("*.jsonl"))}


def write_whole(path: Path, text: str) -> None:
    """A call that is killed leaves the old file or the new one, never a half."""
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def write_ladder(path: Path, data: dict[str, Any]) -> None:
    """Renews what stands below the mark."""
    above = path.read_text(encoding="utf-8").partition(LADDER_MARK)[0]
    write_whole(path, "\n".join([above + LADDER_MARK, "", *ladder_page(data)]) + "\n")


def read_results(path: Path) -> dict[str, Any]:
    """dense.json, of which the pages can be written.

    Raises:
        DamagedFileError: not so.
    """
    next_step = "Move it away, and what it held is measured anew"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DamagedFileError(path, f"not JSON, cut off perhaps: {error}", next_step) from error
    if problem := _problem(data):
        raise DamagedFileError(path, problem, next_step)
    found: dict[str, Any] = data
    try:
        page(found, {})
        ladder_page(found)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise DamagedFileError(path, f"the pages cannot be written of its entries: {error!r}", next_step) from error
    return found


def _problem(data: object) -> str:
    """What is not as `Results.write` leaves it; "" if all is."""
    if not isinstance(data, dict) or not isinstance(data.get("entries"), dict):
        return "no object with `entries`"
    for key, entry in data["entries"].items():
        if not isinstance(entry, dict) or not isinstance(entry.get("title"), str):
            return f"entry {key}: no object with a `title`"
        if "failed" in entry and not (isinstance(entry["failed"], list) and entry["failed"]):
            return f"entry {key}: `failed` is no list of reasons"
        if "failed" not in entry and not any(isinstance(entry.get(kind), dict) for kind in KINDS):
            return f"entry {key}: neither `failed` nor any of {', '.join(f'`{kind}`' for kind in KINDS)}"
    return ""


def read_curve(path: Path) -> list[float | None]:
    """The loss of each step; None of a step that was skipped.

    Raises:
        DamagedFileError: some line is not as `Results.put` leaves it, or none is there.
    """
    next_step = f"Move it away and run `bench/dense.sh curves --only {path.stem} --again`"
    losses: list[float | None] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines, start=1):
            record = json.loads(line)
            if not isinstance(record, dict) or not isinstance(record.get("loss", ""), float | int | None):
                raise DamagedFileError(path, f"line {number} has no `loss`", next_step)
            losses.append(rounded(record["loss"], 5))
    except ValueError as error:
        raise DamagedFileError(
            path, f"line {len(losses) + 1} is not JSON, cut off perhaps: {error}", next_step
        ) from error
    if not losses:
        raise DamagedFileError(path, "empty", next_step)
    return losses


def rounded(value: float | None, digits: int) -> float | None:
    """None also of what is not finite: a step that was skipped."""
    return None if value is None or not math.isfinite(value) else round(value, digits)
