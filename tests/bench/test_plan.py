"""What the plan bench predicts and measures passes the rules of recipes, and a prediction stands once it is made."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.config.check import check, refuse_errors
from paceline.config.load import load_recipe
from paceline.costs.hardware import find_hardware

BENCH = Path(__file__).parents[2] / "bench"
sys.path.append(str(BENCH))

import plan  # noqa: E402
import plan_jobs  # noqa: E402
import plan_predict  # noqa: E402
import plan_results  # noqa: E402
from results import DamagedFileError  # noqa: E402

GPU = find_hardware("H200 SXM")


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(BENCH.parent)


def predicted(folder: Path) -> plan_results.PlanResults:
    assert GPU is not None
    results = plan_results.PlanResults(folder)
    plan_predict.predict_all(plan_jobs.all_jobs(), results, GPU, again=False)
    results.write()
    return results


def bench_entry(seconds: float, gib: float) -> dict[str, Any]:
    figures = dict.fromkeys(plan_results.FIGURES, seconds) | {"peak_memory_gib": gib}
    return {"title": "x", "seconds": 1.0, "bench": figures}


@pytest.mark.parametrize("part", plan_jobs.PARTS)
def test_every_job_is_a_recipe_that_may_run(part: str) -> None:
    jobs = plan_jobs.jobs_of(part)
    assert len({job.key for job in jobs}) == len(jobs)
    for job in jobs:
        for each in (job, plan_jobs.tiny(job)):
            loaded = load_recipe(str(BENCH.parent / each.recipe), list(each.sets))
            refuse_errors(check(loaded.config, loaded.registry, each.processes))


def test_enough_and_unlike_each_other() -> None:
    one, two = plan_jobs.one_gpu_jobs(), plan_jobs.two_gpu_jobs()
    assert len(one) >= 12 and len(two) >= 8
    configs = [load_recipe(str(BENCH.parent / job.recipe), list(job.sets)).config for job in (*one, *two)]
    assert len({(c.train.seq_len, c.train.micro_batch_size) for c in configs}) >= 8
    assert {c.parallel.recompute for c in configs} == {"none", "selective", "full"}
    assert sum(c.model.is_moe for c in configs) >= 4


def test_all_but_one_are_said_to_fit(tmp_path: Path) -> None:
    found = predicted(tmp_path).predictions
    assert [key for key, value in found.items() if not value["fits"]] == ["one/8b_26l_too_large"]
    assert found["one/8b_23l_tight"]["tight"]
    assert all(0.2 < value["step_seconds"] < 4 for value in found.values())


def test_a_prediction_stands(tmp_path: Path) -> None:
    """Also when the planner would say something else by now; of a changed recipe, once it is measured."""
    assert GPU is not None
    results, jobs = predicted(tmp_path), plan_jobs.all_jobs()
    key = jobs[0].key
    results.predictions[key]["step_seconds"] = 99.0
    assert plan_predict.predict_all(jobs, results, GPU, again=False) == []
    assert results.predictions[key]["step_seconds"] == 99.0
    results.predictions[key]["sets"] = ["train.seq_len=1"]
    results.put(jobs[0], bench_entry(1.0, 40.0))
    assert plan_predict.predict_all(jobs, results, GPU, again=False) == []  # measured: stays as it was
    del results.entries[key]
    assert plan_predict.predict_all(jobs, results, GPU, again=False) == [key]


def test_a_prediction_after_measuring_shows_nothing(tmp_path: Path) -> None:
    assert GPU is not None
    results, jobs = predicted(tmp_path), plan_jobs.all_jobs()
    results.put(jobs[0], bench_entry(1.0, 40.0))
    assert [pair.key for pair in plan_results.pairs(results.data)] == [jobs[0].key]
    plan_predict.predict_all(jobs[:1], results, GPU, again=True)
    assert list(plan_results.pairs(results.data)) == []


def test_the_page_says_errors_and_what_ran_out(tmp_path: Path) -> None:
    results, jobs = predicted(tmp_path), {job.name: job for job in plan_jobs.all_jobs()}
    first, tight, too_large = (jobs[name] for name in ("1b_2k", "8b_23l_tight", "8b_26l_too_large"))
    said = results.predictions[first.key]
    results.put(first, bench_entry(said["step_seconds"] / 1.1, said["memory_gib"] / 0.98))
    results.put(too_large, {"title": "x", "seconds": 1.0, "ran_out": {"said": "CUDA out of memory"}})
    text = "\n".join(results.page())
    assert "mean absolute error 10.0 % over 1 recipes" in text and "memory: mean 2.0 %" in text
    assert "+10.0 %" in text and "-2.0 %" in text
    assert "said to fit, and ran out: none" in text and "said not to fit: ran out 1, ran none" in text
    results.put(tight, {"title": "x", "seconds": 1.0, "ran_out": {"said": "CUDA out of memory"}})
    assert "said to fit, and ran out: one/8b_23l_tight" in "\n".join(results.page())
    assert json.loads((tmp_path / "plan.json").read_text())["predictions"]


def test_running_out_of_memory_is_a_finding_and_other_ends_are_not(tmp_path: Path) -> None:
    job = plan_jobs.one_gpu_jobs()[0]
    (tmp_path / "log").write_text("...\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n")
    assert "CUDA out of memory" in plan.found_in(job, tmp_path)[0]["ran_out"]["said"]
    (tmp_path / "log").write_text("ConfigError: no\n")
    with pytest.raises(OSError):
        plan.found_in(job, tmp_path)


def test_nothing_is_measured_that_was_not_predicted(tmp_path: Path) -> None:
    with pytest.raises(DamagedFileError, match=r"(?s)no prediction of one/1b_2k.*plan_predict"):
        plan.PredictedResults(tmp_path)


def test_predicted_and_measured_on_a_cpu(tmp_path: Path) -> None:
    """The script, from predictions to the page, with one tiny entry."""
    at = ("--tiny", "--results", str(tmp_path / "results"))
    run = ("bench/plan.py", "one", "--only", "1b_2k", "--work", str(tmp_path / "work"), *at)
    for command in (("bench/plan_predict.py", *at), run):
        found = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300)
        assert found.returncode == 0, found.stdout + found.stderr
    data = json.loads((tmp_path / "results" / "plan.json").read_text())
    assert data["tiny"] and data["entries"]["one/1b_2k"]["bench"]["step_seconds"] > 0
    assert "one/1b_2k" in (tmp_path / "results" / "plan.md").read_text()
    refused = subprocess.run([sys.executable, "bench/plan_predict.py", "--tiny"], capture_output=True, text=True)
    assert refused.returncode == 2 and "add --results" in refused.stderr
