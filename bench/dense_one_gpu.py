"""What `bench/dense.py --one-gpu` runs: the same entries on one GPU, larger models cut in depth.

An entry that wants two GPUs runs on one with the layers of `LAYERS`, at full width, and half the global batch: a GPU's
sequences and accumulation steps stay what they are. Entries that cut matrices over GPUs are left out. What one process
runs anyway stays whole.
"""

from __future__ import annotations

import math
from dataclasses import replace

import dense_jobs
from dense_jobs import Job

from paceline.config.load import load_recipe
from paceline.config.run import RunConfig
from paceline.costs.layers import training_flops_per_token

LAYERS = {"llama3_8b": 14, "gpt_13b": 8}
"""By preset: as many as leave room for every entry on one H200, about 80 and 56 GiB."""
SAVED_LAYERS = 6
"""Of the llama3_8b whose checkpoint is written: 2.4B parameters, 28 GB with masters and moments."""
WARM_UP, GEMM_SECONDS = 2, 2.0
"""Shorter than on two GPUs: one step compiles, one more fills the caches; the card is hot by then."""

_START, _COMPILE, _COMPILE_FP8, _FLASH4 = 17.0, 10.0, 17.0, 15.0
"""Seconds of imports, process group, model and end; of the first step with no compiled kernels there, by precision;
what FlashAttention-4 compiles at each start. The first three as in docs/measured/fused_one_gpu.jsonl."""
_RATE, _NAIVE_RATE = 530e12, 190e12
"""FLOP/s of a step, for estimates: what the slower of fused and of eager recipes reach."""
_WRITING, _PROFILING = 45.0, 10.0


def cuts() -> dict[str, str]:
    """By preset: "14 of 32 layers"."""
    whole = {preset: load_recipe(str(dense_jobs.ROOT / "recipes" / f"{preset}.toml"), []) for preset in LAYERS}
    return {preset: f"{LAYERS[preset]} of {recipe.config.model.num_layers} layers" for preset, recipe in whole.items()}


def jobs_of(part: str) -> list[Job]:
    return [on_one_gpu(job) for job in dense_jobs.jobs_of(part) if not needs_two(job)]


def needs_two(job: Job) -> bool:
    """Whether what it measures is how matrices lie on two GPUs."""
    parallel = _config(job).parallel
    return parallel.tp * parallel.pp * parallel.cp > 1


def on_one_gpu(job: Job) -> Job:
    config = _config(job)
    if job.processes > 1:
        preset, whole = config.model.preset, config.model.num_layers
        layers = SAVED_LAYERS if config.checkpoint.interval else LAYERS[preset]
        batch = config.train.global_batch_size // job.processes
        sets = (*job.sets, f"model.num_layers={layers}", f"train.global_batch_size={batch}")
        job = replace(job, processes=1, sets=sets, cut=f"one GPU, {layers} of {whole} layers")
    elif job.kind == "ceilings":
        job = replace(job, cut="one GPU, " + ", ".join(f"{name} {cut}" for name, cut in cuts().items()))
    if job.kind == "bench":
        job = replace(job, warm_up=WARM_UP, gemm_seconds=GEMM_SECONDS)
    return job if job.kind in ("curve", "ceilings") else replace(job, estimate=estimate(job))


def estimate(job: Job) -> float:
    """Seconds from start to end on an H200 with no compiled kernels there."""
    config, steps = _config(job), job.warm_up + job.steps
    eager = config.train.attention_kernel == "reference" or not config.parallel.compile
    tokens = config.train.global_batch_size * config.train.seq_len
    flops = tokens * training_flops_per_token(config.model, config.train.seq_len)
    seconds = _START
    if config.parallel.compile:
        seconds += _COMPILE_FP8 if config.train.precision == "fp8" else _COMPILE
    if config.train.attention_kernel == "flash4":
        seconds += _FLASH4
    if job.kind == "bench":
        seconds += job.gemm_seconds * (2 if config.train.precision == "fp8" else 1)
    elif job.kind == "profile":
        seconds += _PROFILING
    else:
        steps, seconds = config.train.steps, seconds + (_WRITING if config.checkpoint.interval else 0.0)
    return math.ceil(seconds + steps * flops / (_NAIVE_RATE if eager else _RATE))


def _config(job: Job) -> RunConfig:
    return load_recipe(str(dense_jobs.ROOT / job.recipe), list(job.sets)).config
