"""Raw text: which files, cut into units of work, and the documents in them.

    .txt and other text     a file is a document; with ``split_lines`` a line is one
    .jsonl, .ndjson         a line is a JSON object, its ``json_key`` the document
    .parquet                a row is a document, column ``json_key``
    .gz, .zst               any of the text kinds, compressed

What cannot be read is a `Problem` with file, line, byte offset and reason, never a silent loss:

- bytes that are not UTF-8 (in a text file: the whole file), JSON that does not parse (two objects on a line too), a
  record without the key, a value that is not text;
- a JSON number with more digits than Python reads (4300);
- text with a lone surrogate (``"\\ud800"`` in JSON): it has no UTF-8 form, so no tokenizer can read it.

A byte-order mark at the start of a file is dropped, blank lines are not records, line ends are kept as they are.
"""

from __future__ import annotations

import glob as globbing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

from paceline.data.compression import DecompressedFile, open_decompressed
from paceline.data.json_lines import LONG_LINE, parse, parse_long, type_name
from paceline.errors import DataError

Kind = Literal["text", "jsonl", "parquet"]
SUFFIXES: dict[str, Kind] = {".txt": "text", ".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
COMPRESSED = (".gz", ".zst")


@dataclass(frozen=True, kw_only=True)
class InputFile:
    path: str
    kind: Kind
    compression: str
    """``.gz``, ``.zst`` or empty"""
    size: int
    """bytes on disk"""


class Document(NamedTuple):
    text: str
    num_bytes: int
    """UTF-8 bytes of the text"""
    offset: int = 0
    """byte offset in the (decompressed) file where its line starts"""


class Problem(NamedTuple):
    """Something that was skipped."""

    path: str
    line: int
    """from 1; the row of a parquet file; relative to its slice until `numbered`"""
    offset: int
    """byte offset in the (decompressed) file where the line starts, or of the bad byte in a text file"""
    kind: str
    """a few words, the same for all problems of one kind"""
    detail: str
    text_keys: tuple[str, ...] = ()
    """where the wanted key is missing: the first few others with text, longest text first"""

    def __str__(self) -> str:
        return f"{self.path}, line {self.line}, byte {self.offset}: {self.kind}: {self.detail}"


def find_files(inputs: Sequence[str | Path], glob: str = "") -> list[InputFile]:
    """Files, folders (recursively, by path) and globs, in the order given; a file named twice is read once.

    Args:
        glob: which files of a folder to take, such as ``*.py``; empty = those with a known suffix. Files that are not
            JSON lines or parquet by suffix are plain text.
    """
    found: dict[str, InputFile] = {}
    for item in inputs:
        path = Path(item)
        if path.is_dir():
            paths = sorted(p for p in path.rglob(glob or "*") if p.is_file() and not _hidden(p, path))
            paths = [p for p in paths if glob or _kind(p) is not None]
            why = (
                f"no file in it that matches {glob!r}"
                if glob
                else "no .txt, .jsonl or .parquet file (or .gz, .zst of them)"
            )
        elif path.is_file():
            paths, why = [path], ""
        else:
            paths = sorted(Path(p) for p in _glob(str(item)) if Path(p).is_file())
            why = "no such file or folder, and no file matches it as a pattern"
        if not paths:
            raise DataError(
                f"{item}: nothing to read",
                evidence=f"There is {why}.",
                next_step='Check the path, or choose files of a folder with --glob "*.py".',
            )
        for p in paths:
            found.setdefault(str(p), _describe(p))
    return list(found.values())


def _glob(pattern: str) -> list[str]:
    return globbing.glob(pattern, recursive=True)  # noqa: PTH207 - Path.glob refuses absolute patterns


def _hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def _kind(path: Path) -> Kind | None:
    inner = path.with_suffix("") if path.suffix in COMPRESSED else path
    return SUFFIXES.get(inner.suffix)


def _describe(path: Path) -> InputFile:
    if path.suffix == ".json" or path.name.endswith((".json.gz", ".json.zst")):
        raise DataError(
            f"{path}: a .json file is not read",
            evidence="It may be one large array; documents are read from JSON lines, one object a line.",
            next_step="If it has one object a line, rename it to .jsonl; an array is converted with `jq -c '.[]'`.",
        )
    try:
        size = path.stat().st_size
        with path.open("rb"):
            pass
    except OSError as error:
        raise DataError(f"{path}: cannot be read", evidence=str(error), next_step="Check the permissions.") from error
    compression = path.suffix if path.suffix in COMPRESSED else ""
    return InputFile(path=str(path), kind=_kind(path) or "text", compression=compression, size=size)


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    json_key: str = "text"
    split_lines: bool = False


@dataclass(frozen=True, kw_only=True)
class Slice:
    """A part of a file: bytes [start, end) of it (the lines that begin there), or a row group."""

    file: InputFile
    start: int
    end: int
    whole: bool
    """the slice is the whole file"""
    content: bytes | None = None
    """the lines themselves, where the file had to be decompressed"""
    disk_bytes: int = 0
    """its part of the file's size on disk, for progress"""


Unit = tuple[Slice, ...]


def by_line(file: InputFile, options: ReadOptions) -> bool:
    return file.kind == "jsonl" or (file.kind == "text" and options.split_lines)


def units(files: Sequence[InputFile], options: ReadOptions, unit_bytes: int) -> Iterator[Unit]:
    """Cuts files into units of about ``unit_bytes``, in document order; small files share a unit."""
    group: list[Slice] = []
    size = 0
    for file in files:
        for part in _slices(file, options, unit_bytes):
            if group and size + part.disk_bytes > unit_bytes:
                yield tuple(group)
                group, size = [], 0
            group.append(part)
            size += part.disk_bytes
    if group:
        yield tuple(group)


def _slices(file: InputFile, options: ReadOptions, unit_bytes: int) -> Iterator[Slice]:
    if file.kind == "parquet":
        yield from _row_groups(file)
    elif not by_line(file, options) or (file.size <= unit_bytes and not file.compression):
        yield Slice(file=file, start=0, end=file.size, whole=True, disk_bytes=file.size)
    elif not file.compression:
        for start in range(0, file.size, unit_bytes):
            end = min(start + unit_bytes, file.size)
            yield Slice(file=file, start=start, end=end, whole=False, disk_bytes=end - start)
    else:
        yield from _decompressed(file, unit_bytes)


def _decompressed(file: InputFile, unit_bytes: int) -> Iterator[Slice]:
    """Whole lines of a compressed file: it can only be read from its start, by one process."""
    offset, seen = 0, 0
    with open_decompressed(file.path, file.compression) as stream:
        while content := stream.read(unit_bytes):
            if not content.endswith(b"\n"):
                content += stream.readline()
            position = stream.compressed_position()
            yield Slice(
                file=file,
                start=offset,
                end=offset + len(content),
                whole=False,
                content=content,
                disk_bytes=position - seen,
            )
            offset, seen = offset + len(content), position


def _row_groups(file: InputFile) -> Iterator[Slice]:
    import pyarrow
    import pyarrow.parquet

    try:
        count = pyarrow.parquet.ParquetFile(file.path).metadata.num_row_groups
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{file.path}: not a readable parquet file", evidence=str(error), next_step="Copy or write it again."
        ) from error
    for group in range(count):
        share = file.size * (group + 1) // count - file.size * group // count
        yield Slice(file=file, start=group, end=group + 1, whole=count == 1, disk_bytes=share)


class SliceReader:
    """The documents and problems of one slice; afterwards ``num_lines`` tells how many lines (or rows) it had."""

    def __init__(self, part: Slice, options: ReadOptions) -> None:
        self.part = part
        self.options = options
        self.num_lines = 0

    def __iter__(self) -> Iterator[Document | Problem]:
        if self.part.file.kind == "parquet":
            yield from self._rows()
        elif by_line(self.part.file, self.options):
            yield from self._lines()
        else:
            yield self._file()

    def problem(self, offset: int, kind: str, detail: str, text_keys: tuple[str, ...] = ()) -> Problem:
        return Problem(self.part.file.path, self.num_lines, offset, kind, detail, text_keys)

    def _file(self) -> Document | Problem:
        file = self.part.file
        with open_decompressed(file.path, file.compression) as stream:
            content = stream.read()
        self.num_lines = 1
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            return Problem(file.path, content.count(b"\n", 0, error.start) + 1, error.start, *_bad_bytes(error))
        return Document(text, len(content) - 3 * content.startswith(b"\xef\xbb\xbf"))

    def _lines(self) -> Iterator[Document | Problem]:
        is_json = self.part.file.kind == "jsonl"
        for offset, line in self._raw_lines():
            self.num_lines += 1
            if offset == 0:
                line = line.removeprefix(b"\xef\xbb\xbf")
            if not line or line.isspace():
                continue
            try:
                if is_json and len(line) > LONG_LINE and (short := parse_long(line, self.options.json_key)) is not None:
                    del line
                    yield Document(short, len(short.encode()), offset)
                    continue
                text = line.decode("utf-8")
            except UnicodeDecodeError as error:
                yield self.problem(offset, *_bad_bytes(error))
                continue
            del line  # a line may be 100 MB: not two copies of it while the tokenizer works
            if not is_json:
                yield Document(text, len(text.encode()), offset)
                continue
            result = parse(text, self.options.json_key)
            del text
            yield self.problem(offset, *result) if isinstance(result, tuple) else _document(self, offset, result)

    def _raw_lines(self) -> Iterator[tuple[int, bytes]]:
        """(byte offset, line without its end) of the lines that start within the slice."""
        part, offset = self.part, self.part.start
        content = part.content
        if content is None:
            with open_decompressed(part.file.path, part.file.compression) as stream:
                if part.start:
                    stream.seek(part.start - 1)
                    offset += _skip_line(stream) - 1
                if offset >= part.end:
                    return
                content = stream.read(part.end - offset)
                if not content.endswith(b"\n"):
                    content += stream.readline()
        lines = content.split(b"\n")
        del content
        if not lines[-1]:
            lines.pop()
        for i in range(len(lines)):
            line, lines[i] = lines[i], b""  # each line is freed once it is parsed
            length = len(line) + 1
            yield offset, line
            offset += length

    def _rows(self) -> Iterator[Document | Problem]:
        import pyarrow
        import pyarrow.parquet

        key = self.options.json_key
        try:
            file = pyarrow.parquet.ParquetFile(self.part.file.path)
            if key not in file.schema_arrow.names:
                raise DataError(
                    f"{self.part.file.path}: no column {key!r}",
                    evidence=f"Its columns: {', '.join(file.schema_arrow.names)}.",
                    next_step="Name the column of the text with --json-key.",
                )
            for batch in file.iter_batches(256, row_groups=[self.part.start], columns=[key], use_threads=False):
                for value in batch.column(0):
                    self.num_lines += 1
                    try:
                        text = value.as_py()
                    except UnicodeDecodeError as error:
                        yield self.problem(0, *_bad_bytes(error))
                        continue
                    if isinstance(text, str):
                        yield _document(self, 0, text)
                    else:
                        yield self.problem(0, "not text", f"{key!r} is {type_name(text)}")
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(
                f"{self.part.file.path}: row group {self.part.start} cannot be read",
                evidence=str(error),
                next_step="Copy or write the file again.",
            ) from error


def _skip_line(stream: BinaryIO | DecompressedFile) -> int:
    """Reads past the next line end in bounded memory; returns the bytes read."""
    skipped = 0
    while block := stream.readline(1 << 20):
        skipped += len(block)
        if block.endswith(b"\n"):
            break
    return skipped


def _bad_bytes(error: UnicodeDecodeError) -> tuple[str, str]:
    return "invalid UTF-8", f"byte 0x{error.object[error.start]:02x} at byte {error.start} of it ({error.reason})"


def _document(reader: SliceReader, offset: int, text: str) -> Document | Problem:
    if text.isascii():
        return Document(text, len(text), offset)
    try:
        return Document(text, len(text.encode()), offset)
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        return reader.problem(offset, "lone surrogate", f"U+{code:04X} at character {error.start} has no UTF-8 form")


def texts(files: Sequence[InputFile], options: ReadOptions) -> Iterator[str]:
    """All documents that can be read, one after the other, in this process."""
    for unit in units(files, options, 1 << 22):
        for part in unit:
            for item in SliceReader(part, options):
                if isinstance(item, Document) and item.text:
                    yield item.text
