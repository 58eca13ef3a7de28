"""What `bench/tune.py` runs: tunings of the naive recipe, hand-made recipes beside them, and a sweep of 60 points.

The sweep is of a cut model on one GPU: every point is measured once, and the search is then run on the table of
results, which tells how many trials it would have needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import jobs

from paceline.config.load import load_recipe

PARTS = ("ladder", "hand", "sweep")
ROOT = Path(__file__).parents[1]
NAIVE = "recipes/ladder/naive.toml"
BATCH_OF_6 = ("train.micro_batch_size=3", "train.global_batch_size=6")
"""As many sequences as the fastest rungs of the ladder have: two leave a GPU one, and nothing to choose."""
ONE_GPU_LAYERS = 8
_ONE_GPU = (f"model.num_layers={ONE_GPU_LAYERS}",)


@dataclass(frozen=True, kw_only=True)
class Job(jobs.Job):
    """One tuning (`tune`), or one `paceline bench train`."""

    allow: tuple[str, ...] = ()
    """What `tune` is allowed beside the rest."""
    budget: str = "20m"
    trials: int = 200
    vary: tuple[str, ...] = ()
    changes: tuple[tuple[str, Any], ...] = ()
    """Of a point of the sweep, from its base."""
    gemm_seconds: float = 0.2
    group: str = ""
    """Whose batch a hand-made recipe has: it is compared with tunings of the same."""


def tunings() -> list[Job]:
    def job(name: str, title: str, *sets: str, allow: tuple[str, ...] = ()) -> Job:
        return Job(
            part="ladder", name=name, title=title, recipe=NAIVE, processes=2, sets=sets, estimate=90.0, kind="tune",
            allow=allow, group="any" if "batch" in allow else "batch6" if sets else "naive",
        )  # fmt: skip

    return [
        job("naive", "the naive recipe, 2 sequences a step"),
        job("naive_precision", "the same, --allow precision", allow=("precision",)),
        job("naive_batch", "the naive recipe, --allow batch", allow=("batch",)),
        job("naive_batch_precision", "the same, --allow batch --allow precision", allow=("batch", "precision")),
        job("batch6", "the naive recipe, 6 sequences a step", *BATCH_OF_6),
        job("batch6_precision", "the same, --allow precision", *BATCH_OF_6, allow=("precision",)),
    ]


_FAST = (
    "train.attention_kernel=auto",
    "train.loss_kernel=chunked",
    "parallel.compile=true",
    "parallel.recompute=selective",
    "optim.fused_update=true",
)
_TENSOR = ("parallel.tp=2", "parallel.zero=1", "parallel.fused_weight_gradients=true")
_FP8 = ("train.precision=fp8", "train.fp8_cast_kernel=triton", "parallel.reduce_dtype=bf16")


def hand_made() -> list[Job]:
    """What somebody who knows docs/ladder.md would write, with the batches of the tunings."""

    def job(group: str, name: str, title: str, *sets: str) -> Job:
        batch = BATCH_OF_6 if group == "batch6" else ()
        return Job(
            part="hand", name=f"{group}_{name}", title=title, recipe=NAIVE, processes=2, sets=(*batch, *_FAST, *sets),
            estimate=60.0, warm_up=3, steps=8, group=group, allow=("precision",) if name.startswith("fp8") else (),
        )  # fmt: skip

    def rung(name: str, title: str, *sets: str, allow: tuple[str, ...] = ("batch", "precision")) -> Job:
        return Job(
            part="hand", name=f"any_{name}", title=title, recipe=f"recipes/ladder/{name}.toml", processes=2, sets=sets,
            estimate=60.0, warm_up=3, steps=8, group="any", allow=allow,
        )  # fmt: skip

    found = [
        rung("6_micro_batch", "rung 6, gradients reduced in fp32", "parallel.reduce_dtype=fp32", allow=("batch",)),
        rung("7_gathered", "rung 7"),
        rung("10_fp8_head", "rung 10"),
    ]
    for group, sequences in (("naive", 2), ("batch6", 6)):
        micro = "train.micro_batch_size=" + ("2" if group == "naive" else "3")
        words = f"{sequences} sequences: "
        found += [
            job(group, "selective", words + "sharded, selective recomputation"),
            job(group, "tensor", words + "tensor parallel", *_TENSOR, micro),
            job(group, "fp8", words + "sharded, fp8", *_FP8),
            job(group, "fp8_head", words + "sharded, fp8, the head too", *_FP8, "train.fp8_head=true"),
        ]
    return found


# ---- the sweep

SWEPT = "recipes/llama3_8b.toml"
SWEEP_BASE = (
    "model.num_layers=6",
    "train.seq_len=4096",
    "train.global_batch_size=16",
    "train.micro_batch_size=1",
    "parallel.recompute=full",
    "parallel.compile=false",
    "parallel.fused_weight_gradients=false",
)
SWEEP: Mapping[str, tuple[Any, ...]] = {
    "train.micro_batch_size": (1, 2, 4, 8, 16),
    "parallel.recompute": ("none", "selective", "full"),
    "parallel.compile": (False, True),
    "parallel.fused_weight_gradients": (False, True),
}
"""The first values, with full recomputation, are the base's."""


def sweep() -> list[Job]:
    found = []
    for values in product(*SWEEP.values()):
        point = dict(zip(SWEEP, values, strict=True))
        sets = tuple(f"{key}={str(value).lower()}" for key, value in point.items())
        words = [f"mb{point['train.micro_batch_size']}", str(point["parallel.recompute"])]
        words += ["compiled"] if point["parallel.compile"] else []
        words += ["fused"] if point["parallel.fused_weight_gradients"] else []
        found.append(
            Job(
                part="sweep",
                name="_".join(words),
                title=" ".join(words),
                recipe=SWEPT,
                processes=1,
                sets=(*SWEEP_BASE, *sets),
                estimate=34.0 if point["parallel.compile"] else 28.0,
                warm_up=2,
                steps=5,
                changes=tuple(point.items()),
            )
        )
    return found


def jobs_of(part: str) -> list[Job]:
    return {"ladder": tunings, "hand": hand_made, "sweep": sweep}[part]()


def on_one_gpu(part: str) -> list[Job]:
    """The same with 8 of 40 layers and half the batch on one GPU; what cuts matrices over two is left out."""
    found = []
    for job in jobs_of(part):
        if part != "sweep":
            if job.name.endswith("_tensor"):
                continue
            batch = (
                3
                if job.group == "batch6"
                else load_recipe(str(ROOT / job.recipe), []).config.train.global_batch_size // 2
            )
            sets = [item for item in job.sets if not item.startswith("train.global_batch_size=")]
            job = replace(
                job, processes=1, sets=(*sets, f"train.global_batch_size={batch}", *_ONE_GPU), estimate=45.0,
                cut=f"one GPU, {ONE_GPU_LAYERS} of 40 layers",
            )  # fmt: skip
        found.append(job)
    return found


_TINY = (
    "cluster.device=cpu",
    "model.num_layers=1",
    "model.hidden_size=32",
    "model.num_heads=2",
    "model.num_kv_heads=2",
    "model.head_dim=16",
    "model.ffn_size=64",
    "model.max_seq_len=32",
    "model.vocab_size=128",
    "train.seq_len=32",
    "train.loss_chunk_tokens=32",
    "train.fp8_cast_kernel=torch",
    "data.num_workers=0",
)


def tiny(job: Job) -> Job:
    """The same with a model that a CPU trains in seconds: whether it runs at all."""
    sets = tuple(item for item in (*job.sets, *_TINY) if item != "parallel.compile=true")
    return replace(
        job, sets=(*sets, "parallel.compile=false"), warm_up=1, steps=2, gemm_seconds=0.05, estimate=30.0,
        processes=1 if job.kind == "tune" else job.processes, trials=2, budget="10m",
        vary=("parallel.recompute=none,full",),
    )  # fmt: skip
