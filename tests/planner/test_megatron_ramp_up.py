"""Batches that a Megatron-LM run passes while it ramps up must be dealt out like the last one."""

from __future__ import annotations

import pytest

from paceline.errors import ConfigError
from paceline.planner.machines import find_gpu, make_cluster
from paceline.planner.megatron import read_megatron
from paceline.planner.megatron_better import best_layout, same_layout
from paceline.planner.megatron_conflicts import conflicts
from paceline.planner.megatron_flags import parse_flags
from paceline.planner.megatron_ramp_up import FLAG, RampUp

FLAGS = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --max-position-embeddings 2048 "
    "--micro-batch-size 1 --global-batch-size 512 --bf16 --vocab-size 50000"
)


@pytest.mark.parametrize(("start", "increment"), [(16, 16), (1, 1), (500, 12), (64, 100), (0, 0), (512, 64), (90, 448)])
@pytest.mark.parametrize("portion", [8, 64, 256])
def test_what_is_made_to_fit_fits(start: int, increment: int, portion: int) -> None:
    ramp_up = RampUp(start=start, increment=increment, samples="1000")
    made = ramp_up.made_to_fit(portion, 512)
    if made is None:
        assert start > 512 - portion
        return
    assert made.fits(portion, 512)
    assert all(batch % portion == 0 for batch in range(made.start, 513, made.increment))
    assert made.start - start < max(portion, 1) or start == 0
    if ramp_up.fits(portion, 512):
        assert made == ramp_up


def test_one_that_cannot_be_dealt_out_is_refused_with_one_that_can() -> None:
    run = read_megatron(f"{FLAGS} --rampup-batch-size 16 16 300000", gpus=64)
    (found,) = [finding for finding in conflicts(run) if finding.severity == "error"]
    assert found.id == "megatron.ramp-up" and "--rampup-batch-size 64 64 300000" in found.next_step
    run = read_megatron(f"{FLAGS} --rampup-batch-size 64 64 300000", gpus=64)
    assert not [finding for finding in conflicts(run) if finding.severity == "error"]


def test_better_flags_start() -> None:
    """The best layout has more data parallelism than the one that the ramp-up was written for."""
    run = read_megatron(f"{FLAGS} --tensor-model-parallel-size 4 --rampup-batch-size 16 16 300000", gpus=64)
    cluster, _ = make_cluster(find_gpu("H100-80"), 64)
    best, same = best_layout(run, cluster), same_layout(run, cluster)
    assert best is not None and same.work.tp == 4
    for better in (best, same):
        ramp_up = RampUp.of(parse_flags(better.flags))
        assert ramp_up is not None
        work = better.work
        portion = work.micro_batch_size * work.dp(64) * (work.pp if work.stages_per_rank > 1 else 1)
        assert ramp_up.fits(portion, 512)
        assert (ramp_up.start != 16) == any(flag == f"--{FLAG}" for flag, _, _ in better.changes)


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ("heads 32", "heads 30", ("--num-attention-heads 30", "--kv-channels")),
        ("--bf16", "--bf16 --group-query-attention --num-query-groups 7", ("--num-query-groups 7",)),
    ],
)
def test_what_cannot_be_built_is_told_by_flags(before: str, after: str, named: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        read_megatron(FLAGS.replace(before, after), gpus=64)
    told = str(caught.value)
    assert all(name in told for name in named) and "num_" not in told and "head_dim" not in told
