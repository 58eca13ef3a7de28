"""Where samples come from: a dataset on disk, or made-up tokens for benchmarks.

A source has a length and gives sample i as arrays. Which sample comes when is decided here and in `mixture`, from the
seed and the recipe alone; `loader` only deals samples out to ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.data.batch import IGNORE_INDEX
from paceline.data.gpt_index import GPTIndex
from paceline.data.indexed import IndexedDataset
from paceline.errors import DataError


class Sample(NamedTuple):
    """One row of a batch; T = seq_len."""

    tokens: NDArray[np.int64]
    """[T]"""
    labels: NDArray[np.int64]
    """[T], shifted; IGNORE_INDEX = no loss"""
    positions: NDArray[np.int64] | None = None
    """[T], when they start again at document ends"""
    documents: NDArray[np.int32] | None = None
    """[T], number of the document within the row"""
    fields: Mapping[str, NDArray] = MappingProxyType({})
    """[D] arrays: what a task's data say of each document (`Batch.fields`)"""


class SampleSource(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> Sample: ...


class GPTDataset:
    """Samples of ``seq_len`` tokens cut from a stream of shuffled documents.

    A sample takes one token more than ``seq_len``, so that every position has a label; neighbours in the stream share
    that token. A sample that the stream cannot fill is padded: token 0, no loss.

    Args:
        eod_id: the token that ends a document; None where the dataset has none.
        reset_at_document_ends: give ``positions`` and ``documents``, and no loss for predicting the first token of the
            next document. A document ends at an end-of-document token and where the index says so.
        eod_mask_loss: no loss where the *input* is the end-of-document token.
        vocab_size: ids outside are refused on reading.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        index: GPTIndex,
        *,
        seq_len: int,
        vocab_size: int | None = None,
        eod_id: int | None = None,
        reset_at_document_ends: bool = False,
        eod_mask_loss: bool = False,
    ) -> None:
        if eod_mask_loss and eod_id is None:
            raise DataError(
                f"{dataset.prefix}: data.eod_mask_loss needs to know the end-of-document token",
                evidence="The dataset has no .json description beside it and no tokenizer is named.",
                next_step="Set data.tokenizer.",
            )
        self.dataset = dataset
        self.index = index
        self.seq_len = seq_len
        self.vocab_size = vocab_size
        self.eod_id = eod_id
        self.reset_at_document_ends = reset_at_document_ends
        self.eod_mask_loss = eod_mask_loss

    def __len__(self) -> int:
        return len(self.index)

    def text(self, i: int) -> tuple[NDArray[np.int64], list[int]]:
        """Up to ``seq_len + 1`` tokens of sample i, and where in them a document of the index starts (0 not listed)."""
        row = int(self.index.shuffle_index[i])
        (first, begin), (last, end) = self.index.sample_index[row].tolist(), self.index.sample_index[row + 1].tolist()
        if first == last:
            sequence = int(self.index.document_index[first])
            return self.dataset.get(sequence, begin, end - begin + 1).astype(np.int64), []
        parts: list[NDArray] = []
        starts: list[int] = []
        filled = 0
        for place in range(first, last + 1):
            sequence = int(self.index.document_index[place])
            offset = begin if place == first else 0
            part = self.dataset.get(sequence, offset, end + 1 if place == last else None)
            if filled and len(part) and self._starts_document(sequence):
                starts.append(filled)
            filled += len(part)
            parts.append(part)
        return np.concatenate(parts).astype(np.int64), starts

    def __getitem__(self, i: int) -> Sample:
        text, starts = self.text(i)
        self._check_ids(text, i)
        tokens = np.zeros(self.seq_len, dtype=np.int64)
        labels = np.full(self.seq_len, IGNORE_INDEX, dtype=np.int64)
        tokens[: min(len(text), self.seq_len)] = text[: self.seq_len]
        labels[: len(text) - 1] = text[1:]
        if self.eod_mask_loss:
            labels[tokens == self.eod_id] = IGNORE_INDEX
        if not self.reset_at_document_ends:
            return Sample(tokens, labels)
        begins = np.zeros(self.seq_len + 1, dtype=bool)
        begins[starts] = True
        if self.eod_id is not None:
            begins[1 : len(text)] |= text[:-1] == self.eod_id
        labels[begins[1:]] = IGNORE_INDEX
        begins = begins[: self.seq_len]
        documents = np.cumsum(begins, dtype=np.int32)
        places = np.arange(self.seq_len, dtype=np.int64)
        positions = places - np.maximum.accumulate(np.where(begins, places, 0))
        return Sample(tokens, labels, positions, documents)

    def _starts_document(self, sequence: int) -> bool:
        starts = self.dataset.document_starts
        if len(starts) == len(self.dataset) + 1:
            return True
        return bool(starts[np.searchsorted(starts, sequence)] == sequence)

    def _check_ids(self, text: NDArray, i: int) -> None:
        if self.vocab_size is None or (int(text.max()) < self.vocab_size and int(text.min()) >= 0):
            return
        wrong = int(text.max()) if int(text.max()) >= self.vocab_size else int(text.min())
        raise DataError(
            f"{self.dataset.prefix}: sample {i} holds the token id {wrong}",
            evidence=f"model.vocab_size = {self.vocab_size:,}, so ids are 0..{self.vocab_size - 1:,}.",
            next_step="The dataset was made with another tokenizer: set model.vocab_size to that tokenizer's size, "
            "or build the dataset again.",
        )


class SyntheticDataset:
    """Made-up tokens for benchmarks and smoke tests: sample i depends on the seed and i alone.

    Tokens follow a short repeating pattern with noise, so that a loss falls and a bench does not read the disk.
    """

    def __init__(self, vocab_size: int, seq_len: int, seed: int, num_samples: int = 1 << 40) -> None:
        self.vocab_size = vocab_size
        self.seq_len = seq_len
        self.seed = seed
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, i: int) -> Sample:
        random = np.random.default_rng((self.seed, i))
        start, stride = random.integers(0, self.vocab_size, 2)
        text = (start + stride * np.arange(self.seq_len + 1, dtype=np.int64)) % self.vocab_size
        noise = random.random(self.seq_len + 1) < 0.1
        text[noise] = random.integers(0, self.vocab_size, int(noise.sum()))
        return Sample(text[:-1].copy(), text[1:].copy())
