"""What `bench/eight_gpus.py` keeps between its calls: predictions, entries, and the record of a dry run on CPUs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import eight_gpus_picture
from eight_gpus_jobs import COUNTS, all_jobs
from eight_gpus_report import page
from plan_results import PlanResults
from results import DamagedFileError, OtherMachineError, write_whole

KINDS: Mapping[str, type] = {"doctor": dict, "bench": dict, "run": dict, "ran_out": dict}


class TooFewGpusError(OtherMachineError):
    """A machine that does not have the GPUs that the results are of."""

    def __init__(self, gpus: int, found: str) -> None:
        fits = [count for count in COUNTS if count < gpus]
        Exception.__init__(
            self,
            f"--gpus {gpus}: this is {found}, nothing was measured.\n"
            f"  Take a machine with {gpus} GPUs"
            + (f", or --gpus {' or '.join(map(str, fits))}: results of their own." if fits else "."),
        )


class EightResults(PlanResults):
    """eight_gpus.json and eight_gpus.md; of fewer GPUs eight_gpus_on_4 and eight_gpus_on_2.

    Raises:
        DamagedFileError: a file that is there cannot be read.
    """

    def __init__(self, folder: Path, *, gpus: int) -> None:
        self.gpus = gpus
        super().__init__(folder, name_of(gpus), KINDS, command_of(gpus))
        self.data["gpus"] = gpus

    def measure_on(self, machine: dict[str, Any], *, mixed: bool = False) -> None:
        """As in every bench; and nothing is measured that was not predicted.

        Raises:
            OtherMachineError: another kind of device, or too few of them.
            DamagedFileError: a job has no prediction.
        """
        devices = str(machine.get("devices", ""))
        if not machine["tiny"] and int(devices.partition(" x ")[0] or 0) < self.gpus:
            raise TooFewGpusError(self.gpus, devices or "a machine without GPUs")
        jobs = [job for job in all_jobs(self.gpus) if job.is_predicted]
        if missing := [job.key for job in jobs if job.key not in self.predictions]:
            why = f"no prediction of {', '.join(missing[:3])}" + (" ..." if len(missing) > 3 else "")
            step = f"Run `python bench/eight_gpus_predict.py --gpus {self.gpus}` first (bench/eight_gpus.sh does)"
            raise DamagedFileError(self.path, why, step)
        super().measure_on(machine, mixed=mixed)

    @property
    def pictures(self) -> Path:
        """Beside the page; of the project's own results among the pictures of its documentation."""
        return Path("docs/pictures") if self.is_own else self.folder

    def write(self) -> None:
        self.draw()  # the page shows them
        super().write()

    def draw(self) -> None:
        for name, svg in eight_gpus_picture.pictures(self.data).items():
            self.pictures.mkdir(parents=True, exist_ok=True)
            write_whole(self.pictures / f"{self.name}_{name}.svg", svg)

    def page(self) -> list[str]:
        return self._page(self.data)

    def pages_of(self, data: dict[str, Any]) -> None:
        self._page(data)
        eight_gpus_picture.pictures(data)

    def _page(self, data: dict[str, Any]) -> list[str]:
        where = "../pictures/" if self.is_own else ""
        return page(data, {name: f"{where}{self.name}_{name}.svg" for name in eight_gpus_picture.pictures(data)})

    @property
    def is_own(self) -> bool:
        return self.folder.resolve() == Path("docs/measured").resolve()


def name_of(gpus: int) -> str:
    return "eight_gpus" if gpus == COUNTS[0] else f"eight_gpus_on_{gpus}"


def command_of(gpus: int) -> str:
    return "bench/eight_gpus.sh" + ("" if gpus == COUNTS[0] else f" --gpus {gpus}")
