"""A calibration learns numbers back that made the runs, and is read by every verb or refused with reason."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.config.load import dump_recipe, resolve
from paceline.costs.profiles import PACELINE
from paceline.costs.step import predict
from paceline.costs.workload import Cluster, Workload
from paceline.errors import ConfigError
from paceline.planner.calibration import (
    calibrate,
    calibration_note,
    calibration_text,
    read_calibration,
    read_folder,
    read_measured,
)
from paceline.planner.machines import find_gpu
from paceline.planner.published import NotScored, PublishedRun
from paceline.planner.run_sources import Source
from paceline.planner.run_tables import COLUMNS

TRUE = replace(PACELINE, gemm_efficiency=0.80, hbm_efficiency=0.5, framework_gib=1.5)


def runs(count: int) -> Iterator[PublishedRun]:
    source = Source(key="paceline", title="Paceline", prefix=(), profile="paceline")
    for preset, seq_len in (("llama3_1b", 4096), ("qwen3_0.6b", 2048), ("llama3_1b", 1024))[:count]:
        train = {"seq_len": seq_len, "micro_batch_size": 2, "global_batch_size": 8}
        work = Workload.of(resolve({"model": {"preset": preset}, "train": train}).config)
        cluster = Cluster(gpu=find_gpu("H200"), gpus=1, gpus_per_node=1)
        made = predict(work, cluster, TRUE)
        yield PublishedRun(
            id=f"{preset}-{seq_len}",
            source=source,
            model_name=preset,
            workload=work,
            cluster=cluster,
            step_seconds=made.seconds,
            memory_bytes=made.memory_bytes,
        )


def test_one_run_moves_one_number_of_time_and_one_of_memory() -> None:
    found = calibrate(list(runs(1)), PACELINE)
    assert set(found.numbers) == {"gemm_efficiency", "framework_gib"}
    assert abs(found.after[0]) < 0.005 < abs(found.before[0])
    assert abs(found.memory_after[0]) < 1e-6


def test_several_runs_give_the_numbers_back() -> None:
    found = calibrate(list(runs(3)), PACELINE)
    assert max(map(abs, found.after)) < 0.01
    assert found.numbers["gemm_efficiency"] == pytest.approx(0.80, abs=0.03)
    assert found.numbers["framework_gib"] == pytest.approx(1.5, abs=0.01)


def test_the_file_reads_back(tmp_path: Path) -> None:
    made = list(runs(1))
    found = calibrate(made, PACELINE)
    file = tmp_path / "mine.toml"
    file.write_text(calibration_text(found, made))
    profile = read_calibration(file)["paceline"]
    assert profile.gemm_efficiency == pytest.approx(found.profile.gemm_efficiency, abs=1e-5)
    assert profile.network_efficiency == PACELINE.network_efficiency


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[pacelin]\ngemm_efficiency = 0.9", "no framework"),
        ("[paceline]\nspeed = 3", "no number of a profile"),
        ("[paceline]\ngemm_efficiency = 'fast'", "no number of a profile"),
        ("[paceline]\ngemm_efficiency = 7", "not between 0.5 and 1.1"),
        ("[paceline", "not valid TOML"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_calibration(file)


def folder(tmp_path: Path, *, device: str = "NVIDIA H200", lines: int = 8) -> Path:
    config = resolve({"model": {"preset": "llama3_1b"}, "train": {"seq_len": 2048}}).config
    (tmp_path / "recipe.toml").write_text(dump_recipe(config))
    facts = {"device": device}
    start = {"event": "start", "step": 0, "time": 1.0, "world_size": 2, "device": "cuda", "facts": facts}
    (tmp_path / "events.jsonl").write_text(json.dumps(start) + "\n")
    record = dict.fromkeys(
        ("loss", "grad_norm", "lr", "tokens", "tokens_per_second_per_gpu", "tflops_per_gpu", "mfu"), 1.0
    ) | {"data_wait_seconds": 0.0, "skipped_steps": 0, "flops_convention": "causal", "peak_tflops": 989.0}
    times = [9.0, 3.0, *[0.5] * (lines - 2)][:lines]
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step, seconds in enumerate(times, 1):
            file.write(json.dumps({**record, "step": step, "step_seconds": seconds, "memory_gib": 40.0 + step}) + "\n")
    return tmp_path


def test_a_run_folder_is_a_measured_run(tmp_path: Path) -> None:
    found = read_folder(folder(tmp_path))
    assert isinstance(found, PublishedRun)
    assert found.step_seconds == 0.5  # without the first two
    assert found.memory_bytes == 48 * 2**30
    assert (found.cluster.gpus, found.cluster.gpu.name) == (2, "H200 SXM")


@pytest.mark.parametrize(
    ("more", "reason"),
    [({"device": "AMD EPYC"}, "not in the table"), ({"lines": 2}, "fewer than 3 lines")],
)
def test_folders_that_tell_nothing_say_why(tmp_path: Path, more: dict[str, object], reason: str) -> None:
    found = read_folder(folder(tmp_path, **more))  # type: ignore[arg-type]
    assert isinstance(found, NotScored)
    assert reason in found.reason


def test_rows_with_missing_fields_are_listed(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    whole = {
        "id": "a", "model": "m", "layers": 16, "hidden": 2048, "heads": 16, "ffn": 8192, "vocab": 32000, "seq": 2048,
        "gpu": "H100-80", "n_gpus": 8, "precision": "bf16", "tp": 1, "pp": 1, "dp": 8, "zero": 1, "mbs": 1, "gbs": 8,
        "step_time_s": 0.3,
    }  # fmt: skip
    with file.open("w", newline="") as out:
        writer = csv.DictWriter(out, COLUMNS)
        writer.writeheader()
        writer.writerow(whole)
        writer.writerow(whole | {"id": "b", "heads": ""})
    found, skipped = read_measured([str(file)], "paceline")
    assert [run.id for run in found] == ["a"]
    assert [(one.id, one.reason) for one in skipped] == [("b", "heads is not published")]
    assert skipped[0].reasons == "heads is not published"


def test_a_number_at_the_end_of_its_range_is_known() -> None:
    fast = [replace(run, step_seconds=(run.step_seconds or 0.0) / 3, memory_bytes=1e6) for run in runs(3)]
    found = calibrate(fast, PACELINE)
    assert {"gemm_efficiency", "framework_gib"} <= set(found.at_bounds)
    assert not calibrate(list(runs(3)), PACELINE).at_bounds


def test_a_file_says_what_it_changes(tmp_path: Path) -> None:
    made = list(runs(2))
    file = tmp_path / "mine.toml"
    file.write_text(calibration_text(calibrate(made, PACELINE), made))
    assert "mine.toml, of 2 runs: gemm_efficiency 0." in calibration_note(file, "paceline")
    assert "changes nothing here: it has [paceline]" in calibration_note(file, "megatron")
    file.write_text("[megatron]\ngemm_efficiency = 0.9\n")  # without the number of runs, as older files are
    assert "changes nothing here: it has [megatron]" in calibration_note(file, "paceline")
    assert calibration_note(file, "megatron").endswith("mine.toml: gemm_efficiency 0.9.")
