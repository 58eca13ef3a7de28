"""The flat engine on one and more ranks: gradients, traffic, memory, unused and tied parameters, offload."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from distributed import run
from paceline.config.optim import OptimConfig
from paceline.config.parallel import ParallelConfig
from paceline.parallel.flat import FlatEngine
from paceline.parallel.mesh import ParallelMesh
from tests.parallel.tiny import (
    batches,
    box_of,
    full_weights,
    gradients_of_step,
    init,
    loss_of,
    plain,
    shapes_of,
    square_norm,
    tiny_config,
    tiny_model,
    train,
)


def _engine(
    rank: int, world_size: int, precision: Any = "fp32", *, dtype: torch.dtype = torch.float32, **parallel: Any
) -> tuple[FlatEngine, ParallelMesh]:
    tied, moe = parallel.pop("tied", False), parallel.pop("moe", False)
    bucket_elements = parallel.pop("bucket_elements", 0)
    config = ParallelConfig(**parallel)
    mesh = ParallelMesh(config, world_size=world_size, rank=rank, device_type="cpu")
    shape = tiny_config(tied=tied, moe=moe)
    model = tiny_model(shape, dtype=dtype)
    engine = FlatEngine([model], config, mesh, precision, torch.device("cpu"), {}, shapes_of(model))
    if bucket_elements:
        _cut_smaller(engine, bucket_elements)
    engine.materialize(init(shape))
    return engine, mesh


def _cut_smaller(engine: FlatEngine, bucket_elements: int) -> None:
    """parallel.bucket_mb starts at 1 MiB: more than the whole tiny model."""
    from paceline.parallel.buckets import plan_buckets

    for group in engine._groups:
        shapes = {name: site.parameter.shape for name, site in group._sites.items()}
        group.layout = plan_buckets(shapes, shard_degree=group.layout.shard_degree, bucket_elements=bucket_elements)
        group._slots = group.layout.slots


def _plain_gradients(step: int, dtype: torch.dtype, tied: bool, moe: bool) -> dict[str, torch.Tensor]:
    model = plain(tiny_config(tied=tied, moe=moe), dtype=dtype)
    tokens, labels = batches(step)
    loss_of(model(tokens, labels), (labels != -100).sum(), len(tokens)).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _check_gradients(rank: int, world_size: int) -> None:
    for tied, moe in ((False, False), (True, True)) if world_size == 2 else ((True, False),):
        expected = _plain_gradients(3, torch.float64, tied, moe)
        atol = 1e-7 if moe else 1e-12  # routers compute in fp32 in every model
        for parallel in (
            {"zero": 0},
            {"zero": 1},
            {"zero": 1, "bucket_elements": 500},
            {"zero": 0, "bucket_elements": 500},
            {"zero": 1, "dp_replicate": 2},
            {"zero": 1, "offload": "optimizer"},
        ):
            if world_size % parallel.get("dp_replicate", 1):
                continue
            engine, _ = _engine(rank, world_size, dtype=torch.float64, tied=tied, moe=moe, **parallel)
            for accumulation in (1, 2):
                gradients_of_step(engine, 3, dp_rank=rank, dp_size=world_size, accumulation=accumulation)
                for parameter in engine.main_parameters():
                    grad = parameter.param.grad
                    assert grad is not None and grad.dtype == torch.float64
                    for piece in parameter.pieces(grad).pieces:
                        torch.testing.assert_close(
                            piece.tensor, expected[parameter.name][box_of(piece)], rtol=0, atol=atol
                        )
            norm = square_norm(engine)
            total = sum(float(g.float().square().sum()) for g in expected.values())
            assert abs(norm.item() - total) < 1e-5 * total


def _all_checks(rank: int, world_size: int) -> dict[str, Any]:
    _check_gradients(rank, world_size)
    return {
        "calls": {
            (zero, accumulation): _calls(rank, world_size, zero, accumulation)
            for zero in (0, 1)
            for accumulation in (1, 2)
        },
        "bytes": {
            (precision, zero, offload): _bytes(rank, world_size, precision, zero, offload)
            for precision in ("fp32", "bf16")
            for zero in (0, 1)
            for offload in ("none", "optimizer")
        },
        "nan": _nan(rank, world_size),
        "bf16": _bf16(rank, world_size) if world_size == 2 else [],
        "unused": _unused(rank, world_size),
        "weights": _same_weights(rank, world_size),
    }


def _calls(rank: int, world_size: int, zero: int, accumulation: int) -> dict[str, Any]:
    engine, mesh = _engine(rank, world_size, zero=zero, bucket_elements=500)
    mesh.traffic.take()
    gradients_of_step(engine, 0, dp_rank=rank, dp_size=world_size, accumulation=accumulation)
    return {name: calls for name, (calls, _) in mesh.traffic.take().items()}


def _bytes(rank: int, world_size: int, precision: str, zero: int, offload: str) -> dict[str, int]:
    engine, _ = _engine(rank, world_size, precision, zero=zero, offload=offload)
    found = engine.bytes_by_kind()
    found["optimizer"] = 8 * sum(p.param.numel() for p in engine.main_parameters())
    return found


def _nan(rank: int, world_size: int) -> list[bool]:
    seen = []
    for parallel in ({"zero": 0}, {"zero": 1}):
        engine, _ = _engine(rank, world_size, **parallel)
        if rank == 1:
            weight = engine.stages[0].blocks["1"].feed_forward.up_proj.weight  # type: ignore[union-attr]
            handle = weight.register_hook(lambda gradient: gradient * float("nan"))
        gradients_of_step(engine, 0, dp_rank=rank, dp_size=world_size)
        if rank == 1:
            handle.remove()
        seen.append(bool(torch.isnan(square_norm(engine))))
        # the next step is clean: nothing of the bad gradient is left
        gradients_of_step(engine, 0, dp_rank=rank, dp_size=world_size)
        seen.append(bool(torch.isnan(square_norm(engine))))
    return seen


def _bf16(rank: int, world_size: int) -> list[float]:
    """Largest difference of losses from fp32."""
    results = []
    reference, _ = _engine(rank, world_size, moe=True)
    expected = train(
        reference, 12, dp_rank=rank, dp_size=world_size, sum_over_dp=lambda loss: dist.all_reduce(loss)
    ).losses
    for options in (
        {"zero": 1},
        {"zero": 1, "reduce_dtype": "bf16", "accumulate_dtype": "bf16"},
        {"zero": 0, "offload": "optimizer"},
    ):
        engine, _ = _engine(rank, world_size, "bf16", moe=True, **options)
        assert engine.stages[0].embed.weight.dtype == torch.bfloat16
        assert engine.stages[0].moe_layers()[0].router.weight.dtype == torch.float32
        assert all(p.param.dtype == torch.float32 for p in engine.main_parameters())
        # main weights are not the rounded ones
        full = full_weights(engine)
        for name, parameter in plain(tiny_config(moe=True)).named_parameters():
            assert torch.equal(full[name], parameter.detach()), name
        log = train(engine, 12, dp_rank=rank, dp_size=world_size, sum_over_dp=lambda loss: dist.all_reduce(loss))
        engine.wait_for_weights()
        full = full_weights(engine)
        for name, parameter in engine.stages[0].named_parameters():
            assert torch.equal(parameter.detach(), full[name].to(parameter.dtype)), name
        results.append(max(abs(a - b) for a, b in zip(log.losses, expected, strict=True)))
    return results


def _unused(rank: int, world_size: int) -> bool:
    """Parameters that some ranks do not use, and that nobody uses, neither hang nor leave an old gradient."""
    engine, _ = _engine(rank, world_size, zero=1, bucket_elements=200)
    gradients_of_step(engine, 0, dp_rank=rank, dp_size=world_size)
    blocks = engine.stages[0].blocks
    blocks["0"].forward = lambda x, *_: (x, None)  # type: ignore[method-assign]
    if rank == 0:
        blocks["2"].forward = lambda x, *_: (x, None)  # type: ignore[method-assign]
    gradients_of_step(engine, 1, dp_rank=rank, dp_size=world_size)
    zero = all(not p.param.grad.any() for p in engine.main_parameters() if p.name.startswith("blocks.0."))
    used = [bool(p.param.grad.any()) for p in engine.main_parameters() if p.name.startswith("blocks.2.")]
    return zero and all(used)


def _same_weights(rank: int, world_size: int) -> bool:
    """After an update every rank computes with the same weights, whatever it owned; repeated runs are bit-equal."""
    finals = []
    for parallel in ({"zero": 1, "bucket_elements": 300}, {"zero": 1, "bucket_elements": 300}, {"zero": 0}):
        engine, _ = _engine(rank, world_size, moe=True, **parallel)
        bias = engine.stages[0].moe_layers()[0].router.expert_bias
        assert bias is not None
        bias.copy_(torch.arange(4.0))
        train(engine, 4, dp_rank=rank, dp_size=world_size)
        engine.wait_for_weights()
        finals.append({name: p.detach().clone() for name, p in engine.stages[0].named_parameters()})
        full = full_weights(engine)
        assert full["blocks.1.feed_forward.router.expert_bias"].tolist() == [0.0, 1.0, 2.0, 3.0]
        assert all(torch.equal(full[name], value) for name, value in finals[-1].items())
    for name, value in finals[0].items():
        assert torch.equal(value, finals[1][name]), name
        torch.testing.assert_close(value, finals[2][name], rtol=0, atol=1e-5)
    return True


@pytest.mark.parametrize("world_size", [2, 4])
def test_numbers_traffic_and_memory(world_size: int) -> None:
    results = run(_all_checks, world_size)
    count = sum(p.numel() for p in plain(tiny_config()).parameters())
    slack = 64 * (len(list(plain(tiny_config()).parameters())) + world_size)
    for found in results:
        assert found["calls"][0, 1] == found["calls"][0, 2] and found["calls"][1, 1] == found["calls"][1, 2]
        assert set(found["calls"][1, 1]) == {"dp/gradients/reduce_scatter"}
        assert set(found["calls"][0, 1]) == {"dp/gradients/all_reduce"}
        assert found["calls"][0, 1]["dp/gradients/all_reduce"] > 3

        def near(value: int, per_parameter: float) -> bool:
            return per_parameter * count <= value <= per_parameter * (count + slack)

        sizes = found["bytes"]
        for zero, shards in ((0, 1), (1, world_size)):
            fp32, bf16 = sizes["fp32", zero, "none"], sizes["bf16", zero, "none"]
            assert near(fp32["parameters"], 4) and near(fp32["gradients"], 4) and fp32["masters"] == 0
            assert near(bf16["parameters"], 2) and near(bf16["gradients"], 4)
            assert near(bf16["masters"] * shards, 4)
            offloaded = sizes["bf16", zero, "optimizer"]
            assert near(offloaded["parameters"], 2) and offloaded["masters"] == 0
            assert near(offloaded["host"] * shards, 4 + 4 + 2)
        assert found["nan"] == [True, False] * 2
        assert found["unused"] and found["weights"]
        # losses of about 4.5, and bf16 rounds each logit by up to 2^-8 of it: 0.02, after as large errors in the blocks
        assert all(0 < difference < 0.06 for difference in found["bf16"])
    for zero in (0, 1):
        held = sum(found["bytes"]["fp32", zero, "none"]["optimizer"] for found in results)
        assert held == 8 * count * (world_size if zero == 0 else 1)


def test_one_process_without_a_process_group() -> None:
    for options in ({"zero": 0}, {"zero": 1}, {"zero": 1, "offload": "optimizer"}):
        engine, mesh = _engine(0, 1, **options)
        reference = plain(tiny_config())
        optim = OptimConfig(lr=1e-2, weight_decay=0, grad_clip=0)
        optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0, betas=optim.betas)
        log = train(engine, 5, dp_rank=0, dp_size=1, optim=optim)
        for step in range(5):
            tokens, labels = batches(step)
            output = reference(tokens, labels)
            loss = output.loss_sum / output.num_tokens
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            assert abs(loss.item() - log.losses[step]) < 1e-5
        assert not mesh.traffic.calls


def test_a_gradient_after_its_bucket_was_sent_is_an_error() -> None:
    engine, _ = _engine(0, 1, zero=1)
    try:
        gradients_of_step(engine, 0, dp_rank=0, dp_size=1)
        engine.stages[0](torch.zeros(1, 2, dtype=torch.long), torch.zeros(1, 2, dtype=torch.long)).loss_sum.backward()
    except AssertionError as error:
        assert "after its bucket was sent" in str(error)
    else:
        raise AssertionError("accepted")


def test_frozen_parameters_are_kept_and_not_updated() -> None:
    config = ParallelConfig(zero=1)
    mesh = ParallelMesh(config, world_size=1, rank=0, device_type="cpu")
    model = tiny_model(tiny_config())
    model.embed.weight.requires_grad_(False)
    engine = FlatEngine([model], config, mesh, "fp32", torch.device("cpu"), {}, shapes_of(model))
    engine.materialize(init(tiny_config()))
    train(engine, 2, dp_rank=0, dp_size=1)
    assert "embed.weight" not in {p.name for p in engine.main_parameters()}
    assert torch.equal(engine.stages[0].embed.weight, plain(tiny_config()).embed.weight)
    assert "embed.weight" in engine.weights()
