"""On which cards would an estimate fit? For the dry run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paceline.config.asked import Asked
from paceline.config.nearest import as_sets
from paceline.config.refusals import mends, refusals
from paceline.config.run import RunConfig
from paceline.costs.hardware import Hardware, common_hardware, find_hardware, hardware_names
from paceline.costs.memory import MemoryEstimate, estimate
from paceline.costs.step import SAFE_SHARE
from paceline.errors import ConfigError
from paceline.planner.machines import make_cluster
from paceline.planner.rank import rank
from paceline.report import units
from paceline.report.finding import Finding

_WORTHWHILE = 0.97
"""Changes that leave more of the estimate are not worth a try."""


def card_lines(config: RunConfig, memory: MemoryEstimate) -> tuple[str, ...]:
    """Which cards it fits, is tight on, and does not fit; the one of `cluster.gpu` first.

    Raises:
        ConfigError: `cluster.gpu` is not in the table of hardware.
    """
    verdicts: dict[str, list[str]] = {"fits": [], "tight": [], "does not fit": []}
    for card in common_hardware():
        share = _share(memory, card)
        verdict = "fits" if share <= SAFE_SHARE else "tight" if share <= 1 else "does not fit"
        verdicts[verdict].append(card.name)
    lines = [f"{verdict}: {', '.join(cards)}" for verdict, cards in verdicts.items() if cards]
    own = asked_card(config)
    if own is not None:
        lines.insert(0, f"cluster.gpu: {_share(memory, own):.0%} of the {units.size(own.memory_bytes)} of {own.name}")
    needed = units.size(memory.total / SAFE_SHARE)
    return (
        *lines,
        f"To fit, a card's driver must leave {needed} to programs: {SAFE_SHARE:.0%} of it is the estimate.",
        "Tight: the estimate is more than that share, but not more than all.",
    )


def card_findings(config: RunConfig, memory: MemoryEstimate, world_size: int) -> list[Finding]:
    """A warning where it is tight on the card that `cluster.gpu` names; nothing where none is named."""
    card = asked_card(config)
    if card is None or _share(memory, card) <= SAFE_SHARE:
        return []
    return [
        Finding(
            id="costs.memory",
            severity="warning",
            subject=f"the estimate is {_share(memory, card):.0%} of the {units.size(card.memory_bytes)} of {card.name}",
            evidence=f"Up to {SAFE_SHARE:.0%} is safe; the largest part is {_largest(memory)}.",
            next_step=f"Try {ways_to_less(config, world_size, memory, card)}.",
        )
    ]


def ways_to_less(config: RunConfig, world_size: int, memory: MemoryEstimate, card: Hardware) -> str:
    """Changes that pass the check and lower the estimate, each with what it would be; the cheapest in time first.
    Where none of them fits the card, the planner's layout that does."""
    asked, ways = Asked.of(config, world_size), []
    least = memory.total
    for changes in _candidates(config):
        other = asked.with_changes(changes)
        changes |= mends(other)
        other = asked.with_changes(changes)
        if not _fits_ranks(other) or next(refusals(other), None) is not None:
            continue
        total = estimate(other.config, world_size).total
        if total < _WORTHWHILE * memory.total:
            ways.append(f"{as_sets(config, changes)} ({units.size(total)})")
            least = min(least, total)
    if least > card.memory_bytes and (planned := _planned(config, world_size, card)):
        return f"{planned}; or more ranks"
    return "; or ".join([*ways, "more ranks"])


def _planned(config: RunConfig, world_size: int, card: Hardware) -> str:
    """The fastest layout of `paceline plan` that fits by both estimates; empty without one."""
    try:
        cluster, _ = make_cluster(card, world_size, gpus_per_node=min(config.cluster.gpus_per_node, world_size))
    except ConfigError:  # nodes that the ranks do not fill: told elsewhere
        return ""
    for found in rank(config, cluster, keep=8, probe=60).fitting:
        total = estimate(found.config, world_size).total
        if total > card.memory_bytes:
            continue
        parallel = found.config.parallel
        changes = {f"parallel.{name}": getattr(parallel, name) for name in _LAYOUT}
        changes["train.micro_batch_size"] = found.config.train.micro_batch_size
        return f"{as_sets(config, changes)} ({units.size(total)}), which `paceline plan` finds"
    return ""


_LAYOUT = (
    *("tp", "pp", "cp", "ep", "etp", "dp_replicate", "dp_shard", "zero"),
    *("pipeline_schedule", "stages_per_rank", "recompute", "offload"),
)
"""Fields of `[parallel]` that the planner chooses."""


def _candidates(config: RunConfig) -> Iterator[dict[str, Any]]:
    parallel, train = config.parallel, config.train
    if train.micro_batch_size % 2 == 0:
        yield {"train.micro_batch_size": train.micro_batch_size // 2}
    if parallel.zero < 3:
        yield {"parallel.zero": 3}
    if parallel.recompute == "none":
        yield {"parallel.recompute": "selective"}
    if parallel.recompute != "full":
        yield {"parallel.recompute": "full"}
    yield {"parallel.tp": 2 * parallel.tp}
    if parallel.zero < 3 and parallel.recompute != "full":
        yield {"parallel.zero": 3, "parallel.recompute": "full"}
    if parallel.offload == "none":
        yield {"parallel.offload": "optimizer"}


def _fits_ranks(asked: Asked) -> bool:
    parallel = asked.parallel
    copies, rest = divmod(asked.world_size, parallel.model_ranks * parallel.dp_replicate)
    return not rest and parallel.dp_shard in (0, copies)


def asked_card(config: RunConfig) -> Hardware | None:
    """The card that `cluster.gpu` names, if it names one.

    Raises:
        ConfigError: it is not in the table of hardware.
    """
    if not config.cluster.gpu:
        return None
    card = find_hardware(config.cluster.gpu)
    if card is None:
        raise ConfigError(
            f"cluster.gpu = {config.cluster.gpu!r} is not in the table of hardware",
            evidence=f"It has: {', '.join(hardware_names())}.",
            next_step="Take one of these names, or leave cluster.gpu empty.",
        )
    return card


def _share(memory: MemoryEstimate, card: Hardware) -> float:
    return memory.total / card.memory_bytes


def _largest(memory: MemoryEstimate) -> str:
    sizes = {kind: size for kind, size in memory.as_dict().items() if kind not in ("total", "host")}
    kind = max(sizes, key=lambda name: sizes[name])
    return f"{kind}, {units.size(sizes[kind])}"
