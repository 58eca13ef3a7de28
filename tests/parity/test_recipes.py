"""Any recipe is refused with its reason before anything starts, or trains like one process.

Recipes are drawn (`recipes.py`) until so many have run: in float64, losses, router losses, gradient norms, every
gradient of the first step and every weight after two steps must be those of one process that runs the plain model in
one micro-batch. A stack trace or a hang fails too. The message says how to draw the same recipe again:

    pytest tests/parity/test_recipes.py --recipes 1 --recipes-seed 7 --recipes-first 31
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest

from distributed import run as on_ranks
from tests.parity.layouts import EXACT, worst
from tests.parity.recipes import Drawn, draw
from tests.training.steps import Job, Log, run_jobs

DEFAULT_SEED = 3
TOGETHER = 12
"""Recipes of one world size that run in one call of the pool."""
SECONDS = 40.0
"""For one recipe, on a busy machine; a hang is one that takes longer."""
START = 120.0
"""For new worker processes, which import torch first, on such a machine."""


@dataclass
class Tally:
    refused: int = 0
    by_rule: Counter[str] = field(default_factory=Counter)
    run: list[Drawn] = field(default_factory=list)
    largest_error: float = 0.0
    largest_in: str = ""


def run_recipes(rank: int, world_size: int, jobs: Sequence[Job]) -> list[Log]:
    """Tensors come back from one rank only: they are put together from all."""
    logs = run_jobs(rank, world_size, jobs)
    return logs if rank == 0 else [replace(log, gradients={}, weights={}) for log in logs]


@pytest.fixture(scope="module")
def drawn(request: pytest.FixtureRequest) -> Tally:
    wanted, seed = request.config.getoption("recipes"), request.config.getoption("recipes_seed")
    index = request.config.getoption("recipes_first")
    tally = Tally()
    single = wanted == 1
    while len(tally.run) < wanted:
        recipe = draw(DEFAULT_SEED if seed is None else seed, index)
        index += 1
        refused = recipe.refusal()
        if refused is None:
            tally.run.append(recipe)
        else:
            assert refused.subject and refused.next_step, f"{recipe}\n{refused}"
            tally.refused += 1
            tally.by_rule[refused.subject.split(" =")[0]] += 1
            if single:
                pytest.skip(f"refused: {refused}")
    return tally


def test_every_recipe_is_refused_or_trains_like_one_process(
    drawn: Tally, record_property: Callable[[str, object], None]
) -> None:
    failures: list[str] = []
    for ranks in sorted({recipe.ranks for recipe in drawn.run}):
        recipes = [recipe for recipe in drawn.run if recipe.ranks == ranks]
        for start in range(0, len(recipes), TOGETHER):
            failures += _compare(recipes[start : start + TOGETHER], drawn)
    axes = Counter(recipe.axes for recipe in drawn.run)
    summary = (
        f"{drawn.refused} refused, {len(drawn.run)} run, by number of axes {dict(sorted(axes.items()))}, largest error "
        f"{drawn.largest_error:.1e} ({drawn.largest_in})"
    )
    sys.stdout.write(f"{summary}\n")  # shown with -rP
    record_property("recipes", summary)
    assert not failures, f"{len(failures)} of: {summary}\n\n" + "\n\n".join(failures)
    if len(drawn.run) >= 20:
        assert sum(count for number, count in axes.items() if number >= 2) >= len(drawn.run) / 2, summary
        assert drawn.refused > 0, summary


def _compare(recipes: Sequence[Drawn], tally: Tally) -> list[str]:
    """What is wrong with recipes of one world size."""
    try:
        found = _logs(recipes)
    except AssertionError as failure:
        if len(recipes) == 1:
            return [f"{recipes[0]}\n{failure}"]
        # one of them broke the others' run: each on its own says which
        return [text for recipe in recipes for text in _compare([recipe], tally)]
    failures = []
    for recipe, (expected, by_rank) in zip(recipes, found, strict=True):
        errors = worst(by_rank[0], expected)
        name = max(errors, key=lambda key: errors[key])
        if errors[name] > tally.largest_error:
            tally.largest_error, tally.largest_in = errors[name], f"{name}, recipe {recipe.index}"
        bad = {name: f"{value:.1e}" for name, value in errors.items() if not value <= EXACT}
        numbers = {(tuple(log.losses), tuple(log.norms), tuple(log.aux_losses)) for log in by_rank}
        if bad or len(numbers) > 1 or not all(by_rank[0].finite):
            failures.append(f"{recipe}\n{bad or numbers}")
    return failures


def _logs(recipes: Sequence[Drawn]) -> list[tuple[Log, list[Log]]]:
    """Of each recipe: what one process gives, and what each rank saw."""
    patience = START + SECONDS * len(recipes)
    (alone,) = on_ranks(run_recipes, 1, [recipe.reference for recipe in recipes], timeout_seconds=patience)
    by_rank = on_ranks(run_recipes, recipes[0].ranks, [r.job for r in recipes], timeout_seconds=patience)
    return [(expected, [own[index] for own in by_rank]) for index, expected in enumerate(alone)]


def test_drawing_never_fails() -> None:
    """Whatever the seed: what cannot be is drawn, and refused."""
    for seed in range(5):
        for index in range(300):
            draw(seed, index)
