"""What the layout rules read: a recipe on so many ranks, with the sizes that are cut worked out once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from paceline.config.model import FeedForwardSpec, ModelConfig
from paceline.config.parallel import ParallelConfig
from paceline.config.run import RunConfig
from paceline.report.finding import Finding


@dataclass(frozen=True, kw_only=True)
class Width:
    """The inner width of an MLP, and the field that decides it."""

    key: str
    size: int


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A recipe, a world size that its degrees make, and the widths that are cut over ranks."""

    config: RunConfig
    world_size: int
    dense_widths: tuple[Width, ...]
    """Of dense MLPs and shared experts: cut over tp."""
    expert_width: Width | None
    """Of one routed expert: cut over etp. None without experts."""

    @classmethod
    def of(cls, config: RunConfig, world_size: int) -> Asked:
        dense, expert = _widths(config.model)
        return cls(config=config, world_size=world_size, dense_widths=dense, expert_width=expert)

    def with_parallel(self, parallel: ParallelConfig) -> Asked:
        """The same model on the same ranks in another layout."""
        return replace(self, config=self.config.model_copy(update={"parallel": parallel}))

    def with_changes(self, changes: Mapping[str, Any]) -> Asked:
        """The same model and ranks with other values, by dotted key: ``{"train.seq_len": 64}``. Widths stay."""
        sections: dict[str, dict[str, Any]] = {}
        for key, value in changes.items():
            section, _, name = key.partition(".")
            sections.setdefault(section, {})[name] = value
        updated = {name: getattr(self.config, name).model_copy(update=values) for name, values in sections.items()}
        return replace(self, config=self.config.model_copy(update=updated))

    @property
    def parallel(self) -> ParallelConfig:
        return self.config.parallel

    @property
    def model(self) -> ModelConfig:
        return self.config.model

    @property
    def ranks_of_stage(self) -> int:
        """Ranks that work on the same layers: experts are spread over them."""
        return self.world_size // self.parallel.pp


def _widths(model: ModelConfig) -> tuple[tuple[Width, ...], Width | None]:
    dense: set[int] = set()
    shared: set[int] = set()
    expert: Width | None = None
    for block in model.blocks():
        part = block.feed_forward
        if isinstance(part, FeedForwardSpec):
            dense.add(part.ffn_size)
            continue
        expert = Width(key="model.moe.ffn_size" if model.moe.ffn_size else "model.ffn_size", size=part.expert.ffn_size)
        if part.shared is not None:
            shared.add(part.shared.ffn_size)
    widths = [Width(key="model.ffn_size", size=size) for size in sorted(dense)]
    widths += [Width(key="the width of the shared experts", size=size) for size in sorted(shared)]
    return tuple(widths), expert


def error(id_: str, subject: str, evidence: str, next_step: str) -> Finding:
    """A finding that refuses the run."""
    return Finding(id=id_, severity="error", subject=subject, evidence=evidence, next_step=next_step)


def divisors(number: int) -> list[int]:
    """All divisors of a positive number, in order."""
    small = [value for value in range(1, math.isqrt(number) + 1) if number % value == 0]
    return [*small, *(number // value for value in reversed(small) if value * value != number)]


def listed(values: list[int]) -> str:
    """``"1, 2, 4"``; long lists lose their middle."""
    shown = values if len(values) <= 12 else [*values[:6], *values[-6:]]
    return ", ".join(map(str, shown)) or "none"


def show(value: object) -> str:
    """A value as a recipe spells it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(show, value))}]"
    return repr(value)
