"""Raw text to a tokenized dataset: read, encode in parallel, put together in document order.

    files -> units of about a megabyte -> workers (read, parse, encode in batches) -> one token file a unit
          -> this process appends them in unit order, drops duplicates, deals out train and held-out documents

The result depends on the inputs and the options only, not on the number of workers: units are joined in order, and
whether a document is held out is decided by its own text. Memory: a few batches a worker, plus 2.5 kB a document with
``dedup``.

Rules: an empty document (no text, or text without a token) is counted and skipped; a document of one token is kept;
what cannot be read is counted and listed in ``OUTPUT.skipped.jsonl`` (see `readers` for the kinds).
"""

from __future__ import annotations

import json
import shlex
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.data.atomic import refuse_folder, unwritable, write_text
from paceline.data.dedup import Deduplicator
from paceline.data.encode import EncodeOptions, UnitEncoder, UnitResult
from paceline.data.indexed import dataset_prefix
from paceline.data.indexed_writer import IndexedWriter
from paceline.data.json_lines import MISSING_KEY
from paceline.data.pool import WorkerPool
from paceline.data.readers import InputFile, Problem, ReadOptions, Unit, find_files, units
from paceline.data.sidecar import Sidecar, sidecar_path, write_sidecar
from paceline.data.tokenizer import Tokenizer
from paceline.errors import DataError

REPORTED_PROBLEMS = 10_000
"""Problems listed one by one; beyond that they are only counted."""


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    read: ReadOptions = field(default_factory=ReadOptions)
    glob: str = ""
    """which files of a folder to read; empty = known suffixes"""
    append_eod: bool = True
    strict: bool = False
    """stop at the first problem"""
    max_skipped_share: float = 0.05
    """refuse the result when a larger share of the documents could not be read"""
    valid_share: float = 0.0
    """share of the documents held out, in a second dataset"""
    dedup: bool = False
    workers: int = 1


@dataclass(frozen=True, kw_only=True)
class Progress:
    documents: int
    tokens: int
    bytes_done: int
    bytes_total: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, kw_only=True)
class BuildSummary:
    datasets: dict[str, Sidecar]
    """by prefix"""
    num_files: int
    num_empty: int
    num_exact_duplicates: int
    num_near_duplicates: int
    skipped: dict[str, int]
    """number of unreadable documents by kind of problem"""
    report: str
    """path of the list of problems, or empty"""
    seconds: float

    @property
    def documents(self) -> int:
        return sum(sidecar.documents for sidecar in self.datasets.values())

    @property
    def tokens(self) -> int:
        return sum(sidecar.tokens for sidecar in self.datasets.values())


@dataclass
class _Problems:
    """What was skipped, with absolute line numbers."""

    strict: bool
    counts: Counter[str] = field(default_factory=Counter)
    listed: list[Problem] = field(default_factory=list)
    text_keys: Counter[str] = field(default_factory=Counter)
    """in records without the wanted key: keys that have text"""
    lines_before: Counter[str] = field(default_factory=Counter)
    """lines of each file in earlier units"""

    def add(self, unit: Unit, result: UnitResult) -> None:
        for problem in result.problems:
            absolute = problem._replace(line=problem.line + self.lines_before[problem.path])
            if self.strict:
                raise DataError(
                    str(absolute),
                    evidence="With --strict the first unreadable document stops the build; nothing was written.",
                    next_step="Repair the file, or build without --strict to skip and count such documents.",
                )
            self.counts[problem.kind] += 1
            self.text_keys.update(problem.text_keys)
            if len(self.listed) < REPORTED_PROBLEMS:
                self.listed.append(absolute)
        for part, lines in zip(unit, result.lines, strict=True):
            self.lines_before[part.file.path] += lines

    def other_key(self) -> str:
        """What to do when the wanted key is missing from most records."""
        if not self.text_keys:
            return "No other key holds text. " + _REPAIR
        others = [f"--json-key {shlex.quote(key)}" for key, _ in self.text_keys.most_common(4)]
        return f"Keys with text in these records: try {' or '.join(others)}. " + (
            "Files with different keys need a build each; `paceline data merge` joins them."
        )

    def write(self, path: Path) -> str:
        """Writes the list and returns its path; without problems removes an old list and returns ""."""
        if not self.listed:
            path.unlink(missing_ok=True)
            return ""
        write_text(path, "".join(json.dumps(_as_record(problem)) + "\n" for problem in self.listed))
        return str(path)


def _as_record(problem: Problem) -> dict[str, object]:
    return {
        "file": problem.path,
        "line": problem.line,
        "byte_offset": problem.offset,
        "reason": problem.kind,
        "detail": problem.detail,
    }


def build_dataset(
    inputs: Sequence[str | Path],
    output: str | Path,
    *,
    tokenizer: Tokenizer,
    options: PrepareOptions,
    progress: Callable[[Progress], None] | None = None,
) -> BuildSummary:
    """Builds ``output``.bin, .idx and .json; with ``valid_share``, ``output``-train and ``output``-valid instead.

    Args:
        progress: called after each unit, in this process.
    Raises:
        DataError: nothing to read, a damaged file, too many unreadable documents (any, with ``strict``), an unwritable
            or full disk, a dead worker. Nothing half-written is left.
    """
    began = time.perf_counter()
    if not 0 <= options.valid_share < 1:
        raise DataError(
            f"a held-out share of {options.valid_share} is not possible", next_step="Choose one from 0 to below 1."
        )
    refuse_folder(output)
    files = find_files(inputs, options.glob)
    total = sum(file.size for file in files)
    base = Path(dataset_prefix(output))
    prefixes = [f"{base}-train", f"{base}-valid"] if options.valid_share else [str(base)]
    folder = _temporary_folder(base)
    encode = EncodeOptions(
        read=options.read,
        append_eod=options.append_eod,
        valid_share=options.valid_share,
        signatures=options.dedup,
    )
    try:
        with ExitStack() as stack:
            encoder = UnitEncoder(tokenizer, encode, str(folder))
            pool: WorkerPool[tuple[int, Unit], UnitResult] = stack.enter_context(
                WorkerPool(encoder, max(1, min(options.workers, -(-total // _SMALLEST_UNIT))))
            )
            writers = [
                stack.enter_context(IndexedWriter(prefix, vocab_size=tokenizer.vocab_size)) for prefix in prefixes
            ]
            assembler = _Assembler(writers, Deduplicator() if options.dedup else None, options)
            todo: dict[int, Unit] = {}
            tasks = _numbered(units(files, options.read, _unit_bytes(total, options.workers)), todo)
            for number, result in enumerate(pool.map_ordered(tasks)):
                assembler.add(todo.pop(number), result)
                if progress is not None:
                    progress(assembler.progress(total, time.perf_counter() - began))
            report = assembler.problems.write(Path(f"{base}.skipped.jsonl"))
            assembler.check(report)
            for writer in writers:
                writer.seal()  # all of what may fail, before the first file gets its name
            for prefix in prefixes:
                sidecar_path(prefix).unlink(missing_ok=True)  # an old description must not meet new tokens
        return _finish(assembler, prefixes, tokenizer, options, files, report, time.perf_counter() - began)
    except OSError as error:
        raise unwritable(output, error) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


_SMALLEST_UNIT, _LARGEST_UNIT = 1 << 18, 1 << 22


def _unit_bytes(total: int, workers: int) -> int:
    """Small enough that the workers end together, large enough that a unit costs little beside its text."""
    return min(max(total // (32 * workers), _SMALLEST_UNIT), _LARGEST_UNIT)


def _temporary_folder(base: Path) -> Path:
    try:
        base.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f".{base.name}.units.", dir=base.parent))
    except OSError as error:
        raise unwritable(base, error) from error


def _numbered(source: Iterable[Unit], todo: dict[int, Unit]) -> Iterator[tuple[int, Unit]]:
    """Numbers the units and remembers them, without their content, until their results come back."""
    for number, unit in enumerate(source):
        todo[number] = tuple(replace(part, content=None) for part in unit)
        yield number, unit


class _Assembler:
    """Joins the units in order."""

    def __init__(self, writers: list[IndexedWriter], dedup: Deduplicator | None, options: PrepareOptions) -> None:
        self.writers = writers
        self.dedup = dedup
        self.problems = _Problems(options.strict)
        self.options = options
        self.text_bytes = [0] * len(writers)
        self.num_empty = 0
        self.num_read = 0
        self.bytes_done = 0

    def add(self, unit: Unit, result: UnitResult) -> None:
        self.problems.add(unit, result)
        self.num_empty += result.num_empty
        self.num_read += len(result.lengths)
        self.bytes_done += result.disk_bytes
        target = result.is_valid.astype(np.int8)
        if self.dedup is not None and len(result.lengths):
            target[~self.dedup.keep(result.exact, result.signatures)] = _DROPPED
        self._write(result, target)
        Path(result.tokens_path).unlink()

    def _write(self, result: UnitResult, target: NDArray[np.int8]) -> None:
        if not len(target):
            return
        for number, writer in enumerate(self.writers):
            chosen = target == number
            self.text_bytes[number] += int(result.num_bytes[chosen].sum())
            if chosen.all():
                writer.append_file(result.tokens_path, result.lengths)
            elif chosen.any():
                tokens = np.fromfile(result.tokens_path, dtype=writer.dtype)
                writer.add_documents(tokens[np.repeat(chosen, result.lengths)], result.lengths[chosen])

    def progress(self, total: int, seconds: float) -> Progress:
        return Progress(
            documents=sum(writer.num_documents for writer in self.writers),
            tokens=sum(writer.num_tokens for writer in self.writers),
            bytes_done=self.bytes_done,
            bytes_total=total,
            seconds=seconds,
        )

    def check(self, report: str) -> None:
        """Refuses a result of which too much was skipped, or a held-out part without documents."""
        skipped = self.problems.counts.total()
        share = skipped / max(1, skipped + self.num_read + self.num_empty)
        if share > self.options.max_skipped_share:
            counts = self.problems.counts.most_common()
            kinds = ", ".join(f"{count:,} {kind}" for kind, count in counts)
            first = f" The first: {self.problems.listed[0]}." if self.problems.listed else ""
            raise DataError(
                f"{skipped:,} document{'' if skipped == 1 else 's'} ({share:.1%}) could not be read, more than "
                f"--max-skipped-share {self.options.max_skipped_share:.1%}",
                evidence=f"{kinds}.{first} All are listed in {report}; no dataset was written.",
                next_step=self.problems.other_key() if counts[0][0] == MISSING_KEY else _REPAIR,
            )
        if len(self.writers) == 2 and not all(writer.num_tokens for writer in self.writers):
            side = "held out" if not self.writers[1].num_tokens else "left for training"
            raise DataError(
                f"of {self.num_read:,} documents none is {side} with --valid-share {self.options.valid_share}",
                evidence="Documents are held out whole, by a hash of their text.",
                next_step="Choose another share, or split into more documents (--split-lines for text files).",
            )


_DROPPED = -1
_REPAIR = "Repair the inputs, or allow a larger share."


def _finish(
    assembler: _Assembler,
    prefixes: list[str],
    tokenizer: Tokenizer,
    options: PrepareOptions,
    files: list[InputFile],
    report: str,
    seconds: float,
) -> BuildSummary:
    datasets = {}
    for prefix, writer, text_bytes in zip(prefixes, assembler.writers, assembler.text_bytes, strict=True):
        datasets[prefix] = Sidecar(
            tokenizer=tokenizer.name if tokenizer.name == "byte" else str(Path(tokenizer.name).resolve()),
            tokenizer_fingerprint=tokenizer.fingerprint,
            vocab_size=tokenizer.vocab_size,
            eod_id=tokenizer.eod_id,
            eod_appended=options.append_eod,
            documents=writer.num_documents,
            tokens=writer.num_tokens,
            text_bytes=text_bytes,
        )
        write_sidecar(prefix, datasets[prefix])
    return BuildSummary(
        datasets=datasets,
        num_files=len(files),
        num_empty=assembler.num_empty,
        num_exact_duplicates=assembler.dedup.num_exact if assembler.dedup else 0,
        num_near_duplicates=assembler.dedup.num_near if assembler.dedup else 0,
        skipped=dict(assembler.problems.counts),
        report=report,
        seconds=seconds,
    )
