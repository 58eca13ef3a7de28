"""What every bench starts: one `paceline` (or a script of ours) with a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Job:
    """One start. ``estimate``: seconds from start to end on H200s."""

    part: str
    name: str
    recipe: str
    processes: int
    estimate: float
    kind: str = "bench"
    sets: tuple[str, ...] = ()
    title: str = ""
    warm_up: int = 4
    """Steps of `paceline bench` that are not measured."""
    steps: int = 10
    cut: str = ""
    """What one GPU is given of a model that wants more of them; "" = the whole model."""
    fits_shared: bool = True
    """Whether all its ranks fit one H200 together."""

    @property
    def key(self) -> str:
        return f"{self.part}/{self.name}"


def bench_command(job: Job, folder: Path, *, gemm_seconds: float) -> list[str]:
    """Arguments of Python for a `paceline bench train` that leaves its line in the folder, for `found.bench_record`."""
    measured = [f"--warm-up={job.warm_up}", f"--steps={job.steps}", f"--gemm-seconds={gemm_seconds}"]
    command = ["-m", "paceline", "bench", "train", job.recipe, f"--nproc={job.processes}"]
    return [*command, *measured, f"--out={folder}/line.jsonl", *(f"--set={item}" for item in job.sets)]
