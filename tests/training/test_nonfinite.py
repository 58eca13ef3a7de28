"""Numbers that are not finite: the step is left out on every rank, counted, and after some of them explained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from distributed import run as on_ranks
from paceline.checkpoint.store import open_checkpoint
from paceline.errors import TrainingError
from paceline.observe.events import read_events
from tests.training import faults, runs

PLUGIN = Path(faults.__file__)


def faulty(run_dir: Path, data: str, fault: str, *overrides: str, steps: int = 8) -> list[str]:
    return runs.tiny(
        run_dir,
        data,
        f"run.name={fault}",
        f'run.plugins=["{PLUGIN}"]',
        "task.kind=faulty",
        "model.activation=gelu",
        *overrides,
        steps=steps,
    )


Outcome = tuple[list[runs.StepRecord], str]


def run_each(rank: int, world_size: int, recipes: Sequence[Sequence[str]]) -> list[Outcome]:
    """Metrics and, where a run ended with one, its error."""
    found: list[Outcome] = []
    for recipe in recipes:
        error = ""
        try:
            runs.run(rank, world_size, recipe)
        except TrainingError as raised:
            error = str(raised)
        folder = next(item.removeprefix("run.dir=") for item in recipe if item.startswith("run.dir="))
        found.append((runs.read_metrics(Path(folder)), error))
    return found


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    return runs.write_dataset(tmp_path_factory.mktemp("data") / "corpus")


SKIPPED = {
    "loss": ("loss:5:5:1",),
    "constant": ("constant:5:5:1",),
    "module": ("module:5:5:1",),
    "gradient": ("gradient:5:5:1",),
    "no clipping": ("gradient:5:5:1", "optim.grad_clip=0"),
    "zero 0": ("gradient:5:5:1", "parallel.zero=0"),
    "zero 3": ("module:5:5:1", "parallel.zero=3"),
    "muon": ("gradient:5:5:1", "optim.name=muon", "parallel.zero=0"),
}


@pytest.fixture(scope="module")
def skipped(data: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[Outcome]]]:
    """Runs that lose step 5 on rank 1, one of each kind: folder, and outcome by rank."""
    folder = tmp_path_factory.mktemp("skipped")
    recipes = [
        faulty(folder / name, data, fault, *more, "checkpoint.interval=1", "checkpoint.keep=9")
        for name, (fault, *more) in SKIPPED.items()
    ]
    by_rank = on_ranks(run_each, 2, recipes)
    return {name: (folder / name, [own[index] for own in by_rank]) for index, name in enumerate(SKIPPED)}


@pytest.mark.parametrize("name", SKIPPED)
def test_one_bad_step_on_one_rank_is_skipped_by_all(name: str, skipped: dict[str, tuple[Path, list[Outcome]]]) -> None:
    folder, outcomes = skipped[name]
    records, error = outcomes[0]
    assert not error and [record.step for record in records] == list(range(1, 9))
    assert [record.skipped_steps for record in records] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert records[4].grad_norm is None and all(r.grad_norm for r in records if r.step != 5)
    # the rule: the step's number and samples are spent, so the schedule and the data go on
    assert [record.tokens for record in records] == [64 * step for step in range(1, 9)]
    assert records[5].lr < records[4].lr < records[3].lr
    before, after, later = (weights_at(folder, step) for step in (4, 5, 6))
    assert before.keys() == after.keys() and len(before) > 20
    for key, tensor in before.items():
        assert torch.equal(tensor, after[key]), key
    assert any(not torch.equal(tensor, later[key]) for key, tensor in before.items())


def weights_at(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Weights and moments of a checkpoint, whole."""
    checkpoint = open_checkpoint(folder / "checkpoints" / f"step_{step:08d}")
    found = {name: torch.empty(meta.size, dtype=meta.properties.dtype) for name, meta in checkpoint.tensors().items()}
    dcp.load(found, checkpoint_id=checkpoint.folder, no_dist=True)
    return found


EXPLAINED = {
    "loss": (("loss:5:99:1",), ("rank 1 of 2", "the loss of micro-batch 0 is nan")),
    "module": (("module:5:99:1",), ("rank 1 of 2", f"the first output that is not finite is that of {faults.MODULE}")),
    "gradient": (
        ("gradient:5:99:1",),
        ("rank 1 of 2", f"the first gradient that is not finite is that of {faults.PARAMETER}"),
    ),
    "fused": (
        ("gradient:5:99:1", "parallel.fused_weight_gradients=true"),
        ("rank 1 of 2", f"the first gradient that is not finite is that of {faults.PARAMETER}"),
    ),
    "no clipping": (("gradient:5:99:0", "optim.grad_clip=0"), ("rank 0 of 2", faults.PARAMETER)),
    "zero 3": (("module:5:99:1", "parallel.zero=3"), ("rank 1 of 2", faults.MODULE)),
    "once": (("once:5:99:1",), ("does not repeat",)),
    "dropout": (("module:5:99:1", "model.dropout=0.1", "parallel.recompute=full"), ("rank 1 of 2", faults.MODULE)),
}


@pytest.fixture(scope="module")
def stopped(data: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[Outcome]]]:
    folder = tmp_path_factory.mktemp("stopped")
    recipes = [
        faulty(folder / name, data, fault, *more, "train.max_skipped_steps=3", steps=20)
        for name, ((fault, *more), _) in EXPLAINED.items()
    ]
    recipes.append(faulty(folder / "at once", data, "module:5:5:1", "train.on_nonfinite=stop", steps=20))
    by_rank = on_ranks(run_each, 2, recipes)
    names = [*EXPLAINED, "at once"]
    return {name: (folder / name, [own[index] for own in by_rank]) for index, name in enumerate(names)}


@pytest.mark.parametrize("name", EXPLAINED)
def test_a_row_of_bad_steps_ends_the_run_with_a_diagnosis(
    name: str, stopped: dict[str, tuple[Path, list[Outcome]]]
) -> None:
    folder, outcomes = stopped[name]
    _, words = EXPLAINED[name]
    records, error = outcomes[0]
    assert [outcome[1] for outcome in outcomes] == [error, error]
    assert error.startswith("step 7: the loss or a gradient was not finite (3 steps in a row)")
    for word in words:
        assert word in error
    assert "rank 0" not in error or "rank 0" in words[0]
    assert "train.max_skipped_steps" in error
    assert records[-1].step == 7 and records[-1].skipped_steps == 3
    last = read_events(folder)[-1]
    assert last["event"] == "error"


def test_it_can_stop_at_once(stopped: dict[str, tuple[Path, list[Outcome]]]) -> None:
    records, error = stopped["at once"][1][1]
    assert records[-1].step == 5
    assert error.startswith("step 5: the loss or a gradient was not finite\n") and faults.MODULE in error


def test_bad_steps_with_good_ones_between_are_no_row(data: str, tmp_path: Path) -> None:
    recipe = faulty(tmp_path / "run", data, "loss:3:4:0", "train.max_skipped_steps=3")
    records = runs.alone(recipe)
    assert records[-1].skipped_steps == 2 and records[-1].step == 8
    # the number of skipped steps survives a resume
    again = faulty(tmp_path / "again", data, "loss:3:4:0", "train.max_skipped_steps=3")
    runs.alone(again, 5)
    assert [r.skipped_steps for r in runs.alone(again)] == [r.skipped_steps for r in records]
    assert runs.losses(runs.read_metrics(tmp_path / "again")) == runs.losses(records)
