"""Rows of encoded examples: what a batch of post-training looks like.

A row holds whole examples; each of their documents has its own number and its own positions from 0, so attention sees
within documents alone. Labels are shifted here: ``labels[t]`` is token t + 1 of the same document where that token is
learned. What follows the last document is one more document, of tokens 0 without labels.

    sft                 documents 0, 1, ... are conversations
    dpo, orpo, reward   documents 2k and 2k + 1 are the chosen and the rejected answer of pair k, each with its prompt
    kto                 document 2k is example k, 2k + 1 its prompt with the answer of the next example of the row (the
                        first for the last; alone in a row, that of the next row)

Each epoch has every row once, in an order of its own that depends on the seed and the epoch alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from paceline.data.batch import IGNORE_INDEX
from paceline.data.documents import Document
from paceline.data.example_cache import Examples
from paceline.data.packing import Rows, one_each, pack
from paceline.data.sources import Sample

Packing = Literal["pack", "none", "buckets"]
PAIRED = ("dpo", "orpo", "reward")
BUCKETS = 8
"""Lengths of rows with `buckets`: multiples of a row's length over this."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """M examples that go into rows, and how much of each."""

    examples: Examples
    members: NDArray[np.int64]
    """[M], numbers of examples; one may come several times"""
    lengths: NDArray[np.int64]
    """[M, width], tokens that are kept of each document"""
    task: str

    @property
    def sizes(self) -> NDArray[np.int64]:
        """[M], tokens of a row that each example takes; with kto, its share of the mismatched answers too."""
        return self.lengths.sum(axis=1) * (2 if self.task == "kto" else 1)

    @property
    def documents_each(self) -> int:
        return 1 if self.task in ("sft", "pretrain") else 2

    def document(self, member: int, which: int = 0) -> Document:
        examples = self.examples
        whole = examples.document(int(self.members[member]) * examples.width + which)
        kept = int(self.lengths[member, which])
        return Document(whole.ids[:kept], whole.trained[:kept])


def select(examples: Examples, members: NDArray[np.int64], task: str) -> Selection:
    """All tokens of these examples."""
    lengths = np.asarray(examples.lengths, dtype=np.int64).reshape(-1, examples.width)[members]
    return Selection(examples=examples, members=members, lengths=lengths, task=task)


def lay_out(selection: Selection, seq_len: int, packing: Packing, seed: int) -> Rows:
    """Which examples share a row."""
    if packing == "pack":
        return pack(selection.sizes, seq_len, seed=seed)
    return one_each(len(selection.members))


def bucket_size(seq_len: int, multiple: int) -> int:
    """What lengths of sequences are multiples of with `buckets`: about an eighth, itself one of ``multiple``."""
    step = -(-seq_len // BUCKETS)
    return min(seq_len, -(-step // multiple) * multiple)


class ExampleRows:
    """A source of samples (`SampleSource`).

    Args:
        rows: over the members of the selection, none fuller than ``seq_len`` tokens.
        num_samples: how many are read, over as many epochs as that takes; None = each row once, in order.
        bucket_of: with buckets, the number of samples that share a length (a global batch); 0 = all rows have
            ``seq_len`` tokens.
        multiple: with buckets, what every length is a multiple of.
    """

    def __init__(
        self,
        selection: Selection,
        rows: Rows,
        *,
        seq_len: int,
        seed: int,
        num_samples: int | None,
        bucket_of: int = 0,
        multiple: int = 1,
    ) -> None:
        self.selection = selection
        self.rows = rows
        self.seq_len = seq_len
        self.seed = seed
        self.num_documents = rows.most * selection.documents_each + 1  # and the padding
        self.num_documents += self.num_documents % 2
        self._num_samples = num_samples
        self._bucket_of = bucket_of if num_samples is not None else 0
        self._bucket = bucket_size(seq_len, multiple)
        # threads of a loader ask for neighbours: two epochs at most
        self._order: Callable[[int], tuple[NDArray[np.int64], NDArray[np.int64]]] = lru_cache(2)(self._make_order)

    def __len__(self) -> int:
        return len(self.rows) if self._num_samples is None else self._num_samples

    @property
    def rows_an_epoch(self) -> int:
        """Samples until every row was read; with buckets the last batch is filled up with rows of the same epoch."""
        count, batch = len(self.rows), self._bucket_of
        return -(-count // batch) * batch if batch else count

    @property
    def tokens_an_epoch(self) -> int:
        """Tokens of those samples, padding included."""
        return int(self._order(0)[1].sum())

    def __getitem__(self, i: int) -> Sample:
        if self._num_samples is None:
            return self._sample(i, self.seq_len)
        epoch, place = divmod(i, self.rows_an_epoch)
        order, lengths = self._order(epoch)
        return self._sample(int(order[place]), int(lengths[place]))

    def _make_order(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(row, tokens of the sample) for each place of an epoch."""
        random = np.random.default_rng((self.seed, epoch))
        order = random.permutation(len(self.rows))
        if not self._bucket_of:
            return order, np.full(len(order), self.seq_len, dtype=np.int64)
        order = np.concatenate((order, np.resize(order, self.rows_an_epoch - len(order))))
        sizes = self.selection.sizes[self.rows.members[self.rows.starts[order]]]  # a row is one example here
        buckets = np.minimum(-(-sizes // self._bucket) * self._bucket, self.seq_len)
        by_length = np.argsort(buckets, kind="stable").reshape(-1, self._bucket_of)
        by_length = by_length[random.permutation(len(by_length))]
        lengths = np.repeat(buckets[by_length].max(axis=1), self._bucket_of)
        return order[by_length.ravel()], lengths

    def _sample(self, row: int, seq_len: int) -> Sample:
        documents = self._documents(row, seq_len)
        tokens = np.zeros(seq_len, dtype=np.int64)
        labels = np.full(seq_len, IGNORE_INDEX, dtype=np.int64)
        positions = np.empty(seq_len, dtype=np.int64)
        numbers = np.full(seq_len, len(documents), dtype=np.int32)
        sizes = np.zeros(self.num_documents, dtype=np.int64)
        place = 0
        for number, (ids, trained) in enumerate(documents):
            end = place + len(ids)
            tokens[place:end] = ids
            labels[place : end - 1] = np.where(trained[1:], ids[1:], IGNORE_INDEX)
            positions[place:end] = np.arange(len(ids))
            numbers[place:end] = number
            sizes[number] = len(ids)
            place = end
        positions[place:] = np.arange(seq_len - place)
        if place < seq_len:
            sizes[len(documents)] = seq_len - place
        return Sample(tokens, labels, positions, numbers, self._fields(row, sizes))

    def _documents(self, row: int, seq_len: int) -> list[Document]:
        members = self.rows.row(row).tolist()
        chosen = self.selection
        if chosen.task in PAIRED:
            return [chosen.document(member, which) for member in members for which in (0, 1)]
        if chosen.task != "kto":
            return [chosen.document(member) for member in members]
        examples = [chosen.document(member) for member in members]
        others = examples[1:] + examples[:1] if len(examples) > 1 else [self._other(row)]
        room = seq_len - sum(len(example.ids) for example in examples)
        return [
            document
            for example, other in zip(examples, others, strict=True)
            for document in (example, _mismatched(example, other, room if len(examples) == 1 else None))
        ]

    def _other(self, row: int) -> Document:
        """An example of the next row."""
        return self.selection.document(int(self.rows.row((row + 1) % len(self.rows))[0]))

    def _fields(self, row: int, sizes: NDArray[np.int64]) -> dict[str, NDArray]:
        chosen = self.selection
        if chosen.task in ("sft", "pretrain"):
            return {}
        members = chosen.members[self.rows.row(row)]
        fields: dict[str, NDArray] = {"lengths": sizes}
        count = len(members)
        if chosen.task == "kto":
            fields["desirable"] = desirable = np.full(self.num_documents, -1, dtype=np.int8)
            desirable[0 : 2 * count : 2] = chosen.examples.desirable[members]
        elif self._has_reference:
            fields["reference_logps"] = reference = np.zeros(self.num_documents, dtype=np.float32)
            reference[: 2 * count] = chosen.examples.reference_logps[members].ravel()
        if chosen.task == "reward" and self._has_margins:
            fields["margin"] = margins = np.zeros(self.num_documents, dtype=np.float32)
            margins[0 : 2 * count : 2] = chosen.examples.margins[members]
        return fields

    @property
    def _has_reference(self) -> bool:
        return _all_known(self.selection.examples.reference_logps)

    @property
    def _has_margins(self) -> bool:
        return _all_known(self.selection.examples.margins)


def _all_known(values: NDArray) -> bool:
    """The first value tells: `check_columns` has refused data where some have it and some not."""
    return len(values) > 0 and not bool(np.isnan(values[:1]).any())


def _mismatched(example: Document, other: Document, room: int | None) -> Document:
    """The prompt of one example with the answer of another, which is cut to ``room`` tokens for both."""
    start, answer = example.answer_start, other.answer_start
    ids = np.concatenate((example.ids[:start], other.ids[answer:]))[:room]
    trained = np.concatenate((example.trained[:start], other.trained[answer:]))[:room]
    return Document(ids, trained)
