"""Tables of runs as people write them, and cells that cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import ConfigError
from paceline.planner.calibration import read_measured
from paceline.planner.published import NotScored, PublishedRun, read_run
from paceline.planner.run_tables import CellError, measured_number, read_rows, whole_number

_ROW = {
    "id": "a", "source": "vTrain", "model": "GPT", "layers": "12", "hidden": "1024", "heads": "16", "ffn": "4096",
    "vocab": "51200", "seq": "1024", "gpu": "A100-80", "n_gpus": "8", "tp": "2", "mbs": "4", "gbs": "64",
    "precision": "fp16", "step_time_s": "2.5", "mem_GiB": "11",
}  # fmt: skip


def table(path: Path, *rows: dict[str, str], separator: str = ",", encoding: str = "utf-8") -> Path:
    names = list(rows[0])
    lines = [separator.join(names), *(separator.join(row.get(name, "") for name in names) for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding=encoding)
    return path


@pytest.mark.parametrize(("separator", "encoding"), [(",", "utf-8-sig"), (";", "utf-8"), ("\t", "utf-8")])
def test_what_spreadsheets_write(tmp_path: Path, separator: str, encoding: str) -> None:
    path = table(tmp_path / "runs.csv", _ROW, separator=separator, encoding=encoding)
    (row,) = read_rows([path])
    assert {name: row[name] for name in _ROW} == _ROW
    path.write_text(path.read_text(encoding=encoding).replace("layers", " Layers ").replace("mem_GiB", "MEM_GIB"))
    (row,) = read_rows([path])
    assert (row["layers"], row["mem_GiB"]) == ("12", "11")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "is empty"),
        (b"\xff\xfea\x00b\x00", "not written in UTF-8"),
        ("id,layérs".encode("latin-1"), "not written in UTF-8"),
        (b"name,speed\na,1\n", "none of the columns"),
    ],
)
def test_what_is_no_table_is_said(tmp_path: Path, content: bytes, told: str) -> None:
    path = tmp_path / "runs.csv"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=told):
        read_rows([path])


def test_no_row_vanishes(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = table(tmp_path / "a" / "runs.csv", _ROW, _ROW, _ROW | {"mbs": "2"}, _ROW | {"id": ""})
    second = table(tmp_path / "b" / "runs.csv", _ROW, _ROW | {"id": "c"}, _ROW | {"id": "d"}, _ROW | {"id": ""})
    rows = read_rows([first, second])
    # the very same row once; another of the same id, or of the same place in another file, gets a name of its own
    assert [row["id"] for row in rows] == ["a", "a (runs.csv:4)", "runs.csv:5", "c", "d"]
    other = table(tmp_path / "b" / "runs.csv", *[_ROW] * 3, _ROW | {"id": "", "mbs": "1"})
    assert len(read_rows([first, other])) == 4


def test_a_row_that_came_already_is_told_with_its_line(tmp_path: Path) -> None:
    path = table(tmp_path / "runs.csv", _ROW, _ROW, _ROW | {"heads": "33"}, _ROW | {"id": "b", "step_time_s": "0"})
    found, skipped = read_measured([str(path)], "")
    assert [run.id for run in found] == ["a"]
    assert {one.name: one.reason for one in skipped} == {
        "a (runs.csv:3)": "the same row came before",
        "a (runs.csv:4)": "33 heads do not divide a hidden size of 1024",
        "b (runs.csv:5)": "step_time_s = '0' is not a number above 0",
    }


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "inf", "nan", "1e30", "four", "10,5"])
def test_no_number_of_things(text: str) -> None:
    with pytest.raises(CellError, match=r"mbs = .* is not a whole number from 1"):
        whole_number(_ROW | {"mbs": text}, "mbs")
    assert isinstance(read_run(_ROW | {"mbs": text}), NotScored)


@pytest.mark.parametrize("text", ["0", "-3", "nan", "inf", "10,5", "fast"])
def test_no_measurement(text: str) -> None:
    with pytest.raises(CellError, match=r"step_time_s = .* is not a number above 0"):
        measured_number(_ROW | {"step_time_s": text}, "step_time_s")
    found = read_run(_ROW | {"step_time_s": text})
    assert isinstance(found, NotScored) and "step_time_s" in found.reason, "its memory is not scored either"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"recompute": "banana"}, "recompute = 'banana'"),
        ({"precision": "int3"}, "precision = 'int3'"),
        ({"zero": "7"}, "zero = '7'"),
        ({"heads": "33"}, "33 heads do not divide"),
        ({"mem_GiB": "400"}, "more than the 80 GB of A100 SXM 80"),
        ({"step_time_s": "0.001"}, "above the 312 of A100 SXM 80"),
        ({"tflops_per_gpu": "500"}, "tflops_per_gpu = 500 is above the 312"),
        ({"mfu_pct": "130"}, "mfu_pct = 130"),
        ({"tokens_per_s_per_gpu": "-5"}, "tokens_per_s_per_gpu = '-5'"),
        ({"gbs": "7"}, ""),
    ],
)
def test_what_cannot_be_is_not_scored(change: dict[str, str], told: str) -> None:
    found = read_run(_ROW | change)
    assert isinstance(found, NotScored) and told in found.reason


def test_the_source_is_told_by_its_column() -> None:
    """An id of one's own changes nothing."""
    named, own = read_run(_ROW | {"id": "vtrain-single-1"}), read_run(_ROW | {"id": "mine-1"})
    assert isinstance(named, PublishedRun) and isinstance(own, PublishedRun)
    assert (own.source.key, own.workload, own.cluster) == ("vtrain_single", named.workload, named.cluster)
    several = read_run(_ROW | {"n_gpus": "16"})
    assert isinstance(several, PublishedRun) and several.source.key == "vtrain_multi"
    unknown = read_run(_ROW | {"source": "a friend"})
    assert isinstance(unknown, NotScored) and unknown.reason == "a source without a profile"


def test_a_framework_that_is_given_is_taken() -> None:
    for framework, key in (("nanotron", "nanotron"), ("megatron_deepspeed", "vtrain_single"), ("paceline", "paceline")):
        found = read_run(_ROW, framework)
        assert isinstance(found, PublishedRun) and (found.source.key, found.source.profile) == (key, framework)


def test_a_row_without_a_measurement_is_predicted() -> None:
    found = read_run(_ROW | {"step_time_s": "", "mem_GiB": ""})
    whole = read_run(_ROW)
    assert isinstance(found, PublishedRun) and isinstance(whole, PublishedRun)
    assert not found.measured and whole.measured and found.workload == whole.workload
