"""The numbers of `adapter_config.json`: each module's rank and alpha, read as PEFT reads them, and refused by name."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from paceline.errors import CheckpointError

CONFIG = "adapter_config.json"
Number = TypeVar("Number", int, float)
_DEFAULT = 8
"""PEFT's, of both `r` and `lora_alpha`."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    rank: int
    ranks: Mapping[str, int]
    """By pattern: PEFT matches the end of a module's name."""
    alpha: float
    alphas: Mapping[str, float]
    """The same."""
    use_rslora: bool

    @classmethod
    def of(cls, path: Path, config: Mapping[str, Any]) -> Settings:
        """Those of the adapter in the folder ``path``.

        Raises:
            CheckpointError: a value is not what it has to be; file, field and value are named.
        """
        file = path / CONFIG
        return cls(
            rank=_rank(file, "r", config.get("r", _DEFAULT)),
            ranks={p: _rank(file, f"rank_pattern[{p!r}]", v) for p, v in _patterns(file, "rank_pattern", config)},
            alpha=_alpha(file, "lora_alpha", config.get("lora_alpha", _DEFAULT)),
            alphas={p: _alpha(file, f"alpha_pattern[{p!r}]", v) for p, v in _patterns(file, "alpha_pattern", config)},
            use_rslora=bool(config.get("use_rslora")),
        )

    def scale(self, module: str) -> float:
        """What the product of this module's pair is multiplied by."""
        rank, alpha = self.rank_of(module), _of(self.alphas, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def rank_of(self, module: str) -> int:
        """Rows of this module's first matrix."""
        return _of(self.ranks, module, self.rank)

    def said_rank(self, module: str) -> str:
        """Its rank as the file says it: ``"r = 8"``, or the pattern that it is under."""
        pattern = next((one for one in self.ranks if _end(one).fullmatch(module)), None)
        return f"r = {self.rank}" if pattern is None else f"rank_pattern[{pattern!r}] = {self.ranks[pattern]}"


def _of(patterns: Mapping[str, Number], module: str, default: Number) -> Number:
    return next((value for pattern, value in patterns.items() if _end(pattern).fullmatch(module)), default)


def _end(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"(.*\.)?({pattern})")


def _patterns(file: Path, field: str, config: Mapping[str, Any]) -> list[tuple[str, Any]]:
    found = config.get(field)
    if found is None:
        return []
    if not isinstance(found, Mapping):
        raise _wrong(file, field, found, "a table of patterns")
    for pattern in found:
        try:
            _end(pattern)
        except re.error as error:
            raise _wrong(file, field, found, f"a table of patterns, and {pattern!r} is none: {error}") from error
    return list(found.items())


def _rank(file: Path, field: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _wrong(file, field, value, "a whole number from 1")
    return value


def _alpha(file: Path, field: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _wrong(file, field, value, "a number")
    return float(value)


def _wrong(file: Path, field: str, value: object, wanted: str) -> CheckpointError:
    return CheckpointError(
        f"{field} = {value!r} in {file}",
        evidence=f"It has to be {wanted}.",
        next_step="Copy the adapter again, or mend the file: no weights can be scaled by this.",
    )
