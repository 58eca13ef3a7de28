"""Rows of published tables: what they describe, and which cannot be scored."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from paceline.costs.layers import count_parameters
from paceline.planner.published import NotScored, PublishedRun, read_run
from paceline.planner.run_tables import COLUMNS, REQUIRED, read_rows

RUNS = Path(__file__).parents[2] / "docs" / "measured" / "published_runs.csv"

ROW = {
    "id": "vtrain-multi-9999", "model": "GPT", "layers": "48", "hidden": "8192", "heads": "64", "ffn": "32768",
    "seq": "2048", "gpu": "A100", "n_gpus": "512", "precision": "fp16", "tp": "8", "pp": "8", "dp": "8", "mbs": "3",
    "gbs": "1536", "recompute": "full", "step_time_s": "15.27",
}  # fmt: skip


def run_of(**changes: str) -> PublishedRun:
    found = read_run(ROW | changes)
    assert isinstance(found, PublishedRun), found
    return found


def test_a_row_as_a_workload() -> None:
    run = run_of()
    assert (run.workload.tp, run.workload.pp, run.workload.dp(512)) == (8, 8, 8)
    assert run.workload.micro_batches(512) == 64
    assert run.step_seconds == 15.27 and run.memory_bytes is None and not run.crashed
    assert not run.workload.fused_attention and run.workload.recompute == "full"
    assert count_parameters(run.workload.model).total == pytest.approx(39.1e9, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layers": ""}, "layers is not published"),
        ({"gpu": "TPU v5p"}, "'TPU v5p' is not in the hardware table"),
        ({"dp": "4"}, "tp x pp x cp x dp = 256, on 512 GPUs"),
        ({"gbs": "1000"}, "not a multiple"),
        ({"pp": "64", "dp": "1", "layers": "48"}, "cannot be cut"),
        ({"heads": "x"}, "heads = 'x' is not a whole number"),
        ({"id": "nobody-1"}, "without a profile"),
    ],
)
def test_rows_that_cannot_be_scored_say_why(changes: dict[str, str], reason: str) -> None:
    found = read_run(ROW | changes)
    assert isinstance(found, NotScored) and reason in found.reason


def test_all_that_a_row_lacks_is_told_at_once() -> None:
    found = read_run(ROW | {"hidden": "", "mbs": "", "gpu": "TPU v5p"})
    assert isinstance(found, NotScored)
    told = found.reasons
    assert "hidden" in told and "mbs" in told and "'TPU v5p' is not in the hardware table" in told
    assert told.startswith(found.reason) and told.count("mbs") == 1
    least = {name: text for name, text in ROW.items() if name in (*REQUIRED, "step_time_s")} | {"id": "mine"}
    assert isinstance(read_run(least, "paceline"), PublishedRun)


def test_tflops_are_read_in_the_sources_own_convention() -> None:
    """SC'21 prints hardware FLOPs, four forwards under full recomputation; Korthikanti and others model FLOPs."""
    printed = ROW | {"step_time_s": "", "tflops_per_gpu": "149"}
    hardware, model = (read_run(printed | {"id": name}) for name in ("megatron-sc21-x", "korthikanti-x"))
    assert isinstance(hardware, PublishedRun) and isinstance(model, PublishedRun)
    assert hardware.step_seconds is not None and model.step_seconds is not None
    assert hardware.step_seconds / model.step_seconds == pytest.approx(4 / 3)


def test_own_runs_need_a_framework() -> None:
    mine = {name: value for name, value in ROW.items() if name != "id"} | {"id": "mine-1", "vocab": "32000"}
    assert isinstance(read_run(mine), NotScored)
    found = read_run(mine, "megatron")
    assert isinstance(found, PublishedRun) and found.source.profile == "megatron"


def test_an_id_is_read_once_and_rows_without_one_are_named_by_line(tmp_path: Path) -> None:
    text = ",".join(COLUMNS) + "\n" + "a" + "," * (len(COLUMNS) - 1) + "\n,12" + "," * (len(COLUMNS) - 2) + "\n"
    (tmp_path / "one.csv").write_text(text)
    (tmp_path / "two.csv").write_text(text)
    rows = read_rows([tmp_path / "one.csv", tmp_path / "two.csv"])
    assert [row["id"] for row in rows] == ["a", "one.csv:3", "two.csv:3"]


def test_the_rows_that_are_kept_here() -> None:
    """How many of each source can be scored, and that no row vanishes without a reason."""
    rows = read_rows([RUNS])
    found = [read_run(row) for row in rows]
    runs = [run for run in found if isinstance(run, PublishedRun)]
    assert len(found) == len(rows) == 4125
    timed = Counter(run.source.key for run in runs if run.step_seconds is not None)
    assert timed["vtrain_single"] == 1069 and timed["vtrain_multi"] == 81 and timed["llm_foundry"] == 167
    assert timed["nanotron"] == 1150 and timed["korthikanti"] == 6 and timed["sc21"] == 7
    assert timed["nemo"] == 8 and timed["bloom"] == 35 and timed["fms"] == 6
    assert all(skipped.reason for skipped in found if isinstance(skipped, NotScored))


def test_words_of_the_notes_name_kernels() -> None:
    plain, told = run_of().workload, run_of(notes="dispatcher permutes; expert epilogues; fp8 head").workload
    assert not (plain.dispatcher_permutes or plain.expert_epilogues or plain.fp8_head)
    assert told.dispatcher_permutes and told.expert_epilogues and told.fp8_head
    assert not (told.overlaps_experts or told.fp8_attention)


def test_a_model_without_multi_token_prediction_has_none() -> None:
    runs = [run for row in read_rows([RUNS]) if isinstance(run := read_run(row), PublishedRun)]
    depths = {(run.id, run.workload.model.mtp_layers) for run in runs if run.model_name == "DeepSeekV3"}
    assert {("bridge-a219", 0), ("bridge-a234", 1), ("bridge-c001", 1)} <= depths


def test_gpt_oss_clamps_what_its_experts_activate() -> None:
    runs = [run for row in read_rows([RUNS]) if isinstance(run := read_run(row), PublishedRun)]
    assert {run.model_name for run in runs if run.workload.clamped_experts} == {"GPT OSS 120B"}
