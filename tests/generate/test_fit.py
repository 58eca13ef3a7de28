"""A model is spread over as few cards as it fits on, and what its heads forbid is not proposed."""

from __future__ import annotations

import pytest
import torch

from paceline.config.load import resolve
from paceline.config.model import ModelConfig
from paceline.errors import ConfigError
from paceline.generate.cache import KVCache
from paceline.generate.fit import CONTEXT_BYTES, Speech, choose_degree, legal_degrees, speaking_bytes
from tests.generate.small_models import SHAPES, small_model

GB = 10**9
ONE = Speech(batch_size=1, tokens=2048)


def preset(name: str) -> ModelConfig:
    return resolve({"model": {"preset": name}}).config.model


@pytest.mark.parametrize("name", SHAPES)
def test_weights_and_cache_are_those_of_the_model(name: str) -> None:
    model = small_model(**SHAPES[name])
    cache = KVCache(3, 20)
    with cache.attached(model), torch.no_grad():
        cache.forward(model, torch.ones(3, 20, dtype=torch.int64), torch.arange(20).expand(3, 20))
    held = sum(parameter.nbytes for parameter in model.parameters()) + cache.num_bytes
    found = speaking_bytes(model.config, 1, Speech(batch_size=3, tokens=20, tokens_at_a_time=0, element_bytes=4))
    assert 0 <= found - CONTEXT_BYTES - held <= 3 * model.config.vocab_size * 16


def test_a_large_model_takes_as_few_cards_as_hold_it() -> None:
    model = preset("llama2_70b")  # 138 GB in bf16
    assert choose_degree(model, [80 * GB] * 8, ONE) == 2
    assert choose_degree(model, [40 * GB] * 8, ONE) == 4
    assert choose_degree(preset("llama3_8b"), [80 * GB] * 8, ONE) == 1
    # the second card is in use
    assert choose_degree(model, [80 * GB, 40 * GB, 80 * GB, 80 * GB], ONE) == 4


def test_many_long_texts_count_too() -> None:
    model = preset("llama3_8b")  # 128 KiB of keys and values a token
    few, many = (speaking_bytes(model, 1, Speech(batch_size=batch, tokens=8192)) for batch in (1, 101))
    assert 100 * 8192 * 131072 <= many - few <= 1.7 * 100 * 8192 * 131072


def test_where_it_does_not_fit_the_numbers_are_told() -> None:
    with pytest.raises(ConfigError, match="does not fit on the 2 cards here") as caught:
        choose_degree(preset("llama2_70b"), [24 * GB] * 2, ONE)
    assert "It would fit on 8 such cards" in caught.value.next_step


def test_heads_decide_the_degrees() -> None:
    assert legal_degrees(preset("llama3_8b"), 16) == [1, 2, 4, 8, 16]
    odd = resolve({"model": {"num_layers": 1, "hidden_size": 56, "num_heads": 28, "num_kv_heads": 4}}).config.model
    assert legal_degrees(odd, 28) == [1, 2, 4, 28]
