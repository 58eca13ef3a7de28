"""The promise of the project: every layout gives the result of one process, in float64 to 1e-9.

Compared are the loss of three steps, the global gradient norm, router losses, every gradient of the first step, and
every weight after three steps of AdamW with clipping and weight decay, on labels of which some are masked. The one
process has micro-batches of one sequence, the layouts of two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
from torch import Tensor

from distributed import run as on_ranks
from paceline.models.init import WeightInit
from paceline.training import setup
from tests.parity.layouts import EXACT, MODELS, Layout, layout, worst
from tests.training.steps import Job, Log, run_jobs

ONE_AXIS = (
    layout(2, "tp=2"),
    layout(4, "tp=4"),
    layout(2, "pp=2"),
    layout(4, "pp=4"),
    layout(2, "pp=2 pipeline_schedule=interleaved_1f1b stages_per_rank=2"),
    layout(2, "pp=2 pipeline_schedule=zero_bubble"),
    layout(2, "pp=2 pipeline_schedule=zbv stages_per_rank=2"),
    layout(2, "cp=2"),
    layout(4, "cp=4"),
    layout(2, "cp=2 cp_method=ulysses"),
    layout(4, "cp=4 cp_method=ulysses"),
    layout(2, "ep=2"),
    layout(4, "ep=4"),
    layout(2, "etp=2"),
    layout(4, "zero=0"),
    layout(4, "zero=1"),
    layout(4, "zero=2"),
    layout(4, "zero=3"),
)
PAIRS = (
    layout(4, "tp=2 pp=2"),
    layout(4, "tp=2 pp=2 pipeline_schedule=zero_bubble"),
    layout(4, "tp=2 cp=2"),
    layout(4, "tp=2 cp=2 cp_method=ulysses"),
    layout(4, "tp=2 ep=2"),
    layout(4, "tp=2 ep=4"),
    layout(4, "tp=2 etp=2"),
    layout(4, "tp=2 zero=1"),
    layout(4, "tp=2 zero=3"),
    layout(4, "tp=2 dp_replicate=2 zero=1"),
    layout(4, "pp=2 cp=2"),
    layout(4, "pp=2 cp=2 cp_method=ulysses pipeline_schedule=interleaved_1f1b stages_per_rank=2"),
    layout(4, "pp=2 ep=2"),
    layout(4, "pp=2 zero=1"),
    layout(4, "pp=2 zero=2"),
    layout(4, "pp=2 zero=3 pipeline_schedule=interleaved_1f1b stages_per_rank=2"),
    layout(4, "pp=2 zero=0 pipeline_schedule=zbv stages_per_rank=2"),
    layout(4, "cp=2 ep=2"),
    layout(4, "cp=2 ep=4"),
    layout(4, "cp=2 zero=1"),
    layout(4, "cp=2 zero=3"),
    layout(4, "cp=2 dp_replicate=2 zero=3 cp_method=ulysses"),
    layout(4, "ep=2 zero=1"),
    layout(4, "ep=2 zero=3"),
    layout(4, "ep=2 etp=2"),
    layout(4, "ep=2 dp_replicate=2 zero=3"),
    layout(4, "etp=2 zero=3"),
    layout(4, "dp_replicate=2 zero=3"),
)
ORDERS = ('order=["tp","dp_shard","cp","pp","dp_replicate"]', 'order=["dp_replicate","pp","cp","dp_shard","tp"]')
MORE_AXES = (
    layout(8, f"tp=2 pp=2 cp=2 {ORDERS[0]}"),
    layout(8, f"tp=2 cp=2 ep=2 zero=3 {ORDERS[0]}"),
    layout(8, f"tp=2 cp=2 ep=4 zero=1 {ORDERS[1]}"),
    layout(8, "tp=2 pp=2"),
    layout(8, "tp=2 pp=2 zero=3"),
    layout(8, "tp=2 pp=2 pipeline_schedule=zbv stages_per_rank=2"),
    layout(8, "tp=2 cp=2"),
    layout(8, "tp=2 cp=2 zero=3 cp_method=ulysses"),
    layout(8, "ep=2 pp=2 zero=1"),
    layout(8, "ep=4 pp=2 zero=3"),
    layout(8, "tp=2 ep=4 cp=2"),
    layout(8, "tp=2 ep=2 etp=2 cp=2 zero=3"),
    layout(8, "tp=2 pp=2 cp=2 ep=2 etp=2 recompute=full"),
)
BATCH = 10
"""Jobs that run one after the other in one call of the pool."""


def cases(layouts: tuple[Layout, ...]) -> dict[int, list[tuple[str, Layout]]]:
    """Jobs by number of ranks. Layouts for experts go with the models that have them."""
    found: dict[int, list[tuple[str, Layout]]] = {}
    for item in layouts:
        for model in MODELS:
            if not item.experts or model in ("moe", "switch"):
                found.setdefault(item.ranks, []).append((model, item))
    return found


def batches(layouts: tuple[Layout, ...]) -> Iterator[object]:
    for ranks, jobs in cases(layouts).items():
        for start in range(0, len(jobs), BATCH):
            part = jobs[start : start + BATCH]
            yield pytest.param(ranks, part, id=f"{ranks} ranks, {start} to {start + len(part) - 1}")


@pytest.fixture(scope="session")
def one_process() -> dict[str, Log]:
    alone = Layout(ranks=1, sets=())
    (logs,) = on_ranks(run_jobs, 1, [alone.job(model, micro=1) for model in MODELS])
    return dict(zip(MODELS, logs, strict=True))


@pytest.mark.parametrize(("ranks", "jobs"), [*batches(ONE_AXIS), *batches(PAIRS), *batches(MORE_AXES)])
def test_equals_one_process(
    ranks: int,
    jobs: list[tuple[str, Layout]],
    one_process: dict[str, Log],
    record_property: Callable[[str, object], None],
) -> None:
    by_rank = on_ranks(run_jobs, ranks, [item.job(model) for model, item in jobs], timeout_seconds=300)
    failures: list[str] = []
    largest = 0.0
    for index, (model, item) in enumerate(jobs):
        for rank, logs in enumerate(by_rank):
            errors = worst(logs[index], one_process[model])
            largest = max(largest, *errors.values())
            bad = {name: f"{value:.1e}" for name, value in errors.items() if not value <= EXACT}
            if bad:
                failures.append(f"{model}, {' '.join(item.sets)}, rank {rank}: {bad}")
                break
    record_property("largest_error", largest)
    assert not failures, "\n" + "\n".join(failures)


class SwappedShards(WeightInit):
    """A broken rule: two ranks start with each other's columns of the MLPs' last matrices."""

    def __call__(self, name: str, value: Tensor, whole: Sequence[int], offsets: Sequence[int]) -> None:
        if name.endswith("feed_forward.down_proj.weight") and value.shape[1] < whole[1]:
            offsets = (offsets[0], whole[1] - value.shape[1] - offsets[1])
        super().__call__(name, value, whole, offsets)


def _with_swapped_shards(rank: int, world_size: int, job: Job) -> Log:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "WeightInit", SwappedShards)
        return run_jobs(rank, world_size, [job])[0]


def test_two_swapped_shards_are_noticed(one_process: dict[str, Log]) -> None:
    found = on_ranks(_with_swapped_shards, 2, layout(2, "tp=2 zero=0").job("llama"))[0]
    errors = worst(found, one_process["llama"])
    assert errors["loss"] > 1e-4 and max(errors.values()) > 1e-2, errors
