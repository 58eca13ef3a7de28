"""What of the host, the process and the card holds the step up: collector, processors, evaluation, memory, clocks?"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from paceline.explain.cause import Cause
from paceline.explain.ranks import RankReport, place_of
from paceline.explain.run_folder import Numbers, RunView
from paceline.explain.shares import Shares, mean_known, of_step, worst_rank


def garbage_causes(view: RunView, shares: Shares, report: RankReport) -> Iterator[Cause]:
    seconds = worst_rank(shares.collections)
    runs = float(np.nansum(view.column("gc_runs")) / max(view.column("gc_runs").size, 1))
    own = int(view.recipe.get("train.gc_interval", 100))
    alike = _together(shares.collections)
    how = "on all ranks at once" if alike else "on one rank after the other, while the others wait"
    if len(view.ranks) == 1:
        how = "on the one rank"
    step = (
        f"train.gc_interval = {own} collects rarely already: fewer objects in reference cycles are left to make"
        if own >= 1000
        else "--set train.gc_interval=1000 collects every 1000 steps, on all ranks at once"
        if own
        else "--set train.gc_interval=100 collects at fixed steps, on all ranks at once"
    )
    yield Cause(
        id="explain.garbage-collection",
        subject="Python's garbage collection holds the step up",
        evidence=f"{seconds * 1e3:.1f} ms a step on the rank that collects most, {runs:.1f} collections a step; {how}.",
        next_step=f"{step}. If a plugin or a hook calls gc.collect(), take that out.",
        share=of_step(shares, seconds),
    )


def _together(values: Numbers) -> bool:
    """Whether ranks collect at the same steps."""
    if len(values) < 2:
        return True
    often = values > 0
    return bool(often.any() and often.all(axis=0).sum() >= 0.8 * often.any(axis=0).sum())


def processor_causes(view: RunView, shares: Shares, report: RankReport) -> Iterator[Cause]:
    if not view.knows("thread_queue_us"):
        return
    seconds = worst_rank(shares.queue)
    mean = float(mean_known(shares.queue))
    where = f" on the rank that waited longest, {mean * 1e3:.1f} ms on average" if len(view.ranks) > 1 else ""
    busy = float(mean_known(view.column("cpu_busy_pct")))
    own = float(np.nansum(mean_known(view.column("process_cpu_pct"), axis=1)))
    cpus = int(view.fact("cpus", 0)) or 1
    threads = int(view.fact("threads", 1)) * int(view.fact("local_world_size", 1))
    crowded = "" if threads <= cpus else f" {threads} threads of this run share {cpus} processors (OMP_NUM_THREADS)."
    if not np.isnan(busy):
        crowded += f" Processors are {busy:.0f} % busy; the run's own ranks take {own / cpus:.0f} % of them."
    share = of_step(shares, seconds)
    if shares.on_device:
        # on a GPU the host may be late without the stream noticing
        share = min(share, of_step(shares, worst_rank(shares.own["other"] + shares.own["data"])))
    yield Cause(
        id="explain.cpu-contention",
        subject="the training thread waits for a processor",
        evidence=f"It could run and had none for {seconds * 1e3:.1f} ms a step{where}.{crowded}",
        next_step="End other programs on this host, ask the scheduler for whole cores, or set OMP_NUM_THREADS so that "
        "all ranks' threads fit; `top` shows who takes the processors.",
        share=share,
    )


def evaluation_causes(view: RunView, shares: Shares, report: RankReport) -> Iterator[Cause]:
    seconds = worst_rank(shares.own["evaluation"])
    interval = view.recipe.get("train.eval_interval", 0)
    yield Cause(
        id="explain.evaluation",
        subject="evaluation takes a part of every step's time",
        evidence=f"{seconds * 1e3:.1f} ms of a mean step; every {interval} steps, "
        f"{view.recipe.get('train.eval_steps')} batches.",
        next_step=f"--set train.eval_interval={4 * int(interval or 25)}, or fewer train.eval_steps.",
        share=0.75 * of_step(shares, seconds),
        certain=False,
    )


def logging_causes(view: RunView, shares: Shares, report: RankReport) -> Iterator[Cause]:
    interval = int(view.recipe.get("observe.log_interval", 10))
    if interval >= 10:
        return
    seconds = worst_rank(shares.own["log"] + shares.blocked("log"))
    yield Cause(
        id="explain.logging",
        subject="reading the metrics holds the step up",
        evidence=f"{seconds * 1e3:.1f} ms of a mean step with observe.log_interval = {interval}: "
        "every logged step waits for the device.",
        next_step="--set observe.log_interval=10",
        share=of_step(shares, seconds) * (1 - interval / 10),
        certain=False,
    )


def memory_causes(view: RunView, shares: Shares, report: RankReport) -> Iterator[Cause]:
    """The allocator frees its cache and asks the driver again: each time the device stands still."""
    if not view.knows("alloc_retries"):
        return
    retries = np.nan_to_num(view.column("alloc_retries"))
    new = np.diff(retries, axis=1, prepend=retries[:, :1]) > 0
    allocated, reserved = view.column("allocated_mb"), view.column("reserved_mb")
    gap = float(np.nanmax(1 - allocated / np.maximum(reserved, 1)))
    if not new.any():
        return
    steps = new.any(axis=0)
    wall = shares.wall.max(axis=0)
    slower = float(wall[steps].mean() - np.median(wall[~steps])) if (~steps).any() else 0.0
    seconds = max(slower, 0.0) * float(steps.mean())
    worst = int(retries[:, -1].argmax())
    yield Cause(
        id="explain.memory-fragmentation",
        subject=f"the allocator runs out and frees its cache again and again (rank {view.ranks[worst]})",
        evidence=f"{retries[worst, -1] - retries[worst, 0]:.0f} retries in {retries.shape[1]} steps; steps with "
        "one take "
        f"{slower * 1e3:.0f} ms more. Reserved and not in use: up to {gap:.0%}.",
        next_step="Set PYTORCH_ALLOC_CONF=expandable_segments:True in the environment; if it stays, less memory: "
        "--set parallel.recompute=selective or a smaller train.micro_batch_size.",
        share=of_step(shares, seconds),
    )


def clock_causes(view: RunView, shares: Shares, report: RankReport) -> Iterator[Cause]:
    if not view.knows("gpu_clock_mhz"):
        return
    most = float(view.fact("gpu_clock_max_mhz", 0) or 0)
    clock = mean_known(view.column("gpu_clock_mhz"), axis=1)
    if most <= 0 or np.isnan(clock).all():
        return
    mean = float(np.nanmean(clock))
    hot = float(np.nanmax(mean_known(view.column("gpu_temperature_c"), axis=1)))
    power = float(np.nanmean(view.column("gpu_power_w")))
    worst = int(np.nanargmin(clock))
    if mean >= 0.85 * most:
        return
    yield Cause(
        id="explain.clocks",
        subject=f"GPUs run at {mean:.0f} of {most:.0f} MHz",
        evidence=f"{power:.0f} W of {view.fact('gpu_power_limit_w', '?')} W, at most {hot:.0f} C; the slowest is rank "
        f"{view.ranks[worst]} ({place_of(view, worst)}).",
        next_step="Near the power limit this is the card's own doing and no fault; far below it, look for a "
        "lowered limit, "
        "locked clocks or heat (`paceline doctor`).",
        share=None,
        certain=False,
    )
