"""Options that are given and change nothing are told, in a line each, and nothing is refused for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.config.check import check
from paceline.config.idle import OPTIONS
from paceline.config.load import field_names, load_recipe, resolve
from paceline.config.presets import preset_names
from paceline.config.run import RunConfig
from paceline.report.finding import Finding

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.mark.parametrize(
    ("ranks", "overrides", "words"),
    [
        (2, ("parallel.bucket_mb=50", "parallel.zero=3"), "parallel.bucket_mb = 50 has no effect here: buckets belong"),
        (2, ("parallel.bucket_mb=50",), ""),
        (
            1,
            ("parallel.bucket_mb=50", "parallel.reduce_dtype=bf16"),
            "bucket_mb = 50 and parallel.reduce_dtype = 'bf16'",
        ),
        (1, ("parallel.zero=3",), "parallel.zero = 3 shards nothing here"),
        (2, ("parallel.zero=3",), ""),
        (2, ("parallel.zero=2", "parallel.pp=2"), "parallel.zero = 2 shards nothing here"),
        (2, ("parallel.zero=2", "parallel.cp=2"), ""),
        (2, ("parallel.zero=2", "parallel.tp=2", "model.num_experts=4", "model.top_k=2"), ""),
        (
            2,
            ("parallel.cp_method=ulysses",),
            "parallel.cp_method = 'ulysses' has no effect here: sequences are not cut",
        ),
        (2, ("parallel.cp_method=ulysses", "parallel.cp=2"), ""),
        (2, ("parallel.pipeline_schedule=zbv",), "parallel.pipeline_schedule = 'zbv' has no effect here"),
        (2, ("parallel.fused_weight_gradients=true",), ""),
        (2, ("parallel.fused_weight_gradients=true", "parallel.zero=3"), "fused_weight_gradients = true has no effect"),
        (
            2,
            ("parallel.fused_weight_gradients=true", "parallel.pp=2", "parallel.pipeline_schedule=zero_bubble"),
            "fused_weight_gradients = true has no effect here: this schedule",
        ),
        (1, ("train.loss_chunk_tokens=64", "train.loss_kernel=plain"), "train.loss_chunk_tokens = 64"),
        (1, ("optim.muon_lr=0.1",), "optim.muon_lr = 0.1 has no effect here"),
        (1, ("optim.fused_update=true", "optim.name=adamw8bit"), "optim.fused_update = true has no effect here"),
        (1, ("optim.decay_shape=sqrt",), "optim.decay_shape = 'sqrt'"),
        (1, ("optim.decay_shape=sqrt", "optim.schedule=wsd"), ""),
        (1, ("optim.min_lr=1e-5", "optim.schedule=constant"), "optim.min_lr = 1e-05"),
        (1, ("model.moe.capacity_factor=1.5",), "model.moe.capacity_factor = 1.5 has no effect here: the model has no"),
        (1, ("model.mtp_loss_coef=0.1",), "model.mtp_loss_coef = 0.1"),
        (1, ("model.sliding_window_period=2",), "model.sliding_window_period = 2"),
        (1, ("observe.sample_tokens=5",), "observe.sample_tokens = 5"),
        (1, ("observe.sample_interval=1",), "there are no observe.sample_prompts"),
        (1, ('observe.sample_prompts=["a"]', "observe.sample_interval=1"), "it counts evaluations, and there are none"),
        (1, ('observe.sample_prompts=["a"]', "observe.sample_interval=1", "train.eval_interval=5"), ""),
        (1, ("observe.record=false",), ""),
        (1, ("observe.prometheus_port=9000", "observe.stall_seconds=0"), ""),
        (
            1,
            ("observe.record=false", "observe.prometheus_port=9000", "observe.stall_seconds=30.0"),
            "observe.stall_seconds = 30.0 and observe.prometheus_port = 9000 have no effect here: there is no record",
        ),
        (1, ("observe.record=false", "observe.capture_at=[5]"), "observe.capture_at = [5] has no effect here"),
        (1, ("checkpoint.export_interval=5",), "checkpoint.export_interval = 5 has no effect here: nothing is"),
        (1, ("data.train=corpus", "data.mask=last"), "data.mask = 'last' has no effect here: data.train is a dataset"),
        (1, ("data.train=chat.jsonl", "data.mask=last"), ""),
        (1, ("data.train=corpus", "task.kind=sft", "data.packing=none"), ""),
        (1, ("data.train=chat.jsonl", "data.order=epoch"), "data.order = 'epoch' has no effect here: rows have"),
    ],
)
def test_an_idle_option_is_told(
    findings: Callable[..., list[Finding]], ranks: int, overrides: tuple[str, ...], words: str
) -> None:
    told = findings(ranks, *overrides)
    assert [finding.severity for finding in told] == (["note"] if words else [])
    assert all(words in finding.subject and not finding.evidence + finding.next_step for finding in told)


def test_defaults_presets_and_recipes_have_none(findings: Callable[..., list[Finding]]) -> None:
    assert findings(1) == []
    for name in preset_names():
        recipe = resolve({}, [f"model.preset={name}", "train.seq_len=64"])
        assert "config.idle-option" not in [found.id for found in check(recipe.config, recipe.registry, 8)], name
    for path in RECIPES.glob("*.toml"):
        recipe = load_recipe(path)
        ranks = recipe.config.cluster.nodes * recipe.config.cluster.gpus_per_node or 8
        assert "config.idle-option" not in [found.id for found in check(recipe.config, recipe.registry, ranks)], path


def test_the_table_names_fields_of_the_schema() -> None:
    assert {key for row in OPTIONS for key in row.keys} <= set(field_names(RunConfig))


@pytest.mark.parametrize(
    ("ranks", "overrides", "words"),
    [
        (2, ("parallel.zero=3", "train.fp8_weight_cache=false"), "weights are gathered, and cast, for each use"),
        (1, ("train.fp8_weight_cache=false",), ""),
        (1, ("train.fp8_scaling=rowwise", "train.fp8_cast_kernel=triton"), "for tensors with one scale"),
        (1, ("train.fp8_amax_history=4",), "looks at earlier steps"),
        (1, ("train.fp8_skip_layers=[0, -1]",), "leaves nothing in fp8 here"),
        (1, ("train.fp8_skip_layers=[0]",), ""),
    ],
)
def test_options_of_fp8_that_do_nothing_in_fp8(ranks: int, overrides: tuple[str, ...], words: str) -> None:
    recipe = resolve({}, ["train.precision=fp8", "model.num_layers=2", *overrides])
    findings = check(recipe.config, recipe.registry, ranks)
    told = [finding.subject for finding in findings if finding.id == "config.idle-option"]
    assert len(told) == bool(words) and words in "".join(told), told
