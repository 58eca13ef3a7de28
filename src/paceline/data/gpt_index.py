"""Which tokens is sample number i? Document, sample and shuffle index of one dataset.

A stream of documents (shuffled, repeated for as many epochs as needed) is cut into samples of ``seq_len`` tokens plus
the one label after them, and the samples are shuffled:

    shuffle_index[i]     -> j, the place of sample i in the stream
    sample_index[j]      -> (position in document_index, token offset) where sample j starts; row j+1: where it ends
    document_index[p]    -> sequence of the dataset

Two orders:

- ``megatron``: the same arrays as Megatron-LM, bit for bit (checked against the worked examples of the tests). One
  stream of random numbers serves all shuffles, and the number of epochs goes into the document shuffle, so the order
  **changes with the number of samples asked for** whenever the number of epochs or the separate-last-epoch decision
  changes.
- ``epoch``: each epoch is shuffled with its own seed, so a longer run begins with exactly the samples of a shorter one.

Everything is cumulative sums and binary searches over whole arrays; billions of samples are a matter of minutes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from paceline.errors import DataError

Order = Literal["megatron", "epoch"]

_BLOCK = 1 << 22  # rows of the sample index computed at a time


@dataclass(frozen=True, kw_only=True)
class GPTIndex:
    """The three arrays, possibly memory-mapped."""

    document_index: NDArray
    """int32 [epochs * documents] sequence ids"""
    sample_index: NDArray
    """int32 or int64 [samples + 1, 2]"""
    shuffle_index: NDArray
    """uint32 or int64 [samples]"""

    def __len__(self) -> int:
        return len(self.shuffle_index)


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """How often the documents are read, before anything is drawn."""

    tokens_per_epoch: int
    num_epochs: int
    separate_last_epoch: bool
    samples_before_last_epoch: int
    num_samples: int


def plan_epochs(
    tokens_per_epoch: int, *, seq_len: int, num_samples: int | None, extra: int = 1, drop_last: bool = True
) -> EpochPlan:
    """Megatron's arithmetic: epochs needed, whether the last is shuffled apart, how many samples result.

    ``extra`` = 1 takes one token more than ``seq_len`` for the last label. The last epoch is shuffled apart when less
    than 80 % of it is needed, so that the tokens of the earlier epochs are all seen before.
    """
    epochs = 1
    if num_samples is not None:
        epochs = max(1, -(-(num_samples * seq_len + extra) // tokens_per_epoch))
    before, separate = 0, False
    if epochs > 1:
        assert num_samples is not None
        before = ((epochs - 1) * tokens_per_epoch - extra) // seq_len
        last = num_samples - before
        per_epoch = (tokens_per_epoch - extra) // seq_len
        separate = last < int(0.80 * per_epoch)
    usable = epochs * tokens_per_epoch - extra
    # single precision on purpose: Megatron's count of partial samples is a float32 division
    count = usable // seq_len if drop_last else int(np.ceil(np.float32(usable) / np.float32(seq_len)))
    return EpochPlan(
        tokens_per_epoch=tokens_per_epoch,
        num_epochs=epochs,
        separate_last_epoch=separate,
        samples_before_last_epoch=before,
        num_samples=count,
    )


def build_index(
    lengths: NDArray,
    indices: NDArray,
    *,
    seq_len: int,
    num_samples: int | None,
    seed: int,
    order: Order = "megatron",
    extra: int = 1,
    drop_last: bool = True,
) -> GPTIndex:
    """The index over the sequences ``indices`` of a dataset with these sequence ``lengths``.

    Args:
        num_samples: a minimum; None = exactly one epoch.
        drop_last: without it, a last, shorter sample is kept (and padded on reading).
    Raises:
        DataError: there are fewer tokens than one sample takes.
    """
    assert seq_len > 1 and extra in (0, 1)
    lengths = np.ascontiguousarray(lengths, dtype=np.int32)  # the mapped array is unaligned
    indices = np.ascontiguousarray(indices, dtype=np.int32)
    tokens = int(np.sum(lengths[indices], dtype=np.int64))
    if drop_last and tokens < seq_len + extra:
        raise DataError(
            f"train.seq_len = {seq_len:,} is longer than the dataset, which has {tokens:,} tokens",
            evidence=f"One sample takes {seq_len + extra:,} tokens: the sequence and the label after it.",
            next_step="Use a shorter train.seq_len, or more text.",
        )
    if tokens < 1 + extra:
        raise DataError(
            f"the dataset has {tokens} tokens: nothing to predict",
            next_step="Use more text, or a split that leaves more documents here.",
        )
    if order == "epoch":
        return _epoch_index(lengths, indices, tokens, seq_len, num_samples, seed, extra, drop_last)
    plan = plan_epochs(tokens, seq_len=seq_len, num_samples=num_samples, extra=extra, drop_last=drop_last)
    random = np.random.RandomState(seed)
    document_index = _document_index(indices, plan, random)
    return GPTIndex(
        document_index=document_index,
        sample_index=sample_index(lengths, document_index, seq_len, plan.num_samples, extra),
        shuffle_index=_shuffle_index(plan, random),
    )


def _document_index(indices: NDArray, plan: EpochPlan, random: np.random.RandomState) -> NDArray:
    if not plan.separate_last_epoch:
        together = np.tile(indices, plan.num_epochs)
        random.shuffle(together)
        return together
    first = np.tile(indices, plan.num_epochs - 1)
    random.shuffle(first)
    last = indices.copy()
    random.shuffle(last)
    return np.concatenate((first, last))


def _shuffle_index(plan: EpochPlan, random: np.random.RandomState) -> NDArray:
    shuffled = np.arange(plan.num_samples, dtype=_shuffle_dtype(plan.num_samples))
    if not plan.separate_last_epoch:
        random.shuffle(shuffled)
    else:
        random.shuffle(shuffled[: plan.samples_before_last_epoch])
        random.shuffle(shuffled[plan.samples_before_last_epoch :])
    return shuffled


def _shuffle_dtype(num_samples: int) -> np.dtype:
    return np.dtype(np.int64 if num_samples >= np.iinfo(np.uint32).max - 1 else np.uint32)


def sample_index(lengths: NDArray, document_index: NDArray, seq_len: int, num_samples: int, extra: int) -> NDArray:
    """Where each sample starts: [num_samples + 1, 2] of (position in document_index, token offset).

    Row k says where sample k-1 ends. Its last token is number ``k * seq_len + extra - 1`` of the stream; it lies in the
    first document whose cumulative length exceeds that number. The next sample starts ``extra`` tokens before the end
    of this one, so samples overlap by one token. A row past the end of the stream stands at the end of the last
    document.
    """
    ends = np.cumsum(lengths[document_index], dtype=np.int64)
    largest = max(len(document_index), int(lengths.max()))
    dtype = np.int32 if largest <= np.iinfo(np.int32).max else np.int64
    rows = np.zeros((num_samples + 1, 2), dtype=dtype)
    for start in range(1, num_samples + 1, _BLOCK):
        k = np.arange(start, min(start + _BLOCK, num_samples + 1), dtype=np.int64)
        position = np.searchsorted(ends, k * seq_len + (extra - 1), side="right")
        past_end = position == len(ends)
        position[past_end] = len(ends) - 1
        length = lengths[document_index[position]]
        offset = k * seq_len - (ends[position] - length)
        offset[past_end] = length[past_end] - extra
        rows[start : start + len(k), 0] = position
        rows[start : start + len(k), 1] = offset
    return rows


def _epoch_index(
    lengths: NDArray,
    indices: NDArray,
    tokens: int,
    seq_len: int,
    num_samples: int | None,
    seed: int,
    extra: int,
    drop_last: bool,
) -> GPTIndex:
    """Each epoch has its own document shuffle; the samples that *start* in an epoch are shuffled among themselves.

    The last sample of an epoch runs on into the next, whose documents are therefore drawn too: what sample i is
    depends on the seed and the dataset only. One epoch alone (``num_samples`` None) ends with its last whole sample,
    or, without ``drop_last``, with a padded one.
    """
    if num_samples is None:
        count = -(-(tokens - extra) // seq_len)
        keep = (tokens - extra) // seq_len if drop_last else count
        documents = _shuffled(indices, seed, 0, _DOCUMENTS)
        rows = sample_index(lengths, documents, seq_len, keep, extra)
        # the shuffle is the one that a longer run draws; samples that one epoch cannot complete are left out of it
        shuffled = _shuffled(np.arange(-(-tokens // seq_len), dtype=_shuffle_dtype(count)), seed, 0, _SAMPLES)
        return GPTIndex(document_index=documents, sample_index=rows, shuffle_index=shuffled[shuffled < keep])
    epochs = -(-num_samples * seq_len // tokens)
    bounds = [-(-epoch * tokens // seq_len) for epoch in range(epochs + 1)]
    # one epoch more for the tail of the last sample; more than one only where an epoch is shorter than a sample
    spare = -(-(bounds[-1] * seq_len + extra - epochs * tokens) // tokens)
    document_index = np.concatenate([_shuffled(indices, seed, e, _DOCUMENTS) for e in range(epochs + max(spare, 0))])
    shuffled = np.concatenate(
        [
            _shuffled(np.arange(bounds[e], bounds[e + 1], dtype=_shuffle_dtype(bounds[-1])), seed, e, _SAMPLES)
            for e in range(epochs)
        ]
    )
    return GPTIndex(
        document_index=document_index,
        sample_index=sample_index(lengths, document_index, seq_len, bounds[-1], extra),
        shuffle_index=shuffled,
    )


_DOCUMENTS, _SAMPLES = 0, 1


def _shuffled(array: NDArray, seed: int, epoch: int, stream: int) -> NDArray:
    # RandomState, not Generator: numpy promises that its numbers never change
    shuffled = array.copy()
    np.random.RandomState(np.array([seed & 0xFFFFFFFF, epoch, stream], dtype=np.uint32)).shuffle(shuffled)
    return shuffled


def split_ranges(split: str, num_sequences: int) -> tuple[range, range, range]:
    """Train, valid and test range of sequences for ``"98,1,1"`` (missing numbers are 0; they need not sum to 100).

    Bounds are rounded half to even, as Megatron does.
    """
    try:
        parts = [float(part) for part in split.replace("/", ",").split(",") if part.strip()]
    except ValueError:
        parts = []
    if not 1 <= len(parts) <= 3 or min(parts) < 0 or not 0 < sum(parts) < math.inf:  # NaN fails this too
        raise DataError(
            f"data.split = {split!r} is not a split",
            evidence="It takes up to three finite non-negative numbers, train, valid and test.",
            next_step='Write for instance data.split = "98,1,1".',
        )
    parts += [0.0] * (3 - len(parts))
    total = sum(parts)
    bounds, upper = [0], 0.0
    for part in parts:
        upper += part / total
        bounds.append(round(upper * float(num_sequences)))
    train, valid, test = (range(bounds[i], bounds[i + 1]) for i in range(3))
    return train, valid, test
