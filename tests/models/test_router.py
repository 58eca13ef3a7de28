"""The router on parts of sequences: it says of each token what it says of it in the whole sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.config.model import FeedForwardSpec, MoEConfig, MoESpec
from paceline.models.router import Router, Routing, WholeSequences

T = 12


def router(dtype: torch.dtype = torch.float64, top_k: int = 2, **routing: Any) -> Router:
    expert = FeedForwardSpec(hidden_size=16, ffn_size=8, activation="swiglu")
    spec = MoESpec(hidden_size=16, num_experts=4, top_k=top_k, expert=expert, shared=None, routing=MoEConfig(**routing))
    made = Router(spec, dtype, None)
    with torch.no_grad():
        made.weight.normal_(0, 0.5, generator=torch.Generator().manual_seed(0))
    return made


def states(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(3, T, 16, generator=torch.Generator().manual_seed(1), dtype=dtype)


class Half:
    """Every other token of each sequence is here; what the others choose is known beforehand."""

    parts = 2

    def __init__(self, first: int, whole: Routing) -> None:
        self.first = first
        self.choices = whole.experts.unflatten(0, (-1, T))

    def sum_over_parts(self, counts_BE: Tensor) -> Tensor:
        return torch.stack([sequence.flatten().bincount(minlength=counts_BE.shape[1]) for sequence in self.choices])

    def gather(self, experts_BTK: Tensor) -> Tensor:
        assert torch.equal(experts_BTK, self.local(self.choices))
        return self.choices

    def local(self, whole_BTK: Tensor) -> Tensor:
        return whole_BTK[:, self.first :: 2]


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("capacity_factor", [0.0, 0.75])
@pytest.mark.parametrize("top_k", [1, 2])
def test_parts_of_sequences_add_up_to_the_whole(score: Any, capacity_factor: float, top_k: int) -> None:
    fields: dict[str, Any] = {"score": score, "aux_loss_coef": 0.5, "z_loss_coef": 0.1}
    made = router(top_k=top_k, capacity_factor=capacity_factor, **fields)
    x = states()
    whole = made(x)
    (expected,) = torch.autograd.grad(whole.aux_loss, made.weight)
    parts = []
    for first in (0, 1):
        made.sequences = Half(first, whole)
        parts.append(made(x[:, first::2]))
        weights = whole.weights.unflatten(0, (3, T))[:, first::2].flatten(0, 1)
        torch.testing.assert_close(parts[-1].weights, weights, rtol=1e-12, atol=0)  # the same ones are dropped
    total = parts[0].aux_loss + parts[1].aux_loss
    torch.testing.assert_close(total, whole.aux_loss, rtol=1e-12, atol=0)
    (gradient,) = torch.autograd.grad(total, made.weight)
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)
    assert torch.equal(parts[0].load + parts[1].load, whole.load)
    assert int(parts[0].dropped + parts[1].dropped) == int(whole.dropped)
    assert (int(whole.dropped) > 0) == (capacity_factor > 0)


@pytest.mark.parametrize("precision", ["fp32", "model"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_fp32_or_wider(dtype: torch.dtype, precision: Any) -> None:
    made = router(dtype, aux_loss_coef=0.1, z_loss_coef=0.1, capacity_factor=1.0, router_precision=precision)
    routing = made(states(dtype))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert routing.weights.dtype == routing.aux_loss.dtype == wide
    assert router(dtype)(states(dtype)).aux_loss.dtype == wide
    assert isinstance(made.sequences, WholeSequences)
