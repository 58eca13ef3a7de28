"""A reference model is counted: its bytes as the engine holds them, its forward pass in the step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distributed import run
from paceline.config.load import resolve
from paceline.config.run import RunConfig
from paceline.costs.grid import RankGrid
from paceline.costs.hardware import find_hardware
from paceline.costs.memory import estimate
from paceline.costs.reference import extra_head_forwards, has_copy, reference_bytes, runs_reference
from paceline.costs.step import predict
from paceline.costs.workload import Cluster, Workload
from paceline.runtime.process import ProcessInfo
from paceline.training.reference import FrozenCopy
from paceline.training.setup import build_parts
from tests.training import runs


def config(*sets: str) -> RunConfig:
    return resolve({}, runs.tiny(Path("unused"), "unused.jsonl", "train.precision=bf16", *sets)).config


def _held(rank: int, world_size: int, layouts: list[str]) -> list[tuple[int, int]]:
    found = []
    for layout in layouts:
        resolved = resolve({}, runs.tiny(Path("unused"), "unused", "train.precision=bf16", *layout.split()))
        info = ProcessInfo(rank=rank, local_rank=rank, world_size=world_size, local_world_size=world_size)
        parts = build_parts(resolved.config, resolved.registry, info, torch.device("cpu"))
        assert isinstance(parts.reference, FrozenCopy)
        grid = RankGrid(parallel=resolved.config.parallel, world_size=world_size)
        predicted = reference_bytes(resolved.config, grid, parts.mesh["pp"].index)
        found.append((predicted, parts.reference.engine.bytes_by_kind()["parameters"]))
    return found


def test_bytes_are_those_of_the_engine() -> None:
    kind = "task.kind=dpo model.tie_embeddings=true"
    layouts = [f"{kind} parallel.{each}" for each in ("zero=1", "tp=2 parallel.zero=1", "pp=2", "zero=3")]
    for rank in run(_held, 2, layouts):
        for predicted, held in rank:
            assert held == pytest.approx(predicted, rel=0.01) and held > 0


def test_who_has_a_copy_and_who_runs_a_reference() -> None:
    for sets, runs_one, copy, heads in (
        (("task.kind=dpo",), True, True, 2),
        (("task.kind=kto",), True, True, 2),
        (("task.kind=dpo", "lora.rank=4"), True, False, 2),
        (("task.kind=dpo", "lora.rank=4", "task.reference=there"), True, True, 2),
        (("task.kind=dpo", "task.precompute_reference=true"), False, False, 1),
        (("task.kind=dpo", "task.reference=none"), False, False, 1),
        (("task.kind=orpo",), False, False, 1),
        (("task.kind=reward", "model.head=score"), False, False, 0),
        (("task.kind=sft",), False, False, 0),
    ):
        found = config(*sets)
        assert (runs_reference(found), has_copy(found), extra_head_forwards(found)) == (runs_one, copy, heads), sets


def test_memory_and_time_hold_it() -> None:
    shape = ("model.preset=llama3_8b", "train.seq_len=4096", "model.max_seq_len=8192", "parallel.zero=3")
    plain, dpo = (
        resolve({}, [*shape, "train.global_batch_size=8", "data.train=pairs.jsonl", f"task.kind={kind}"]).config
        for kind in ("sft", "dpo")
    )
    eighth = estimate(dpo, 8).reference
    assert eighth == pytest.approx(2 * 8.03e9 / 8, rel=0.01)
    assert estimate(plain, 8).reference == 0
    card = find_hardware("H200 SXM")
    assert card is not None
    cluster = Cluster(gpu=card, gpus=8)
    before, after = (predict(Workload.of(each), cluster) for each in (plain, dpo))
    # a forward is a third of a step, more or less: what is recomputed and exposed does not grow
    assert 1.2 < after.seconds / before.seconds < 1.45
    assert after.memory_bytes - before.memory_bytes == pytest.approx(eighth, rel=0.02)
    assert after.parts["optimizer"] == before.parts["optimizer"]
