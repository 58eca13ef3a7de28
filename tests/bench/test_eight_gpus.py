"""What the bench of eight GPUs runs may run and fits; predictions stand; its targets are judged from entries alone."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.config.check import check, refuse_errors
from paceline.config.load import load_recipe
from paceline.config.run import RunConfig
from paceline.costs.hardware import find_hardware

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "bench"))

import eight_gpus  # noqa: E402
import eight_gpus_found  # noqa: E402
import eight_gpus_jobs  # noqa: E402
import eight_gpus_picture  # noqa: E402
import eight_gpus_predict  # noqa: E402
import eight_gpus_targets  # noqa: E402
import runner  # noqa: E402
from eight_gpus_jobs import COUNTS, PARTS, Job, all_jobs, jobs_of  # noqa: E402
from eight_gpus_results import EightResults  # noqa: E402
from results import DamagedFileError, OtherMachineError  # noqa: E402

GPU = find_hardware("H200 SXM")
EACH = pytest.mark.parametrize("gpus", COUNTS)


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def config_of(job: Job) -> RunConfig:
    loaded = load_recipe(job.recipe, list(job.sets))
    refuse_errors(check(loaded.config, loaded.registry, job.processes))
    return loaded.config


def predicted(folder: Path, gpus: int = 8) -> EightResults:
    assert GPU is not None
    results = EightResults(folder, gpus=gpus)
    jobs = [job for job in all_jobs(gpus) if job.is_predicted]
    eight_gpus_predict.predict_all(jobs, results, GPU, again=False, commit="abc")
    results.write()
    return results


def bench_entry(tokens: float, seconds: float = 1.0, gib: float = 40.0) -> dict[str, Any]:
    figures = dict.fromkeys(eight_gpus_found.FIGURES, seconds)
    figures |= {"tokens_per_second_per_gpu": tokens, "peak_memory_gib": gib}
    return {"title": "x", "kind": "bench", "processes": 8, "seconds": 1.0, "bench": figures}


def run_entry(tokens: float, seconds: float = 1.0, gib: float = 40.0) -> dict[str, Any]:
    parts = [
        {"name": "forward", "seconds": 0.4, "expected_seconds": 0.3, "measured": True},
        {"name": "GEMM shapes", "seconds": 0.6, "expected_seconds": None, "measured": False},
        {"name": "not attributed", "seconds": -0.01, "expected_seconds": None, "measured": True},
    ]
    run = bench_entry(tokens, seconds, gib)["bench"] | {
        "explained_step_seconds": 0.99, "waterfall": parts, "findings": [], "communication": [{"exposed": 0.12}],
    }  # fmt: skip
    del run["fraction_of_gemm"], run["sustained_gemm_tflops"]
    return {"title": "x", "kind": "run", "processes": 8, "seconds": 1.0, "run": run}


# ---- jobs


@EACH
def test_every_job_may_run_is_said_to_fit_and_is_short(gpus: int, tmp_path: Path) -> None:
    assert PARTS[:2] == ("ceilings", "thirteen"), "the most valuable first"
    keys = [job.key for job in all_jobs(gpus)]
    assert len(set(keys)) == len(keys)
    for part in PARTS:
        jobs = jobs_of(part, gpus=gpus)
        assert jobs and sum(job.estimate for job in jobs) <= eight_gpus_jobs.LONGEST_CALL, part
        for job in jobs:
            config_of(job)
            config_of(eight_gpus_jobs.tiny(job))
            assert job.processes <= gpus
    found = predicted(tmp_path, gpus).predictions
    assert [key for key, each in found.items() if not each["fits"]] == []
    for job in all_jobs(gpus):
        if job.is_predicted:
            steps = job.warm_up + job.steps + (job.kind == "run")
            # a start, compiling, a matrix product alone, a trace that is written
            assert steps * found[job.key]["step_seconds"] + 30 <= job.estimate, job.key


@EACH
def test_layouts_and_the_first_choice_do_the_same_work(gpus: int) -> None:
    same = [job for job in all_jobs(gpus) if job.work]
    assert {"thirteen/planned", *(job.key for job in jobs_of("layouts", gpus=gpus))} <= {job.key for job in same}
    for job in same:
        config = config_of(job)
        assert config.model == config_of(same[0]).model and config.train.precision == "bf16"
        assert config.train.global_batch_size == eight_gpus_jobs.SEQUENCES * gpus and config.train.seq_len == 2048


def test_the_layouts_that_were_asked_for() -> None:
    layouts = {job.name: config_of(job).parallel for job in jobs_of("layouts", gpus=8)}
    degrees = {name: (each.tp, each.pp, each.cp, each.dp_degree(8), each.zero) for name, each in layouts.items()}
    assert degrees == {
        "tp8": (8, 1, 1, 1, 1),
        "tp4_dp2": (4, 1, 1, 2, 1),
        "tp2_pp2_dp2": (2, 2, 1, 2, 1),
        "pp4_dp2": (1, 4, 1, 2, 1),
        "zero1_dp8": (1, 1, 1, 8, 1),
        "fsdp_dp8": (1, 1, 1, 8, 3),
        "cp2_dp4": (1, 1, 2, 4, 1),
    }
    assert {config_of(job).parallel.ep for job in jobs_of("experts", gpus=8)} == {8, 1}
    assert config_of(jobs_of("thirteen", gpus=8)[0]).train.attention_kernel == "reference"


def test_multicast_stays_off() -> None:
    assert eight_gpus.NO_MULTICAST["NCCL_NVLS_ENABLE"] == "0"
    text = (ROOT / "bench/eight_gpus.sh").read_text()
    assert all(f"{name}={value}" in text for name, value in eight_gpus.NO_MULTICAST.items())


# ---- predictions


def test_a_prediction_stands_and_a_changed_recipe_is_predicted_anew(tmp_path: Path) -> None:
    assert GPU is not None
    results, jobs = predicted(tmp_path), [job for job in all_jobs(8) if job.is_predicted]
    job = next(job for job in jobs if job.key == "layouts/tp8")
    results.predictions[job.key]["step_seconds"] = 99.0
    again = EightResults(tmp_path, gpus=8)
    again.predictions[job.key]["step_seconds"] = 99.0
    assert eight_gpus_predict.predict_all(jobs, again, GPU, again=False, commit="later") == []
    assert again.predictions[job.key]["commit"] == "abc"
    changed = [replace(each, sets=(*each.sets, "train.micro_batch_size=2")) if each == job else each for each in jobs]
    again.predictions["layouts/gone"] = again.predictions[job.key]
    assert eight_gpus_predict.predict_all(changed, again, GPU, again=False, commit="later") == [job.key]
    assert "layouts/gone" not in again.predictions
    again.put(job, run_entry(1000.0))
    assert eight_gpus_predict.predict_all(jobs, again, GPU, again=False, commit="later") == [], "measured: it stays"
    eight_gpus_predict.predict_all(jobs, again, GPU, again=True, commit="later")
    assert list(eight_gpus_targets.pairs(again.data)) == [], "one that was made after it shows nothing"


def test_nothing_is_measured_that_was_not_predicted_nor_on_fewer_gpus(tmp_path: Path) -> None:
    on = {"tiny": False, "devices": "8 x NVIDIA H200"}
    with pytest.raises(DamagedFileError, match=r"(?s)no prediction of thirteen/naive.*eight_gpus_predict.py --gpus 8"):
        EightResults(tmp_path, gpus=8).measure_on(on)
    results = predicted(tmp_path)
    with pytest.raises(OtherMachineError, match=r"(?s)--gpus 8: this is 2 x NVIDIA H200.*--gpus 4 or 2"):
        results.measure_on(on | {"devices": "2 x NVIDIA H200"})
    results.measure_on(on)
    results.put(jobs_of("thirteen", gpus=8)[0], bench_entry(1.0))
    with pytest.raises(OtherMachineError, match="8 x NVIDIA B200"):
        results.measure_on(on | {"devices": "8 x NVIDIA B200"})


def test_more_gpus_than_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of two GPUs go on on any machine that has them."""
    predicted(tmp_path, 2)
    monkeypatch.setattr(runner, "machine", lambda: ({"devices": "8 x NVIDIA H200", "versions": {"torch": "0"}}, 8))
    monkeypatch.setattr(sys, "argv", ["eight_gpus.py", "thirteen", "--minutes", "0", "--results", str(tmp_path)])
    found: list[dict[str, Any]] = []
    monkeypatch.setattr(EightResults, "measure_on", lambda self, machine, mixed=False: found.append(machine))
    runner.main(eight_gpus.bench_of(2), "")
    assert found[0]["devices"] == "2 x NVIDIA H200"
    assert eight_gpus.gpus_asked_for(["thirteen", "--gpus", "4", "--tiny"]) == (4, ["thirteen", "--tiny"])


# ---- targets and the page


def test_targets_are_judged_from_entries(tmp_path: Path) -> None:
    results = predicted(tmp_path)
    assert {one.met for one in eight_gpus_targets.verdicts(results.data)} == {None}
    assert "Nothing is measured yet" in "\n".join(results.page())
    jobs = {job.key: job for job in all_jobs(8)}

    def put(key: str, tokens: float, *, off: float = 1.0, memory_off: float = 1.0) -> None:
        said = results.predictions[key]
        make = run_entry if jobs[key].kind == "run" else bench_entry
        results.put(jobs[key], make(tokens, said["step_seconds"] / off, said["memory_gib"] / memory_off))

    put("thirteen/naive", 2000.0)
    put("thirteen/planned", 5900.0)
    put("thirteen/fp8", 7000.0)
    for name in ("tp8", "tp4_dp2", "tp2_pp2_dp2", "pp4_dp2", "zero1_dp8", "fsdp_dp8"):
        put(f"layouts/{name}", 6000.0, off=1.05)
    put("scaling/8b_bf16_2", 10_000.0)
    put("scaling/8b_bf16_8", 9_650.0)
    found = {one.what: one for one in eight_gpus_targets.verdicts(results.data)}
    bf16, best, scaling, layouts, first, memory = found.values()
    assert bf16.met is True and bf16.found.startswith("3.00 x: 6,000 (`layouts/tp8`)")
    assert best.met is True and best.found.startswith("3.50 x: 7,000 (`thirteen/fp8`)")
    assert scaling.met is False and scaling.found == "96.5 %: 9,650 / 10,000"
    assert layouts.met is None and layouts.found.startswith("5.0 % over 6 of 7 layouts"), "a part decides nothing"
    assert first.met is True and first.found == "1.7 % behind `layouts/tp8`"
    assert memory.met is True
    put("layouts/cp2_dp4", 6300.0, off=1.4, memory_off=0.95)
    _, _, _, layouts, first, memory = eight_gpus_targets.verdicts(results.data)
    assert layouts.met is False and layouts.found.startswith("10.0 % over 7 of 7 layouts, worst +40.0 %")
    assert first.met is False and first.found == "6.3 % behind `layouts/cp2_dp4`"
    assert memory.met is False and memory.found.startswith("worst -5.0 % (`layouts/cp2_dp4`)")
    text = "\n".join(results.page())
    assert "| **missed** |" in text and "0.120" in text and "**Not measured yet:** ceilings/doctor" in text
    assert "| `scaling/8b_bf16_8` | 8 | 9,650 |" in text and "96.5 %" in text
    drawn = {path.name: path.read_text() for path in tmp_path.glob("*.svg")}
    assert drawn.keys() == {"eight_gpus_ladder.svg", "eight_gpus_fastest.svg", "eight_gpus_slowest.svg"}
    for name, svg in drawn.items():
        xml.etree.ElementTree.fromstring(svg)
        assert f"]({name})" in text
    assert "layouts/cp2_dp4" in drawn["eight_gpus_fastest.svg"] and "plan 300.0" in drawn["eight_gpus_fastest.svg"]


def test_running_out_where_it_was_said_to_fit_misses_targets(tmp_path: Path) -> None:
    results, job = predicted(tmp_path), next(job for job in all_jobs(8) if job.key == "thirteen/planned")
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "log").write_text("...\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n")
    results.put(job, {"title": "x", "seconds": 1.0, **eight_gpus_found.found_by(job, folder)})
    found = {one.what: one for one in eight_gpus_targets.verdicts(results.data)}
    assert [one.met for one in found.values()] == [None, None, None, None, False, False]
    assert "said to fit, and ran out: thirteen/planned" in "\n".join(results.page())
    (folder / "log").write_text("ConfigError: no\n")
    with pytest.raises(OSError):
        eight_gpus_found.found_by(job, folder)


def test_the_links_of_a_host_become_a_picture(tmp_path: Path) -> None:
    from paceline.doctor.topology.matrix import parse_matrices
    from paceline.doctor.topology.picture import matrix_picture

    text = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV18\t0-1\nGPU1\tNV18\t X \t0-1\n"
    svg = eight_gpus_found.links_picture(f"<html><svg></svg>{matrix_picture(parse_matrices(text, 'topo')[0])}</html>")
    entry = {"title": "x", "doctor": {"links_svg": svg, "ranks": [], "pairs": {}, "collectives": [], "findings": []}}
    drawn = eight_gpus_picture.pictures({"gpus": 8, "entries": {"ceilings/doctor": entry}})
    assert "NV18" in drawn["links"]
    xml.etree.ElementTree.fromstring(drawn["links"])
    assert eight_gpus_found.links_picture("<html></html>") == ""


# ---- on CPUs


@pytest.mark.slow
def test_measured_on_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Doctor and an explained run with two ranks; and the record of them as a dry run."""
    work, results = tmp_path / "work", tmp_path / "tiny"
    common = ["--tiny", "--results", str(results)]
    monkeypatch.setattr(sys, "argv", ["eight_gpus_predict.py", "--gpus", "2", *common])
    eight_gpus_predict.main()
    line = ["eight_gpus.py", "ceilings", "layouts", *common, "--work", str(work), "--only", "doctor", "tp2"]
    monkeypatch.setattr(runner, "machine", lambda: ({"devices": "2 x cpu", "versions": {"torch": "0"}}, 0))
    monkeypatch.setattr(sys, "argv", line)
    runner.main(eight_gpus.bench_of(2), "")
    entries = json.loads((results / "eight_gpus_on_2.json").read_text())["entries"]
    assert {key: entry.get("failed") for key, entry in entries.items()} == dict.fromkeys(entries)
    assert len(entries["ceilings/doctor"]["doctor"]["ranks"]) == 2 and entries["ceilings/doctor"]["doctor"]["pairs"]
    assert entries["layouts/tp2"]["run"]["waterfall"] and entries["layouts/tp2"]["run"]["steps"] == 5
    own = ["--results", str(tmp_path / "own"), "--dry-run", str(results)]
    monkeypatch.setattr(sys, "argv", ["eight_gpus_predict.py", "--gpus", "2", *own])
    eight_gpus_predict.main()
    page = (tmp_path / "own" / "eight_gpus_on_2.md").read_text()
    assert "Nothing is measured yet" in page and "2 of 2 ended well" in page
