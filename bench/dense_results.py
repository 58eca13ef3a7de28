"""What `bench/dense.py` keeps between its calls: dense.json, the curves, and the pages written from them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dense_ladder import ladder_page
from dense_report import REFERENCE, page
from found import rounded
from jobs import Job
from results import OWN, DamagedFileError, Results, write_whole

LADDER_MARK = "<!-- written by bench/dense.py: the table below is not edited by hand -->"
KINDS = dict.fromkeys(("bench", "train", "curve", "profile", "ceilings"), dict)
"""Under one of these an entry has its figures."""


class DenseResults(Results):
    """dense.json, dense.md and the curves beside them.

    Raises:
        DamagedFileError: a file that is there cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "dense", KINDS)
        # docs/ladder.md belongs to the project's own results alone
        self.pages = folder.resolve() == OWN.resolve()
        self.read_curves()  # before anything is measured that could not be shown beside them

    @property
    def curves(self) -> Path:
        return self.folder / "dense_curves"

    def put(self, job: Job, entry: dict[str, Any], records: Sequence[dict[str, Any]] = ()) -> None:
        if records:
            self.curves.mkdir(exist_ok=True)
            lines = "".join(json.dumps(record) + "\n" for record in records)
            write_whole(self.curves / f"{job.name}.jsonl", lines)
        super().put(job, entry)

    def write(self) -> None:
        super().write()
        if self.pages:
            write_ladder(Path("docs/ladder.md"), self.data)

    def page(self) -> list[str]:
        picture = os.path.relpath(self.picture, self.folder) if self.picture.is_file() else ""
        return page(self.data, self.read_curves(), picture)

    def pages_of(self, data: dict[str, Any]) -> None:
        page(data, {})
        ladder_page(data)

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


def write_ladder(path: Path, data: dict[str, Any]) -> None:
    """Renews what stands below the mark."""
    above = path.read_text(encoding="utf-8").partition(LADDER_MARK)[0]
    write_whole(path, "\n".join([above + LADDER_MARK, "", *ladder_page(data)]) + "\n")


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
