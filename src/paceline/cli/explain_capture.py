"""`paceline explain RUN --capture N`: asks a running job for a capture and waits for it."""

from __future__ import annotations

import math
import time
from pathlib import Path

from paceline.errors import ConfigError
from paceline.explain.run_folder import RunView, is_run_folder, read_run
from paceline.explain.shares import Shares
from paceline.observe.capture_request import CaptureRequest, trace_path, write_request

_LEAD_SECONDS = 6.0
"""Between asking and the first captured step: ranks look every two seconds."""


def capture(folder: Path, steps: int, ranks: tuple[int, ...]) -> list[Path]:
    """The traces of the asked ranks.

    Raises:
        ConfigError: it is no run folder, the run is not at work, or a rank does not exist.
        RunFolderError: the request cannot be written.
    """
    if not is_run_folder(folder):
        raise ConfigError(f"{folder} is no run folder", next_step="Give the folder of a run that is at work (run.dir).")
    view = read_run(folder)
    _refuse(view, ranks)
    step_seconds = max(Shares(view=view).step_seconds, 1e-4)
    at = int(view.steps[-1]) + max(2, math.ceil(_LEAD_SECONDS / step_seconds))
    last = int(view.recipe.get("train.steps", at + steps))
    if at + steps - 1 > last:
        raise ConfigError(
            f"the run ends at step {last}, too soon for a capture from step {at} on",
            next_step="Capture earlier, or by the recipe: --set observe.capture_at='[100]'.",
        )
    write_request(folder, CaptureRequest(steps=steps, at=at, ranks=ranks))
    wanted = [trace_path(folder, rank, at) for rank in (ranks or view.ranks)]
    _wait(folder, wanted, patience=60 + 10 * (at + steps - int(view.steps[-1])) * step_seconds)
    return wanted


def _refuse(view: RunView, ranks: tuple[int, ...]) -> None:
    if view.end or not len(view.steps):
        raise ConfigError(
            f"{view.path} is not at work: {'it has ended' if view.end else 'it has no record of steps'}",
            next_step="A capture is of steps that run now. For the next run: --set observe.capture_at='[100]'.",
        )
    silent = time.time() - view.newest
    if silent > 120 + 20 * Shares(view=view).step_seconds:
        raise ConfigError(
            f"{view.path} has written nothing for {silent:.0f} s: it hangs or was killed",
            next_step="`paceline explain RUN` without --capture says what is known.",
        )
    unknown = [rank for rank in ranks if rank not in view.ranks]
    if unknown:
        raise ConfigError(f"rank {unknown[0]} is not in this run", next_step=f"It has ranks 0 to {max(view.ranks)}.")


def _wait(folder: Path, wanted: list[Path], *, patience: float) -> None:
    until = time.monotonic() + patience
    sizes: dict[Path, int] = {}
    while time.monotonic() < until:
        time.sleep(0.5)
        now = {path: path.stat().st_size for path in wanted if path.exists()}
        # written whole once it does not grow any more
        if len(now) == len(wanted) and now == sizes and all(now.values()):
            return
        sizes = now
    missing = [path.name for path in wanted if not path.exists()]
    raise ConfigError(
        f"no capture after {patience:.0f} s: {', '.join(missing[:4]) or 'it is still being written'}",
        next_step=f"See {folder}/logs; a run that was started with observe.record=false does not look for requests.",
    )
