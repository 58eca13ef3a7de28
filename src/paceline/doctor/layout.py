"""Is there a better layout than the recipe's own, and what is to be known of it before it is taken? Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from paceline.config.nearest import as_sets
from paceline.config.run import RunConfig
from paceline.costs.profiles import Profile
from paceline.costs.step import SAFE_SHARE
from paceline.costs.workload import Cluster
from paceline.planner.rank import ALIKE, Candidate, Ranking, rank
from paceline.planner.reasons import layout_text, reasons
from paceline.report import units
from paceline.report.finding import Finding

_MUCH = 0.1
"""A gain above this is a warning: the recipe wastes so much."""

Warned = Callable[[RunConfig], Iterable[Finding]]
"""What this command would warn of in a recipe."""


def judge_layout(
    own: Candidate | None, config: RunConfig, cluster: Cluster, profile: Profile, warned: Warned
) -> Iterator[Finding]:
    """The recipe's layout beside the best that is predicted.

    Args:
        own: None for a preset, which has no layout.
    """
    ranking = rank(config, cluster, profile=profile)
    if not ranking.fitting:
        yield Finding(
            id="recipe.nothing-fits",
            severity="error",
            subject=f"no layout of this model fits {cluster.name}",
            evidence=f"{ranking.predicted} layouts were predicted, with recomputation and offload too.",
            next_step="; ".join(found.next_step for found in reasons(ranking, cluster, profile).helps[:2])
            or "More or larger GPUs, or a smaller model.",
        )
    elif own is None:
        best = ranking.fitting[0]
        yield Finding(
            id="recipe.first-layout",
            severity="note",
            subject=f"the best layout by prediction: {layout_text(best.config)}",
            evidence=f"{units.rate(best.tokens_per_second, 'tokens')} on {cluster.name}, "
            f"{units.gib(best.estimate.memory_bytes)} a card{', which is tight' if best.estimate.tight else ''}.",
            next_step="paceline plan says why, and --write makes a recipe of it.",
        )
    else:
        yield _beside_best(own, config, ranking, warned)


def _beside_best(own: Candidate, config: RunConfig, ranking: Ranking, warned: Warned) -> Finding:
    with_room = next((found for found in ranking.fitting if not found.estimate.tight), None)
    best = ranking.fitting[0]
    if with_room and _gain(with_room, best) >= -ALIKE:  # as fast as can be told
        best = with_room
    gain = _gain(best, own)
    if gain <= ALIKE and own.estimate.fits:
        return Finding(
            id="recipe.layout",
            severity="note",
            subject="no other layout is predicted to be faster by what predictions can tell",
            evidence=f"The best of {ranking.predicted} predicted layouts differs by {gain:+.1%}; below {ALIKE:.0%} "
            "two cannot be told apart.",
            next_step="Nothing; paceline plan compares them.",
        )
    cautions = [*_tight(best), *_warnings(best, own, warned)]
    steps = [as_sets(config, _changes(config, best.config)) + ("" if gain > _MUCH else ": try it for a few steps")]
    if best.estimate.tight and with_room and (_gain(with_room, own) > ALIKE or not own.estimate.fits):
        steps.append(
            f"with room ({units.gib(with_room.estimate.memory_bytes)} a card, {_gain(with_room, own):+.1%}): "
            + as_sets(config, _changes(config, with_room.config))
            + "".join(f" ({caution})" for caution in _warnings(with_room, own, warned))
        )
    return Finding(
        id="recipe.better-layout",
        severity="warning" if gain > _MUCH or not own.estimate.fits else "note",
        subject=f"another layout is predicted to be {f'{gain:.1%} faster' if gain > 0 else 'better'}"
        f"{', but tight' if best.estimate.tight else ''}: {layout_text(best.config, than=own.config)}",
        evidence=f"{units.rate(best.tokens_per_second, 'tokens')} against "
        f"{units.rate(own.tokens_per_second, 'tokens')} "
        f"of the recipe's own, and {units.gib(best.estimate.memory_bytes)} a card against "
        f"{units.gib(own.estimate.memory_bytes)}.{''.join(f' {caution}' for caution in cautions)}",
        next_step="; or ".join(steps) + ".",
        gain=f"{gain:+.1%} tokens/s, predicted" if own.estimate.fits else "fits",
    )


def _gain(other: Candidate, own: Candidate) -> float:
    return other.tokens_per_second / own.tokens_per_second - 1


def _tight(best: Candidate) -> Iterator[str]:
    if best.estimate.tight:
        yield f"That is above {SAFE_SHARE:.0%} of a card, where runs have been seen to run out of memory."


def _warnings(best: Candidate, own: Candidate, warned: Warned) -> Iterator[str]:
    """Those that the recipe's own layout does not have."""
    known = {(found.id, found.subject) for found in warned(own.config)}
    told = [found.subject for found in warned(best.config) if (found.id, found.subject) not in known]
    if told:
        yield f"This command would warn of it: {'; '.join(told)}."


def _changes(config: RunConfig, best: RunConfig) -> dict[str, Any]:
    """Fields of layout and batch in which the best differs."""
    changes = {}
    for section in ("parallel", "train"):
        before, after = getattr(config, section), getattr(best, section)
        for name in type(before).model_fields:
            # 0 is all ranks that are left, which the best spells out
            spelt = name == "dp_shard" and not before.dp_shard and after.dp_replicate == before.dp_replicate
            if getattr(before, name) != getattr(after, name) and not spelt:
                changes[f"{section}.{name}"] = getattr(after, name)
    return changes
