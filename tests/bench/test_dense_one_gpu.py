"""`bench/dense.py --one-gpu`: the same work with fewer layers, on one card, in files and rows that say so."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.config.check import check, refuse_errors
from paceline.config.load import differences, load_recipe
from paceline.config.run import RunConfig
from paceline.costs.layers import count_parameters
from paceline.costs.memory import estimate

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "bench"))

import dense  # noqa: E402
import dense_jobs  # noqa: E402
import dense_ladder  # noqa: E402
import dense_one_gpu  # noqa: E402
import dense_results  # noqa: E402
import results  # noqa: E402
import runner  # noqa: E402
from dense_jobs import Job  # noqa: E402

CARD_BYTES, DISK_BYTES = 141e9, 64 * 2**30
CALL_SECONDS = 9 * 60


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def config_of(job: Job) -> RunConfig:
    loaded = load_recipe(job.recipe, list(job.sets))
    refuse_errors(check(loaded.config, loaded.registry, job.processes))
    return loaded.config


def pairs() -> list[tuple[Job, Job]]:
    """Every job of two processes beside the one that stands for it."""
    found = []
    for part in dense_jobs.PARTS:
        cut = {job.key: job for job in dense_one_gpu.jobs_of(part)}
        found += [(job, cut[job.key]) for job in dense_jobs.jobs_of(part) if job.processes > 1 and job.key in cut]
    return found


@pytest.mark.parametrize("part", dense_jobs.PARTS)
def test_every_job_may_run_in_one_process_and_fits_the_card(part: str) -> None:
    for job in dense_one_gpu.jobs_of(part):
        assert job.processes == 1 and job.estimate < 500
        assert job.kind == "curve" or job.estimate < 100, job.key
        assert job.kind != "bench" or job.steps >= 10, "fewer are no result"
        assert estimate(config_of(job), 1).total <= 0.95 * CARD_BYTES, job.key
        config_of(dense_jobs.tiny(job))


def test_only_the_depth_and_the_batch_of_all_gpus_are_cut() -> None:
    assert len(pairs()) > 20
    for whole, cut in pairs():
        before, after = config_of(whole), config_of(cut)
        assert differences(before, after).keys() == {"model.num_layers", "train.global_batch_size"}, cut.key
        layers = {"llama3_8b": 14, "gpt_13b": 8}[before.model.preset]
        assert after.model.num_layers == (6 if cut.name == "8b_saving" else layers), cut.key
        assert cut.cut == f"one GPU, {after.model.num_layers} of {before.model.num_layers} layers"
        # sequences of a GPU and a step
        assert after.train.global_batch_size * whole.processes == before.train.global_batch_size
    assert dense_one_gpu.cuts() == {"llama3_8b": "14 of 32 layers", "gpt_13b": "8 of 40 layers"}


def test_what_one_process_runs_stays_whole_and_what_needs_two_is_left_out() -> None:
    there = {job.key: job for part in dense_jobs.PARTS for job in dense_one_gpu.jobs_of(part)}
    jobs = {job.key: job for part in dense_jobs.PARTS for job in dense_jobs.jobs_of(part)}
    assert jobs.keys() - there.keys() == {
        "ladder/side_tensor",
        "tune/13b_tensor_fused",
        "tune/13b_tensor_none",
        "tune/13b_tensor_fp8",
        "tune/13b_pipeline",
        "tune/13b_pipeline_fp8",
    }
    for key, job in jobs.items():
        if job.processes == 1:
            assert there[key].sets == job.sets and (not there[key].cut or job.kind == "ceilings"), key


def test_each_rung_still_changes_one_thing() -> None:
    configs = {job.name: config_of(job) for job in dense_one_gpu.jobs_of("ladder")}
    assert list(configs) == list(dense_jobs.RUNGS)
    naive = configs[dense_jobs.NAIVE].train
    assert (naive.micro_batch_size, naive.global_batch_size, naive.attention_kernel) == (1, 1, "reference")
    for below, name in zip(dense_jobs.RUNGS[:-1], dense_jobs.RUNGS[1:], strict=True):
        changed = differences(configs[below], configs[name]).keys() - {"run.name"}
        # told one by one in test_dense.py
        together = {"6_micro_batch": 2, "7_gathered": 6, "8_fp8": 2}
        assert len(changed) == together.get(name, 1), name


def test_three_curves_fit_one_card_and_a_checkpoint_the_disk() -> None:
    bytes_of = sorted(estimate(config_of(job), 1).total for job in dense_one_gpu.jobs_of("curves"))
    # each process also takes 1 to 3 GiB that the estimate leaves out
    assert sum(bytes_of[-3:]) + 3 * 3 * 2**30 <= CARD_BYTES
    saving = next(job for job in dense_one_gpu.jobs_of("overheads") if job.name == "8b_saving")
    # masters and two moments, as `paceline plan fit` counts them; twice that leaves room for other things
    assert count_parameters(config_of(saving).model).total * 12 <= 0.5 * DISK_BYTES


def test_the_table_fits_one_call_and_the_ladder_another() -> None:
    for parts in (("dense",), ("ladder",), ("overheads", "profile", "ceilings")):
        seconds = {job.key: job.estimate for part in parts for job in dense_one_gpu.jobs_of(part)}
        assert sum(seconds.values()) <= CALL_SECONDS, parts


def test_ceilings_know_the_cut() -> None:
    (job,) = dense_one_gpu.jobs_of("ceilings")
    assert "--one-gpu" in dense.command_of(job, Path("x"))
    assert "--one-gpu" not in dense.command_of(dense_jobs.jobs_of("ceilings")[0], Path("x"))


# ---- calls


def record(tokens: float = 1000.0, **changes: Any) -> dict[str, Any]:
    return {
        "step_seconds": 1.0,
        "step_seconds_min": 0.9,
        "step_seconds_max": 1.1,
        "steps": 10,
        "tokens_per_second_per_gpu": tokens,
        "tflops_per_gpu": tokens / 20,
        "fraction_of_gemm": 0.5,
        "sustained_gemm_tflops": 660.0,
        "peak_memory_gib": 100.0,
        "loss": 9.5,
        "gradient_reduction": "bf16",
        "tokens_per_joule": 12.5,
        "start_up_seconds": {"imports": 4.0, "first step": 20.5},
        "recipe": {},
    } | changes


def call(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str, *arguments: str) -> list[str]:
    """Runs each job as ``script``, whose only argument is its folder; the names of those that were started."""
    started = []

    def command(job: Job, where: Path) -> list[str]:
        started.append(job.name)
        return ["-c", script, str(where)]

    monkeypatch.setattr(runner, "machine", lambda: ({"devices": "2 x test", "versions": {"torch": "0"}}, 2))
    line = ["dense.py", *arguments, "--one-gpu", "--tiny", "--results", str(folder), "--work", str(folder / "work")]
    monkeypatch.setattr(sys, "argv", line)
    assert dense.BENCH.one_gpu is not None
    runner.main(replace(dense.BENCH, one_gpu=replace(dense.BENCH.one_gpu, command_of=command)), "")
    return started


WRITES_A_RECORD = f"""
import json, pathlib, sys
(pathlib.Path(sys.argv[1]) / "line.jsonl").write_text(json.dumps({record()!r}) + "\\n")
"""


def test_results_go_to_files_of_their_own_and_say_the_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    only = ["--only", "naive", "8_fp8", "8b_bf16", "1b_bf16"]
    assert set(call(monkeypatch, tmp_path, WRITES_A_RECORD, "dense", "ladder", *only)) == set(only[1:])
    assert not (tmp_path / "dense.json").exists() and not (tmp_path / "dense.md").exists()
    data = json.loads((tmp_path / "dense_one_gpu.json").read_text())
    assert data["command"] == "bench/dense.sh dense --one-gpu" and data["devices"] == "1 x test"
    assert data["entries"]["ladder/naive"]["cut"] == "one GPU, 8 of 40 layers"
    assert "cut" not in data["entries"]["dense/1b_bf16"]
    page = (tmp_path / "dense_one_gpu.md").read_text()
    title = page.splitlines()[0]
    assert title.endswith("on one GPU, measured: llama3_8b with 14 of 32 layers, gpt_13b with 8 of 40 layers")
    rows = [line for line in page.splitlines() if "Paceline (`" in line]
    assert len(rows) == 4
    for row in rows:
        assert ("of 32 layers" in row or "of 40 layers" in row) != ("llama3_1b" in row), row
        assert "2 GPUs" not in row
    # tokens and memory of the peers' whole model do not stand beside those of a part
    assert "| | Megatron-LM + Transformer Engine, whole model on 2 GPUs |  | 557 | 0.84 |  |" in page
    assert "| | Megatron-LM + Transformer Engine | 52,220 | 471 |" in page
    assert (
        "gpt_13b, one GPU, 8 of 40 layers, best precision against naive: 1,000 / 1,000" in page and "2,600" not in page
    )
    capsys.readouterr()


def test_names_are_those_of_one_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["dense.py", "tune", "--one-gpu", "--only", "13b_tensor_none"])
    with pytest.raises(SystemExit):
        runner.main(dense.BENCH, "")
    assert "no such entry in tune" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["dense.py", "list", "--one-gpu"])
    runner.main(dense.BENCH, "")
    said = capsys.readouterr().out
    assert "side_tensor" not in said and "model.num_layers=14" in said and " 2 GPU " not in said


WRITES_A_CURVE = """
import json, pathlib, sys, time
time.sleep(1.0)
run = pathlib.Path(sys.argv[1]) / "run"; run.mkdir()
line = {"loss": 9.0, "grad_norm": 1.0, "tokens_per_second_per_gpu": 5.0}
(run / "metrics.jsonl").write_text("".join(json.dumps({"step": step, **line}) + "\\n" for step in range(1, 7)))
"""


def test_runs_that_share_a_gpu_share_its_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On two GPUs the third run would end after 60 s, twice its estimate, which is more than there is."""
    only = ["--only", "off", "fast", "fp8", "--at-once", "3", "--minutes", "0.7"]
    assert call(monkeypatch, tmp_path, WRITES_A_CURVE, "curves", *only) == ["off", "fast"]
    said = capsys.readouterr().out
    assert "curves/fp8: left for the next call" in said and "6 steps, 5 tokens/s, 3 at once" in said
    assert (tmp_path / "dense_one_gpu_curves" / "off.jsonl").is_file()
    entry = json.loads((tmp_path / "dense_one_gpu.json").read_text())["entries"]["curves/off"]
    assert entry["at_once"] == 3
    # the next call has room for it
    assert call(monkeypatch, tmp_path, WRITES_A_CURVE, "curves", *only) == ["fp8"]


def test_a_small_job_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = ["dense.py", "ladder", "--one-gpu", "--only", "6_micro_batch", "--tiny"]
    monkeypatch.setattr(runner, "machine", lambda: ({}, 0))
    monkeypatch.setattr(sys, "argv", [*line, "--results", str(tmp_path), "--work", str(tmp_path)])
    runner.main(dense.BENCH, "")
    entry = json.loads((tmp_path / "dense_one_gpu.json").read_text())["entries"]["ladder/6_micro_batch"]
    assert entry["bench"]["steps"] == 1 and entry["processes"] == 1, entry.get("failed")
    assert "--nproc=1" in entry["command"] and "model.num_layers=8" in entry["command"]


# ---- the ladder's page


def test_a_section_of_the_ladder_leaves_the_other_alone(tmp_path: Path) -> None:
    page = tmp_path / "ladder.md"
    one, two, end = dense_results.ONE_GPU_MARK, dense_results.LADDER_MARK, dense_results.LADDER_END
    page.write_text(f"above\n{two}\nold two\n{end}\nbetween\n{one}\nold one\n{end}\nbelow\n")
    dense_results.write_ladder(page, one, ["new one"])
    assert page.read_text() == f"above\n{two}\nold two\n{end}\nbetween\n{one}\n\nnew one\n\n{end}\nbelow\n"
    dense_results.write_ladder(page, two, ["new two"])
    assert page.read_text() == f"above\n{two}\n\nnew two\n\n{end}\nbetween\n{one}\n\nnew one\n\n{end}\nbelow\n"


@pytest.mark.parametrize("text", ["above\n", "{mark}\nrows\n", "{end}\n{mark}\nrows\n"])
def test_a_page_without_its_place_is_named_and_kept(text: str, tmp_path: Path) -> None:
    page = tmp_path / "ladder.md"
    mark, end = dense_results.ONE_GPU_MARK, dense_results.LADDER_END
    page.write_text(before := text.format(mark=mark, end=end))
    with pytest.raises(results.DamagedFileError, match="Put both lines back"):
        dense_results.write_ladder(page, mark, ["rows"])
    assert page.read_text() == before


def test_the_section_says_what_cannot_show_and_the_cut_of_each_row() -> None:
    def entry(tokens: float) -> dict[str, Any]:
        return {"title": "", "work": "", "cut": "one GPU, 8 of 40 layers", "bench": record(tokens)}

    entries = {f"ladder/{name}": entry(1000.0 + 10 * n) for n, name in enumerate(dense_jobs.RUNGS)}
    lines = dense_ladder.one_gpu_ladder_page({"entries": entries})
    assert lines[0] == "## On one GPU, 8 of 40 layers"
    rows = {line.split("`")[1]: line for line in lines if line[:3] == "| ["}
    assert list(rows) == list(dense_jobs.RUNGS), "no rung that needs two GPUs"
    assert all("one GPU, 8 of 40 layers" in row for row in rows.values())
    assert "+1.0% speed" in rows["1_attention"] and "one GPU sends nothing" in rows["5_reduction"]
    assert any("1.10x" in line and "8 of 40 layers" in line for line in lines)
    nothing = dense_ladder.one_gpu_ladder_page({"entries": {}})
    assert sum(dense_ladder.NOT_YET in line for line in nothing) == len(dense_jobs.RUNGS)
    assert any("`side_tensor` is left out" in line for line in nothing)
