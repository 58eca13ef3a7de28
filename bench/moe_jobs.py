"""What `bench/moe.py` runs: the table of mixtures of experts, the same by Transformers, imbalance, profiles, curves.

Two sets of jobs: for two GPUs, and (``one_gpu``) for one, with models cut in depth until their state fits the card.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import jobs

PARTS = ("table", "baseline", "imbalance", "profile", "curves", "tune")
"""In the order of their importance."""
Kind: TypeAlias = Literal["bench", "baseline", "train", "curve", "profile"]
STEPS_PLUGIN = "bench/dense_steps.py"
ROUTING_PLUGINS = {"even": "bench/moe_routing_even.py", "busy": "bench/moe_routing_busy.py"}
"""By entry of the part `imbalance`: what decides the routing there."""


@dataclass(frozen=True, kw_only=True)
class Job(jobs.Job):
    """One start of `paceline`, or of the same work by Transformers. ``estimate``: compiled kernels not there yet."""

    kind: Kind = "bench"
    work: str = ""
    """Row of the table that this is a candidate for: the fastest one that is there stands in it."""
    layers: int = 0
    gemm_seconds: float = 2.0


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model of the table on one number of GPUs."""

    recipe: str
    layers: int
    sets: tuple[str, ...]
    """What is the work, and the same for every system: depth and batch."""
    memory: tuple[str, ...] = ()
    """What Paceline needs to fit."""


def _qwen3(layers: int, batch: int) -> Model:
    sets = (f"model.num_layers={layers}", f"train.global_batch_size={batch}")
    return Model(recipe="recipes/qwen3_moe_12l.toml", layers=layers, sets=sets)


def _mixtral(batch: int) -> Model:
    return Model(recipe="recipes/moe/mixtral_4l.toml", layers=4, sets=(f"train.global_batch_size={batch}",))


def _deepseek(layers: int, batch: int) -> Model:
    sets = (f"model.num_layers={layers}", f"train.global_batch_size={batch}")
    return Model(recipe="recipes/moe/deepseek_v2_lite_10l.toml", layers=layers, sets=sets)


SWITCH_EXPERTS = (8, 32, 64, 128)


def _switch(experts: int) -> Model:
    if not experts:
        return Model(recipe="recipes/moe/switch_base_dense.toml", layers=24, sets=())
    fit = ("parallel.accumulate_dtype=bf16",) if experts == 128 else ()
    sets = (f"model.preset=switch_base_{experts}",)
    return Model(recipe="recipes/moe/switch_base_8.toml", layers=24, sets=sets, memory=fit)


def models(*, one_gpu: bool) -> dict[str, Model]:
    """By work, without layouts and precisions. Micro-batches of 2 sequences and 4 of them a GPU, Switch's aside."""
    found = {
        "qwen3": _qwen3(6, 8) if one_gpu else _qwen3(12, 16),
        "mixtral": _mixtral(8 if one_gpu else 16),
        "deepseek": _deepseek(10, 8) if one_gpu else _deepseek(14, 16),
        "switch_dense": _switch(0),
    }
    return found | {f"switch_{experts}": _switch(experts) for experts in SWITCH_EXPERTS}


# ---- speed switches

COMPILED = ("parallel.compile=true",)
FUSED = (*COMPILED, "parallel.fused_weight_gradients=true", "optim.fused_update=true")
UNCOMPILED = ("parallel.compile=false",)
TRITON, GROUPED = ("parallel.expert_kernels=triton",), ("parallel.expert_kernels=grouped",)
PLAIN = ("parallel.expert_kernels=plain",)
UNFUSED = ("parallel.fused_weight_gradients=false", "optim.fused_update=false")
FAST = (*FUSED, *GROUPED)
"""Of a layer alone (docs/measured/moe_products.json) torch's grouped products are the faster ones in bf16, ..."""
FP8 = ("train.precision=fp8", "train.fp8_experts=true")
FAST_FP8 = (*FUSED, *TRITON, *FP8)
"""... and Triton's in fp8."""
EP2 = ("parallel.ep=2",)
_IN_TWO = ("train.micro_batch_size=4", "parallel.accumulate_dtype=bf16")
_WHOLE = ("train.micro_batch_size=8", "parallel.accumulate_dtype=bf16")
"""The same tokens a step in fewer micro-batches: sums of the experts' gradients are read and written less often."""
GATHER = ("parallel.expert_dispatch=all_gather",)


def _bench(
    part: str, name: str, title: str, model: Model, processes: int, work: str, *sets: str, estimate: float = 40.0
) -> Job:
    return Job(
        part=part,
        name=name,
        title=title,
        recipe=model.recipe,
        processes=processes,
        work=work,
        layers=model.layers,
        sets=(*model.sets, *model.memory, *sets),
        estimate=estimate,
        warm_up=3,
        steps=6,
    )


def table_jobs(*, one_gpu: bool) -> list[Job]:
    """The best guess at each row first; what may be faster still is in `tune`."""
    found, processes = models(one_gpu=one_gpu), 1 if one_gpu else 2
    qwen3 = found["qwen3"]
    rows = [_bench("table", "qwen3", "grouped products, all fused", qwen3, processes, "qwen3", *FAST)]
    if not one_gpu:
        rows.append(
            _bench("table", "qwen3_ep2", "the same, ep 2, all-gather", qwen3, 2, "qwen3_ep2", *FAST, *EP2, *GATHER)
        )
    return [
        *rows,
        _bench("table", "qwen3_fp8", "fp8 experts and linears", qwen3, processes, "qwen3_fp8", *FAST_FP8),
        _bench("table", "mixtral", "grouped products, all fused", found["mixtral"], processes, "mixtral", *FAST),
        _bench("table", "deepseek", "grouped products, all fused", found["deepseek"], processes, "deepseek", *FAST),
        *(_switch_job(found, name) for name in ("switch_dense", "switch_8", "switch_128", "switch_32", "switch_64")),
    ]


def _switch_job(found: dict[str, Model], work: str) -> Job:
    """On one GPU in both sets."""
    kernels = () if work == "switch_dense" else GROUPED
    title = "the dense twin" if work == "switch_dense" else f"{work.removeprefix('switch_')} experts"
    return _bench("table", work, title, found[work], 1, work, *FUSED, *kernels)


def tune_jobs(*, one_gpu: bool) -> list[Job]:
    """Other ways to the same work; one that is faster takes its row of the table."""
    found, processes = models(one_gpu=one_gpu), 1 if one_gpu else 2
    eager = (*FAST, *UNCOMPILED)

    def job(name: str, work: str, title: str, *sets: str) -> Job:
        model = found[work.removesuffix("_fp8").removesuffix("_ep2")]
        return _bench("tune", name, title, model, 1 if work.startswith("switch") else processes, work, *sets)

    one = [
        job("qwen3_triton", "qwen3", "Triton's products", *FUSED, *TRITON),
        job("qwen3_plain", "qwen3", "plain experts", *FUSED, *PLAIN),
        job("qwen3_naive", "qwen3", "plain experts, nothing fused or compiled", *UNCOMPILED, *UNFUSED, *PLAIN),
        job("qwen3_eager", "qwen3", "not compiled", *eager),
        job("qwen3_selective", "qwen3", "selective recompute", *FAST, "parallel.recompute=selective"),
        job("qwen3_bf16_sums", "qwen3", "gradients accumulated in bf16", *FAST, "parallel.accumulate_dtype=bf16"),
        job("qwen3_fp8_head", "qwen3_fp8", "the head in fp8 too", *FAST_FP8, "train.fp8_head=true"),
        job("qwen3_fp8_uncached", "qwen3_fp8", "weights cast at each use", *FAST_FP8, "train.fp8_weight_cache=false"),
        job("mixtral_triton", "mixtral", "Triton's products", *FUSED, *TRITON),
        job("deepseek_triton", "deepseek", "Triton's products", *FUSED, *TRITON),
        job("deepseek_bf16_sums", "deepseek", "gradients accumulated in bf16", *FAST, "parallel.accumulate_dtype=bf16"),
        job("deepseek_micro4", "deepseek", "bf16 sums, micro-batches of 4", *FAST, *_IN_TWO),
        job("deepseek_micro8", "deepseek", "bf16 sums, micro-batches of 8", *FAST, *_WHOLE),
        job("switch_8_triton", "switch_8", "Triton's products", *FUSED, *TRITON),
        job("switch_128_triton", "switch_128", "Triton's products", *FUSED, *TRITON),
    ]  # fmt: skip
    if one_gpu:
        return one
    two = [
        job("qwen3_gather_free", "qwen3", "ep 2, all-gather", *FAST, *EP2, *GATHER),
        job("qwen3_ep2_to_all", "qwen3_ep2", "ep 2, all-to-all", *eager, *EP2),
        job("qwen3_gather_bf16_sums", "qwen3", "ep 2, all-gather, gradients accumulated in bf16", *FAST, *EP2, *GATHER,
            "parallel.accumulate_dtype=bf16"),
        job("qwen3_gather_lean", "qwen3", "ep 2, all-gather, bf16 sums, selective recompute", *FAST, *EP2, *GATHER,
            "parallel.accumulate_dtype=bf16", "parallel.recompute=selective"),
        job("qwen3_zero3", "qwen3", "ZeRO-3", *FAST, "parallel.zero=3", "parallel.fused_weight_gradients=false"),
        job("qwen3_fp8_gather", "qwen3_fp8", "ep 2, all-gather", *FAST_FP8, *EP2, *GATHER),
    ]  # fmt: skip
    return [*two, *one]


# ---- the same work by Transformers


def baseline_jobs(*, one_gpu: bool) -> list[Job]:
    """Their own models of the same widths, with grouped experts; in larger micro-batches too where that is free."""
    found, processes = models(one_gpu=one_gpu), 1 if one_gpu else 2

    def job(name: str, work: str, *sets: str, more: str = "") -> Job:
        title = f"Transformers, grouped experts{more}"
        listed = _bench("baseline", name, title, found[work], processes, work, *sets, estimate=45.0)
        return replace(listed, kind="baseline", warm_up=2, steps=4)

    return [
        *(job(work, work) for work in ("qwen3", "mixtral", "deepseek")),
        job("deepseek_micro4", "deepseek", "train.micro_batch_size=4", more=", micro-batches of 4"),
    ]


# ---- imbalance

_MADE_UP = (
    "data.train=synthetic",
    "data.valid=",
    "checkpoint.save_last=false",
    "checkpoint.interval=0",
    "observe.progress=lines",
    "observe.sample_prompts=[]",
    "observe.tensorboard=false",
    "observe.log_interval=4",
    "train.steps=12",
)


def imbalance_jobs(*, one_gpu: bool) -> list[Job]:
    """The first row with the routing as it comes, with even loads, and with one expert that takes a fifth of all
    tokens; dropless."""
    model, processes = models(one_gpu=one_gpu)["qwen3"], 1 if one_gpu else 2
    layout = () if one_gpu else (*EP2, *GATHER)

    def job(name: str, title: str) -> Job:
        plugins = [STEPS_PLUGIN, *([ROUTING_PLUGINS[name]] if name in ROUTING_PLUGINS else [])]
        return Job(
            part="imbalance",
            name=name,
            title=title,
            recipe=model.recipe,
            processes=processes,
            kind="train",
            layers=model.layers,
            sets=(*model.sets, *_MADE_UP, *FAST, *layout, f"run.plugins={plugins}"),
            estimate=40.0,
        )

    return [
        job("natural", "routing as it comes from a random start"),
        job("even", "every expert takes as many tokens"),
        job("busy", "one expert takes 20 % of the tokens"),
    ]


# ---- where a step goes


def profile_jobs(*, one_gpu: bool) -> list[Job]:
    found, processes = models(one_gpu=one_gpu), 1 if one_gpu else 2

    def job(name: str, work: str, *sets: str) -> Job:
        plain = _bench("profile", name, name, found[work], processes, "", *sets, estimate=45.0)
        return replace(plain, kind="profile", warm_up=3, steps=1)

    more = [] if one_gpu else [job("qwen3_ep2", "qwen3", *FAST, *EP2, *GATHER)]
    return [
        job("qwen3", "qwen3", *FAST),
        *more,
        job("qwen3_fp8", "qwen3", *FAST_FP8),
        job("deepseek", "deepseek", *FAST),
        job("mixtral", "mixtral", *FAST),
    ]


# ---- curves: real text

CURVE_STEPS = 500
REFERENCE, SEEDS = "plain", (1, 2)
"""Beside the recipe's own seed."""
_CURVE = (
    "data.train=data/demo-train",
    "data.valid=",
    "model.num_layers=6",
    "model.hidden_size=512",
    "model.num_heads=8",
    "model.num_kv_heads=4",
    "model.max_seq_len=512",
    "model.num_experts=16",
    "model.top_k=4",
    "model.moe.ffn_size=512",
    "model.moe.aux_loss_coef=0.01",
    "train.seq_len=512",
    "train.micro_batch_size=8",
    "train.global_batch_size=16",
    f"train.steps={CURVE_STEPS}",
    "optim.name=adamw",
    "optim.lr=1e-3",
    "optim.min_lr=1e-4",
    "optim.warmup_steps=50",
    "checkpoint.save_last=false",
    "checkpoint.interval=0",
    "observe.log_interval=1",
    "observe.progress=none",
    "observe.tensorboard=false",
    "observe.sample_prompts=[]",
)
_ADDING = ("parallel.fused_weight_gradients=true", "optim.fused_update=true")


def curve_jobs(*, one_gpu: bool) -> list[Job]:
    """What is to be judged first, then the band."""

    def job(name: str, title: str, *sets: str, processes: int = 1) -> Job:
        return Job(
            part="curves", name=name, title=title, recipe="recipes/demo_gpu.toml", processes=processes, kind="curve",
            layers=6, sets=(*_CURVE, *sets), estimate=90.0,
        )  # fmt: skip

    triton = (*_ADDING, *TRITON)
    two = [
        job("ep2", "ep 2, all-to-all", *UNCOMPILED, *triton, *EP2, processes=2),
        job("ep2_gather", "ep 2, all-gather", *UNCOMPILED, *triton, *EP2, *GATHER, processes=2),
    ]
    return [
        job(REFERENCE, "plain experts, nothing fused", *UNCOMPILED),
        job("triton", "Triton's experts, all fused", *UNCOMPILED, *triton),
        job("fp8", "fp8 experts and linears", *UNCOMPILED, *triton, *FP8),
        *(job(f"seed{seed}", f"plain, seed {seed}", *UNCOMPILED, f"run.seed={seed}") for seed in SEEDS),
        job("grouped", "torch's grouped products, all fused", *UNCOMPILED, *_ADDING, *GROUPED),
        job("compiled", "Triton's experts, all fused, compiled", *COMPILED, *triton),
        *([] if one_gpu else two),
    ]


def jobs_of(part: str, *, one_gpu: bool = False) -> list[Job]:
    return {
        "table": table_jobs,
        "baseline": baseline_jobs,
        "imbalance": imbalance_jobs,
        "profile": profile_jobs,
        "curves": curve_jobs,
        "tune": tune_jobs,
    }[part](one_gpu=one_gpu)


_TINY = (
    "cluster.device=cpu",
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.num_heads=4",
    "model.max_seq_len=64",
    "train.seq_len=64",
    "train.loss_chunk_tokens=64",
    "train.micro_batch_size=2",
    "data.num_workers=0",
    "parallel.compile=false",
)
_TINY_EXPERTS = ("model.num_experts=8", "model.top_k=2", "model.moe.ffn_size=32")


def tiny(job: Job) -> Job:
    """The same with a model that a CPU trains in seconds: whether it runs at all."""
    sets = [*job.sets, *_TINY, f"train.global_batch_size={4 * job.processes}"]
    if "switch" not in job.recipe:
        sets += _TINY_EXPERTS
    if "deepseek" not in job.recipe:
        sets += ["model.num_kv_heads=2", "model.head_dim=16"]
    else:
        sets += [
            "model.kv_lora_rank=32",
            "model.qk_nope_head_dim=16",
            "model.qk_rope_head_dim=8",
            "model.v_head_dim=16",
        ]
    sets += ["model.ffn_size=96", "model.vocab_size=4096" if job.kind == "curve" else "model.vocab_size=512"]
    if job.kind == "curve":
        sets += ["train.steps=6", "optim.warmup_steps=2"]
    return replace(
        job, sets=tuple(sets), layers=2, warm_up=1, steps=1 if job.kind == "bench" else 2, gemm_seconds=0.05,
        estimate=30.0,
    )  # fmt: skip
