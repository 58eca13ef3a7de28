"""The loss on a text is the one that a plain loop over windows gives."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from paceline.errors import DataError
from paceline.generate.perplexity import score
from tests.generate.small_models import SHAPES, small_model

TEXT = np.random.default_rng(0).integers(0, 61, 100)


def by_hand(model, text, seq_len: int) -> tuple[float, int]:
    total, count = 0.0, 0
    for start in range(0, len(text) - 1, seq_len):
        window = torch.from_numpy(text[start : start + seq_len + 1])
        logits = model(window[None, :-1]).logits[0]
        total += float(F.cross_entropy(logits, window[1:], reduction="sum"))
        count += len(window) - 1
    return total, count


@pytest.mark.parametrize("shape", ["gqa", "gpt2", "deepseek"])
@pytest.mark.parametrize("seq_len", [16, 33, 60])
def test_every_token_is_predicted_once(shape: str, seq_len: int) -> None:
    """1e-4 of a sum of about 400 nats: batches sum in another order."""
    model = small_model(**SHAPES[shape])
    with torch.no_grad():
        total, count = by_hand(model, TEXT, seq_len)
    for parts, batch in (([TEXT], 1), ([TEXT], 4), (np.array_split(TEXT, 7), 2), ([TEXT[:0], TEXT], 3)):
        found = score(model, iter(parts), seq_len=seq_len, micro_batch_size=batch)
        assert found.num_tokens == count == 99
        assert found.loss_sum == pytest.approx(total, abs=1e-4)
    assert found.perplexity == pytest.approx(math.exp(total / count), rel=1e-5)
    assert found.bits_per_byte(2.0) == pytest.approx(total / count / math.log(2) / 2, rel=1e-5)


@pytest.mark.parametrize("limit", [1, 16, 17, 50, 1000])
def test_a_part_of_the_text(limit: int) -> None:
    model = small_model(**SHAPES["gqa"])
    seen: list[int] = []
    found = score(model, iter([TEXT]), seq_len=16, micro_batch_size=2, max_tokens=limit, advance=seen.append)
    with torch.no_grad():
        total, count = by_hand(model, TEXT[: limit + 1], 16)
    assert (found.num_tokens, sum(seen)) == (count, count) == (min(limit, 99), min(limit, 99))
    assert found.loss_sum == pytest.approx(total, abs=1e-4)


def test_extra_heads_are_no_part_of_the_loss() -> None:
    model = small_model(**SHAPES["gqa"], mtp_layers=1)
    with torch.no_grad():
        total, _ = by_hand(model, TEXT, 20)
    assert score(model, iter([TEXT]), seq_len=20, micro_batch_size=4).loss_sum == pytest.approx(total, abs=1e-4)


def test_what_cannot_be_predicted_is_told() -> None:
    model = small_model(**SHAPES["gqa"])
    for text in (TEXT[:0], TEXT[:1]):
        with pytest.raises(DataError, match="no token to predict"):
            score(model, iter([text]), seq_len=16, micro_batch_size=2)
    with pytest.raises(DataError, match="token id 61, the model's vocabulary is 61"):
        score(model, iter([np.array([1, 61, 2])]), seq_len=16, micro_batch_size=2)
