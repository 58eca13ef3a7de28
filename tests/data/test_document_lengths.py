"""Lengths of the documents that share rows: what attention sees, and what the FLOPs of a token count."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from paceline.data.document_lengths import document_lengths
from paceline.data.sources import SyntheticDataset
from tests.data.test_example_sets import build, chat, write


@pytest.mark.parametrize("packing", ["pack", "none", "buckets"])
def test_each_document_counts_and_what_fills_a_row_does_not(packing: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [chat("a" * (i % 30)) for i in range(40)])
    options: dict[str, Any] = {"train": path, "packing": packing, "batch": 4}
    whole = build(**options, samples=4000)
    # one epoch, all of it looked at
    data = build(**options, samples=int(4000 / whole.reports[0].epochs))
    found = document_lengths(data.train.source)
    assert found is not None and sum(found.counts.values()) == 40
    assert sum(length * count for length, count in found.counts.items()) == data.reports[0].tokens
    assert found.tokens == sum(len(data.train[i].tokens) for i in range(len(data.train)))
    lengths = Counter(map(len, (chat_tokens(i % 30) for i in range(40))))
    assert sorted(found.counts.values()) == sorted(lengths.values())


def chat_tokens(letters: int) -> str:
    return "a" * letters


def test_both_answers_of_a_pair_count(tmp_path: Path) -> None:
    pairs = [{"prompt": "?", "chosen": "yes", "rejected": "n"}] * 6
    found = document_lengths(
        build("dpo", train=write(tmp_path / "p.jsonl", pairs), samples=1, seq_len=512).train.source
    )
    assert found is not None and sorted(found.counts.values()) == [6, 6]


def test_rows_without_documents_have_none() -> None:
    assert document_lengths(SyntheticDataset(vocab_size=9, seq_len=8, num_samples=4, seed=0)) is None
