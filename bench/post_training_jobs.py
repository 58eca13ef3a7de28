"""What `bench/post_training.py` runs: fine-tuning beside Transformers, PEFT and Liger kernels, and a conversion.

Two sets of jobs: for two GPUs, and (``one_gpu``) for one, where what does not fit is cut in depth.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import jobs

PARTS = ("lora", "full", "moe", "convert")
"""In the order of their importance."""
Kind: TypeAlias = Literal["train", "baseline", "convert"]
STEPS_PLUGIN = "bench/dense_steps.py"
DATA = "data/post-training"
"""Where bench/post_training.sh writes the conversations."""
WARM_UP = 4
"""Steps that are not measured: compilation, and what the allocator learns."""


@dataclass(frozen=True, kw_only=True)
class Job(jobs.Job):
    """One start of `paceline`, or of the same work by Transformers. ``estimate``: compiled kernels not there yet."""

    kind: Kind = "train"
    work: str = ""
    """What is done, whoever does it: entries of one work share data, order, batch and widths."""
    precision: Literal["bf16", "fp8"] = "bf16"
    layers: int = 0
    """Of a model that is cut; 0 = whole."""
    recompute: str = "none"
    """Of a baseline."""
    gemm_seconds: float = 2.0


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Conversations for one vocabulary and length of a row."""

    name: str
    vocab: int
    seq_len: int
    whole: bool = False
    rows: int = 128

    @property
    def folder(self) -> str:
        return f"{DATA}/{self.name}"

    def sets(self) -> tuple[str, ...]:
        return (
            f"data.train={self.folder}/rows.jsonl",
            "data.valid=",
            f"data.tokenizer={self.folder}/tokenizer.json",
            "data.template=chatml",
            "data.packing=pack",
            "task.kind=sft",
            f"train.seq_len={self.seq_len}",
        )


LLAMA3 = Corpus(name="llama3", vocab=128256, seq_len=8192)
WHOLE = Corpus(name="llama3_whole", vocab=128256, seq_len=8192, whole=True)
QWEN3 = Corpus(name="qwen3", vocab=151936, seq_len=4096, rows=256)
CORPORA = (LLAMA3, WHOLE, QWEN3)

_8B, _QWEN3 = "recipes/llama3_8b.toml", "recipes/qwen3_moe_12l.toml"
_RUN = (
    f"run.plugins=['{STEPS_PLUGIN}']",
    "train.steps=12",
    "checkpoint.save_last=false",
    "checkpoint.interval=0",
    "observe.log_interval=1",
    "observe.progress=lines",
    "observe.tensorboard=false",
    "observe.sample_prompts=[]",
    "optim.warmup_steps=2",
)
_FP8 = ("train.precision=fp8", "train.fp8_cast_kernel=triton", "train.fp8_head=true")
_DELAYED, _FLASH4 = "train.fp8_scaling=delayed", "train.attention_kernel=flash4"
_ADAPTERS = ("lora.rank=16", "lora.alpha=32", "parallel.fused_weight_gradients=false")
_EXPERTS = (
    "parallel.compile=true",
    "parallel.expert_kernels=grouped",
    "optim.fused_update=true",
)
ACCUMULATION = 4
"""Micro-batches a GPU and step."""


def _batch(processes: int, micro: int = 1) -> tuple[str, ...]:
    return (f"train.micro_batch_size={micro}", f"train.global_batch_size={ACCUMULATION * micro * processes}")


@dataclass(frozen=True, kw_only=True)
class Work:
    """What Paceline and the baseline both do."""

    name: str
    part: str
    title: str
    recipe: str
    corpus: Corpus
    processes: int
    sets: tuple[str, ...]
    """Model, batch and adapters: the same for both."""
    layers: int = 0

    def ours(self, name: str, title: str, *sets: str, precision: Literal["bf16", "fp8"] = "bf16") -> Job:
        more = (*self.corpus.sets(), *self.sets, *_RUN, *sets, *(_FP8 if precision == "fp8" else ()))
        return Job(
            part=self.part, name=f"{self.name}_{name}", title=title, recipe=self.recipe, processes=self.processes,
            kind="train", work=self.name, precision=precision, layers=self.layers, sets=more, estimate=85.0,
            warm_up=WARM_UP, steps=8,
        )  # fmt: skip

    def baseline(self, recompute: str) -> Job:
        title = f"Transformers, {'nothing recomputed' if recompute == 'none' else 'all recomputed'}"
        return Job(
            part=self.part, name=f"{self.name}_theirs_{recompute}", title=title, recipe=self.recipe,
            processes=self.processes, kind="baseline", work=self.name, layers=self.layers, recompute=recompute,
            sets=(*self.corpus.sets(), *self.sets), estimate=75.0, warm_up=2, steps=4,
        )  # fmt: skip


def _layers(layers: int) -> tuple[str, ...]:
    return (f"model.num_layers={layers}",) if layers else ()


def works(*, one_gpu: bool) -> dict[str, Work]:
    """By name; the largest claims first."""
    many = 1 if one_gpu else 2
    full_layers, moe_layers = (14, 6) if one_gpu else (0, 0)
    lora = Work(
        name="lora", part="lora", title="llama3_8b, LoRA of rank 16, packed rows of 8192", recipe=_8B, corpus=LLAMA3,
        processes=1, sets=(*_batch(1), *_ADAPTERS),
    )  # fmt: skip
    found = [
        lora,
        replace(
            lora, name="lora_whole", title="the same, every row one conversation", corpus=WHOLE,
        ),
        replace(
            lora, name="lora_2", title="llama3_8b, LoRA of rank 16, two GPUs", processes=2,
            sets=(*_batch(2), *_ADAPTERS),
        ),
        Work(
            name="full", part="full", recipe=_8B, corpus=LLAMA3, processes=many, layers=full_layers,
            title="llama3_8b, all weights, packed rows of 8192", sets=(*_batch(many), *_layers(full_layers)),
        ),
        Work(
            name="moe_full", part="moe", recipe=_QWEN3, corpus=QWEN3, processes=many, layers=moe_layers,
            title="Qwen3-30B-A3B's widths cut in depth, all weights", sets=(*_batch(many, 2), *_layers(moe_layers)),
        ),
        Work(
            name="moe_lora", part="moe", recipe=_QWEN3, corpus=QWEN3, processes=many, layers=48,
            title="Qwen3-30B-A3B, 48 layers, LoRA of attention", sets=(*_batch(many), *_ADAPTERS, *_layers(48)),
        ),
    ]  # fmt: skip
    return {work.name: work for work in found if not (one_gpu and work.name == "lora_2")}


_RECOMPUTE = {"none": "parallel.recompute=none", "selective": "parallel.recompute=selective"}


def lora_jobs(*, one_gpu: bool) -> list[Job]:
    found = works(one_gpu=one_gpu)
    first, whole, two = found["lora"], found["lora_whole"], found.get("lora_2")
    plain, frozen8 = _RECOMPUTE["none"], "lora.base=fp8"
    listed = [
        first.ours("bf16", "bf16, nothing recomputed", plain),
        first.baseline("none"),
        first.ours("fp8", "frozen weights in fp8", plain, frozen8, precision="fp8"),
        first.ours("fp8_flash4", "frozen weights in fp8, FlashAttention-4", plain, frozen8, _FLASH4, precision="fp8"),
        first.ours("bf16_flash4", "bf16, nothing recomputed, FlashAttention-4", plain, _FLASH4),
        first.ours("fp8_delayed", "the same, scales of earlier steps", plain, frozen8, _DELAYED, precision="fp8"),
        first.baseline("full"),
        first.ours("lean", "bf16, selective recomputation", _RECOMPUTE["selective"]),
        whole.ours("bf16", "bf16, nothing recomputed", plain),
        whole.baseline("none"),
        whole.ours("fp8", "frozen weights in fp8", plain, frozen8, precision="fp8"),
    ]
    if two is not None:
        listed += [
            two.ours("bf16", "bf16, nothing recomputed", plain),
            two.baseline("none"),
            two.ours("fp8", "frozen weights in fp8", plain, frozen8, precision="fp8"),
        ]
    return listed


def full_jobs(*, one_gpu: bool) -> list[Job]:
    work = works(one_gpu=one_gpu)["full"]
    selective, alone = _RECOMPUTE["selective"], "train.fp8_weights_only=true"
    listed = [
        work.ours("bf16", "bf16, ZeRO-1, selective recomputation", selective),
        work.baseline("full"),
        work.ours("fp8", "fp8, ZeRO-1, selective recomputation", selective, alone, precision="fp8"),
        work.baseline("none"),
    ]
    if not one_gpu:
        # weights cut over both GPUs: what is nearest to the memory of their FSDP2
        tensor = ("parallel.tp=2", selective)
        listed += [
            work.ours("bf16_tensor", "bf16, tp 2, selective recomputation", *tensor),
            work.ours("fp8_tensor", "fp8, tp 2, selective recomputation", *tensor, alone, precision="fp8"),
        ]
    return [*listed, work.ours("bf16_none", "bf16, ZeRO-1, nothing recomputed", _RECOMPUTE["none"])]


def moe_jobs(*, one_gpu: bool) -> list[Job]:
    found = works(one_gpu=one_gpu)
    full, lora = found["moe_full"], found["moe_lora"]
    fused = "parallel.fused_weight_gradients=true"
    return [
        full.ours("bf16", "grouped products, all fused", *_EXPERTS, fused),
        full.baseline("none"),
        lora.ours("bf16", "grouped products, experts frozen", *_EXPERTS),
        lora.baseline("none"),
        full.baseline("full"),
        lora.baseline("full"),
    ]


def convert_jobs(*, one_gpu: bool) -> list[Job]:
    return [
        Job(
            part="convert", name="16gb", title="16 GB of bf16 between formats", recipe="", processes=1, kind="convert",
            sets=("--gb=16", "--rounds=1"), estimate=240.0,
        )
    ]  # fmt: skip


def jobs_of(part: str, *, one_gpu: bool = False) -> list[Job]:
    return {"lora": lora_jobs, "full": full_jobs, "moe": moe_jobs, "convert": convert_jobs}[part](one_gpu=one_gpu)


# ---- on CPUs

TINY = Corpus(name="tiny", vocab=512, seq_len=256, rows=64)
_TINY = (
    "cluster.device=cpu",
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.head_dim=16",
    "model.ffn_size=96",
    "model.max_seq_len=256",
    "model.vocab_size=512",
    "train.seq_len=256",
    "train.loss_chunk_tokens=64",
    "data.num_workers=0",
    "parallel.compile=false",
    "train.fp8_cast_kernel=torch",
)
_TINY_EXPERTS = ("model.num_experts=8", "model.top_k=2", "model.moe.ffn_size=32")


def tiny(job: Job) -> Job:
    """The same with a model that a CPU trains in seconds: whether it runs at all."""
    if job.kind == "convert":
        return replace(job, sets=("--gb=0.02", "--rounds=1"), estimate=60.0)
    folder = next(corpus.folder for corpus in CORPORA if f"data.train={corpus.folder}/rows.jsonl" in job.sets)
    sets = (*(item.replace(folder, TINY.folder) for item in job.sets), *_TINY)
    if job.recipe == _QWEN3:
        sets = (*sets, *_TINY_EXPERTS)
    layers = 2 if job.layers else 0
    if job.kind == "train":
        sets = (*sets, f"train.steps={WARM_UP + 2}")
    return replace(job, sets=sets, layers=layers, warm_up=1, steps=1, gemm_seconds=0.05, estimate=60.0)
