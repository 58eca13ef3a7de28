"""One graph serves all layers that are built alike."""

from __future__ import annotations

from typing import Any

import torch

from paceline.parallel.accumulate import AccumulatingLinear, Place, accumulate_products
from paceline.parallel.compile import compile_blocks
from paceline.parallel.recompute import recompute
from tests.parallel.tiny import batches, loss_of, plain, tiny_config


class _Backend:
    """Runs graphs as they are, and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return graph.forward


def _gradients(model: Any) -> dict[str, torch.Tensor]:
    for step in (0, 1):
        tokens, labels = batches(step)
        loss_of(model(tokens, labels), (labels != -100).sum(), len(tokens)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def _check(recomputed: str) -> int:
    torch._dynamo.reset()
    expected = _gradients(plain(tiny_config(num_layers=4)))
    model = plain(tiny_config(num_layers=4))
    backend = _Backend()
    recompute(list(model.blocks.values()), recomputed)  # type: ignore[arg-type]
    compile_blocks(list(model.blocks.values()), backend=backend)  # type: ignore[arg-type]
    found = _gradients(model)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-6)
    return backend.graphs


def test_one_graph_for_all_layers() -> None:
    assert _check("none") == 1


def test_recomputed_blocks_compile_too() -> None:
    assert _check("full") == 1


def _stored_bytes(compiled: bool) -> int:
    """What a forward with full recomputation keeps, of products that add to their gradients themselves."""
    torch._dynamo.reset()
    model = plain(tiny_config(num_layers=4))
    blocks: list[Any] = list(model.blocks.values())
    accumulate_products(blocks)
    known = {parameter.data_ptr() for parameter in model.parameters()}
    for layer in model.modules():
        if isinstance(layer, AccumulatingLinear):
            layer.aim(Place(gradient=torch.zeros_like(layer.weight), fresh=torch.ones((), dtype=torch.bool)))
            assert layer.place is not None
            known.add(layer.place.data_ptr())
    recompute(blocks, "full")
    if compiled:
        compile_blocks(blocks, backend="aot_eager_decomp_partition")
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in known:
            kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(*batches(0))
    return sum(kept.values())


def test_full_recomputation_is_kept_to_where_products_add_themselves() -> None:
    assert _stored_bytes(compiled=True) < 1.1 * _stored_bytes(compiled=False)
