"""Encodes the rows of files once, and keeps the tokens for every later start.

The key is a hash of all that decides the tokens: content of the files, tokenizer, template, mask, task. Rows are
encoded in parts of `PART_ROWS`; a build that was interrupted goes on after its last whole part. The folder is complete
when its `examples.json` is there, which is written last. Ranks take a lock: the first one builds, the others map its
files.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.data.bad_rows import Tally
from paceline.data.documents import Document, Encoder
from paceline.data.encode_rows import Chunk, EncodedRows, EncodeRows, FileSet, chunks_of
from paceline.data.index_cache import file_lock, store_array
from paceline.data.pool import WorkerPool
from paceline.errors import DataError, PacelineError

log = logging.getLogger(__name__)

FORMAT = 3
"""Raised when the same key would give other tokens or bad rows."""
PART_ROWS = 8192
CHUNK_ROWS = 256
IN_PROCESS_ROWS = 2048
"""Fewer rows are encoded in this process: starting others takes longer."""
_ARRAYS = ("tokens", "trained", "lengths", "desirable", "reference_logps", "margins", "lines", "files")
_DONE = "examples.json"


@dataclass(frozen=True, kw_only=True)
class Examples:
    """N encoded examples of ``width`` documents each, memory-mapped; U = N * width documents, L tokens in all."""

    tokens: NDArray[np.int32]
    """[L]"""
    trained: NDArray[np.bool_]
    """[L]"""
    lengths: NDArray[np.int32]
    """[U], tokens of each document"""
    desirable: NDArray[np.int8]
    """[N], 1 or 0, -1 where it means nothing"""
    reference_logps: NDArray[np.float64]
    """[N, 2], NaN where the data have none"""
    margins: NDArray[np.float32]
    """[N], by how much the chosen answer is said to be better; NaN where the data do not say"""
    lines: NDArray[np.int64]
    """[N], the line that each came from"""
    files: NDArray[np.int32]
    """[N], index into ``paths``"""
    paths: tuple[str, ...]
    tally: Tally
    width: int
    identity: str
    """hash of all that decided the tokens"""
    starts: NDArray[np.int64]
    """[U + 1], where each document begins in ``tokens``"""

    def __len__(self) -> int:
        return len(self.lengths) // self.width

    def document(self, number: int) -> Document:
        start, end = int(self.starts[number]), int(self.starts[number + 1])
        return Document(self.tokens[start:end], self.trained[start:end])

    def place(self, example: int) -> tuple[str, int]:
        """(file, line) of an example."""
        return self.paths[self.files[example]], int(self.lines[example])


def encode_files(
    sets: Sequence[FileSet], encoder: Encoder, *, folder: Path, workers: int, keep: bool = True
) -> Examples:
    """The examples of all rows, from the cache where they are there. Bad rows are in the tally, not an error.

    Args:
        folder: of the cache; where it cannot be written, the tokens are kept in a temporary one and the log says so.
        keep: False: a temporary one from the beginning.
    Raises:
        DataError: a file cannot be read on, the template has no place for something in the data.
    """
    key = _key(sets, encoder)
    identity = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    paths = tuple(file.path for group in sets for file in group.files)
    target = folder / f"{identity}-examples"
    if (target / _DONE).is_file() and (found := _open(target, identity, paths)) is not None:
        return found
    with _writable(folder, identity) if keep else _temporary() as place:
        target = place / f"{identity}-examples"
        found = _open(target, identity, paths) if (target / _DONE).is_file() else None
        if found is None:
            _build(target, key, sets, encoder, workers)
            found = _open(target, identity, paths)
        assert found is not None
        return found


def _key(sets: Sequence[FileSet], encoder: Encoder) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "files": [[[file.sha256() for file in group.files], repr(group.layout)] for group in sets],
        "tokenizer": encoder.tokenizer.fingerprint,
        "eod": encoder.tokenizer.eod_id,
        "template": "" if isinstance(encoder.template, DataError) else encoder.template.fingerprint,
        "mask": encoder.mask,
        "task": encoder.task,
    }


@contextmanager
def _temporary() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        yield Path(folder)


@contextmanager
def _writable(folder: Path, name: str) -> Iterator[Path]:
    """The cache's folder with its lock held, or a temporary one; files that are mapped outlive its removal."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = file_lock(folder / f".{name}.lock")
        lock.__enter__()
    except OSError as error:
        log.warning("tokens cannot be cached in %s (%s); set data.cache_dir to a writable folder", folder, error)
        with _temporary() as temporary:
            yield temporary
        return
    try:
        yield folder
    finally:
        lock.__exit__(None, None, None)


# ---- build


def _build(target: Path, key: dict[str, Any], sets: Sequence[FileSet], encoder: Encoder, workers: int) -> None:
    parts = target / "parts"
    parts.mkdir(parents=True, exist_ok=True)
    per_part = PART_ROWS // CHUNK_ROWS
    try:
        done = _whole_parts(parts)
        chunks = islice(chunks_of(sets, CHUNK_ROWS), done * per_part, None)
        rows = done * PART_ROWS
        for number, part in enumerate(_parts(chunks, encoder, workers, per_part), start=done):
            _write_part(parts, number, part)
            rows += part.tally.rows
            log.info("%d rows are encoded", rows)
        _join(target, parts, key, sets, width=2 if encoder.task in ("dpo", "orpo", "reward") else 1)
    except PacelineError:
        # what was made so far may rest on data that must change: nothing half-written stays
        shutil.rmtree(target, ignore_errors=True)
        raise


def _parts(chunks: Iterator[Chunk], encoder: Encoder, workers: int, per_part: int) -> Iterator[EncodedRows]:
    first = list(islice(chunks, IN_PROCESS_ROWS // CHUNK_ROWS))
    rest = next(chunks, None)
    work = EncodeRows(encoder)
    if rest is None or workers <= 1:
        more = () if rest is None else (rest,)
        yield from _grouped(map(work, _chain(first, more, chunks)), per_part)
        return
    with WorkerPool(work, workers) as pool:
        yield from _grouped(pool.map_ordered(_chain(first, (rest,), chunks)), per_part)


def _chain(*parts: Iterable[Chunk]) -> Iterator[Chunk]:
    for part in parts:
        yield from part


def _grouped(made: Iterator[EncodedRows], per_part: int) -> Iterator[EncodedRows]:
    while group := list(islice(made, per_part)):
        whole = EncodedRows.empty()
        for piece in group:
            whole.extend(piece)
        yield whole


def _whole_parts(parts: Path) -> int:
    number = 0
    while (parts / f"{number:06d}.json").is_file():
        number += 1
    if number:
        log.info("going on with an interrupted build: %d rows are encoded", number * PART_ROWS)
    return number


def _write_part(parts: Path, number: int, part: EncodedRows) -> None:
    for name, array in part.arrays().items():
        store_array(parts / f"{number:06d}-{name}.npy", array)
    temporary = parts / f"{number:06d}.tmp"
    temporary.write_text(json.dumps(part.tally.as_json()))
    temporary.replace(parts / f"{number:06d}.json")


def _join(target: Path, parts: Path, key: dict[str, Any], sets: Sequence[FileSet], *, width: int) -> None:
    tally = Tally()
    count = 0
    while (parts / f"{count:06d}.json").is_file():
        tally.merge(Tally.from_json(json.loads((parts / f"{count:06d}.json").read_text())))
        count += 1
    for name in _ARRAYS:
        pieces = [np.load(parts / f"{number:06d}-{name}.npy", mmap_mode="r") for number in range(count)]
        _store_joined(target / f"{name}.npy", pieces)
    content = {
        "key": key,
        "paths": [file.path for group in sets for file in group.files],
        "tally": tally.as_json(),
        "width": width,
    }
    temporary = target / f"{_DONE}.tmp"
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(target / _DONE)
    shutil.rmtree(parts, ignore_errors=True)


def _store_joined(path: Path, pieces: Sequence[NDArray]) -> None:
    """Concatenates without holding all of it in memory."""
    if not pieces:
        store_array(path, EncodedRows.empty().arrays()[path.stem])
        return
    total = sum(len(piece) for piece in pieces)
    joined = (
        np.lib.format.open_memmap(path, mode="w+", dtype=pieces[0].dtype, shape=(total, *pieces[0].shape[1:]))
        if total
        else None
    )
    if joined is None:
        store_array(path, pieces[0])
        return
    place = 0
    for piece in pieces:
        joined[place : place + len(piece)] = piece
        place += len(piece)
    joined.flush()


def _open(target: Path, identity: str, paths: tuple[str, ...]) -> Examples | None:
    """``paths``: of the files today; they may have been moved since."""
    try:
        content = json.loads((target / _DONE).read_text())
        arrays = {name: np.load(target / f"{name}.npy", mmap_mode="r") for name in _ARRAYS}
        starts = np.concatenate(([0], np.cumsum(arrays["lengths"], dtype=np.int64)))
        if starts[-1] != len(arrays["tokens"]):
            raise ValueError(f"{len(arrays['tokens']):,} tokens, {starts[-1]:,} were promised")
        return Examples(
            **arrays,
            paths=paths,
            tally=Tally.from_json(content["tally"], moved=dict(zip(content["paths"], paths, strict=True))),
            width=content["width"],
            identity=identity,
            starts=starts,
        )
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        log.warning("%s is damaged (%s): building it again", target, error)
        shutil.rmtree(target, ignore_errors=True)
        return None
