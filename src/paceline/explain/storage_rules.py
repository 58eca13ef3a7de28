"""Is the run waiting for its data or its disk?"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from paceline.costs.adapters import count_learned
from paceline.explain.cause import Cause
from paceline.explain.ranks import RankReport, place_of
from paceline.explain.run_folder import RunView
from paceline.explain.shares import Shares, mean_known

_STATE_BYTES = 12
"""Of a parameter in a checkpoint: fp32 master and two moments."""
_FULL = 95.0
"""Per cent of the processors from which on another worker finds none."""
_SLOW_MB_PER_S = 200.0
"""Of one rank, below which storage is called slow; a single NVMe disk writes several times that."""


def data_causes(view: RunView, shares: Shares, report: RankReport) -> Iterator[Cause]:
    """The step waits for batches."""
    waits = np.nan_to_num(shares.own["data"])
    seconds = float(np.mean(waits.max(axis=0)))
    step = float(mean_known(shares.wall))
    share = seconds / max(step, 1e-12)
    if not share:
        return
    worst = int(waits.mean(axis=1).argmax())
    ready = view.column("loader_ready")
    empty = float(np.nanmean(ready[worst] <= 0)) if view.knows("loader_ready") else float("nan")
    reading = float(mean_known(view.column("disk_read_kbs")[worst])) / 1024
    waiting = float(mean_known(view.column("io_wait_pct")[worst]))
    workers = view.recipe.get("data.num_workers")
    disk = not np.isnan(waiting) and (waiting > 20 or reading > 100)
    busy = float(mean_known(view.column("cpu_busy_pct")[worst]))
    where = f" on rank {view.ranks[worst]} ({place_of(view, worst)})" if len(view.ranks) > 1 else ""
    numbers = [f"{seconds * 1e3:.1f} ms of {step * 1e3:.1f} ms a step{where}"]
    if not np.isnan(empty):
        numbers.append(f"the loader had nothing ready at {empty:.0%} of the steps")
    if not np.isnan(reading):
        numbers.append(f"disks read {reading:.0f} MB/s")
    if not np.isnan(waiting):
        numbers.append(f"processors waited {waiting:.0f} % for them")
    yield Cause(
        id="explain.data-loading",
        subject=f"{share:.0%} of the step is waiting for data",
        evidence=f"{'; '.join(numbers)}; data.num_workers = {workers}.",
        next_step=_more_data(int(workers or 0), disk=disk, busy=busy, ready=empty == 0),
        share=share,
    )


def _more_data(workers: int, *, disk: bool, busy: float, ready: bool) -> str:
    """What makes batches come sooner.

    Args:
        busy: per cent of the processors, nan where it is not known.
        ready: the loader had a batch at every step.
    """
    if disk:
        return "The disk is the limit: put the dataset on a local or faster one, or copy it to memory (/dev/shm)."
    if busy >= _FULL:
        first = f"More workers do not help: processors are {busy:.0f} % busy"
        if ready:
            return f"{first}, and a batch was there at every step: fewer threads or programs, or more processors, do."
        return f"{first}. Prepare samples before (`paceline data build`), or give the job more processors."
    return (
        f"--set data.num_workers={max(4, 2 * workers)} --set data.prefetch=16. If samples are made on the fly "
        "(tokenizing), prepare them with `paceline data build`; a faster GPU does not help."
    )


def checkpoint_causes(view: RunView, shares: Shares, report: RankReport) -> Iterator[Cause]:
    """Checkpoints that come too often, or a disk that takes too long."""
    own = np.nan_to_num(shares.own["checkpoint"] + shares.blocked("checkpoint"))
    worst = own.max(axis=0)
    step = float(mean_known(shares.wall))
    # a save takes at least some milliseconds; asking whether one is due does not
    saves = worst > max(2e-3, 5 * float(np.median(worst)))
    interval = int(view.recipe.get("checkpoint.interval", 0) or 0)
    if interval:
        saves |= (view.shown_steps % interval == 0) & (worst > 1e-3)
    seconds = float(worst[saves].sum()) / max(len(worst), 1)
    if not saves.any() or not step:
        return
    each = float(worst[saves].mean())
    steps = int(np.median(np.diff(np.flatnonzero(saves)))) if saves.sum() > 1 else len(worst)
    between = steps * max(step - seconds, 1e-9)
    size, speed = _written(view, each)
    if speed is not None and size > 2**26 and speed < _SLOW_MB_PER_S and steps > 10:
        yield Cause(
            id="explain.slow-storage",
            subject=f"writing checkpoints is slow: about {speed:.0f} MB/s a rank",
            evidence=f"{each:.1f} s for about {size / 1e6:.0f} MB of a rank, every {steps} steps; "
            f"{seconds / step:.1%} of the time.",
            next_step="Write to a faster disk (--set run.dir=PATH), or less often: --set checkpoint.interval="
            f"{_spaced(steps, each, between)}.",
            share=seconds / step,
        )
        return
    yield Cause(
        id="explain.checkpoints",
        subject=f"checkpoints take {seconds / step:.1%} of the time",
        evidence=f"{each * 1e3:.0f} ms each, every {steps} steps (checkpoint.interval = {interval}), which take "
        f"{between:.1f} s.",
        next_step=f"--set checkpoint.interval={_spaced(steps, each, between)} keeps them under 1 % of the time.",
        share=seconds / step,
    )


def _spaced(steps: int, each: float, between: float) -> int:
    """An interval at which a save is a hundredth of the steps between."""
    return max(steps * 2, 10 * math.ceil(10 * each / max(between / steps, 1e-9)))


def _written(view: RunView, seconds: float) -> tuple[float, float | None]:
    """(bytes of a rank, MB/s), by the model's size; unknown without a recipe."""
    if view.config is None or seconds <= 0:
        return 0.0, None
    total = count_learned(view.config) * _STATE_BYTES / max(view.world_size, 1)
    return total, total / seconds / 1e6
