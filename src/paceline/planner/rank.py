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
from paceline.costs.memory import estimate
from paceline.costs.profiles import PACELINE, Profile
from paceline.costs.step import StepEstimate, predict
from paceline.costs.workload import Cluster, Workload
from paceline.errors import ConfigError
from paceline.planner.rough import Degrees
from paceline.planner.space import (
    PROBED,
    Only,
    Space,
    as_config,
    find_space,
    micro_batch_sizes,
    schedules,
    spread,
)

Objective = Literal["throughput", "memory", "cost"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)

KEPT = 40
"""Degrees whose variants are all predicted."""

ALIKE = 0.01
"""Speeds that differ by less are a tie: predictions do not tell them apart."""

_USUAL = ("1f1b", "interleaved_1f1b")

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

    @property
    def host_bytes(self) -> int:
        """Of host memory, pinned, for the fullest rank's offloaded states."""
        return estimate(self.config, self.gpus).host if self.config.parallel.offload != "none" else 0

    @property
    def oddness(self) -> int:
        """How many things beyond data parallelism in one schedule a layout needs."""
        parallel = self.config.parallel
        axes = (parallel.tp, parallel.pp, parallel.cp, parallel.ep, parallel.dp_replicate, parallel.stages_per_rank)
        return sum(axis > 1 for axis in axes) + (parallel.pp > 1 and parallel.pipeline_schedule not in _USUAL)

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
            "host_gib_per_rank": self.host_bytes / 2**30,
            "fits": self.estimate.fits,
            "tight": self.estimate.tight,
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
    """Best first; where speed decides, of those within `ALIKE` of the fastest the plainest, then the lightest."""
    too_large: tuple[Candidate, ...]
    """Predicted not to fit; best first, were the cards larger."""
    predicted: int
    """How many layouts were predicted."""
    least_on_cards: float | None = None
    """Where none fits with the optimizer's state on the cards, so that host memory was tried: bytes that the lightest
    of those needs at least."""


def rank(
    config: RunConfig,
    cluster: Cluster,
    *,
    objective: Objective = "throughput",
    profile: Profile = PACELINE,
    keep: int = KEPT,
    probe: int = PROBED,
    offload: bool = True,
    only: Only | None = None,
) -> Ranking:
    """All layouts of a recipe worth knowing, in order.

    Args:
        keep: degrees whose variants are all predicted: the best of those probed.
        probe: degrees that are predicted with a few variants.
        offload: where nothing fits, try again with the optimizer's state in host memory.
        only: axes that are held to one value.
    """
    search = _Search(find_space(config, cluster, keep=probe, only=only), profile)
    search.run(keep)
    space, fitting, too_large = search.space, search.fitting, search.too_large
    predicted = len(fitting) + len(too_large)
    # beside frozen weights there is next to nothing to send to the host
    has_states = config.optim.name != "adamw8bit" and not config.lora.on
    if not fitting and offload and config.parallel.offload == "none" and has_states:
        host = config.model_copy(update={"parallel": config.parallel.model_copy(update={"offload": "optimizer"})})
        if config.train.precision != "fp8":
            again = rank(
                host, cluster, objective=objective, profile=profile, keep=keep, probe=probe, offload=False, only=only
            )
            return replace(
                again,
                too_large=(*_ordered(too_large, "throughput"), *again.too_large),
                predicted=predicted + again.predicted,
                least_on_cards=min(
                    (
                        *(least for _, least in space.too_large),
                        *(one.estimate.memory_bytes for one in too_large),
                    ),
                    default=None,
                ),
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
        found = rank(
            config, smaller, objective=objective, profile=profile, keep=16, probe=200, offload=False, only=only
        )
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
    ordered = sorted(candidates, key=keys[objective])
    if objective == "memory" or not ordered:
        return ordered
    fastest = ordered[0]
    enough = (1 - ALIKE) * fastest.estimate.tokens_per_second_per_gpu
    ties = [one for one in ordered if one.gpus == fastest.gpus and one.estimate.tokens_per_second_per_gpu >= enough]
    first = min(ties, key=lambda one: (one.oddness, one.estimate.memory_bytes))
    return [first, *(one for one in ordered if one is not first)]


class _Search:
    """Predicts a few variants of all degrees, then all of the best ones'; nothing twice."""

    def __init__(self, space: Space, profile: Profile) -> None:
        self.space, self.profile = space, profile
        # widths are the model's, which no variant changes
        self._asked = Asked.of(space.config, space.cluster.gpus)
        self.fitting: list[Candidate] = []
        self.too_large: list[Candidate] = []
        self._done: dict[tuple[Degrees, int, str, int], Candidate | None] = {}

    def run(self, keep: int) -> None:
        probed = []
        for place, of in enumerate(self.space.kept):
            found = list(self._probes(of))
            fits = [one.estimate.seconds for one in found if one.estimate.fits]
            if found:
                # what fits comes first, then what nearly does
                nearest = min(one.estimate.memory_bytes for one in found)
                probed.append(((not fits, min(fits) if fits else nearest), place, of))
        probed.sort(key=lambda entry: entry[:2])
        for of in spread([of for _, _, of in probed], keep):
            self._variants(of)

    def _probes(self, of: Degrees) -> Iterator[Candidate]:
        """The smallest micro-batch, four and sixteen, until one does not fit, in the schedule with the least idle
        time."""
        wanted = self._schedules(of)
        sizes = micro_batch_sizes(self.space, of)
        if not wanted or not sizes:
            return
        name, stages = max(wanted, key=lambda entry: (entry[0] == "interleaved_1f1b", entry[1]))
        steps = (max(size for size in sizes if size <= max(limit, sizes[0])) for limit in (1, 4, 16))
        for micro in dict.fromkeys(steps):
            found = self._recomputed(of, micro, name, stages)
            if found is not None:
                yield found
            if found is None or not found.estimate.fits:
                return

    def _schedules(self, of: Degrees) -> list[tuple[str, int]]:
        only = self.space.only
        return [
            (name, stages)
            for name, stages in schedules(self.space.config, of)
            if only.get("pipeline_schedule", name) == name and only.get("stages_per_rank", stages) == stages
        ]

    def _variants(self, of: Degrees) -> None:
        """Micro-batches with 1F1B first, from small to large until none fits; other schedules for the best two."""
        wanted = self._schedules(of)
        if not wanted:
            return
        (name, stages), *others = wanted
        tried: list[tuple[float, int]] = []
        sizes = micro_batch_sizes(self.space, of)
        for micro in sizes:
            found = self._recomputed(of, micro, name, stages)
            if found is None or not found.estimate.fits:
                break
            tried.append((found.estimate.seconds, micro))
        for micro in [micro for _, micro in sorted(tried)[:2]] or sizes[:1]:
            for other, count in others:
                self._recomputed(of, micro, other, count)

    def _recomputed(self, of: Degrees, micro: int, schedule: str, stages: int) -> Candidate | None:
        """From no recomputation to all of it, until one fits; the last one. None if it is not legal."""
        key = (of, micro, schedule, stages)
        if key not in self._done:
            self._done[key] = self._predicted(of, micro, schedule, stages)
        return self._done[key]

    def _predicted(self, of: Degrees, micro: int, schedule: str, stages: int) -> Candidate | None:
        space, last = self.space, None
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
            gpus = space.cluster.gpus
            if last is None and next(refusals(replace(self._asked, config=config)), None) is not None:
                return None
            work = Workload.of(config)
            if work.why_not(gpus):
                return None
            last = Candidate(config=config, gpus=gpus, estimate=predict(work, space.cluster, self.profile))
            (self.fitting if last.estimate.fits else self.too_large).append(last)
            if last.estimate.fits:
                break
        return last
