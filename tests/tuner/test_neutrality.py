"""Every setting that a trial may change has its class, and losses that do not fit the class are noticed."""

from __future__ import annotations

import pytest

from paceline.config.load import load_recipe, resolve
from paceline.config.run import RunConfig
from paceline.tuner.neutrality import CLASSES, Neutrality, by_setting, loss_apart, worst
from paceline.tuner.settings import STRUCTURE, SWITCHES, TUNABLE
from paceline.tuner.space import with_changes

BASE = load_recipe("recipes/ladder/naive.toml", ["train.global_batch_size=4"]).config


def kind(changes: dict[str, object], base: RunConfig = BASE, ranks: int = 2) -> Neutrality:
    return worst(by_setting(base, with_changes(base, changes), ranks).values())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"parallel.recompute": "none"}, "bits"),
        ({"train.gc_interval": 1000}, "bits"),
        ({"train.attention_kernel": "auto"}, "rounding"),
        ({"train.loss_kernel": "chunked"}, "rounding"),
        ({"parallel.compile": True}, "rounding"),
        ({"parallel.tp": 2, "parallel.zero": 1}, "rounding"),
        ({"train.micro_batch_size": 2}, "rounding"),
        ({"optim.fused_update": True}, "rounding"),
        ({"parallel.zero": 1, "parallel.fused_weight_gradients": True}, "rounding"),
        ({"parallel.reduce_dtype": "bf16"}, "precision"),
        ({"parallel.zero": 1, "parallel.accumulate_dtype": "bf16"}, "precision"),
        ({"train.precision": "fp8"}, "precision"),
        ({"train.precision": "fp8", "parallel.recompute": "none"}, "precision"),
        ({"train.precision": "fp32"}, "rounding"),
        ({"parallel.expert_dispatch": "all_gather"}, "precision"),
    ],
)
def test_classes(changes: dict[str, object], expected: Neutrality) -> None:
    assert kind(changes) == expected


def test_sums_that_become_narrower_are_told_whatever_brings_them() -> None:
    """FSDP sums over micro-batches in the precision of its reduction, the flat engine in its own."""
    flat = with_changes(BASE, {"parallel.zero": 1, "parallel.reduce_dtype": "bf16"})
    assert by_setting(flat, with_changes(flat, {"parallel.zero": 3}), 2) == {"parallel.zero": "precision"}
    one = with_changes(flat, {"train.micro_batch_size": 2})
    assert kind({"parallel.zero": 3}, one) == "rounding", "one micro-batch a step is not summed up"
    sharded = with_changes(one, {"parallel.zero": 3})
    assert kind({"train.micro_batch_size": 1}, sharded) == "precision", "two are, in bf16"
    assert kind({"parallel.zero": 1}, with_changes(flat, {"parallel.zero": 3})) == "rounding", "wider sums"


def test_fsdp_rounds_a_router() -> None:
    experts = load_recipe("recipes/qwen3_moe_12l.toml", ["parallel.zero=1"]).config
    assert kind({"parallel.zero": 3}, experts) == "precision"


def test_dropout_draws_anew_in_another_layout() -> None:
    model = BASE.model.model_copy(update={"dropout": 0.1})
    base = BASE.model_copy(update={"model": model})
    assert kind({"train.micro_batch_size": 2}, base) == "chance"
    assert kind({"parallel.recompute": "none"}, base) == "bits"


def test_nothing_that_changes_the_training_may_be_tuned() -> None:
    """Model, data, length, optimizer and seed are out of reach; of [optim] the kernel alone is not."""
    for key in TUNABLE:
        assert key.split(".")[0] in ("train", "parallel", "optim"), key
    assert {key for key in TUNABLE if key.startswith("optim.")} == {"optim.fused_update"}
    assert kind({"train.global_batch_size": 8}) == "batch"
    never = {"train.seq_len", "train.steps", "train.on_nonfinite", "train.max_skipped_steps"}
    assert not never & TUNABLE
    assert {setting.key for setting in SWITCHES} | set(STRUCTURE) <= TUNABLE


def test_every_switch_has_a_class_and_what_narrows_is_of_the_last() -> None:
    base = resolve({"model": {"preset": "llama3_8b"}}, ["train.precision=fp32", "train.fp8_scaling=rowwise"]).config
    for setting in SWITCHES:
        for value in setting.values:
            found = by_setting(base, with_changes(base, {setting.key: value, "train.precision": "fp8"}), 2)
            assert set(found.values()) <= set(CLASSES)
            narrows = value in ("bf16", "fp8", "tensorwise", "delayed", "all_gather") or setting.key.startswith(
                "train.fp8_head"
            )
            if narrows and setting.key in found:
                assert found[setting.key] == "precision", (setting.key, value)


NOT_TUNED = {
    "train": {
        "steps", "seq_len", "eval_interval", "eval_steps", "max_skipped_steps", "on_nonfinite",
        "fp8_skip_layers", "fp8_skip_linears", "fp8_amax_history",
    },
    "parallel": {"dp_shard", "order"},
    "optim": {
        "name", "lr", "min_lr", "schedule", "warmup_steps", "decay_steps", "decay_shape", "betas", "eps",
        "weight_decay", "decay_embeddings", "grad_clip", "muon_momentum", "muon_lr", "muon_steps",
    },
}  # fmt: skip
"""What trials leave alone: it is the training itself, or follows from others."""


def test_every_field_that_may_decide_speed_is_tuned_or_left_alone_on_purpose() -> None:
    """A new field of these sections belongs into `tuner/settings.py`, or into the list above."""
    for section, left in NOT_TUNED.items():
        fields = set(type(getattr(BASE, section)).model_fields)
        tuned = {key.partition(".")[2] for key in TUNABLE if key.startswith(f"{section}.")}
        assert fields - left - tuned == set(), section
        assert tuned <= fields and left <= fields and not tuned & left, section


def line(step: int, loss: float | None, norm: float | None) -> dict[str, float | None]:
    return {"step": float(step), "loss": loss, "grad_norm": norm}


def test_losses() -> None:
    reference = [line(1, 11.7, 2.0), line(11, 11.5, 1.5)]
    bf16 = BASE

    def apart(kind: Neutrality, *lines: dict[str, float | None]) -> str:
        return loss_apart(bf16, bf16, kind, reference, lines)

    assert not apart("rounding", line(1, 11.71, 2.02), line(11, 11.54, 1.55))
    assert "grad_norm of step 1 is 4" in apart("rounding", line(1, 11.7, 4.0))
    assert "loss of step 1 is 11.8" in apart("rounding", line(1, 11.8, 2.0))
    assert not apart("precision", line(1, 11.8, 2.2)), "fp8 may be farther off"
    assert "loss of step 11" in apart("precision", line(1, 11.7, 2.0), line(11, 12.5, 1.5))
    assert not apart("rounding", line(5, 99.0, 9.0)), "of another step: nothing to compare"
    assert "not a finite number" in apart("bits", line(1, None, 2.0))
    assert not loss_apart(bf16, bf16, "bits", [line(1, None, None)], [line(1, None, None)]), "as in the base"


def test_fp32_is_held_closer() -> None:
    config = with_changes(BASE, {"train.precision": "fp32"})
    reference, other = [line(1, 4.8, 1.0)], [line(1, 4.805, 1.0)]
    assert loss_apart(config, config, "rounding", reference, other)
    assert not loss_apart(BASE, BASE, "rounding", reference, other)
