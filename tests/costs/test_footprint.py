"""Bytes by a profile's numbers: for Paceline, those of `costs/memory.py`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.config.load import resolve
from paceline.config.model import ModelConfig
from paceline.costs.demand import demand_of
from paceline.costs.footprint import LINEAR, linear_bytes, memory_by_stage, micro_batches_held
from paceline.costs.hardware import find_hardware
from paceline.costs.memory import estimate_pipeline
from paceline.costs.pipeline import peak_in_flight, schedule
from paceline.costs.profiles import NANOTRON, PACELINE
from paceline.costs.step import predict, rank_layers
from paceline.costs.workload import Cluster, Workload

GPU = find_hardware("H200 SXM")


def cluster(gpus: int) -> Cluster:
    assert GPU is not None
    return Cluster(gpu=GPU, gpus=gpus)


@pytest.mark.parametrize(
    ("preset", "gpus", "parallel"),
    [
        ("llama3_8b", 8, {"zero": 1}),
        ("llama3_8b", 8, {"zero": 3}),
        ("llama3_8b", 8, {"tp": 4, "zero": 1}),
        ("llama3_8b", 8, {"pp": 4, "zero": 1}),
        ("llama3_8b", 8, {"recompute": "full"}),
        ("llama3_8b", 8, {"recompute": "selective", "accumulate_dtype": "bf16"}),
        ("llama3_1b", 4, {"cp": 2}),
        ("qwen3_30b_a3b", 16, {"ep": 8}),
        ("qwen3_30b_a3b", 16, {"ep": 8, "expert_kernels": "triton"}),
        ("qwen3_moe_12l", 1, {"expert_kernels": "grouped", "compile": False}),
        ("llama3_8b", 8, {"compile": False}),
        ("llama3_8b", 4, {"compile": False, "pp": 4, "pipeline_schedule": "zbv", "stages_per_rank": 2}),
        (
            "llama3_8b",
            8,
            {"compile": False, "pp": 4, "pipeline_schedule": "zbv", "stages_per_rank": 2, "recompute": "full"},
        ),
        ("llama3_8b", 4, {"offload": "optimizer", "recompute": "full", "zero": 1}),
        ("llama3_8b", 4, {"offload": "optimizer", "recompute": "full", "zero": 2}),
        ("llama3_8b", 4, {"offload": "optimizer", "recompute": "full", "zero": 3}),
        ("llama3_8b", 4, {"offload": "parameters", "recompute": "full", "zero": 3}),
    ],
)
def test_paceline_as_counted_exactly(preset: str, gpus: int, parallel: dict[str, object]) -> None:
    """Within 8 % of the exact count of every stage."""
    tables = {
        "model": {"preset": preset},
        "train": {"seq_len": 4096, "global_batch_size": 64},
        "parallel": {"compile": True, **parallel},
    }
    config = getattr(resolve(tables), "config", None) or resolve(tables)
    found = predict(config, cluster(gpus)).stages  # type: ignore[arg-type]
    for stage, exact in zip(found, estimate_pipeline(config, gpus), strict=True):  # type: ignore[arg-type]
        assert stage.total == pytest.approx(exact.total, rel=0.08)


def test_an_optimizer_that_reads_bf16_needs_no_copy_of_gradients() -> None:
    tables = {
        "model": {"preset": "llama3_8b"},
        "train": {"seq_len": 4096, "global_batch_size": 64},
        "parallel": {"compile": True, "accumulate_dtype": "bf16", "dp_shard": 2},
    }
    kept, read = (
        predict(resolve(tables | {"optim": {"fused_update": on}}).config, cluster(2)).stages[0].gradients
        for on in (False, True)
    )
    # 2 bytes a parameter, and 4 of this rank's half
    assert kept == pytest.approx(2 * read)


@pytest.mark.parametrize(("pp", "stages_per_rank"), [(4, 1), (4, 2), (8, 3)])
@pytest.mark.parametrize("micro_batches", [2, 8, 32])
def test_micro_batches_held_are_those_of_the_schedule(pp: int, stages_per_rank: int, micro_batches: int) -> None:
    if stages_per_rank > 1 and micro_batches % pp:
        pytest.skip("uneven rounds hold a little less")
    config = resolve({"model": {"preset": "llama3_8b"}})
    work = Workload.of(getattr(config, "config", config))  # type: ignore[arg-type]
    work = replace(work, pp=pp, stages_per_rank=stages_per_rank, schedule="")
    for rank, actions in enumerate(schedule(work.schedule_name, pp, stages_per_rank, micro_batches)):
        assert micro_batches_held(work, micro_batches, rank) * stages_per_rank == peak_in_flight(actions)


def test_a_v_has_the_head_on_the_first_rank() -> None:
    """The user's case: 8B with 8k over four ranks in a V does not fit 80 GB, and rank 0 is the one that runs out."""
    config = resolve(
        {
            "model": {"preset": "llama3_8b"},
            "train": {"seq_len": 8192, "global_batch_size": 64},
            "parallel": {"pp": 4, "dp_shard": 1, "pipeline_schedule": "zbv", "stages_per_rank": 2},
        }
    ).config
    gpu = find_hardware("H100 SXM")
    assert gpu is not None
    found = predict(config, Cluster(gpu=gpu, gpus=4))
    assert not found.fits
    assert [stage.logits > 0 for stage in found.stages] == [True, False, False, False]
    assert max(found.stages, key=lambda stage: stage.total) is found.stages[0]
    work = Workload.of(config)
    layers = rank_layers(work, PACELINE)
    demand = demand_of(work, Cluster(gpu=gpu, gpus=4), layers)
    assert sum(layers) == 32 and demand.layers_last == layers[0] < demand.layers_inside == max(layers)


def test_memory_is_linear_in_a_profiles_numbers() -> None:
    config = resolve({"model": {"preset": "llama3_1b"}, "train": {"global_batch_size": 64}})
    work = replace(Workload.of(getattr(config, "config", config)), tp=2, pp=2)  # type: ignore[arg-type]
    layers = rank_layers(work, NANOTRON)
    for rank, stage in enumerate(memory_by_stage(work, cluster(16), layers, NANOTRON)):
        units = linear_bytes(work, cluster(16), layers, rank, NANOTRON)
        assert stage.total == pytest.approx(sum(getattr(NANOTRON, name) * units[name] for name in LINEAR))


def test_sharding_deals_out_states() -> None:
    config = resolve({"model": {"preset": "llama3_1b"}, "train": {"global_batch_size": 64}})
    work = Workload.of(getattr(config, "config", config))  # type: ignore[arg-type]
    whole, sharded, parameters = (
        predict(replace(work, zero=zero), cluster(8), PACELINE).stages[0] for zero in (0, 1, 3)
    )
    assert sharded.optimizer == pytest.approx(whole.optimizer / 8)
    assert sharded.weights == whole.weights
    assert parameters.weights == pytest.approx(whole.weights * 2 / 8)  # fp32 shards of bf16 weights


def nanotron_3b(**layout: int) -> Workload:
    model = ModelConfig(num_layers=28, hidden_size=3072, num_heads=32, ffn_size=8192, vocab_size=131072)
    fields: dict[str, int] = {"micro_batch_size": 8, "global_batch_size": 256, **layout}
    return Workload(model=model, seq_len=4096, precision="bf16", **fields)  # type: ignore[arg-type]


def units(work: Workload, gpus: int) -> dict[str, float]:
    return linear_bytes(work, cluster(gpus), rank_layers(work, NANOTRON), 0, NANOTRON)


def test_inputs_that_products_gathered_are_whole_on_each_rank() -> None:
    """One tensor as wide as the residual stream, of 28 layers, less the part that is counted as cut."""
    whole = 2.0 * 8 * 4096 * 3072 * 28
    assert units(nanotron_3b(tp=4), 8)["kept_gathered"] == pytest.approx(whole * 3 / 4)
    assert units(nanotron_3b(tp=1), 8)["kept_gathered"] == 0
    assert units(nanotron_3b(tp=4, pp=2), 16)["kept_gathered"] == 0  # released: sends over a network, two stages
    assert units(nanotron_3b(tp=4, pp=2), 8)["kept_gathered"] > 0  # one node
    assert units(nanotron_3b(tp=32), 32)["kept_gathered"] == 0  # released: four nodes


def test_logits_of_the_micro_batch_before_are_still_there() -> None:
    once, many = (units(nanotron_3b(global_batch_size=size), 8) for size in (64, 256))
    assert once["logit_bytes"] == many["logit_bytes"] == many["logit_bytes_before"] == 8 * 4096 * 131072
    assert once["logit_bytes_before"] == 0


def test_frozen_weights_have_neither_gradients_nor_optimizer() -> None:
    work = replace(nanotron_3b(zero=1), frozen_weights=True)
    (stage,) = memory_by_stage(work, cluster(8), (28.0,), NANOTRON)
    (trained,) = memory_by_stage(nanotron_3b(zero=1), cluster(8), (28.0,), NANOTRON)
    assert stage.states == stage.weights == trained.weights and stage.activations == trained.activations


@pytest.mark.parametrize(
    "parallel",
    [
        {"zero": 0},
        {"zero": 1},
        {"zero": 2},
        {"zero": 3},
        {"zero": 1, "offload": "optimizer"},
        {"zero": 3, "offload": "optimizer"},
        {"zero": 3, "offload": "parameters"},
    ],
    ids=str,
)
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_states_of_adapters_are_those_of_the_exact_count(parallel: dict[str, object], micro_batches: int) -> None:
    """Where only adapters learn, offloaded or not; within 2 %: layers are averages here."""
    tables = {
        "model": {"preset": "llama3_1b"},
        # wide ones, so that they count: 360M beside 1.2B
        "lora": {"rank": 512},
        "train": {"seq_len": 256, "global_batch_size": 4 * micro_batches},
        "parallel": {"compile": True, **parallel},
    }
    config = resolve(tables).config
    (stage,) = predict(config, cluster(4)).stages
    (exact,) = estimate_pipeline(config, 4)
    assert stage.weights == pytest.approx(exact.weights, rel=0.02)
    assert stage.gradients == pytest.approx(exact.gradients, rel=0.02)
    assert stage.optimizer == pytest.approx(exact.masters + exact.moments, rel=0.02)
    assert stage.gathered == pytest.approx(exact.gathered, rel=0.02)
