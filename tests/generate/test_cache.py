"""Reading token by token from the cache gives the logits of reading everything at once."""

from __future__ import annotations

import pytest
import torch

from paceline.generate.cache import KVCache
from tests.generate.small_models import SHAPES, small_model


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("parts", [(20, 1, 1, 1, 1, 1), (7, 9, 1, 3, 4, 1), (1,) * 25])
@torch.no_grad()
def test_logits_from_the_cache(name, parts):
    model = small_model(**SHAPES[name])
    tokens = torch.randint(0, 61, (3, 25), generator=torch.Generator().manual_seed(1))
    expected = model(tokens).logits
    cache = KVCache(3, 30)
    found = []
    with cache.attached(model):
        for part in tokens.split(parts, dim=1):
            positions = torch.arange(cache.length, cache.length + part.shape[1])[None].expand(3, -1)
            found.append(cache.forward(model, part, positions))
    torch.testing.assert_close(torch.cat(found, dim=1), expected, atol=1e-5, rtol=1e-5)
    assert cache.num_bytes > 0
    # the plain cores are back
    torch.testing.assert_close(model(tokens).logits, expected, atol=0, rtol=0)


@pytest.mark.parametrize("name", SHAPES)
@torch.no_grad()
def test_left_padding_changes_nothing(name):
    model = small_model(**SHAPES[name])
    tokens = torch.randint(0, 61, (1, 12), generator=torch.Generator().manual_seed(2))
    expected = model(tokens).logits
    pad = 4
    padded = torch.cat((torch.full((1, pad), 7), tokens), dim=1)
    positions = (torch.arange(12 + pad) - pad).clamp_min(0)[None]
    documents = (torch.arange(12 + pad) >= pad).long()[None]
    cache = KVCache(1, 16)
    found = []
    with cache.attached(model):
        for start, end in ((0, 10), (10, 11), (11, 16)):
            part = slice(start, end)
            found.append(cache.forward(model, padded[:, part], positions[:, part], documents[:, part]))
    torch.testing.assert_close(torch.cat(found, dim=1)[:, pad:], expected, atol=1e-5, rtol=1e-5)


def test_a_full_cache_is_refused():
    model = small_model()
    cache = KVCache(1, 4)
    with cache.attached(model), pytest.raises(AssertionError, match="too small"):
        cache.forward(model, torch.zeros(1, 5, dtype=torch.int64), torch.arange(5)[None])
