"""Writes and merges Megatron's ``.bin``/``.idx`` pairs, byte for byte, in bounded memory.

Files are written under temporary names beside the target and renamed at the end: a crash or a full disk leaves either
the old dataset or none, never half of one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from paceline.data.atomic import refuse_folder, unwritable
from paceline.data.indexed import CODES, HEADER, MAGIC, VERSION, IndexedDataset, bin_path, dtype_for_vocab, idx_path
from paceline.errors import DataError

_BLOCK = 1 << 20


class IndexedWriter:
    """Writes documents one after the other; use it as a context manager.

    ``close()`` publishes the pair; leaving the block by an exception removes everything. The lengths are spooled to
    disk, so memory does not grow with the number of documents.

    Args:
        prefix: path without ``.bin``/``.idx``; its folder is made.
        vocab_size: chooses the dtype as Megatron does, and an id outside is refused with the document's number.
        dtype: instead of the vocabulary's.
    Raises:
        DataError: the folder is not writable, the disk is full, an id does not fit, nothing was written.
    """

    def __init__(self, prefix: str | Path, *, vocab_size: int | None = None, dtype: np.dtype | None = None) -> None:
        self.prefix = str(prefix)
        self.vocab_size = vocab_size
        self.dtype = np.dtype(dtype) if dtype is not None else dtype_for_vocab(vocab_size or 1 << 31)
        self.num_documents = 0
        self.num_tokens = 0
        self._num_sequences = 0
        self._one_sequence_each = True
        self._closed = False
        self._sealed = False
        base = Path(self.prefix)
        self._temporary = {kind: base.with_name(f".{base.name}.{os.getpid()}.{kind}.tmp") for kind in _KINDS}
        self._files: dict[str, BinaryIO] = {}
        try:
            base.parent.mkdir(parents=True, exist_ok=True)
            for kind in ("bin", "lengths", "documents"):
                self._files[kind] = self._temporary[kind].open("w+b")
        except OSError as error:
            self.abort()
            raise unwritable(self.prefix, error) from error

    def add_documents(self, tokens: NDArray, lengths: NDArray) -> None:
        """Appends documents of one sequence each: ``tokens`` is their concatenation, ``lengths`` cuts it."""
        self._check_ids(tokens, lengths)
        self._write("bin", np.ascontiguousarray(tokens, dtype=self.dtype))
        self._write_lengths(lengths)
        if not self._one_sequence_each:
            self._write("documents", np.arange(len(lengths), dtype="<i8") + self._num_sequences + 1)
        self.num_documents += len(lengths)
        self._num_sequences += len(lengths)
        self.num_tokens += len(tokens)

    def add_document(self, tokens: NDArray | Sequence[int]) -> None:
        array = np.asarray(tokens)
        self.add_documents(array, np.array([len(array)], dtype=np.int64))

    def append_file(self, path: str | Path, lengths: NDArray) -> None:
        """Appends documents whose tokens lie in ``path`` in this writer's dtype; ids are not checked again."""
        try:
            with Path(path).open("rb") as source:
                shutil.copyfileobj(source, self._files["bin"], 1 << 20)
        except OSError as error:
            raise unwritable(self.prefix, error) from error
        self._write_lengths(lengths)
        if not self._one_sequence_each:
            self._write("documents", np.arange(len(lengths), dtype="<i8") + self._num_sequences + 1)
        self.num_documents += len(lengths)
        self._num_sequences += len(lengths)
        self.num_tokens += int(np.sum(lengths, dtype=np.int64))

    def add_dataset(self, dataset: IndexedDataset) -> None:
        """Appends all of another dataset, its document boundaries included, converting to this writer's dtype."""
        if dataset.num_documents != len(dataset) and self._one_sequence_each:
            self._spell_out_documents()
        for _, block in dataset.blocks():
            self._write("bin", np.ascontiguousarray(block, dtype=self.dtype))
        for start in range(0, len(dataset), _BLOCK):
            self._write("lengths", dataset.lengths[start : start + _BLOCK])
        if not self._one_sequence_each:
            for start in range(1, len(dataset.document_starts), _BLOCK):
                self._write("documents", dataset.document_starts[start : start + _BLOCK] + self._num_sequences)
        self.num_documents += dataset.num_documents
        self._num_sequences += len(dataset)
        self.num_tokens += dataset.num_tokens

    def seal(self) -> None:
        """Writes the index, still under temporary names: what remains for `close` is two renames."""
        if not self.num_tokens:
            self.abort()
            raise DataError(
                f"{self.prefix}: there is nothing to write",
                evidence=f"{self.num_documents} documents, no tokens.",
                next_step="Check the inputs: are they empty, or was everything skipped?",
            )
        try:
            self._write_index()
            for kind in ("bin", "idx"):
                self._files[kind].flush()
                os.fsync(self._files[kind].fileno())
        except OSError as error:
            self.abort()
            raise unwritable(self.prefix, error) from error
        self._sealed = True

    def close(self) -> None:
        """Gives both files their names."""
        if self._closed:
            return
        if not self._sealed:
            self.seal()
        try:
            # an old index must never be seen with the new tokens
            idx_path(self.prefix).unlink(missing_ok=True)
            self._temporary["bin"].replace(bin_path(self.prefix))
            self._temporary["idx"].replace(idx_path(self.prefix))
        except OSError as error:
            self.abort()
            raise unwritable(self.prefix, error) from error
        self._remove_temporary()

    def abort(self) -> None:
        """Removes everything that was written so far."""
        self._remove_temporary()

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abort()

    def _check_ids(self, tokens: NDArray, lengths: NDArray) -> None:
        if not len(tokens):
            return
        limit = self.vocab_size if self.vocab_size is not None else int(np.iinfo(self.dtype).max) + 1
        if int(tokens.max()) < limit and int(tokens.min()) >= 0:
            return
        position = int(np.flatnonzero((tokens >= limit) | (tokens < 0))[0])
        document = self.num_documents + int(np.searchsorted(np.cumsum(lengths), position, side="right"))
        raise DataError(
            f"{self.prefix}: document {document} holds the token id {int(tokens[position])}",
            evidence=f"Ids must lie in 0..{limit - 1} (vocabulary of {limit:,}).",
            next_step="Check that the tokenizer and the vocabulary size belong together; added special tokens count.",
        )

    def _write_lengths(self, lengths: NDArray) -> None:
        if len(lengths) and int(np.max(lengths)) > np.iinfo(np.int32).max:
            raise DataError(
                f"{self.prefix}: a document of {int(np.max(lengths)):,} tokens is too long for the format",
                evidence=f"Lengths are 32-bit: at most {np.iinfo(np.int32).max:,} tokens.",
                next_step="Cut this document into several.",
            )
        self._write("lengths", np.ascontiguousarray(lengths, dtype="<i4"))

    def _write(self, kind: str, array: NDArray) -> None:
        try:
            self._files[kind].write(np.ascontiguousarray(array).data)
        except OSError as error:
            self.abort()
            raise unwritable(self.prefix, error) from error

    def _spell_out_documents(self) -> None:
        """From here on documents and sequences differ, so the document index is written, not implied."""
        self._one_sequence_each = False
        for start in range(0, self._num_sequences, _BLOCK):
            stop = min(start + _BLOCK, self._num_sequences)
            self._write("documents", np.arange(start + 1, stop + 1, dtype="<i8"))

    def _write_index(self) -> None:
        idx = self._files["idx"] = self._temporary["idx"].open("w+b")
        idx.write(HEADER.pack(MAGIC, VERSION, CODES[self.dtype], self._num_sequences, self.num_documents + 1))
        _copy(self._files["lengths"], idx)
        end = 0
        self._files["lengths"].seek(0)
        while block := self._files["lengths"].read(4 * _BLOCK):
            ends = end + np.cumsum(np.frombuffer(block, "<i4"), dtype=np.int64) * self.dtype.itemsize
            idx.write(np.concatenate(([end], ends[:-1])).astype("<i8").data)
            end = int(ends[-1])
        idx.write(np.zeros(1, "<i8").data)
        if self._one_sequence_each:
            for start in range(0, self.num_documents, _BLOCK):
                stop = min(start + _BLOCK, self.num_documents)
                idx.write(np.arange(start + 1, stop + 1, dtype="<i8").data)
        else:
            _copy(self._files["documents"], idx)

    def _remove_temporary(self) -> None:
        self._closed = True
        for kind, file in self._files.items():
            # closing flushes, which fails again on a full disk
            with suppress(OSError):
                file.close()
            self._temporary[kind].unlink(missing_ok=True)


_KINDS = ("bin", "idx", "lengths", "documents")


def _copy(source: BinaryIO, target: BinaryIO) -> None:
    source.seek(0)
    shutil.copyfileobj(source, target, 1 << 20)


def merge(prefixes: Sequence[str | Path], output: str | Path, *, widen: bool = False) -> IndexedDataset:
    """Concatenates datasets, document boundaries included, into ``output``.

    Args:
        widen: with different dtypes, write the one that holds all of them (uint16 + int32 -> int32). Otherwise they are
            refused, since different dtypes usually mean different tokenizers.
    """
    datasets = [IndexedDataset(prefix) for prefix in prefixes]
    if not datasets:
        raise DataError("nothing to merge", next_step="Name at least one dataset prefix.")
    if any(Path(d.prefix).resolve() == Path(output).resolve() for d in datasets):
        raise DataError(f"{output}: is one of the inputs", next_step="Choose another output path.")
    dtypes = {dataset.dtype for dataset in datasets}
    if len(dtypes) > 1 and not widen:
        raise DataError(
            "datasets of different dtypes: " + ", ".join(f"{d.prefix} is {d.dtype.name}" for d in datasets),
            evidence="Different dtypes usually mean different vocabularies.",
            next_step="Check that one tokenizer made them all; then merge with --widen.",
        )
    dtype = np.result_type(*dtypes).newbyteorder("<") if len(dtypes) > 1 else dtypes.pop()
    refuse_folder(output)
    with IndexedWriter(output, dtype=dtype) as writer:
        for dataset in datasets:
            writer.add_dataset(dataset)
    return IndexedDataset(output)
