"""What `bench/dense.py` keeps between its calls: dense.json, the curves, and the pages written from them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from curve_report import Curves
from dense_ladder import ladder_page, one_gpu_ladder_page
from dense_one_gpu import cuts
from dense_report import REFERENCE, page
from found import rounded
from jobs import Job
from results import OWN, DamagedFileError, Results, write_whole

LADDER_MARK = "<!-- written by bench/dense.py: what follows is not edited by hand -->"
ONE_GPU_MARK = "<!-- written by bench/dense.py --one-gpu: what follows is not edited by hand -->"
LADDER_END = "<!-- up to here -->"
KINDS = dict.fromkeys(("bench", "train", "curve", "profile", "ceilings"), dict)
"""Under one of these an entry has its figures."""
ABOUT_ONE_GPU = (
    "Every entry ran on one GPU. A model that wants two was cut in depth at full width, as its row says, and its "
    "global batch halved, so that a GPU has the sequences and accumulation steps that it has on two. These are not the "
    "figures of the whole model: head, loss and optimizer take a larger share of a step, and nothing is communicated. "
    "Compare rows with each other and with the sustained GEMM. Entries that cut matrices over two GPUs are left out."
)


class DenseResults(Results):
    """dense.json, dense.md and the curves beside them.

    Raises:
        DamagedFileError: a file that is there cannot be read.
    """

    own_name = "dense"
    ladder_mark = LADDER_MARK
    options = ""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, self.own_name, KINDS, f"bench/dense.sh dense{self.options}")
        # docs/ladder.md belongs to the project's own results alone
        self.pages = folder.resolve() == OWN.resolve()
        self.read_curves()  # before anything is measured that could not be shown beside them

    @property
    def curves(self) -> Path:
        return self.folder / f"{self.name}_curves"

    def put(self, job: Job, entry: dict[str, Any], records: Sequence[dict[str, Any]] = ()) -> None:
        if records:
            self.curves.mkdir(exist_ok=True)
            lines = "".join(json.dumps(record) + "\n" for record in records)
            write_whole(self.curves / f"{job.name}.jsonl", lines)
        super().put(job, entry)

    def write(self) -> None:
        super().write()
        if self.pages:
            write_ladder(Path("docs/ladder.md"), self.ladder_mark, self.ladder(self.data))

    def page(self) -> list[str]:
        picture = os.path.relpath(self.picture, self.folder) if self.picture.is_file() else ""
        return self.page_with(self.data, self.read_curves(), picture)

    def page_with(self, data: dict[str, Any], curves: Curves, picture: str = "") -> list[str]:
        return page(data, curves, picture)

    def ladder(self, data: dict[str, Any]) -> list[str]:
        return ladder_page(data)

    def pages_of(self, data: dict[str, Any]) -> None:
        self.page_with(data, {})
        self.ladder(data)

    @property
    def picture(self) -> Path:
        return (Path("docs/pictures") if self.pages else self.folder) / f"{self.name}_curves.svg"

    def draw(self) -> None:
        """The curves, once there is one to hold the others against."""
        if (self.curves / f"{REFERENCE}.jsonl").is_file():
            script = "docs/pictures/make_curves_picture.py"
            subprocess.run([sys.executable, script, str(self.curves), str(self.picture)], check=True)

    def read_curves(self) -> dict[str, list[float | None]]:
        return {file.stem: read_curve(file, self.options) for file in sorted(self.curves.glob("*.jsonl"))}


class OneGpuResults(DenseResults):
    """dense_one_gpu.json, dense_one_gpu.md and the curves beside them; a section of its own in docs/ladder.md."""

    own_name = "dense_one_gpu"
    ladder_mark = ONE_GPU_MARK
    options = " --one-gpu"

    def page_with(self, data: dict[str, Any], curves: Curves, picture: str = "") -> list[str]:
        said = ", ".join(f"{preset} with {cut}" for preset, cut in cuts().items())
        return page(data, curves, picture, title=f"Dense training on one GPU, measured: {said}", about=ABOUT_ONE_GPU)

    def ladder(self, data: dict[str, Any]) -> list[str]:
        return one_gpu_ladder_page(data)


def write_ladder(path: Path, mark: str, lines: Sequence[str]) -> None:
    """Renews what stands between this mark and the next end.

    Raises:
        DamagedFileError: the page has no such place.
    """
    text = path.read_text(encoding="utf-8")
    above, found, rest = text.partition(mark)
    _, ended, below = rest.partition(LADDER_END)
    if not (found and ended):
        raise DamagedFileError(path, f"no `{mark}` with a `{LADDER_END}` after it", "Put both lines back")
    write_whole(path, above + "\n".join([mark, "", *lines, "", LADDER_END]) + below)


def read_curve(path: Path, options: str = "") -> list[float | None]:
    """The loss of each step; None of a step that was skipped.

    Raises:
        DamagedFileError: some line is not as `Results.put` leaves it, or none is there.
    """
    next_step = f"Move it away and run `bench/dense.sh curves{options} --only {path.stem} --again`"
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
