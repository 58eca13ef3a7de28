"""The mini-replication runs what it says, at equal FLOPs; its page judges the order as it is."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

from paceline.config.check import check, refuse_errors
from paceline.config.load import differences, load_recipe
from paceline.config.run import RunConfig
from paceline.costs.layers import training_flops_per_token

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "bench"))

import runner  # noqa: E402
import switch  # noqa: E402
from switch import Job  # noqa: E402


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def config_of(job: Job) -> RunConfig:
    loaded = load_recipe(job.recipe, list(job.sets))
    refuse_errors(check(loaded.config, loaded.registry, job.processes))
    return loaded.config


@pytest.mark.parametrize("part", switch.PARTS)
def test_equal_work_and_one_thing_at_a_time(part: str) -> None:
    jobs = switch.jobs_of(part)
    assert len({job.key for job in jobs}) == len(jobs) == len(switch.VARIANTS) * len(switch.SEEDS)
    configs = {job.name: config_of(job) for job in jobs}
    base = configs["experts8_0"]
    flops = {
        name: training_flops_per_token(config.model, config.train.seq_len, "causal") for name, config in configs.items()
    }
    assert max(flops.values()) / min(flops.values()) < 1.01
    own = {
        "dense": {"model.num_experts", "model.top_k"},
        "experts2": {"model.num_experts"},
        "experts4": {"model.num_experts"},
        "experts8": set(),
        "bf16_router": {"model.moe.router_precision"},
        "capacity1": {"model.moe.capacity_factor"},
        "capacity2": {"model.moe.capacity_factor"},
    }
    for job in jobs:
        seed = {"run.seed"} if job.seed else set()
        assert differences(base, configs[job.name]).keys() == own[job.variant] | seed, job.name
        config_of(switch.tiny(job))
    assert base.model.moe.capacity_factor == 1.25 and base.model.moe.router_precision == "fp32"


def test_whole_comparisons_first() -> None:
    names = [job.name for job in switch.jobs_of("small")]
    assert names[:5] == ["dense_0", "experts2_0", "experts4_0", "experts8_0", "dense_1"]


def made_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpus: int) -> list[str]:
    """Data in the place of the demo's, and what the bench starts."""
    monkeypatch.setattr(runner, "machine", lambda: ({"devices": "test", "versions": {"torch": "0"}}, gpus))
    return ["switch.py", "small", "--results", str(tmp_path), "--work", str(tmp_path / "work")]


def test_a_run_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of them on made-up tokens."""
    line = made_up(monkeypatch, tmp_path, 0)
    plain = switch.command_of
    more = ["--set=data.train=synthetic", "--set=data.valid=synthetic"]

    def command(job: Job, folder: Path) -> list[str]:
        return [*plain(job, folder), *more]

    monkeypatch.setattr(sys, "argv", [*line, "--tiny", "--only", "dense_0", "capacity1_0"])
    bench = replace(switch.BENCH, command_of=command)
    runner.main(bench, "")
    entries = json.loads((tmp_path / "switch.json").read_text())["entries"]
    dense, capacity = (entries[f"small/{name}"] for name in ("dense_0", "capacity1_0"))
    assert "failed" not in dense and "failed" not in capacity, (dense, capacity)
    assert dense["run"]["drop_share"] is None and 0 < capacity["run"]["drop_share"] < 1
    for found in (dense["run"], capacity["run"]):
        assert found["valid_loss"] == pytest.approx(math.log(4096), abs=0.5) and len(found["curve"]) == 1
    page = (tmp_path / "switch.md").read_text()
    assert "`small/capacity1_0`" in page and "no figure below means anything" in page


def test_without_a_gpu_it_runs_and_others_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = made_up(monkeypatch, tmp_path, 0)
    started: list[str] = []

    def command(job: Job, folder: Path) -> list[str]:
        started.append(job.name)
        return ["-c", "raise SystemExit(1)"]

    monkeypatch.setattr(sys, "argv", [*line, "--only", "dense_0"])
    runner.main(replace(switch.BENCH, command_of=command), "")
    assert started == ["dense_0"]
    monkeypatch.setattr(sys, "argv", [*line, "--only", "dense_1"])
    runner.main(replace(switch.BENCH, command_of=command, runs_on_cpu=False), "")
    assert started == ["dense_0"], "a bench of speeds leaves its jobs out on a CPU"


def test_a_slow_core_gets_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run on a shared CPU may take longer than a bench of GPUs lets a job take."""
    limits: list[float] = []
    job = switch.jobs_of("small")[0]

    def started(self: object, *arguments: object) -> None:
        limits.append(self.limit)  # type: ignore[attr-defined]
        raise InterruptedError

    monkeypatch.setattr(runner.Running, "poll", started)
    line = made_up(monkeypatch, tmp_path, 0)
    monkeypatch.setattr(sys, "argv", [*line, "--only", job.name])
    with pytest.raises(InterruptedError):
        runner.main(replace(switch.BENCH, command_of=lambda job, folder: ["-c", ""]), "")
    assert limits == [2 * job.estimate + 60] and limits[0] > runner.LONGEST


# ---- the page


def page_writer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_switch_of_test", ROOT / "docs" / "make_switch.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def results(losses: dict[str, list[float]]) -> dict[str, Any]:
    entries = {}
    for variant, each in losses.items():
        for seed, loss in enumerate(each):
            run = {"valid_loss": loss, "unigram_loss": 6.2, "train_loss": loss, "curve": [5.0] * 20 + [None] * 20}
            run |= {"parameters": 1_300_000, "skipped_steps": seed, "drop_share": 0.05, "drop_share_first_tenth": 0.2}
            run |= {"router_entropy": 1.5, "load_max_over_mean": 1.4}
            entries[f"small/{variant}_{seed}"] = {"title": "t", "variant": variant, "seed": seed, "run": run}
    return {"devices": "1 x test", "entries": entries}


def test_the_order_is_told_as_it_is(tmp_path: Path) -> None:
    writer = page_writer()
    losses = {"dense": [4.0, 4.1], "experts2": [3.9, 4.0], "experts4": [3.8, 3.95], "experts8": [3.7, 3.9]}
    text = "\n".join(writer.page(results(losses), tmp_path))
    assert "**holds** for the means, and in 2 of 2 seeds for themselves" in text
    assert "8 experts against 4 experts: -0.0750 in the mean, lower in 2 of 2 seeds" in text
    assert "The seeds of one model lie up to 0.2000 apart" in text and "do not settle it" in text
    far = {"dense": [4.0, 4.01], "experts2": [3.9, 3.91], "experts4": [3.8, 3.81], "experts8": [3.7, 3.71]}
    assert "do not settle it" not in "\n".join(writer.page(results(far), tmp_path))
    losses["experts8"] = [3.82, 3.9]
    text = "\n".join(writer.page(results(losses), tmp_path))
    assert "**holds** for the means, and in 1 of 2 seeds" in text
    losses["experts8"] = [4.2, 3.9]
    text = "\n".join(writer.page(results(losses), tmp_path))
    assert "**does not hold** for the means, and in 1 of 2 seeds" in text
    losses["dense"] = [4.0, 4.1, 9.0]  # a seed that the others have not
    text = "\n".join(writer.page(results(losses), tmp_path))
    assert "| dense | 1.30M | **4.0500** | 4.0000, 4.1000, 9.0000 |" in text
    for picture in tmp_path.glob("*.svg"):
        ElementTree.fromstring(picture.read_text())
    assert len(list(tmp_path.glob("*.svg"))) == 2


def test_what_is_not_there_is_not_judged(tmp_path: Path) -> None:
    writer = page_writer()
    text = "\n".join(writer.page(results({"dense": [4.0], "experts8": [3.9], "bf16_router": [3.95]}), tmp_path))
    assert "The order is judged once all four are there." in text
    assert "bf16 against fp32, seed by seed: +0.0500" in text and "### Capacity" not in text
    assert "From one seed, and more than the seeds of one model lie apart (0.0000): no finding." in text
    pairs = {"experts8": [3.9, 3.91], "bf16_router": [3.95, 3.955], "capacity2": [3.901, 3.912]}
    text = "\n".join(writer.page(results(pairs), tmp_path))
    assert "+0.0475 in the mean. That is more than the seeds of one model lie apart (0.0110)." in text
    assert "2.0 against 1.25: +0.0015 in the mean. That is less than the seeds of one model lie apart" in text
    text = "\n".join(writer.page(results({"experts8": [3.9], "capacity2": [3.8]}), tmp_path))
    assert "| 2.0 | 3.8000 | 3.8000 | -0.1000 | 20.0% | 5.0% |" in text and "router's precision" not in text
    assert "**Not run yet**: dense (3 of 3 seeds), 2 experts (3 of 3 seeds)" in text and "8 experts (2 of 3" in text
    text = "\n".join(writer.page({"entries": {}}, tmp_path))
    assert "## Small" not in text and "**Not run yet**: the size `small`" in text
    assert writer.VARIANTS.keys() == switch.VARIANTS.keys() and len(switch.SEEDS) == writer.SEEDS


def test_the_page_is_that_of_the_results(tmp_path: Path) -> None:
    """docs/switch.md is written by the script, and from the results that lie beside it."""
    source = ROOT / "docs" / "measured" / "switch.json"
    if not source.is_file():
        pytest.skip("no results yet")
    lines = page_writer().page(json.loads(source.read_text()), tmp_path)
    assert (ROOT / "docs" / "switch.md").read_text() == "\n".join(lines) + "\n"
