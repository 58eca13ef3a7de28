"""Which single change beyond the layout would help, and what would it bring? Each is predicted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from paceline.config.asked import Asked
from paceline.config.nearest import as_sets
from paceline.config.refusals import refusals
from paceline.config.run import RunConfig
from paceline.costs.profiles import Profile
from paceline.costs.step import StepEstimate, predict
from paceline.costs.workload import Cluster, Workload
from paceline.planner.fit_answer import FitAnswer, adapter_findings, eight_bit_findings
from paceline.planner.layout_text import layout_text
from paceline.planner.rank import Candidate, Ranking, rank
from paceline.report.finding import Finding

WORTHWHILE = 0.01
"""Gains below this share are not told."""

_FREED = 0.03
"""Share of memory from which on a change may let another layout fit."""


@dataclass(frozen=True, kw_only=True)
class _Help:
    name: str
    changes: dict[str, Any]
    step: str
    speed: float
    """Gain in tokens/s of the same layout."""
    memory_gib: float
    """More than now, in the same layout."""
    better: tuple[Candidate, float] | None
    """Another layout that then fits, and its gain; None where it is no better than the same one."""

    @property
    def gain(self) -> float:
        return self.better[1] if self.better else self.speed


def helps(
    ranking: Ranking, best: Candidate, cluster: Cluster, profile: Profile, answer: FitAnswer
) -> Iterator[Finding]:
    """Single changes to the first layout that a run would accept. Where one frees memory, layouts are ranked again."""
    yield from eight_bit_findings(answer)
    yield from adapter_findings(answer)
    for help in sorted(_found(ranking, best, cluster, profile), key=lambda one: -one.gain):
        same = f"{help.speed:+.1%} tokens/s, {help.memory_gib:+.1f} GiB"
        subject, evidence = f"{help.name}: {same}, predicted", "The same layout with that one change."
        if help.better:
            other, gain = help.better
            memory = other.estimate.memory_gib - best.estimate.memory_gib
            subject = f"{help.name}, and then another layout: {gain:+.1%} tokens/s, {memory:+.1f} GiB, predicted"
            evidence = (
                f"In the same layout {same}; then {layout_text(other.config, than=best.config)} fits and is faster."
            )
        yield Finding(id="planner.helps", severity="note", subject=subject, evidence=evidence, next_step=help.step)


def _found(ranking: Ranking, best: Candidate, cluster: Cluster, profile: Profile) -> Iterator[_Help]:
    asked = Asked.of(best.config, best.gpus)
    for name, changes, remark, machines in _changes(best.config, cluster):
        other = asked.with_changes(changes)
        if next(refusals(other), None) is not None:
            continue
        work = Workload.of(other.config)
        if work.why_not(machines.gpus):
            continue
        after = predict(work, machines, profile)
        speed, memory = _gain(after, best), (after.memory_bytes - best.estimate.memory_bytes) / 2**30
        frees = memory < -_FREED * best.estimate.memory_gib
        if after.fits and (speed > WORTHWHILE or (speed > -WORTHWHILE and frees)):
            yield _Help(
                name=name,
                changes=changes,
                step=" ".join([as_sets(best.config, changes), remark]).strip(),
                speed=speed,
                memory_gib=memory,
                better=_ranked_again(ranking, best, machines, profile, changes, speed) if frees else None,
            )


def _ranked_again(
    ranking: Ranking, best: Candidate, cluster: Cluster, profile: Profile, changes: dict[str, Any], speed: float
) -> tuple[Candidate, float] | None:
    """What the planner puts first once the change is made, where that is faster than the same layout with it."""
    config = Asked.of(ranking.space.config, cluster.gpus).with_changes(changes).config
    fitting = rank(
        config, cluster, profile=profile, keep=8, probe=60, offload=False, only=ranking.space.only
    ).fitting  # fmt: skip
    if ranking.objective == "memory" or not fitting:
        return None
    gain = _gain(fitting[0].estimate, best)
    same = not layout_text(fitting[0].config, than=best.config)
    return None if same or gain - speed <= WORTHWHILE else (fitting[0], gain)


def _gain(after: StepEstimate, best: Candidate) -> float:
    return after.tokens_per_second_per_gpu / best.estimate.tokens_per_second_per_gpu - 1


def _changes(config: RunConfig, cluster: Cluster) -> Iterator[tuple[str, dict[str, Any], str, Cluster]]:
    """(what, fields by dotted key, a remark, the machines with it)."""
    train, parallel = config.train, config.parallel
    dp = parallel.dp_degree(cluster.gpus)
    if not parallel.compile:
        yield "compiled blocks", {"parallel.compile": True}, "", cluster
    if train.loss_kernel == "plain":
        yield "the chunked loss", {"train.loss_kernel": "chunked"}, "", cluster
    if parallel.reduce_dtype == "fp32":
        yield "gradients sent in bf16", {"parallel.reduce_dtype": "bf16"}, "", cluster
    if parallel.accumulate_dtype == "fp32" and train.global_batch_size > dp * train.micro_batch_size:
        changes: dict[str, Any] = {"parallel.accumulate_dtype": "bf16"}
        yield "gradients summed in bf16", changes, "(less exact over many micro-batches)", cluster
    if train.precision == "bf16" and cluster.gpu.fp8:
        yield "fp8 products", {"train.precision": "fp8"}, "", cluster
    if train.precision == "fp8" and train.fp8_scaling == "tensorwise":
        changes = {"train.fp8_scaling": "delayed", "train.fp8_cast_kernel": "triton"}
        changes = {key: value for key, value in changes.items() if getattr(train, key.partition(".")[2]) != value}
        yield "fp8 by scales of earlier steps", changes, "(gradients may saturate where they grow)", cluster
    if parallel.pp > 1 or train.global_batch_size == dp * train.micro_batch_size:
        yield "twice the batch", {"train.global_batch_size": 2 * train.global_batch_size}, "", cluster
    if cluster.nodes > 1 and cluster.node_gb_per_s < 50:
        faster = replace(cluster, node_gb_per_s=50.0)
        yield "400 Gb/s a GPU between nodes", {}, "--interconnect ib400", faster
