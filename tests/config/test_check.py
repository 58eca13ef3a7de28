"""Do the sections fit each other and the number of ranks?"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paceline.config.check import UNREAD, check, refuse_errors
from paceline.config.load import field_names, resolve
from paceline.config.run import RunConfig
from paceline.errors import ConfigError


def refused(world_size: int, *overrides: str) -> ConfigError:
    recipe = resolve({}, list(overrides))
    with pytest.raises(ConfigError) as error:
        refuse_errors(check(recipe.config, recipe.registry, world_size))
    return error.value


def test_the_default_recipe_is_fine_on_one_two_and_four_ranks() -> None:
    recipe = resolve({})
    for world_size in (1, 2, 4):
        refuse_errors(check(recipe.config, recipe.registry, world_size))


def test_batch_sizes_name_their_nearest_neighbours() -> None:
    # 256 sequences on 7 ranks in micro-batches of 2: 252 and 266 are the next that divide
    error = refused(7, "train.global_batch_size=256", "train.micro_batch_size=2")
    assert "256" in error.subject and "252 and 266" in error.next_step


def test_a_world_size_that_does_not_match_is_refused() -> None:
    error = refused(4, "parallel.dp_shard=3")
    assert "dp_shard 3" in error.subject and "4 ranks" in error.subject
    assert "--set parallel.dp_shard=4" in error.next_step
    assert "8 ranks" in refused(8, "parallel.dp_replicate=3").subject


def test_degrees_that_do_not_make_the_ranks_name_layouts_that_do() -> None:
    error = refused(8, "parallel.tp=3", "train.global_batch_size=24")
    assert "--set parallel.tp=4;" in error.next_step and "--set parallel.tp=2" in error.next_step


def test_one_process_of_a_larger_layout_asks_for_the_launcher() -> None:
    # case 79: started without a launcher
    error = refused(1, "parallel.tp=2", "parallel.pp=4")
    assert (
        "tp 2 x pp 4, which does not make the 1 rank that there is" in error.subject and "--nproc 8" in error.next_step
    )


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("task.kind=ppo", "task.kind = 'ppo'"),
        ("train.seq_len=8192", "train.seq_len = 8192 is longer than model.max_seq_len = 4096"),
        ('parallel.recompute=["full"]', "lists 1 layer, the model has 4"),
    ],
)
def test_refusals(override: str, words: str) -> None:
    error = refused(1, override)
    assert words in error.subject and error.next_step


def test_several_errors_are_told_together() -> None:
    error = refused(2, "train.global_batch_size=3", "train.seq_len=8192")
    assert "8192" in error.subject and "global_batch_size = 3" in error.next_step


def test_what_is_not_there_is_told_before_how_it_would_fit() -> None:
    assert "task.kind" in refused(1, "task.kind=ppo", "parallel.tp=3").subject


def test_a_router_that_would_not_learn_is_told() -> None:
    recipe = resolve({}, ["model.num_experts=4", "model.top_k=1"])
    assert [finding.id for finding in check(recipe.config, recipe.registry, 1)] == ["config.untrained-router"]
    recipe = resolve({}, ["model.preset=tiny_switch", "train.seq_len=64"])
    assert check(recipe.config, recipe.registry, 1) == []


def test_fsdp_tells_where_it_sums_micro_batches_in_bf16() -> None:
    zero3 = ["parallel.zero=3", "parallel.reduce_dtype=bf16", "train.global_batch_size=8"]

    def told(*changes: str) -> list[str]:
        recipe = resolve({}, [*zero3, *changes])
        return [each.subject for each in check(recipe.config, recipe.registry, 2) if each.id == "config.fsdp-sums"]

    assert told() == ["with parallel.zero = 3, 4 micro-batches of a step are summed in bf16"]
    assert not told("train.micro_batch_size=4") and not told("parallel.reduce_dtype=fp32")
    assert not told("parallel.zero=1")


def test_layers_that_fp8_skips_are_there() -> None:
    error = refused(1, "train.precision=fp8", "train.fp8_skip_layers=[0, 4, -5]")
    assert "4, -5" in error.subject and "4 layers" in error.subject and "0 to 3" in error.evidence
    recipe = resolve({}, ["train.precision=fp8", "train.fp8_skip_layers=[3, -4]", "train.fp8_skip_linears=down_proj"])
    assert check(recipe.config, recipe.registry, 1) == []


def test_fp8_says_that_experts_stay_in_bf16() -> None:
    recipe = resolve({}, ["train.precision=fp8", "model.num_experts=4", "model.top_k=2"])
    assert [finding.id for finding in check(recipe.config, recipe.registry, 1)] == ["config.fp8-experts"]


def test_scales_of_earlier_steps_want_the_kernel() -> None:
    sets = ["train.precision=fp8", "train.fp8_scaling=delayed"]
    for kernel, found in (("torch", ["config.fp8-delayed-torch"]), ("triton", [])):
        recipe = resolve({}, [*sets, f"train.fp8_cast_kernel={kernel}"])
        ids = [finding.id for finding in check(recipe.config, recipe.registry, 1)]
        assert [name for name in ids if "delayed" in name] == found


def test_every_field_is_read_somewhere_or_refused() -> None:
    """A field that is accepted and ignored misleads: someone thinks it is on."""
    source = Path(__file__).parents[2] / "src" / "paceline"
    outside = "\n".join(path.read_text() for path in source.rglob("*.py") if path.parent.name != "config")
    inside = "\n".join(path.read_text() for path in (source / "config").glob("*.py"))
    unread = [
        key
        for key in field_names(RunConfig)
        if not re.search(rf"\.{(leaf := key.rpartition('.')[2])}\b|\"{leaf}\"", outside)
        and not re.search(rf"(self|model|moe)\.{leaf}\b", inside)
    ]
    assert unread == [f"{section}.{name}" for section, name in UNREAD]
