"""Angles, scaling and layout of rotary positions."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.config.model import ModelConfig, RopeScaling
from paceline.models.rope import Rope, apply_rope, attention_factor, inverse_frequencies, softmax_scale
from tests.models.hf_reference import FAMILIES, rename_llama, weights_of


def test_pairs_turn_by_position_times_frequency() -> None:
    config = ModelConfig(hidden_size=16, num_heads=2, rope_theta=100.0)
    x = torch.randn(1, 5, 2, 8)
    turned = apply_rope(x, Rope(config)(torch.arange(5)[None]))
    for position in range(5):
        for pair in range(4):
            angle = position * 100.0 ** (-pair / 4)
            a, b = x[0, position, :, pair], x[0, position, :, pair + 4]
            expected = a * math.cos(angle) - b * math.sin(angle), b * math.cos(angle) + a * math.sin(angle)
            torch.testing.assert_close(turned[0, position, :, pair], expected[0], atol=1e-6, rtol=1e-5)
            torch.testing.assert_close(turned[0, position, :, pair + 4], expected[1], atol=1e-6, rtol=1e-5)


def test_part_of_a_head_passes_unturned() -> None:
    config = ModelConfig(hidden_size=32, num_heads=2, rope_fraction=0.25)
    x = torch.randn(2, 3, 2, 16, dtype=torch.bfloat16)
    turned = apply_rope(x, Rope(config)(torch.arange(3)[None]))
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned[..., 4:], x[..., 4:]) and not torch.equal(turned[..., :4], x[..., :4])


def test_scores_depend_on_distance_alone_even_far_out() -> None:
    rope = Rope(ModelConfig(hidden_size=64, num_heads=1, rope_theta=500000.0))
    q, k = torch.randn(1, 1, 1, 64), torch.randn(1, 1, 1, 64)

    def score(q_position: int, k_position: int) -> float:
        turned = [apply_rope(x, rope(torch.tensor([[at]]))) for x, at in ((q, q_position), (k, k_position))]
        return float((turned[0] * turned[1]).sum())

    # fp32 angles near 8000 are exact to 5e-4 each
    assert score(8007, 8000) == pytest.approx(score(7, 0), abs=2e-2)
    assert abs(score(8007, 8000) - score(8017, 8000)) > 0.1


def test_scaling_kinds_differ_and_llama3_keeps_fast_turns() -> None:
    def frequencies(kind: str) -> torch.Tensor:
        scaling = {"kind": kind, "factor": 8.0, "original_max_seq_len": 1024}
        return inverse_frequencies(ModelConfig(rope_scaling=scaling))

    plain = inverse_frequencies(ModelConfig())
    torch.testing.assert_close(frequencies("linear"), plain / 8)
    for kind in ("llama3", "yarn"):
        scaled = frequencies(kind)
        assert torch.equal(scaled[:4], plain[:4])
        torch.testing.assert_close(scaled[-1], plain[-1] / 8)
        assert (scaled <= plain).all() and (scaled >= plain / 8 * 0.999).all()


def test_factors_of_yarn() -> None:
    assert attention_factor(RopeScaling()) == 1.0
    assert attention_factor(RopeScaling(kind="yarn", factor=4.0)) == pytest.approx(0.1 * math.log(4) + 1)
    assert attention_factor(RopeScaling(kind="yarn", factor=4.0, attention_factor=0.7)) == 0.7
    assert softmax_scale(ModelConfig(attention_scale=0.5)) == 0.5


def test_without_the_permutation_of_interleaved_weights_logits_differ() -> None:
    """Guards the parity test: a layout that makes no difference would prove nothing (case 48)."""
    reference, model = FAMILIES["deepseek_v3"].build()
    tokens = torch.arange(2, 60)[None]
    with torch.no_grad():
        expected = reference(input_ids=tokens).logits
        torch.testing.assert_close(model(tokens).logits[:, 50], expected[:, 50], atol=1e-4, rtol=1e-4)
        model.load_state_dict(rename_llama(weights_of(reference), model.config))
        assert (model(tokens).logits[:, 50] - expected[:, 50]).abs().max() > 1e-2
