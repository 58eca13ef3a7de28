"""Is a dataset whole, and what is in it?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.data.indexed import IndexedDataset, bin_path, damaged
from paceline.data.sidecar import Sidecar, read_sidecar, sidecar_path
from paceline.errors import DataError

PERCENTILES = (0, 1, 5, 25, 50, 75, 95, 99, 100)
_BLOCK = 1 << 22


@dataclass(frozen=True, kw_only=True)
class DatasetFacts:
    """What `verify` found, all of it read from the files."""

    prefix: str
    dtype: str
    documents: int
    sequences: int
    tokens: int
    largest_id: int
    vocab_size: int | None
    """that the ids were checked against; None = unknown"""
    sidecar: Sidecar | None


def verify(prefix: str | Path, *, vocab_size: int | None = None) -> DatasetFacts:
    """Reads all of a dataset: index, token file, every id, and its description if there is one.

    Args:
        vocab_size: what ids are checked against; without it, the vocabulary of the description.
    Raises:
        DataError: names the file, the value and the reason of the first thing that is wrong.
    """
    dataset = IndexedDataset(prefix)
    sidecar = read_sidecar(dataset.prefix)
    if sidecar is not None:
        _check_sidecar(dataset, sidecar)
    limit = vocab_size if vocab_size is not None else sidecar.vocab_size if sidecar else None
    largest = _check_ids(dataset, limit)
    if sidecar is not None and sidecar.eod_appended:
        _check_document_ends(dataset, sidecar.eod_id)
    return DatasetFacts(
        prefix=dataset.prefix,
        dtype=dataset.dtype.name,
        documents=dataset.num_documents,
        sequences=len(dataset),
        tokens=dataset.num_tokens,
        largest_id=largest,
        vocab_size=limit,
        sidecar=sidecar,
    )


def _check_sidecar(dataset: IndexedDataset, sidecar: Sidecar) -> None:
    for what, promised, found in (
        ("documents", sidecar.documents, dataset.num_documents),
        ("tokens", sidecar.tokens, dataset.num_tokens),
    ):
        if promised != found:
            raise damaged(
                sidecar_path(dataset.prefix),
                f"promises {promised:,} {what}, the dataset has {found:,}",
                "The description belongs to another build of this dataset.",
            )


def _check_ids(dataset: IndexedDataset, limit: int | None) -> int:
    """The largest id; refuses negative ones and ids at or above ``limit``."""
    largest = 0
    for start, block in dataset.blocks(_BLOCK):
        largest = max(largest, int(block.max()))
        if int(block.min()) >= 0 and (limit is None or largest < limit):
            continue
        wrong = start + int(np.flatnonzero((block < 0) | (block >= (limit or 1 << 62)))[0])
        sequence = _sequence_of(dataset, wrong)
        raise DataError(
            f"{bin_path(dataset.prefix)}: sequence {sequence} holds the token id {int(block[wrong - start])}",
            evidence=f"It is token {wrong:,} of the file; ids must lie in 0..{limit - 1 if limit else 'any'}.",
            next_step="Either the vocabulary size is not the one this dataset was made with, or the dtype in the "
            "index is wrong: build it again.",
        )
    return largest


def _sequence_of(dataset: IndexedDataset, token: int) -> int:
    return int(np.searchsorted(dataset.pointers, token * dataset.dtype.itemsize, side="right")) - 1


def _check_document_ends(dataset: IndexedDataset, eod_id: int) -> None:
    for start in range(0, dataset.num_documents, _BLOCK):
        last_sequences = dataset.document_starts[start + 1 : start + 1 + _BLOCK] - 1
        ends = dataset.pointers[last_sequences] // dataset.dtype.itemsize + dataset.lengths[last_sequences]
        missing = np.flatnonzero(dataset.tokens_at(ends - 1) != eod_id)
        if len(missing):
            raise damaged(
                bin_path(dataset.prefix),
                f"document {start + int(missing[0])} does not end with the end-of-document token {eod_id}",
                "Its description says that every document does.",
            )


@dataclass(frozen=True, kw_only=True)
class LengthReport:
    """Lengths of documents in tokens."""

    mean: float
    percentiles: dict[int, int]
    """percentile -> length; 0 is the shortest, 100 the longest"""


def document_lengths(dataset: IndexedDataset) -> NDArray[np.int64]:
    """Tokens of each document."""
    ends = np.concatenate(([0], np.cumsum(dataset.lengths, dtype=np.int64)))
    return np.diff(ends[dataset.document_starts])


def length_report(dataset: IndexedDataset) -> LengthReport:
    lengths = document_lengths(dataset)
    values = np.percentile(lengths, PERCENTILES, method="lower")
    return LengthReport(
        mean=float(lengths.mean()),
        percentiles={p: int(value) for p, value in zip(PERCENTILES, values, strict=True)},
    )


def document_tokens(dataset: IndexedDataset, document: int, limit: int) -> NDArray:
    """The first ``limit`` tokens of a document."""
    if not 0 <= document < dataset.num_documents:
        raise DataError(
            f"{dataset.prefix}: there is no document {document}",
            evidence=f"It has {dataset.num_documents:,}.",
            next_step=f"Choose one from 0 to {dataset.num_documents - 1}.",
        )
    first, after = dataset.document_starts[document : document + 2].tolist()
    parts = [dataset.get(sequence) for sequence in range(first, after)]
    return np.concatenate([part[:limit] for part in parts])[:limit] if parts else np.zeros(0, dataset.dtype)
