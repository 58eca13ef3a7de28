"""Gradients of fp8 linears that products write into buckets: the bits of the usual way, in every micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from distributed import run
from paceline.config.parallel import ParallelConfig
from paceline.kernels import fp8_cast
from paceline.parallel.apply import parallelize
from paceline.parallel.flat import FlatEngine
from paceline.parallel.low_precision import Fp8Options
from paceline.parallel.mesh import ParallelMesh
from tests.parallel.test_accumulate import _compare, _step
from tests.parallel.tiny import init, tiny_config, tiny_model
from tests.training.steps import in_full

CPU = torch.device("cpu")
SHAPE: dict[str, Any] = {"hidden_size": 32, "num_kv_heads": 2, "ffn_size": 64}


def _engine(rank: int, world_size: int, fused: bool, **options: Any) -> FlatEngine:
    shape, fp8 = tiny_config(**(SHAPE | options.pop("model", {}))), options.pop("fp8", Fp8Options())
    frozen = options.pop("frozen", ())
    config = ParallelConfig(fused_weight_gradients=fused, **({"accumulate_dtype": "bf16"} | options))
    mesh = ParallelMesh(config, world_size=world_size, rank=rank, device_type="cpu")
    model = tiny_model(shape)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    engine = parallelize(model, config, mesh, "fp8", CPU, fp8=fp8, widen_gradients=False).engine
    assert isinstance(engine, FlatEngine)
    engine.materialize(init(shape))
    return engine


CASES: Mapping[str, tuple[Mapping[str, Any], int]] = {
    # options, and how many of 12 products (four of a layer) know a place
    "zero 1": ({"zero": 1}, 12),
    "zero 0, full": ({"zero": 0, "recompute": "full"}, 12),
    "selective, uncached": ({"recompute": "selective", "fp8": Fp8Options(cached=False)}, 12),
    "one kernel": ({"fp8": Fp8Options(kernel="triton")}, 12),
    "one kernel, recomputed, earlier scales": (
        {"fp8": Fp8Options(kernel="triton", history=2), "recompute": "selective"}, 12,
    ),
    "fp8 weights alone": ({"fp8": Fp8Options(only=True)}, 12),
    "biases": ({"model": {"qkv_bias": True, "mlp_bias": True}}, 12),
    "some in bf16": ({"fp8": Fp8Options(skip_linears=("k_proj", "down_proj"))}, 9),
    "frozen": ({"frozen": ("blocks.1.attention.k_proj.weight",)}, 11),
    "sums in fp32": ({"accumulate_dtype": "fp32"}, 0),
}  # fmt: skip


def _written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Memory that products have been told to write to."""
    real, found = fp8_cast.product, []

    def product(*args: Any, out: Tensor | None = None, **more: Any) -> Tensor:
        found.extend([] if out is None else [out.data_ptr()])
        return real(*args, out=out, **more)

    monkeypatch.setattr(fp8_cast, "product", product)
    return found


def _whole(engine: FlatEngine, rank: int, world_size: int, step: int, accumulation: int = 2) -> dict[str, Tensor]:
    """Gradients of a step: buckets, and so what a rank holds of them, are laid out in another order."""
    _step(engine, rank, world_size, step, accumulation)
    own = {each.name: each.pieces(each.param.grad) for each in engine.main_parameters() if each.param.grad is not None}
    return in_full(own, engine.shapes)


def _cases(rank: int, world_size: int, names: Sequence[str]) -> None:
    for name in names:
        options, products = CASES[name]
        with pytest.MonkeyPatch.context() as patch:
            written = _written(patch)
            usual, fused = (_engine(rank, world_size, on, **options) for on in (False, True))
            for step, accumulation in ((0, 1), (1, 2), (2, 2)):
                expected = _whole(usual, rank, world_size, step, accumulation)
                assert not written, "the usual way"
                found = _whole(fused, rank, world_size, step, accumulation)
                if name == "some in bf16":  # whose products are not rounded on their way
                    expected, found = (
                        {key: value for key, value in each.items() if "k_proj" not in key and "down" not in key}
                        for each in (expected, found)
                    )
                _compare(found, expected)
                assert len(set(written)) == len(written) == products, name
                buffers = [group._gradients for group in fused._groups]
                inside = [any(_lies_in(address, buffer) for buffer in buffers) for address in written]
                assert all(inside), "into the buckets themselves"
                written.clear()


def _lies_in(address: int, buffer: Tensor) -> bool:
    return buffer.data_ptr() <= address < buffer.data_ptr() + buffer.nbytes


def test_gradients_are_those_of_the_usual_way() -> None:
    run(_cases, 1, list(CASES))
    run(_cases, 2, ["zero 1", "zero 0, full"])


def _tensor_parallel(rank: int, world_size: int) -> int:
    with pytest.MonkeyPatch.context() as patch:
        written = _written(patch)
        usual, fused = (_engine(rank, world_size, on, tp=2, recompute="selective") for on in (False, True))
        for step in range(2):
            expected = _step(usual, 0, 1, step)
            _compare(_step(fused, 0, 1, step), expected)  # one replica: a rank holds all of its part
        return len(written)


def test_over_tp() -> None:
    assert run(_tensor_parallel, 2) == [24, 24]


def _watched(rank: int, world_size: int) -> None:
    """A hook on one of joined weights sees its gradient; without it the product goes back to its place."""
    usual, fused = (_engine(rank, world_size, on) for on in (False, True))
    seen: list[list[Tensor]] = []
    for engine in (usual, fused):
        weight = engine.stages[0].blocks["1"].feed_forward.up_proj.weight  # type: ignore[union-attr]
        seen.append([])
        handle = weight.register_hook(lambda gradient, own=seen[-1]: own.append(gradient.clone()))
        engine.watched = _step(engine, rank, world_size)  # type: ignore[attr-defined]
        handle.remove()
    assert len(seen[0]) == len(seen[1]) == 2
    assert all(torch.equal(one, other) for one, other in zip(*seen, strict=True))
    _compare(fused.watched, usual.watched)  # type: ignore[attr-defined]
    _compare(_step(fused, rank, world_size), _step(usual, rank, world_size))
    assert len(seen[1]) == 2


def test_gradients_that_are_watched() -> None:
    run(_watched, 1)


def _compiled(rank: int, world_size: int, fp8: Fp8Options) -> list[int]:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    with pytest.MonkeyPatch.context() as patch:
        written = _written(patch)
        usual, fused = (_engine(rank, world_size, on, fp8=fp8, compile=True) for on in (False, True))
        for step in range(2):
            expected = _step(usual, rank, world_size, step)
            _compare(_step(fused, rank, world_size, step), expected)
        buffers = [group._gradients for group in fused._groups]
        inside = sum(any(_lies_in(address, buffer) for buffer in buffers) for address in written)
        return [counters["stats"]["unique_graphs"], len(written), inside]


@pytest.mark.slow
@pytest.mark.parametrize("fp8", [Fp8Options(), Fp8Options(kernel="triton", history=2)], ids=["", "earlier scales"])
def test_compiled_blocks_write_into_the_buckets_themselves(fp8: Fp8Options) -> None:
    """One graph without places and one with them, and no second buffer."""
    assert run(_compiled, 1, fp8, timeout_seconds=400) == [[2, 24, 24]]
