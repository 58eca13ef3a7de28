"""What `bench/dense.py` runs: the dense table, the ladder, variants to choose from, curves, overheads and profiles."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import jobs

from paceline.config.run import RunConfig

PARTS = ("dense", "ladder", "tune", "curves", "overheads", "profile", "ceilings")
"""In the order of their importance."""
ROOT = Path(__file__).parents[1]
STEPS_PLUGIN = "bench/dense_steps.py"


def fused_switches() -> tuple[str, ...]:
    """Every field of the schema that switches on a fused kernel in the place of operations of torch."""
    sections = {name: getattr(RunConfig(), name) for name in ("model", "train", "parallel", "optim")}
    fields = ((section, name) for section, value in sections.items() for name in type(value).model_fields)
    return tuple(f"{section}.{name}" for section, name in fields if name.startswith("fused_"))


FUSED_ON = tuple(f"{switch}=true" for switch in fused_switches())
FUSED_OFF = tuple(f"{switch}=false" for switch in fused_switches())


@dataclass(frozen=True, kw_only=True)
class Job(jobs.Job):
    """One start of `paceline`. ``estimate``: compiled kernels not there yet."""

    kind: Literal["bench", "train", "curve", "profile", "ceilings"] = "bench"
    work: str = ""
    """Row of the dense table that this is a candidate for: the fastest one that is there stands in it."""
    gemm_seconds: float = 5.0


# ---- the ladder: recipes/ladder, each one change above the one before

NAIVE = "naive"
RUNGS = (
    NAIVE,
    "1_attention",
    "2_loss",
    "3_compile",
    "4_recompute",
    "5_reduction",
    "6_micro_batch",
    "7_gathered",
    "8_fp8",
    "9_fp8_casts",
    "10_fp8_head",
)
FP8_RUNGS = ("8_fp8", "9_fp8_casts", "10_fp8_head")
BESIDE = {"side_tensor": "6_micro_batch"}
"""Measured beside the ladder, and the rung that it stands against: another way to do without single sequences."""
_RUNG_SECONDS = 60.0


def change_of(recipe: str) -> str:
    """What a rung changes: the first line of its recipe, a comment."""
    return (ROOT / recipe).read_text(encoding="utf-8").splitlines()[0].removeprefix("#").strip()


def ladder_jobs() -> list[Job]:
    def job(name: str) -> Job:
        recipe = f"recipes/ladder/{name}.toml"
        work = {NAIVE: "13b_naive", **dict.fromkeys(FP8_RUNGS, "13b_fp8")}.get(name, "13b_bf16")
        # the first and the last rungs are rows of the dense table: their ceiling is measured in full
        short = name not in (NAIVE, "6_micro_batch", "7_gathered", *FP8_RUNGS, *BESIDE)
        return Job(
            part="ladder",
            name=name,
            title=change_of(recipe),
            recipe=recipe,
            processes=2,
            work=work,
            estimate=_RUNG_SECONDS,
            warm_up=3,
            gemm_seconds=2.0 if short else 5.0,
        )

    return [job(name) for name in (*RUNGS, *BESIDE)]


# ---- the dense table

_DATASET = ("data.train=data/demo-train", "data.valid=", "checkpoint.save_last=false", "checkpoint.interval=0")
_TRAIN = (f"run.plugins=['{STEPS_PLUGIN}']", "observe.progress=lines", "observe.sample_prompts=[]")
_8B, _8B_FP8, _1B = (f"recipes/{name}.toml" for name in ("llama3_8b", "llama3_8b_fp8", "llama3_1b"))
_FP8, _FLASH4 = "train.precision=fp8", "train.attention_kernel=flash4"
_PIPELINE = (
    "parallel.pp=2",
    "parallel.pipeline_schedule=interleaved_1f1b",
    "parallel.stages_per_rank=5",
    "parallel.recompute=none",
)
_TRITON, _FP8_HEAD, _ALONE = "train.fp8_cast_kernel=triton", "train.fp8_head=true", "train.fp8_weights_only=true"
_DELAYED = "train.fp8_scaling=delayed"


def _train_job(part: str, name: str, recipe: str, processes: int, title: str, estimate: float, *more: str) -> Job:
    # as many steps as the bench, of which as many are measured
    sets = (*_DATASET, *_TRAIN, "train.steps=14", "observe.log_interval=5", *more)
    return Job(
        part=part,
        name=name,
        title=title,
        recipe=recipe,
        processes=processes,
        kind="train",
        sets=sets,
        estimate=estimate,
    )


def dense_jobs() -> list[Job]:
    """The issue's rows, the two-GPU ones first; the 13B's are rungs of the ladder."""
    ladder = {job.name: job for job in ladder_jobs()}

    def bench(name: str, recipe: str, processes: int, estimate: float, *sets: str) -> Job:
        return Job(
            part="dense", name=name, title=name, recipe=recipe, processes=processes, work=name, sets=sets,
            estimate=estimate,
        )  # fmt: skip

    return [
        bench("8b_bf16", _8B, 2, 90.0),
        _train_job("dense", "8b_train", _8B, 2, "8b_bf16", 75.0),
        ladder["7_gathered"],
        ladder[NAIVE],
        bench("1b_bf16", _1B, 1, 50.0),
        bench("8b_fp8", _8B, 2, 90.0, _FP8),
        ladder["10_fp8_head"],
        _train_job("dense", "1b_train", _1B, 1, "1b_bf16", 40.0),
    ]


def tune_jobs() -> list[Job]:
    """Other ways to the same work; one that is faster takes its row of the dense table."""

    def job(name: str, work: str, recipe: str, title: str, *sets: str) -> Job:
        processes = 1 if work.startswith("1b") else 2
        return Job(
            part="tune", name=name, title=title, recipe=recipe, processes=processes, work=work, sets=sets,
            estimate=40.0 if processes == 1 else 80.0, warm_up=3,
        )  # fmt: skip

    tensor, top, low = (f"recipes/ladder/{name}.toml" for name in ("side_tensor", "7_gathered", "10_fp8_head"))
    return [
        job("13b_none", "13b_bf16", top, "nothing recomputed", "parallel.recompute=none"),
        job("13b_none_flash4", "13b_bf16", top, "the same, FlashAttention-4", "parallel.recompute=none", _FLASH4),
        job("13b_fp8_flash4", "13b_fp8", low, "all in fp8, FlashAttention-4", _FLASH4),
        job(
            "13b_pipeline", "13b_bf16", top, "half of the layers on each GPU, interleaved; nothing recomputed",
            *_PIPELINE,
        ),
        job(
            "13b_pipeline_fp8", "13b_fp8", low, "the same in fp8, bf16 weights beside", *_PIPELINE,
            "train.fp8_weights_only=false",
        ),
        job(
            "13b_tensor_fp8", "13b_fp8", tensor, "tensor parallel, fused kernels, fp8",
            *FUSED_ON, "parallel.accumulate_dtype=bf16", _FP8, _TRITON, _FP8_HEAD,
        ),
        job("8b_none", "8b_bf16", _8B, "nothing recomputed", "parallel.recompute=none"),
        job("8b_none_flash4", "8b_bf16", _8B, "the same, FlashAttention-4", "parallel.recompute=none", _FLASH4),
        job("1b_flash4", "1b_bf16", _1B, "FlashAttention-4", _FLASH4),
        job("8b_fp8_flash4", "8b_fp8", _8B, "FlashAttention-4", _FP8, _FLASH4),
        job("13b_tensor_fused", "13b_bf16", tensor, "tensor parallel, fused kernels", *FUSED_ON,
            "parallel.accumulate_dtype=bf16",
        ),
        job("8b_fp8_triton", "8b_fp8", _8B, "casts and gated MLP by Triton kernels", _FP8, _TRITON),
        job(
            "8b_fp8_fused_triton", "8b_fp8", _8B, "casts and gated MLP by Triton kernels, nothing recomputed",
            _FP8, _TRITON, "parallel.recompute=none",
        ),
        job(
            "8b_fp8_triton_head", "8b_fp8", _8B, "Triton kernels, nothing recomputed, the head in fp8 too",
            _FP8, _TRITON, "parallel.recompute=none", _FP8_HEAD,
        ),
        job(
            "8b_fp8_alone", "8b_fp8", _8B, "Triton kernels, nothing recomputed, head in fp8, no bf16 weights beside",
            _FP8, _TRITON, "parallel.recompute=none", _FP8_HEAD, _ALONE,
        ),
        job(
            "8b_fp8_alone_flash4", "8b_fp8", _8B, "the same, FlashAttention-4",
            _FP8, _TRITON, "parallel.recompute=none", _FP8_HEAD, _ALONE, _FLASH4,
        ),
        job(
            "8b_fp8_triton_head_flash4", "8b_fp8", _8B,
            "Triton kernels, nothing recomputed, the head in fp8 too, FlashAttention-4",
            _FP8, _TRITON, "parallel.recompute=none", _FP8_HEAD, _FLASH4,
        ),
        job(
            "8b_fp8_delayed", "8b_fp8", _8B,
            "Triton kernels, nothing recomputed, the head in fp8 too, scales of earlier steps",
            _FP8, _TRITON, "parallel.recompute=none", _FP8_HEAD, _DELAYED,
        ),
        job(
            "8b_fp8_delayed_flash4", "8b_fp8", _8B, "the same, FlashAttention-4",
            _FP8, _TRITON, "parallel.recompute=none", _FP8_HEAD, _DELAYED, _FLASH4,
        ),
        job(
            "8b_fp8_delayed_whole", "8b_fp8", _8B, "the same, head and loss of a micro-batch in one slice",
            _FP8, _TRITON, "parallel.recompute=none", _FP8_HEAD, _DELAYED, _FLASH4, "train.loss_chunk_tokens=8192",
        ),
        job("8b_fp8_recipe", "8b_fp8", _8B_FP8, "the recipe for fp8: scales of earlier steps, no bf16 weights beside"),
        job("8b_fp8_recipe_flash4", "8b_fp8", _8B_FP8, "the same, FlashAttention-4", _FLASH4),
        job("13b_fp8_delayed", "13b_fp8", low, "all in fp8, scales of earlier steps, FlashAttention-4",
            _DELAYED, _FLASH4,
        ),
        job(
            "13b_tensor_none", "13b_bf16", tensor, "tensor parallel, micro-batches of 2, nothing recomputed",
            "train.micro_batch_size=2", "parallel.recompute=none",
        ),
        job("1b_micro1", "1b_bf16", _1B, "micro-batches of 1 sequence", "train.micro_batch_size=1"),
        job(
            "1b_bf16_sums", "1b_bf16", _1B, "gradients accumulated in bf16",
            "parallel.accumulate_dtype=bf16", "parallel.reduce_dtype=bf16",
        ),
        job("8b_fp8_rowwise", "8b_fp8", _8B, "a scale for each row", _FP8, "train.fp8_scaling=rowwise"),
        job("8b_fp8_head", "8b_fp8", _8B, "the head in fp8 too", _FP8, _FP8_HEAD),
        job("8b_fp8_uncached", "8b_fp8", _8B, "weights cast at each use", _FP8, "train.fp8_weight_cache=false"),
    ]  # fmt: skip


# ---- numerics: real text, llama3_1b, 8192 tokens a step

CURVE_STEPS = 500
_CURVE = (
    *_DATASET,
    "train.seq_len=2048",  # scores of 8192 x 8192 would not fit the runs that materialise them
    "train.micro_batch_size=4",
    "train.global_batch_size=4",
    f"train.steps={CURVE_STEPS}",
    "optim.warmup_steps=50",
    "observe.log_interval=1",
    "observe.progress=none",
    "observe.tensorboard=false",
    "observe.sample_prompts=[]",
)
FAST_OFF = (
    "train.attention_kernel=reference",
    "train.loss_kernel=plain",
    "parallel.compile=false",
    "parallel.recompute=full",  # for the memory of the scores alone: it changes no number
    *FUSED_OFF,
)
"""Every fast path of a bf16 run switched off."""
SEEDS = (1, 2)
"""Beside the recipe's own."""


def curve_jobs() -> list[Job]:
    """The long one first, beside which the others run on the second GPU."""

    def job(name: str, title: str, estimate: float, *sets: str) -> Job:
        return Job(
            part="curves", name=name, title=title, recipe=_1B, processes=1, kind="curve", sets=(*_CURVE, *sets),
            estimate=estimate,
        )  # fmt: skip

    return [
        job("off", "bf16, all fast paths off", 320.0, *FAST_OFF),
        job("fast", "bf16, all fast paths on", 120.0, *FUSED_ON),
        job("fp8", "fp8", 110.0, _FP8, *FUSED_ON),
        *(job(f"seed{seed}", f"bf16, seed {seed}", 120.0, *FUSED_ON, f"run.seed={seed}") for seed in SEEDS),
        job("fp8_head", "fp8, the head and fused casts too", 110.0, _FP8, _FP8_HEAD, _TRITON, *FUSED_ON),
        job(
            "fp8_delayed",
            "the same, scales of earlier steps",
            110.0,
            _FP8,
            _FP8_HEAD,
            _TRITON,
            _DELAYED,
            *FUSED_ON,
        ),
    ]


# ---- what is not the step itself

CHECKPOINT_STEP, EVALUATION_STEP = 12, 10


def overhead_jobs() -> list[Job]:
    """Beside `dense/8b_bf16` (made-up data) and `dense/8b_train` (a dataset, a line of metrics every 5 steps)."""
    return [
        _train_job("overheads", "8b_logged", _8B, 2, "a line of metrics each step", 75.0, "observe.log_interval=1"),
        _train_job(
            "overheads", "8b_saving", _8B, 2, "evaluation and asynchronous checkpoint", 240.0,
            "train.steps=22", "data.valid=data/demo-valid", f"train.eval_interval={EVALUATION_STEP}",
            "train.eval_steps=1", f"checkpoint.interval={CHECKPOINT_STEP}",
        ),
    ]  # fmt: skip


def profile_jobs() -> list[Job]:
    def job(name: str, recipe: str, processes: int, *sets: str) -> Job:
        return Job(
            part="profile", name=name, title=name, recipe=recipe, processes=processes, kind="profile", sets=sets,
            estimate=55.0, warm_up=3, steps=1,
        )  # fmt: skip

    return [
        job("8b_bf16", _8B, 2),
        job("13b_bf16", "recipes/ladder/7_gathered.toml", 2),
        job("1b_bf16", _1B, 1),
        job("8b_fp8", _8B, 2, _FP8),
        job("8b_fp8_triton_head", _8B, 2, _FP8, _TRITON, _FP8_HEAD, "parallel.recompute=none"),
        job("8b_fp8_delayed", _8B, 2, _FP8, _TRITON, _FP8_HEAD, _DELAYED, "parallel.recompute=none"),
    ]


def ceiling_jobs() -> list[Job]:
    return [
        Job(
            part="ceilings", name="models", title="attention and products alone", recipe=_1B, processes=1,
            kind="ceilings", estimate=45.0,
        )
    ]  # fmt: skip


def jobs_of(part: str) -> list[Job]:
    return {
        "dense": dense_jobs,
        "ladder": ladder_jobs,
        "tune": tune_jobs,
        "curves": curve_jobs,
        "overheads": overhead_jobs,
        "profile": profile_jobs,
        "ceilings": ceiling_jobs,
    }[part]()


_TINY = (
    "cluster.device=cpu",
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.head_dim=16",
    "model.ffn_size=96",
    "model.max_seq_len=64",
    "train.seq_len=64",
    "train.loss_chunk_tokens=64",
    "data.num_workers=0",
    "parallel.compile=false",
)


def tiny(job: Job) -> Job:
    """The same with a model that a CPU trains in seconds: whether it runs at all."""
    vocabulary = "model.vocab_size=4096" if job.kind in ("train", "curve") else "model.vocab_size=512"
    sets = (*job.sets, *_TINY, vocabulary)
    if job.kind == "curve":
        sets = (*sets, "train.steps=6", "optim.warmup_steps=2")
    if _TRITON in sets:
        sets = (*sets, "train.fp8_cast_kernel=torch")  # a CPU has no Triton
    if "parallel.pp=2" in sets:
        sets = (*sets, "parallel.pipeline_schedule=1f1b", "parallel.stages_per_rank=1")  # there are two layers
    steps = 1 if job.kind == "bench" else job.steps
    return replace(job, sets=sets, warm_up=1, steps=steps, gemm_seconds=0.05, estimate=30.0)
