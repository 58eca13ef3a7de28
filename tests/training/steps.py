"""Single optimizer steps on made-up batches, on any number of ranks: what `test_step.py` compares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.checkpoint.pieces import ShardedValue
from paceline.config.load import resolve
from paceline.config.run import RunConfig
from paceline.data.batch import IGNORE_INDEX, Batch
from paceline.parallel.collectives import all_reduce
from paceline.runtime.process import ProcessInfo
from paceline.tasks.pretrain import Pretrain
from paceline.tasks.task import Forward, LossTerms
from paceline.training.setup import Parts, build_parts
from tests.training import runs

SEQUENCES = 8


@dataclass(frozen=True, kw_only=True)
class Job:
    """Some steps of a tiny model. ``masks``: how labels are hidden, see `masked`."""

    sets: tuple[str, ...] = ()
    micro: int = 2
    masks: str = "uneven"
    steps: int = 2
    task: str = ""
    length: int = 12
    dtype: torch.dtype = torch.float32
    sequences: int = SEQUENCES
    packed: bool = False
    """rows of several documents, whose positions start anew"""


@dataclass(kw_only=True)
class Log:
    losses: list[float | None] = field(default_factory=list)
    aux_losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    finite: list[bool] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """of the first step, in full"""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """after the last step, in full"""
    traffic: list[dict[str, tuple[int, int]]] = field(default_factory=list)
    """collectives of each step"""


class OnlyRouterLosses(Pretrain):
    """The main loss counts for nothing."""

    def loss(self, model: Forward, batch: Batch) -> LossTerms:
        return super().loss(model, batch)._replace(loss_sum=torch.zeros(()))


def global_batch(
    step: int,
    masks: str,
    length: int = 12,
    vocab: int = runs.VOCAB,
    sequences: int = SEQUENCES,
    packed: bool = False,
) -> Batch:
    """The same on every rank."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens, labels = (torch.randint(vocab, (sequences, length), generator=generator) for _ in "ab")
    batch = Batch(tokens=tokens, labels=masked(labels, masks, generator))
    if not packed:
        return batch
    starts = torch.rand(sequences, length, generator=generator) < 0.2
    places = torch.arange(length).expand(sequences, length)
    first = torch.where(starts, places, torch.zeros_like(places)).cummax(dim=1).values
    return replace(batch, documents=starts.cumsum(dim=1).int(), positions=places - first)


def masked(labels: Tensor, masks: str, generator: torch.Generator) -> Tensor:
    """none: every label counts. uneven: row r of n hides about r / n. half: the first half of the rows, whole
    micro-batches and in places a whole rank, count for nothing. all: none counts."""
    sequences = len(labels)
    rows = torch.arange(sequences)[:, None]
    hidden = {
        "none": torch.zeros_like(labels, dtype=torch.bool),
        "uneven": torch.rand(labels.shape, generator=generator) * sequences < rows,
        "half": (rows < sequences // 2).expand_as(labels),
        "all": torch.ones_like(labels, dtype=torch.bool),
    }[masks]
    return labels.masked_fill(hidden, IGNORE_INDEX)


def part(batch: Batch, micro: int, rank: int, ranks: int) -> list[Batch]:
    """The micro-batches of a rank, cut as the loader does: neighbouring rows go to neighbouring ranks."""
    starts = range(rank * micro, len(batch.tokens), micro * ranks)
    fields = {name: value for name, value in vars(batch).items() if isinstance(value, Tensor)}
    return [Batch(**{name: value[start : start + micro] for name, value in fields.items()}) for start in starts]


def config_of(job: Job) -> RunConfig:
    return resolve({}, sets_of(job)).config


def sets_of(job: Job) -> list[str]:
    """The whole recipe as overrides."""
    return [
        *runs.tiny(Path("unused"), "unused", "train.loss_chunk_tokens=8", "optim.warmup_steps=0"),
        f"train.global_batch_size={job.sequences}",
        f"train.micro_batch_size={job.micro}",
        f"train.seq_len={job.length}",
        *job.sets,
    ]


def run_jobs(rank: int, world_size: int, jobs: Sequence[Job]) -> list[Log]:
    return [_run(rank, world_size, job) for job in jobs]


def _run(rank: int, world_size: int, job: Job) -> Log:
    config = config_of(job)
    info = ProcessInfo(rank=rank, local_rank=rank, world_size=world_size, local_world_size=world_size)
    registry = resolve({}).registry
    registry.task("router", lambda config: OnlyRouterLosses())
    if job.task:
        config = config.model_copy(update={"task": config.task.model_copy(update={"kind": job.task})})
    parts = build_parts(config, registry, info, torch.device("cpu"), dtype=job.dtype)
    mesh = parts.mesh
    parts.step.train()
    log = Log()
    parts.step.on_backward_end = lambda number: log.gradients.update({} if number > 1 else full_gradients(parts))
    for number in range(1, job.steps + 1):
        mesh.traffic.take()
        batch = global_batch(number, job.masks, job.length, config.model.vocab_size, job.sequences, job.packed)
        outcome = parts.step.run(number, part(batch, job.micro, mesh.dp_rank, mesh.dp_size))
        parts.engine.wait_for_weights()
        log.traffic.append(mesh.traffic.take())
        aux = torch.zeros(()) if outcome.aux_loss_sum is None else outcome.aux_loss_sum
        numbers = (outcome.loss_sum, outcome.local_count, aux, torch.tensor(outcome.sequences))
        sums = torch.stack([number.double() for number in numbers])
        all_reduce(sums, mesh["world"], "test")
        log.losses.append(float(sums[0] / sums[1]) if sums[1] else None)
        log.norms.append(float(outcome.grad_norm))
        log.finite.append(bool(outcome.finite))
        log.aux_losses.append(float(sums[2] / sums[3]))
    weights = parts.engine.weights()
    log.weights = in_full(weights, {name: value.global_shape for name, value in weights.items()})
    return log


def full_gradients(parts: Parts) -> dict[str, Tensor]:
    """Reduced gradients by name; collective."""
    own = {p.name: p.pieces(p.param.grad) for p in parts.engine.main_parameters() if p.param.grad is not None}
    return in_full(own, {name: value.global_shape for name, value in parts.engine.weights().items()})


def in_full(values: Mapping[str, ShardedValue], shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Sharded values put together; ranks that hold the same part agree on it. A rank may know some names only."""
    known: list[dict[str, torch.Size]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(known, dict(shapes))
    shapes = {name: shape for names in known for name, shape in names.items()}
    flat = torch.zeros(2, sum(shape.numel() for shape in shapes.values()), dtype=torch.float64)
    places = dict(zip(shapes, flat.split([shape.numel() for shape in shapes.values()], dim=1), strict=True))
    for name, value in values.items():
        total, count = (row.view(shapes[name]) for row in places[name])
        for piece in value.pieces:
            box = tuple(slice(o, o + s) for o, s in zip(piece.offsets, piece.tensor.shape, strict=True))
            total[box], count[box] = piece.tensor.detach().double(), 1
    dist.all_reduce(flat)
    return {name: (total / count.clamp(min=1)).view(shapes[name]) for name, (total, count) in places.items()}
