"""The norms as modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.config.model import ModelConfig
from paceline.kernels.norm import layer_norm, rms_norm


class RMSNorm(nn.Module):
    """RMSNorm over the last dim. `eps` and the unit offset (Gemma) come from the model's config."""

    def __init__(self, size: int, config: ModelConfig, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.unit_offset = config.norm_unit_offset
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, unit_offset=self.unit_offset)


class LayerNorm(nn.Module):
    """LayerNorm with bias over the last dim."""

    def __init__(self, size: int, config: ModelConfig, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.unit_offset = config.norm_unit_offset
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(size, dtype=dtype, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps, unit_offset=self.unit_offset)


def make_norm(config: ModelConfig, dtype: torch.dtype, device: torch.device | str | None) -> nn.Module:
    """The norm over hidden states that the config asks for."""
    kind = RMSNorm if config.norm == "rmsnorm" else LayerNorm
    return kind(config.hidden_size, config, dtype, device)
