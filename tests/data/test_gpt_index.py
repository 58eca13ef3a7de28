"""The worked examples of Megatron's index construction, and a plain reference for random cases."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.data.gpt_index import GPTIndex, build_index, plan_epochs, split_ranges
from paceline.errors import DataError

LENGTHS = np.array([5, 3, 7, 2, 4], dtype=np.int32)
ALL = np.arange(5, dtype=np.int32)


def text(index: GPTIndex, i: int, seq_len: int, pad: int = 65535) -> list[int]:
    """Sample i of the common corpus: token k of document d is 100 * (d + 1) + k."""
    j = int(index.shuffle_index[i])
    (first, begin), (last, end) = index.sample_index[j], index.sample_index[j + 1]
    tokens: list[int] = []
    for place in range(first, last + 1):
        d = int(index.document_index[place])
        start = begin if place == first else 0
        stop = end + 1 if place == last else LENGTHS[d]
        tokens += [100 * (d + 1) + k for k in range(start, stop)]
    return tokens + [pad] * (seq_len + 1 - len(tokens))


def check(index: GPTIndex, documents: list[int], samples: list[list[int]], shuffled: list[int]) -> None:
    assert index.document_index.dtype == np.int32 and index.document_index.tolist() == documents
    assert index.sample_index.dtype == np.int32 and index.sample_index.tolist() == samples
    assert index.shuffle_index.dtype == np.uint32 and index.shuffle_index.tolist() == shuffled


def test_a_one_epoch() -> None:
    index = build_index(LENGTHS, ALL, seq_len=4, num_samples=None, seed=1234)
    check(index, [4, 0, 1, 2, 3], [[0, 0], [1, 0], [1, 4], [3, 0], [3, 4], [4, 1]], [3, 2, 1, 0, 4])
    assert text(index, 0, 4) == [300, 301, 302, 303, 304]
    assert text(index, 1, 4) == [104, 200, 201, 202, 300]
    assert text(index, 4, 4) == [304, 305, 306, 400, 401]


def test_b_two_epochs_shuffled_together() -> None:
    index = build_index(LENGTHS, ALL, seq_len=4, num_samples=9, seed=1234)
    rows = [[0, 0], [0, 4], [1, 1], [1, 5], [2, 2], [3, 2], [4, 3], [6, 0], [7, 0], [7, 4], [9, 0]]
    check(index, [2, 2, 4, 1, 0, 3, 4, 0, 1, 3], rows, [7, 3, 5, 1, 4, 8, 0, 2, 6, 9])
    assert text(index, 9, 4) == [104, 200, 201, 202, 400]


def test_c_last_epoch_apart() -> None:
    index = build_index(LENGTHS, ALL, seq_len=4, num_samples=7, seed=1234)
    rows = [[0, 0], [1, 0], [1, 4], [3, 0], [3, 4], [4, 1], [6, 1], [6, 5], [7, 2], [8, 3], [9, 2]]
    check(index, [4, 0, 1, 2, 3, 3, 2, 1, 0, 4], rows, [2, 0, 4, 3, 1, 6, 9, 5, 7, 8])
    assert text(index, 7, 4) == [401, 400, 401, 300, 301]


def test_d_partial_last_sample() -> None:
    index = build_index(LENGTHS, ALL, seq_len=6, num_samples=None, seed=1234, drop_last=False)
    check(index, [4, 0, 1, 2, 3], [[0, 0], [1, 2], [3, 0], [3, 6], [4, 1]], [2, 1, 3, 0])
    assert text(index, 2, 6) == [306, 400, 401, 65535, 65535, 65535, 65535]


def test_e_subset() -> None:
    index = build_index(LENGTHS, ALL[1:], seq_len=3, num_samples=None, seed=7)
    check(index, [3, 2, 1, 4], [[0, 0], [1, 1], [1, 4], [2, 0], [3, 0], [3, 3]], [2, 1, 0, 4, 3])


def test_f_three_epochs() -> None:
    index = build_index(LENGTHS, ALL, seq_len=4, num_samples=12, seed=1234)
    rows = [[0, 0], [0, 4], [1, 1], [1, 5], [2, 2], [3, 2], [4, 3], [6, 0], [7, 0], [7, 4], [9, 0], [10, 2], [11, 1]]
    rows += [[12, 1], [13, 3], [14, 0]]
    documents = [2, 2, 4, 1, 0, 3, 4, 0, 1, 3, 0, 4, 3, 2, 1]
    check(index, documents, rows, [3, 9, 2, 1, 7, 5, 4, 0, 8, 6, 14, 11, 13, 10, 12])


def test_shuffle_vector() -> None:
    numbers = np.arange(10)
    np.random.RandomState(1234).shuffle(numbers)
    assert numbers.tolist() == [7, 2, 9, 1, 0, 8, 4, 5, 6, 3]


def test_partial_count_is_single_precision() -> None:
    plan = plan_epochs(16_777_218, seq_len=4, num_samples=None, drop_last=False)
    assert plan.num_samples == 4_194_304  # exactly it would be 4 194 305


def reference_rows(lengths: np.ndarray, documents: np.ndarray, seq_len: int, count: int, extra: int) -> list[list[int]]:
    """The construction step by step, as the format describes it."""
    rows, i, o = [[0, 0]], 0, 0
    for _ in range(count):
        need = seq_len + extra
        while True:
            rest = int(lengths[documents[i]]) - o
            need -= rest
            if need <= 0:
                o += rest + need - extra
                break
            if i == len(documents) - 1:
                o = int(lengths[documents[i]]) - extra
                break
            i, o = i + 1, 0
        rows.append([i, o])
    return rows


@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize("drop_last", [True, False])
def test_rows_equal_the_step_by_step_construction(extra: int, drop_last: bool) -> None:
    random = np.random.default_rng(5)
    for _ in range(150):
        lengths = random.integers(0, 9, random.integers(3, 20)).astype(np.int32)
        lengths[-1] += 9  # at least one sample
        seq_len = int(random.integers(2, 9))
        samples = None if random.random() < 0.3 else int(random.integers(1, 40))
        everything = np.arange(len(lengths))
        index = build_index(
            lengths, everything, seq_len=seq_len, num_samples=samples, seed=3, extra=extra, drop_last=drop_last
        )
        expected = reference_rows(lengths, index.document_index, seq_len, len(index), extra)
        assert index.sample_index.tolist() == expected


def test_epoch_order_does_not_depend_on_the_run_length() -> None:
    random = np.random.default_rng(1)
    for _ in range(30):
        lengths = random.integers(1, 12, 8).astype(np.int32)
        seq_len = int(random.integers(2, 12))
        if lengths.sum() < seq_len + 1:
            continue

        def samples(count: int | None, lengths: np.ndarray = lengths, seq_len: int = seq_len) -> list[list[tuple]]:
            index = build_index(lengths, np.arange(8), seq_len=seq_len, num_samples=count, seed=11, order="epoch")
            found = []
            for j in index.shuffle_index[:count]:
                (first, begin), (last, end) = index.sample_index[j], index.sample_index[j + 1]
                tokens = []
                for place in range(first, last + 1):
                    d = int(index.document_index[place])
                    stop = end + 1 if place == last else lengths[d]
                    tokens += [(d, k) for k in range(begin if place == first else 0, stop)]
                assert len(tokens) == seq_len + 1
                found.append(tokens)
            return found

        long = samples(60)
        assert len(long) == 60
        for count in (1, 5, 17, 59):
            assert samples(count) == long[:count]
        one_epoch = samples(None)
        assert len(one_epoch) == (lengths.sum() - 1) // seq_len
        first_epoch = long[: -(-int(lengths.sum()) // seq_len)]
        assert [s for s in first_epoch if s in one_epoch] == one_epoch


def test_every_token_once_in_an_epoch_of_native_order() -> None:
    lengths = np.array([7, 6, 7], dtype=np.int32)
    index = build_index(lengths, np.arange(3), seq_len=4, num_samples=10, seed=0, order="epoch")
    for epoch in (0, 1):
        assert sorted(index.shuffle_index[5 * epoch : 5 * epoch + 5].tolist()) == list(range(5 * epoch, 5 * epoch + 5))
        assert sorted(index.document_index[3 * epoch : 3 * epoch + 3].tolist()) == [0, 1, 2]


def test_sequence_longer_than_dataset() -> None:
    with pytest.raises(DataError, match=r"train.seq_len = 21 is longer than the dataset, which has 21 tokens"):
        build_index(LENGTHS, ALL, seq_len=21, num_samples=5, seed=0)
    build_index(LENGTHS, ALL, seq_len=20, num_samples=5, seed=0)


@pytest.mark.parametrize(
    ("split", "count", "expected"),
    [
        ("50,50,0", 5, ((0, 2), (2, 5), (5, 5))),
        ("99,1,0", 150, ((0, 148), (148, 150), (150, 150))),
        ("90,9,1", 7, ((0, 6), (6, 7), (7, 7))),
        ("1", 4, ((0, 4), (4, 4), (4, 4))),
    ],
)
def test_splits_round_half_to_even(split: str, count: int, expected: tuple) -> None:
    assert tuple((r.start, r.stop) for r in split_ranges(split, count)) == expected


@pytest.mark.parametrize("split", ["", "a,b", "0,0", "-1,2", "1,2,3,4", "nan,1,1", "1,nan", "inf,1,1", "1e308,1e308"])
def test_bad_splits(split: str) -> None:
    with pytest.raises(DataError, match="not a split"):
        split_ranges(split, 10)


def test_large_index_is_fast() -> None:
    lengths = np.random.RandomState(0).randint(1, 2000, 300_000).astype(np.int32)
    index = build_index(lengths, np.arange(len(lengths)), seq_len=128, num_samples=5_000_000, seed=1)
    assert len(index) >= 5_000_000
