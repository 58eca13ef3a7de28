"""Which tensors keep fp32 when the model computes in bf16."""

from __future__ import annotations

import torch
from torch import nn

from paceline.config.train import TrainConfig
from paceline.models.router import Router


def compute_dtype(precision: str) -> torch.dtype:
    """The dtype that weights and activations have in forward and backward; fp8 products start from bf16 tensors."""
    return torch.float32 if precision == "fp32" else torch.bfloat16


def model_dtype(train: TrainConfig) -> torch.dtype:
    """`compute_dtype` of a recipe."""
    return compute_dtype(train.precision)


def fp32_parameters(model: nn.Module) -> set[str]:
    """Names of parameters that an engine with a free choice of dtype keeps in fp32: routers that compute in fp32.

    The model runs with bf16 ones too (it casts them up); then only their rounding is lost. Buffers are always fp32.
    """
    return {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, Router) and module.routing.router_precision == "fp32"
    }
