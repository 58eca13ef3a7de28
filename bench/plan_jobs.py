"""What `bench/plan.py` predicts and then measures: recipes unlike each other, dense and mixtures of experts.

Models are cut in depth, at full width, to what one or two H200s hold. One recipe of each set is predicted not to fit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import jobs

PARTS = ("one", "two")
"""By the GPUs that a recipe takes, the smaller first."""
ROOT = Path(__file__).parents[1]
_1B, _8B, _13B = "recipes/llama3_1b.toml", "recipes/llama3_8b.toml", "recipes/gpt_13b.toml"
_QWEN3, _MIXTRAL = "recipes/qwen3_moe_12l.toml", "recipes/moe/mixtral_4l.toml"
_DEEPSEEK = "recipes/moe/deepseek_v2_lite_10l.toml"

_PLAIN = ("parallel.fused_weight_gradients=false", "optim.fused_update=false")
_WIDE_SUMS = ("parallel.accumulate_dtype=fp32", "parallel.reduce_dtype=fp32")
_FUSED_EXPERTS = (
    "parallel.compile=true",
    "parallel.fused_weight_gradients=true",
    "optim.fused_update=true",
)

_FP8 = ("train.precision=fp8", "train.fp8_cast_kernel=triton", "train.fp8_head=true")


@dataclass(frozen=True, kw_only=True)
class Job(jobs.Job):
    """One recipe. ``estimate``: compiled kernels not there yet."""

    gemm_seconds: float = 1.0


def _job(part: str, name: str, recipe: str, title: str, sets: str, *more: str, estimate: float = 35.0) -> Job:
    """``sets``: of `train` where they say nothing else, separated by blanks."""
    short = {"layers": "model.num_layers", "seq": "train.seq_len", "micro": "train.micro_batch_size"}
    short |= {"batch": "train.global_batch_size", "recompute": "parallel.recompute"}
    pairs = [item.partition("=") for item in sets.split()]
    found = tuple(f"{short.get(key, key)}={value}" for key, _, value in pairs)
    processes = 1 if part == "one" else 2
    return Job(
        part=part, name=name, title=title, recipe=recipe, processes=processes, sets=(*found, *more),
        estimate=estimate, warm_up=3, steps=10,
    )  # fmt: skip


def one_gpu_jobs() -> list[Job]:
    def job(name: str, recipe: str, title: str, sets: str, *more: str, estimate: float = 35.0) -> Job:
        return _job("one", name, recipe, title, sets, *more, estimate=estimate)

    eager = ("parallel.compile=false",)
    return [
        job("1b_2k", _1B, "1B, sequences of 2k", "seq=2048 micro=8 batch=32"),
        job("8b_10l_4k", _8B, "8B widths, 10 layers, 4k, nothing recomputed",
            "layers=10 seq=4096 micro=2 batch=8 recompute=none"),
        job("qwen3_6l", _QWEN3, "128 experts, 6 layers, Triton's experts, all fused",
            "layers=6 micro=2 batch=8", *_FUSED_EXPERTS, "parallel.expert_kernels=triton"),
        job("8b_8l_fp8", _8B, "8B widths, 8 layers, fp8",
            "layers=8 seq=4096 micro=2 batch=8", "train.precision=fp8"),
        job("13b_8l_2k", _13B, "13B GPT, 8 layers, 2k, flat engine, nothing recomputed",
            "layers=8 micro=4 batch=16 recompute=none",
            "parallel.zero=1"),
        job("1b_32k", _1B, "1B, sequences of 32k, selective recomputation",
            "seq=32768 micro=1 batch=2 recompute=selective",
            "model.max_seq_len=32768"),
        job("8b_14l_full", _8B, "8B widths, 14 layers, 8k, micro-batches of 4, full recomputation",
            "layers=14 micro=4 batch=4 recompute=full",
            estimate=50.0),
        job("8b_8l_wide_sums", _8B, "8B widths, 8 layers, 2k, fp32 sums, nothing fused",
            "layers=8 seq=2048 micro=8 batch=16",
            *_PLAIN, *_WIDE_SUMS),
        job("1b_eager", _1B, "1B, 4k, not compiled, nothing fused",
            "seq=4096 micro=4 batch=16", *_PLAIN, *eager, estimate=28.0),
        job("mixtral_2l", _MIXTRAL, "8 experts, 2 layers, grouped products, all fused",
            "layers=2 micro=2 batch=8", *_FUSED_EXPERTS, "parallel.expert_kernels=grouped"),
        job("8b_23l_tight", _8B, "8B widths, 23 layers, 8k, nothing recomputed: nearly all of the card",
            "layers=23 micro=1 batch=2 recompute=none"),
        job("deepseek_6l", _DEEPSEEK, "latent attention, 64 experts, 6 layers, Triton's experts",
            "layers=6 micro=2 batch=8", *_FUSED_EXPERTS, "parallel.expert_kernels=triton"),
        job("13b_6l_plain_loss", _13B, "13B GPT, 6 layers, 2k, whole logits, not compiled, full recomputation",
            "layers=6 micro=8 batch=16 recompute=full", "parallel.zero=1", "train.loss_kernel=plain", *eager),
        job("qwen3_4l_plain", _QWEN3, "128 experts, 4 layers, operations of torch, not compiled",
            "layers=4 micro=1 batch=4", *eager, *_PLAIN, "parallel.expert_kernels=plain"),
        job("8b_10l_rowwise", _8B, "8B widths, 10 layers, 2k, fp8 with scales of rows, full recomputation",
            "layers=10 seq=2048 micro=4 batch=16 recompute=full", "train.precision=fp8", "train.fp8_scaling=rowwise"),
        job("8b_26l_too_large", _8B, "8B widths, 26 layers, 8k, nothing recomputed: predicted not to fit",
            "layers=26 micro=2 batch=4 recompute=none"),
        job("1b_fp8", _1B, "1B, 8k, fp8, kernels of casts, head in fp8",
            "micro=2 batch=8", *_FP8),
        job("13b_10l_fp8", _13B, "13B GPT, 10 layers, 2k, fp8 with scales of earlier steps, flat engine",
            "layers=10 micro=4 batch=8 recompute=none", "parallel.zero=1", *_FP8, "train.fp8_scaling=delayed"),
        job("8b_32l_lora", _8B, "8B whole, 4k, frozen but for adapters of rank 16",
            "seq=4096 micro=2 batch=8 recompute=none", "lora.rank=16", "parallel.fused_weight_gradients=false",
            estimate=50.0),
        job("deepseek_8l_micro4", _DEEPSEEK, "latent attention, 64 experts, 8 layers, micro-batches of 4, bf16 sums",
            "layers=8 micro=4 batch=8", *_FUSED_EXPERTS, "parallel.accumulate_dtype=bf16"),
        job("mixtral_3l_selective", _MIXTRAL, "8 experts, 3 layers, selective recomputation, micro-batches of 4",
            "layers=3 micro=4 batch=8 recompute=selective", *_FUSED_EXPERTS),
        job("qwen3_5l_fp8", _QWEN3, "128 experts, 5 layers, fp8 experts and linears",
            "layers=5 micro=2 batch=8", *_FUSED_EXPERTS, "parallel.expert_kernels=triton", "train.precision=fp8",
            "train.fp8_experts=true"),
    ]  # fmt: skip


def two_gpu_jobs() -> list[Job]:
    def job(name: str, recipe: str, title: str, sets: str, *more: str, estimate: float = 45.0) -> Job:
        return _job("two", name, recipe, title, sets, *(f"parallel.{item}" for item in more), estimate=estimate)

    unfused = "fused_weight_gradients=false"
    return [
        job("8b_zero1", _8B, "8B whole, 8k, ZeRO-1", "batch=8", estimate=75.0),
        job("8b_zero3", _8B, "8B whole, 4k, ZeRO-3, full recomputation",
            "seq=4096 micro=2 batch=8 recompute=full",
            "zero=3", "accumulate_dtype=fp32", unfused, estimate=75.0),
        job("8b_16l_tp2", _8B, "8B widths, 16 layers, 8k, tp 2",
            "layers=16 micro=1 batch=4", "tp=2"),
        job("8b_16l_pp2", _8B, "8B widths, 16 layers, 4k, pp 2",
            "layers=16 seq=4096 micro=1 batch=8", "pp=2"),
        job("8b_16l_interleaved", _8B, "8B widths, 16 layers, 4k, pp 2, 2 stages a rank",
            "layers=16 seq=4096 micro=1 batch=8",
            "pp=2", "pipeline_schedule=interleaved_1f1b", "stages_per_rank=2"),
        job("8b_16l_cp2", _8B, "8B widths, 16 layers, 32k, cp 2, ring",
            "layers=16 seq=32768 micro=1 batch=2 model.max_seq_len=32768", "cp=2"),
        job("8b_16l_ulysses", _8B, "8B widths, 16 layers, 16k, cp 2, Ulysses",
            "layers=16 seq=16384 micro=1 batch=4 model.max_seq_len=16384",
            "cp=2", "cp_method=ulysses"),
        job("13b_16l_zero2", _13B, "13B GPT, 16 layers, 2k, ZeRO-2",
            "layers=16 micro=4 batch=16", "zero=2"),
        job("qwen3_8l_zero1", _QWEN3, "128 experts, 8 layers, ZeRO-1, grouped products",
            "layers=8 micro=2 batch=16 optim.fused_update=false",
            "compile=true", "expert_kernels=grouped", "fused_weight_gradients=true"),
        job("qwen3_8l_ep2", _QWEN3, "128 experts, 8 layers, ep 2, Triton's experts",
            "layers=8 micro=2 batch=16 optim.fused_update=false",
            "ep=2", "compile=false", "expert_kernels=triton", "fused_weight_gradients=true"),
    ]  # fmt: skip


def jobs_of(part: str) -> list[Job]:
    return {"one": one_gpu_jobs, "two": two_gpu_jobs}[part]()


def all_jobs() -> list[Job]:
    return [job for part in PARTS for job in jobs_of(part)]


_TINY = (
    "cluster.device=cpu",
    "model.hidden_size=64",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.head_dim=16",
    "model.ffn_size=96",
    "model.max_seq_len=64",
    "model.vocab_size=512",
    "train.seq_len=64",
    "train.loss_chunk_tokens=64",
    "data.num_workers=0",
    "parallel.compile=false",
)
_TINY_EXPERTS = ("model.num_experts=8", "model.top_k=2", "model.moe.ffn_size=32")
_TINY_LATENT = ("model.kv_lora_rank=16", "model.qk_nope_head_dim=16", "model.qk_rope_head_dim=8", "model.v_head_dim=16")


def tiny(job: Job) -> Job:
    """The same with a model that a CPU trains in seconds: whether it runs at all."""
    sets = (*job.sets, *_TINY, f"model.num_layers={4 if 'parallel.stages_per_rank=2' in job.sets else 2}")
    if job.recipe in (_QWEN3, _MIXTRAL, _DEEPSEEK):
        sets = (*sets, *_TINY_EXPERTS)
    if job.recipe == _DEEPSEEK:
        latent = {"model.num_kv_heads=2", "model.head_dim=16"}
        sets = (*(item for item in sets if item not in latent), *_TINY_LATENT)
    return replace(job, sets=sets, warm_up=1, steps=1, gemm_seconds=0.05, estimate=30.0)
