"""What `build_parts` makes is freed when nobody uses it: several runs in one process must not add up."""

from __future__ import annotations

import gc

from distributed import run as on_ranks
from paceline.models.transformer import Transformer
from paceline.parallel.mesh import ParallelMesh
from tests.training.steps import Job, run_jobs

EXPERTS = ("model.num_experts=4", "model.top_k=2", "model.moe.ffn_size=16")
LAYOUTS = (
    ("parallel.zero=0",),
    ("parallel.zero=1",),
    ("parallel.zero=2",),
    ("parallel.zero=3",),
    ("parallel.tp=2",),
    ("parallel.cp=2", "parallel.recompute=full"),
    ("parallel.cp=2", "parallel.cp_method=ulysses"),
    ("parallel.ep=2", *EXPERTS),
    ("parallel.pp=2", "model.tie_embeddings=true"),
    ("parallel.pp=2", "parallel.pipeline_schedule=zbv", "parallel.stages_per_rank=2", "model.num_layers=4"),
)


def test_models_meshes_and_their_groups_are_freed() -> None:
    jobs = [Job(sets=sets, steps=1, micro=1) for sets in LAYOUTS]
    for left in on_ranks(_left_after, 2, jobs):
        assert left == [[] for _ in jobs]


def _left_after(rank: int, world_size: int, jobs: list[Job]) -> list[list[str]]:
    found = []
    for job in jobs:
        run_jobs(rank, world_size, [job])
        gc.collect()
        found.append([type(each).__name__ for each in gc.get_objects() if type(each) in (Transformer, ParallelMesh)])
    return found
