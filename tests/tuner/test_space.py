"""Points are recipes that a run would take; what nothing reads is no change; neighbours are what the table says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from paceline.config.asked import Asked
from paceline.config.load import load_recipe, validate
from paceline.config.refusals import refusals
from paceline.tuner.neutrality import classes_up_to, classes_with
from paceline.tuner.space import Space
from tests.tuner.simulated import two_h200s


def space(recipe: str = "recipes/ladder/naive.toml", *sets: str, ranks: int = 2, allow: str = "precision", **more: Any):  # type: ignore[no-untyped-def]
    return Space(
        base=load_recipe(recipe, list(sets)).config, machine=two_h200s(ranks),
        allowed=classes_up_to(allow), **more,  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.parametrize(
    ("recipe", "ranks"),
    [("recipes/ladder/naive.toml", 2), ("recipes/llama3_8b.toml", 8), ("recipes/qwen3_moe_12l.toml", 4)],
)
def test_every_neighbour_is_a_recipe_that_may_run(recipe: str, ranks: int) -> None:
    found = space(recipe, ranks=ranks)
    points = list(found.neighbours(found.origin))
    assert len(points) > 30
    for point in points[::7]:
        assert next(refusals(Asked.of(point.config, ranks)), None) is None
        assert validate(point.config.model_dump(mode="json")) == point.config
        before, after = found.base, point.config
        assert (before.model, before.data, before.task) == (after.model, after.data, after.task)
        assert before.train.global_batch_size == after.train.global_batch_size
        assert before.train.seq_len == after.train.seq_len
        assert before.optim.model_copy(update={"fused_update": after.optim.fused_update}) == after.optim


@pytest.mark.parametrize(
    ("wanted", "changes"),
    [
        ({"parallel.zero": 3}, {}),  # as it is
        ({"train.fp8_head": True}, {}),  # nothing reads it in bf16
        ({"train.precision": "fp8", "train.loss_kernel": "plain", "train.fp8_head": True}, {"train.precision": "fp8"}),
        ({"parallel.fused_weight_gradients": True}, {}),  # of the flat engine
        ({"parallel.pipeline_schedule": "interleaved_1f1b"}, {}),  # without a pipeline
        ({"parallel.cp_method": "ulysses"}, {}),
    ],
)
def test_what_nothing_reads_is_no_change(wanted: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
    point = space().point(wanted)
    assert point is not None and dict(point.changes) == changes


def test_a_batch_grows_only_where_it_may() -> None:
    found = space(allow="batch")
    grown = [point for point in found.neighbours(found.origin) if "train.global_batch_size" in point.changes]
    assert {point.batch_ratio for point in grown} == {2, 3, 4, 8}
    assert {point.neutrality for point in grown} == {"batch"}
    assert max(point.config.train.micro_batch_size for point in grown) == 16, (
        "tp 2: all of eight times the two sequences"
    )
    for point in grown[::5]:
        assert next(refusals(Asked.of(point.config, 2)), None) is None
    kept = space(allow="precision")
    assert all("train.global_batch_size" not in point.changes for point in kept.neighbours(kept.origin))
    assert kept.point({"train.global_batch_size": 4, "train.micro_batch_size": 2}) is None
    alone = Space(base=kept.base, machine=kept.machine, allowed=classes_with(["batch"]))
    assert alone.point({"train.global_batch_size": 4, "train.precision": "fp8"}) is None
    assert alone.point({"train.global_batch_size": 4, "train.micro_batch_size": 2}) is not None


def test_what_is_not_allowed_is_no_point() -> None:
    assert space(allow="chance").point({"train.precision": "fp8"}) is None
    assert space(held=frozenset({"parallel.compile"})).point({"parallel.compile": True}) is None
    assert space(vary={"parallel.compile": (True,)}).point({"parallel.recompute": "none"}) is None
    assert space().point({"train.micro_batch_size": 2}) is None, "two sequences on two ranks"
    assert space().point({"parallel.tp": 3}) is None


def test_a_fixed_degree_of_sharding_follows_the_layout() -> None:
    found = space("recipes/ladder/naive.toml", "parallel.dp_shard=2")
    point = found.point({"parallel.tp": 2, "parallel.zero": 1, "train.micro_batch_size": 2})
    assert point is not None and point.config.parallel.dp_shard == 1
    assert point.config.parallel.shard_degree(2) == 1


def test_bf16_sums_of_the_flat_engine_do_not_come_along_to_fsdp() -> None:
    found = space("recipes/llama3_8b.toml")
    assert found.base.parallel.accumulate_dtype == "bf16"
    point = found.point({"parallel.zero": 3})
    assert point is not None and point.config.parallel.accumulate_dtype == "fp32"


def test_a_product_that_was_named() -> None:
    found = space(vary={"parallel.recompute": ("none", "selective"), "parallel.compile": (True, False)})
    points = {point.key for point in found.named()}
    assert len(points) == 6 and found.origin.key in points
    assert {point.key for point in found.neighbours(found.origin)} < points
