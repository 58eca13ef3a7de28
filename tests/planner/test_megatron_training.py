"""Optimizer, learning rate and seed of a Megatron-LM command line, in the recipe that is written of it."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.planner.megatron import read_megatron
from paceline.planner.megatron_flags import parse_flags
from paceline.planner.megatron_training import left_out, optim_fields

_LINE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
    "--vocab-size 1024 --micro-batch-size 1 --global-batch-size 8 --train-iters 1000 --lr 2e-4 --min-lr 2e-5 "
)


def test_what_the_flags_say_is_in_the_recipe() -> None:
    text = "--adam-beta1 0.8 --adam-beta2 0.98 --adam-eps 1e-5 --clip-grad 0.3 --seed 77 --weight-decay 0.2 "
    text += "--lr-decay-style cosine --lr-decay-iters 900 --lr-warmup-fraction 0.1"
    config = read_megatron(_LINE + text, gpus=1).config
    found = config.optim
    assert (found.betas, found.eps, found.grad_clip, found.weight_decay) == ((0.8, 0.98), 1e-5, 0.3, 0.2)
    # the warm-up is a part of Megatron's decay, and comes before ours
    assert (found.schedule, found.warmup_steps, found.decay_steps) == ("cosine", 90, 810)
    assert (config.run.seed, found.lr, found.min_lr) == (77, 2e-4, 2e-5)


def test_what_they_do_not_say_is_megatrons_default() -> None:
    found = read_megatron(_LINE, gpus=1).config.optim
    assert (found.betas, found.schedule, found.grad_clip, found.decay_steps) == ((0.9, 0.999), "linear", 1.0, 0)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("--lr-warmup-samples 80", {"warmup_steps": 10}),
        ("--lr-warmup-iters 7 --lr-decay-samples 800", {"warmup_steps": 7, "decay_steps": 93}),
        (
            "--lr-decay-style WSD --lr-wsd-decay-iters 50 --lr-wsd-decay-style minus_sqrt",
            {"schedule": "wsd", "decay_steps": 50, "decay_shape": "sqrt"},
        ),
        ("--lr-decay-style constant", {"schedule": "constant"}),
        ("--adam-beta2 high", {"betas": (0.9, 0.999)}),
    ],
)
def test_other_ways_to_say_it(text: str, wanted: dict[str, Any]) -> None:
    found = optim_fields(parse_flags(text.split()), 1000, 8)
    assert {name: found[name] for name in wanted} == wanted


def test_what_a_recipe_has_nothing_for_is_named() -> None:
    text = "--lr-decay-style inverse-square-root --adam-beta2 high --loss-scale 128 --save out --seed 3 --num-layers 2"
    assert left_out(parse_flags(text.split())) == (
        "--adam-beta2 high",
        "--loss-scale 128",
        "--lr-decay-style inverse-square-root",
    )
