"""What the bench of mixtures of experts runs may run and fits the card; its page says what is there; forced routing
is what it claims."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from paceline.config.check import check, refuse_errors
from paceline.config.load import load_recipe
from paceline.config.model import MoEConfig
from paceline.config.plugins import Registry
from paceline.config.run import RunConfig
from paceline.costs.layers import training_flops_per_token
from paceline.costs.memory import estimate
from paceline.models import router

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "bench"))

import moe  # noqa: E402
import moe_jobs  # noqa: E402
import moe_report  # noqa: E402
import runner  # noqa: E402
from moe_jobs import Job  # noqa: E402

CARD_BYTES = 138.88 * 2**30
"""What the driver of an H200 leaves to programs."""
ROOM = 0.95
"""The estimate leaves out CUDA and its libraries, communication buffers and fragmentation."""
BOTH = pytest.mark.parametrize("one_gpu", [False, True])


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    # plugins put another function there
    monkeypatch.setattr(router, "select", router.select)


def config_of(job: Job) -> RunConfig:
    loaded = load_recipe(job.recipe, list(job.sets))
    refuse_errors(check(loaded.config, loaded.registry, job.processes))
    return loaded.config


@BOTH
@pytest.mark.parametrize("part", moe_jobs.PARTS)
def test_every_job_is_a_recipe_that_may_run_and_fits(part: str, one_gpu: bool) -> None:
    jobs = moe_jobs.jobs_of(part, one_gpu=one_gpu)
    assert jobs and len({job.key for job in jobs}) == len(jobs)
    for job in jobs:
        config = config_of(job)
        assert config.model.num_layers == job.layers, job.key
        assert estimate(config, job.processes).total <= ROOM * CARD_BYTES, job.key
        assert job.work in ("", *moe_report.WORKS) and job.estimate <= 100
        assert job.processes == 1 or not one_gpu
        config_of(moe_jobs.tiny(job))


@BOTH
def test_the_same_work_in_every_way(one_gpu: bool) -> None:
    """Candidates for a row, and the baseline beside it, differ in how alone. DeepSeek's micro-batch is free."""
    works: dict[str, list[RunConfig]] = {}
    for part in ("table", "tune", "baseline"):
        for job in moe_jobs.jobs_of(part, one_gpu=one_gpu):
            works.setdefault(job.work, []).append(config_of(job))
    assert works.keys() <= moe_report.WORKS.keys()
    for work, configs in works.items():
        same = ["seq_len", "global_batch_size", *(["micro_batch_size"] if work != "deepseek" else [])]
        for config in configs:
            assert config.model == configs[0].model
            assert [getattr(config.train, name) for name in same] == [getattr(configs[0].train, name) for name in same]


def test_a_switch_has_the_flops_of_its_dense_twin() -> None:
    jobs = {job.work: config_of(job) for job in moe_jobs.table_jobs(one_gpu=True)}
    dense = training_flops_per_token(jobs["switch_dense"].model, 2048, "causal")
    for experts in moe_jobs.SWITCH_EXPERTS:
        config = jobs[f"switch_{experts}"]
        assert config.model.num_experts == experts and config.model.top_k == 1
        # the router alone is on top
        assert training_flops_per_token(config.model, 2048, "causal") / dense == pytest.approx(1.0, abs=0.01)
        assert config.train.global_batch_size == jobs["switch_dense"].train.global_batch_size


def test_a_call_of_the_table_ends_in_time() -> None:
    for part in ("table", "baseline"):
        assert sum(job.estimate for job in moe_jobs.jobs_of(part)) <= 540
    alone = [part for part in moe_jobs.PARTS if part not in ("tune", "curves")]
    seconds = sum(job.estimate for part in alone for job in moe_jobs.jobs_of(part))
    curves = sum(job.estimate * job.processes for job in moe_jobs.jobs_of("curves")) / 8  # four on each of two GPUs
    assert seconds + curves <= 1200


# ---- forced routing


def plugin(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"plugin_of_test_{name}", ROOT / moe_jobs.ROUTING_PLUGINS[name])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("top_k", [1, 8])
def test_one_expert_takes_a_fifth_of_the_tokens(top_k: int) -> None:
    scores = torch.randn(200, 32).softmax(-1).requires_grad_()
    experts, weights = plugin("busy").select(scores, None, top_k, MoEConfig(normalize_top_k=False))
    load = experts.flatten().bincount(minlength=32)
    assert load[0] == 40 and load.sum() == 200 * top_k
    assert all(len(set(row)) == top_k for row in experts.tolist()), "no expert twice"
    torch.testing.assert_close(weights, scores.gather(1, experts))
    free = torch.ones(200, dtype=torch.bool).index_fill(0, torch.arange(0, 200, 5), False)
    expected = router.select(scores[free, 1:], None, top_k, MoEConfig())[0] + 1
    assert torch.equal(experts[free].sort(-1).values, expected.sort(-1).values), "the others' choices are the router's"
    weights.sum().backward()
    assert scores.grad is not None and scores.grad[0, 0] == 1


@pytest.mark.parametrize("top_k", [1, 8])
def test_even_loads(top_k: int) -> None:
    scores = torch.randn(64, 32).softmax(-1)
    experts, weights = plugin("even").select(scores, None, top_k, MoEConfig(normalize_top_k=False))
    assert torch.equal(experts.flatten().bincount(minlength=32), torch.full((32,), 64 * top_k // 32))
    torch.testing.assert_close(weights, scores.gather(1, experts))


def test_a_plugin_reaches_the_router() -> None:
    job = next(job for job in moe_jobs.imbalance_jobs(one_gpu=True) if job.name == "busy")
    before = router.select
    config_of(job)
    assert router.select is not before and "busy" in router.select.__module__


def test_a_plugin_that_is_loaded_twice_wraps_the_router_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "select", getattr(router.select, "plain", router.select))
    plain = router.select
    for name in ("busy", "busy", "even"):
        plugin(name).register(Registry())
    assert router.select.plain is plain  # type: ignore[attr-defined]


# ---- entries and pages


RECORD: dict[str, Any] = {
    "step_seconds": 1.0,
    "step_seconds_min": 0.9,
    "step_seconds_max": 1.1,
    "steps": 6,
    "tokens_per_second_per_gpu": 1000.0,
    "tflops_per_gpu": 300.0,
    "fraction_of_gemm": 0.45,
    "sustained_gemm_tflops": 660.0,
    "peak_memory_gib": 70.0,
    "loss": 11.9,
}


def entry(kind: str, found: object, **more: Any) -> dict[str, Any]:
    return {"title": kind, "kind": kind, "processes": 1, "work": "", "layers": 6, kind: found, **more}


def test_page_of_what_is_there() -> None:
    profile = {"by_kind_ms": {"routing": 2.0, "head and loss": 30.0}, "exposed_communication_ms": 0.0, "idle_ms": 1.0}
    profile |= {"wall_ms": 33.0, "gaps": {"of_launches_ms": 0.5}}  # type: ignore[dict-item]
    train = {"step_seconds": 1.0, "step_seconds_min": 0.9, "step_seconds_max": 1.1, "peak_memory_gib": 70.0}
    train |= {"loss": 11.0, "load_max_over_mean": [1.2, 1.4], "drop_share": [0.0, 0.0]}  # type: ignore[dict-item]
    theirs = RECORD | {"tokens_per_second_per_gpu": 400.0, "versions": {"transformers": "5.17.0"}}
    losses = [4.0 - step / 10 for step in range(30)]
    entries = {
        "table/qwen3": entry("bench", RECORD, work="qwen3"),
        "tune/qwen3_grouped": entry("bench", RECORD | {"tokens_per_second_per_gpu": 1200.0}, work="qwen3"),
        "baseline/qwen3": entry("baseline", theirs, work="qwen3"),
        "table/qwen3_fp8": entry("bench", RECORD, work="qwen3_fp8"),
        "table/switch_dense": entry("bench", RECORD, work="switch_dense"),
        "table/switch_8": entry("bench", RECORD | {"tokens_per_second_per_gpu": 800.0}, work="switch_8"),
        "imbalance/even": entry("train", train),
        "imbalance/busy": entry("train", train | {"step_seconds": 1.25}, title="one expert takes 20 %"),
        "profile/qwen3": entry("profile", profile),
        "curves/plain": entry("losses", losses),
        "curves/seed1": entry("losses", [loss + 0.2 for loss in losses]),
        "curves/triton": entry("losses", [loss + 0.1 for loss in losses], title="triton"),
        "table/deepseek": {"title": "d", "failed": ["exit code 1", "out of memory"]},
    }
    text = "\n".join(moe_report.page({"entries": entries}, one_gpu=True))
    assert "Paceline (`tune/qwen3_grouped`) | 1,200 |" in text and "**3.00 x** Transformers" in text
    assert "**2.50 x** Transformers" in text, "fp8 beside their bf16"
    assert text.count("| Transformers 5.17.0 | 400 |") == 1
    assert "1.25 x the time of the dense twin" in text
    assert "| one expert takes 20 % | 1.250 (0.900 to 1.100) | 80.0% of even | 1.40 | 0.0% |" in text
    assert "| head and loss | 30.0 |" in text and "| *wall* | 33.0 |" in text
    assert "| **band of 2 seeds** | **0.2000** |" in text and "| triton | 0.1000 | 0.1000 | +0.1000 | 0.50 |" in text
    assert "table: mixtral, deepseek, switch_128" in text and "`table/deepseek`: exit code 1; out of memory" in text
    assert "Nothing measured yet." in "\n".join(moe_report.page({"entries": {}}, one_gpu=False))


def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *arguments: str) -> dict[str, Any]:
    monkeypatch.setattr(runner, "machine", lambda: ({"devices": "test", "versions": {"torch": "0"}}, 0))
    line = ["moe.py", *arguments, "--tiny", "--results", str(tmp_path), "--work", str(tmp_path / "work")]
    monkeypatch.setattr(sys, "argv", line)
    runner.main(moe.bench_of(one_gpu=True), "")
    found: dict[str, Any] = json.loads((tmp_path / "moe_one_gpu.json").read_text())
    return found


def test_an_uneven_load_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`paceline train` with the plugin, on a CPU."""
    busy = run(monkeypatch, tmp_path, "imbalance", "--only", "busy")["entries"]["imbalance/busy"]
    assert "failed" not in busy, busy.get("failed")
    assert busy["train"]["drop_share"] == [0.0, 0.0] and busy["train"]["step_seconds"] > 0
    # a fifth of all tokens is less than the mean of 2 / 8; the metrics say how the other experts are used
    assert all(load > 1.0 for load in busy["train"]["load_max_over_mean"])
    assert "bench/moe.sh --one-gpu" in (tmp_path / "moe_one_gpu.md").read_text()


def test_a_baseline_without_transformers_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hidden" / "transformers").mkdir(parents=True)
    (tmp_path / "hidden" / "transformers" / "__init__.py").write_text("raise ImportError('not here')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "hidden"))
    failed = run(monkeypatch, tmp_path, "baseline", "--only", "mixtral")["entries"]["baseline/mixtral"]["failed"]
    assert any("It is no dependency of Paceline: install it there" in line for line in failed)
    assert any("not here" in line for line in failed)


def test_a_baseline_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    entries = run(monkeypatch, tmp_path, "baseline", "--only", "deepseek")["entries"]
    found = entries["baseline/deepseek"]
    assert "failed" not in found, found.get("failed")
    job = moe_jobs.tiny(next(job for job in moe_jobs.baseline_jobs(one_gpu=True) if job.work == "deepseek"))
    assert found["baseline"]["loss"] == pytest.approx(torch.tensor(512.0).log().item(), abs=0.3)
    assert found["baseline"]["parameters"] > 100_000 and found["layers"] == job.layers


def test_other_work_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe that Transformers has no model of."""
    pytest.importorskip("transformers")
    job = moe_jobs.baseline_jobs(one_gpu=True)[0]

    def command(job: Job, folder: Path) -> list[str]:
        return moe.command_of(
            replace(job, recipe="recipes/moe/switch_base_8.toml", sets=("cluster.device=cpu",)), folder
        )

    bench = replace(moe.bench_of(one_gpu=True), command_of=command)
    monkeypatch.setattr(runner, "machine", lambda: ({}, 0))
    arguments = ["moe.py", "baseline", "--only", job.name, "--tiny", "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*arguments, "--work", str(tmp_path / "work")])
    runner.main(bench, "")
    failed = json.loads((tmp_path / "moe_one_gpu.json").read_text())["entries"]["baseline/qwen3"]["failed"]
    assert any("neither Qwen3-MoE, Mixtral nor DeepSeek-V2" in line for line in failed)


def test_the_guide_shows_what_was_measured_of_a_layer() -> None:
    rows = json.loads((ROOT / "docs/measured/moe_products.json").read_text())["rows"]
    text = (ROOT / "docs/parallelism.md").read_text().replace("*", "").replace("`", "")
    for name in ("plain", "grouped", "triton", "grouped, fp8", "triton, fp8"):
        found = [rows[f"layers/qwen3/{load}/{name}"] for load in ("balanced", "random", "one expert 20 %")]
        rates = " | ".join(f"{row['TFLOP/s']:.0f}" for row in found)
        assert f"| {name} | {rates} | {found[0]['peak GiB beside weights']:.2f} |" in text, name
