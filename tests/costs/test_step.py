"""Predictions: against measured runs of Paceline itself, and that they move the right way."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.config.load import load_recipe
from paceline.config.model import ModelConfig
from paceline.config.run import RunConfig
from paceline.costs.hardware import find_hardware
from paceline.costs.profiles import MEGATRON, PACELINE, PROFILES, find_profile
from paceline.costs.step import PARTS, predict
from paceline.costs.workload import Cluster, Workload
from paceline.errors import ConfigError

ROOT = Path(__file__).parents[2]
MODEL = ModelConfig(
    num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, ffn_size=14336, vocab_size=128256, max_seq_len=8192
)
WORK = Workload(model=MODEL, seq_len=8192, micro_batch_size=1, global_batch_size=128)


def cluster(name: str, gpus: int) -> Cluster:
    gpu = find_hardware(name)
    assert gpu is not None
    return Cluster(gpu=gpu, gpus=gpus)


def measured(name: str) -> dict[str, float]:
    folder = ROOT / "docs" / "measured"
    if name == "llama3_1b":
        return dict(json.loads((folder / "bench_llama3_1b.jsonl").read_text().splitlines()[-1]))
    return dict(json.loads((folder / "foundation.json").read_text())["bench_8b"])


@pytest.mark.parametrize(("recipe", "gpus"), [("llama3_8b", 2), ("llama3_1b", 1)])
def test_paceline_on_h200s_as_measured(recipe: str, gpus: int) -> None:
    """Within 5 % of the step and 4 % of the memory."""
    # as the recipes were when this was measured
    plain = ["parallel.fused_weight_gradients=false", "optim.fused_update=false"]
    config = load_recipe(ROOT / "recipes" / f"{recipe}.toml", plain)
    found = predict(getattr(config, "config", config), cluster("H200 SXM", gpus))
    run = measured(recipe)
    assert found.seconds == pytest.approx(run["step_seconds"], rel=0.05)
    assert found.memory_gib == pytest.approx(run["peak_memory_gib"], rel=0.04)
    assert found.fits


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
@pytest.mark.parametrize("fields", [{}, {"tp": 4}, {"pp": 4}, {"pp": 4, "stages_per_rank": 2}, {"cp": 2}, {"zero": 3}])
def test_parts_sum_to_the_step(profile: object, fields: dict[str, int]) -> None:
    found = predict(replace(WORK, **fields), cluster("H100 SXM", 16), profile)  # type: ignore[arg-type]
    assert set(found.parts) == set(PARTS) and min(found.parts.values()) >= 0
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
    assert found.tokens_per_second_per_gpu == pytest.approx(128 * 8192 / 16 / found.seconds)
    assert found.mfu is not None and 0 < found.mfu < 0.8
    assert len(found.stages) == fields.get("pp", 1)
    for stage in found.stages:
        assert max(stage.moments.values()) == pytest.approx(stage.total)


def test_what_a_faster_machine_and_less_work_do() -> None:
    base = predict(WORK, cluster("H100 SXM", 8))
    assert (
        predict(WORK, cluster("B200 SXM", 8)).seconds < base.seconds < predict(WORK, cluster("A100 SXM 80", 8)).seconds
    )
    assert predict(replace(WORK, precision="fp8"), cluster("H100 SXM", 8)).seconds < base.seconds
    assert predict(replace(WORK, recompute="full"), cluster("H100 SXM", 8)).seconds > base.seconds
    assert predict(replace(WORK, recompute="full"), cluster("H100 SXM", 8)).memory_bytes < base.memory_bytes


def test_tensor_parallelism_across_nodes_is_slow() -> None:
    inside = predict(replace(WORK, tp=8), cluster("H100 SXM", 32), MEGATRON)
    across = predict(replace(WORK, tp=16), cluster("H100 SXM", 32), MEGATRON)
    assert across.parts["tp_communication"] > 1.5 * inside.parts["tp_communication"]


def test_interleaving_shrinks_the_bubble() -> None:
    plain = predict(replace(WORK, pp=4), cluster("H100 SXM", 8), MEGATRON)
    cut = predict(replace(WORK, pp=4, stages_per_rank=4), cluster("H100 SXM", 8), MEGATRON)
    assert cut.bubble < 0.4 * plain.bubble


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tp": 3}, "does not divide"),
        ({"pp": 64}, "cannot be cut"),
        ({"micro_batch_size": 48}, "not a multiple"),
        ({"ep": 5}, "ep 5"),
    ],
)
def test_what_nobody_can_run_is_refused_with_the_reason(fields: dict[str, int], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        predict(replace(WORK, **fields), cluster("H100 SXM", 64))  # type: ignore[arg-type]


def test_a_recipe_is_a_workload() -> None:
    config = RunConfig()
    assert predict(config, cluster("H100 SXM", 1)) == predict(Workload.of(config), cluster("H100 SXM", 1), PACELINE)


def test_unknown_profiles_are_refused_by_name() -> None:
    assert find_profile("nanotron").title == "nanotron"
    with pytest.raises(ConfigError, match="no profile 'megatrn'"):
        find_profile("megatrn")


def test_attention_ends_with_a_document() -> None:
    """Rows of 8k with documents of 2k: a quarter of the keys, each at a short sequence's rate; whole rows otherwise."""
    whole, shared, longer = (
        predict(replace(WORK, document_tokens=tokens), cluster("H200 SXM", 16)) for tokens in (0, 2048, 9000)
    )
    assert longer == whole
    rates = (1 + 900 / 2048) / (1 + 900 / 8192)
    assert shared.parts["attention"] == pytest.approx(whole.parts["attention"] * rates / 4)
    assert shared.tflops_per_gpu * shared.seconds < whole.tflops_per_gpu * whole.seconds
