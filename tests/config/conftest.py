"""A recipe put to the check in one line."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paceline.config.check import check
from paceline.config.load import resolve
from paceline.report.finding import Finding

Findings = Callable[..., list[Finding]]


@pytest.fixture
def findings() -> Findings:
    """``findings(world_size, "parallel.tp=2", ...)``: what the check says of the default recipe so changed."""

    def ask(world_size: int, *overrides: str) -> list[Finding]:
        recipe = resolve({}, list(overrides))
        return check(recipe.config, recipe.registry, world_size)

    return ask
