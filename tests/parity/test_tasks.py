"""Losses over whole answers are the same in any layout: of one process, in float64 to 1e-9.

As `test_layouts.py`: losses and metrics of two steps, the gradient norm, every gradient of the first step and every
weight after the second. Rows hold pairs of random lengths with padding behind them, and one row has no pair at all. The
one process has micro-batches of one row, the layouts of two. The reference has other weights than the policy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distributed import run as on_ranks
from paceline.config.load import resolve
from paceline.data.batch import Batch
from paceline.models.init import WeightInit
from paceline.parallel.collectives import all_reduce
from paceline.runtime.process import ProcessInfo
from paceline.tasks.dpo import Dpo
from paceline.training.reference import FrozenCopy
from paceline.training.setup import build_parts
from tests.parity.layouts import EXACT, MODELS, SHAPE, Layout, error, layout
from tests.tasks.answers import Text, row, rows
from tests.training.steps import Job, config_of, full_gradients, in_full

ROWS, LENGTH, VOCAB = 8, 48, 67
TASKS = {
    "dpo": ("task.kind=dpo", "task.beta=0.5", "task.label_smoothing=0.1"),
    "dpo free": ("task.kind=dpo", "task.dpo_loss=hinge", "task.reference=none", "task.beta=0.5"),
    "dpo of adapters": ("task.kind=dpo", "task.beta=0.5", "lora.rank=2"),
    "ipo": ("task.kind=dpo", "task.dpo_loss=ipo", "task.beta=0.5"),
    "orpo": ("task.kind=orpo", "task.beta=0.5"),
    "kto": ("task.kind=kto", "task.beta=0.5", "task.undesirable_weight=1.5"),
    "reward": ("task.kind=reward", "model.head=score", "task.center_rewards=0.1"),
    "reward of adapters": ("task.kind=reward", "model.head=score", "lora.rank=2"),
    "sft": ("task.kind=sft", "task.neftune_alpha=5"),
}
LAYOUTS = (
    layout(2, "cp=2"),
    layout(2, "zero=3"),
    layout(4, "tp=2 pp=2"),
    layout(4, "tp=2 cp=2 cp_method=ulysses"),
    layout(4, "tp=2 pp=2 pipeline_schedule=zero_bubble"),
    layout(4, "cp=2 zero=3"),
    layout(4, "zero=1"),
    layout(4, "pp=2 zero=3 pipeline_schedule=interleaved_1f1b stages_per_rank=2"),
    layout(4, "ep=2 tp=2 zero=1"),
)
ON_BOTH, TENSOR_AND_CONTEXT, EXPERTS = LAYOUTS[2], LAYOUTS[3], LAYOUTS[-1]
ACROSS = {
    "dpo": LAYOUTS,
    "dpo free": (ON_BOTH,),
    "dpo of adapters": (LAYOUTS[1], ON_BOTH),
    "ipo": (TENSOR_AND_CONTEXT,),
    "orpo": (*LAYOUTS[:2], ON_BOTH, TENSOR_AND_CONTEXT),
    "kto": (*LAYOUTS[:2], ON_BOTH, EXPERTS),
    "reward": (*LAYOUTS[:2], ON_BOTH, TENSOR_AND_CONTEXT, EXPERTS),
    "reward of adapters": (LAYOUTS[1], ON_BOTH, TENSOR_AND_CONTEXT),
    "sft": (*LAYOUTS[:2], ON_BOTH, TENSOR_AND_CONTEXT, LAYOUTS[6]),
}
REFERENCE_SEED = 77


@dataclass(kw_only=True)
class Log:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    means: dict[str, list[float]] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)


def global_batch(task: str, step: int) -> Batch:
    generator = torch.Generator().manual_seed(1000 + step)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    def ids(count: int) -> list[int]:
        found: list[int] = torch.randint(1, VOCAB, (count,), generator=generator).tolist()
        return found

    parts, desirable, margins = [], [], []
    for index in range(ROWS):
        texts: list[Text] = []
        for _ in range(0 if index == 5 else number(1, 4)):
            prompt = ids(number(1, 5))
            texts += [Text(prompt, ids(number(1, 4))), Text(prompt, ids(number(1, 4)))]
        parts.append(row(texts, LENGTH))
        desirable.append([number(0, 2) if place % 2 == 0 and place < len(texts) else -1 for place in range(8)])
        margins.append([number(0, 3) / 2 for _ in range(8)])
    if task == "kto":
        return rows(parts, desirable=desirable)
    return rows(parts, margin=margins) if task == "reward" else rows(parts)


def own_part(batch: Batch, micro: int, rank: int, ranks: int) -> list[Batch]:
    """The micro-batches of a rank, cut as the loader does."""
    starts = range(rank * micro, ROWS, micro * ranks)
    return [batch._each(lambda tensor, at=start: tensor[at : at + micro]) for start in starts]


def run_jobs(rank: int, world_size: int, jobs: list[tuple[str, Job]]) -> list[Log]:
    return [_run(rank, world_size, task, job) for task, job in jobs]


def _run(rank: int, world_size: int, task: str, job: Job) -> Log:
    config = config_of(job)
    info = ProcessInfo(rank=rank, local_rank=rank, world_size=world_size, local_world_size=world_size)
    parts = build_parts(config, resolve({}).registry, info, torch.device("cpu"), dtype=torch.float64)
    if isinstance(parts.reference, FrozenCopy):
        for name, value in parts.reference.engine.weights().items():
            for piece in value.pieces:
                WeightInit(config.model, REFERENCE_SEED)(name, piece.tensor, value.global_shape, piece.offsets)
        parts.reference.engine.publish_weights()
    parts.step.train()
    log = Log()
    parts.step.on_backward_end = lambda number: log.gradients.update({} if number > 1 else full_gradients(parts))
    for number in range(1, job.steps + 1):
        batches = own_part(global_batch(task, number), job.micro, parts.mesh.dp_rank, parts.mesh.dp_size)
        outcome = parts.step.run(number, batches)
        parts.engine.wait_for_weights()
        names = parts.staged.traits.means
        own = [torch.stack((outcome.loss_sum.double(), outcome.local_count.double()))]
        own += [outcome.means.get(name, torch.zeros(2, dtype=torch.float64)) for name in names]
        sums = torch.stack(own)
        all_reduce(sums, parts.mesh["world"], "test")
        log.losses.append(float(sums[0, 0] / sums[0, 1]))
        log.norms.append(float(outcome.grad_norm))
        for name, (total, count) in zip(names, sums[1:], strict=True):
            log.means.setdefault(name, []).append(float(total / count))
    weights = parts.engine.weights()
    log.weights = in_full(weights, {name: value.global_shape for name, value in weights.items()})
    dist.barrier()
    return log


def job_of(task: str, item: Layout, micro: int) -> Job:
    model = "moe" if item.experts else "gpt" if task == "sft" else "llama"
    more = (*TASKS[task], f"model.vocab_size={VOCAB}", "model.max_seq_len=64", "data.train=unused.jsonl")
    sets = (*SHAPE, *MODELS[model], *(f"parallel.{each}" for each in item.sets), *more)
    return Job(sets=sets, micro=micro, steps=2, length=LENGTH, sequences=ROWS, dtype=torch.float64)


def cases() -> Iterator[object]:
    for ranks in (2, 4):
        for task, layouts in ACROSS.items():
            own = [item for item in layouts if item.ranks == ranks]
            if own:
                yield pytest.param(ranks, task, own, id=f"{task}-on-{ranks}")


@pytest.fixture(scope="module")
def one_process() -> dict[tuple[str, bool], Log]:
    plans = [(task, item) for task in TASKS for item in (layout(1, ""), Layout(ranks=1, sets=(), experts=True))]
    jobs = [(task, job_of(task, item, micro=1)) for task, item in plans]
    (logs,) = on_ranks(run_jobs, 1, jobs)
    return {(task, item.experts): log for (task, item), log in zip(plans, logs, strict=True)}


def test_what_is_compared_is_not_nothing(one_process: dict[tuple[str, bool], Log]) -> None:
    kto, reference = one_process["kto", False], one_process["dpo", False]
    assert min(kto.means["kl"]) > 0.01
    # with the same weights every reward of the first step would be 0
    assert abs(reference.means["reward_chosen"][0]) > 0.01
    assert all(0 < value < 1 for value in one_process["reward", False].means["reward_accuracy"])


def _counted_by_each_part(rank: int, world_size: int, job: Job) -> Log:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Dpo, "whole", False)
        return _run(rank, world_size, "dpo", job)


def test_pairs_that_each_part_of_a_row_counts_are_noticed(one_process: dict[tuple[str, bool], Log]) -> None:
    found = on_ranks(_counted_by_each_part, 2, job_of("dpo", layout(2, "cp=2"), micro=2))[0]
    errors = worst(found, one_process["dpo", False])
    # the loss itself is a quotient of two sums that are both too large
    assert 0.49 < errors["norm"] < 0.51, errors


def worst(found: Log, expected: Log) -> dict[str, float]:
    errors = {}
    for kind, numbers, others in (
        ("loss", found.losses, expected.losses),
        ("norm", found.norms, expected.norms),
        *((name, values, expected.means[name]) for name, values in found.means.items()),
    ):
        errors[kind] = error(torch.tensor(numbers, dtype=torch.float64), torch.tensor(others, dtype=torch.float64))
    for kind, ours, theirs in (
        ("gradient", found.gradients, expected.gradients),
        ("weight", found.weights, expected.weights),
    ):
        assert ours.keys() == theirs.keys()
        errors |= {f"{kind} {name}": error(ours[name], value) for name, value in theirs.items()}
    return errors


@pytest.mark.parametrize(("ranks", "task", "layouts"), list(cases()))
def test_equals_one_process(
    ranks: int, task: str, layouts: list[Layout], one_process: dict[tuple[str, bool], Log]
) -> None:
    by_rank = on_ranks(run_jobs, ranks, [(task, job_of(task, item, micro=2)) for item in layouts], timeout_seconds=300)
    failures = []
    for index, item in enumerate(layouts):
        expected = one_process[task, item.experts]
        assert all(float(each) > 0 for each in expected.norms)
        for rank, logs in enumerate(by_rank):
            bad = {name: f"{value:.1e}" for name, value in worst(logs[index], expected).items() if not value <= EXACT}
            if bad:
                failures.append(f"{' '.join(item.sets)}, rank {rank}: {dict(list(bad.items())[:6])}")
                break
    assert not failures, "\n" + "\n".join(failures)
