"""Whole runs under layouts: metrics, evaluation, samples, stops, resumes and faults are those of one process."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from distributed import run as on_ranks
from paceline.config.load import resolve
from paceline.errors import TrainingError
from paceline.observe.events import read_events
from paceline.observe.hooks import Hook, RunStart, StepEnd
from paceline.runtime.process import ProcessInfo
from paceline.runtime.signals import StopRequest
from paceline.training.run import run_in_group
from tests.training import runs, stage_faults

STEPS = 6
DENSE = ("model.num_layers=4", "model.tie_embeddings=true")
MOE = (
    "model.num_layers=4",
    "model.num_experts=4",
    "model.top_k=2",
    "model.moe.ffn_size=16",
    "model.moe.layer_period=2",
    "model.moe.layer_offset=1",
    "model.moe.aux_loss_coef=0.05",
    "model.moe.bias_balance=true",
    "model.moe.capacity_factor=1.5",
    "model.mtp_layers=1",
)
LAYOUTS: dict[str, tuple[int, tuple[str, ...], str]] = {
    # name: ranks, model, layout
    "tp2 pp2": (4, DENSE, "tp=2 pp=2"),
    "cp2 zero 3": (4, DENSE, "cp=2 zero=3"),
    "zbv": (4, DENSE, "pp=2 pipeline_schedule=zbv stages_per_rank=2"),
    "tp2 pp2 cp2": (8, DENSE, "tp=2 pp=2 cp=2"),
    "ep2 pp2": (4, MOE, "ep=2 pp=2 pipeline_layout=[1,3]"),
    "interleaved": (2, MOE, "pp=2 pipeline_schedule=interleaved_1f1b stages_per_rank=2"),
    "tp2 ep4": (4, MOE, "tp=2 ep=4 zero=3"),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    """Bytes that repeat in a way that depends on the document: train, valid and test."""
    folder = tmp_path_factory.mktemp("data")
    return tuple(runs.write_text(folder / name, documents=documents, seed=seed) for name, documents, seed in SPLITS)  # type: ignore[return-value]


SPLITS = (("train", 60, 0), ("valid", 9, 1), ("test", 5, 2))


def recipe_of(folder: Path, data: tuple[str, str, str], model: Sequence[str], layout: str, *more: str) -> list[str]:
    train, valid, test = data
    return runs.tiny(
        folder,
        train,
        f"data.valid={valid}",
        f"data.test={test}",
        *model,
        "model.vocab_size=259",
        "train.global_batch_size=8",
        "train.eval_interval=2",
        "train.eval_steps=2",
        "checkpoint.interval=0",
        "optim.eps=1e-5",
        'observe.sample_prompts=["abcd"]',
        "observe.sample_tokens=4",
        "observe.sample_interval=1",
        "observe.sample_temperature=0",
        *(f"parallel.{item}" for item in layout.split()),
        *more,
        steps=STEPS,
    )


class Facts(Hook):
    """What the start says of the layout."""

    layout = ""

    def on_start(self, start: RunStart) -> None:
        self.layout = str(start.facts["layout"])


def run_each(rank: int, world_size: int, recipes: Sequence[Sequence[str]], stop_after: int = 0) -> list[str]:
    """Runs one after the other; what each says of its layout."""
    found = []
    for overrides in recipes:
        recipe = resolve({}, list(overrides))
        facts, stop = Facts(), StopRequest()
        recipe.registry.hook(lambda config, facts=facts: facts)
        if stop_after:
            recipe.registry.hook(lambda config, stop=stop: runs.StopAt(stop_after, stop))
        info = ProcessInfo(rank=rank, local_rank=rank, world_size=world_size, local_world_size=world_size)
        run_in_group(recipe, info, torch.device("cpu"), stop)
        found.append(facts.layout)
    return found


@pytest.fixture(scope="module")
def alone(data: tuple[str, str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], Path]:
    """The folders of the runs of one process, by model."""
    folder = tmp_path_factory.mktemp("alone")
    found = {DENSE: folder / "dense", MOE: folder / "moe"}
    on_ranks(run_each, 1, [recipe_of(path, data, model, "") for model, path in found.items()])
    return found


Found = dict[str, tuple[Path, str]]


@pytest.fixture(scope="module")
def under_layouts(data: tuple[str, str, str], tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Folder and layout line of the runs of several, by the layout's name."""
    folder = tmp_path_factory.mktemp("layouts")
    found: Found = {}
    for ranks in sorted({ranks for ranks, _, _ in LAYOUTS.values()}):
        here = {name: (model, text) for name, (count, model, text) in LAYOUTS.items() if count == ranks}
        recipes = [recipe_of(folder / name, data, model, text) for name, (model, text) in here.items()]
        lines = on_ranks(run_each, ranks, recipes, timeout_seconds=400)[0]
        found |= {name: (folder / name, line) for name, line in zip(here, lines, strict=True)}
    return found


def evaluations(folder: Path) -> dict[tuple[int, str], float]:
    """Every number of every evaluation, by step and name."""
    found: dict[tuple[int, str], float] = {}
    for event in read_events(folder):
        if event["event"] == "evaluation":
            found |= {(event["step"], key): value for key, value in event.items() if "/" in key}
    return found


def assert_same_metrics(folder: Path, expected: Path, *, steps: int = STEPS) -> float:
    """Records are complete and equal; the largest difference of a loss."""
    ours, theirs = runs.read_metrics(folder), runs.read_metrics(expected)
    assert [record.step for record in ours] == list(range(1, steps + 1))
    worst = 0.0
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.loss is not None and other.loss is not None and mine.grad_norm is not None
        assert mine.loss == pytest.approx(other.loss, abs=1e-5), mine.step
        assert mine.grad_norm == pytest.approx(other.grad_norm, rel=1e-4), mine.step
        assert (mine.tokens, mine.lr, mine.skipped_steps) == (other.tokens, other.lr, other.skipped_steps)
        assert mine.extra.keys() == other.extra.keys()
        for name, value in other.extra.items():
            assert mine.extra[name] == pytest.approx(value, abs=1e-5), (mine.step, name)
        worst = max(worst, abs(mine.loss - other.loss))
    return worst


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_under_a_layout_is_that_of_one_process(
    name: str, under_layouts: Found, alone: Mapping[tuple[str, ...], Path], record_property: Any
) -> None:
    ranks, model, _ = LAYOUTS[name]
    folder, _ = under_layouts[name]
    worst = assert_same_metrics(folder, alone[model])
    record_property("largest_error", worst)
    if model is MOE:
        extra = runs.read_metrics(folder)[-1].extra
        assert {
            "aux_loss",
            "mtp_loss",
            "moe/load_max_over_mean",
            "moe/drop_share",
            "moe/router_entropy",
        } <= extra.keys()
        # layers 1 and 3, and the one of multi-token prediction
        assert np.shape(extra["moe/load_max_over_mean"]) == np.shape(extra["moe/drop_share"]) == (3,)
    ours, theirs = evaluations(folder), evaluations(alone[model])
    assert {step for step, _ in theirs} == {2, 4, 6} and {"valid/loss", "test/loss"} <= {key for _, key in theirs}
    assert ours.keys() == theirs.keys()
    assert ours == pytest.approx(theirs, rel=1e-5)  # also perplexities
    for key, value in theirs.items():
        if key[1].endswith("/loss"):
            assert ours[key] == pytest.approx(value, abs=1e-5), key
    ours_summary, theirs_summary = (json.loads((path / "summary.json").read_text()) for path in (folder, alone[model]))
    assert ours_summary["samples"] == theirs_summary["samples"] and len(theirs_summary["samples"]) == 1
    if model is DENSE:  # what fills rows up would count against the capacity of experts
        said, expected = ((path / "samples.jsonl").read_text().splitlines() for path in (folder, alone[model]))
        assert said == expected and [json.loads(line)["step"] for line in said] == [2, 4, 6]
        assert [json.loads(said[-1])["text"]] == [text for _, text in ours_summary["samples"]]
    assert ours_summary["parameters"] == theirs_summary["parameters"]
    assert ours_summary["devices"].startswith(f"{ranks} x ")


def test_the_start_tells_the_layout(under_layouts: Found) -> None:
    lines = {name: line for name, (_, line) in under_layouts.items()}
    assert lines["tp2 pp2"].startswith("4 ranks, tp 2, pp 2 (1f1b), zero 1 (flat engine)")
    assert lines["cp2 zero 3"].startswith("4 ranks, cp 2 (ring), dp 2, zero 3 (fsdp engine)")
    assert lines["tp2 ep4"].startswith("4 ranks, tp 2, ep 4, dp 2, zero 3 (fsdp engine)")


def test_stopped_in_the_middle_and_resumed_in_the_same_and_in_another_layout(
    data: tuple[str, str, str], alone: Mapping[tuple[str, ...], Path], under_layouts: Found, tmp_path: Path
) -> None:
    stopped = {
        name: recipe_of(tmp_path / name, data, model, text)
        for name, model, text in (
            ("same", DENSE, "tp=2 pp=2"),
            ("other", DENSE, "tp=2 pp=2"),
            ("same moe", MOE, "ep=2 pp=2 pipeline_layout=[1,3]"),
            ("other moe", MOE, "ep=2 pp=2 pipeline_layout=[1,3]"),
        )
    }
    on_ranks(run_each, 4, list(stopped.values()), 3, timeout_seconds=300)
    for name in stopped:
        assert [record.step for record in runs.read_metrics(tmp_path / name)] == [1, 2, 3]
        assert (tmp_path / name / "checkpoints" / "step_00000003" / "manifest.json").exists()
    again = [
        stopped["same"],
        stopped["same moe"],
        recipe_of(tmp_path / "other", data, DENSE, "cp=2 zero=3"),
        recipe_of(tmp_path / "other moe", data, MOE, "tp=2 ep=4 zero=3"),
    ]
    on_ranks(run_each, 4, again, timeout_seconds=300)
    for name, whole in (("same", "tp2 pp2"), ("same moe", "ep2 pp2")):
        assert runs.losses(runs.read_metrics(tmp_path / name)) == runs.losses(
            runs.read_metrics(under_layouts[whole][0])
        )
        assert evaluations(tmp_path / name) == evaluations(under_layouts[whole][0])
    for name, model in (("other", DENSE), ("other moe", MOE)):
        assert_same_metrics(tmp_path / name, alone[model])
        assert evaluations(tmp_path / name) == pytest.approx(evaluations(alone[model]), rel=1e-5)


class SignalMe(Hook):
    """The operating system's SIGTERM to this very process, after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, end: StepEnd) -> None:
        if end.step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def _terminated(rank: int, world_size: int, overrides: Sequence[str]) -> str:
    recipe = resolve({}, list(overrides))
    if rank == world_size - 1:
        recipe.registry.hook(lambda config: SignalMe(3))
    info = ProcessInfo(rank=rank, local_rank=rank, world_size=world_size, local_world_size=world_size)
    with StopRequest() as stop:
        run_in_group(recipe, info, torch.device("cpu"), stop)
    return stop.reason


def test_sigterm_to_one_rank_of_a_pipeline_saves_and_ends_all(data: tuple[str, str, str], tmp_path: Path) -> None:
    reasons = on_ranks(_terminated, 4, recipe_of(tmp_path / "run", data, DENSE, "tp=2 pp=2"))
    assert [bool(reason) for reason in reasons] == [False, False, False, True]
    assert [record.step for record in runs.read_metrics(tmp_path / "run")] == [1, 2, 3]
    assert (tmp_path / "run" / "checkpoints" / "step_00000003" / "manifest.json").exists()
    assert read_events(tmp_path / "run")[-1]["event"] == "stop"


def faulty(folder: Path, data: tuple[str, str, str], fault: str, layout: str, *more: str) -> list[str]:
    plugin = f'run.plugins=["{stage_faults.__file__}"]'
    return recipe_of(folder, data, DENSE, layout, f"run.name={fault}", plugin, "task.kind=faulty", *more)


def _faulty(rank: int, world_size: int, recipes: Sequence[Sequence[str]]) -> list[str]:
    """The error that each run ended with, if any."""
    found = []
    for overrides in recipes:
        try:
            runs.run(rank, world_size, overrides)
            found.append("")
        except TrainingError as error:
            found.append(str(error))
        # a run holds its folder until all ranks have left it
        dist.barrier()
    return found


FAULTS = {
    # name: (fault, layout, words of the diagnosis). Ranks of pp=2: 0 and 1 are the first stage, 2 and 3 the last
    "loss": ("loss:3:99:3", "pp=2", "rank 3 of 4"),
    "first stage": ("blocks.0.feed_forward.down_proj:3:99:1", "pp=2", "rank 1 of 4"),
    "last stage": ("blocks.3.feed_forward.down_proj:3:99:2", "pp=2", "rank 2 of 4"),
    "tp": ("blocks.0.feed_forward.down_proj:3:99:1", "tp=2 pp=2", "rank 1 of 4"),
}


def test_a_step_that_is_not_finite_in_one_stage_is_skipped_by_all_and_explained(
    data: tuple[str, str, str], tmp_path: Path
) -> None:
    once = faulty(tmp_path / "once", data, "loss:3:3:3", "pp=2")
    rows = [
        faulty(tmp_path / name, data, fault, layout, "train.max_skipped_steps=2")
        for name, (fault, layout, _) in FAULTS.items()
    ]
    by_rank = on_ranks(_faulty, 4, [once, *rows], timeout_seconds=300)
    records = runs.read_metrics(tmp_path / "once")
    assert [record.skipped_steps for record in records] == [0, 0, 1, 1, 1, 1]
    assert records[2].grad_norm is None and all(record.loss for record in records[3:])
    assert [own[0] for own in by_rank] == [""] * 4
    for index, (name, (fault, _, words)) in enumerate(FAULTS.items(), start=1):
        error = by_rank[0][index]
        assert [own[index] for own in by_rank] == [error] * 4, name
        assert error.startswith("step 4: the loss or a gradient was not finite (2 steps in a row)"), error
        assert words in error, (name, error)
        if fault.startswith("blocks"):
            assert fault.split(":")[0] in error, (name, error)
        if name != "tp":  # there a sum over the ranks spreads it within the module
            assert error.count(" of 4") == 1, (name, error)


def _raises(rank: int, world_size: int, overrides: Sequence[str]) -> None:
    runs.run(rank, world_size, overrides)


def test_an_error_in_the_last_stage_alone_ends_the_run(data: tuple[str, str, str], tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(AssertionError, match=stage_faults.WORDS):
        on_ranks(_raises, 4, faulty(tmp_path / "run", data, "raise:3:99:3", "tp=2 pp=2"), timeout_seconds=200)
    assert time.monotonic() - began < 200
    (log,) = (tmp_path / "run").rglob("rank_3.log")
    assert stage_faults.WORDS in log.read_text() and "Traceback" in log.read_text()
