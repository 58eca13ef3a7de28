"""What the dense bench runs may run; its entries survive being cut off; its pages say what is there."""

from __future__ import annotations

import importlib.util
import json
import sys
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

import dense  # noqa: E402
import dense_jobs  # noqa: E402
import dense_ladder  # noqa: E402
import dense_report  # noqa: E402
from dense_jobs import Job  # noqa: E402

CARD_BYTES = 141e9


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
        assert job.work in ("", *dense_report.WORKS) and job.estimate < 500


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
        "7_fp8": {"train.precision"},
        "8_fused": {"optim.fused_update"},
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
        monkeypatch.setattr(dense, "command_of", self.command)
        monkeypatch.setattr(dense, "machine", lambda: ({"devices": "2 x test", "versions": {"torch": "0"}}, 2))
        self.monkeypatch = monkeypatch

    def command(self, job: Job, folder: Path) -> list[str]:
        self.started.append(job.name)
        return ["-c", self.scripts.get(job.name, BENCH.format(record=record())), str(folder)]

    def run(self, *arguments: str) -> dict[str, Any]:
        self.started = []
        line = ["dense.py", *arguments, "--tiny", "--results", str(self.results), "--work", str(self.work)]
        self.monkeypatch.setattr(sys, "argv", line)
        dense.main()
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
    monkeypatch.setattr(dense, "machine", lambda: ({}, 0))
    monkeypatch.setattr(sys, "argv", line)
    dense.main()
    entry = json.loads((tmp_path / "dense.json").read_text())["entries"]["dense/1b_bf16"]
    assert entry["bench"]["steps"] == 1 and entry["bench"]["loss"] > 0, entry.get("failed")


def test_ceilings_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = ["dense.py", "ceilings", "--tiny", "--results", str(tmp_path), "--work", str(tmp_path)]
    monkeypatch.setattr(dense, "machine", lambda: ({}, 0))
    monkeypatch.setattr(sys, "argv", line)
    dense.main()
    entry = json.loads((tmp_path / "dense.json").read_text())["entries"]["ceilings/models"]
    found = entry["ceilings"]["models"]["llama3_8b"]
    # queries, keys, values, output; gate, up, down; the head
    assert sum(each["number"] for each in found["linears"]) == 2 * 7 + 1, entry.get("failed")
    assert found["ceiling_tflops"] > 0
    assert "| llama3_8b | cpu " in (tmp_path / "dense.md").read_text()


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
        "ladder/7_fp8": bench_entry("13b_fp8", 9100.0),
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
    assert "9,100 / 2,600 tokens/s/GPU = **3.50x** (`ladder/7_fp8`" in text
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
        "ladder/6_micro_batch": bench_entry("13b_bf16", 5000.0),
        "ladder/7_fp8": bench_entry("13b_fp8", 7000.0),
        "ladder/side_tensor": bench_entry("13b_bf16", 4500.0),
    }
    rows = {line.split("`")[1]: line for line in dense_ladder.ladder_page({"entries": entries}) if line[:3] == "| ["}
    assert "+50.0% speed, -2.0 GiB" in rows["1_attention"] and "failed: exit code 1" in rows["2_loss"]
    assert rows["3_compile"].endswith("|  |"), "no rung below that was measured"
    assert "+40.0% speed" in rows["7_fp8"] and "-10.0% speed" in rows["side_tensor"]
    entries["ladder/8_fused"] = bench_entry("13b_fp8", 7200.0)
    assert "**3.60x**" in "\n".join(dense_ladder.ladder_page({"entries": entries}))


def test_the_ladder_s_page_is_up_to_date(tmp_path: Path) -> None:
    """What stands above the mark is kept; below it stands what was measured, or that nothing was."""
    page, results = Path("docs/ladder.md"), Path("docs/measured/dense.json")
    copy = tmp_path / "ladder.md"
    copy.write_text(page.read_text())
    dense.write_ladder(copy, json.loads(results.read_text()) if results.is_file() else {"entries": {}})
    assert copy.read_text() == page.read_text(), "run `bench/dense.sh report`"


def test_curves_against_the_band_of_seeds() -> None:
    base = [5.0 - 0.01 * step for step in range(50)]
    curves = {
        "fast": base,
        "seed1": [loss + 0.2 for loss in base],
        "seed2": [loss - 0.1 for loss in base],
        "off": [loss + 0.03 for loss in base],
        "fp8": base[:10],  # cut off: says nothing
    }
    assert dense_report.seeds_band(curves) == pytest.approx(0.3)
    text = "\n".join(dense_report.page({"command": "x", "entries": {}}, curves))
    assert "| bf16, all fast paths off | 0.0300 | 0.0300 | +0.0300 | 0.10 |" in text and "| fp8 |" not in text
    picture = _picture()
    assert picture.band(curves)[-1] == (50, pytest.approx(0.3))
    drawn = picture.draw(curves)
    assert drawn.count("<polyline") == 5 and drawn.count('class="band"') == 1
    assert picture.draw({"fast": base}).count("<polyline") == 1


def _picture() -> Any:
    folder = ROOT / "docs" / "pictures"
    sys.path.append(str(folder))
    spec = importlib.util.spec_from_file_location("make_curves_picture", folder / "make_curves_picture.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
