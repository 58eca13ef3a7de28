"""Rows of post-training files, each with its place: .jsonl, .json (an array, or objects one after the other), .parquet,
.txt (a line is a row), the text kinds also compressed, and folders of these.

A `.json` file is read whole; the others row by row. A key that comes twice in an object makes a bad row: which of its
values is meant cannot be told.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from paceline.data.compression import open_decompressed
from paceline.data.json_lines import type_name
from paceline.data.readers import COMPRESSED
from paceline.data.records import BadRowError
from paceline.errors import DataError

CACHE = "cache"
"""The folder beside data where tokens of a run are kept: it is never data itself."""
KINDS = {".json": "json", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet", ".txt": "text"}


class Row(NamedTuple):
    path: str
    line: int
    """from 1: the line where it begins; in a parquet file the row"""
    value: dict[str, Any] | BadRowError
    """the object, or why there is none"""


@dataclass(frozen=True, kw_only=True)
class RecordFile:
    path: str
    kind: str
    compression: str
    size: int

    def sha256(self) -> str:
        """Of the file's bytes."""
        digest = hashlib.sha256()
        with Path(self.path).open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
        return digest.hexdigest()


def find_record_files(paths: Sequence[str | Path]) -> list[RecordFile]:
    """Files and folders (read recursively, by path), in the order given; a file named twice is read once.

    In a folder, what begins with a dot is left out, and folders named `cache`.

    Raises:
        DataError: nothing is there, or a file has another suffix than the readable ones.
    """
    found: dict[str, RecordFile] = {}
    for item in paths:
        path = Path(item)
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.is_file() and _kind(p) and not _hidden(p, path))
            # a folder of this kind holds its own description; it is no data
            files = [p for p in inside if p.name != "dataset_info.json"]
            why = f"no {_readable()} file is in this folder"
        else:
            files, why = [path] if path.is_file() else [], "There is no such file or folder"
        if not files:
            raise DataError(
                f"{item}: nothing to read",
                evidence=f"{why}. Names of a model hub are not looked up.",
                next_step="Check the path; download a data set first, and name its files or folder.",
            )
        for file in files:
            found.setdefault(str(file), _describe(file))
    return list(found.values())


def _hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") or part == CACHE for part in path.relative_to(root).parts)


def _kind(path: Path) -> str | None:
    inner = path.with_suffix("") if path.suffix in COMPRESSED else path
    return KINDS.get(inner.suffix)


def _readable() -> str:
    return ", ".join(KINDS)


def _describe(path: Path) -> RecordFile:
    kind = _kind(path)
    compression = path.suffix if path.suffix in COMPRESSED else ""
    if kind is None or (kind == "parquet" and compression):
        raise DataError(
            f"{path}: not a file of rows that can be read",
            evidence=f"Read are {_readable()}; those of text also with {' or '.join(COMPRESSED)} after it.",
            next_step="Convert it to JSON lines: one object a line.",
        )
    try:
        with path.open("rb"):
            size = path.stat().st_size
    except OSError as error:
        raise DataError(f"{path}: cannot be read", evidence=str(error), next_step="Check the permissions.") from error
    if not size:
        raise DataError(f"{path}: the file is empty", next_step="Copy it again; a download may have failed.")
    return RecordFile(path=str(path), kind=kind, compression=compression, size=size)


def read_rows(file: RecordFile) -> Iterator[Row]:
    """All rows of a file. What cannot be read is a row too, with the reason.

    Raises:
        DataError: the rest of the file cannot be read: a damaged archive, an array that breaks off.
    """
    if file.kind == "parquet":
        yield from _parquet_rows(file)
    elif file.kind == "json":
        yield from _json_rows(file)
    else:
        yield from _lines(file)


def _lines(file: RecordFile) -> Iterator[Row]:
    with open_decompressed(file.path, file.compression) as stream:
        number = 0
        while line := stream.readline():
            number += 1
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line.strip():
                continue
            yield Row(file.path, number, _line(line.rstrip(b"\r\n"), file.kind))


def _line(line: bytes, kind: str) -> dict[str, Any] | BadRowError:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        return BadRowError("invalid UTF-8", f"byte 0x{line[error.start]:02x} at byte {error.start} of the line")
    if kind == "text":
        return {"text": text}
    try:
        return _object(_DECODER.decode(text))
    except BadRowError as error:
        return error
    except json.JSONDecodeError as error:
        return BadRowError("malformed JSON", f"{error.msg} at column {error.colno}")
    except (RecursionError, ValueError) as error:
        return BadRowError("malformed JSON", str(error).partition(";")[0] or "nested too deeply")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in made if keys.count(key) > 1)
        raise BadRowError("malformed JSON", f"the key {twice!r} comes twice in an object")
    return made


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)
_PLAIN_DECODER = json.JSONDecoder()


def _object(value: object) -> dict[str, Any] | BadRowError:
    if isinstance(value, dict):
        return value
    return BadRowError("malformed JSON", f"{type_name(value)} where an object was expected")


def _json_rows(file: RecordFile) -> Iterator[Row]:
    """An array of objects, or objects one after the other (JSON lines under another name, or pretty-printed)."""
    text = _whole_text(file)
    place = _after_space(text, 0)
    is_array = text[place : place + 1] == "["
    place = _after_space(text, place + 1) if is_array else place
    line, counted = 1, 0
    while place < len(text) and text[place] != "]":
        line += text.count("\n", counted, place)
        counted = place
        try:
            value, place = _decode(text, place)
        except (ValueError, RecursionError) as error:
            if isinstance(error, json.JSONDecodeError):
                place, line, why = error.pos, error.lineno, error.msg
            else:
                why = str(error).partition(";")[0]
            raise _broken_array(file, text, place, line, why) from error
        yield Row(file.path, line, value)
        place = _after_space(text, place)
        if is_array and text[place : place + 1] == ",":
            place = _after_space(text, place + 1)
        elif is_array and place < len(text) and text[place] != "]":
            line += text.count("\n", counted, place)
            raise _broken_array(file, text, place, line, "a comma or ] was expected")
    if is_array and place >= len(text):
        raise _broken_array(file, text, place, text.rstrip().count("\n") + 1, "the array is not closed")
    if is_array and (rest := _after_space(text, place + 1)) < len(text):
        line = text.count("\n", 0, rest) + 1
        raise _broken_array(file, text, rest, line, "more follows after the array's end")
    if not is_array and place < len(text):
        raise _broken_array(file, text, place, line, "] without [")


def _decode(text: str, place: int) -> tuple[dict[str, Any] | BadRowError, int]:
    """(the object at ``place`` or why it is bad, where it ends)"""
    try:
        value, end = _DECODER.raw_decode(text, place)
    except BadRowError as error:
        return error, _PLAIN_DECODER.raw_decode(text, place)[1]
    return _object(value), end


def _whole_text(file: RecordFile) -> str:
    with open_decompressed(file.path, file.compression) as stream:
        content = b"".join(iter(lambda: stream.read(1 << 22), b""))
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{file.path}, line {line}: invalid UTF-8",
            evidence=f"Byte 0x{content[error.start]:02x} at byte {error.start:,}.",
            next_step="Write it again in UTF-8, or as JSON lines: there bad lines can be skipped.",
        ) from error


def _after_space(text: str, place: int) -> int:
    while place < len(text) and text[place] in " \t\r\n":
        place += 1
    return place


def _broken_array(file: RecordFile, text: str, place: int, line: int, why: str) -> DataError:
    here = text[place : place + 40].replace("\n", " ")
    return DataError(
        f"{file.path}, near line {line}: not a list of JSON objects",
        evidence=f"{why[:1].upper()}{why[1:]}{f', at {here!r}' if here else ' at the end of the file'}. "
        "Rows after this place cannot be told apart.",
        next_step="Mend it, or copy it again if it was cut short. As JSON lines (one object a line) a bad row costs "
        "only itself.",
    )


def _parquet_rows(file: RecordFile) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        for batch in pyarrow.parquet.ParquetFile(file.path).iter_batches(256, use_threads=False):
            for value in batch.to_pylist():
                number += 1
                yield Row(file.path, number, value)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{file.path}: cannot be read after row {number}",
            evidence=str(error)[:300],
            next_step="Copy or write the file again.",
        ) from error
