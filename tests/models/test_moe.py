"""Routing, capacity, dispatch and router losses against code that goes token by token."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.config.model import FeedForwardSpec, MoEConfig, MoESpec
from paceline.models.moe import LocalDispatcher, MoE
from paceline.models.router import (
    Routing,
    balance_loss,
    count_per_sequence,
    keep_best_groups,
    router_entropy,
    select,
    within_capacity,
)


def moe(num_experts: int = 4, top_k: int = 2, bias: bool = False, activation: Any = "swiglu", **routing: Any) -> MoE:
    expert = FeedForwardSpec(hidden_size=16, ffn_size=8, activation=activation, bias=bias)
    spec = MoESpec(
        hidden_size=16,
        num_experts=num_experts,
        top_k=top_k,
        expert=expert,
        shared=expert if routing.pop("shared", False) else None,
        routing=MoEConfig(**routing),
    )
    layer = MoE(spec, torch.float32, None)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, 0.5, generator=generator)
    return layer


def states(sequences: int = 2, tokens: int = 12) -> Tensor:
    return torch.randn(sequences, tokens, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()


def expert(layer: MoE, number: int, x: Tensor) -> Tensor:
    experts = layer.experts
    up = [x @ matrix.T for matrix in experts.up_weight[number]]
    if experts.up_bias is not None:
        up = [value + bias for value, bias in zip(up, experts.up_bias[number], strict=True)]
    hidden = F.silu(up[0]) * up[1] if len(up) == 2 else F.relu(up[0])
    out = hidden @ experts.down_weight[number].T
    return out if experts.down_bias is None else out + experts.down_bias[number]


@pytest.mark.parametrize("activation", ["swiglu", "relu"])
@pytest.mark.parametrize("bias", [False, True])
def test_output_and_gradients_token_by_token(bias: bool, activation: str) -> None:
    layer, x = moe(bias=bias, activation=activation), states()
    out, extras = layer(x)
    expected = torch.zeros_like(out)
    scores = (x @ layer.router.weight.T).softmax(-1)
    for b in range(2):
        for t in range(12):
            best = scores[b, t].topk(2)
            parts = [
                weight * expert(layer, int(index), x[b, t])
                for weight, index in zip(best.values / best.values.sum(), best.indices, strict=True)
            ]
            expected[b, t] = parts[0] + parts[1]
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    variables = [x, *layer.parameters()]
    got = torch.autograd.grad(out.square().sum(), variables)
    wanted = torch.autograd.grad(expected.square().sum(), variables)
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)
    assert int(extras.load.sum()) == 2 * 12 * 2 and int(extras.dropped) == 0


def test_an_expert_without_tokens_gets_a_zero_gradient() -> None:
    layer = moe(num_experts=8, top_k=1)
    out, extras = layer(states(1, 3))
    out.sum().backward()
    idle = (extras.load == 0).nonzero().flatten()
    assert len(idle) >= 5
    gradient = layer.experts.up_weight.grad
    assert gradient is not None and not gradient[idle].any() and gradient.any()


def test_shared_experts_and_their_gate() -> None:
    x = states()
    layer = moe(shared=True, shared_gate=True)
    assert layer.shared is not None and layer.shared_gate is not None
    with_shared, _ = layer(x)
    shared = layer.shared(x) * layer.shared_gate(x).sigmoid()
    layer.shared = None
    torch.testing.assert_close(with_shared, layer(x)[0] + shared)


def test_capacity_drops_in_order_of_position_within_each_sequence() -> None:
    """Two sequences, 12 tokens, 4 experts, factor 1: an expert takes the first 3 of a sequence."""
    layer, x = moe(top_k=1, normalize_top_k=False, capacity_factor=1.0), states()
    out, extras = layer(x)
    scores = (x @ layer.router.weight.T).softmax(-1)
    dropped = 0
    for b in range(2):
        taken = [0] * 4
        for t in range(12):
            best = int(scores[b, t].argmax())
            taken[best] += 1
            if taken[best] > 3:
                dropped += 1
                assert not out[b, t].any()  # the token passes by the residual alone
            else:
                expected = scores[b, t, best] * expert(layer, best, x[b, t])
                torch.testing.assert_close(out[b, t], expected, atol=1e-5, rtol=1e-5)
    assert dropped > 0 and int(extras.dropped) == dropped
    assert int(extras.load.sum()) == 24  # the load counts choices, dropped ones too
    alone = layer(x[1:])[0]
    torch.testing.assert_close(alone, out[1:])  # another sequence in the batch takes no room away


def test_evaluation_has_its_own_capacity() -> None:
    layer = moe(top_k=1, capacity_factor=1.0, eval_capacity_factor=4.0)
    assert int(layer(states())[1].dropped) > 0
    assert int(layer.eval()(states())[1].dropped) == 0


def test_within_capacity_counts_positions() -> None:
    experts = torch.tensor([[1, 1, 0, 1, 0, 1], [2, 2, 2, 0, 1, 0]])
    kept = within_capacity(experts, count_per_sequence(experts.view(-1, 1), 2, 3), capacity=2)
    assert kept.tolist() == [[True, True, True, False, True, False], [True, True, False, True, True, True]]


def test_jitter_only_while_training() -> None:
    layer, x = moe(top_k=1, normalize_top_k=False, jitter=0.3), states()
    torch.manual_seed(0)
    assert not torch.equal(layer(x)[0], layer(x)[0])
    layer.eval()
    assert torch.equal(layer(x)[0], layer(x)[0])


def test_balance_loss_by_hand() -> None:
    even = torch.full((2, 4), 3)
    probs = torch.full((2, 4), 0.25)
    assert float(balance_loss(even, probs)) == pytest.approx(2.0)  # 1 for each sequence
    all_on_one = torch.tensor([[12, 0, 0, 0]])
    assert float(balance_loss(all_on_one, torch.tensor([[1.0, 0.0, 0.0, 0.0]]))) == pytest.approx(4.0)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_router_losses_do_not_depend_on_how_sequences_are_batched(score: Any) -> None:
    """The gradient of a batch is the sum of those of its sequences (case 70), and is not zero."""
    layer, x = moe(score=score, aux_loss_coef=1.0, z_loss_coef=0.1), states(4)
    whole = layer(x)[1].aux_loss
    parts = [layer(part)[1].aux_loss for part in x.split(1)]
    torch.testing.assert_close(whole, torch.stack(parts).sum())
    gradient = torch.autograd.grad(whole, layer.router.weight)[0]
    summed = sum(torch.autograd.grad(part, layer.router.weight)[0] for part in parts)
    torch.testing.assert_close(gradient, summed, atol=1e-6, rtol=1e-5)
    assert gradient.abs().max() > 1e-3


def test_z_loss_by_hand() -> None:
    layer, x = moe(z_loss_coef=0.5), states()
    expected = 0.5 * (x @ layer.router.weight.T).logsumexp(-1).square().mean(1).sum()
    torch.testing.assert_close(layer(x)[1].aux_loss, expected)


def test_entropy_by_hand() -> None:
    layer, x = moe(score="sigmoid"), states()
    probs = (x.detach() @ layer.router.weight.detach().T).sigmoid()
    probs = probs / probs.sum(-1, keepdim=True)
    expected = -(probs * probs.log()).sum() * 2 * 2**16  # two assignments a token
    assert int(layer(x)[1].entropy) == pytest.approx(float(expected), abs=2)
    assert int(router_entropy(torch.tensor([[0.0, 1.0, 0.0]]), 1)) == 0
    assert int(router_entropy(torch.full((3, 4), 0.25), 1)) == pytest.approx(3 * math.log(4) * 2**16, abs=1)


def test_groups_close_all_experts_of_the_other_groups() -> None:
    ranking = torch.tensor([[0.9, 0.0, 0.5, 0.6, 0.1, 0.2]])
    by_best = keep_best_groups(ranking, MoEConfig(num_groups=3, top_k_groups=1, group_score="max"))
    assert by_best.isfinite().tolist() == [[True, True, False, False, False, False]]
    by_two = keep_best_groups(ranking, MoEConfig(num_groups=3, top_k_groups=1))
    assert by_two.isfinite().tolist() == [[False, False, True, True, False, False]]


def test_the_bias_decides_who_is_chosen_and_not_the_weight() -> None:
    scores = torch.tensor([[0.5, 0.4, 0.1]])
    experts, weights = select(scores, torch.tensor([0.0, 0.0, 1.0]), 1, MoEConfig(normalize_top_k=False))
    assert experts.tolist() == [[2]]
    torch.testing.assert_close(weights, torch.tensor([[0.1]]))


def test_bias_moves_against_the_load() -> None:
    layer = moe(bias_balance=True, score="sigmoid", bias_update_rate=0.01)
    layer.router.update_expert_bias(torch.tensor([10, 0, 4, 6]))
    assert layer.router.expert_bias is not None
    torch.testing.assert_close(layer.router.expert_bias, torch.tensor([-0.01, 0.01, 0.01, -0.01]))
    assert "router.expert_bias" in layer.state_dict()


def test_balancing_by_bias_evens_the_load() -> None:
    layer, x = moe(num_experts=8, bias_balance=True, score="sigmoid", bias_update_rate=0.02), states(4, 64) + 0.5
    start = layer(x)[1].load
    for _ in range(100):
        layer.router.update_expert_bias(layer(x)[1].load)
    end = layer(x)[1].load
    assert end.max() < 1.25 * end.float().mean() < start.max()


def test_bf16_router_computes_in_fp32() -> None:
    layer = moe().bfloat16()
    x = states().detach().bfloat16()
    logits = layer.router._logits(x.flatten(0, 1))
    assert torch.equal(logits, x.flatten(0, 1).float() @ layer.router.weight.float().T)
    out, extras = layer(x)
    assert out.dtype == torch.bfloat16 and extras.aux_loss.dtype == torch.float32


def test_a_bf16_router_without_a_copy_of_the_tokens() -> None:
    layer = moe(num_experts=8).bfloat16()
    layer.router.weight.data = layer.router.weight.data.float()  # as the flat engine keeps it
    x = states().detach().bfloat16().flatten(0, 1).requires_grad_()
    plain = layer.router._logits(x)
    layer.router.split = True
    split = layer.router._logits(x)
    assert type(split.grad_fn).__name__ != type(plain.grad_fn).__name__
    torch.testing.assert_close(split, plain, rtol=0, atol=2e-6)
    for found, expected in zip(
        torch.autograd.grad(split.square().sum(), (x, layer.router.weight)),
        torch.autograd.grad(plain.square().sum(), (x, layer.router.weight)),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=2**-8 if found.dtype == torch.bfloat16 else 1e-5, atol=1e-4)


def test_dispatcher_brings_rows_back() -> None:
    x, experts = torch.randn(6, 3), torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1], [2, 0], [1, 2]])
    none = torch.zeros(())
    routing = Routing(experts, torch.ones(6, 2), None, none, load=torch.tensor([4, 4, 4]), dropped=none, entropy=none)
    sent = LocalDispatcher().dispatch(x, routing)
    assert torch.equal(sent.rows[:4], x[[0, 1, 3, 4]])
    torch.testing.assert_close(LocalDispatcher().combine(sent.rows, sent.route), 2 * x)


@pytest.mark.gpu
def test_nothing_waits_for_the_device() -> None:
    layer = moe(capacity_factor=1.25, aux_loss_coef=0.1, z_loss_coef=0.1, shared=True).cuda().bfloat16()
    x = states().detach().cuda().bfloat16().requires_grad_()
    layer(x)[0].sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        out, extras = layer(x)
        (out.float().sum() + extras.aux_loss).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
