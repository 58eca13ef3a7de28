"""Faults of random size, as they show in what a run on GPUs records; played into `synthetic_run.Cluster`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from synthetic_run import Cluster

Play = Callable[[Cluster, np.random.Generator], None]


@dataclass(frozen=True, kw_only=True)
class FaultKind:
    """``expected``: id of the finding that must come first."""

    name: str
    expected: str
    play: Play
    shape: dict[str, Any] = field(default_factory=dict)
    priced: bool = True
    """False: the price comes from `plan` alone, so a simulated run cannot check it; the ranking can."""


def slow_loader(cluster: Cluster, chance: np.random.Generator) -> None:
    """A dataset that sleeps: all ranks, or one."""
    rows = slice(None) if chance.random() < 0.5 else slice(*_one(cluster, chance))
    shape = cluster.own["data"][rows].shape
    wait = cluster.step_seconds * chance.uniform(0.1, 1.5)
    cluster.own["data"][rows] += wait * (1 + 0.05 * chance.standard_normal(shape))
    cluster.columns["loader_ready"][rows] = 0


def cpu_hog(cluster: Cluster, chance: np.random.Generator) -> None:
    wait = cluster.step_seconds * chance.uniform(0.1, 0.8)
    late = wait * np.abs(1 + 0.2 * chance.standard_normal(cluster.own["other"].shape))
    cluster.own["other"] = cluster.own["other"] + late
    cluster.columns["thread_queue_us"] = cluster.columns["thread_queue_us"] + 1e6 * late
    cluster.columns["cpu_busy_pct"] = cluster.columns["cpu_busy_pct"] * 0 + 99


def slow_disk(cluster: Cluster, chance: np.random.Generator) -> None:
    """A checkpoint of some GB at some tens of MB/s."""
    _save(cluster, int(chance.integers(30, 50)), seconds=chance.uniform(70, 240))


def frequent_checkpoints(cluster: Cluster, chance: np.random.Generator) -> None:
    _save(cluster, int(chance.integers(2, 9)), seconds=chance.uniform(1.0, 4.0))


def _save(cluster: Cluster, interval: int, *, seconds: float) -> None:
    at = np.arange(1, cluster.steps + 1) % interval == 0
    cluster.own["checkpoint"][:, at] += seconds
    cluster.recipe.append(f"checkpoint.interval={interval}")


def full_recompute(cluster: Cluster, chance: np.random.Generator) -> None:
    cluster.own["backward"] = cluster.own["backward"] + cluster.own["forward"] * chance.uniform(0.9, 1.0)
    cluster.recipe.append("parallel.recompute=full")


def no_overlap(cluster: Cluster, chance: np.random.Generator) -> None:
    cluster.communication["dp"] = cluster.communication["dp"] + cluster.step_seconds * chance.uniform(0.12, 0.6)
    cluster.recipe.append("parallel.bucket_mb=1000000")


def clocked_down(cluster: Cluster, chance: np.random.Generator) -> None:
    first, last = _one(cluster, chance)
    slower = chance.uniform(1.12, 1.8)
    for phase in ("forward", "backward", "optimizer"):
        cluster.own[phase][first:last] *= slower
    cluster.columns["gpu_clock_mhz"][first:last] /= slower


def delayed_rank(cluster: Cluster, chance: np.random.Generator) -> None:
    first, last = _one(cluster, chance)
    phase = str(chance.choice(["forward", "other", "optimizer"]))
    cluster.own[phase][first:last] += cluster.step_seconds * chance.uniform(0.1, 0.6)


def slow_link(cluster: Cluster, chance: np.random.Generator) -> None:
    group = int(chance.integers(cluster.dp)) * cluster.tp
    cluster.communication["tp"][group : group + cluster.tp] *= chance.uniform(5, 15)


def uneven_stages(cluster: Cluster, chance: np.random.Generator) -> None:
    """One stage has work that another one should have."""
    size = cluster.dp * cluster.tp
    more, less = chance.choice(cluster.pp, 2, replace=False)
    moved = chance.uniform(0.12, 0.4)
    for phase in ("forward", "backward"):
        cluster.own[phase][more * size : (more + 1) * size] *= 1 + moved
        cluster.own[phase][less * size : (less + 1) * size] *= 1 - moved


def imbalanced_experts(cluster: Cluster, chance: np.random.Generator) -> None:
    """Ranks whose experts are busy work longer, by turns a little; the sum stays."""
    extra = chance.dirichlet(np.ones(cluster.ranks)) * cluster.ranks - 1
    extra *= chance.uniform(0.15, 0.4) / max(extra.max(), 1e-9)
    for phase in ("forward", "backward"):
        cluster.own[phase] *= 1 + extra[:, None] * (1 + 0.1 * chance.standard_normal(cluster.own[phase].shape))
    cluster.recipe += ["parallel.ep=8", "model.num_experts=8", "model.top_k=2"]
    cluster.logged["moe/load_max_over_mean"] = [float(chance.uniform(1.7, 4.0)) for _ in range(32)]


def leftover_variable(cluster: Cluster, chance: np.random.Generator) -> None:
    cluster.communication["dp"] = cluster.communication["dp"] + cluster.step_seconds * chance.uniform(0.15, 1.5)
    cluster.environment[str(chance.choice(["NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "NCCL_SHM_DISABLE"]))] = "1"


def garbage_collection(cluster: Cluster, chance: np.random.Generator) -> None:
    """All ranks for themselves, or one of them."""
    at = chance.random(cluster.own["other"].shape) < chance.uniform(0.03, 0.1)
    if chance.random() < 0.5:
        first, last = _one(cluster, chance)
        at = at & np.isin(np.arange(cluster.ranks), np.arange(first, last))[:, None]
        at[first] |= chance.random(cluster.steps) < 0.15
    pause = chance.uniform(0.8, 2.5) * cluster.step_seconds
    cluster.own["other"] = cluster.own["other"] + pause * at
    cluster.columns["gc_us"] = 1e6 * pause * at
    cluster.columns["gc_runs"] = at.astype(float)


def fragmentation(cluster: Cluster, chance: np.random.Generator) -> None:
    at = chance.random(cluster.steps) < chance.uniform(0.2, 0.5)
    cluster.own["forward"][:, at] += cluster.step_seconds * chance.uniform(0.4, 1.0)
    cluster.columns["alloc_retries"] = np.cumsum(np.tile(at, (cluster.ranks, 1)), axis=1).astype(float)


def single_precision(cluster: Cluster, chance: np.random.Generator) -> None:
    for phase in ("forward", "backward"):
        cluster.own[phase] *= chance.uniform(6, 10)
    cluster.recipe.append("train.precision=fp32")


def small_micro_batch(cluster: Cluster, chance: np.random.Generator) -> None:
    """Sequences of 512 tokens one by one on a card that holds many."""
    for phase in ("forward", "backward"):
        cluster.own[phase] *= chance.uniform(1.3, 2.0)
    cluster.recipe += ["train.seq_len=512", "train.global_batch_size=128"]


def _one(cluster: Cluster, chance: np.random.Generator) -> tuple[int, int]:
    rank = int(chance.integers(cluster.ranks))
    return rank, rank + 1


SIMULATED = (
    FaultKind(name="slow loader", expected="explain.data-loading", play=slow_loader),
    FaultKind(name="CPU hog", expected="explain.cpu-contention", play=cpu_hog),
    FaultKind(name="slow disk", expected="explain.slow-storage", play=slow_disk),
    FaultKind(name="frequent checkpoints", expected="explain.checkpoints", play=frequent_checkpoints),
    FaultKind(name="small micro-batch", expected="explain.small-micro-batch", play=small_micro_batch, priced=False),
    FaultKind(name="fp32", expected="explain.fp32", play=single_precision, priced=False),
    FaultKind(name="full recompute", expected="explain.full-recompute", play=full_recompute),
    FaultKind(name="no overlap", expected="explain.exposed-communication", play=no_overlap),
    FaultKind(name="clocked-down rank", expected="explain.slow-rank", play=clocked_down),
    FaultKind(name="delayed rank", expected="explain.slow-rank", play=delayed_rank),
    FaultKind(name="slow link", expected="explain.slow-link", play=slow_link, shape={"dp": 4, "tp": 2}),
    FaultKind(name="uneven stages", expected="explain.stage-imbalance", play=uneven_stages, shape={"dp": 2, "pp": 4}),
    FaultKind(name="imbalanced experts", expected="explain.expert-imbalance", play=imbalanced_experts),
    FaultKind(name="leftover NCCL variable", expected="explain.leftover-variable", play=leftover_variable),
    FaultKind(name="garbage collection", expected="explain.garbage-collection", play=garbage_collection),
    FaultKind(name="memory fragmentation", expected="explain.memory-fragmentation", play=fragmentation),
)
SHAPES: tuple[dict[str, int], ...] = ({}, {"dp": 4, "tp": 2}, {"dp": 2, "pp": 2}, {"dp": 16}, {"dp": 1})
"""Healthy runs that are looked at in turn."""
