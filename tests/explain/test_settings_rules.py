"""What settings cost a run: which gradients are counted."""

from __future__ import annotations

import pytest

from paceline.config.load import resolve
from paceline.explain.settings_rules import in_one_bucket


@pytest.mark.parametrize(("rank", "bucket_mb", "expected"), [(0, 8192, True), (0, 25, False), (8, 8192, False)])
def test_only_what_learns_has_gradients_in_buckets(rank: int, bucket_mb: int, expected: bool) -> None:
    """Adapters of rank 8 have 21 MB of gradients; all of a model of 1.2B has 4.9 GB."""
    lora = {"lora": {"rank": rank}} if rank else {}
    config = resolve(
        {
            "model": {"preset": "llama3_1b"},
            "train": {"seq_len": 256, "global_batch_size": 4},
            "parallel": {"bucket_mb": bucket_mb, "zero": 1},
            **lora,
        }
    ).config
    assert in_one_bucket(config) is expected
