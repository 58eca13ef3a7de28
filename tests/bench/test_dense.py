"""What the dense bench runs may run; its entries survive being cut off; its pages say what is there."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from paceline.config.check import check, refuse_errors
from paceline.config.load import differences, load_recipe
from paceline.config.run import RunConfig
from paceline.config.train import TrainConfig
from paceline.costs.memory import estimate

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "bench"))

import curve_report  # noqa: E402
import dense  # noqa: E402
import dense_jobs  # noqa: E402
import dense_ladder  # noqa: E402
import dense_report  # noqa: E402
import dense_results  # noqa: E402
import dense_table  # noqa: E402
import runner  # noqa: E402
from cut_off import ending_on_signals  # noqa: E402
from dense_jobs import Job  # noqa: E402
from runner import main  # noqa: E402

CARD_BYTES = 138.88 * 2**30


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def config_of(job: Job) -> RunConfig:
    loaded = load_recipe(job.recipe, list(job.sets))
    refuse_errors(check(loaded.config, loaded.registry, job.processes))
    return loaded.config


@pytest.mark.parametrize("part", dense_jobs.PARTS)
def test_every_job_is_a_recipe_that_may_run(part: str) -> None:
    jobs = dense_jobs.jobs_of(part)
    assert len({job.key for job in jobs}) == len(jobs)
    for job in jobs:
        config_of(job)
        config_of(dense_jobs.tiny(job))
        assert job.work in ("", *dense_table.WORKS) and job.estimate < 500


def test_the_table_fits_in_its_time() -> None:
    """Without the first compilations: one call of nine minutes for the table, twenty minutes with the ladder."""
    seconds = {job.key: job.estimate for part in ("dense", "ladder") for job in dense_jobs.jobs_of(part)}
    assert sum(job.estimate for job in dense_jobs.jobs_of("dense")) <= 540
    assert sum(seconds.values()) <= 1200


def test_each_rung_changes_what_it_says_and_fits_the_card() -> None:
    expected = {
        "1_attention": {"train.attention_kernel"},
        "2_loss": {"train.loss_kernel"},
        "3_compile": {"parallel.compile"},
        "4_recompute": {"parallel.recompute"},
        "5_reduction": {"parallel.reduce_dtype"},
        "6_micro_batch": {"train.micro_batch_size", "train.global_batch_size"},
        "7_gathered": {
            "train.micro_batch_size",
            "train.global_batch_size",
            "parallel.zero",
            "parallel.accumulate_dtype",
            "parallel.fused_weight_gradients",
            "optim.fused_update",
        },
        "8_fp8": {"train.precision", "train.fp8_weights_only"},
        "9_fp8_casts": {"train.fp8_cast_kernel"},
        "10_fp8_head": {"train.fp8_head"},
    }
    jobs = {job.name: config_of(job) for job in dense_jobs.ladder_jobs()}
    for below, name in zip(dense_jobs.RUNGS[:-1], dense_jobs.RUNGS[1:], strict=True):
        changed = differences(jobs[below], jobs[name]).keys() - {"run.name"}
        assert changed == expected[name], name
    for name, config in jobs.items():
        assert estimate(config, 2).total <= CARD_BYTES, name
    files = {path.stem for path in Path("recipes/ladder").glob("*.toml")}
    assert files == set(jobs), "every recipe of the ladder is measured"
    naive = jobs[dense_jobs.NAIVE]
    assert (naive.train.attention_kernel, naive.train.loss_kernel, naive.train.micro_batch_size) == (
        "reference",
        "plain",
        1,
    )
    assert (naive.parallel.zero, naive.parallel.recompute, naive.parallel.compile) == (3, "full", False)


def test_all_fast_paths_off_means_all() -> None:
    """A new kernel with a plain twin must be switched off here too."""
    config = load_recipe("recipes/llama3_1b.toml", list(dense_jobs.FAST_OFF)).config
    plain = {"reference", "plain", "torch"}
    for name, info in TrainConfig.model_fields.items():
        if name.endswith("_kernel") and not name.startswith("fp8"):
            assert plain & set(get_args(info.annotation)), f"what is the plain choice of train.{name}?"
            assert getattr(config.train, name) in plain, f"train.{name} is not switched off in FAST_OFF"
    assert not config.parallel.compile
    for switch in dense_jobs.fused_switches():
        assert f"{switch}=true" in dense_jobs.FUSED_ON and f"{switch}=false" in dense_jobs.FAST_OFF


# ---- entries


class Scripted:
    """Stands in for `paceline`: each entry is a few lines of Python that write into its folder."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.results, self.work = tmp_path / "results", tmp_path / "work"
        self.scripts: dict[str, str] = {}
        self.started: list[str] = []
        monkeypatch.setattr(runner, "machine", lambda: ({"devices": "2 x test", "versions": {"torch": "0"}}, 2))
        self.monkeypatch = monkeypatch

    def command(self, job: Job, folder: Path) -> list[str]:
        self.started.append(job.name)
        return ["-c", self.scripts.get(job.name, BENCH.format(record=record())), str(folder)]

    def run(self, *arguments: str) -> dict[str, Any]:
        self.started = []
        line = ["dense.py", *arguments, "--tiny", "--results", str(self.results), "--work", str(self.work)]
        self.monkeypatch.setattr(sys, "argv", line)
        main(replace(dense.BENCH, command_of=self.command), "")
        found: dict[str, Any] = json.loads((self.results / "dense.json").read_text())
        return found


BENCH = """
import json, pathlib, sys
(pathlib.Path(sys.argv[1]) / "line.jsonl").write_text(json.dumps({record!r}) + "\\n")
"""


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


def test_what_is_done_is_skipped_and_what_failed_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Scripted(monkeypatch, tmp_path)
    bench.scripts["1_attention"] = "print('out of memory'); raise SystemExit(3)"
    only = ["--only", "naive", "1_attention", "2_loss"]
    found = bench.run("ladder", *only)
    assert bench.started == ["naive", "1_attention", "2_loss"]
    assert found["entries"]["ladder/1_attention"]["failed"] == ["exit code 3", "out of memory"]
    assert "recipe" not in found["entries"]["ladder/naive"]["bench"]
    assert "`ladder/1_attention`: exit code 3; out of memory" in (tmp_path / "results" / "dense.md").read_text()
    # a part that holds some of the same entries does not repeat them
    del bench.scripts["1_attention"]
    found = bench.run("ladder", "dense", *only, "3_compile")
    assert bench.started == ["3_compile", "1_attention"]
    assert not any("failed" in entry for entry in found["entries"].values())
    bench.run("ladder", *only, "--again")
    assert bench.started == ["naive", "1_attention", "2_loss"]


def test_what_would_not_end_in_time_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = Scripted(monkeypatch, tmp_path)
    bench.run("ladder", "--only", "naive", "--minutes", "0.1")
    assert bench.started == [] and "ladder/naive: left for the next call" in capsys.readouterr().out


def test_curves_run_side_by_side_and_leave_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Scripted(monkeypatch, tmp_path)
    lines = [
        {"step": step, "loss": 9.0 - step, "grad_norm": 1.0, "tokens_per_second_per_gpu": 5.0} for step in range(1, 7)
    ]
    write = f"""
import json, pathlib, sys, time
time.sleep(0.3)
run = pathlib.Path(sys.argv[1]) / "run"; run.mkdir()
(run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in {lines!r}))
"""
    names = ["fast", "seed1", "off"]
    bench.scripts = dict.fromkeys(names, write)
    found = bench.run("curves", "--only", *names)
    assert found["entries"]["curves/fast"]["curve"] == {"steps": 6, "tokens_per_second_per_gpu": 5.0}
    curve = (tmp_path / "results" / "dense_curves" / "off.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in curve] == list(range(1, 7))
    assert (tmp_path / "results" / "dense_curves.svg").read_text().startswith("<svg")
    page = (tmp_path / "results" / "dense.md").read_text()
    assert "![loss curves](dense_curves.svg)" in page and "band of 2 seeds" in page


def test_one_small_bench_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = ["dense.py", "dense", "--only", "1b_bf16", "--tiny", "--results", str(tmp_path), "--work", str(tmp_path)]
    monkeypatch.setattr(runner, "machine", lambda: ({}, 0))
    monkeypatch.setattr(sys, "argv", line)
    main(dense.BENCH, "")
    entry = json.loads((tmp_path / "dense.json").read_text())["entries"]["dense/1b_bf16"]
    assert entry["bench"]["steps"] == 1 and entry["bench"]["loss"] > 0, entry.get("failed")


def test_ceilings_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = ["dense.py", "ceilings", "--tiny", "--results", str(tmp_path), "--work", str(tmp_path)]
    monkeypatch.setattr(runner, "machine", lambda: ({}, 0))
    monkeypatch.setattr(sys, "argv", line)
    main(dense.BENCH, "")
    entry = json.loads((tmp_path / "dense.json").read_text())["entries"]["ceilings/models"]
    found = entry["ceilings"]["models"]["llama3_8b"]
    # queries, keys, values, output; gate, up, down; the head
    assert sum(each["number"] for each in found["linears"]) == 2 * 7 + 1, entry.get("failed")
    assert found["ceiling_tflops"] > 0
    assert "| llama3_8b, 2 layers | cpu " in (tmp_path / "dense.md").read_text()


# ---- what goes wrong


def curve_job(name: str = "fast") -> Job:
    return next(dense_jobs.tiny(job) for job in dense_jobs.jobs_of("curves") if job.name == name)


def test_a_skipped_step_stays_in_its_curve_without_a_loss(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    losses = ["9.123456", "null", "NaN", "9.0", "8.5", "8.0"]
    lines = [
        f'{{"step": {step}, "loss": {loss}, "grad_norm": {loss}, "tokens_per_second_per_gpu": 5.0}}\n'
        for step, loss in enumerate(losses, start=1)
    ]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(lines))
    entry, curve = dense.found_in(curve_job(), tmp_path)
    assert entry["curve"]["steps"] == 6
    assert [each["loss"] for each in curve] == [9.12346, None, None, 9.0, 8.5, 8.0]
    assert curve[1] == {"step": 2, "loss": None, "grad_norm": None}
    results = dense_results.DenseResults(tmp_path / "results")
    results.put(curve_job(), {"title": "", "kind": "curve", "work": "", **entry}, curve)
    assert dense_results.DenseResults(tmp_path / "results").read_curves() == {
        "fast": [9.12346, None, None, 9.0, 8.5, 8.0]
    }
    results.draw()
    assert results.picture.read_text().count("<polyline") == 1


@pytest.mark.parametrize("line", ["[]", "null", "{}", '{"recipe": {}}', ""])
def test_a_record_of_another_shape_marks_the_entry_failed(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Scripted(monkeypatch, tmp_path)
    bench.scripts["naive"] = f"import sys; open(sys.argv[1] + '/line.jsonl', 'w').write({line!r}); print('said')"
    entry = bench.run("ladder", "--only", "naive", "2_loss")["entries"]
    assert entry["ladder/naive"]["failed"][0].startswith("no result: ") and "bench" in entry["ladder/2_loss"]


def test_a_curve_s_line_of_another_shape_marks_the_entry_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Scripted(monkeypatch, tmp_path)
    bench.scripts["fast"] = "import os, sys; os.chdir(sys.argv[1]); os.mkdir('run'); open('run/metrics.jsonl', 'w')" + (
        ".write('null\\n')"
    )
    entry = bench.run("curves", "--only", "fast")["entries"]["curves/fast"]
    assert "TypeError" in entry["failed"][0]


def test_tiny_results_and_real_ones_are_kept_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = Scripted(monkeypatch, tmp_path)
    bench.run("ladder", "--only", "naive")
    path = tmp_path / "results" / "dense.json"
    before = path.read_text()
    assert refused(monkeypatch, "ladder", "--results", str(path.parent)) == 2
    assert f"{path} holds results of --tiny" in capsys.readouterr().err
    assert path.read_text() == before
    path.write_text(before.replace('"tiny": true', '"tiny": false'))
    assert refused(monkeypatch, "ladder", "--tiny", "--results", str(path.parent)) == 2
    assert "holds results without --tiny" in capsys.readouterr().err
    for own in ([], ["--results", "docs/measured"]):
        assert refused(monkeypatch, "ladder", "--tiny", *own) == 2
        assert "add --results with another folder" in capsys.readouterr().err


def refused(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    """The exit code of a call that must not measure anything."""
    monkeypatch.setattr(runner, "run", None)
    monkeypatch.setattr(sys, "argv", ["dense.py", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main(dense.BENCH, "")
    return stopped.value.code


def test_a_mistyped_name_is_refused_with_the_nearest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(monkeypatch, "dense", "--only", "8b_bf61", "8b_none") == 2
    said = capsys.readouterr().err
    assert "--only 8b_bf61: no such entry in dense; near it: 8b_bf16" in said and "naive" not in said
    assert "--only 8b_none: no such entry in dense, but in tune" in said
    assert refused(monkeypatch, "ceilings", "--only", "xyz") == 2
    assert "near it: models" in capsys.readouterr().err


FINE = {"title": "a", "work": "", "failed": ["exit code 1"]}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"entries": []}',
        '{"entries": {"dense/8b_bf16": {"title": "a", "ben',
        json.dumps({"entries": {"x": FINE | {"failed": []}}}),
        json.dumps({"entries": {"x": {"failed": ["exit code 1"]}}}),
        json.dumps({"entries": {"x": {"title": "a"}}}),
        json.dumps({"entries": {"x": {"title": "a", "bench": []}}}),
        json.dumps({"entries": {"tune/x": {"title": "a", "work": "8b_bf16", "bench": {}}}}),
    ],
)
def test_a_damaged_file_of_results_is_named(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "dense.json"
    path.write_text(text)
    assert refused(monkeypatch, "report", "--results", str(tmp_path)) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"dense.py: {path}: ") and "Move it away" in said and "version control" in said
    assert path.read_text() == text and sorted(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("text", ["", '{"step": 1, "loss": 9.5}\n{"step": 2, "lo', "[]\n", '{"step": 1}\n'])
def test_a_damaged_curve_is_named(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "dense_curves" / "off.jsonl"
    path.parent.mkdir()
    path.write_text(text)
    assert refused(monkeypatch, "curves", "--results", str(tmp_path)) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"dense.py: {path}: ") and "bench/dense.sh curves --only off --again" in said


def test_a_write_that_is_cut_off_leaves_the_old_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = dense_results.DenseResults(tmp_path)
    entry = {"title": "", "kind": "curve", "work": "", "curve": {"steps": 1}}
    results.put(curve_job(), entry, [{"step": 1, "loss": 9.0}])

    def cut_off(self: Path, text: str, **_: Any) -> int:
        with self.open("w") as file:
            file.write(text[:5])
        raise OSError("no space left")

    monkeypatch.setattr(Path, "write_text", cut_off)
    with pytest.raises(OSError, match="no space"):
        results.put(curve_job(), entry, [{"step": 1, "loss": 8.0}])
    assert dense_results.DenseResults(tmp_path).read_curves() == {"fast": [9.0]}


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT])
def test_a_call_that_is_asked_to_end_stops_its_jobs(number: signal.Signals, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    sleeping = f"import os, pathlib, time; pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid())); time.sleep(60)"
    call = f"""
import sys; sys.path.insert(0, "bench")
import dataclasses, dense, runner
runner.machine = lambda: ({{}}, 0)
runner.main(dataclasses.replace(dense.BENCH, command_of=lambda job, folder: ["-c", {sleeping!r}]), "")
"""
    arguments = ["ladder", "--only", "naive", "--tiny", "--results", str(tmp_path), "--work", str(tmp_path / "work")]
    # as a terminal does, also where whatever runs the tests ignores them
    hang_up = lambda: [signal.signal(each, signal.SIG_DFL) for each in (signal.SIGHUP, signal.SIGINT)]  # noqa: E731
    command = [sys.executable, "-c", call, *arguments]
    with subprocess.Popen(command, preexec_fn=hang_up, stderr=subprocess.PIPE, text=True) as process:
        try:
            end = time.monotonic() + 60
            while not (pid_file.is_file() and pid_file.read_text()) and time.monotonic() < end:
                time.sleep(0.05)
            process.send_signal(number)
            process.send_signal(number)
            _, told = process.communicate(timeout=30)
            assert process.returncode == 128 + number
        finally:
            process.kill()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)
    assert told.strip() == (
        f"cut off: 0 of 1 entries are in {tmp_path / 'dense.json'}; the same command goes on with the rest."
    )


def test_a_signal_that_is_ignored_stays_so() -> None:
    """As under nohup; and the handlers of before are there again afterwards."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    terminate = signal.getsignal(signal.SIGTERM)
    try:
        with ending_on_signals():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) != terminate
        assert signal.getsignal(signal.SIGTERM) == terminate
    finally:
        signal.signal(signal.SIGHUP, before)


def test_small_figures_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    job = dense_jobs.ladder_jobs()[0]
    small = record(tflops_per_gpu=0.000412, sustained_gemm_tflops=0.02761, fraction_of_gemm=0.0149, loss=6.238412)
    runner.tell(dense.BENCH, job, {"bench": small, "seconds": 7.0})
    assert "0.00041 TFLOP/s = 0.015 of 0.028, 100.0 GiB, loss 6.2384 (7 s)" in capsys.readouterr().out
    runner.tell(dense.BENCH, job, {"bench": record(tflops_per_gpu=557.3, loss=None), "seconds": 7.0})
    assert "557 TFLOP/s = 0.500 of 660, 100.0 GiB, loss none" in capsys.readouterr().out
    page = "\n".join(
        dense_ladder.ladder_page({"entries": {"ladder/naive": bench_entry("", 1.0, tflops_per_gpu=0.0004)}})
    )
    assert "| 0.0004 | 0.500 |" in page


def test_figures_of_a_training_run(tmp_path: Path) -> None:
    seconds = [9.0, 5.0, 4.0] + [1.0] * 18  # of steps 2 to 22
    seconds[10 - 2], seconds[12 - 2] = 1.5, 1.75
    seconds[13 - 2 :] = [1.25] * 10
    (tmp_path / "step_seconds.json").write_text(json.dumps(seconds))
    events = [{"event": "evaluation", "step": 10}, {"event": "checkpoint", "step": 12}]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (tmp_path / "summary.json").write_text('{"start_up": {"imports": 2.0}}')
    records = [{"loss": 9.0, "data_wait_seconds": 3.0}, {"loss": 8.0, "data_wait_seconds": 0.01}]
    found = dense.train_figures(tmp_path, records, wanted=22)
    assert found["step_seconds"] == 1.0 and found["loss"] == 8.0 and found["data_wait_seconds"] == 0.01
    assert found["checkpoint_stall_seconds"] == 0.75 and found["evaluation_seconds"] == 0.5
    assert found["while_writing_step_seconds"] == 1.25
    with pytest.raises(ValueError, match="22 of 23 steps"):
        dense.train_figures(tmp_path, records, wanted=23)


# ---- pages


def bench_entry(work: str, tokens: float, **changes: Any) -> dict[str, Any]:
    entry = {"title": "a change", "kind": "bench", "work": work, "compiled_before": True}
    return entry | {"bench": record(tokens, **changes)}


def test_a_row_is_the_fastest_of_its_work() -> None:
    entries = {
        "ladder/naive": bench_entry("13b_naive", 2500.0),
        "ladder/6_micro_batch": bench_entry("13b_bf16", 7000.0),
        "tune/13b_tensor_none": bench_entry("13b_bf16", 7200.0),
        "ladder/8_fp8": bench_entry("13b_fp8", 9100.0),
        "dense/8b_bf16": bench_entry("8b_bf16", 11_000.0, tokens_per_joule=None),
        "dense/8b_train": {
            "title": "8b_bf16",
            "work": "",
            "compiled_before": True,
            "train": {"step_seconds": 1.005, "loss": 1.0, "start_up_seconds": {"imports": 4.0, "data": 1.0}},
        },
        "overheads/8b_logged": {"title": "", "work": "", "train": {"step_seconds": 1.007, "loss": 1.0}},
    }
    text = "\n".join(dense_report.page({"command": "x", "entries": entries}, {}))
    assert "Paceline (`tune/13b_tensor_none`) | 7,200" in text and "(`ladder/6_micro_batch`)" not in text
    # over the larger of the naive run and the usual first attempt
    assert "9,100 / 2,600 tokens/s/GPU = **3.50x** (`ladder/8_fp8`" in text
    assert "| 8b_bf16 | 1.0000 | 1.0050 | +0.50% |" in text
    assert "| a line of metrics every step instead | 1.0070 | 1.0050 | +0.20% |" in text
    assert "| `dense/8b_train` | some there before | 5.0 | 4.0 |  | 1.0 |" in text
    assert "measured on another machine of the kind" in text


def test_pages_without_results() -> None:
    empty: dict[str, Any] = {"command": "x", "entries": {}}
    assert "Nothing measured yet." in dense_report.page(empty, {})
    rows = [line for line in dense_ladder.ladder_page(empty) if line.startswith("| [")]
    assert len(rows) == len(dense_jobs.RUNGS) + len(dense_jobs.BESIDE)
    assert all(dense_ladder.NOT_YET in row for row in rows)


def test_what_each_rung_bought() -> None:
    entries = {
        "ladder/naive": bench_entry("13b_naive", 2000.0, peak_memory_gib=102.0),
        "ladder/1_attention": bench_entry("13b_bf16", 3000.0, peak_memory_gib=100.0),
        "ladder/2_loss": {"title": "", "work": "", "failed": ["exit code 1", "out of memory"]},
        "ladder/3_compile": bench_entry("13b_bf16", 4000.0),
        "ladder/7_gathered": bench_entry("13b_bf16", 5000.0),
        "ladder/8_fp8": bench_entry("13b_fp8", 7000.0),
        "ladder/side_tensor": bench_entry("13b_bf16", 4500.0),
    }
    rows = {line.split("`")[1]: line for line in dense_ladder.ladder_page({"entries": entries}) if line[:3] == "| ["}
    assert "+50.0% speed, -2.0 GiB" in rows["1_attention"] and "failed: exit code 1" in rows["2_loss"]
    assert rows["3_compile"].endswith("|  |"), "no rung below that was measured"
    assert "+40.0% speed" in rows["8_fp8"] and rows["side_tensor"].endswith("|  |")
    entries["ladder/6_micro_batch"] = bench_entry("13b_bf16", 5000.0)
    (beside,) = (line for line in dense_ladder.ladder_page({"entries": entries}) if "[`side_tensor`]" in line)
    assert "-10.0% speed" in beside
    entries["ladder/10_fp8_head"] = bench_entry("13b_fp8", 7200.0)
    assert "**3.60x**" in "\n".join(dense_ladder.ladder_page({"entries": entries}))


def test_the_ladder_s_page_is_up_to_date(tmp_path: Path) -> None:
    """Between its marks stands what was measured, or that nothing was; all else is kept."""
    page = Path("docs/ladder.md")
    copy = tmp_path / "ladder.md"
    copy.write_text(page.read_text())
    for one_gpu, name in ((False, "dense"), (True, "dense_one_gpu")):
        results = Path(f"docs/measured/{name}.json")
        data = json.loads(results.read_text()) if results.is_file() else {"entries": {}}
        mark = dense_results.ONE_GPU_MARK if one_gpu else dense_results.LADDER_MARK
        lines = dense_ladder.one_gpu_ladder_page(data) if one_gpu else dense_ladder.ladder_page(data)
        dense_results.write_ladder(copy, mark, lines)
    assert copy.read_text() == page.read_text(), "run `bench/dense.sh report`, with and without --one-gpu"


def band_of(curves: curve_report.Curves) -> float | None:
    return curve_report.seeds_band([curves[name] for name in ("fast", "seed1", "seed2") if name in curves])


def test_curves_against_the_band_of_seeds() -> None:
    base = [5.0 - 0.01 * step for step in range(50)]
    curves = {
        "fast": base,
        "seed1": [loss + 0.2 for loss in base],
        "seed2": [loss - 0.1 for loss in base],
        "off": [loss + 0.03 for loss in base],
        "fp8": base[:10],  # cut off: says nothing
    }
    assert band_of(curves) == pytest.approx(0.3)
    text = "\n".join(dense_report.page({"command": "x", "entries": {}}, curves))
    assert "| bf16, all fast paths off | 0.0300 | 0.0300 | +0.0300 | 0.10 |" in text and "| fp8 |" not in text
    picture = _picture()
    assert picture.band(curves)[-1] == (50, pytest.approx(0.3))
    drawn = picture.draw(curves)
    assert drawn.count("<polyline") == 5 and drawn.count('class="band"') == 1
    assert picture.draw({"fast": base}).count("<polyline") == 1


def test_skipped_steps_are_left_out_of_differences() -> None:
    base: list[float | None] = [5.0 - 0.01 * step for step in range(50)]
    off = [None if step in (7, 30) else loss + 0.03 for step, loss in enumerate(base) if loss is not None]
    never: list[float | None] = [None] * 50
    curves = {"fast": [None, *base[1:]], "off": off, "seed1": base, "seed2": off, "fp8": never}
    assert band_of(curves) == pytest.approx(0.03)
    text = "\n".join(dense_report.page({"command": "x", "entries": {}}, curves))
    assert "(loss 4.990 to 4.510)" in text and "left out of every difference: fast 1, off 2, seed2 2, fp8 50." in text
    assert "| bf16, all fast paths off | 0.0300 | 0.0300 | +0.0300 | 1.00 |" in text
    assert "| fp8 | no step with a loss in both |" in text
    picture = _picture()
    assert picture.band(curves)[-1] == (50, pytest.approx(0.03))
    assert picture.draw(curves).count("<polyline") == 5
    # a reference without any loss is no reason to fail
    assert picture.draw({"fast": never}).count("<polyline") == 0
    assert "no step of it has a loss" in "\n".join(dense_report.numerics({"fast": never, "off": off}, ""))
    assert picture.loss_of('{"loss": NaN}') is None and picture.loss_of('{"loss": 2.5}') == 2.5


def _picture() -> Any:
    folder = ROOT / "docs" / "pictures"
    sys.path.append(str(folder))
    spec = importlib.util.spec_from_file_location("make_curves_picture", folder / "make_curves_picture.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_job_of_a_kernel_that_is_not_here_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = next(job for job in dense_jobs.jobs_of("tune") if job.name == "8b_none_flash4")
    monkeypatch.setattr(runner, "find_spec", lambda name: None)
    assert not runner.may_run(job) and "flash-attn-4 is not installed" in capsys.readouterr().out
    monkeypatch.setattr(runner, "find_spec", lambda name: object())
    assert runner.may_run(job)
    assert runner.may_run(next(job for job in dense_jobs.jobs_of("ladder") if job.name == "naive"))
