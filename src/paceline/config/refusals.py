"""Everything that refuses a recipe on so many ranks: what `check` reports, and what a proposed layout must pass.

Rules that depend on sizes are in `layout.py` and `schedules.py`, pairs of options in `exclusions.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from paceline.config.asked import Asked, error, listed
from paceline.config.exclusions import EXCLUSIONS, exclusions
from paceline.config.layout import batch, layout_errors
from paceline.config.locality import cluster_size
from paceline.config.run import RunConfig
from paceline.report.finding import Finding


def refusals(asked: Asked) -> Iterator[Finding]:
    """Every error; the degrees make the world size."""
    yield from others(asked)
    yield from batch(asked)
    yield from layout_errors(asked)


def others(asked: Asked) -> Iterator[Finding]:
    """What no other layout and no other batch would mend."""
    yield from _lengths(asked.config)
    yield from _recompute(asked.config)
    yield from _fp8_layers(asked.config)
    yield from exclusions(asked.config, of_layout=False)
    yield from cluster_size(asked)


def mends(asked: Asked) -> dict[str, Any]:
    """Values by dotted key that mend every one of `others`: the nearest that do."""
    config, changes = asked.config, dict[str, Any]()
    if next(_lengths(config), None) is not None:
        changes["train.seq_len"] = config.model.max_seq_len
    if next(_recompute(config), None) is not None:
        ((commonest, _),) = Counter(config.parallel.recompute).most_common(1)
        changes["parallel.recompute"] = commonest
    if next(_fp8_layers(config), None) is not None:
        layers, skipped = config.model.num_layers, config.train.fp8_skip_layers
        changes["train.fp8_skip_layers"] = tuple(index for index in skipped if -layers <= index < layers)
    for row in EXCLUSIONS:
        if not row.of_layout and row.met(config):
            changes |= row.options[0].switched_off
    if next(cluster_size(asked), None) is not None:
        changes["cluster.nodes"] = 0
    return changes


def _lengths(config: RunConfig) -> Iterator[Finding]:
    seq_len, longest = config.train.seq_len, config.model.max_seq_len
    if seq_len > longest:
        yield error(
            "config.seq-len",
            f"train.seq_len = {seq_len} is longer than model.max_seq_len = {longest}",
            "The model's positions are made for max_seq_len tokens.",
            f"Set train.seq_len = {longest}, or raise model.max_seq_len"
            + (" (with model.rope_scaling)." if config.model.position == "rope" else "."),
        )


def _recompute(config: RunConfig) -> Iterator[Finding]:
    modes, layers = config.parallel.recompute, config.model.num_layers
    if not isinstance(modes, str) and len(modes) != layers:
        yield error(
            "config.recompute",
            f"parallel.recompute lists {len(modes)} layer{'s' * (len(modes) > 1)}, the model has {layers}",
            "A list names the mode of each layer.",
            f"List {layers} modes, or give one for all: --set parallel.recompute={modes[0]}.",
        )


def _fp8_layers(config: RunConfig) -> Iterator[Finding]:
    layers = config.model.num_layers
    absent = [index for index in config.train.fp8_skip_layers if not -layers <= index < layers]
    if absent and config.train.precision == "fp8":
        yield error(
            "config.fp8-layers",
            f"train.fp8_skip_layers names {listed(absent)}, the model has {layers} layers",
            f"They are numbered 0 to {layers - 1}, or -{layers} to -1 from the end.",
            "Leave them out, or name layers that there are.",
        )
