"""Which legal layout is best? Each is predicted, those that do not fit are put aside, the rest are put in order.

Objectives: `throughput` (tokens/s), `memory` (least on the fullest card), `cost` (GPU-seconds a token: fewer GPUs are
tried as well, down to those that hold the model).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from paceline.config.asked import Asked
from paceline.config.refusals import refusals
from paceline.config.run import RunConfig
from paceline.costs.profiles import PACELINE, Profile
from paceline.costs.step import StepEstimate, predict
from paceline.costs.workload import Cluster, Workload
from paceline.errors import ConfigError
from paceline.planner.rough import Degrees
from paceline.planner.space import KEPT, Only, Space, as_config, find_space, micro_batch_sizes, schedules

Objective = Literal["throughput", "memory", "cost"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)

_RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A layout and what it would be."""

    config: RunConfig
    gpus: int
    estimate: StepEstimate

    @property
    def tokens_per_second(self) -> float:
        return self.estimate.tokens_per_second_per_gpu * self.gpus

    def as_dict(self) -> dict[str, Any]:
        """For programs: the recipe's own fields, and the figures."""
        parallel = self.config.parallel.model_dump(mode="json")
        return {
            "gpus": self.gpus,
            "parallel": parallel,
            "train": self.config.train.model_dump(mode="json"),
            "step_seconds": self.estimate.seconds,
            "tokens_per_second_per_gpu": self.estimate.tokens_per_second_per_gpu,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.estimate.mfu,
            "mfu_convention": self.estimate.convention,
            "memory_gib": self.estimate.memory_gib,
            "memory_gib_by_stage": [stage.total / 2**30 for stage in self.estimate.stages],
            "fits": self.estimate.fits,
            "bubble": self.estimate.bubble,
            "exposed_communication": self.estimate.exposed_communication,
            "micro_batches": self.estimate.micro_batches,
            "seconds_by_part": dict(self.estimate.parts),
        }


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """What was found on a cluster."""

    space: Space
    objective: Objective
    fitting: tuple[Candidate, ...]
    """Best first."""
    too_large: tuple[Candidate, ...]
    """Predicted not to fit; best first, were the cards larger."""
    predicted: int
    """How many layouts were predicted."""


def rank(
    config: RunConfig,
    cluster: Cluster,
    *,
    objective: Objective = "throughput",
    profile: Profile = PACELINE,
    keep: int = KEPT,
    offload: bool = True,
    only: Only | None = None,
) -> Ranking:
    """All layouts of a recipe worth knowing, in order.

    Args:
        keep: degrees whose variants are predicted.
        offload: where nothing fits, try again with the optimizer's state in host memory.
        only: axes that are held to one value.
    """
    space = find_space(config, cluster, keep=keep, only=only)
    fitting: list[Candidate] = []
    too_large: list[Candidate] = []
    for of in space.kept:
        for candidate in _variants(space, of, profile):
            (fitting if candidate.estimate.fits else too_large).append(candidate)
    predicted = len(fitting) + len(too_large)
    if not fitting and offload and config.parallel.offload == "none" and config.optim.name != "adamw8bit":
        host = config.model_copy(update={"parallel": config.parallel.model_copy(update={"offload": "optimizer"})})
        if config.train.precision != "fp8":
            again = rank(host, cluster, objective=objective, profile=profile, keep=keep, offload=False, only=only)
            return replace(
                again,
                too_large=(*_ordered(too_large, "throughput"), *again.too_large),
                predicted=predicted + again.predicted,
            )
    return Ranking(
        space=space,
        objective=objective,
        fitting=tuple(_ordered(fitting, objective)),
        too_large=tuple(_ordered(too_large, "throughput")),
        predicted=predicted,
    )


def rank_counts(
    config: RunConfig,
    cluster: Cluster,
    *,
    objective: Objective = "throughput",
    profile: Profile = PACELINE,
    only: Only | None = None,
) -> Ranking:
    """`rank`; for `cost` also on a half, a quarter ... of the GPUs, all in one order."""
    first = rank(config, cluster, objective=objective, profile=profile, only=only)
    if objective != "cost":
        return first
    fitting, counts = list(first.fitting), cluster.gpus
    predicted = first.predicted
    while counts % 2 == 0 and counts > 1:
        counts //= 2
        smaller = replace(cluster, gpus=counts, gpus_per_node=min(cluster.gpus_per_node, counts))
        found = rank(config, smaller, objective=objective, profile=profile, keep=16, offload=False, only=only)
        predicted += found.predicted
        if not found.fitting:
            break
        fitting += found.fitting
    return replace(first, fitting=tuple(_ordered(fitting, "cost")), predicted=predicted)


def estimate_config(config: RunConfig, cluster: Cluster, profile: Profile = PACELINE) -> Candidate:
    """One layout as it is.

    Raises:
        ConfigError: `config.check` refuses it.
    """
    for problem in refusals(Asked.of(config, cluster.gpus)):
        raise ConfigError(problem.subject, evidence=problem.evidence, next_step=problem.next_step)
    return Candidate(config=config, gpus=cluster.gpus, estimate=predict(Workload.of(config), cluster, profile))


def _ordered(candidates: list[Candidate], objective: Objective) -> list[Candidate]:
    keys: dict[Objective, Callable[[Candidate], tuple[float, ...]]] = {
        "throughput": lambda found: (-found.tokens_per_second, found.estimate.memory_bytes),
        "memory": lambda found: (found.estimate.memory_bytes, -found.tokens_per_second),
        "cost": lambda found: (-found.estimate.tokens_per_second_per_gpu, found.gpus),
    }
    return sorted(candidates, key=keys[objective])


def _variants(space: Space, of: Degrees, profile: Profile) -> Iterator[Candidate]:
    """Micro-batches with 1F1B first, from small to large until none fits; then other schedules for the best two."""
    wanted = [
        (name, stages)
        for name, stages in schedules(space.config, of)
        if space.only.get("pipeline_schedule", name) == name and space.only.get("stages_per_rank", stages) == stages
    ]
    if not wanted:
        return
    (name, stages), *others = wanted
    tried: list[tuple[float, int]] = []
    sizes = micro_batch_sizes(space, of)
    for micro in sizes:
        fits = False
        for candidate in _recomputed(space, of, profile, micro, name, stages):
            yield candidate
            if candidate.estimate.fits:
                fits = True
                tried.append((candidate.estimate.seconds, micro))
        if not fits:
            break
    for micro in [micro for _, micro in sorted(tried)[:2]] or sizes[:1]:
        for other, count in others:
            yield from _recomputed(space, of, profile, micro, other, count)


def _recomputed(
    space: Space, of: Degrees, profile: Profile, micro: int, schedule: str, stages: int
) -> Iterator[Candidate]:
    """From no recomputation to all of it, until one fits."""
    for mode in [mode for mode in _RECOMPUTE if space.only.get("recompute", mode) == mode]:
        config = as_config(
            space.config,
            of,
            space.cluster,
            micro_batch_size=micro,
            recompute=mode,
            pipeline_schedule=schedule,
            stages_per_rank=stages,
        )
        if next(refusals(Asked.of(config, space.cluster.gpus)), None) is not None:
            return
        work = Workload.of(config)
        if work.why_not(space.cluster.gpus):
            return
        found = Candidate(config=config, gpus=space.cluster.gpus, estimate=predict(work, space.cluster, profile))
        yield found
        if found.estimate.fits:
            return
