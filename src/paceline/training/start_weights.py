"""Weights read into a model before its first step: the policy's, where a score is new, and those of a reference."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from paceline.checkpoint.pieces import ShardedValue
from paceline.checkpoint.ranks import Ranks
from paceline.checkpoint.weights import CheckpointSource, WeightSource, fill
from paceline.config.lora import SCORE
from paceline.config.plugins import Registry
from paceline.config.run import RunConfig
from paceline.training.reference import FrozenCopy, Reference

log = logging.getLogger(__name__)

HEAD = "head."


def fill_from(source: WeightSource, into: Mapping[str, ShardedValue]) -> None:
    """As `checkpoint.weights.fill`, and of a checkpoint of ours as `CheckpointSource.fill`: a score that is not there
    keeps the values that it has, and then a head of the vocabulary is left out.

    Raises:
        CheckpointError: names or shapes differ in another way.
    """
    shapes = source.shapes()
    is_new = SCORE in into and SCORE not in shapes
    wanted = {name: value for name, value in into.items() if not (is_new and name == SCORE)}
    if is_new:
        log.info("the weights have no %s: it starts at random", SCORE)
    if isinstance(source, CheckpointSource):
        source.fill(wanted, ignore=(HEAD,) if is_new and f"{HEAD}weight" in shapes else ())
    else:
        fill(source, wanted)


def load_reference(reference: Reference | None, config: RunConfig, registry: Registry, ranks: Ranks) -> None:
    """Fills a frozen copy from `task.reference`, or from where the run's own weights come. Collective.

    Without `model.init_from` the copy is there already: both begin with the same random numbers.

    Raises:
        CheckpointError: nothing that can be read is there, or the weights are not those of this model.
    """
    path = reference_path(config)
    if not isinstance(reference, FrozenCopy) or path is None:
        return
    into = reference.engine.weights()
    source = open_start(path, config, registry, ranks)
    ranks.gather(f"reading the reference model {path}", lambda: fill_from(source, into))
    reference.engine.publish_weights()
    log.info("the reference model is %s", path)


def reference_path(config: RunConfig) -> Path | None:
    """Where the reference's weights are; None where they are random."""
    name = config.model.init_from if config.task.reference == "initial" else config.task.reference
    return Path(name) if name else None


def open_start(path: Path, config: RunConfig, registry: Registry, ranks: Ranks) -> WeightSource:
    """What there is to be read at ``path``, in any format that is known. Collective."""
    for factory in registry.weight_sources:
        found = factory(path, config.model)
        if found is not None:
            weights: WeightSource = found.weights
            return weights
    return CheckpointSource(path, ranks=ranks)
