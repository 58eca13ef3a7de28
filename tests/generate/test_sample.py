"""Each rule on logits small enough to check by hand, and draws that follow the distribution."""

from __future__ import annotations

import math

import pytest
import torch

from paceline.errors import ConfigError
from paceline.generate.sample import SamplingParams, keep_min_p, keep_top_k, keep_top_p, next_tokens, penalize_seen

# probabilities 0.5, 0.3, 0.15, 0.05, out of order
LOGITS = torch.tensor([[0.15, 0.5, 0.05, 0.3]]).log()


def kept(logits: torch.Tensor) -> list[int]:
    return logits[0].isfinite().nonzero()[:, 0].tolist()


@pytest.mark.parametrize(("k", "expected"), [(0, [0, 1, 2, 3]), (1, [1]), (2, [1, 3]), (9, [0, 1, 2, 3])])
def test_top_k(k, expected):
    assert kept(keep_top_k(LOGITS, k)) == expected


@pytest.mark.parametrize(("p", "expected"), [(1.0, [0, 1, 2, 3]), (0.01, [1]), (0.6, [1, 3]), (0.9, [0, 1, 3])])
def test_top_p(p, expected):
    assert kept(keep_top_p(LOGITS, p)) == expected


@pytest.mark.parametrize(("min_p", "expected"), [(0.0, [0, 1, 2, 3]), (0.2, [0, 1, 3]), (1.0, [1])])
def test_min_p(min_p, expected):
    assert kept(keep_min_p(LOGITS, min_p)) == expected


def test_repetition_penalty():
    logits = torch.tensor([[2.0, -2.0, 1.0]])
    seen = torch.tensor([[True, True, False]])
    assert penalize_seen(logits, seen, 2.0).tolist() == [[1.0, -4.0, 1.0]]
    assert penalize_seen(logits, seen, 1.0) is logits


def test_greedy():
    assert next_tokens(LOGITS, SamplingParams(temperature=0), [0.9]).tolist() == [1]


@pytest.mark.parametrize(
    ("uniform", "expected"), [(0.0, 0), (0.14, 0), (0.16, 1), (0.64, 1), (0.66, 2), (0.69, 2), (0.71, 3), (0.9999, 3)]
)
def test_the_draw_is_the_inverse_of_the_cumulative_distribution(uniform, expected):
    assert next_tokens(LOGITS, SamplingParams(), [uniform]).tolist() == [expected]


def test_a_token_that_was_left_out_is_never_drawn():
    params = SamplingParams(top_k=2)
    for uniform in (0.0, 0.5, 0.999999, 1 - 2**-53):
        assert next_tokens(LOGITS, params, [uniform]).item() in (1, 3)


def test_temperature_sharpens():
    numbers = torch.rand(4000, generator=torch.Generator().manual_seed(0)).tolist()
    drawn = next_tokens(LOGITS.expand(4000, -1), SamplingParams(temperature=0.5), numbers)
    share = (drawn == 1).float().mean().item()
    squares = [0.15**2, 0.5**2, 0.05**2, 0.3**2]
    assert math.isclose(share, 0.25 / sum(squares), abs_tol=0.02)


@pytest.mark.parametrize("temperature", [1e-6, 1e-40, 5e-324])
def test_next_to_no_temperature_is_greedy(temperature):
    logits = LOGITS.expand(100, -1).clone()
    logits[:, 3] = float("-inf")  # a row that pads the vocabulary
    numbers = torch.linspace(0, 0.999, 100).tolist()
    for more in ({}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}):
        drawn = next_tokens(logits, SamplingParams(temperature=temperature, **more), numbers)
        assert drawn.tolist() == [1] * 100


def test_any_finite_temperature_leaves_out_what_is_left_out():
    logits = LOGITS.expand(400, -1).clone()
    logits[:, 3] = float("-inf")
    drawn = next_tokens(logits, SamplingParams(temperature=1e300), torch.linspace(0, 0.999, 400).tolist())
    assert torch.bincount(drawn, minlength=4).tolist() == pytest.approx([133, 133, 133, 0], abs=1)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"temperature": value} for value in (-1.0, math.inf, math.nan)),
        {"top_k": -1},
        *({"top_p": value} for value in (0.0, math.nan)),
        {"min_p": 2.0},
        *({"repetition_penalty": value} for value in (0.0, 1e-40, math.inf)),
    ],
)
def test_values_out_of_range_are_named(wrong):
    [name] = wrong
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} .* is out of range"):
        SamplingParams(**wrong)
