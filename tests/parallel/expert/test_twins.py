"""A whole layer of experts on kernels of ours against the plain one, in the cases that go wrong: output, every gradient
(the router's too), losses and counts. And deterministic mode: the same run twice, bit for bit.

On a CPU the kernels' twins in float64 and Triton's interpreter in fp32; on a GPU bf16.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from distributed import run
from paceline.config.load import load_recipe
from paceline.config.model import FeedForwardSpec, MoEConfig, MoESpec
from paceline.kernels import experts as experts_module
from paceline.kernels.experts import GROUPED, TRITON, ExpertKernels
from paceline.models.moe import MoE
from paceline.runtime.process import ProcessInfo
from paceline.runtime.seed import seed_all, set_deterministic
from paceline.training.feed import Feed, open_datasets
from paceline.training.setup import build_parts
from tests.kernels.interpreter import interpreted_modules

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True, kw_only=True)
class Case:
    sequences: int
    tokens: int
    experts: int
    top_k: int
    liked: int = 0
    """The router sends tokens to the first so many experts alone; 0 = wherever they want."""
    routing: dict[str, Any] = field(default_factory=dict)
    shared: bool = False


CASES: Mapping[str, Case] = {
    "empty experts": Case(sequences=2, tokens=11, experts=16, top_k=2, liked=3),
    "all tokens to one": Case(sequences=2, tokens=10, experts=4, top_k=1, liked=1),
    "odd": Case(sequences=3, tokens=7, experts=6, top_k=3),
    "one token": Case(sequences=1, tokens=1, experts=4, top_k=2),
    "drops": Case(sequences=2, tokens=13, experts=4, top_k=2, routing={"capacity_factor": 0.75}),
    "one expert, drops": Case(
        sequences=2, tokens=9, experts=4, top_k=1, liked=1,
        routing={"capacity_factor": 1.0, "normalize_top_k": False},
    ),
    "sigmoid, shared": Case(
        sequences=2, tokens=9, experts=8, top_k=2, shared=True,
        routing={"score": "sigmoid", "num_groups": 4, "top_k_groups": 2, "bias_balance": True},
    ),
}  # fmt: skip


def layers(case: Case, *, hidden: int, width: int, dtype: torch.dtype, device: str) -> tuple[MoE, MoE]:
    """Two with the same weights."""
    network = FeedForwardSpec(hidden_size=hidden, ffn_size=width, activation="swiglu")
    spec = MoESpec(
        hidden_size=hidden,
        num_experts=case.experts,
        top_k=case.top_k,
        expert=network,
        shared=network if case.shared else None,
        routing=MoEConfig(aux_loss_coef=0.01, z_loss_coef=0.01, **case.routing),
    )
    first, second = (MoE(spec, dtype, device) for _ in "ab")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in first.parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(values * parameter.shape[-1] ** -0.5)
        if case.liked:  # tokens are positive, so a negative row is a low score
            first.router.weight[case.liked :] = -first.router.weight[case.liked :].abs() - 1.0
            first.router.weight[: case.liked].abs_()
    second.load_state_dict(first.state_dict())
    return first, second


def tokens(case: Case, hidden: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, grad = (torch.randn(case.sequences, case.tokens, hidden, generator=generator, dtype=torch.float64) for _ in "ab")
    return x.abs().to(device, dtype) if case.liked else x.to(device, dtype), grad.to(device, dtype)


def results(layer: MoE, x: Tensor, grad: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What must be near, and what must be equal."""
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    out, extras = layer(leaf)
    ((out * grad).sum() + extras.aux_loss).backward()
    assert leaf.grad is not None
    near = {"out": out.detach(), "x": leaf.grad, "aux_loss": extras.aux_loss.detach()}
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        near[name] = parameter.grad.clone()
    return near, {"load": extras.load, "dropped": extras.dropped}


def is_what_it_says(case: Case, equal: Mapping[str, Tensor]) -> None:
    load, all_tokens = equal["load"], case.sequences * case.tokens
    assert int(load.sum()) == all_tokens * case.top_k
    if case.liked:
        assert int((load > 0).sum()) <= case.liked < case.experts
    if case.liked == 1:
        assert int(load[0]) == all_tokens
    assert (int(equal["dropped"]) > 0) == ("capacity_factor" in case.routing)


def compare(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    # of each kind of number the largest decides: the gradient of a router whose scores are all 1 is rounding alone
    scale = max(float(value.double().norm()) for name, value in expected.items() if "router" in name or name == "x")
    for name, value in expected.items():
        size = max(float(value.double().norm()), 1e-3 * scale)
        error = float((found[name].double() - value.double()).norm()) / size
        assert error <= tolerance, (name, error)


@pytest.mark.parametrize("name", CASES)
def test_a_layer_gives_the_numbers_of_the_plain_one(name: str) -> None:
    case = CASES[name]
    plain, fused = layers(case, hidden=16, width=24, dtype=torch.float64, device="cpu")
    fused.experts.kernels = GROUPED
    fused.router.split = True
    x, grad = tokens(case, 16, torch.float64, "cpu")
    (expected, counts), (found, same) = results(plain, x, grad), results(fused, x, grad)
    is_what_it_says(case, counts)
    compare(found, expected, 1e-10)
    assert all(torch.equal(same[key], counts[key]) for key in counts)


_KERNELS = ("expert_order_triton", "expert_rows_triton", "expert_gemm_triton", "expert_fp8_triton")


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Triton's kernels, with small tiles, in the place of their twins."""
    with interpreted_modules(*_KERNELS) as modules:
        gemm: Any = modules[2]
        monkeypatch.setattr(experts_module, "_ours", lambda provider, x: provider == "triton")
        tiles = gemm.Tiles(rows=16, columns=16, depth=16, together=2, waves=2)
        for tile in ("WITH_ACTIVATION", "PRODUCT", "WEIGHT", "WEIGHT_STORED"):
            monkeypatch.setattr(gemm, tile, tiles)
        yield


@pytest.mark.parametrize("name", CASES)
def test_a_layer_in_the_interpreter(interpreted: None, name: str) -> None:
    case = CASES[name]
    plain, fused = layers(case, hidden=16, width=16, dtype=torch.float32, device="cpu")
    x, grad = tokens(case, 16, torch.float32, "cpu")
    expected, counts = results(plain, x, grad)
    fused.experts.kernels = TRITON
    found, same = results(fused, x, grad)
    compare(found, expected, 1e-5)
    assert all(torch.equal(same[key], counts[key]) for key in counts)


def test_the_interpreter_is_used(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above compares is not the twin with itself."""
    gemm: Any = importlib.import_module("paceline.kernels.expert_gemm_triton")
    called: list[str] = []
    real = gemm.product_with_activation
    monkeypatch.setattr(gemm, "product_with_activation", lambda *a, **k: (called.append("product"), real(*a, **k))[1])
    _, fused = layers(CASES["odd"], hidden=16, width=16, dtype=torch.float32, device="cpu")
    fused.experts.kernels = TRITON
    results(fused, *tokens(CASES["odd"], 16, torch.float32, "cpu"))
    assert called


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", [GROUPED, TRITON], ids=lambda kernels: kernels.spelled())
@pytest.mark.parametrize("name", CASES)
def test_a_layer_on_a_gpu(name: str, kernels: ExpertKernels) -> None:
    """Both routers split their product alike, so that no tie falls another way; then bf16's roundings alone differ."""
    case = CASES[name]
    plain, fused = layers(case, hidden=256, width=128, dtype=torch.bfloat16, device="cuda")
    fused.experts.kernels = kernels
    plain.router.split = fused.router.split = True
    x, grad = tokens(case, 256, torch.bfloat16, "cuda")
    (expected, counts), (found, same) = results(plain, x, grad), results(fused, x, grad)
    is_what_it_says(case, counts)
    compare(found, expected, 3e-2)
    assert all(torch.equal(same[key], counts[key]) for key in counts)
    again, _ = results(fused, x, grad)
    assert all(torch.equal(again[key], found[key]) for key in found), "the same bits again"


# ---- deterministic mode

MODELS: Mapping[str, tuple[str, ...]] = {
    "dropless": (),
    "drops and jitter": (
        "model.top_k=1", "model.moe.capacity_factor=0.75", "model.moe.jitter=0.1", "model.moe.z_loss_coef=0.01",
    ),
}  # fmt: skip
KERNELS = ("plain", "grouped", "triton")


def weights_after(device: torch.device, sets: list[str]) -> tuple[dict[str, Tensor], list[float]]:
    """Three steps of two micro-batches in deterministic mode, as `paceline train` makes them."""
    loaded = load_recipe(str(ROOT / "recipes/tiny_moe.toml"), ["run.deterministic=true", "train.steps=3", *sets])
    config = loaded.config
    seed_all(config.run.seed)
    parts = build_parts(config, loaded.registry, ProcessInfo(), device)
    data = open_datasets(config, loaded.registry, train_samples=3 * config.train.global_batch_size)
    feed = Feed.open(data.train, config, parts.mesh, device, start_sample=0)
    try:
        losses = [float(parts.step.run(step, feed.next_step()).loss_sum) for step in (1, 2, 3)]
    finally:
        feed.close()
    pieces = {
        f"{name} {index}": piece.tensor.detach().cpu().clone()
        for name, value in parts.engine.weights().items()
        for index, piece in enumerate(value.pieces)
    }
    return pieces, losses


def repeated(rank: int, world_size: int, device: str, precision: str) -> dict[str, bool]:
    """By model and kernels: whether two runs leave the same bits."""
    set_deterministic(True)
    found = {}
    try:
        for model, more in MODELS.items():
            for kernels in KERNELS:
                sets = [
                    f"parallel.expert_kernels={kernels}", f"train.precision={precision}", "model.hidden_size=64",
                    "model.moe.ffn_size=64", "train.micro_batch_size=4", "data.num_workers=0",
                    "parallel.fused_weight_gradients=true", *more,
                ]  # fmt: skip
                (one, losses), (other, again) = (weights_after(torch.device(device), sets) for _ in "ab")
                assert len(one) > 10 and losses[0] != losses[-1]
                equal = all(torch.equal(one[name], other[name]) for name in one)
                found[f"{model}, {kernels}"] = equal and losses == again
    finally:
        set_deterministic(False)
    return found


def test_deterministic_runs_repeat_bit_for_bit() -> None:
    (found,) = run(repeated, 1, "cpu", "fp32")
    assert len(found) == len(MODELS) * len(KERNELS) and all(found.values()), found


def _on_a_gpu(rank: int, folder: str) -> None:
    set_deterministic(True)  # before CUDA starts
    torch.cuda.set_device(0)
    store = f"file://{folder}/store"
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=store, rank=0, world_size=1)
    try:
        torch.save(repeated(0, 1, "cuda", "bf16"), Path(folder) / "found.pt")
    finally:
        dist.destroy_process_group()


@pytest.mark.gpu
def test_deterministic_runs_repeat_bit_for_bit_on_a_gpu() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_on_a_gpu, args=(folder,), nprocs=1)
        found = torch.load(Path(folder) / "found.pt")
    assert len(found) == len(MODELS) * len(KERNELS) and all(found.values()), found
