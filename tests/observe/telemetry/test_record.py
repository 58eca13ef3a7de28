"""The record on disk: whole after a crash, bounded, mergeable, and read back as it was written."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from paceline.observe.telemetry.columns import COLUMNS, DIMENSIONS, INDEX, UNKNOWN
from paceline.observe.telemetry.record import FILES, FOLDER, RecordWriter, files_of, ranks_of, read_rank


def line(step: int, **values: int) -> list[int]:
    filled = [UNKNOWN] * len(COLUMNS)
    for name, value in ({"step": step, "steps": 1, "wall_us": 1000} | values).items():
        filled[INDEX[name]] = value
    return filled


def write(folder: Path, steps: range, *, limit_mb: int = 8, rank: int = 0, clock: Callable[[], float] = lambda: 0.0):
    writer = RecordWriter(folder, rank, limit_mb=limit_mb, facts={"host": "a"}, clock=clock)
    for step in steps:
        writer.put(line(step, gc_us=step))
        while writer.waiting > 5000:
            time.sleep(1e-3)
    writer.close()


def test_lines_come_back(tmp_path: Path) -> None:
    write(tmp_path, range(1, 51), rank=3)
    record = read_rank(tmp_path, 3)
    assert ranks_of(tmp_path) == [3] and record.facts["host"] == "a" and record.facts["rank"] == 3
    assert record.column("step").tolist() == list(range(1, 51)) == record.column("gc_us").tolist()
    assert np.isnan(record.column("gpu_power_w")).all()


def test_a_line_that_was_being_written_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, range(1, 11))
    ((_, path),) = files_of(tmp_path / FOLDER, 0)
    whole = path.read_bytes()
    for cut in range(1, 60):
        path.write_bytes(whole[:-cut])
        assert len(read_rank(tmp_path, 0).values) == 9


@pytest.mark.parametrize("damage", [b"", b"# not json\n", b"\x00" * 4096, b"# {}\nstep,steps\n1,1\n2,\xff,\n3,1\n"])
def test_damaged_files_do_not_end_the_reading(tmp_path: Path, damage: bytes) -> None:
    write(tmp_path, range(1, 11))
    (tmp_path / FOLDER / "rank-00000.0001.csv").write_bytes(damage)
    assert set(read_rank(tmp_path, 0).column("step")) >= set(range(4, 11))


def test_a_damaged_line_costs_itself_alone(tmp_path: Path) -> None:
    write(tmp_path, range(1, 11))
    ((_, path),) = files_of(tmp_path / FOLDER, 0)
    lines = path.read_bytes().split(b"\n")
    lines[5] = b"\x00\x00garbage"
    path.write_bytes(b"\n".join(lines))
    assert read_rank(tmp_path, 0).column("step").tolist() == [1, 2, 3, 5, 6, 7, 8, 9, 10]


def test_a_resumed_run_continues_and_the_last_word_stands(tmp_path: Path) -> None:
    write(tmp_path, range(1, 11))
    writer = RecordWriter(tmp_path, 0, limit_mb=8, facts={"host": "b"})
    for step in range(6, 16):
        writer.put(line(step, gc_us=1000 + step))
    writer.close()
    record = read_rank(tmp_path, 0)
    assert record.column("step").tolist() == list(range(1, 16)) and record.facts["host"] == "b"
    assert record.column("gc_us").tolist() == [1, 2, 3, 4, 5, *range(1006, 1016)]


def test_disk_is_bounded_and_the_beginning_stays(tmp_path: Path) -> None:
    hours = iter(range(0, 100_000, 2))
    write(tmp_path, range(1, 40_001), limit_mb=1, clock=lambda: next(hours) * 3600.0)
    files = files_of(tmp_path / FOLDER, 0)
    sizes = [path.stat().st_size for _, path in files]
    assert len(files) == FILES and sum(sizes) <= 2**20 and max(sizes) <= 2**20 // FILES
    assert min(sizes[:-1]) > 2**20 // FILES - 2048
    record = read_rank(tmp_path, 0)
    steps = record.column("step")
    assert steps[0] == 1 and steps[-1] == 40_000


def test_many_short_starts_keep_all_of_the_record(tmp_path: Path) -> None:
    for first in range(1, 61, 3):
        write(tmp_path, range(first, first + 3), limit_mb=1)
    assert read_rank(tmp_path, 0).column("step").tolist() == list(range(1, 61))
    # and beyond the limit the oldest of them go
    for index in range(4, 20):
        (tmp_path / FOLDER / f"rank-00000.{index:04d}.csv").write_bytes(b" " * 2**16)
    write(tmp_path, range(61, 64), limit_mb=1)
    numbers = [number for number, _ in files_of(tmp_path / FOLDER, 0)]
    assert numbers[0] == 0 and numbers[-1] == 20 and 12 <= len(numbers) <= 16
    assert sum(path.stat().st_size for _, path in files_of(tmp_path / FOLDER, 0)) <= 2**20


def test_a_start_without_a_step_leaves_no_file(tmp_path: Path) -> None:
    write(tmp_path, range(0))
    assert not (tmp_path / FOLDER).exists()


def test_a_limit_that_was_lowered_holds_even_for_the_first_file(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "rank-00000.0000.csv").write_bytes(b" " * 2**21)
    write(tmp_path, range(1, 4), limit_mb=1)
    assert [number for number, _ in files_of(tmp_path / FOLDER, 0)] == [1]


@pytest.mark.filterwarnings("error")
def test_any_error_of_the_writer_is_told_and_ends_the_record_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = RecordWriter(tmp_path, 0, limit_mb=8, facts={"host": object()})
    writer.put(line(1))
    writer.close()
    assert "the record of rank 0 ends here: Object of type object is not JSON serializable" in caplog.text
    writer.put(line(2))
    assert writer.waiting <= 1, "nobody takes lines any more, so none are kept"


def test_a_jump_of_the_wall_clock_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jumps = iter(range(0, 10**9, 7200))
    monkeypatch.setattr(time, "time", lambda: float(next(jumps)))
    writer = RecordWriter(tmp_path, 0, limit_mb=1, facts={})
    for step in range(1, 2001):
        writer.put(line(step))
    writer.close()
    assert read_rank(tmp_path, 0).column("steps")[-1] > 1


def test_files_that_fill_up_fast_have_lines_of_several_steps(tmp_path: Path) -> None:
    write(tmp_path, range(1, 12_001), limit_mb=8)
    files = files_of(tmp_path / FOLDER, 0)
    heads = [json.loads(path.read_bytes().split(b"\n", 1)[0].lstrip(b"# ")) for _, path in files]
    assert [head["steps_per_line"] for head in heads] == [2**index for index in range(len(files))] and len(files) > 1
    record = read_rank(tmp_path, 0)
    # sums are of all steps
    assert record.column("steps").sum() == 12_000 and record.column("gc_us").sum() == sum(range(1, 12_001))
    assert record.column("wall_us").sum() == 12_000_000


def test_a_file_that_lasts_for_hours_keeps_every_step(tmp_path: Path) -> None:
    hours = iter(range(0, 100_000, 2))
    write(tmp_path, range(1, 12_001), limit_mb=8, clock=lambda: next(hours) * 3600.0)
    assert set(read_rank(tmp_path, 0).column("steps")) == {1}


def test_a_folder_that_cannot_be_written_ends_the_record_alone(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("a file where the folder should be")
    write(tmp_path, range(1, 11))
    assert len(read_rank(tmp_path / "none", 0).values) == 0


def test_only_the_end_is_read_where_asked(tmp_path: Path) -> None:
    write(tmp_path, range(1, 1001))
    steps = read_rank(tmp_path, 0, most_bytes=20_000).column("step")
    assert steps[-1] == 1000 and 50 < len(steps) < 300


def test_columns_of_another_version_are_found_by_name(tmp_path: Path) -> None:
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "rank-00000.0000.csv").write_text("# {}\nnew,wall_us,step\n7,11,1\n7,12,2\n")
    record = read_rank(tmp_path, 0)
    assert record.column("wall_us").tolist() == [11, 12] and np.isnan(record.column("gc_us")).all()


def test_there_are_at_least_eight_dimensions() -> None:
    assert len(DIMENSIONS) >= 8 and all(set(names) <= set(COLUMNS) for names in DIMENSIONS.values())
