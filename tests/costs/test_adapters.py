"""Adapters counted: as the model builds them, as engines hold them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distributed import run as on_ranks
from paceline.config.load import resolve
from paceline.config.lora import is_adapter
from paceline.config.model import ModelConfig
from paceline.config.presets import preset
from paceline.config.run import RunConfig
from paceline.costs.adapters import count_adapters, count_learned, step_flops_per_token
from paceline.costs.hardware import find_hardware
from paceline.costs.layers import token_flops
from paceline.costs.memory import estimate, estimate_pipeline
from paceline.costs.parameters import rank_shapes
from paceline.costs.step import predict
from paceline.costs.workload import Cluster
from paceline.runtime.process import ProcessInfo
from paceline.training.setup import build_model, build_parts
from tests.training.steps import Job, config_of


def config_with(model: str = "llama3_8b", **sections: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate({"model": ModelConfig(**preset(model)).model_dump(), **sections})


@pytest.mark.parametrize("name", ["tiny_llama", "tiny_moe", "tiny_deepseek", "tiny_gpt"])
@pytest.mark.parametrize("lora", [{"rank": 5}, {"rank": 2, "dora": True, "targets": ["o_proj"]}])
def test_shapes_are_the_built_models(name: str, lora: dict[str, Any]) -> None:
    config = config_with(name, lora=lora)
    built = {name: tuple(parameter.shape) for name, parameter in build_model(config).named_parameters()}
    assert rank_shapes(config, 0) == built
    assert count_adapters(config.model, config.lora) == sum(
        torch.Size(shape).numel() for name, shape in built.items() if is_adapter(name)
    )


def test_the_8b_with_rank_16() -> None:
    """41.9 million: 16 (C + D) over the seven linears of 32 layers."""
    config = config_with(lora={"rank": 16})
    linears = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
    assert count_learned(config) == 32 * sum(16 * (rows + columns) for rows, columns in linears) == 41_943_040


def test_no_flops_are_counted_for_gradients_of_frozen_weights() -> None:
    config = config_with(lora={"rank": 16})
    flops = token_flops(config.model, config.train.seq_len)
    full, adapted = step_flops_per_token(config_with()), step_flops_per_token(config)
    assert adapted == pytest.approx(full - (flops.forward - flops.scores) + 6 * 41_943_040)


def test_memory_of_the_8b_is_the_frozen_weights_and_little_else() -> None:
    found = estimate(config_with(lora={"rank": 16}, parallel={"zero": 1}), 1)
    frozen, learned = 2 * 8_030_261_248, 41_943_040
    assert found.weights == frozen + 2 * learned
    assert found.gradients == found.masters == 4 * learned and found.moments == 8 * learned
    fp8 = estimate(config_with(lora={"rank": 16, "base": "fp8"}, train={"precision": "fp8"}), 1)
    assert fp8.weights == found.weights, "two bytes either way"
    kept = estimate(config_with(lora={"rank": 16}, train={"precision": "fp8"}), 1)
    assert kept.weights > 1.8 * found.weights
    nf4 = estimate(config_with(lora={"rank": 16, "base": "nf4"}), 1)
    assert 5.5e9 < nf4.weights < 6.0e9


def test_a_step_is_predicted_shorter_and_smaller() -> None:
    gpu = find_hardware("NVIDIA H200")
    assert gpu is not None
    cluster = Cluster(gpu=gpu, gpus=1)
    train = {"seq_len": 8192, "global_batch_size": 4, "micro_batch_size": 1}
    model = {**preset("llama3_8b"), "max_seq_len": 8192}
    full = RunConfig.model_validate({"model": model, "train": train})
    adapted = RunConfig.model_validate({"model": model, "train": train, "lora": {"rank": 16}})
    before, after = predict(full, cluster), predict(adapted, cluster)
    assert 0.6 < after.seconds / before.seconds < 0.8
    assert after.memory_bytes < 0.6 * before.memory_bytes
    assert after.mfu is not None and before.mfu is not None and abs(after.mfu / before.mfu - 1) < 0.15


def test_widening_of_4_bits_takes_time_for_each_product() -> None:
    """2.5 bytes a number of every linear of a layer, forward and backward, and again where all is recomputed."""
    gpu = find_hardware("NVIDIA H200")
    assert gpu is not None
    cluster = Cluster(gpu=gpu, gpus=1)
    model = {**preset("llama3_8b"), "max_seq_len": 8192}

    def memory_bound(base: str, recompute: str) -> float:
        train = {"seq_len": 2048, "global_batch_size": 4, "micro_batch_size": 1}
        lora = {"rank": 16, "base": base}
        tables = {"model": model, "train": train, "lora": lora, "parallel": {"recompute": recompute, "compile": True}}
        parts = predict(RunConfig.model_validate(tables), cluster).parts
        return parts["memory_bound"] + parts["recompute"]

    passes = {"none": 2, "full": 3}
    for recompute, number in passes.items():
        more = memory_bound("nf4", recompute) - memory_bound("bf16", recompute)
        # 32 layers of 218M numbers, 4 micro-batches, at 4.8 TB/s and the share of it that a profile reaches
        least = number * 4 * 32 * 218e6 * 2.5 / 4.8e12
        assert least < more < 1.6 * least


LAYOUTS = {
    "zero 0": ("parallel.zero=0",),
    "zero 1": ("parallel.zero=1",),
    "zero 3": ("parallel.zero=3",),
    "tp": ("parallel.tp=2",),
    "pp": ("parallel.pp=2",),
}
SETS = ("lora.rank=8", "lora.dora=true", "train.precision=bf16", "model.ffn_size=128")


def held(rank: int, world_size: int) -> dict[str, dict[str, int]]:
    """Bytes that a rank holds once everything has its memory, by layout and kind."""
    info = ProcessInfo(rank=rank, local_rank=rank, world_size=world_size, local_world_size=world_size)
    by_layout = {}
    for name, sets in LAYOUTS.items():
        parts = build_parts(config_of(Job(sets=(*SETS, *sets))), resolve({}).registry, info, torch.device("cpu"))
        found = by_layout[name] = parts.engine.bytes_by_kind()
        found["moments"] = sum(p.tensor.nbytes for v in parts.optimizer.state().values() for p in v.pieces)
    # groups of five layouts are torn down with this call: no rank may be ahead of one that still connects them
    torch.distributed.barrier()
    return by_layout


def test_what_is_planned_is_what_is_held() -> None:
    """To what buckets are padded by: each parameter to 64 elements, a bucket to as much for each shard."""
    padding = 64 * 2 * 7 * 3 + 64 * 2
    for rank, by_layout in enumerate(on_ranks(held, 2)):
        for name, found in by_layout.items():
            config = config_of(Job(sets=(*SETS, *LAYOUTS[name])))
            plan = estimate_pipeline(config, 2)[rank if name == "pp" else 0]
            for kind, planned, width in (
                ("parameters", plan.weights, 4),
                ("masters", plan.masters, 4),
                ("moments", plan.moments, 8),
                ("gradients", plan.gradients, 4),
            ):
                if kind != "gradients" or config.parallel.engine == "flat":  # FSDP's come with the first backward
                    assert 0 <= found[kind] - planned <= width * padding, (name, rank, kind, found[kind], planned)
