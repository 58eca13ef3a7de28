"""Whole training steps whose experts take rows as they come, in many layouts: the numbers of the plain path."""

from __future__ import annotations

import functools
import logging
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from distributed import run
from paceline.config.parallel import ParallelConfig
from paceline.kernels import experts as kernels
from paceline.kernels.expert_fp8 import Fp8Matrices
from paceline.models.moe import Experts
from paceline.parallel.accumulate import AccumulatingExperts
from paceline.parallel.apply import parallelize
from paceline.parallel.compile import compile_blocks
from paceline.parallel.expert.fuse import fuse_experts, put_experts_in_fp8
from paceline.parallel.low_precision import Fp8Options, Fp8Weights
from paceline.parallel.mesh import ParallelMesh
from tests.parallel.tiny import batches, gradients_of_step, init, tiny_config, tiny_model, train
from tests.parity.layouts import EXACT, layout, worst
from tests.training.steps import run_jobs

CPU = torch.device("cpu")

LAYOUTS = (
    ("moe", layout(2, "zero=1")),
    ("switch", layout(2, "zero=1 fused_weight_gradients=true")),
    ("moe", layout(2, "ep=2 fused_weight_gradients=true recompute=selective")),
    ("switch", layout(2, "ep=2 recompute=full")),
    ("moe", layout(2, "etp=2")),
    ("moe", layout(2, "ep=2 expert_dispatch=all_gather fused_weight_gradients=true recompute=full")),
    ("switch", layout(2, "tp=2 ep=2 expert_dispatch=all_gather")),
    ("moe", layout(2, "zero=3 ep=2")),
    ("moe", layout(2, "tp=2 ep=2 fused_weight_gradients=true")),
    ("switch", layout(2, "cp=2 ep=2")),
    ("moe", layout(2, "pp=2 pipeline_schedule=zero_bubble recompute=selective")),
    ("moe", layout(2, "pp=2 fused_weight_gradients=true")),
)


def test_layouts_give_the_numbers_of_the_plain_path_on_one_process() -> None:
    names = sorted({model for model, _ in LAYOUTS})
    alone = layout(1, "zero=1")
    (expected,) = run(run_jobs, 1, [alone.job(name, micro=1, steps=2) for name in names])
    fused = [item.job(model, "parallel.expert_kernels=grouped", steps=2) for model, item in LAYOUTS]
    for logs in run(run_jobs, 2, fused, timeout_seconds=300):
        for (model, item), log in zip(LAYOUTS, logs, strict=True):
            errors = worst(log, expected[names.index(model)])
            assert max(errors.values()) <= EXACT, (model, item, errors)


def test_what_cannot_be_fused_stays_plain_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    for more, device, precision, reason in (
        ({"mlp_bias": True}, "cpu", "bf16", "mlp_bias"),
        ({}, "cuda", "fp32", "train.precision"),
    ):
        model = tiny_model(tiny_config(moe=True, **more))
        with caplog.at_level(logging.INFO):
            fuse_experts(model, "grouped", precision, torch.device(device))
        assert all(layer.experts.kernels is None for layer in model.moe_layers())
        assert reason in caplog.records[-1].getMessage()
    model = tiny_model(tiny_config(moe=True))
    fuse_experts(model, "triton", "bf16", CPU)
    assert all(layer.experts.kernels == kernels.TRITON for layer in model.moe_layers())


# ---- fp8

WIDE: dict[str, Any] = {"moe": True, "hidden_size": 32, "num_kv_heads": 1, "ffn_size": 48}


def _losses(rank: int, world_size: int, precision: str, fp8: Fp8Options | None, **options: Any) -> list[float]:
    config = tiny_config(**WIDE)
    config = config.model_copy(update={"moe": config.moe.model_copy(update={"ffn_size": 16})})
    parallel = ParallelConfig(expert_kernels="grouped", **options)
    mesh = ParallelMesh(parallel, world_size=world_size, rank=rank, device_type="cpu")
    made = parallelize(tiny_model(config), parallel, mesh, precision, CPU, fp8=fp8)
    made.engine.materialize(init(config))
    losses = train(made.engine, 4, dp_rank=rank, dp_size=world_size).losses
    in_fp8 = [module for module in made.stages[0].modules() if isinstance(module, Experts) and module.in_fp8]
    assert bool(in_fp8) == (fp8 is not None and fp8.experts)
    for module in in_fp8:
        assert (module.fp8 is not None) == (fp8 is not None and fp8.cached and options.get("zero", 1) < 2)
    return losses


def _fp8_training(rank: int, world_size: int) -> dict[str, list[float]]:
    of = functools.partial(_losses, rank, world_size)
    kept, anew = Fp8Options(experts=True), Fp8Options(experts=True, cached=False)
    return {
        "bf16": of("bf16", None),
        "linears": of("fp8", Fp8Options()),
        "kept": of("fp8", kept),
        "cast anew": of("fp8", anew),
        "recomputed": of("fp8", kept, recompute="full"),
        "into buckets": of("fp8", kept, fused_weight_gradients=True),
        "fsdp": of("fp8", kept, zero=2),
    }


def test_experts_train_in_fp8() -> None:
    """The same numbers however casts are kept, new ones after each step; near bf16, and not bf16's."""
    (found,) = run(_fp8_training, 1, timeout_seconds=400)
    for name in ("cast anew", "recomputed"):
        assert found[name] == found["kept"], name
    # in buckets gradients of linears that are not in fp8 are not rounded; fsdp rounds its routers, after a step
    assert found["into buckets"] == pytest.approx(found["kept"], abs=0.02)
    assert found["fsdp"][0] == pytest.approx(found["kept"][0], abs=0.02)
    assert found["kept"] != found["linears"] != found["bf16"]
    # the same weights at first; later tokens near a tie go to other experts
    assert found["kept"][0] == pytest.approx(found["bf16"][0], abs=0.02) and found["kept"][-1] < found["kept"][0]


def test_the_copies_are_counted_and_expire() -> None:
    config = tiny_config(**WIDE)
    config = config.model_copy(update={"moe": config.moe.model_copy(update={"ffn_size": 16})})
    model = tiny_model(config, device="cpu").bfloat16()
    model.init_weights(0)
    weights = Fp8Weights()
    fuse_experts(model, "grouped", "fp8", CPU)
    put_experts_in_fp8(model, Fp8Options(experts=True), weights, cached=True)
    (layer,) = model.moe_layers()
    tokens, _ = batches(0)
    model(tokens)
    first = layer.experts.fp8
    assert first is not None
    size = layer.experts.up_weight.numel() + layer.experts.down_weight.numel()
    scales = sum(scale.nbytes for scale in first[1::2])
    assert weights.nbytes == 2 * size + scales
    with torch.no_grad():
        layer.experts.up_weight.mul_(2.0)
    model(tokens)
    assert layer.experts.fp8 is first
    weights.expire()
    model(tokens)
    second = layer.experts.fp8
    assert second is not None and torch.equal(second.up_scale, 2 * first.up_scale)
    # new casts need no new graph
    torch._dynamo.reset()
    counters.clear()
    x = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = layer(x)[0]
    compile_blocks([layer], backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(layer(x)[0], expected)
        layer.experts.fp8 = Fp8Matrices(*(tensor.clone() for tensor in second))
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


def _compiled(rank: int, world_size: int, recompute: Any) -> dict[str, Any]:
    """Graphs of blocks with experts, whose gradients are written to the buckets themselves."""
    torch._dynamo.reset()
    counters.clear()
    written: list[int] = []
    real = kernels._add

    def record(out: Tensor, *args: Any, **kwargs: Any) -> None:
        written.append(out.data_ptr())
        real(out, *args, **kwargs)

    found: list[dict[str, Tensor]] = []
    config = tiny_config(moe=True, num_layers=2)
    for more in ({}, {"compile": True, "expert_kernels": "grouped", "fused_weight_gradients": True}):
        parallel = ParallelConfig(recompute=recompute, **more)
        mesh = ParallelMesh(parallel, world_size=world_size, rank=rank, device_type="cpu")
        engine = parallelize(tiny_model(config), parallel, mesh, "fp32", CPU).engine
        engine.materialize(init(config))
        kernels._add = record  # type: ignore[assignment]
        try:
            gradients_of_step(engine, 0, dp_rank=rank, dp_size=world_size, accumulation=2)
        finally:
            kernels._add = real
        parameters = engine.main_parameters()
        found.append({p.name: p.param.grad.clone() for p in parameters if p.param.grad is not None})
    experts = [module for module in engine.stages[0].modules() if isinstance(module, AccumulatingExperts)]
    places = {place.data_ptr() for module in experts for place in (module.up_sum, module.down_sum) if place is not None}
    return {
        "error": max(float((found[1][name] - value).abs().max()) for name, value in found[0].items()),
        "breaks": dict(counters["graph_break"]),
        "in place": set(written) == places and len(written) == 2 * len(places) == 4,
    }


@pytest.mark.slow
def test_compiled_blocks_write_experts_gradients_into_the_buckets() -> None:
    (found,) = run(_compiled, 1, "selective", timeout_seconds=400)
    assert found["error"] < 1e-5 and found["breaks"] == {} and found["in place"], found


@pytest.mark.gpu
@pytest.mark.parametrize("choice", ["grouped", "triton"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_layer_on_a_gpu_adds_to_its_sums_and_waits_for_nothing(choice: Any, compiled: bool) -> None:
    torch._dynamo.reset()
    config = tiny_config(moe=True, hidden_size=128, num_experts=8)
    config = config.model_copy(update={"moe": config.moe.model_copy(update={"ffn_size": 64})})
    models = [tiny_model(config, device="cuda", dtype=torch.bfloat16) for _ in "ab"]
    models[0].init_weights(0)
    models[1].load_state_dict(models[0].state_dict())
    (plain,), (fused,) = (model.moe_layers() for model in models)
    fuse_experts(models[1], choice, "bf16", torch.device("cuda"))
    sums = {name: torch.full_like(p, 7.0, dtype=torch.float32) for name, p in fused.experts.named_parameters()}
    fresh = {name: torch.ones((), dtype=torch.bool) for name in sums}
    for name, place in sums.items():
        fused.experts.aim(name, place, fresh[name])
    if compiled:
        compile_blocks([fused])
    x = torch.randn(2, 300, 128, device="cuda").bfloat16()
    for repeat in range(3):
        leaf = x.clone().requires_grad_()
        torch.cuda.set_sync_debug_mode("error" if repeat == 2 else "default")
        try:
            out, extras = fused(leaf)
            (out.float().square().sum() + extras.aux_loss).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    own = x.clone().requires_grad_()
    expected, extras = plain(own)
    (expected.float().square().sum() + extras.aux_loss).backward()

    def error(found: Tensor | None, wanted: Tensor | None) -> float:
        assert found is not None and wanted is not None
        return float((found.float() - wanted.float()).norm() / wanted.float().norm())

    assert error(out.detach(), expected.detach()) < 2e-2 and error(leaf.grad, own.grad) < 3e-2
    for name, parameter in plain.experts.named_parameters():
        assert error(sums[name], parameter.grad.float() * 3) < 3e-2, name  # type: ignore[union-attr]
        assert fused.experts.get_parameter(name).grad is None and not fresh[name]
    assert error(fused.router.weight.grad, plain.router.weight.grad * 3) < 3e-2  # type: ignore[operator]
