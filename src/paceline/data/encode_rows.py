"""Rows of files to documents, chunk by chunk: the work of one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from paceline.data.bad_rows import BadRow, Tally
from paceline.data.documents import Document, Encoder
from paceline.data.record_columns import Layout
from paceline.data.record_formats import read_record
from paceline.data.record_rows import RecordFile, Row, read_rows
from paceline.data.records import BadRowError


@dataclass(frozen=True, kw_only=True)
class FileSet:
    """Files of one layout."""

    files: tuple[RecordFile, ...]
    layout: Layout | None = None


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Some rows of one set of files; ``file`` counts over all sets."""

    rows: list[tuple[int, Row]]
    layout: Layout | None


@dataclass(kw_only=True)
class EncodedRows:
    """What became of some rows."""

    tally: Tally
    documents: list[Document]
    desirable: list[int]
    reference_logps: list[tuple[float, float]]
    margins: list[float]
    lines: list[int]
    files: list[int]

    @classmethod
    def empty(cls) -> EncodedRows:
        return cls(tally=Tally(), documents=[], desirable=[], reference_logps=[], margins=[], lines=[], files=[])

    def extend(self, other: EncodedRows) -> None:
        self.tally.merge(other.tally)
        for name in ("documents", "desirable", "reference_logps", "margins", "lines", "files"):
            getattr(self, name).extend(getattr(other, name))

    def arrays(self) -> dict[str, NDArray]:
        none = np.zeros(0, dtype=np.int32)
        return {
            "tokens": np.concatenate([none, *(document.ids for document in self.documents)]),
            "trained": np.concatenate([none.astype(bool), *(document.trained for document in self.documents)]),
            "lengths": np.array([len(document.ids) for document in self.documents], dtype=np.int32),
            "desirable": np.array(self.desirable, dtype=np.int8),
            "reference_logps": np.array(self.reference_logps, dtype=np.float64).reshape(-1, 2),
            "margins": np.array(self.margins, dtype=np.float32),
            "lines": np.array(self.lines, dtype=np.int64),
            "files": np.array(self.files, dtype=np.int32),
        }


class EncodeRows:
    """The work of one process: rows to documents."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder

    def __call__(self, chunk: Chunk) -> EncodedRows:
        made = EncodedRows.empty()
        for file, row in chunk.rows:
            made.tally.rows += 1
            try:
                if isinstance(row.value, BadRowError):
                    raise row.value
                example = self.encoder.encode(read_record(row.value, chunk.layout))
            except BadRowError as error:
                made.tally.add(BadRow(path=row.path, line=row.line, kind=error.kind, detail=error.detail))
                continue
            except RecursionError:
                made.tally.add(BadRow(path=row.path, line=row.line, kind="malformed JSON", detail="nested too deeply"))
                continue
            made.documents += example.documents
            made.desirable.append(example.desirable)
            made.reference_logps.append(example.reference_logps or (np.nan, np.nan))
            made.margins.append(np.nan if example.margin is None else example.margin)
            made.lines.append(row.line)
            made.files.append(file)
        return made


def chunks_of(sets: Sequence[FileSet], chunk_rows: int) -> Iterator[Chunk]:
    """All rows, in the order of the files; a chunk holds rows of one set."""
    number = 0
    for group in sets:
        numbers = range(number, number + len(group.files))
        rows = ((i, row) for i, file in zip(numbers, group.files, strict=True) for row in read_rows(file))
        while taken := list(islice(rows, chunk_rows)):
            yield Chunk(rows=taken, layout=group.layout)
        number += len(group.files)
