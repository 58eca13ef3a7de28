"""Weight gradients that are put off are the same ones, arrive once, and keep no graph alive."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from paceline.config.model import MoEConfig
from paceline.kernels.grouped_gemm import grouped_gemm
from paceline.parallel.deferred import DeferredWeights, Product, deliver
from paceline.parallel.recompute import recompute
from tests.parallel.tiny import batches, loss_of, plain, tiny_config


def backward_in_two(model: nn.Module, loss_of_forward: Any) -> tuple[list[Product], Tensor]:
    deferred = DeferredWeights()
    with deferred.deferring():
        loss = loss_of_forward(model)
    return deferred.backward([loss], [torch.ones_like(loss)]), loss


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_a_model_gets_the_same_gradients_each_parameter_once(mode: Any) -> None:
    routing = MoEConfig(layer_period=2, layer_offset=1, aux_loss_coef=0.01, ffn_size=8)
    config = tiny_config(tied=True, qkv_bias=True, num_experts=4, top_k=2, moe=routing, mtp_layers=1)
    tokens, labels = batches(0)

    def loss(model: Any) -> Tensor:
        return loss_of(model(tokens, labels), (labels != -100).sum(), len(tokens))

    expected = plain(config, dtype=torch.float64)
    loss(expected).backward()
    model = plain(config, dtype=torch.float64)
    recompute(list(model.blocks.values()), mode)
    arrivals: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: arrivals.update([name]))
    products, _ = backward_in_two(model, loss)
    in_first = set(arrivals)
    assert not any(name.endswith(("up_weight", "down_weight")) for name in in_first)
    assert not any(name.endswith("proj.weight") for name in in_first)
    assert "blocks.0.attention_norm.weight" in in_first and "blocks.0.attention.q_proj.bias" in in_first
    deliver(products)
    assert not products
    # the tied embedding is looked up in the first part, and multiplies as the head in the second
    twice = {name for name, count in arrivals.items() if count > 1}
    assert twice <= {"embed.weight"}
    for (name, ours), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None, name
        assert (ours.grad - theirs.grad).norm() <= 1e-12 * theirs.grad.norm(), name


def test_a_weight_used_twice_and_through_views_arrives_once() -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(3, 4, 4, dtype=torch.float64))
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    counts = torch.tensor([2, 0, 3])
    arrivals = []
    weight.register_post_accumulate_grad_hook(lambda p: arrivals.append(1))

    def forward() -> Tensor:
        y = grouped_gemm(x, weight.flatten(0, 0), counts)
        return (grouped_gemm(y, weight, counts) + F.linear(y, weight[0])).sin().sum()

    forward().backward()
    expected, weight.grad = weight.grad, None
    arrivals.clear()
    deferred = DeferredWeights()
    with deferred.deferring():
        out = forward()
    products = deferred.backward([get_gradient_edge(out)], [torch.ones_like(out)])
    assert weight.grad is None and len(products) == 7
    deliver(products)
    assert len(arrivals) == 1
    assert expected is not None and weight.grad is not None
    torch.testing.assert_close(weight.grad, expected, rtol=1e-12, atol=1e-12)


def test_the_grouped_kernel_is_put_off_too() -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(3, 16, 8).bfloat16())
    x = torch.randn(10, 8).bfloat16().requires_grad_()
    offs = torch.tensor([3, 3, 10], dtype=torch.int32)

    def forward() -> Tensor:
        return F.grouped_mm(x, weight.transpose(-2, -1), offs=offs)

    try:
        out = forward()
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"no grouped kernel on the CPU in this torch: {error}")
    gradient = torch.randn_like(out)
    out.backward(gradient)
    expected = [weight.grad, x.grad]
    weight.grad = x.grad = None
    deferred = DeferredWeights()
    with deferred.deferring():
        out = forward()
    products = deferred.backward([out], [gradient])
    assert weight.grad is None and len(products) == 1
    deliver(products)
    assert weight.grad is not None and weight.grad.is_contiguous()
    for ours, theirs in zip([weight.grad, x.grad], expected, strict=True):
        assert theirs is not None and ours is not None
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_the_graph_goes_with_the_first_part() -> None:
    class Token:
        pass

    class Held(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, alive: Any) -> Tensor:
            ctx.token = Token()
            alive.add(ctx.token)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            return grad, None

    alive: weakref.WeakSet[Token] = weakref.WeakSet()
    layer = nn.Linear(4, 4)
    x = torch.randn(2, 4, requires_grad=True)
    products, loss = backward_in_two(layer, lambda model: model(Held.apply(x, alive)).sum())
    del loss
    gc.collect()
    assert not alive and len(products) == 1
    assert layer.weight.grad is None and layer.bias.grad is not None and x.grad is not None


def test_an_input_without_gradient_leaves_nothing_to_put_off() -> None:
    layer = nn.Linear(4, 4)
    products, _ = backward_in_two(layer, lambda model: model(torch.ones(2, 4)).sum())
    assert not products and layer.weight.grad is not None


def test_a_plain_backward_of_a_deferred_forward_is_refused() -> None:
    deferred = DeferredWeights()
    layer = nn.Linear(4, 4)
    with deferred.deferring():
        loss = layer(torch.ones(2, 4, requires_grad=True)).sum()
    with pytest.raises(AssertionError, match=r"needs `DeferredWeights\.backward`"):
        loss.backward()
