"""A checkpoint of any layout goes on in any other: every weight, buffer and moment comes back byte for byte.

Most is told by chains: each link takes up the checkpoint of the link before, in another layout, trains a step and
saves. In float64 the losses of the whole chain are those of one process that never stopped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from distributed import run as on_ranks
from paceline.checkpoint.manager import CheckpointManager
from paceline.checkpoint.ranks import Ranks
from paceline.checkpoint.state import TrainState
from paceline.checkpoint.store import Checkpoint, Contents, open_checkpoint
from paceline.config.load import dump_recipe, resolve
from paceline.parallel.collectives import all_reduce
from paceline.parallel.parameters import persistent_buffers
from paceline.runtime.process import ProcessInfo
from paceline.training.persist import restore, values
from paceline.training.setup import Parts, build_model, build_parts
from tests.parity.layouts import EXACT, Layout, layout
from tests.training import steps
from tests.training.steps import Job

VOCAB = "model.vocab_size=67"
"""Rows that divide by no number of ranks."""
MODELS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    # name: model of tests/parity/layouts.py, more settings, axes that they exclude
    "gpt": ("gpt", (), ()),
    "llama": ("llama", (VOCAB,), ()),
    "moe": ("moe", (VOCAB, "model.moe.score=sigmoid"), ()),
    "multi-token prediction": ("moe", ("model.mtp_layers=1", "model.tie_embeddings=true", VOCAB), ("cp",)),
    "muon": ("moe", ("optim.name=muon", VOCAB), ("tp", "etp")),
}
CHAINS = tuple(name for name in MODELS if name != "llama")
LINKS = (
    layout(8, "tp=2 pp=2 zero=1"),
    layout(8, "cp=2 zero=3"),
    layout(4, "ep=2 pp=2 pipeline_layout=[1,3] zero=0"),
    layout(1, "zero=0"),
    layout(4, "tp=4"),
    layout(4, "dp_replicate=2 zero=3"),
    layout(4, "pp=2 pipeline_schedule=zbv stages_per_rank=2 zero=1"),
    layout(4, "tp=2 ep=2 etp=2 zero=3"),
    layout(8, "pp=2 cp=2 zero=2 pipeline_layout=[3,1]"),
    layout(2, "pp=2 pipeline_schedule=interleaved_1f1b stages_per_rank=2"),
    layout(1, "zero=3"),
)


@dataclass(frozen=True, kw_only=True)
class Link:
    """Load the newest checkpoint of ``folder`` if there is one, train ``steps`` steps, save, train on."""

    job: Job
    folder: Path
    then: int = 0
    """steps after the save"""


@dataclass(frozen=True, kw_only=True)
class Went:
    """What a link says of itself."""

    losses: list[float]
    differences: list[str]
    """Tensors that are not, byte for byte, those of the checkpoint that was loaded, or of the one that was saved."""


def go(rank: int, world_size: int, links: Sequence[Link]) -> list[Went]:
    return [_go(rank, world_size, link) for link in links]


def _go(rank: int, world_size: int, link: Link) -> Went:
    job = link.job
    config = steps.config_of(job)
    info = ProcessInfo(rank=rank, local_rank=rank, world_size=world_size, local_world_size=world_size)
    parts = build_parts(config, resolve({}).registry, info, torch.device("cpu"), dtype=job.dtype)
    manager = CheckpointManager(link.folder, config.checkpoint, ranks=Ranks.create())
    checkpoint = manager.latest()
    differences: list[str] = []
    done = 0
    if checkpoint is not None:
        done = checkpoint.step
        for value in values(parts).values():
            for piece in value.pieces:
                piece.tensor.fill_(math.nan)
        restore(parts, manager, checkpoint)
        differences += [f"loaded {text}" for text in unlike(parts, checkpoint)]
    parts.step.train()
    losses = [_step(parts, job, done + number) for number in range(1, job.steps + 1)]
    state = TrainState(
        step=done + job.steps, world_size=world_size, extra={"optimizer_updates": parts.optimizer.step_count}
    )
    manager.save(Contents(values=values(parts), state=state, recipe=dump_recipe(config)))
    manager.close()
    saved = open_checkpoint(link.folder / f"step_{state.step:08d}")
    differences += [f"saved {text}" for text in unlike(parts, saved)]
    losses += [_step(parts, job, state.step + number) for number in range(1, link.then + 1)]
    return Went(losses=losses, differences=differences)


def _step(parts: Parts, job: Job, number: int) -> float:
    batch = steps.global_batch(number, job.masks, job.length, parts.config.model.vocab_size)
    outcome = parts.step.run(number, steps.part(batch, job.micro, parts.mesh.dp_rank, parts.mesh.dp_size))
    parts.engine.wait_for_weights()
    sums = torch.stack([outcome.loss_sum.double(), outcome.local_count.double()])
    all_reduce(sums, parts.mesh["world"], "test")
    return float(sums[0] / sums[1])


def unlike(parts: Parts, checkpoint: Checkpoint) -> list[str]:
    """Names whose value, put together from all ranks, is not what the files hold."""
    mine = values(parts)
    # by one rank: reading all of them costs more than all the rest
    read: list[Any] = [whole(checkpoint) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(read)
    in_files: dict[str, Tensor] = read[0]
    shapes: list[dict[str, torch.Size]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(shapes, {name: value.global_shape for name, value in mine.items()})
    everywhere = {name for names in shapes for name in names}
    if everywhere != in_files.keys():
        return sorted(everywhere ^ in_files.keys())
    # each rank against the files, rather than sums against them: a copy that is wrong on one rank shows
    found = []
    for name, value in mine.items():
        for piece in value.pieces:
            box = tuple(slice(o, o + s) for o, s in zip(piece.offsets, piece.tensor.shape, strict=True))
            if not torch.equal(in_files[name][box], piece.tensor):
                found.append(f"{name} at {piece.offsets}")
    return found


def whole(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """All tensors of a checkpoint, read without any of our own code."""
    found = {
        name: torch.full(meta.size, math.nan, dtype=meta.properties.dtype)
        for name, meta in checkpoint.tensors().items()
    }
    dcp.load(found, checkpoint_id=checkpoint.folder, no_dist=True)
    return found


def expected_names(job: Job) -> dict[str, torch.Size]:
    """Everything that a checkpoint of this model holds, from the plain model."""
    config = steps.config_of(job)
    model = build_model(config)
    parameters = dict(model.named_parameters())
    found = {f"model/{name}": parameter.shape for name, parameter in parameters.items()}
    found |= {f"model/{name}": buffer.shape for name, buffer in persistent_buffers([model]).items()}
    for name, parameter in parameters.items():
        muon = config.optim.name == "muon" and name.startswith(("blocks.", "mtp.")) and parameter.dim() > 1
        for moment in ("momentum",) if muon and min(parameter.shape[-2:]) > 1 else ("exp_avg", "exp_avg_sq"):
            found[f"optim/{name}/{moment}"] = parameter.shape
    return found


def assert_everything_once(folder: Path, job: Job) -> None:
    """Files hold every element of model and moments, and each once: not twice by replicas, ties, or stages."""
    checkpoint = open_checkpoint(folder)
    metadata = checkpoint.metadata()
    expected = expected_names(job)
    assert {name: entry.size for name, entry in checkpoint.tensors().items()} == expected
    elements = sum(math.prod(chunk.sizes) for entry in checkpoint.tensors().values() for chunk in entry.chunks)
    assert elements == sum(shape.numel() for shape in expected.values())
    # the index knows a block that was written twice once: its second copy would be bytes that no entry accounts for
    storage: Mapping[Any, Any] = metadata.storage_data
    in_files = sum(path.stat().st_size for path in folder.glob("*.distcp"))
    assert sum(info.length for info in storage.values()) == in_files


def fits(name: str, item: Layout) -> bool:
    model, _, excluded = MODELS[name]
    axes = {text.split("=")[0] for text in item.sets}
    return not (axes & set(excluded)) and (not item.experts or model in ("moe", "switch"))


def job_of(name: str, item: Layout, **options: object) -> Job:
    model, more, _ = MODELS[name]
    return item.job(model, *more, **{"steps": 1, **options})


@pytest.fixture(scope="module")
def chains(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[Layout, Went]]]:
    """Every model through all layouts that it can have; a check of the files after each link."""
    folder = tmp_path_factory.mktemp("chains")
    found: dict[str, list[tuple[Layout, Went]]] = {name: [] for name in CHAINS}
    for item in LINKS:
        names = [name for name in CHAINS if fits(name, item)]
        links = [Link(job=job_of(name, item), folder=folder / name) for name in names]
        by_rank = on_ranks(go, item.ranks, links, timeout_seconds=400)
        for index, (name, link) in enumerate(zip(names, links, strict=True)):
            everywhere = [text for own in by_rank for text in own[index].differences]
            found[name].append((item, replace(by_rank[0][index], differences=everywhere)))
            assert_everything_once(max(link.folder.glob("step_*")), link.job)
    return found


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """The losses of one process that never stopped."""
    folder = tmp_path_factory.mktemp("straight")
    alone = Layout(ranks=1, sets=())
    links = [Link(job=job_of(name, alone, steps=len(LINKS)), folder=folder / name) for name in CHAINS]
    (went,) = on_ranks(go, 1, links)
    return {name: one.losses for name, one in zip(CHAINS, went, strict=True)}


@pytest.mark.parametrize("name", CHAINS)
def test_every_tensor_comes_back_byte_for_byte_in_every_layout(
    name: str, chains: dict[str, list[tuple[Layout, Went]]]
) -> None:
    for item, went in chains[name]:
        assert not went.differences, (item, went.differences[:5])


@pytest.mark.parametrize("name", CHAINS)
def test_a_run_that_changes_its_layout_at_every_step_has_the_losses_of_one_process(
    name: str, chains: dict[str, list[tuple[Layout, Went]]], straight: dict[str, list[float]], record_property: Any
) -> None:
    # matrices travel, and are orthogonalised, in fp32
    limit = 1e-5 if name == "muon" else EXACT
    errors = [
        abs(went.losses[0] - expected) / expected
        for (_, went), expected in zip(chains[name], straight[name], strict=False)
    ]
    record_property("largest_error", max(errors))
    assert max(errors) <= limit, errors


SAVED_UNDER = layout(8, "tp=2 pp=2")
LOADED_UNDER = (layout(8, "cp=2 dp_shard=4"), layout(8, "cp=2 dp_shard=4 zero=3"), layout(1, "zero=1"))
MOE_TOO = (layout(4, "ep=2 pp=2"), layout(4, "ep=2 pp=2 zero=3"))


def test_saved_under_tp2_pp2_dp2_and_loaded_elsewhere_has_the_same_loss_in_fp32(
    tmp_path: Path, record_property: Any
) -> None:
    """Acceptance of the parallelism issue: the same loss to 1e-6."""

    def run(names: Sequence[str], item: Layout, folder: Path, then: int = 0) -> dict[str, list[float]]:
        links = [
            Link(job=job_of(name, item, dtype=torch.float32, steps=2), folder=folder / name, then=then)
            for name in names
        ]
        by_rank = on_ranks(go, item.ranks, links, timeout_seconds=300)
        assert not [one.differences[:5] for went in by_rank for one in went if one.differences], item
        return {name: one.losses for name, one in zip(names, by_rank[0], strict=True)}

    names = ["gpt", "llama", "moe"]
    expected = {name: losses[2:] for name, losses in run(names, SAVED_UNDER, tmp_path / "start", then=2).items()}
    worst = 0.0
    for index, item in enumerate((*LOADED_UNDER, *MOE_TOO)):
        here = ["moe"] if item.experts else names
        folder = tmp_path / str(index)
        for name in here:
            (folder / name).mkdir(parents=True)
            (folder / name / "step_00000002").symlink_to(tmp_path / "start" / name / "step_00000002")
        found = run(here, item, folder)
        for name, losses in found.items():
            assert losses[0] == pytest.approx(expected[name][0], abs=1e-6), (name, item)
            assert losses[1] == pytest.approx(expected[name][1], abs=1e-5), (name, item)
            worst = max(worst, abs(losses[0] - expected[name][0]))
    record_property("largest_error", worst)


def test_a_vocabulary_of_1003_goes_on_over_ranks_that_do_not_divide_it(tmp_path: Path) -> None:
    """Case 53: as if it had not stopped, bit for bit on the same ranks. Four row-sharded ranks, two of vocabulary."""
    items = {
        4: [layout(4, "zero=3"), layout(4, "tp=4"), layout(4, "zero=1")],
        2: [layout(2, "zero=3"), layout(2, "tp=2"), layout(2, "pp=2")],
    }
    for ranks, layouts in items.items():
        jobs = [
            item.job("gpt", "model.vocab_size=1003", "model.num_layers=2", dtype=torch.float32, steps=2)
            for item in layouts
        ]
        links = [Link(job=job, folder=tmp_path / f"{ranks} {index}", then=2) for index, job in enumerate(jobs)]
        (uninterrupted, *_) = on_ranks(go, ranks, links)
        (again, *_) = on_ranks(go, ranks, [replace(link, then=0) for link in links])
        for item, one, other in zip(layouts, uninterrupted, again, strict=True):
            assert one.losses[2:] == other.losses and not one.differences and not other.differences, item


def test_experts_spread_and_put_together_again_are_byte_equal(tmp_path: Path) -> None:
    """Case 49: EP 1, then 2, then 4 with etp, then 1, without training in between."""
    links = (layout(1, "zero=1"), layout(2, "ep=2"), layout(4, "ep=2 etp=2 zero=3"), layout(1, "zero=0"))
    tensors: list[dict[str, Tensor]] = []
    source: Path | None = None
    for index, item in enumerate(links):
        folder = tmp_path / str(index)
        folder.mkdir()
        if source is not None:
            (folder / "step_00000001").symlink_to(source)
        job = job_of("moe", item, steps=0 if source else 1, dtype=torch.float32)
        went = on_ranks(copy_over, item.ranks, job, folder, tmp_path / f"{index} saved")
        assert went == [[]] * item.ranks, item
        source = tmp_path / f"{index} saved" / "step_00000001"
        tensors.append(whole(open_checkpoint(source)))
    for found in tensors[1:]:
        assert found.keys() == tensors[0].keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors[0].items())


def copy_over(rank: int, world_size: int, job: Job, source: Path, target: Path) -> list[str]:
    """Loads from one folder, if there is something, and saves to another; what differs."""
    config = steps.config_of(job)
    info = ProcessInfo(rank=rank, local_rank=rank, world_size=world_size, local_world_size=world_size)
    parts = build_parts(config, resolve({}).registry, info, torch.device("cpu"), dtype=job.dtype)
    ranks = Ranks.create()
    reader = CheckpointManager(source, config.checkpoint, ranks=ranks)
    checkpoint = reader.latest()
    found: list[str] = []
    if checkpoint is None:
        parts.step.train()
        for number in range(1, job.steps + 1):
            _step(parts, job, number)
    else:
        restore(parts, reader, checkpoint)
        found = unlike(parts, checkpoint)
    writer = CheckpointManager(target, config.checkpoint, ranks=ranks)
    writer.save(Contents(values=values(parts), state=TrainState(step=1, world_size=world_size)), wait=True)
    writer.close()
    reader.close()
    return found
