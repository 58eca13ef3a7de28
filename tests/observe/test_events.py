from __future__ import annotations

import errno
import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.errors import RunFolderError
from paceline.observe import events
from paceline.observe.events import RunFolder, StepRecord, read_events, read_metrics

RECIPE = """
[run]
name = "demo"
seed = 1
[train]
steps = 10
[optim]
lr = 0.001
betas = [0.9, 0.95]
"""


def record(step: int, loss: float = 2.5) -> StepRecord:
    return StepRecord(
        step=step, loss=loss, grad_norm=0.5, lr=1e-3, tokens=step * 64, tokens_per_second_per_gpu=1000.0,
        tflops_per_gpu=None, mfu=None, step_seconds=0.064, data_wait_seconds=0.0, memory_gib=0.25, skipped_steps=0,
        flops_convention="causal", peak_tflops=None,
    )  # fmt: skip


def test_keys_are_the_promised_ones() -> None:
    assert list(record(1).as_dict()) == [
        "step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second_per_gpu", "tflops_per_gpu", "mfu",
        "step_seconds", "data_wait_seconds", "memory_gib", "skipped_steps", "flops_convention", "peak_tflops",
    ]  # fmt: skip


def test_records_survive_the_file_bit_for_bit(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    written = [
        replace(record(1, loss=0.1 + 0.2), extra={"moe/dropped": 3.0}),
        replace(record(2), loss=math.nan, grad_norm=math.inf),
    ]
    for item in written:
        folder.write_record(item)
    first, second = read_metrics(tmp_path)
    assert first == written[0] and first.loss == 0.1 + 0.2
    # strict JSON: no NaN, no Infinity
    assert second.loss is None and second.grad_norm is None
    for line in folder.metrics_path.read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(name))


def test_half_written_last_line(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_record(record(1))
    with folder.metrics_path.open("a") as file:
        file.write('{"step": 2, "lo')
    assert [item.step for item in read_metrics(tmp_path)] == [1]
    folder.write_record(record(2))
    assert [item.step for item in read_metrics(folder.metrics_path)] == [1, 2]


def test_damaged_middle_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1\n{"step": 2}\n')
    with pytest.raises(RunFolderError, match="line 1 is not JSON"):
        read_metrics(file)
    with pytest.raises(RunFolderError, match="cannot be read"):
        read_metrics(tmp_path / "no" / "metrics.jsonl")


def test_killed_and_resumed_run_has_one_line_a_step(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.truncate_metrics(0) == 0
    for step in range(1, 8):
        folder.write_record(record(step))
    with folder.metrics_path.open("a") as file:
        file.write('{"step": 8')  # the kill
    resumed = RunFolder(tmp_path)
    assert resumed.truncate_metrics(step=5) == 2
    for step in range(6, 11):
        resumed.write_record(record(step))
    assert [item.step for item in read_metrics(tmp_path)] == list(range(1, 11))


def test_truncation_that_fails_leaves_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path)
    for step in (1, 2):
        folder.write_record(record(step))
    before = folder.metrics_path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(events.os, "fsync", full)
    with pytest.raises(RunFolderError, match="No space left on device"):
        folder.truncate_metrics(1)
    assert folder.metrics_path.read_bytes() == before


def test_events(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_event("start", step=0, world_size=2)
    folder.write_event("evaluation", step=5, loss=math.nan, splits={"valid": [1.0, math.inf]})
    start, evaluation = read_events(tmp_path)
    assert (start["event"], start["step"], start["world_size"]) == ("start", 0, 2) and start["time"] > 1.7e9
    assert evaluation["loss"] is None and evaluation["splits"] == {"valid": [1.0, None]}


def test_claim_a_new_folder(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "runs" / "demo") as folder:
        assert folder.claim(RECIPE) == {}
        assert folder.recipe_path.read_text() == RECIPE
        assert folder.checkpoints.is_dir() and folder.logs.is_dir()
        with pytest.raises(RunFolderError, match="Another run"):
            RunFolder(folder.path).claim(RECIPE)
    assert not (folder.path / "lock.json").exists()


def test_claim_again_tells_what_changed(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        folder.claim(RECIPE)
    longer = RECIPE.replace("steps = 10", "steps = 20") + "[observe]\nlog_interval = 5\n"
    with RunFolder(tmp_path) as folder:
        assert folder.claim(longer) == {"observe.log_interval": (None, 5), "train.steps": (10, 20)}
    assert folder.recipe_path.read_text() == longer


def test_another_recipe_is_refused_by_key(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        folder.claim(RECIPE)
    other = RECIPE.replace("0.001", "0.01").replace("seed = 1", "seed = 2")
    with pytest.raises(RunFolderError) as caught:
        RunFolder(tmp_path).claim(other)
    assert caught.value.evidence == "optim.lr: 0.001 there, 0.01 now; run.seed: 1 there, 2 now."
    assert "run.dir" in caught.value.next_step and "allow_change" in caught.value.next_step
    assert folder.recipe_path.read_text() == RECIPE and not (tmp_path / "lock.json").exists()
    with RunFolder(tmp_path) as again:
        assert again.claim(other, may_differ=["optim.lr", "run"]) == {"optim.lr": (0.001, 0.01), "run.seed": (1, 2)}


def test_folder_of_unknown_origin(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(RunFolderError, match=r"no recipe\.toml"):
        RunFolder(tmp_path).claim(RECIPE)


def test_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match="cannot be made") as caught:
        RunFolder(tmp_path / "file" / "run").claim(RECIPE)
    assert "Not a directory" in caught.value.evidence and caught.value.exit_code == 2


def test_full_disk(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("/dev/full is Linux's")
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with pytest.raises(RunFolderError, match="No space left on device"):
        RunFolder(tmp_path).write_record(record(1))


def test_a_disk_that_takes_half_a_line_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short write raises nothing by itself; the next line would cut the half one, and so on for ever."""

    class Short:
        def __enter__(self) -> Short:
            return self

        def __exit__(self, *error: object) -> None: ...

        def write(self, data: bytes) -> int:
            return len(data) - 1

    monkeypatch.setattr(Path, "open", lambda *arguments, **options: Short())
    with pytest.raises(RunFolderError, match="No space left on device"):
        RunFolder(tmp_path).write_record(record(1))
