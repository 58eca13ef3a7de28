"""What `bench/layouts.py` runs: layouts on two GPUs, and the jobs of each part in the order of their importance."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jobs

PARTS = ("speed", "curves", "long")


@dataclass(frozen=True, kw_only=True)
class Job(jobs.Job):
    """One start of `paceline`. ``estimate``: the first compilation not included."""

    kind: str = "layout"
    """In `curves`: reference, rounding, seed or layout."""
    model: str = "dense"

    @property
    def compiled(self) -> bool:
        return "parallel.compile=true" in self.sets


@dataclass(frozen=True, kw_only=True)
class Layout:
    name: str
    title: str
    sets: tuple[str, ...]
    compiles: bool = True
    """`zero_bubble` and `zbv` refuse torch.compile; experts that are spread over ranks break its graphs."""
    model: str = "dense"

    @property
    def fuses(self) -> bool:
        """Whether weight gradients may go straight into the buckets: FSDP2 has none, and `zero_bubble` and `zbv`
        compute them apart from those of inputs."""
        others = ("zero=2", "zero=3", "pipeline_schedule=zero_bubble", "pipeline_schedule=zbv")
        return {f"parallel.{item}" for item in others}.isdisjoint(self.sets)


def _layout(name: str, title: str, sets: str, *, compiles: bool = True, model: str = "dense") -> Layout:
    found = tuple(f"parallel.{item}" for item in sets.split())
    return Layout(name=name, title=title, sets=found, compiles=compiles, model=model)


LAYOUTS = (
    _layout("zero1", "data parallel, ZeRO-1", "zero=1"),
    _layout("tp2", "tensor + sequence, tp 2", "tp=2"),
    _layout("pp2_1f1b", "pipeline, pp 2, 1F1B", "pp=2"),
    _layout("cp2_ring", "context, cp 2, ring", "cp=2"),
    _layout("cp2_ulysses", "context, cp 2, Ulysses", "cp=2 cp_method=ulysses"),
    _layout("zero3", "data parallel, ZeRO-3", "zero=3"),
    _layout("ep2", "experts, ep 2, ZeRO-1", "ep=2", compiles=False, model="moe"),
    _layout(
        "pp2_interleaved",
        "pipeline, pp 2, interleaved 1F1B, 2 stages a rank",
        "pp=2 pipeline_schedule=interleaved_1f1b stages_per_rank=2",
    ),
    _layout("pp2_zero_bubble", "pipeline, pp 2, zero-bubble", "pp=2 pipeline_schedule=zero_bubble", compiles=False),
    _layout(
        "pp2_zbv",
        "pipeline, pp 2, zero-bubble V, 2 stages a rank",
        "pp=2 pipeline_schedule=zbv stages_per_rank=2",
        compiles=False,
    ),
    _layout("zero2", "data parallel, ZeRO-2", "zero=2"),
)
"""Two ranks each."""

# ---- speed: Llama-3-8B's widths

_WIDE = (
    "model.num_layers=8",
    "train.micro_batch_size=1",
    "train.global_batch_size=8",
    "parallel.recompute=none",
    "parallel.reduce_dtype=fp32",
    "parallel.accumulate_dtype=fp32",
)
_WIDE_EXPERTS = (
    # two of these experts multiply as much as the dense layer
    "model.num_layers=4",
    "model.num_experts=8",
    "model.top_k=2",
    "model.moe.ffn_size=7168",
    "model.moe.aux_loss_coef=0.01",
)
_TINY = (
    "cluster.device=cpu",
    "model.num_layers=4",
    "model.hidden_size=64",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.head_dim=16",
    "model.ffn_size=96",
    "data.num_workers=0",
)
_TINY_WIDE = (*_TINY, "model.vocab_size=512", "train.seq_len=64", "train.loss_chunk_tokens=64")


def _speed_job(name: str, title: str, layout: Layout | None, processes: int, *, compiled: bool, model: str) -> Job:
    sets = (*_WIDE, *(_WIDE_EXPERTS if model == "moe" else ()), *(layout.sets if layout else ()))
    if layout is not None and not layout.fuses:
        sets = (*sets, "parallel.fused_weight_gradients=false")
    return Job(
        part="speed",
        name=name,
        title=title,
        recipe="recipes/llama3_8b.toml",
        processes=processes,
        sets=(*sets, f"parallel.compile={str(compiled).lower()}"),
        estimate=45 if processes == 2 else 55,
        warm_up=3,
        steps=6,
        model=model,
    )


def speed_jobs() -> list[Job]:
    """One GPU and every layout, compiled where the layout allows it; what is not, beside the same on one GPU."""
    two = [
        _speed_job(
            layout.name,
            layout.title,
            layout,
            2,
            compiled=layout.compiles,
            model=layout.model,
        )
        for layout in LAYOUTS
    ]
    one = [
        _speed_job("one", "one GPU", None, 1, compiled=True, model="dense"),
        _speed_job("moe_one", "experts, one GPU", None, 1, compiled=False, model="moe"),
        _speed_job("one_eager", "one GPU, not compiled", None, 1, compiled=False, model="dense"),
    ]
    pipeline = next(layout for layout in LAYOUTS if layout.name == "pp2_1f1b")
    eager = _speed_job("pp2_1f1b_eager", f"{pipeline.title}, not compiled", pipeline, 2, compiled=False, model="dense")
    copies = _speed_job("moe_zero1", "experts, data parallel, ZeRO-1", None, 2, compiled=False, model="moe")
    number = [layout.name for layout in LAYOUTS].index("ep2") + 1
    return [one[0], *two[:number], one[1], *two[number:], eager, one[2], copies]


# ---- curves: the demo's model and text

_CURVE = (
    "data.train=data/demo-train",
    "data.valid=",
    "train.steps=50",
    "train.micro_batch_size=8",
    "train.global_batch_size=32",
    "optim.name=adamw",
    "optim.lr=1e-3",
    "optim.min_lr=1e-4",
    "optim.warmup_steps=10",
    "checkpoint.save_last=false",
    "checkpoint.interval=0",
    "observe.log_interval=1",
    "observe.progress=none",
    "observe.tensorboard=false",
    "observe.sample_prompts=[]",
)
_CURVE_EXPERTS = (
    "model.num_experts=8",
    "model.top_k=2",
    "model.moe.ffn_size=1024",
    "model.moe.aux_loss_coef=0.01",
)
_TINY_CURVE = (*_TINY, "model.max_seq_len=64", "train.seq_len=64", "train.steps=6", "optim.warmup_steps=2")

ROUNDING = (
    ("again", "the same run once more", ()),
    ("micro4", "micro-batches of 4 sequences instead of 8", ("train.micro_batch_size=4",)),
    ("micro16", "micro-batches of 16", ("train.micro_batch_size=16",)),
    ("chunks512", "loss over chunks of 512 tokens instead of 2048", ("train.loss_chunk_tokens=512",)),
    ("compiled", "compiled blocks", ("parallel.compile=true",)),
)
"""One GPU, the same weights and data: other orders of sums, and roundings in other places."""
SEEDS = (1, 2, 3)


def _curve_job(name: str, title: str, kind: str, more: tuple[str, ...], processes: int, model: str) -> Job:
    sets = (*_CURVE, "parallel.compile=false", *(_CURVE_EXPERTS if model == "moe" else ()), *more)
    return Job(
        part="curves",
        name=name,
        title=title,
        recipe="recipes/demo_gpu.toml",
        processes=processes,
        sets=sets,
        estimate=25,
        kind=kind,
        model=model,
    )


def curve_jobs() -> list[Job]:
    """Both references and the bands of the dense model first; then all layouts; then what widens the picture."""

    def alone(model: str, variants: tuple[tuple[str, str, tuple[str, ...]], ...], kind: str) -> list[Job]:
        prefix = "moe_" if model == "moe" else ""
        return [_curve_job(prefix + name, title, kind, sets, 1, model) for name, title, sets in variants]

    references = [_curve_job("one", "one GPU", "reference", (), 1, "dense")]
    references += [_curve_job("moe_one", "experts, one GPU", "reference", (), 1, "moe")]
    layouts = [_curve_job(each.name, each.title, "layout", each.sets, 2, each.model) for each in LAYOUTS]
    seeds = tuple((f"seed{seed}", f"seed {seed}: other weights, other order", (f"run.seed={seed}",)) for seed in SEEDS)
    fp32 = (("fp32", "fp32 instead of bf16", ("train.precision=fp32",)),)
    return [
        *references,
        *alone("dense", ROUNDING, "rounding"),
        *alone("moe", ROUNDING[:3], "rounding"),
        *layouts,
        *alone("dense", seeds, "seed"),
        *alone("dense", fp32, "fp32"),
        *alone("moe", seeds[:2], "seed"),
    ]


# ---- long: 131,072 tokens

_LONG = (
    "train.micro_batch_size=1",
    "train.global_batch_size=1",
    "parallel.cp=2",
    "parallel.compile=true",
)
_LONG_LENGTH = ("train.seq_len=131072", "model.max_seq_len=131072")


def long_jobs() -> list[Job]:
    def job(method: str, recompute: str, title: str) -> Job:
        return Job(
            part="long",
            name=f"{method}_{recompute}",
            title=f"{title}, recompute {recompute}",
            recipe="recipes/llama3_1b.toml",
            processes=2,
            sets=(*_LONG, *_LONG_LENGTH, f"parallel.cp_method={method}", f"parallel.recompute={recompute}"),
            estimate=80,
            warm_up=2,
            steps=4,
            fits_shared=recompute == "full",  # 79 GiB a rank with selective
        )

    methods = (("ring", "ring"), ("ulysses", "Ulysses"))
    return [
        *(job(method, "selective", title) for method, title in methods),
        job("ring", "none", "ring"),
        *(job(method, "full", title) for method, title in methods),
    ]


def jobs_of(part: str) -> list[Job]:
    return {"speed": speed_jobs, "curves": curve_jobs, "long": long_jobs}[part]()


def tiny(job: Job) -> Job:
    """The same layout with a model that a CPU trains in seconds: whether it runs at all."""
    small = {"speed": _TINY_WIDE, "curves": _TINY_CURVE, "long": (*_TINY_WIDE, "model.max_seq_len=256")}[job.part]
    sets = (*(item for item in job.sets if item != "parallel.compile=true"), "parallel.compile=false", *small)
    if job.model == "moe":
        sets = (*sets, "model.moe.ffn_size=32")
    if job.part == "long":
        sets = (*sets, "train.seq_len=256")
    return replace(job, sets=sets, estimate=20, warm_up=1, steps=1)
