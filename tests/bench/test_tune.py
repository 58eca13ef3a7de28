"""What the bench of `tune` measures passes the rules of recipes; a sweep's table is searched as a machine would be."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.config.check import check, refuse_errors
from paceline.config.load import load_recipe
from paceline.costs.step import predict
from paceline.costs.workload import Workload

BENCH = Path(__file__).parents[2] / "bench"
sys.path.append(str(BENCH))

import tune_jobs  # noqa: E402
import tune_replay  # noqa: E402
import tune_results  # noqa: E402

H200 = "NVIDIA H200"


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(BENCH.parent)


@pytest.mark.parametrize("part", tune_jobs.PARTS)
def test_every_job_is_a_recipe_that_may_run(part: str) -> None:
    for jobs in (tune_jobs.jobs_of(part), tune_jobs.on_one_gpu(part)):
        assert len({job.key for job in jobs}) == len(jobs)
        for job in jobs:
            for each in (job, tune_jobs.tiny(job)):
                loaded = load_recipe(each.recipe, list(each.sets))
                refuse_errors(check(loaded.config, loaded.registry, each.processes))


def test_hand_made_recipes_do_the_work_of_the_tunings() -> None:
    for jobs_of in (tune_jobs.jobs_of, tune_jobs.on_one_gpu):
        batches = {
            (job.group, load_recipe(job.recipe, list(job.sets)).config.train.global_batch_size)
            for part in ("ladder", "hand")
            for job in jobs_of(part)
            if job.group != "any"
        }
        assert len(batches) == 2, batches
    narrow = [
        job.name
        for job in tune_jobs.hand_made()
        if "precision" not in job.allow
        if load_recipe(job.recipe, list(job.sets)).config.parallel.reduce_dtype == "bf16"
    ]
    assert not narrow, "what is compared without precision has sums in fp32"


def test_the_sweep_has_sixty_points_and_the_base_is_one_of_them() -> None:
    jobs = tune_jobs.sweep()
    space = tune_replay.space_of(H200)
    assert space is not None and len(jobs) == 60 == len(list(space.named()))
    keys = {point.key for job in jobs if (point := space.point(dict(job.changes))) is not None}
    assert len(keys) == 60 and () in keys


def table(*, out: set[str] = frozenset()) -> dict[str, dict[str, Any]]:  # type: ignore[assignment]
    space = tune_replay.space_of(H200)
    assert space is not None
    entries: dict[str, dict[str, Any]] = {}
    for job in tune_jobs.sweep():
        config = load_recipe(job.recipe, list(job.sets)).config
        found = predict(Workload.of(config), space.machine.cluster)
        entry: dict[str, Any] = {"title": job.title, "seconds": 30.0}
        if job.name in out:
            entry["ran_out"] = {"said": "CUDA out of memory"}
        else:
            seconds = 1.1 * found.seconds
            entry["bench"] = {
                "step_seconds": seconds, "seconds_by_step": [seconds] * 5, "peak_memory_gib": found.memory_gib,
                "logged": [], "devices": f"1 x {H200}", "tokens_per_second_per_gpu": 1.0,
            }  # fmt: skip
        entries[job.key] = entry
    return entries


def test_the_search_is_run_on_the_table() -> None:
    entries = table()
    found = tune_replay.replay(tune_jobs.sweep(), entries, H200)
    assert found is not None and found.points == 60 and found.ran_out == 0
    times = {key: entry["bench"]["step_seconds"] for key, entry in entries.items()}
    assert found.best_seconds == min(times.values()) and found.base_seconds == times["sweep/mb1_full"]
    assert found.needed is not None and found.needed <= 8
    assert (
        found.path[found.needed - 1]
        <= 1.02 * found.best_seconds
        < (found.path[found.needed - 2] if found.needed > 1 else 9e9)
    )
    assert found.tried[0] == "mb1_full" and len(set(found.tried)) == len(found.tried)
    again = tune_replay.replay(tune_jobs.sweep(), table(out={found.best}), H200)
    assert again is not None and again.ran_out == 1 and again.best != found.best


def test_an_unfinished_sweep_has_no_answer() -> None:
    entries = table()
    entries.popitem()
    assert tune_replay.replay(tune_jobs.sweep(), entries, H200) is None
    entries = table()
    entries["sweep/mb1_full"] = {"title": "x", "failed": ["exit code 1"]}
    assert tune_replay.replay(tune_jobs.sweep(), entries, H200) is None
    assert tune_replay.replay(tune_jobs.sweep(), table(), "NVIDIA Unknown") is None


def test_the_page(tmp_path: Path) -> None:
    results = tune_results.TuneResults(tmp_path)
    assert "not measured yet" in "\n".join(results.page())
    results.entries.update(table())
    best = {"tokens_per_second_per_gpu": 7280.0}
    results.entries["ladder/naive"] = {
        "title": "x",
        "tune": {
            "base": {"tokens_per_second_per_gpu": 2500.0}, "best": best, "gain": 2.912, "noise": 0.004,
            "repeated": True, "trial_seconds": 600.0, "ladder": [
                {"trial": 1, "expected": 2.0, "obtained": 2.912,
                 "changes": [{"key": "parallel.compile", "after": True, "neutrality": "rounding"}]}],
            "trials": [{"number": 0, "outcome": "measured"}, {"number": 1, "outcome": "measured"},
                       {"number": 2, "outcome": "memory", "reason": "CUDA out of memory"}],
        },
    }  # fmt: skip
    results.entries["hand/naive_selective"] = {"title": "x", "bench": {"tokens_per_second_per_gpu": 7400.0}}
    results.entries["hand/naive_fp8"] = {"title": "x", "bench": {"tokens_per_second_per_gpu": 9400.0}}
    text = "\n".join(results.page())
    assert "| 2,500 | 7,280 | 2.91x | 2.80x | 2.7x | 0.40% | 3 | 10.0 | 98.4% (aim 97%) |" in text
    assert "trial 2: memory: CUDA out of memory" in text and "`parallel.compile` = True (rounding)" in text
    assert "60 of 60 points" in text and "Within 2% of the best: **trial" in text
    results.write()
    assert tune_results.TuneResults(tmp_path).entries == results.entries, "what is written can be read again"


def test_journals_travel_with_the_results(tmp_path: Path) -> None:
    results, job, work = tune_results.TuneResults(tmp_path), tune_jobs.tunings()[0], tmp_path / "work"
    results.restore(job, work)
    assert not work.exists()
    work.mkdir()
    (work / "tune.json").write_text("{}")
    (work / "trials.jsonl").write_text("1\n")
    results.keep(job, work)
    other = tmp_path / "other machine"
    results.restore(job, other)
    assert (other / "trials.jsonl").read_text() == "1\n"
    (other / "trials.jsonl").write_text("1\n2\n")
    results.restore(job, other)
    assert (other / "trials.jsonl").read_text() == "1\n2\n", "what is newer stays"


@pytest.mark.slow
def test_it_runs(tmp_path: Path) -> None:
    command = [
        sys.executable, str(BENCH / "tune.py"), "ladder", "sweep", "--tiny", "--results", str(tmp_path / "r"),
        "--work", str(tmp_path / "w"), "--only", "naive", "mb1_full",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads((tmp_path / "r" / "tune.json").read_text())
    assert set(data["entries"]) == {"ladder/naive", "sweep/mb1_full"}
    assert len(data["entries"]["ladder/naive"]["tune"]["trials"]) == 2
    assert "bench" in data["entries"]["sweep/mb1_full"]
    again = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert again.returncode == 0 and "trial" not in again.stderr, "what is done is skipped"
