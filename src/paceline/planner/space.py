"""Which layouts of a recipe are legal on so many GPUs? All of them, cheapest refusals first.

Two levels. *Degrees* (tp, pp, cp, ep, ZeRO stage, copies) are pruned by arithmetic: what the model's sizes forbid, what
cannot fit a card with everything recomputed, and, beyond `PROBED`, what a closed-form guess puts far behind. *Variants*
of the degrees that are left (micro-batch, schedule, recomputation) pass the same rules as a recipe that is to run
(`config/refusals.py`) before anything is predicted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any, TypeAlias

from paceline.config.asked import Asked, divisors
from paceline.config.layout import tensor_degrees
from paceline.config.refusals import refusals
from paceline.config.run import RunConfig
from paceline.costs.workload import Cluster
from paceline.planner.rough import Degrees, Rough

PROBED = 400
"""Degrees that are predicted at all, with a few variants each."""
SHORTEST_PART = 1024
"""Tokens of a sequence that a context-parallel rank has at least; with fewer there is nothing to win."""
MOST_MICRO_BATCHES = 16
"""Largest micro-batch tried, in sequences."""

Only: TypeAlias = Mapping[str, int | str]
"""Axes that are held to one value: ``{"tp": 4, "recompute": "none"}``."""
DEGREES = ("tp", "pp", "cp", "ep", "etp", "zero", "dp_replicate")
VARIANTS = ("micro_batch_size", "pipeline_schedule", "stages_per_rank", "recompute")


@dataclass(kw_only=True)
class Space:
    """The degrees of a recipe on a cluster, and what became of the rest."""

    config: RunConfig
    cluster: Cluster
    only: Only = field(default_factory=dict)
    kept: list[Degrees] = field(default_factory=list)
    """Those to predict, in the order of the guess."""
    too_large: list[tuple[Degrees, float]] = field(default_factory=list)
    """Degrees whose states alone do not fit, with the least bytes of a rank."""
    far_behind: int = 0
    """Degrees that the guess left out."""
    batch_misfits: int = 0
    """Degrees whose data-parallel ranks do not divide the global batch."""

    @property
    def count(self) -> int:
        return len(self.kept) + len(self.too_large) + self.far_behind + self.batch_misfits


def find_space(config: RunConfig, cluster: Cluster, *, keep: int = PROBED, only: Only | None = None) -> Space:
    """All degrees that the model admits on the cluster, sorted into those to predict and the others."""
    space, rough = Space(config=config, cluster=cluster, only=only or {}), Rough(config, cluster)
    held = {axis: value for axis, value in space.only.items() if axis in DEGREES}
    asked = Asked.of(config, cluster.gpus)
    limit = cluster.gpu.memory_bytes
    guessed = []
    for of in _degrees(asked, cluster, held):
        if any(getattr(of, axis) != value for axis, value in held.items()):
            continue
        dp = cluster.gpus // (of.tp * of.pp * of.cp)
        if config.train.global_batch_size % dp:
            space.batch_misfits += 1
            continue
        least = rough.least_bytes(of)
        if least > limit:
            space.too_large.append((of, least))
            continue
        guessed.append((rough.seconds(of), of))
    # by the guess; equal ones in the order of the axes, so that the result is the same on every machine
    guessed.sort(key=lambda pair: pair[0])
    space.kept = spread([of for _, of in guessed], keep)
    space.far_behind = len(guessed) - len(space.kept)
    space.too_large.sort(key=lambda pair: pair[1])
    return space


def spread(ordered: list[Degrees], keep: int) -> list[Degrees]:
    """The first ones, and of every value of every axis the best, so that reasons can name it."""
    chosen = dict.fromkeys(ordered[:keep])
    for axis in ("tp", "pp", "cp", "ep", "zero"):
        seen: set[int] = set()
        for of in ordered:
            value = getattr(of, axis)
            if value not in seen:
                seen.add(value)
                chosen.setdefault(of)
    return list(chosen)


def _degrees(asked: Asked, cluster: Cluster, held: Only) -> Iterator[Degrees]:
    config, gpus = asked.config, cluster.gpus
    model, train, parallel = config.model, config.train, config.parallel
    # muon has no tensor parallelism: the exclusions say so for each; asked once here
    tps = [tp for tp in tensor_degrees(asked) if gpus % tp == 0 and (tp <= cluster.domain or tp == held.get("tp"))]
    if config.optim.name == "muon":
        tps = [1]
    pps = [pp for pp in divisors(gpus) if pp <= model.num_layers]
    cps = [cp for cp in divisors(gpus) if cp == 1 or train.seq_len // cp >= SHORTEST_PART]
    if model.mtp_layers:
        cps = [1]
    eps = [ep for ep in divisors(model.num_experts) if gpus % ep == 0] if model.is_moe else [1]
    etps = sorted({1, parallel.etp, int(held.get("etp", 1))}) if model.is_moe else [1]
    for tp, pp, cp in product(tps, pps, cps):
        if gpus % (tp * pp * cp):
            continue
        unit = cp * (2 * tp if tp % 2 else tp) if cp > 1 else tp
        if train.seq_len % unit:
            continue
        dp = gpus // (tp * pp * cp)
        for ep, etp in product(eps, etps):
            if (gpus // pp) % (ep * etp):
                continue
            engines = dict.fromkeys([*_engines(dp, cp, tp, cluster), *([(0, 1)] if held.get("zero") == 0 else [])])
            for zero, copies in engines:
                yield Degrees(tp=tp, pp=pp, cp=cp, ep=ep, etp=etp, zero=zero, dp_replicate=copies)


def _engines(dp: int, cp: int, tp: int, cluster: Cluster) -> Iterator[tuple[int, int]]:
    """(ZeRO stage, copies): sharding of parameters also inside a node only, with a copy on each node (HSDP)."""
    yield 1, 1
    if dp * cp == 1:
        return
    yield 2, 1
    yield 3, 1
    nodes = dp * cp * tp // cluster.domain
    if nodes > 1 and dp % nodes == 0:
        yield 3, nodes


# ---- variants of chosen degrees


def micro_batch_sizes(space: Space, of: Degrees) -> list[int]:
    """Powers of two, and the recipe's own, that divide a data-parallel rank's part of the batch."""
    config, cluster = space.config, space.cluster
    share = config.train.global_batch_size * of.tp * of.pp * of.cp // cluster.gpus
    sizes = {2**power for power in range(MOST_MICRO_BATCHES.bit_length())} | {config.train.micro_batch_size}
    if "micro_batch_size" in space.only:
        sizes = {int(space.only["micro_batch_size"])}
    return sorted(size for size in sizes if size <= share and share % size == 0)


def schedules(config: RunConfig, of: Degrees) -> list[tuple[str, int]]:
    """(name, stages a rank) that the layers, the engine and the options admit; 1F1B first."""
    if of.pp == 1:
        return [("1f1b", 1)]
    found = [("1f1b", 1)]
    layers = config.model.num_layers // of.pp
    found += [
        ("interleaved_1f1b", stages)
        for stages in (2, 3, 4, 5, 6, 8, 10)
        if stages <= layers and (config.model.num_layers % (stages * of.pp) == 0 or stages in (2, 4, 8))
    ]
    if not config.parallel.compile and of.zero <= 1:
        found.append(("zero_bubble", 1))
        if layers >= 2:
            found.append(("zbv", 2))
    return found


def as_config(config: RunConfig, of: Degrees, cluster: Cluster, **more: Any) -> RunConfig:
    """The recipe with these degrees.

    Args:
        more: fields of `[parallel]`, and `micro_batch_size`.
    """
    micro = more.pop("micro_batch_size", config.train.micro_batch_size)
    dp = cluster.gpus // (of.tp * of.pp * of.cp)
    fields = {
        "tp": of.tp,
        "pp": of.pp,
        "cp": of.cp,
        "ep": of.ep,
        "etp": of.etp,
        "zero": of.zero,
        "dp_replicate": of.dp_replicate,
        "dp_shard": dp // of.dp_replicate,
        "pipeline_layout": (),
        "order": type(config.parallel).model_fields["order"].get_default(),
    }
    if of.zero >= 2:
        fields |= {"accumulate_dtype": "fp32", "fused_weight_gradients": False}
    elif config.parallel.offload == "parameters":
        fields["offload"] = "optimizer"
    return config.model_copy(
        update={
            "parallel": config.parallel.model_copy(update=fields | more),
            "train": config.train.model_copy(update={"micro_batch_size": micro}),
            "cluster": config.cluster.model_copy(update={"nodes": 0, "gpus_per_node": cluster.gpus_per_node}),
        }
    )


def is_legal(config: RunConfig, gpus: int) -> bool:
    """Whether `config.check` would let it run."""
    return next(refusals(Asked.of(config, gpus)), None) is None
