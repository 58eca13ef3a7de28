"""What is proposed works; whatever is asked for, the answer is findings or a ConfigError, and soon."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable

import pytest
from pydantic import ValidationError

from paceline.config.asked import Asked
from paceline.config.check import check, refuse_errors
from paceline.config.load import resolve
from paceline.config.nearest import as_sets
from paceline.config.refusals import refusals
from paceline.errors import ConfigError
from paceline.report.finding import Finding

DRAWN = 300
SECONDS = 0.5
"""Of the processor. A check that proposes layouts takes milliseconds, one that finds none some ten."""


def proposals(text: str) -> list[list[str]]:
    """The overrides of each layout that a refusal proposes."""
    listed = re.split(r"Nearest layouts? that works? on \d+ ranks?: |Or another layout: ", text + " ", maxsplit=1)[1:]
    return [
        [quoted or plain for quoted, plain in re.findall(r"--set (?:'([^']+)'|(\S+?)(?=[;.]?(?: |$|\n)))", part)]
        for part in "".join(listed).partition("\n")[0].split("; or ")
        if part
    ]


def test_proposals_are_near_and_few(findings: Callable[..., list[Finding]]) -> None:
    (refused,) = findings(8, "optim.name=muon", "parallel.tp=2", "parallel.pp=2")
    found = proposals(refused.next_step)
    assert found[0] == ["parallel.tp=1"] and len(found) == 3


def test_an_explicit_shard_degree_is_mended_too(findings: Callable[..., list[Finding]]) -> None:
    (refused,) = findings(8, "optim.name=muon", "parallel.tp=2", "parallel.dp_shard=4")
    assert proposals(refused.next_step)[0] == ["parallel.tp=1", "parallel.dp_shard=8"]


def test_where_no_layout_fits_the_batch_another_batch_is_proposed_with_it(
    findings: Callable[..., list[Finding]],
) -> None:
    refused = findings(5, "parallel.tp=5", "train.seq_len=1023", "train.global_batch_size=3")
    (proposed,) = [found for finding in refused for found in proposals(finding.next_step)]
    assert proposed == ["parallel.tp=1", "train.global_batch_size=5"]
    (alone,) = findings(5, "train.global_batch_size=12")
    assert "10 and 15" in alone.next_step and not proposals(alone.next_step)


def test_far_from_all_that_works_data_parallelism_is_left() -> None:
    texts = ["parallel.tp=7", "parallel.cp=11", "parallel.pp=13", "train.seq_len=61", "parallel.dp_shard=2"]
    error = _refusal(texts, 720720, "")
    assert error is not None
    (proposed,) = proposals(error.next_step)
    assert "parallel.dp_shard=720720" in proposed and _refusal([*texts, *proposed], 720720, "") is None


def test_what_no_layout_mends_is_set_right_beside_it() -> None:
    texts = ["parallel.tp=3", "parallel.zero=3", "parallel.accumulate_dtype=bf16", "train.seq_len=5000"]
    error = _refusal(texts, 2, "")
    assert error is not None
    assert proposals(error.next_step)[0] == [
        *("parallel.tp=2", "train.seq_len=4096", "parallel.accumulate_dtype=fp32"),
    ]
    assert _refusal([*texts, *proposals(error.next_step)[0]], 2, "") is None


@pytest.mark.parametrize(
    ("world_size", "overrides", "words"),
    [
        (3, ["parallel.tp=2"], "runs on 2 or 4 ranks"),
        (3, ["parallel.tp=2", "parallel.dp_shard=2"], "runs on 4 ranks"),
        (1, ["parallel.tp=2", "parallel.dp_shard=2"], "Use --nproc 4,"),
        (7, ["parallel.tp=2", "parallel.zero=3", "parallel.accumulate_dtype=bf16"], ""),
        (8, ["parallel.tp=3"], ""),
    ],
)
def test_so_many_ranks_are_named_only_where_the_recipe_runs_on_them(
    world_size: int, overrides: list[str], words: str
) -> None:
    error = _refusal(overrides, world_size, "")
    assert error is not None
    assert words in error.next_step if words else "runs on" not in error.next_step


def test_every_proposal_of_a_drawn_recipe_that_is_refused_passes_the_whole_check() -> None:
    """Whatever else is wrong with it: proposals are put to the command as they are printed."""
    draw, tried = random.Random(20261130), 0
    while tried < 60:
        overrides, world_size = _drawn(draw), draw.choice([1, 2, 3, 4, 5, 6, 7, 8, 12, 24])
        overrides += draw.choice(
            [
                [],
                ["parallel.zero=3", "parallel.accumulate_dtype=bf16"],
                ["optim.name=adamw8bit", "parallel.offload=optimizer"],
                ["train.seq_len=8192"],
                ['parallel.recompute=["full"]', "model.num_layers=4"],
                ["cluster.nodes=5"],
                ["train.precision=fp8", "train.fp8_skip_layers=[0, -1, 30]"],
                ["train.global_batch_size=7"],
            ]
        )
        error = _refusal(overrides, world_size, f"{world_size} ranks, {overrides}")
        found = proposals(error.next_step) if error else []
        tried += bool(found)
        for proposed in found:
            again = _refusal([*overrides, *proposed], world_size, "")
            assert again is None, f"{world_size} ranks, {overrides}: {proposed} is refused: {again}"


def test_thousands_of_ranks_are_answered_soon() -> None:
    recipe = resolve({}, ["model.preset=deepseek_v3", "parallel.tp=8", "parallel.pp=16", "parallel.ep=48"])
    began = time.process_time()
    found = check(recipe.config, recipe.registry, 2048)
    assert time.process_time() - began < SECONDS
    assert any(finding.severity == "error" for finding in found)


def test_whatever_is_drawn_is_fine_or_refused_and_proposals_work() -> None:
    seed = random.randrange(2**32)
    draw = random.Random(seed)
    counts = {"fine": 0, "refused": 0, "proposed": 0}
    for number in range(DRAWN):
        overrides = _drawn(draw)
        world_size = draw.choice([1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 24, 48, 64])
        case = f"seed {seed}, draw {number}: {world_size} ranks, {overrides}"
        error = _refusal(overrides, world_size, case)
        if error is None:
            counts["fine"] += 1
            continue
        counts["refused"] += 1
        assert error.subject and error.next_step, case
        for proposed in proposals(error.next_step):
            counts["proposed"] += 1
            again = _refusal([*overrides, *proposed], world_size, case)
            assert again is None, f"{case}: {proposed} is refused: {again}"
    assert min(counts.values()) > DRAWN // 30, counts


def _refusal(overrides: list[str], world_size: int, case: str) -> ConfigError | None:
    try:
        recipe = resolve({}, overrides)
        began = time.process_time()
        found = check(recipe.config, recipe.registry, world_size)
        assert time.process_time() - began < SECONDS, case
        # what proposals are tried against is all that the check refuses
        refused = {finding.id for finding in refusals(Asked.of(recipe.config, world_size))}
        assert {finding.id for finding in found if finding.severity == "error"} == refused, case
        refuse_errors(found)
    except ConfigError as error:
        return error
    except ValidationError as error:
        raise AssertionError(f"{case}: {error}") from error
    return None


def _drawn(draw: random.Random) -> list[str]:
    layers = draw.choice([1, 2, 3, 4, 8])
    heads, kv = draw.choice([(4, 4), (4, 2), (8, 1), (12, 4), (6, 3)])
    experts = draw.choice([0, 0, 4, 6])
    texts = [
        f"model.num_layers={layers}",
        f"model.num_heads={heads}",
        f"model.num_kv_heads={kv}",
        "model.head_dim=8",
        f"model.ffn_size={draw.choice([64, 96, 100])}",
        f"model.num_experts={experts}",
        f"model.top_k={min(experts, 2)}",
        f"model.mtp_layers={draw.choice([0, 0, 1])}",
        f"model.attention_dropout={draw.choice([0.0, 0.0, 0.1])}",
        f"train.seq_len={draw.choice([64, 96, 100])}",
        f"train.global_batch_size={draw.choice([8, 12, 48])}",
        f"optim.name={draw.choice(['adamw', 'adamw', 'adamw8bit', 'muon'])}",
        f"parallel.zero={draw.choice([0, 1, 2, 3])}",
        f"parallel.compile={draw.choice(['true', 'false'])}",
        f"parallel.offload={draw.choice(['none', 'none', 'optimizer', 'parameters'])}",
        f"parallel.accumulate_dtype={draw.choice(['fp32', 'fp32', 'bf16'])}",
        f"parallel.pipeline_schedule={draw.choice(['1f1b', '1f1b', 'interleaved_1f1b', 'zero_bubble', 'zbv'])}",
        f"parallel.stages_per_rank={draw.choice([1, 1, 2, 3])}",
        f"parallel.cp_method={draw.choice(['ring', 'ulysses'])}",
        f"parallel.dp_shard={draw.choice([0, 0, 0, 2])}",
        "parallel.recompute=" + draw.choice(["none", "full", '["none", "full"]']),
    ]
    # a recipe changes a few things; with all of them at once nearly everything is refused
    texts = [
        text for text in texts if text.startswith(("model.num", "model.top_k", "model.head_dim")) or draw.random() < 0.3
    ]
    for axis in ("tp", "pp", "cp", "ep", "etp", "dp_replicate"):
        texts.append(f"parallel.{axis}={draw.choice([1, 1, 1, 1, 1, 1, 2, 2, 2, 3, 4])}")
    texts += ["train.global_batch_size=192"] if draw.random() < 0.8 else []
    if draw.random() < 0.2:
        texts.append(f"parallel.pipeline_layout={[draw.randint(0, 3) for _ in range(draw.randint(1, 4))]}")
    return texts


def test_changes_are_spelled_as_recipes_and_the_command_line_do() -> None:
    config = resolve({}).config
    changes = {"parallel.compile": True, "parallel.zero": 3, "optim.name": "muon", "train.fp8_skip_layers": (0, -1)}
    text = as_sets(config, changes)
    assert text == (
        "--set parallel.compile=true --set parallel.zero=3 --set optim.name=muon --set 'train.fp8_skip_layers=[0, -1]'"
    )
    assert as_sets(config, {"parallel.compile": config.parallel.compile}) == ""
