"""Weight gradients that products add to buckets: the same gradients as autograd's, bit for bit where sums are alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from distributed import run
from paceline.config.parallel import ParallelConfig
from paceline.parallel.accumulate import (
    AccumulatingExperts,
    AccumulatingLinear,
    Place,
    Target,
    accumulate_products,
    announce_products,
)
from paceline.parallel.apply import parallelize
from paceline.parallel.buckets import plan_buckets
from paceline.parallel.flat import FlatEngine
from paceline.parallel.mesh import ParallelMesh
from tests.parallel.tiny import batches, gradients_of_step, init, loss_of, plain, tiny_config, tiny_model, train
from tests.parity.layouts import EXACT, layout, worst
from tests.training.steps import run_jobs

CPU = torch.device("cpu")
Gradients = dict[str, Tensor]


def _engine(rank: int, world_size: int, fused: bool, **options: Any) -> FlatEngine:
    model = options.pop("model", {})
    dtype, precision = options.pop("dtype", torch.float64), options.pop("precision", "fp32")
    frozen = options.pop("frozen", ())
    config = ParallelConfig(fused_weight_gradients=fused, **options)
    mesh = ParallelMesh(config, world_size=world_size, rank=rank, device_type="cpu")
    whole = tiny_model(tiny_config(**model), dtype=dtype)
    for name, parameter in whole.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen) if frozen else True)
    engine = parallelize(whole, config, mesh, precision, CPU).engine
    assert isinstance(engine, FlatEngine)
    for group in engine._groups:  # parallel.bucket_mb starts at 1 MiB: more than the whole tiny model
        shapes = {name: site.parameter.shape for name, site in group._sites.items()}
        group.layout = plan_buckets(shapes, shard_degree=group.layout.shard_degree, bucket_elements=500)
        group._slots = group.layout.slots
    engine.materialize(init(tiny_config(**model)))
    return engine


def _step(engine: FlatEngine, rank: int, world_size: int, step: int = 0, accumulation: int = 2) -> Gradients:
    gradients_of_step(engine, step, dp_rank=rank, dp_size=world_size, accumulation=accumulation)
    found: Gradients = {}
    for parameter in engine.main_parameters():
        assert parameter.param.grad is not None
        found[parameter.name] = parameter.param.grad.clone()
    return found


def _layers(engine: FlatEngine) -> dict[str, AccumulatingLinear]:
    return {
        name: layer
        for stage in engine.stages
        for name, layer in stage.named_modules()
        if isinstance(layer, AccumulatingLinear)
    }


def _compare(fused: Gradients, usual: Gradients, atol: float = 0.0) -> None:
    assert fused.keys() == usual.keys()
    for name, expected in usual.items():
        torch.testing.assert_close(fused[name], expected, rtol=0, atol=atol, msg=lambda text, at=name: f"{at}: {text}")


CASES: Mapping[str, Mapping[str, Any]] = {
    "zero 1": {"zero": 1},
    "zero 0": {"zero": 0},
    "fp32": {"dtype": torch.float32},
    "selective": {"recompute": "selective"},
    "full": {"recompute": "full"},
    "tied, experts, biases": {"model": {"tied": True, "moe": True, "qkv_bias": True}},
    "fused experts": {"model": {"moe": True}, "expert_kernels": "grouped"},
    "fused experts, full": {"model": {"moe": True}, "expert_kernels": "triton", "recompute": "full", "zero": 0},
    "offload": {"offload": "optimizer"},
    "frozen": {"frozen": ("embed.", "blocks.1.")},
}


def _cases(rank: int, world_size: int) -> list[str]:
    for name, options in CASES.items():
        usual, fused = (_engine(rank, world_size, on, **options) for on in (False, True))
        assert _layers(fused) and not _layers(usual)
        experts = [module for module in fused.stages[0].modules() if isinstance(module, AccumulatingExperts)]
        assert bool(experts) == ("expert_kernels" in options)
        for step, accumulation in ((0, 1), (1, 2), (2, 2)):
            expected = _step(usual, rank, world_size, step, accumulation)
            _compare(_step(fused, rank, world_size, step, accumulation), expected)
        if not options.get("frozen"):
            assert all(layer.weight.grad is None and layer.place is not None for layer in _layers(fused).values()), name
            assert all(module.up_weight.grad is None and module.down_sum is not None for module in experts), name
        # all buckets of a usual model have been sent before `finish`; behind a frozen embedding nobody tells of block 0
        with_last = [_sent_in_backward(engine, rank, world_size) for engine in (usual, fused)]
        assert with_last[0] == with_last[1] or options.get("frozen"), (name, with_last)
    return list(CASES)


def _sent_in_backward(engine: FlatEngine, rank: int, world_size: int) -> list[int]:
    """Buckets of each group that were on their way when the last backward ended."""
    sent = []
    finish = engine.reduce_gradients

    def count() -> None:
        sent.extend(group._started for group in engine._groups)
        finish()

    engine.reduce_gradients = count  # type: ignore[method-assign]
    try:
        _step(engine, rank, world_size)
    finally:
        del engine.reduce_gradients  # type: ignore[method-assign]
    assert max(sent) > 2
    return sent


def _reference(rank: int, world_size: int) -> None:
    """Against a plain model of one process."""
    model = plain(tiny_config(), dtype=torch.float64)
    tokens, labels = batches(3)
    loss_of(model(tokens, labels), (labels != -100).sum(), len(tokens)).backward()
    engine = _engine(rank, world_size, True)
    _step(engine, rank, world_size, 3)
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    for parameter in engine.main_parameters():
        assert parameter.param.grad is not None
        for piece in parameter.pieces(parameter.param.grad).pieces:
            box = tuple(slice(at, at + size) for at, size in zip(piece.offsets, piece.tensor.shape, strict=True))
            whole = expected[parameter.name]
            assert whole is not None
            torch.testing.assert_close(piece.tensor, whole[box], rtol=0, atol=1e-12)


def _bf16(rank: int, world_size: int) -> list[float]:
    """Losses of training in bf16: the largest difference from the usual way, with sums in fp32 and in bf16."""
    found = []
    for sums in ("fp32", "bf16"):
        options = {"precision": "bf16", "dtype": torch.float32, "accumulate_dtype": sums}
        usual, fused = (
            train(_engine(rank, world_size, on, **options), 8, dp_rank=rank, dp_size=world_size).losses
            for on in (False, True)
        )
        found.append(max(abs(a - b) for a, b in zip(usual, fused, strict=True)))
    return found


def _watched(rank: int, world_size: int) -> None:
    """A hook on a weight sees its gradient, and may change it; without the hook the product goes back to its place."""
    usual, fused = (_engine(rank, world_size, on) for on in (False, True))
    seen: list[list[Tensor]] = []
    for engine in (usual, fused):
        weight = engine.stages[0].blocks["1"].feed_forward.up_proj.weight  # type: ignore[union-attr]
        seen.append([])
        handle = weight.register_hook(lambda gradient, own=seen[-1]: own.append(gradient.clone()) or gradient * 2)
        engine.watched = _step(engine, rank, world_size)  # type: ignore[attr-defined]
        handle.remove()
    assert len(seen[0]) == 2
    for expected, found in zip(seen[0], seen[1], strict=True):
        assert torch.equal(expected, found)
    _compare(fused.watched, usual.watched)  # type: ignore[attr-defined]
    _compare(_step(fused, rank, world_size), _step(usual, rank, world_size))
    assert len(seen[1]) == 2


def _unused(rank: int, world_size: int) -> None:
    """Layers that a rank does not use count as zero, also in the step after one that used them."""
    found = []
    for on in (False, True):
        engine = _engine(rank, world_size, on)
        _step(engine, rank, world_size)
        block = engine.stages[0].blocks["2"]
        forward = block.forward
        block.forward = lambda x, *others: (x * 1.0, None)  # type: ignore[method-assign, assignment]
        found.append(_step(engine, rank, world_size, 1))
        block.forward = forward  # type: ignore[method-assign]
        with torch.no_grad():
            engine.stages[0](*batches(0))
    _compare(found[1], found[0])
    assert all(not gradient.any() for name, gradient in found[1].items() if name.startswith("blocks.2."))


def _tensor_parallel(rank: int, world_size: int) -> int:
    """Products that gather and scatter add to places too."""
    options: dict[str, Any] = {"tp": 2, "recompute": "selective", "model": {"qkv_bias": True, "ffn_size": 32}}
    usual, fused = (_engine(rank, world_size, on, **options) for on in (False, True))
    for step in range(2):
        expected = _step(usual, 0, 1, step)
        _compare(_step(fused, 0, 1, step), expected)
    layers = _layers(fused).values()
    assert all(layer.weight.grad is None and layer.fresh is not None and not layer.fresh for layer in layers)
    assert _sent_in_backward(usual, 0, 1) == _sent_in_backward(fused, 0, 1)
    with torch.no_grad():
        fused.stages[0](*batches(0))
    return len(layers)


def test_tensor_parallel_products_add_to_places() -> None:
    assert run(_tensor_parallel, 2) == [21, 21]


def _all(rank: int, world_size: int) -> tuple[list[str], list[float]]:
    _reference(rank, world_size)
    _watched(rank, world_size)
    _unused(rank, world_size)
    return _cases(rank, world_size), _bf16(rank, world_size)


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_are_those_of_the_usual_way(world_size: int) -> None:
    for names, bf16 in run(_all, world_size):
        assert names == list(CASES)
        # the usual way rounds each product to bf16, 2^-9; the fused one does not
        assert all(difference < 0.02 for difference in bf16), bf16


# ---- compiled blocks


def _compiled(rank: int, world_size: int, recompute: str) -> dict[str, Any]:
    """One graph each way for three layers and several micro-batches, and no second buffer."""
    torch._dynamo.reset()
    counters.clear()
    usual = _engine(rank, world_size, False, dtype=torch.float32)
    fused = _engine(rank, world_size, True, dtype=torch.float32, compile=True, recompute=recompute)
    written: list[int] = []
    from paceline.kernels import weight_gradient

    real: Callable[..., None] = weight_gradient.accumulate_product

    def record(place: Tensor, *args: Any, **kwargs: Any) -> None:
        written.append(place.data_ptr())
        real(place, *args, **kwargs)

    weight_gradient.accumulate_product = record
    try:
        for step in range(2):
            _compare(_step(fused, rank, world_size, step), _step(usual, rank, world_size, step), atol=1e-6)
    finally:
        weight_gradient.accumulate_product = real
    layers = _layers(fused).values()
    places = {layer.place.data_ptr() for layer in layers if layer.place is not None}
    assert len(places) == len(layers) == 21
    return {
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": dict(counters["graph_break"]),
        "elsewhere": sorted(set(written) - places),
        "missing": sorted(places - set(written)),
        "products": len(written),
        "sent": _sent_in_backward(fused, rank, world_size) == _sent_in_backward(usual, rank, world_size),
    }


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_compiled_blocks_write_into_the_buckets_themselves(recompute: str) -> None:
    (found,) = run(_compiled, 1, recompute, timeout_seconds=400)
    assert found == {"graphs": 1, "breaks": {}, "elsewhere": [], "missing": [], "products": 4 * 21, "sent": True}


# ---- with other axes

LAYOUTS = (
    ("llama", layout(2, "pp=2")),
    ("moe", layout(2, "pp=2 pipeline_schedule=interleaved_1f1b stages_per_rank=2 recompute=selective")),
    ("gpt", layout(2, "pp=2 zero=0 recompute=full")),
    ("tied", layout(2, "cp=2")),
    ("gpt", layout(2, "tp=2")),
    ("moe", layout(2, "tp=2 recompute=full")),
    ("llama", layout(2, "ep=1 dp_replicate=2")),
)


def test_layouts_give_the_numbers_of_the_usual_way_on_one_process() -> None:
    names = sorted({model for model, _ in LAYOUTS})
    alone = layout(1, "zero=1")
    (expected,) = run(run_jobs, 1, [alone.job(name, micro=1, steps=2) for name in names])
    fused = [item.job(model, "parallel.fused_weight_gradients=true", steps=2) for model, item in LAYOUTS]
    for logs in run(run_jobs, 2, fused, timeout_seconds=300):
        for (model, item), log in zip(LAYOUTS, logs, strict=True):
            errors = worst(log, expected[names.index(model)])
            assert max(errors.values()) <= EXACT, (model, item, errors)


# ---- layers


class _Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


def _place(layer: nn.Linear) -> Place:
    return Place(gradient=torch.full_like(layer.weight, 7.0), fresh=torch.ones((), dtype=torch.bool))


def test_micro_batches_may_be_in_flight_together() -> None:
    """As in a pipeline: forward, forward, backward, backward."""
    torch.manual_seed(0)
    usual, block = _Half(), _Half()
    block.load_state_dict(usual.state_dict())
    accumulate_products([block])
    arrived: list[str] = []
    targets = [
        Target(layer=layer, place=_place(layer), arrived=lambda name=name: arrived.append(name))
        for name, layer in block.named_children()
        if isinstance(layer, AccumulatingLinear)
    ]
    announce_products(block, targets)
    inputs = [torch.randn(2, 3, 8) for _ in range(3)]
    sums: list[list[Tensor]] = []
    for model in (usual, block):
        own = [x.clone().requires_grad_() for x in inputs]
        outputs = [model(x).square().sum() for x in own]
        for output in outputs:
            output.backward()
        sums.append([x.grad for x in own if x.grad is not None])
    assert arrived == ["up", "down"] * 3
    for target, layer in zip(targets, (usual.up, usual.down), strict=True):
        assert torch.equal(target.place.gradient, layer.weight.grad)
        assert target.layer.weight.grad is None and not target.place.fresh
    assert torch.equal(block.up.bias.grad, usual.up.bias.grad)
    assert all(torch.equal(a, b) for a, b in zip(*sums, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("sums", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_gpu_two_micro_batches_add_up(compiled: bool, sums: torch.dtype) -> None:
    """Against float64 products of the same bf16 operands; what a compiled backward rounds to bf16 is not the same."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    block = _Half().to("cuda", torch.bfloat16)
    wide = _Half().to("cuda", torch.float64)
    wide.load_state_dict({name: value.double() for name, value in block.state_dict().items()})
    accumulate_products([block])
    layers = [layer for layer in block.children() if isinstance(layer, AccumulatingLinear)]
    places = [
        Place(gradient=torch.full_like(layer.weight, 7.0, dtype=sums), fresh=torch.ones((), dtype=torch.bool))
        for layer in layers
    ]
    announce_products(
        block,
        [Target(layer=layer, place=place, arrived=lambda: None) for layer, place in zip(layers, places, strict=True)],
    )
    if compiled:
        block.forward = torch.compile(block.forward, dynamic=False)  # type: ignore[method-assign]
    for _ in range(2):
        x = torch.randn(4, 64, 8, device="cuda", dtype=torch.bfloat16)
        block(x.clone().requires_grad_()).float().square().sum().backward()
        wide(x.double()).square().sum().backward()
    for layer, place, expected in zip(layers, places, (wide.up.weight.grad, wide.down.weight.grad), strict=True):
        assert expected is not None and layer.weight.grad is None and not place.fresh
        assert float((place.gradient.double() - expected).norm() / expected.norm()) < 2e-2


def test_layers_with_products_of_their_own_are_left_alone() -> None:
    class Own(nn.Linear):
        pass

    block = nn.ModuleDict(
        {"plain": nn.Linear(8, 8), "own": Own(8, 8), "replaced": nn.Linear(8, 8), "odd": nn.Linear(8, 1)}
    )
    block["replaced"].forward = lambda x: x  # type: ignore[method-assign]
    accumulate_products([block])
    assert [type(layer).__name__ for layer in block.values()] == ["AccumulatingLinear", "Own", "Linear", "Linear"]
    x = torch.randn(2, 8)
    block["plain"](x).sum().backward()  # without a place: a plain linear layer
    assert block["plain"].weight.grad is not None


def test_a_target_is_watched_while_its_weight_has_hooks() -> None:
    layer = nn.Linear(8, 8)
    accumulate_products([nn.Sequential(layer)])
    assert isinstance(layer, AccumulatingLinear)
    target = Target(layer=layer, place=_place(layer), arrived=lambda: None)
    assert not target.watched
    handle = layer.weight.register_hook(lambda gradient: None)
    assert replace(target).watched
    handle.remove()
    assert not target.watched
