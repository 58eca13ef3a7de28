"""A machine that the planner is wrong about: it answers trials from predictions with hidden numbers and faults."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from paceline.config.load import load_recipe
from paceline.config.run import RunConfig
from paceline.costs.hardware import find_hardware
from paceline.costs.profiles import PACELINE
from paceline.costs.step import predict
from paceline.costs.workload import Workload
from paceline.tuner.machine import Machine
from paceline.tuner.neutrality import classes_up_to
from paceline.tuner.search import Search
from paceline.tuner.settings import setting_of
from paceline.tuner.space import Key, Point, Space, key_of
from paceline.tuner.trial import Ended, Measurement, Trial

STEPS = 8
HIDDEN: Mapping[str, float] = {
    "gemm_efficiency": 0.1,
    "attention_efficiency": 0.2,
    "hbm_efficiency": 0.25,
    "score_efficiency": 0.4,
    "cast_efficiency": 0.25,
    "optimizer_efficiency": 0.2,
    "nvlink_efficiency": 0.15,
    "launch_us": 0.4,
    "micro_batch_ms": 0.5,
    "gradient_overlap": 0.2,
    "parameter_overlap": 0.2,
    "expert_gemm_efficiency": 0.2,
    "expert_hbm_efficiency": 0.3,
}
"""By number of the profile: how far the truth is from what the planner thinks, one standard deviation of logarithms."""


def two_h200s(ranks: int = 2) -> Machine:
    card = find_hardware("H200 SXM")
    assert card is not None
    return Machine(
        name="NVIDIA H200",
        on_gpu=True,
        ranks=ranks,
        memory_bytes=card.memory_bytes,
        hardware=card,
        has_flash4=True,
    )


@dataclass
class Simulated:
    """Answers like `processes.ProcessRunner`. What is hidden depends on the seed alone.

    Args:
        room: the true limit over what the planner thinks there is; None = hidden, 0.85 to 1.1.
        faults: how likely each setting of a kind crashes here; the base never does.
    """

    space: Space
    seed: int
    noise: float = 0.004
    faults: float = 0.05
    wrong_losses: float = 0.02
    room: float | None = None
    number: int = 0
    said: dict[Any, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        random = np.random.default_rng([self.seed, 1])
        factors = {name: math.exp(random.normal(0, spread)) for name, spread in HIDDEN.items()}
        values = {name: getattr(PACELINE, name) * factor for name, factor in factors.items()}
        for name in ("gradient_overlap", "parameter_overlap", "hbm_efficiency", "nvlink_efficiency"):
            values[name] = min(values[name], 0.95)
        numbers: dict[str, Any] = values
        self.profile = replace(PACELINE, **numbers)
        self.limit = self.space.machine.room_bytes * (self.room or random.uniform(0.85, 1.1))
        self.activations = math.exp(random.normal(0, 0.08))
        self.states = math.exp(random.normal(0, 0.015))
        self.speed = math.exp(random.normal(0, 0.08))

    def run(self, number: int, config: RunConfig, *, limit_seconds: float) -> Ended:
        changes = self.changes_of(config)
        self.number += 1
        random = np.random.default_rng([self.seed, 2, self.number])
        if self.crashes(changes):
            return Ended(seconds=25.0, failure="crash", reason="exit code 1: RuntimeError: of this machine")
        if self.bytes_of(config) > self.limit:
            return Ended(seconds=22.0, failure="memory", reason="torch.OutOfMemoryError: CUDA out of memory")
        seconds = self.seconds_of(config) * (1 + random.normal(0, self.noise))
        steps = tuple(float(value) for value in seconds * (1 + random.normal(0, self.noise, STEPS)))
        wrong = 1.5 if self.is_wrong(changes) else 1.0 + 1e-4 * random.normal()
        logged = ({"step": 1.0, "loss": 11.0, "grad_norm": 2.0 * wrong},)
        measured = Measurement(
            seconds_by_step=steps, peak_bytes=self.bytes_of(config), logged=logged, devices="simulated"
        )
        return Ended(seconds=30.0 + (STEPS + 3) * seconds, measured=measured)

    def changes_of(self, config: RunConfig) -> dict[str, Any]:
        keys = self.space.vary or dict.fromkeys(ALL_KEYS, ())
        found = {}
        for key in keys:
            section, _, name = key.partition(".")
            value, base = (getattr(getattr(one, section), name) for one in (config, self.space.base))
            if value != base:
                found[key] = value
        return found

    # ---- what is true

    def seconds_of(self, config: RunConfig) -> float:
        """Of a step, without noise."""
        changes = self.changes_of(config)
        seconds = predict(Workload.of(config), self.space.machine.cluster, self.profile).seconds * self.speed
        for key, value in changes.items():
            setting = setting_of(key, value)
            own = np.random.default_rng([self.seed, 3, _number((key, str(value)))])
            seconds *= math.exp(setting.gain.get(value, 0.0) + own.normal(0, 0.5 * setting.spread))
        own = np.random.default_rng([self.seed, 4, _number(key_of(changes))])
        return float(seconds * math.exp(own.normal(0, 0.008)))

    def bytes_of(self, config: RunConfig) -> float:
        stage = max(predict(Workload.of(config), self.space.machine.cluster).stages, key=lambda each: each.total)
        kept = stage.activations + stage.logits + stage.gathered
        own = np.random.default_rng([self.seed, 5, _number(key_of(self.changes_of(config)))])
        return float((kept * self.activations + (stage.total - kept) * self.states) * math.exp(own.normal(0, 0.01)))

    def crashes(self, changes: Mapping[str, Any]) -> bool:
        return any(self._fault((key, str(value)), 6, self.faults) for key, value in changes.items())

    def is_wrong(self, changes: Mapping[str, Any]) -> bool:
        return any(self._fault((key, str(value)), 7, self.wrong_losses) for key, value in changes.items())

    def _fault(self, item: tuple[str, str], kind: int, probability: float) -> bool:
        if item[0] == "train.micro_batch_size":
            return False
        return bool(np.random.default_rng([self.seed, kind, _number(item)]).random() < probability)

    def counts(self, point: Point) -> bool:
        """Whether it runs here, and is the same training."""
        changes = dict(point.changes)
        return not (self.crashes(changes) or self.is_wrong(changes) or self.bytes_of(point.config) > self.limit)


ALL_KEYS = (
    "parallel.tp", "parallel.pp", "parallel.cp", "parallel.ep", "parallel.zero", "parallel.recompute",
    "parallel.compile", "parallel.pipeline_schedule", "parallel.stages_per_rank", "parallel.fused_weight_gradients",
    "parallel.reduce_dtype", "parallel.accumulate_dtype", "parallel.expert_kernels", "parallel.expert_dispatch",
    "train.attention_kernel", "train.loss_kernel", "train.micro_batch_size", "train.precision",
    "train.fp8_cast_kernel", "train.fp8_head", "train.fp8_experts", "optim.fused_update",
)  # fmt: skip


def _number(item: object) -> int:
    """The same in every process, which `hash` of a text is not."""
    return int.from_bytes(repr(item).encode()[-60:], "big") % (2**63)


SPACES: tuple[tuple[str, int, tuple[str, ...], Mapping[str, tuple[Any, ...]]], ...] = (
    (
        "recipes/llama3_8b.toml", 2,
        ("train.global_batch_size=32", "train.micro_batch_size=1", "train.seq_len=4096", "parallel.recompute=full",
         "parallel.compile=false"),
        {
            "train.micro_batch_size": (1, 2, 4, 8, 16),
            "parallel.recompute": ("none", "selective", "full"),
            "parallel.compile": (True, False),
            "optim.fused_update": (True, False),
        },
    ),
    (
        "recipes/gpt_13b.toml", 2,
        ("model.num_layers=16", "train.global_batch_size=32", "train.micro_batch_size=1", "parallel.zero=3",
         "parallel.recompute=full", "parallel.reduce_dtype=fp32"),
        {
            "train.micro_batch_size": (1, 2, 4, 8, 16),
            "parallel.recompute": ("none", "selective", "full"),
            "parallel.zero": (1, 3),
            "train.attention_kernel": ("reference", "auto"),
        },
    ),
    (
        "recipes/llama3_8b.toml", 1,
        ("model.num_layers=10", "train.global_batch_size=32", "train.seq_len=4096", "parallel.recompute=full",
         "parallel.compile=false", "train.loss_kernel=plain", "parallel.fused_weight_gradients=false"),
        {
            "train.micro_batch_size": (1, 2, 4, 8, 16),
            "parallel.recompute": ("none", "selective", "full"),
            "train.loss_kernel": ("plain", "chunked"),
            "parallel.fused_weight_gradients": (True, False),
        },
    ),
    (
        "recipes/llama3_8b.toml", 8,
        ("train.global_batch_size=64", "train.micro_batch_size=1", "train.seq_len=4096"),
        {
            "parallel.tp": (1, 2, 4),
            "parallel.pp": (1, 2),
            "train.micro_batch_size": (1, 2, 4, 8),
            "parallel.recompute": ("none", "selective", "full"),
        },
    ),
)  # fmt: skip
"""(recipe, ranks, overrides, settings): 60 points and more, of which a part does not fit."""


def space_of(number: int) -> Space:
    recipe, ranks, overrides, vary = SPACES[number]
    return Space(
        base=load_recipe(recipe, list(overrides)).config,
        machine=two_h200s(ranks),
        allowed=classes_up_to("chance"),
        vary=vary,
    )


def trials_needed(search_of: Any, space: Space, runner: Simulated, *, within: float = 0.02, most: int = 14) -> int:
    """Trials, the base among them, until the best measured is truly within ``within`` of the best there is.

    ``most`` + 1 where that takes longer, or the search gives up before.
    """
    truth: dict[Key, float] = {
        point.key: runner.seconds_of(point.config) for point in space.named() if runner.counts(point)
    }
    best = min(truth.values())
    trials: list[Trial] = []
    while len(trials) < most:
        search: Search = search_of(trials)
        found = search.propose()
        if found is None:
            return most + 1
        trials.append(as_trial(len(trials), found.point, runner))
        if trials[-1].is_good and truth[found.point.key] <= (1 + within) * best:
            return len(trials)
    return most + 1


def as_trial(number: int, point: Point, runner: Simulated) -> Trial:
    ended = runner.run(number, point.config, limit_seconds=600)
    wrong = ended.measured is not None and runner.is_wrong(dict(point.changes))
    return Trial(
        number=number, changes=point.changes, outcome=ended.failure or ("rejected" if wrong else "measured"),
        why="", expected=None, ended=ended,
    )  # fmt: skip
