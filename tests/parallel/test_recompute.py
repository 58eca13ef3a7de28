"""Recomputation changes memory, never numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.errors import ConfigError
from paceline.models.transformer import Transformer
from paceline.parallel.recompute import recompute
from tests.parallel.tiny import batches, loss_of, plain, tiny_config


def _step(model: Transformer, seed: int = 5) -> tuple[Tensor, dict[str, Tensor]]:
    tokens, labels = batches(0)
    torch.manual_seed(seed)
    loss = loss_of(model(tokens, labels), (labels != -100).sum(), len(tokens))
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("modes", ["full", "selective", ("none", "selective", "full")])
@pytest.mark.parametrize("moe", [False, True])
def test_same_loss_and_gradients_with_dropout(modes: Any, moe: bool) -> None:
    config = tiny_config(dropout=0.3, moe=moe)
    expected_loss, expected = _step(plain(config))
    model = plain(config)
    recompute(list(model.blocks.values()), modes)
    loss, gradients = _step(model)
    assert torch.equal(loss, expected_loss)
    assert set(gradients) == set(expected)
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)
    assert list(model.state_dict()) == list(plain(config).state_dict())


def _saved_bytes(modes: Any) -> int:
    """Bytes of what forward keeps for backward, parameters not counted."""
    model = plain(tiny_config(hidden_size=64, ffn_size=128))
    recompute(list(model.blocks.values()), modes)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens, labels = batches(0)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(tokens, labels)
        assert output.loss_sum is not None
    return sum(kept.values())


def test_full_stores_least() -> None:
    full, none = _saved_bytes("full"), _saved_bytes("none")
    mixed = _saved_bytes(("full", "none", "full"))
    assert full < mixed < none and full < none / 3


def _counted_products(modes: Any) -> int:
    """Matrix products of a step."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        products = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.products += func._overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm)
            return func(*args, **(kwargs or {}))

    model = plain(tiny_config())
    recompute(list(model.blocks.values()), modes)
    with Count() as count:
        _step(model)
    return count.products


def test_selective_computes_no_product_twice() -> None:
    none, selective, full = (_counted_products(mode) for mode in ("none", "selective", "full"))
    assert none == selective < full


def test_bad_lists_are_refused() -> None:
    blocks = list(plain(tiny_config()).blocks.values())
    with pytest.raises(ConfigError, match="lists 2 layers, the model has 3"):
        recompute(blocks, ("full", "none"))
    with pytest.raises(ConfigError, match="'some' is not a mode"):
        recompute(blocks, ("full", "none", "some"))  # type: ignore[arg-type]
