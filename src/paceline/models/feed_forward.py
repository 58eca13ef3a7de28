"""The dense MLP, plain or gated.

Dims: C hidden, F width of the MLP.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.config.model import Activation, FeedForwardSpec


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


_FUNCTIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "geglu": _gelu_tanh,  # the tanh form is what the published GeGLU models (T5 v1.1, Gemma) use
    "gelu": F.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": F.relu,
}


def activation_function(activation: Activation) -> Callable[[Tensor], Tensor]:
    """The elementwise function; of a gated activation, the one on the gate."""
    return _FUNCTIONS[activation]


class FeedForward(nn.Module):
    """down(act(gate(x)) * up(x)), or down(act(up(x))) where the activation is not gated."""

    def __init__(self, spec: FeedForwardSpec, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__()
        factory: dict[str, Any] = {"bias": spec.bias, "dtype": dtype, "device": device}
        self.activation = activation_function(spec.activation)
        self.gate_proj: nn.Linear | None = None
        if spec.gated:
            self.gate_proj = nn.Linear(spec.hidden_size, spec.ffn_size, **factory)
        self.up_proj = nn.Linear(spec.hidden_size, spec.ffn_size, **factory)
        self.down_proj = nn.Linear(spec.ffn_size, spec.hidden_size, **factory)

    def forward(self, x: Tensor) -> Tensor:
        first, *rest = self.project(x)
        hidden = self.activation(first)
        return self.down_proj(hidden * rest[0] if rest else hidden)

    @property
    def in_projs(self) -> tuple[nn.Linear, ...]:
        """The matrices that the input is multiplied by; the gate first."""
        return (self.up_proj,) if self.gate_proj is None else (self.gate_proj, self.up_proj)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """The input times each of `in_projs`."""
        return tuple(proj(x) for proj in self.in_projs)
