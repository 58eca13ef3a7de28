"""How well would a measurement of nearly the same run have predicted a run? What no prediction can be asked to beat.

A run's twins are other rows of its source with the same model, GPUs, layout and batch, measured with another ZeRO
stage, in another release, or once more. Their median stands for a prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from paceline.planner.published import PublishedRun


def twin_errors(
    runs: Sequence[PublishedRun],
    figure: Callable[[PublishedRun], float | None],
    alike: Callable[[PublishedRun], tuple[object, ...]],
) -> list[float]:
    """Relative errors of every run with a twin, predicted by its twins' median ``figure``."""
    groups: dict[tuple[object, ...], list[float]] = {}
    for run in runs:
        if (value := figure(run)) is not None and not run.secondary:
            groups.setdefault((run.source.key, *alike(run)), []).append(value)
    return [
        median(values[:place] + values[place + 1 :]) / value - 1
        for values in groups.values()
        if len(values) > 1
        for place, value in enumerate(values)
    ]


def same_but_zero(run: PublishedRun) -> tuple[object, ...]:
    """Model, machines, layout and batch; not the ZeRO stage, nor the release."""
    work = run.workload
    layout = (work.tp, work.pp, work.cp, work.ep, work.stages_per_rank)
    batch = (work.micro_batch_size, work.global_batch_size, work.seq_len, work.precision)
    return run.model_name, run.cluster.gpu.name, run.cluster.gpus, *layout, *batch


def same_on_a_rank(run: PublishedRun) -> tuple[object, ...]:
    """What decides a rank's memory where nothing is sharded over data-parallel ranks; not how many there are."""
    work = run.workload
    micro_batches = work.micro_batches(run.cluster.gpus)
    held = (min(micro_batches, work.pp), micro_batches > 1)
    return run.model_name, work.tp, work.pp, work.micro_batch_size, work.seq_len, work.precision, *held


def step_seconds(run: PublishedRun) -> float | None:
    return run.step_seconds


def unsharded_bytes(run: PublishedRun) -> float | None:
    """Of runs with ZeRO stage 0."""
    return run.memory_bytes if run.workload.zero == 0 else None


def constant_per_micro_batch(run: PublishedRun, predicted_seconds: float) -> float | None:
    """Seconds a micro-batch that a run took more than predicted."""
    if run.step_seconds is None:
        return None
    return (run.step_seconds - predicted_seconds) / run.workload.micro_batches(run.cluster.gpus)
