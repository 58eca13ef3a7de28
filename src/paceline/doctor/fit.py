"""Does the recipe's own layout fit the card, and what would make it lighter? Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from paceline.config.asked import Asked
from paceline.config.nearest import as_sets
from paceline.config.refusals import refusals
from paceline.config.run import RunConfig
from paceline.costs.profiles import Profile
from paceline.costs.step import SAFE_SHARE
from paceline.costs.workload import Cluster
from paceline.planner.rank import Candidate, estimate_config
from paceline.report import units
from paceline.report.finding import Finding

_LIGHTER = 0.95
"""A change is named if it leaves no more than this of the memory."""

_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def judge_fit(own: Candidate, cluster: Cluster, profile: Profile, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Whether the fullest card holds it.

    Args:
        environ: variables of the run.
    """
    estimate, room = own.estimate, cluster.gpu.memory_bytes
    numbers = f"{units.gib(estimate.memory_bytes)} of {units.gib(room)} on the fullest card, by estimate"
    if not estimate.fits:
        yield Finding(
            id="recipe.memory",
            severity="error",
            subject=f"the recipe does not fit: {numbers}",
            evidence=f"On {cluster.name}, before CUDA's context and NCCL's buffers.",
            next_step="paceline plan lists layouts that fit; paceline plan RECIPE --explain-memory says what is large.",
        )
    elif estimate.tight:
        segments = () if _expandable(environ) else (f"export {_ALLOCATOR[0]}=expandable_segments:True",)
        ways = (*segments, *_lighter(own, cluster, profile))
        yield Finding(
            id="recipe.memory",
            severity="warning",
            subject=f"the recipe fits, but tightly: {numbers}",
            evidence=f"Estimates above {SAFE_SHARE:.0%} of a card have been seen to run out; fragmentation comes on "
            "top.",
            next_step="; or ".join([*ways, "a lighter layout of paceline plan"]) + ".",
        )
    else:
        yield Finding(
            id="recipe.memory",
            severity="note",
            subject=f"the recipe fits: {numbers}",
            evidence=f"On {cluster.name}: {units.rate(own.tokens_per_second, 'tokens')} predicted, "
            f"{units.duration(estimate.seconds)} a step"
            + (f", MFU {units.percent(estimate.mfu)}" if estimate.mfu else "")
            + ".",
            next_step="Nothing.",
        )


def _expandable(environ: Mapping[str, str]) -> bool:
    """Whether torch's allocator grows its segments already, by either name of the variable."""
    return any(
        "expandable_segments:true" in environ.get(name, "").lower().replace(" ", "").replace("'", "")
        for name in _ALLOCATOR
    )


def _lighter(own: Candidate, cluster: Cluster, profile: Profile) -> Iterator[str]:
    """Single changes that are allowed and leave the card less full, with what it would hold then."""
    asked = Asked.of(own.config, cluster.gpus)
    for changes in _changes(own.config, cluster.gpus):
        other = asked.with_changes(changes)
        if next(refusals(other), None) is not None:
            continue
        memory = estimate_config(other.config, cluster, profile).estimate.memory_bytes
        if memory <= _LIGHTER * own.estimate.memory_bytes:
            yield f"{as_sets(own.config, changes)} ({units.gib(memory)})"


def _changes(config: RunConfig, ranks: int) -> Iterator[dict[str, Any]]:
    parallel, train = config.parallel, config.train
    if parallel.recompute == "none":
        yield {"parallel.recompute": "selective"}
    elif parallel.recompute != "full":
        yield {"parallel.recompute": "full"}
    if parallel.zero < 3 and ranks > parallel.model_ranks:
        yield {"parallel.zero": 3}
    if train.micro_batch_size % 2 == 0:
        yield {"train.micro_batch_size": train.micro_batch_size // 2}
