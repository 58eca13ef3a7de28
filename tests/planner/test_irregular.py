"""Runs unlike their like, told from measurements alone."""

from __future__ import annotations

from paceline.planner.irregular import irregular
from paceline.planner.published import PublishedRun, read_run


def run(micro_batch: int, seconds: float, *, zero: int = 1, tp: int = 2) -> PublishedRun:
    row = {
        "id": f"nanotron-{micro_batch}-{zero}-{tp}-{seconds}", "model": "Llama-like 3B", "layers": "28",
        "hidden": "3072", "heads": "32", "ffn": "8192", "vocab": "131072", "seq": "4096", "gpu": "H100-80",
        "n_gpus": "16", "tp": str(tp), "pp": "2", "zero": str(zero), "mbs": str(micro_batch), "gbs": "256",
        "mem_GiB": "20", "step_time_s": str(seconds),
    }  # fmt: skip
    found = read_run(row)
    assert isinstance(found, PublishedRun), found
    return found


def test_far_slower_than_the_same_with_another_zero_stage() -> None:
    like, slow = [run(1, 10.0), run(1, 10.5, zero=0)], run(1, 50.0, zero=0)
    assert irregular([*like, slow]) == {slow.id}
    assert irregular(like) == set()


def test_far_slower_than_other_micro_batches_allow() -> None:
    """A quarter of the work is not three times as long; nor four times the work twelve times."""
    larger, smaller = run(4, 10.0), run(1, 150.0)
    assert irregular([larger, smaller]) == {smaller.id}
    assert irregular([run(1, 10.0), run(4, 50.0)]) == {run(4, 50.0).id}
    assert irregular([run(1, 10.0), run(4, 12.0)]) == set()


def test_another_layout_is_not_its_like() -> None:
    assert irregular([run(1, 10.0), run(1, 50.0, tp=4)]) == set()
