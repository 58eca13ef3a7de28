"""Which runs did something outside of their layout slow down? Told from measurements alone; no prediction is used."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.planner.published import PublishedRun


def irregular(runs: Sequence[PublishedRun], times: float = 3.0) -> set[str]:
    """Ids of runs that took more than ``times`` as long as a run of their like shows to be possible.

    Like = the same source, model, GPU, tp, pp, sequence length, precision and recomputation. What is compared is the
    time for one micro-batch's way through the pipeline, t / (m + p - 1), which data parallelism and the ZeRO stage do
    not change; a micro-batch needs no longer than a larger one, nor than its size times a smaller one.
    """
    alike: dict[tuple[object, ...], list[tuple[int, float, str]]] = {}
    for run in runs:
        if run.step_seconds is None:
            continue
        work = run.workload
        slot = run.step_seconds / (work.micro_batches(run.cluster.gpus) + work.pp - 1)
        key = (run.source.key, run.model_name, run.cluster.gpu.name, work.tp, work.pp)
        alike.setdefault((*key, work.seq_len, work.precision, work.recompute), []).append(
            (work.micro_batch_size, slot, run.id)
        )
    return {
        name
        for found in alike.values()
        for size, slot, name in found
        if slot > times * min(other * max(1.0, size / its_size) for its_size, other, _ in found)
    }
