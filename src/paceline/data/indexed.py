"""Reads tokenized documents from Megatron's ``.bin``/``.idx`` pair.

``PREFIX.bin`` is the concatenation of all tokens; ``PREFIX.idx`` says where each sequence lies (all little-endian):

    offset         bytes  content
    0              9      b"MMIDIDX\\0\\0"
    9              8      version = 1
    17             1      dtype code
    18             8      S = number of sequences
    26             8      D = number of documents + 1
    34             4*S    sequence lengths in tokens, int32
    34 + 4S        8*S    byte offset of each sequence in .bin, int64 (not aligned)
    34 + 12S       8*D    first sequence of each document, then S, int64

Everything is checked on opening, in blocks, so that a damaged pair fails here and by name, not days later in a step.
"""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
UINT16_VOCAB_LIMIT = 65500
"""Megatron writes uint16 below this vocabulary size, int32 from it on."""

_BLOCK = (
    1 << 20
)  # entries of the index checked at a time: bounds the memory of opening a file with billions of documents


_LISTED = 8  # names of datasets in a message


def dtype_for_vocab(vocab_size: int) -> np.dtype:
    """The dtype that Megatron's writer chooses for this vocabulary (added special tokens included)."""
    return np.dtype("<u2") if vocab_size < UINT16_VOCAB_LIMIT else np.dtype("<i4")


def bin_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.idx")


def dataset_prefix(path: str | Path) -> str:
    """The prefix of a dataset of which one of the files may be named instead."""
    text = str(path)
    return text[:-4] if text.endswith((".bin", ".idx")) else text


def datasets_in(folder: Path) -> list[str]:
    """Prefixes of the datasets in a folder."""
    return sorted(str(path.with_suffix("")) for path in folder.glob("*.idx")) if folder.is_dir() else []


def damaged(path: Path, what: str, why: str) -> DataError:
    return DataError(
        f"{path}: {what}",
        evidence=why,
        next_step="The file was cut short, changed or written by something else: build the dataset again "
        "(`paceline data build`) or copy it again, then check it with `paceline data verify`.",
    )


class IndexedDataset:
    """Sequences of tokens on disk, read through a memory map.

    Args:
        prefix: path; an ending ``.bin`` or ``.idx`` is left out.
    Raises:
        DataError: a file is missing, empty, truncated, foreign or inconsistent; the message names the file, the value
            and the reason.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = dataset_prefix(prefix)
        idx, bin_ = idx_path(self.prefix), bin_path(self.prefix)
        for path in (idx, bin_):
            if not path.is_file():
                raise _missing(self.prefix, path)
        try:
            size = idx.stat().st_size
            self._buffer: NDArray[np.uint8] = (
                np.memmap(idx, dtype=np.uint8, mode="r") if size else np.zeros(0, np.uint8)
            )
            self._bin_bytes = bin_.stat().st_size
        except OSError as error:
            raise unreadable(idx, error) from error
        self.dtype, num_sequences, num_entries = _read_header(idx, self._buffer)
        # the 64-bit arrays start at 34 + 4S, so they are unaligned views; numpy reads those correctly
        buffer, base = self._buffer.data, HEADER.size
        self.lengths: NDArray[np.int32] = np.frombuffer(buffer, "<i4", num_sequences, base)
        self.pointers: NDArray[np.int64] = np.frombuffer(buffer, "<i8", num_sequences, base + 4 * num_sequences)
        self.document_starts: NDArray[np.int64] = np.frombuffer(buffer, "<i8", num_entries, base + 12 * num_sequences)
        self.num_tokens = _check_pointers(idx, self.lengths, self.pointers, self.dtype.itemsize)
        _check_documents(idx, self.document_starts, num_sequences)
        expected = self.num_tokens * self.dtype.itemsize
        if expected != self._bin_bytes:
            word = "shorter" if self._bin_bytes < expected else "longer"
            raise damaged(
                bin_,
                f"{self._bin_bytes:,} bytes, {word} than the index says",
                f"{idx} describes {self.num_tokens:,} tokens of {self.dtype.itemsize} bytes = {expected:,} bytes.",
            )
        if not expected:
            raise DataError(
                f"{bin_}: holds no tokens",
                evidence=f"{num_sequences:,} sequences, all empty.",
                next_step="Build it again from files that hold text.",
            )
        self._tokens: NDArray = np.memmap(bin_, dtype=self.dtype, mode="r")

    def __len__(self) -> int:
        """Number of sequences, the unit of splitting and shuffling (one per document, unless written otherwise)."""
        return len(self.lengths)

    @property
    def num_documents(self) -> int:
        return len(self.document_starts) - 1

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> NDArray:
        """Tokens [offset, offset + length) of one sequence, in the dtype of the file (a view, not a copy)."""
        start = int(self.pointers[sequence]) // self.dtype.itemsize + offset
        if length is None:
            length = int(self.lengths[sequence]) - offset
        return self._tokens[start : start + length]

    def tokens_at(self, places: NDArray) -> NDArray:
        """The tokens at these places of the file."""
        return self._tokens[places]

    def blocks(self, tokens_per_block: int = 1 << 22) -> list[tuple[int, NDArray]]:
        """(position of the first token, tokens) over the whole file; views, so nothing is read until used."""
        starts = range(0, self.num_tokens, tokens_per_block)
        return [(start, self._tokens[start : start + tokens_per_block]) for start in starts]

    def fingerprint(self) -> str:
        """Hash of the index, independent of where the files lie. Above 64 MiB: of 64 blocks of it and its size.

        The order of samples depends on the lengths alone, so this identifies an order without reading the tokens.
        """
        digest = hashlib.sha256(str((len(self._buffer), self._bin_bytes)).encode())
        block = 1 << 20
        if len(self._buffer) <= 64 * block:
            digest.update(self._buffer.data)
        else:
            for start in np.linspace(0, len(self._buffer) - block, 64).astype(np.int64):
                digest.update(self._buffer[start : start + block].data)
        return digest.hexdigest()


def unreadable(path: Path, error: OSError) -> DataError:
    return DataError(
        f"{path}: cannot be read",
        evidence=str(error),
        next_step="Check the path, the permissions and the file system.",
    )


def _missing(prefix: str, path: Path) -> DataError:
    other = bin_path(prefix) if path == idx_path(prefix) else idx_path(prefix)
    build = "or build the dataset with `paceline data build`"
    if Path(prefix).is_dir() and not other.is_file():
        inside = datasets_in(Path(prefix))
        listed = ", ".join(inside[:_LISTED]) + (f" and {len(inside) - _LISTED} more" if len(inside) > _LISTED else "")
        return DataError(
            f"{prefix} is a folder, not a dataset",
            evidence=f"Datasets in it: {listed}." if inside else "There is no dataset (.bin and .idx) in it.",
            next_step=f"Name one of them, such as {inside[0]}." if inside else f"Name another path, {build}.",
        )
    evidence = (
        f"A dataset is a pair PREFIX.bin and PREFIX.idx; {other.name} is "
        f"{'there' if other.is_file() else 'missing too'}."
    )
    if not path.is_absolute():
        evidence += f" The path is relative to {Path.cwd()}."
    if neighbours := datasets_in(path.parent):
        evidence += f" In {path.parent} there are: {', '.join(Path(p).name for p in neighbours[:_LISTED])}."
    return DataError(
        f"{path}: no such file", evidence=evidence, next_step=f"Check the path (without .bin or .idx), {build}."
    )


def _read_header(path: Path, buffer: NDArray[np.uint8]) -> tuple[np.dtype, int, int]:
    """(dtype, number of sequences, length of the document index); checks the size of the file against them."""
    if len(buffer) < HEADER.size:
        raise damaged(
            path, f"{len(buffer)} bytes, too short for an index", f"The header alone takes {HEADER.size} bytes."
        )
    magic, version, code, num_sequences, num_entries = HEADER.unpack(buffer[: HEADER.size].tobytes())
    if magic != MAGIC:
        raise damaged(path, f"not a dataset index: it starts with {magic!r}", f"An index starts with {MAGIC!r}.")
    if version != VERSION:
        raise damaged(path, f"index version {version} is not known", f"This reads version {VERSION}.")
    if code not in DTYPES or DTYPES[code].kind not in "iu":
        known = ", ".join(f"{code} = {dtype.name}" for code, dtype in DTYPES.items() if dtype.kind in "iu")
        raise damaged(path, f"dtype code {code} cannot hold token ids", f"Known codes: {known}.")
    expected = HEADER.size + 12 * num_sequences + 8 * num_entries
    if len(buffer) == expected + num_sequences and num_sequences:
        raise DataError(
            f"{path}: a multimodal index (it has sequence modes)",
            evidence=f"{len(buffer):,} bytes = {expected:,} for text + {num_sequences:,} modes.",
            next_step="Only text datasets can be read: export the text part on its own.",
        )
    if len(buffer) != expected:
        raise damaged(
            path,
            f"{len(buffer):,} bytes where {expected:,} are expected",
            f"The header promises {num_sequences:,} sequences and {num_entries:,} document entries.",
        )
    if num_sequences == 0:
        raise DataError(f"{path}: holds no sequences", next_step="Build it again from files that hold text.")
    return DTYPES[code], num_sequences, num_entries


def _check_pointers(path: Path, lengths: NDArray, pointers: NDArray, itemsize: int) -> int:
    """Each sequence must start where the one before ends. Returns the number of tokens."""
    end = 0
    for start in range(0, len(lengths), _BLOCK):
        block = lengths[start : start + _BLOCK].astype(np.int64)
        if block.min() < 0:
            sequence = start + int(np.argmin(block))
            raise damaged(path, f"sequence {sequence} has the length {block.min()}", "Lengths are never negative.")
        ends = end + np.cumsum(block) * itemsize
        expected = np.concatenate(([end], ends[:-1]))
        wrong = np.flatnonzero(pointers[start : start + _BLOCK] != expected)
        if len(wrong):
            sequence = start + int(wrong[0])
            raise damaged(
                path,
                f"sequence {sequence} is said to start at byte {int(pointers[sequence]):,} of .bin",
                f"The sequences before it end at byte {int(expected[wrong[0]]):,}.",
            )
        end = int(ends[-1])
    return end // itemsize


def _check_documents(path: Path, starts: NDArray, num_sequences: int) -> None:
    if len(starts) == 0 or starts[0] != 0 or starts[-1] != num_sequences:
        seen = f"from {starts[0]} to {starts[-1]}" if len(starts) else "empty"
        raise damaged(path, f"the document index runs {seen}", f"It must run from 0 to {num_sequences}.")
    for begin in range(0, len(starts) - 1, _BLOCK):
        steps = np.diff(starts[begin : begin + _BLOCK + 1])
        if len(steps) and steps.min() < 0:
            document = begin + int(np.argmin(steps))
            raise damaged(path, f"document {document} ends before it starts", "The document index must not decrease.")
