"""What `bench/eight_gpus.py` runs on the GPUs of one host: eight of them, or four, or two."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal, TypeAlias

import dense_jobs
import jobs

from paceline.config.load import load_recipe
from paceline.config.run import RunConfig

ROOT = Path(__file__).parents[1]
COUNTS = (8, 4, 2)
PARTS = ("ceilings", "thirteen", "layouts", "scaling", "explain", "wide", "experts", "rungs")
"""The most valuable first. A call of one part alone ends within `LONGEST_CALL` seconds on H200s."""
LONGEST_CALL = 480
STEPS_PLUGIN = dense_jobs.STEPS_PLUGIN
NAIVE = "naive"

Kind: TypeAlias = Literal["doctor", "bench", "run"]
"""`doctor --measure`; `bench train`; `train` with a capture at its end, which `explain` reads."""


@dataclass(frozen=True, kw_only=True)
class Job(jobs.Job):
    """One start. ``estimate``: compiled kernels not there yet."""

    kind: Kind = "bench"
    work: str = ""
    """Entries of one work do the same on as many GPUs: the first choice of `plan` is held against the best of them."""
    precision: str = "bf16"
    gemm_seconds: float = 2.0

    @property
    def is_predicted(self) -> bool:
        """Whether `plan` says beforehand how long a step takes."""
        return self.kind != "doctor"


# ---- the 13B

_13B, _8B = "recipes/eight_gpus/gpt_13b.toml", "recipes/llama3_8b.toml"
_FP8 = ("train.precision=fp8", "train.fp8_cast_kernel=triton", "train.fp8_head=true")
_ALONE = "train.fp8_weights_only=true"
SEQUENCES = 8
"""Of 2048 tokens, a GPU and step, of the 13B where it is not a rung of the ladder."""
_FSDP = ("parallel.zero=3", "parallel.accumulate_dtype=fp32", "parallel.fused_weight_gradients=false")


@dataclass(frozen=True, kw_only=True)
class Layout:
    name: str
    title: str
    sets: tuple[str, ...]


def _layout(name: str, title: str, sets: str, micro: int, recompute: str = "none") -> Layout:
    """``sets``: of `parallel`, separated by blanks."""
    found = _FSDP if sets == "fsdp" else tuple(f"parallel.{item}" for item in sets.split())
    more = (f"train.micro_batch_size={micro}", f"parallel.recompute={recompute}")
    return Layout(name=name, title=title, sets=(*found, *more))


LAYOUTS = {
    8: (
        _layout("tp8", "tp 8, sequence parallel", "tp=8", 4),
        _layout("tp4_dp2", "tp 4 x dp 2", "tp=4", 4),
        _layout("tp2_pp2_dp2", "tp 2 x pp 2 x dp 2, 1F1B", "tp=2 pp=2", 2),
        _layout("pp4_dp2", "pp 4 x dp 2, 1F1B", "pp=4", 1),
        _layout("zero1_dp8", "dp 8, ZeRO-1", "zero=1", 4, "selective"),
        _layout("fsdp_dp8", "dp 8, ZeRO-3 (FSDP2)", "fsdp", 4, "selective"),
        _layout("cp2_dp4", "cp 2 x dp 4, ring", "cp=2", 4),
    ),
    4: (
        _layout("tp4", "tp 4, sequence parallel", "tp=4", 4),
        _layout("tp2_dp2", "tp 2 x dp 2", "tp=2", 4, "selective"),
        _layout("tp2_pp2", "tp 2 x pp 2, 1F1B", "tp=2 pp=2", 2),
        _layout("pp4", "pp 4, 1F1B", "pp=4", 1),
        _layout("zero1_dp4", "dp 4, ZeRO-1", "zero=1", 2, "selective"),
        _layout("fsdp_dp4", "dp 4, ZeRO-3 (FSDP2)", "fsdp", 4, "selective"),
        _layout("cp2_dp2", "cp 2 x dp 2, ring", "cp=2", 4, "selective"),
    ),
    2: (
        _layout("tp2", "tp 2, sequence parallel", "tp=2", 2),
        _layout("pp2", "pp 2, 1F1B", "pp=2", 1, "selective"),
    ),
}
"""By number of GPUs. Two do not hold the 13B's gradients whole, so nothing else fits there with this batch."""


def sequences(gpus: int) -> tuple[str, ...]:
    return (f"train.global_batch_size={SEQUENCES * gpus}",)


def thirteen_work(gpus: int) -> str:
    return f"gpt_13b bf16, {SEQUENCES * gpus} sequences"


def best_jobs(gpus: int) -> list[Job]:
    """The naive recipe, and what should be the fastest in bf16 and in fp8."""
    bf16 = {
        8: (_best("best_selective", "dp 8, ZeRO-1, micro-batches of 4, selective recomputation", 4, "selective"),),
        4: (_best("best_micro1", "dp 4, ZeRO-1, micro-batches of 1, nothing recomputed", 1, "none"),),
        2: (_best("best_tensor", "tp 2, micro-batches of 4, selective recomputation", 4, "selective", "tp=2"),),
    }[gpus]
    fp8 = {
        8: (
            _best("fp8", "fp8, no bf16 weights: dp 8, ZeRO-1, micro-batches of 2, nothing recomputed", 2, "none"),
            _best("fp8_micro4", "fp8: the same with micro-batches of 4", 4, "none"),
        ),
        4: (
            _best("fp8", "fp8, no bf16 weights: dp 4, ZeRO-1, micro-batches of 1, nothing recomputed", 1, "none"),
            _best("fp8_micro2", "fp8: the same with micro-batches of 2", 2, "none"),
        ),
        2: (
            _best("fp8", "fp8, no bf16 weights: dp 2, ZeRO-1, micro-batches of 1, selective", 1, "selective"),
            _best("fp8_tensor", "fp8: tp 2, micro-batches of 2, selective recomputation", 2, "selective", "tp=2"),
        ),
    }[gpus]
    planned = Job(
        part="thirteen", name="planned", title="the first choice of `paceline plan`, bf16", processes=gpus,
        recipe=f"recipes/eight_gpus/planned_{gpus}.toml", work=thirteen_work(gpus), estimate=70.0, warm_up=3, steps=8,
    )  # fmt: skip
    return [
        rung(NAIVE, gpus, "thirteen"),
        planned,
        *(_of_13b(each, gpus, "thirteen", precision="fp8") for each in fp8[:1]),
        *(_of_13b(each, gpus, "thirteen") for each in bf16),
        *(_of_13b(each, gpus, "thirteen", precision="fp8") for each in fp8[1:]),
    ]


def _best(name: str, title: str, micro: int, recompute: str, sets: str = "zero=1") -> Layout:
    return _layout(name, title, sets, micro, recompute)


def _of_13b(layout: Layout, gpus: int, part: str, *, precision: str = "bf16") -> Job:
    fp8 = (*_FP8, _ALONE) if precision == "fp8" else ()
    return Job(
        part=part, name=layout.name, title=layout.title, recipe=_13B, processes=gpus, precision=precision,
        sets=(*sequences(gpus), *layout.sets, *fp8), work="" if fp8 else thirteen_work(gpus), estimate=70.0,
        warm_up=3, steps=8,
    )  # fmt: skip


def rung(name: str, gpus: int, part: str) -> Job:
    """A rung of `recipes/ladder`, which is for two GPUs, with as many sequences a GPU."""
    recipe = f"recipes/ladder/{name}.toml"
    train = _ladder(recipe).train
    a_gpu = train.global_batch_size // 2
    same = train.precision == "bf16" and a_gpu == SEQUENCES
    # a start and compiling, and steps that are as long as they have sequences
    estimate = 36.0 + 2.5 * a_gpu
    return Job(
        part=part, name=name, title=dense_jobs.change_of(recipe), recipe=recipe, processes=gpus,
        precision=train.precision, work=thirteen_work(gpus) if same else "", estimate=estimate,
        sets=(f"train.global_batch_size={a_gpu * gpus}",), warm_up=3, steps=8, gemm_seconds=1.0,
    )  # fmt: skip


@cache
def _ladder(recipe: str) -> RunConfig:
    return load_recipe(str(ROOT / recipe), []).config


# ---- runs that `explain` reads

WARM_UP, PLAIN = 3, 5
"""Steps that are not looked at, and steps that are; the one after them is captured."""
_RUN = (
    f"run.plugins=['{STEPS_PLUGIN}']",
    "data.train=synthetic",
    "data.valid=",
    f"train.steps={WARM_UP + PLAIN + 1}",
    "checkpoint.save_last=false",
    "checkpoint.interval=0",
    "observe.log_interval=1",
    "observe.progress=lines",
    "observe.tensorboard=false",
    "observe.sample_prompts=[]",
    f"observe.capture_at=[{WARM_UP + PLAIN + 1}]",
    "observe.capture_steps=1",
)


def _explained(job: Job, part: str) -> Job:
    """The same by `paceline train`, with a capture of the first and the last rank: stages of a pipeline differ."""
    ranks = f"observe.capture_ranks=[0,{job.processes - 1}]"
    return replace(
        job, part=part, kind="run", sets=(*job.sets, *_RUN, ranks), warm_up=WARM_UP, steps=PLAIN, estimate=66.0
    )


def layout_jobs(gpus: int) -> list[Job]:
    return [_explained(_of_13b(layout, gpus, "layouts"), "layouts") for layout in LAYOUTS[gpus]]


def explain_jobs(gpus: int) -> list[Job]:
    """The ends of the ladder; every layout is explained where it is measured."""
    return [_explained(job, "explain") for job in best_jobs(gpus)[:3]]


# ---- other models


def _8b(part: str, name: str, title: str, processes: int, *sets: str, estimate: float = 80.0) -> Job:
    return Job(
        part=part, name=name, title=title, recipe=_8B, processes=processes, sets=sets, estimate=estimate, warm_up=3,
        steps=8,
    )  # fmt: skip


def scaling_jobs(gpus: int) -> list[Job]:
    """llama3_8b, 4 sequences of 8192 tokens a GPU; the ends of the comparison first."""

    def job(count: int, precision: str) -> Job:
        fp8 = (*_FP8, _ALONE, "parallel.recompute=none") if precision == "fp8" else ()
        batch = f"train.global_batch_size={4 * count}"
        title = f"llama3_8b {precision}, {count} GPUs"
        made = _8b("scaling", f"8b_{precision}_{count}", title, count, batch, *fp8)
        return replace(made, precision=precision)

    ends = [gpus, *([2] if gpus > 2 else [])]
    between = [count for count in COUNTS if 2 < count < gpus]
    return [
        *(job(count, precision) for precision in ("bf16", "fp8") for count in ends),
        *(job(n, "bf16") for n in between),
    ]


_70B = ("model.preset=llama3_70b", "train.micro_batch_size=1", "parallel.recompute=selective")
_MOE = (
    "parallel.compile=true",
    "parallel.fused_weight_gradients=true",
    "optim.fused_update=true",
    "parallel.expert_kernels=grouped",
)
_QWEN3 = "recipes/qwen3_moe_12l.toml"


def wide_jobs(gpus: int) -> list[Job]:
    """Stages of llama3_70b's widths; a long context."""

    def wide(name: str, title: str, depth: int, batch: int, *sets: str) -> Job:
        more = (f"model.num_layers={depth}", f"train.global_batch_size={batch}", *sets)
        whole = f"llama3_70b's widths, {depth} of 80 layers"
        return _8b("wide", name, f"{whole}, {title}", gpus, *_70B, *more, estimate=85.0)

    layers, length = 2 * gpus, 16384 * gpus
    halves = (f"parallel.tp={gpus // 2}", "parallel.pp=2")
    long = (f"train.seq_len={length}", f"model.max_seq_len={length}", "train.global_batch_size=2")
    recompute = f"parallel.recompute={'full' if gpus == 2 else 'selective'}"
    title = f"llama3_8b, {length} tokens, cp {gpus}, ring"
    context = _8b("wide", f"8b_cp{gpus}", title, gpus, *long, f"parallel.cp={gpus}", recompute, estimate=115.0)
    return [
        wide(f"70b_tp{gpus}", f"tp {gpus}", layers, 2 * gpus, f"parallel.tp={gpus}"),
        wide("70b_pp2", f"tp {gpus // 2} x pp 2", layers, 2 * gpus, *halves),
        *([wide("70b_half_tp8", "tp 8", 40, 8, "parallel.tp=8")] if gpus == 8 else []),
        replace(context, warm_up=2, steps=4),
    ]


def expert_jobs(gpus: int) -> list[Job]:
    """Mixtures of experts with one group of experts on all GPUs, beside data parallelism alone."""

    def experts(name: str, title: str, *sets: str, estimate: float = 60.0) -> Job:
        return Job(
            part="experts", name=name, title=f"Qwen3-30B-A3B's widths, {title}", recipe=_QWEN3, processes=gpus,
            sets=(*_MOE, f"train.global_batch_size={8 * gpus}", *sets), estimate=estimate, warm_up=3, steps=8,
        )  # fmt: skip

    ep, gather = f"parallel.ep={gpus}", "parallel.expert_dispatch=all_gather"
    whole = experts("48l_ep8", "all 48 layers, ep 8, all-gather", ep, gather, "model.num_layers=48", estimate=90.0)
    return [
        experts(f"12l_ep{gpus}", f"12 layers, ep {gpus}, all-gather", ep, gather),
        experts("12l_zero1", f"12 layers, dp {gpus}, ZeRO-1"),
        *([whole] if gpus == 8 else []),
        experts(f"12l_ep{gpus}_to_all", f"12 layers, ep {gpus}, all-to-all", ep, "parallel.compile=false"),
    ]


def rung_jobs(gpus: int) -> list[Job]:
    """What lies between the naive recipe and the best ones; the upper ends first."""
    names = [name for name in dense_jobs.RUNGS if name != NAIVE]
    first = [name for name in ("7_gathered", names[-1]) if name in names]
    return [rung(name, gpus, "rungs") for name in dict.fromkeys((*first, *names))]


def ceiling_jobs(gpus: int) -> list[Job]:
    return [
        Job(
            part="ceilings", name="doctor", title="every GPU, pair and collective", recipe=_13B, processes=gpus,
            kind="doctor", sets=sequences(gpus), estimate=200.0,
        )
    ]  # fmt: skip


def jobs_of(part: str, *, gpus: int) -> list[Job]:
    return {
        "ceilings": ceiling_jobs,
        "thirteen": best_jobs,
        "layouts": layout_jobs,
        "scaling": scaling_jobs,
        "explain": explain_jobs,
        "wide": wide_jobs,
        "experts": expert_jobs,
        "rungs": rung_jobs,
    }[part](gpus)


def all_jobs(gpus: int) -> list[Job]:
    return [job for part in PARTS for job in jobs_of(part, gpus=gpus)]


# ---- on CPUs

_TINY = (
    "cluster.device=cpu",
    "model.hidden_size=64",
    "model.num_heads=8",
    "model.num_kv_heads=8",
    "model.head_dim=8",
    "model.ffn_size=96",
    "model.vocab_size=512",
    "train.loss_chunk_tokens=64",
    "data.num_workers=0",
    "parallel.compile=false",
)
_TINY_EXPERTS = ("model.num_experts=8", "model.top_k=2", "model.moe.ffn_size=32")
_TRITON = "train.fp8_cast_kernel=triton"


def tiny(job: Job) -> Job:
    """The same layout with a model that a CPU trains in seconds: whether it runs at all."""
    stages = load_recipe(str(ROOT / job.recipe), list(job.sets)).config.parallel.stages
    length = 128  # of ranks that share a sequence each has two pieces of it
    sets = (*job.sets, *_TINY, f"model.num_layers={max(2, stages)}", f"train.seq_len={length}")
    # as few sequences as fill every rank and every stage twice
    sets = (*sets, f"model.max_seq_len={length}", "train.micro_batch_size=1")
    sets = (*sets, f"train.global_batch_size={2 * job.processes}")
    if job.recipe == _QWEN3:
        sets = (*sets, *_TINY_EXPERTS)
    if _TRITON in sets:
        sets = (*sets, "train.fp8_cast_kernel=torch")  # a CPU has no Triton
    if job.kind == "run":
        return replace(job, sets=sets, estimate=60.0)
    return replace(job, sets=sets, warm_up=1, steps=2, gemm_seconds=0.05, estimate=60.0)
