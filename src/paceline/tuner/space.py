"""Which recipes can a trial be of? Those near the base that the rules of recipes admit, each with what `plan` says.

A point is a recipe told by what differs from the base. Points are made as the search asks for them: neighbours of a
point (one switch, or another structure: layout, micro-batch, recomputation), or all of a product that the user named.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from paceline.config.asked import Asked, divisors
from paceline.config.refusals import refusals
from paceline.config.run import RunConfig
from paceline.costs.step import StepEstimate, predict
from paceline.costs.workload import Workload
from paceline.errors import ConfigError
from paceline.planner.rough import Degrees
from paceline.planner.space import find_space, schedules
from paceline.tuner.machine import Machine
from paceline.tuner.neutrality import Neutrality, by_setting, worst
from paceline.tuner.settings import FOLLOWING, STRUCTURE, Setting, alternatives
from paceline.tuner.trial import Changes

KEPT_DEGREES = 24
"""Layouts that the closed-form guess of the planner puts first; a trial takes a minute."""
MOST_SEQUENCES = 32
"""Of a micro-batch."""
TIMES = (1, 2, 3, 4, 8)
"""The batch, where it may grow."""
MOST_POINTS = 20_000
"""Of a product that the user named."""

_LEAN: Changes = {
    "parallel.accumulate_dtype": "bf16",
    "parallel.fused_weight_gradients": True,
    "optim.fused_update": True,
}
"""Together they let weights be kept whole where no one of them would: gradients in bf16, which the update reads so."""

_DEGREES = frozenset({"parallel.tp", "parallel.pp", "parallel.cp", "parallel.dp_replicate"})

Key = tuple[tuple[str, Any], ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Point:
    """A recipe that may run."""

    changes: Changes
    config: RunConfig
    estimate: StepEstimate
    neutrality: Neutrality
    """The worst of all changes."""
    batch_ratio: float = 1.0
    """Sequences of a step, over those of the base."""

    @property
    def key(self) -> Key:
        return key_of(self.changes)


def key_of(changes: Changes) -> Key:
    return tuple(sorted(changes.items()))


def value_at(config: RunConfig, key: str) -> Any:
    """Of a dotted key of two parts, as all of `settings.TUNABLE` are."""
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def with_changes(config: RunConfig, changes: Changes) -> RunConfig:
    """Without validation: `refusals` judges."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    )


@dataclass(kw_only=True)
class Space:
    """Points around a base.

    Args:
        allowed: the classes of numerical effect that a point may have.
        vary: settings that may change, and to what; empty = all that `settings.py` knows.
    """

    base: RunConfig
    machine: Machine
    allowed: frozenset[Neutrality]
    vary: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    held: frozenset[str] = frozenset()
    """Settings that stay as they are."""
    advised: dict[str, list[Any]] = field(default_factory=dict)
    """What `explain` has proposed, by key."""

    def __post_init__(self) -> None:
        self._points: dict[Key, Point | None] = {}
        self._structures: list[Changes] | None = None
        # widths are the model's, which nothing here changes
        self._asked = Asked.of(self.base, self.machine.ranks)

    def advise(self, changes: Changes) -> None:
        """One more value of a setting to look at."""
        for key, value in changes.items():
            if value not in self.advised.setdefault(key, []):
                self.advised[key].append(value)

    @property
    def origin(self) -> Point:
        """The base itself.

        Raises:
            ConfigError: it cannot run on so many ranks.
        """
        found = self.point({})
        if found is None:
            self.base.parallel.shard_degree(self.machine.ranks)
            for problem in refusals(self._asked):
                raise ConfigError(problem.subject, evidence=problem.evidence, next_step=problem.next_step)
            raise ConfigError(
                Workload.of(self.base).why_not(self.machine.ranks) or "the recipe cannot run as it is",
                next_step="`paceline train --dry-run` says more.",
            )
        return found

    def point(self, wanted: Changes) -> Point | None:
        """The recipe with these values; None where no run of it is allowed. What nothing reads stays the base's."""
        asked = key_of(wanted)
        if asked not in self._points:
            changes = self._settled(wanted)
            key = key_of(changes)
            if key not in self._points:
                self._points[key] = self._made(changes)
            self._points[asked] = self._points[key]
        return self._points[asked]

    def _settled(self, wanted: Changes) -> Changes:
        changes = {key: value for key, value in wanted.items() if value != value_at(self.base, key)}
        config = with_changes(self.base, changes)
        for setting in self._switches:
            given = setting.key in changes and changes[setting.key] in setting.values
            if given and not setting.where(config, self.machine):
                del changes[setting.key]
                config = with_changes(self.base, changes)
        if config.parallel.pp == self.base.parallel.pp == 1:
            changes.pop("parallel.pipeline_schedule", None)
        if config.parallel.cp == self.base.parallel.cp == 1:
            changes.pop("parallel.cp_method", None)
        if self.base.parallel.dp_shard and not _DEGREES.isdisjoint(changes):
            fixed = config.parallel.model_ranks * config.parallel.dp_replicate
            changes["parallel.dp_shard"] = max(1, self.machine.ranks // fixed)
        if config.parallel.zero >= 2 and config.parallel.accumulate_dtype == "bf16":
            changes["parallel.accumulate_dtype"] = "fp32"  # FSDP sums in the precision of its reduction
        return changes

    def _named(self, changes: Changes) -> bool:
        """Whether the user named all of these, if any were named; what only follows others needs no naming."""
        return not self.vary or all(key in self.vary or key in FOLLOWING for key in changes)

    @property
    def _switches(self) -> Sequence[Setting]:
        return alternatives(self.advised)

    def _made(self, changes: Changes) -> Point | None:
        ranks = self.machine.ranks
        if not self.held.isdisjoint(changes) or not self._named(changes):
            return None
        config = with_changes(self.base, changes)
        both = {key: (value_at(self.base, key), value) for key, value in changes.items()}
        try:
            if config.train.global_batch_size % (config.train.micro_batch_size * config.parallel.dp_degree(ranks)):
                return None
            kinds = set(by_setting(self.base, config, ranks, both).values())
            if not kinds <= self.allowed:
                return None
            if next(refusals(replace(self._asked, config=config)), None) is not None:
                return None
            estimate = predict(Workload.of(config), self.machine.cluster, self.machine.profile)
        except ConfigError:
            return None
        ratio = config.train.global_batch_size / self.base.train.global_batch_size
        return Point(changes=changes, config=config, estimate=estimate, neutrality=worst(kinds), batch_ratio=ratio)

    # ---- around a point

    def neighbours(self, of: Point) -> Iterator[Point]:
        """One switch changed, or another structure under the same switches."""
        if self.vary:
            for key, values in self.vary.items():
                yield from self._each(of.changes, ({key: value} for value in (*values, value_at(self.base, key))))
            return
        for setting in self._switches:
            values = (*setting.values, value_at(self.base, setting.key))
            yield from self._each(of.changes, ({setting.key: value} for value in values))
        yield from self.restructured(of)

    def restructured(self, of: Point) -> Iterator[Point]:
        if not self.vary:
            yield from self._each(of.changes, self.structures)

    def named(self) -> Iterator[Point]:
        """All points of the product that the user named; nothing where there is none, or too large a one.

        A product beyond `MOST_POINTS` is walked by `neighbours` alone.
        """
        if not self.vary:
            return
        values = [(*given, value_at(self.base, key)) for key, given in self.vary.items()]
        count = 1
        for each in values:
            count *= len(dict.fromkeys(each))
        if count <= MOST_POINTS:
            every = (dict(zip(self.vary, chosen, strict=True)) for chosen in product(*map(dict.fromkeys, values)))
            yield from self._each({}, every)

    def _each(self, below: Changes, wanted: Iterable[Changes]) -> Iterator[Point]:
        for changes in wanted:
            found = self.point({**below, **changes})
            if found is not None:
                yield found

    @property
    def structures(self) -> list[Changes]:
        """Every layout, with every micro-batch and mode of recomputation that divides and is legal."""
        if self._structures is None:
            self._structures = list(self._all_structures())
        return self._structures

    def _all_structures(self) -> Iterator[Changes]:
        batch = self.base.train.global_batch_size
        for layout, share in self._layouts():
            for times in TIMES if "batch" in self.allowed else (1,):
                sized = {**layout, "train.global_batch_size": batch * times}
                for size in divisors(share * times):
                    if size > MOST_SEQUENCES:
                        continue
                    for mode in ("none", "selective", "full"):
                        yield {**sized, "train.micro_batch_size": size, "parallel.recompute": mode}
                    yield {**sized, "train.micro_batch_size": size}  # the base's own, which may be a list by layer
                    if layout["parallel.zero"] <= 1 and "precision" in self.allowed:
                        for mode in ("none", "selective"):
                            yield {**sized, "train.micro_batch_size": size, "parallel.recompute": mode, **_LEAN}

    def _layouts(self) -> Iterator[tuple[Changes, int]]:
        """Degrees and schedules, and the sequences of a step on a data-parallel rank. The base's own comes first."""
        base, ranks = self.base, self.machine.ranks
        batch = base.train.global_batch_size
        own = {key: value_at(base, key) for key in STRUCTURE if key.startswith("parallel.")}
        del own["parallel.recompute"]
        yield own, batch // base.parallel.dp_degree(ranks)
        for of in find_space(base, self.machine.cluster, keep=KEPT_DEGREES).kept:
            if self.machine.hardware is None and (of.tp, of.pp, of.cp, of.ep, of.etp) != _degrees(base):
                continue  # where nothing is known of links, another way to spread the model is a shot in the dark
            dp = ranks // (of.tp * of.pp * of.cp)
            for schedule, stages in schedules(base, of):
                layout = _layout(base, of, schedule, stages)
                if layout != own and batch % dp == 0:
                    yield layout, batch // dp


def _degrees(config: RunConfig) -> tuple[int, ...]:
    parallel = config.parallel
    return parallel.tp, parallel.pp, parallel.cp, parallel.ep, parallel.etp


def _layout(base: RunConfig, of: Degrees, schedule: str, stages: int) -> dict[str, Any]:
    changes: dict[str, Any] = {
        "parallel.tp": of.tp,
        "parallel.pp": of.pp,
        "parallel.cp": of.cp,
        "parallel.ep": of.ep,
        "parallel.etp": of.etp,
        "parallel.zero": of.zero,
        "parallel.dp_replicate": of.dp_replicate,
        "parallel.pipeline_schedule": schedule if of.pp > 1 else base.parallel.pipeline_schedule,
        "parallel.stages_per_rank": stages,
    }
    if base.parallel.pipeline_layout and (of.pp, stages) != (base.parallel.pp, base.parallel.stages_per_rank):
        changes["parallel.pipeline_layout"] = ()
    if of.pp == 1 and base.parallel.pipeline_schedule != "1f1b" and base.parallel.pp > 1:
        changes["parallel.pipeline_schedule"] = "1f1b"
    return changes
