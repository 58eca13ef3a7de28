from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest
import torch

from paceline.data.batch import IGNORE_INDEX
from paceline.data.loader import Loader
from paceline.data.sources import Sample, SyntheticDataset
from paceline.errors import ConfigError, DataError


class Numbers:
    """Sample i is full of i."""

    def __init__(self, size: int, fail_at: int = -1, seconds: float = 0.0) -> None:
        self.size, self.fail_at, self.seconds = size, fail_at, seconds

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> Sample:
        time.sleep(self.seconds)
        if i == self.fail_at:
            raise DataError(f"sample {i} is bad", next_step="repair it")
        return Sample(np.full(4, i), np.full(4, i + 1))


def loader(dataset: object, **options: object) -> Loader:
    defaults: dict = {
        "micro_batch_size": 2,
        "global_batch_size": 8,
        "dp_rank": 0,
        "dp_size": 1,
        "num_workers": 2,
        "prefetch": 3,
    }
    return Loader(dataset, **(defaults | options))  # type: ignore[arg-type]


def global_batches(mbs: int, dp: int, workers: int, steps: int, start: int = 0) -> list[list[int]]:
    ranks = [
        loader(Numbers(1000), micro_batch_size=mbs, dp_rank=r, dp_size=dp, num_workers=workers, start_sample=start)
        for r in range(dp)
    ]
    batches = []
    for _ in range(steps):
        ids = [
            i
            for _ in range(ranks[0].micro_batches_per_step)
            for rank in ranks
            for i in next(rank).tokens[:, 0].tolist()
        ]
        batches.append(ids)
    for rank in ranks:
        rank.close()
    return batches


def test_global_batches_do_not_depend_on_the_layout() -> None:
    expected = [list(range(8 * step, 8 * step + 8)) for step in range(5)]
    for mbs, dp, workers in [(2, 1, 0), (2, 1, 3), (1, 4, 1), (2, 2, 2), (4, 2, 0), (8, 1, 2)]:
        assert global_batches(mbs, dp, workers, 5) == expected
        assert global_batches(mbs, dp, workers, 2, start=24) == expected[3:]


def test_rank_takes_its_part_of_each_micro_step() -> None:
    with loader(Numbers(100), dp_rank=1, dp_size=2) as rank_1:
        assert [next(rank_1).tokens[:, 0].tolist() for _ in range(3)] == [[2, 3], [6, 7], [10, 11]]
        assert rank_1.state() == {"consumed_samples": 12}


def test_resume_in_the_second_epoch(tmp_path: object) -> None:
    """125 steps an epoch, saved at 200: the samples after it are those of the run that was not interrupted."""
    from pathlib import Path

    from paceline.data.gpt_index import build_index
    from paceline.data.indexed import IndexedDataset
    from paceline.data.indexed_writer import IndexedWriter
    from paceline.data.sources import GPTDataset

    prefix = Path(str(tmp_path)) / "d"
    with IndexedWriter(prefix, vocab_size=5000) as writer:
        for d in range(250):
            writer.add_document(np.arange(16) + 16 * d)
    data = IndexedDataset(prefix)
    for order in ("megatron", "epoch"):
        index = build_index(data.lengths, np.arange(250), seq_len=4, num_samples=2000, seed=3, order=order)  # type: ignore[arg-type]
        dataset = GPTDataset(data, index, seq_len=4)
        with loader(dataset) as whole:
            batches = [next(whole).tokens for _ in range(4 * 250)]
        assert whole.consumed_samples == 2000
        for dp, workers in [(1, 0), (2, 2), (4, 1)]:
            ranks = [
                loader(dataset, dp_rank=r, dp_size=dp, num_workers=workers, start_sample=200 * 8) for r in range(dp)
            ]
            seen = torch.cat([next(r).tokens for _ in range(50 * 4 // dp) for r in ranks])
            assert torch.equal(seen, torch.cat(batches[4 * 200 :]))
            for r in ranks:
                r.close()
        first, second = torch.cat(batches[: 4 * 125]), torch.cat(batches[4 * 125 :])
        assert not torch.equal(first, second)


def test_past_the_end_says_so() -> None:
    for workers in (0, 2):
        with loader(Numbers(16), num_workers=workers) as batches:
            assert len([next(batches) for _ in range(8)]) == 8
            with pytest.raises(DataError, match="has 16 samples and the run asks for sample 16"):
                next(batches)


def test_padding_at_the_end() -> None:
    for dp in (1, 2, 4):
        seen, counts = [], []
        for rank in range(dp):
            with loader(Numbers(11), dp_rank=rank, dp_size=dp, at_end="pad") as batches:
                own = list(batches)
            counts.append(len(own))
            for batch in own:
                for tokens, labels in zip(batch.tokens.tolist(), batch.labels.tolist(), strict=True):
                    if labels[0] != IGNORE_INDEX:
                        seen.append(tokens[0])
        assert sorted(seen) == list(range(11)) and set(counts) == {2 * 8 // (2 * dp)}


def test_an_error_in_a_thread_reaches_the_consumer() -> None:
    with loader(Numbers(100, fail_at=5)) as batches:
        next(batches), next(batches)
        with pytest.raises(DataError, match="sample 5 is bad"):
            next(batches)


def test_threads_end() -> None:
    before = threading.active_count()
    batches = loader(Numbers(100, seconds=0.001), num_workers=3)
    next(batches)
    assert threading.active_count() > before
    batches.close()
    assert threading.active_count() == before


def test_wait_is_measured() -> None:
    with loader(Numbers(100, seconds=0.02), num_workers=0) as slow:
        next(slow)
    assert 0.03 < slow.wait_seconds < 0.5
    with loader(Numbers(100), prefetch=4) as fast:
        next(fast)
        time.sleep(0.05)
        before = fast.wait_seconds
        next(fast)
    assert fast.wait_seconds - before < 0.02


def test_no_random_number_is_drawn() -> None:
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    with loader(SyntheticDataset(100, 8, seed=0)) as batches:
        next(batches)
    assert random.getstate() == states[0] and np.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])


def test_batch_shapes_and_count() -> None:
    with loader(SyntheticDataset(100, 8, seed=0)) as batches:
        batch = next(batches)
    assert batch.tokens.shape == batch.labels.shape == (2, 8) and batch.tokens.dtype == torch.int64
    assert batch.positions is None and int(batch.num_tokens()) == 16
    assert torch.equal(batch.to("cpu").labels, batch.labels)


def test_sizes_that_do_not_divide() -> None:
    with pytest.raises(ConfigError, match="= 256 is not a multiple") as caught:
        loader(Numbers(10), global_batch_size=256, micro_batch_size=2, dp_size=7)
    assert "252 and 266" in caught.value.next_step
    with pytest.raises(ConfigError, match="3 samples are consumed"):
        loader(Numbers(10), start_sample=3)
