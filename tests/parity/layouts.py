"""The models and layouts whose results are compared, and how far two results are apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.training.steps import Job, Log

SHAPE = (
    "model.num_layers=4",
    "model.init_std=0.2",
    "optim.lr=0.01",
    "optim.weight_decay=0.1",
    "optim.grad_clip=0.5",
    # what AdamW makes of a gradient that is zero but for rounding (a bias of keys, which softmax does not see)
    "optim.eps=1e-5",
)
EXPERTS = (
    "model.num_experts=4",
    "model.moe.ffn_size=16",
    "model.moe.aux_loss_coef=0.1",
    "model.moe.z_loss_coef=0.01",
)
MODELS: dict[str, tuple[str, ...]] = {
    "gpt": (
        "model.norm=layernorm",
        "model.activation=gelu_tanh",
        "model.position=learned",
        "model.qkv_bias=true",
        "model.mlp_bias=true",
        "model.num_kv_heads=4",
        "model.tie_embeddings=true",
        # rows divide by no number of ranks
        "model.vocab_size=67",
    ),
    "llama": ("model.tie_embeddings=false", "model.qk_norm=true"),
    "tied": ("model.tie_embeddings=true", "model.num_kv_heads=1"),
    "moe": (
        *EXPERTS,
        "model.top_k=2",
        "model.moe.num_shared_experts=1",
        "model.moe.layer_period=2",
        "model.moe.layer_offset=1",
        "model.moe.bias_balance=true",
    ),
    "switch": (
        *EXPERTS,
        "model.top_k=1",
        "model.moe.capacity_factor=1.0",
        "model.moe.normalize_top_k=false",
        "model.tie_embeddings=true",
    ),
}
EXACT = 1e-9
"""Relative error of a tensor in float64."""
ZERO = 1e-12
"""Absolute error where the reference is zero but for rounding."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    ranks: int
    sets: tuple[str, ...]
    experts: bool = False
    """only for models that have experts"""

    def job(self, model: str, *more: str, **options: object) -> Job:
        sets = (*SHAPE, *MODELS[model], *(f"parallel.{item}" for item in self.sets), *more)
        defaults = {"micro": 2, "steps": 3, "length": 16, "dtype": torch.float64}
        return Job(sets=sets, **(defaults | options))  # type: ignore[arg-type]


def layout(ranks: int, text: str) -> Layout:
    """``layout(4, "tp=2 pp=2")``"""
    return Layout(ranks=ranks, sets=tuple(text.split()), experts="ep=" in text.replace("etp=", "ep="))


def error(found: Tensor, expected: Tensor) -> float:
    """||found - expected|| / ||expected||; where the expected tensor is zero but for rounding (below ZERO), the largest
    difference scaled so that ZERO counts as EXACT."""
    norm = float(expected.norm())
    if norm < ZERO:
        return float((found - expected).abs().max()) * EXACT / ZERO
    return float((found - expected).norm()) / norm


def worst(found: Log, expected: Log) -> dict[str, float]:
    """The largest error of each kind, with the tensor it is in."""
    errors: dict[str, float] = {}
    for kind, ours, theirs in (
        ("gradient", found.gradients, expected.gradients),
        ("weight", found.weights, expected.weights),
    ):
        name, value = _largest(ours, theirs)
        errors[f"{kind} {name}"] = value
    for kind, numbers, others in (
        ("loss", found.losses, expected.losses),
        ("norm", found.norms, expected.norms),
        ("aux loss", found.aux_losses, expected.aux_losses),
    ):
        errors[kind] = error(torch.tensor(numbers, dtype=torch.float64), torch.tensor(others, dtype=torch.float64))
    return errors


def _largest(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[str, float]:
    assert found.keys() == expected.keys(), sorted(found.keys() ^ expected.keys())
    errors = {name: error(found[name], value) for name, value in expected.items()}
    name = max(errors, key=lambda key: errors[key])
    return name, errors[name]
