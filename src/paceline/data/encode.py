"""What a worker does: reads a unit of raw text, encodes it in batches and leaves the tokens in a file of its own."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from paceline.data.atomic import unwritable
from paceline.data.dedup import NUM_HASHES, exact_hash, signature
from paceline.data.indexed import dtype_for_vocab
from paceline.data.pieces import Splitter, splitter_for
from paceline.data.readers import Document, Problem, ReadOptions, SliceReader, Unit
from paceline.data.tokenizer import SentencePieceTokenizer, Tokenizer
from paceline.errors import DataError

BATCH_CHARS = 1 << 18
"""Characters handed to the tokenizer at once: enough for its batched speed, small beside 1 GiB with many workers."""
BATCH_DOCUMENTS = 4096
LONG_CHARS = 1 << 20
"""Longer documents are encoded in pieces."""
LONGEST_STRETCH = 4_000_000
"""Characters without a place to cut; a longer stretch makes the document a problem. A tokenizer.json takes up to 1.8 GB
for this many (Chinese characters as bytes; 0.6 to 1 GB for Latin letters)."""
LONGEST_STRETCH_SENTENCEPIECE = 16_000_000
"""The same for SentencePiece: up to 1.3 GB."""


@dataclass(frozen=True, kw_only=True)
class EncodeOptions:
    read: ReadOptions
    append_eod: bool
    valid_share: float
    signatures: bool
    """compute what `Deduplicator` needs"""


@dataclass(kw_only=True)
class UnitResult:
    """One unit, encoded. Arrays have one entry for each document that is not empty."""

    tokens_path: str
    lengths: NDArray[np.int32]
    num_bytes: NDArray[np.int64]
    is_valid: NDArray[np.bool_]
    exact: NDArray[np.uint64]
    signatures: NDArray[np.uint32]
    num_empty: int
    problems: list[Problem]
    """with line numbers relative to their slice"""
    lines: list[int]
    """lines of each slice"""
    disk_bytes: int


@dataclass
class _Collected:
    """What is known of the documents of a unit so far."""

    lengths: list[NDArray] = field(default_factory=list)
    num_bytes: list[int] = field(default_factory=list)
    is_valid: list[bool] = field(default_factory=list)
    exact: list[int] = field(default_factory=list)
    signatures: list[NDArray] = field(default_factory=list)
    num_empty: int = 0


class UnitEncoder:
    """``encoder(number, unit) -> UnitResult``; lives in a worker process.

    Args:
        folder: where the tokens of each unit go, one file each.
    """

    def __init__(self, tokenizer: Tokenizer, options: EncodeOptions, folder: str) -> None:
        self.tokenizer = tokenizer
        self.options = options
        self.folder = folder
        self.dtype = dtype_for_vocab(tokenizer.vocab_size)
        self._splitter: Splitter | None = splitter_for(tokenizer)

    def __call__(self, task: tuple[int, Unit]) -> UnitResult:
        # a process per core is busy already: threads of the tokenizers library inside each would only get in the way.
        # The library (native code) reads this variable at each call; it is set for this worker alone
        os.putenv("TOKENIZERS_PARALLELISM", "false")
        number, unit = task
        path = Path(self.folder) / f"{number:08d}.bin"
        collected = _Collected()
        problems: list[Problem] = []
        lines: list[int] = []
        try:
            with path.open("wb") as file:
                batch = _Batch(self, collected, file)
                for part in unit:
                    reader = SliceReader(part, self.options.read)
                    for item in reader:
                        if isinstance(item, Problem):
                            problems.append(item)
                        elif (problem := self._without_cut(item, reader)) is not None:
                            problems.append(problem)
                        else:
                            batch.add(item)
                    lines.append(reader.num_lines)
                batch.flush()
        except OSError as error:
            raise unwritable(path, error) from error
        lengths = np.concatenate(collected.lengths) if collected.lengths else np.zeros(0)
        kept = lengths > 0
        return UnitResult(
            tokens_path=str(path),
            lengths=lengths[kept].astype(np.int32),
            num_bytes=np.array(collected.num_bytes, dtype=np.int64)[kept],
            is_valid=np.array(collected.is_valid, dtype=bool)[kept],
            exact=np.array(collected.exact, dtype=np.uint64)[kept]
            if self.options.signatures
            else np.zeros(0, np.uint64),
            signatures=self._stacked(collected)[kept] if self.options.signatures else np.zeros((0, 0), np.uint32),
            num_empty=collected.num_empty + int(np.sum(~kept)),
            problems=problems,
            lines=lines,
            disk_bytes=sum(part.disk_bytes for part in unit),
        )

    def _stacked(self, collected: _Collected) -> NDArray[np.uint32]:
        return np.stack(collected.signatures) if collected.signatures else np.zeros((0, NUM_HASHES), np.uint32)

    def encode(self, texts: list[str]) -> tuple[NDArray, NDArray[np.int64]]:
        """(ids of all texts, the end-of-document token after each if asked for; length of each text with it)."""
        arrays = self.tokenizer.encode_batch(texts)
        lengths = np.fromiter((len(array) for array in arrays), dtype=np.int64, count=len(arrays))
        ids = np.concatenate(arrays)
        if not self.options.append_eod:
            return self._checked(ids), lengths
        # a text that gives no token is an empty document and gets no end either
        ended = np.where(lengths > 0, lengths + 1, 0)
        out = np.empty(int(ended.sum()), dtype=np.int32)
        ends = np.cumsum(ended)[ended > 0] - 1
        inside = np.ones(len(out), dtype=bool)
        inside[ends] = False
        out[ends] = self.tokenizer.eod_id
        out[inside] = ids
        return self._checked(out), ended

    def _pieces(self, text: str) -> Iterator[str]:
        return iter((text,)) if self._splitter is None else self._splitter(text)

    def _without_cut(self, document: Document, reader: SliceReader) -> Problem | None:
        """The problem of a document with a piece that would take too much memory."""
        sentencepiece = isinstance(self.tokenizer, SentencePieceTokenizer)
        limit = LONGEST_STRETCH_SENTENCEPIECE if sentencepiece else LONGEST_STRETCH
        if len(document.text) <= limit:
            return None
        longest = max(map(len, self._pieces(document.text)))
        if longest <= limit:
            return None
        why = "this tokenizer gives none" if self._splitter is None else "no space between two Latin letters"
        detail = f"{longest:,} characters in a row ({why}); more than {limit:,} would take too much memory"
        return reader.problem(document.offset, "no place to cut", detail)

    def encode_long(self, text: str, file: BinaryIO) -> int:
        """Encodes a long text piece by piece straight into the file; returns its length in tokens."""
        length = 0
        for group in _groups(self._pieces(text)):
            ids = np.concatenate(self.tokenizer.encode_batch(group))
            file.write(self._checked(ids).data)
            length += len(ids)
        if self.options.append_eod and length:
            file.write(np.array([self.tokenizer.eod_id], dtype=self.dtype).data)
            length += 1
        return length

    def _checked(self, ids: NDArray) -> NDArray:
        if len(ids) and int(ids.max()) >= self.tokenizer.vocab_size:
            raise DataError(
                f"{self.tokenizer.name}: gave the id {int(ids.max())}, beyond its own vocabulary of "
                f"{self.tokenizer.vocab_size:,}",
                next_step="The tokenizer's file is inconsistent: export it again.",
            )
        return ids.astype(self.dtype)


def _groups(pieces: Iterable[str]) -> Iterator[list[str]]:
    """A few pieces at a time; one that is long already by itself."""
    group: list[str] = []
    chars = 0
    for piece in pieces:
        if group and chars + len(piece) > BATCH_CHARS:
            yield group
            group, chars = [], 0
        group.append(piece)
        chars += len(piece)
    if group:
        yield group


class _Batch:
    """Documents waiting to be encoded together."""

    def __init__(self, encoder: UnitEncoder, collected: _Collected, file: BinaryIO) -> None:
        self._encoder = encoder
        self._collected = collected
        self._file = file
        self._texts: list[str] = []
        self._chars = 0

    def add(self, document: Document) -> None:
        text, options, collected = document.text, self._encoder.options, self._collected
        if not text:
            collected.num_empty += 1
            return
        collected.num_bytes.append(document.num_bytes)
        collected.is_valid.append(bool(options.valid_share) and held_out(text, options.valid_share))
        if options.signatures:
            collected.exact.append(exact_hash(text))
            collected.signatures.append(signature(text))
        if len(text) > LONG_CHARS:
            self.flush()
            collected.lengths.append(np.array([self._encoder.encode_long(text, self._file)]))
            return
        self._texts.append(text)
        self._chars += len(text)
        if self._chars >= BATCH_CHARS or len(self._texts) >= BATCH_DOCUMENTS:
            self.flush()

    def flush(self) -> None:
        if not self._texts:
            return
        ids, lengths = self._encoder.encode(self._texts)
        self._file.write(ids.data)
        self._collected.lengths.append(lengths)
        self._texts, self._chars = [], 0


def held_out(text: str, share: float) -> bool:
    """Whether a document belongs to the held-out part: decided by a hash of its text, so the same in every build."""
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=b"held-out").digest()
    return int.from_bytes(digest, "little") < share * 2**64
