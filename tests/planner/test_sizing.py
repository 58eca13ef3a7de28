"""Sizing finds the fewest GPUs that meet the deadline, and its steps add up."""

from __future__ import annotations

import pytest

from paceline.config.load import resolve
from paceline.costs.layers import training_flops_per_token
from paceline.planner.machines import find_gpu, make_cluster
from paceline.planner.sizing import _between, size, with_batch


def test_adapters_need_fewer_flops_and_fit_one_small_card() -> None:
    train = {"seq_len": 2048, "global_batch_size": 64}
    config = resolve({"model": {"preset": "llama2_7b"}, "train": train, "lora": {"rank": 16}}).config
    card = find_gpu("RTX 4090")
    found = size(config, lambda count: make_cluster(card, count)[0], tokens=1e7, days=3, reserve=0.1, gpus_per_node=1)
    # no product for the gradient of a frozen weight: two thirds, but for attention itself and the adapters
    whole = training_flops_per_token(config.model, 2048)
    assert 0.66 * whole < found.flops_per_token < 0.7 * whole
    assert found.chosen is not None and found.chosen.gpus == 1


def test_the_fewest_gpus_that_are_enough() -> None:
    config = resolve({"model": {"preset": "llama3_8b"}, "train": {"seq_len": 8192, "global_batch_size": 512}}).config
    card = find_gpu("H100-80")
    found = size(
        config,
        lambda count: make_cluster(card, count, gpus_per_node=min(8, count))[0],
        tokens=3e11,
        days=30,
        reserve=0.1,
        gpus_per_node=8,
    )
    assert found.chosen is not None
    assert found.days_of(found.chosen) <= 30
    # no whole node that divides well lies between it and the last that was too few
    below = max(count for count, one in found.tried if count < found.chosen.gpus)
    assert _between(below, found.chosen.gpus, 8) == []
    # the batch that was asked for, or one that is a good deal faster
    for count, one in found.tried:
        assert one is not None
        train, parallel = one.config.train, one.config.parallel
        assert train.global_batch_size % (train.micro_batch_size * parallel.dp_degree(count)) == 0
        assert count % 3 == 0 or train.global_batch_size == 512
    fewer = [one for count, one in found.tried if one is not None and count < found.chosen.gpus]
    assert fewer
    assert all(found.days_of(one) > 30 for one in fewer)
    # the four steps by hand: tokens x FLOPs / (time x reserve x what a GPU does)
    flops = training_flops_per_token(config.model, 8192) * 3e11
    by_hand = flops / (found.days_of(found.chosen) * 86400 * 0.9) / (found.chosen.estimate.tflops_per_gpu * 1e12)
    assert by_hand == pytest.approx(found.chosen.gpus, rel=1e-6)


def test_nodes_between_common_numbers_divide_well() -> None:
    assert _between(320, 384, 8) == [336, 352, 360]  # 42, 44, 45 nodes; 41, 43, 46, 47 have large primes
    assert _between(4, 8, 8) == []


@pytest.mark.parametrize(("batch", "gpus"), [(1024, 384), (512, 96), (100, 64), (8, 320), (1024, 7 * 64)])
def test_the_batch_is_made_to_fit(batch: int, gpus: int) -> None:
    config = resolve({"model": {"preset": "llama3_8b"}, "train": {"global_batch_size": batch}}).config
    made = with_batch(config, gpus).train.global_batch_size
    odd = gpus // (gpus & -gpus)
    assert made % odd == 0
    assert made >= odd
    assert abs(made - batch) <= max(0.5 * batch, odd)
