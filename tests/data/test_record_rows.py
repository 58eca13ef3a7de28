from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from paceline.data.record_rows import Row, find_record_files, read_rows
from paceline.data.records import BadRowError
from paceline.errors import DataError

ROWS = [{"text": "a"}, {"text": "b\nc"}, {"text": "ä"}]


def rows(path: Path) -> list[Row]:
    return [row for file in find_record_files([path]) for row in read_rows(file)]


def values(path: Path) -> list[object]:
    return [row.value for row in rows(path)]


def test_every_container_gives_the_same_rows(tmp_path: Path) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    (tmp_path / "a.jsonl").write_text("\ufeff" + lines)
    (tmp_path / "b.json").write_text(json.dumps(ROWS, indent=2))
    (tmp_path / "c.json").write_text(lines)
    (tmp_path / "d.json").write_text("\n\n".join(json.dumps(row, indent=2) for row in ROWS))
    (tmp_path / "e.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "f.parquet")
    for file in sorted(tmp_path.iterdir()):
        assert values(file) == ROWS, file
    assert values(tmp_path) == ROWS * 6


def test_places(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('[\n {"text":\n  "a"},\n\n {"text": "b"},\n 5]\n')
    found = rows(file)
    assert [row.line for row in found] == [2, 5, 6]
    assert str(found[2].value) == "malformed JSON: a number where an object was expected"


def test_bad_lines_are_rows_with_a_reason(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    lines = [b'{"text": "a"}', b"", b'{"text": "\xf4"}', b'{"a": 1} {"b": 2}', b"[1]", b'{"text": "b']
    file.write_bytes(b"\n".join(lines))
    found = {row.line: row.value for row in rows(file)}
    assert found.pop(1) == {"text": "a"}
    assert {line: str(value) for line, value in found.items()} == {
        3: "invalid UTF-8: byte 0xf4 at byte 10 of the line",
        4: "malformed JSON: Extra data at column 10",
        5: "malformed JSON: a list where an object was expected",
        6: "malformed JSON: Unterminated string starting at at column 10",
    }
    assert all(isinstance(value, BadRowError) for value in found.values())


def test_a_key_that_comes_twice_costs_its_row_alone(tmp_path: Path) -> None:
    twice = '{"a": {"b": 1, "c": 2, "b": 1}}'
    (tmp_path / "a.jsonl").write_text(f'{{"a": 1}}\n{twice}\n{{"a": 2}}\n')
    (tmp_path / "b.json").write_text(f'[{{"a": 1}},\n{twice},\n{{"a": 2}}]\n')
    for file in sorted(tmp_path.iterdir()):
        first, bad, last = rows(file)
        assert (first.value, last.value) == ({"a": 1}, {"a": 2})
        assert (bad.line, str(bad.value)) == (2, "malformed JSON: the key 'b' comes twice in an object")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ('[{"a": 1},\n{"a": 2}', "the array is not closed"),
        ('[{"a": 1}\n{"a": 2}]', "a comma or ] was expected"),
        ('[{"a": 1},\n{"a": }]', "Expecting value"),
        ('{"a": 1}\nnonsense', "Expecting value"),
        ('[{"a": 1}]\n[{"a": 2}]\n', "more follows after the array's end, at '[{\"a\": 2}] '"),
        ('[]\n{"a": 2}', "more follows after the array's end"),
    ],
)
def test_a_broken_array_is_refused_with_its_line(tmp_path: Path, content: str, why: str) -> None:
    file = tmp_path / "a.json"
    file.write_text(content)
    with pytest.raises(DataError) as error:
        rows(file)
    assert f"{file}, near line 2" in error.value.subject
    assert why.lower() in error.value.evidence.lower()


@pytest.mark.parametrize(
    ("name", "why"),
    [("nothing.jsonl", "nothing to read"), ("table.xlsx", "not a file of rows"), ("empty.jsonl", "the file is empty")],
)
def test_what_is_no_file_of_rows(tmp_path: Path, name: str, why: str) -> None:
    (tmp_path / "table.xlsx").write_text("x")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(DataError, match=why) as error:
        find_record_files([tmp_path / name])
    assert error.value.next_step


def test_a_damaged_parquet_file(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), file)
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(DataError, match="cannot be read after row 0"):
        rows(file)
