"""Noise on embeddings: as wide as the document says, drawn by place, and only where something is learned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from paceline.config.load import resolve
from paceline.data.batch import Batch
from paceline.parallel.mesh import ParallelMesh
from paceline.runtime.process import ProcessInfo
from paceline.tasks.documents import with_lengths
from paceline.training.noise import EmbeddingNoise
from paceline.training.setup import build_parts
from tests.tasks.answers import Text, row, rows
from tests.training import runs

ALPHA, HIDDEN = 5.0, 32


def noise(**more: int) -> EmbeddingNoise:
    sets = [f"task.neftune_alpha={ALPHA}", *(f"run.{name}={value}" for name, value in more.items())]
    config = resolve({}, runs.tiny(Path("unused"), "unused", *sets)).config
    found = EmbeddingNoise.of(config, ParallelMesh(config.parallel, world_size=1, rank=0, device_type="cpu"))
    assert found is not None
    return found


def batch() -> Batch:
    """Documents of 4, 20 and 8 tokens in each of two rows."""
    texts = [Text([1], [2, 3, 4]), Text([1] * 10, [2] * 10)]
    return with_lengths(rows([row(texts, 32), row(texts, 32)]))


def test_the_width_is_that_of_the_document() -> None:
    drawn = torch.cat([noise().draw(step, 0, batch()) for step in range(50)])
    for tokens, first in ((4, 0), (20, 4), (8, 24)):
        part, width = drawn[:, first : first + tokens], ALPHA / (tokens * HIDDEN) ** 0.5
        assert float(part.abs().max()) <= width
        assert abs(float(part.std()) * 3**0.5 / width - 1) < 0.02 and abs(float(part.mean())) < 0.02 * width


def test_drawn_by_seed_step_and_place() -> None:
    first = noise().draw(3, 1, batch())
    assert torch.equal(first, noise().draw(3, 1, batch()))
    others = (noise().draw(4, 1, batch()), noise().draw(3, 2, batch()), noise(seed=9).draw(3, 1, batch()))
    assert all(not torch.equal(first, other) for other in others)
    # rows 2 and 3 of a global batch, in micro-batches of two or one by one
    alone = replace(batch(), **{n: getattr(batch(), n)[:1] for n in ("tokens", "labels", "positions", "documents")})
    alone = with_lengths(replace(alone, fields={}))
    apart = [noise().draw(3, place, alone) for place in (2, 3)]
    assert torch.equal(torch.cat(apart), first)


def _losses(alpha: float) -> tuple[float, float]:
    """Of a training step, and of an evaluation."""
    overrides = runs.tiny(Path("unused"), "unused", f"task.neftune_alpha={alpha}", "train.global_batch_size=2")
    resolved = resolve({}, [*overrides, "model.max_seq_len=32", "train.seq_len=32", "train.micro_batch_size=2"])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        info = ProcessInfo(rank=0, local_rank=0, world_size=1, local_world_size=1)
        parts = build_parts(resolved.config, resolved.registry, info, torch.device("cpu"))
        found: list[float] = []
        with torch.no_grad():
            parts.staged.evaluate(
                parts.staged.prepare([replace(batch(), fields={})]), lambda terms: found.append(float(terms.loss_sum))
            )
        parts.step.train()
        outcome = parts.step.run(1, [replace(batch(), fields={})])
        return float(outcome.loss_sum), found[0]
    finally:
        dist.destroy_process_group()


def test_only_where_something_is_learned() -> None:
    noisy, plain = _losses(50.0), _losses(0.0)
    assert abs(noisy[0] - plain[0]) > 1e-3, "no noise in training"
    assert noisy[1] == plain[1], "noise in an evaluation"
