"""Which gated MLPs in fp8 are one operation in training?

| weights | operation |
| --- | --- |
| learn | `kernels/fp8_mlp.py` |
| frozen, with pairs that can be part of the product (`adapters.py`), or without | `kernels/lora_fp8_mlp.py` |
| anything else, and no gradients | two layers with the activation between them |

With one kernel for casts (`train.fp8_cast_kernel = "triton"`), scales of tensors, both of the first linears and the
last one in fp8 and whole on this rank, and no biases.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from paceline.config.model import Activation
from paceline.kernels.fp8 import CachedWeight, Cut
from paceline.kernels.fp8_cast import CastKernel, Scaling
from paceline.kernels.fp8_delayed import DelayedPair
from paceline.kernels.fp8_mlp import fp8_gated_mlp
from paceline.kernels.lora_fp8_mlp import Pair, lora_fp8_gated_mlp
from paceline.models.feed_forward import FeedForward
from paceline.models.lora import AdapterSettings, LoraLinear

_GATES: Mapping[Activation, str] = {"swiglu": "silu", "geglu": "gelu_tanh"}


class Products(Protocol):
    """Linears that read one input, as `low_precision.JoinedLinears` has them."""

    linears: tuple[nn.Linear, ...]
    scaling: Scaling
    kernel: CastKernel
    cut: Cut | None
    cached: CachedWeight | None
    delayed: DelayedPair | None
    adapter: AdapterSettings | None

    @property
    def place(self) -> tuple[Tensor | None, Tensor | None]: ...
    @property
    def frozen(self) -> bool: ...


def fuse_gated(sublayer: FeedForward, first: Products, down: Products, activation: Activation) -> None:
    """Replaces the forward, in place, if the operations are for this MLP; each call then decides between them."""
    function, linears = _GATES.get(activation), (*first.linears, *down.linears)
    whole = len(first.linears) == len(sublayer.in_projs) and first.cut is None and down.cut is None
    biased = any(linear.bias is not None for linear in linears)
    if function is None or first.kernel != "triton" or first.scaling != "tensorwise" or not whole or biased:
        return
    apart = sublayer.forward

    def forward(x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return apart(x)
        if x.requires_grad and all(linear.weight.requires_grad for linear in linears):
            return _learning(x, first, down, function)
        if first.frozen and down.frozen and _adds_pairs(first) and _adds_pairs(down):
            pairs = (*_pairs(first), *_pairs(down))
            if x.requires_grad or any(pair is not None for pair in pairs[:-1]):
                return _frozen(x, first, down, pairs, function)
        return apart(x)

    sublayer.forward = forward  # type: ignore[method-assign]


def _learning(x: Tensor, first: Products, down: Products, function: str) -> Tensor:
    return fp8_gated_mlp(
        x,
        [linear.weight for linear in first.linears],
        down.linears[0].weight,
        function=function,
        cached_first=first.cached,
        cached_down=down.cached,
        delayed_first=first.delayed,
        delayed_down=down.delayed,
        place_first=first.place,
        place_down=down.place,
    )


def _frozen(x: Tensor, first: Products, down: Products, pairs: tuple[Pair, ...], function: str) -> Tensor:
    adapter = down.adapter if first.adapter is None else first.adapter
    return lora_fp8_gated_mlp(
        x,
        [linear.weight for linear in first.linears],
        down.linears[0].weight,
        pairs,
        1.0 if adapter is None else adapter.scale,
        function=function,
        cached_first=first.cached,
        cached_down=down.cached,
        delayed_first=first.delayed,
        delayed_down=down.delayed,
    )


def _adds_pairs(products: Products) -> bool:
    """Whether the products are with all pairs that there are: nobody adds one behind them."""
    return products.adapter is not None or not any(isinstance(linear, LoraLinear) for linear in products.linears)


def _pairs(products: Products) -> list[Pair]:
    """Of each linear; none while adapters are off."""
    on = products.adapter is not None and products.adapter.switch.on
    return [
        (linear.lora_a, linear.lora_b) if on and isinstance(linear, LoraLinear) else None for linear in products.linears
    ]
