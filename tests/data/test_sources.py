from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paceline.data.batch import IGNORE_INDEX
from paceline.data.gpt_index import GPTIndex, build_index
from paceline.data.indexed import IndexedDataset
from paceline.data.indexed_writer import IndexedWriter
from paceline.data.sources import GPTDataset, SyntheticDataset
from paceline.errors import DataError


def corpus(prefix: Path) -> IndexedDataset:
    with IndexedWriter(prefix, vocab_size=1000) as writer:
        for d, length in enumerate([5, 3, 7, 2, 4]):
            writer.add_document([100 * (d + 1) + k for k in range(length)])
    return IndexedDataset(prefix)


def in_order(dataset: IndexedDataset, seq_len: int, **options: object) -> GPTDataset:
    """The documents one after the other, unshuffled."""
    from paceline.data.gpt_index import sample_index

    documents = np.arange(len(dataset), dtype=np.int32)
    count = -(-(dataset.num_tokens - 1) // seq_len)
    rows = sample_index(np.array(dataset.lengths), documents, seq_len, count, 1)
    index = GPTIndex(document_index=documents, sample_index=rows, shuffle_index=np.arange(count))
    return GPTDataset(dataset, index, seq_len=seq_len, **options)  # type: ignore[arg-type]


def test_padded_sample_of_example_d(tmp_path: Path) -> None:
    data = corpus(tmp_path / "c")
    index = build_index(data.lengths, np.arange(5), seq_len=6, num_samples=None, seed=1234, drop_last=False)
    dataset = GPTDataset(data, index, seq_len=6)
    sample = dataset[2]
    assert sample.tokens.tolist() == [306, 400, 401, 0, 0, 0]
    assert sample.labels.tolist() == [400, 401] + [IGNORE_INDEX] * 4
    assert dataset[3].tokens.tolist() == [500, 501, 502, 503, 100, 101]
    assert dataset[3].labels.tolist() == [501, 502, 503, 100, 101, 102]
    labels = [label for i in range(len(dataset)) for label in dataset[i].labels.tolist() if label != IGNORE_INDEX]
    assert len(labels) == data.num_tokens - 1 == len(set(labels))


def test_eod_masking_looks_at_inputs(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "e", vocab_size=10) as writer:
        for document in ([1, 2, 0], [3, 0], [4, 5, 0]):
            writer.add_document(document)
    dataset = in_order(IndexedDataset(tmp_path / "e"), 4, eod_id=0, eod_mask_loss=True)
    assert dataset[0].tokens.tolist() == [1, 2, 0, 3]
    assert dataset[0].labels.tolist() == [2, 0, IGNORE_INDEX, 0]  # the end itself is learned, what follows it is not
    assert dataset[0].positions is None and dataset[0].documents is None


@pytest.mark.parametrize("eod", [0, None])
def test_reset_at_document_ends(tmp_path: Path, eod: int | None) -> None:
    with IndexedWriter(tmp_path / "r", vocab_size=10) as writer:
        for document in ([1, 2, 0], [3, 0], [4, 5, 0]):
            writer.add_document(document)
    dataset = in_order(IndexedDataset(tmp_path / "r"), 7, eod_id=eod, reset_at_document_ends=True)
    sample = dataset[0]
    assert sample.tokens.tolist() == [1, 2, 0, 3, 0, 4, 5]
    assert sample.labels.tolist() == [2, 0, IGNORE_INDEX, 0, IGNORE_INDEX, 5, 0]
    assert sample.positions is not None and sample.positions.tolist() == [0, 1, 2, 0, 1, 0, 1]
    assert sample.documents is not None and sample.documents.tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert sample.documents.dtype == np.int32


def test_a_boundary_at_the_last_label_is_masked(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "r", vocab_size=10) as writer:
        for document in ([1, 2], [3, 4]):
            writer.add_document(document)
    sample = in_order(IndexedDataset(tmp_path / "r"), 2, reset_at_document_ends=True)[0]
    assert sample.tokens.tolist() == [1, 2] and sample.labels.tolist() == [2, IGNORE_INDEX]


def test_reset_within_one_sequence_and_not_between_sequences_of_a_document(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "a", vocab_size=10) as writer:
        writer.add_document([1, 0, 2, 3])
    sample = in_order(IndexedDataset(tmp_path / "a"), 3, eod_id=0, reset_at_document_ends=True)[0]
    assert sample.positions is not None and sample.positions.tolist() == [0, 1, 0]
    data = corpus(tmp_path / "c")
    data.document_starts = np.array([0, 2, 5])
    sample = in_order(data, 18, reset_at_document_ends=True)[0]
    assert sample.documents is not None and sample.documents.tolist() == [0] * 8 + [1] * 10


def test_ids_beyond_the_vocabulary(tmp_path: Path) -> None:
    dataset = in_order(corpus(tmp_path / "c"), 4, vocab_size=300)
    dataset[0]
    with pytest.raises(DataError, match="holds the token id 30"):
        [dataset[i] for i in range(len(dataset))]


def test_eod_mask_needs_the_token(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="eod_mask_loss"):
        in_order(corpus(tmp_path / "c"), 4, eod_mask_loss=True)


def test_synthetic_depends_on_seed_and_index_only() -> None:
    a, b = SyntheticDataset(50, 16, seed=1), SyntheticDataset(50, 16, seed=1)
    _ = a[3]
    assert (a[7].tokens == b[7].tokens).all() and (a[7].tokens[1:] == a[7].labels[:-1]).all()
    assert (a[7].tokens != a[8].tokens).any() and (a[7].tokens != SyntheticDataset(50, 16, seed=2)[7].tokens).any()
    assert a[0].tokens.dtype == np.int64 and int(max(a[i].tokens.max() for i in range(50))) < 50
