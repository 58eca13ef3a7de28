"""Which parameters are updated by which rule, with which rate and decay?

The *global* shape and the name decide, never the local tensor: a shard of a matrix may be one-dimensional and is still
a part of a matrix, and the biases of stacked experts are two-dimensional and still biases.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from paceline.config.optim import OptimConfig
from paceline.parallel.engine import MainParameter

ParameterKind = Literal["matrix", "embedding", "head", "vector"]
Rule = Literal["adamw", "adamw8bit", "muon"]


@dataclass(frozen=True, kw_only=True)
class GroupSpec:
    """What a group is, whatever parameters a model has."""

    name: str
    kinds: tuple[ParameterKind, ...]
    rule: Rule
    lr: float
    """Peak; the schedule's factor multiplies every group's."""
    weight_decay: float


@dataclass(frozen=True, kw_only=True)
class ParameterGroup(GroupSpec):
    """Parameters that share rule, peak learning rate and decay: those of which this rank holds a part."""

    parameters: tuple[MainParameter, ...]


def parameter_kind(name: str, global_shape: Sequence[int]) -> ParameterKind:
    """What a parameter is to an optimizer.

    vector: at most one dimension, any bias (also those of stacked experts, [E, F]), and matrices of one row or column,
    such as the gate of shared experts. matrix: the rest of the blocks, 2-D, or more for stacked experts [E, (M,) a, b].
    """
    if name.startswith("embed."):
        return "embedding"
    if len(global_shape) <= 1 or name.rsplit(".", 1)[-1].endswith("bias"):
        return "vector"
    if name.startswith("head."):
        return "head"
    return "matrix" if min(global_shape[-2:]) > 1 else "vector"


def group_specs(config: OptimConfig) -> tuple[GroupSpec, ...]:
    """The groups of a recipe, in a fixed order."""
    rest: Rule = "adamw" if config.name == "muon" else config.name
    decay = config.weight_decay
    embedding_decay = decay if config.decay_embeddings else 0.0
    if config.name == "muon":
        matrices = [
            GroupSpec(name="matrices", kinds=("matrix",), rule="muon", lr=config.muon_lr, weight_decay=decay),
            GroupSpec(name="head", kinds=("head",), rule=rest, lr=config.lr, weight_decay=decay),
        ]
    else:
        kinds: tuple[ParameterKind, ...] = ("matrix", "head")
        matrices = [GroupSpec(name="matrices", kinds=kinds, rule=rest, lr=config.lr, weight_decay=decay)]
    return (
        *matrices,
        GroupSpec(name="embeddings", kinds=("embedding",), rule=rest, lr=config.lr, weight_decay=embedding_decay),
        GroupSpec(name="norms and biases", kinds=("vector",), rule=rest, lr=config.lr, weight_decay=0.0),
    )


def parameter_groups(config: OptimConfig, parameters: Sequence[MainParameter]) -> tuple[ParameterGroup, ...]:
    """The groups that have parameters on this rank, each in the order of `parameters`."""
    groups = []
    for spec in group_specs(config):
        members = tuple(
            parameter
            for parameter in parameters
            if parameter_kind(parameter.name, parameter.global_shape) in spec.kinds
        )
        if members:
            groups.append(
                ParameterGroup(
                    name=spec.name,
                    kinds=spec.kinds,
                    rule=spec.rule,
                    lr=spec.lr,
                    weight_decay=spec.weight_decay,
                    parameters=members,
                )
            )
    return tuple(groups)


def describe_groups(config: OptimConfig, shapes: Mapping[str, Sequence[int]]) -> str:
    """One line a group, for the start of a run: `matrices: 226 tensors, 7,504,658,432 parameters, adamw, lr ...`.

    Args:
        shapes: name -> global shape of every parameter of the model, also those of which this rank holds nothing.
    """
    lines = []
    for group in group_specs(config):
        counts = [math.prod(shape) for name, shape in shapes.items() if parameter_kind(name, shape) in group.kinds]
        if counts:
            lines.append(
                f"{group.name}: {len(counts)} tensors, {sum(counts):,} parameters, {group.rule}, "
                f"lr {group.lr:g}, weight decay {group.weight_decay:g}"
            )
    return "\n".join(lines)
