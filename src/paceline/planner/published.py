"""Which run does a row of a published table describe? Rows of CSV files to workloads, clusters and measurements.

The columns are those of docs/accuracy.md. A row that cannot be scored says why: nothing is guessed that changes the
result by more than the accuracy claimed; what is assumed for a whole source stands in `run_sources.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pydantic import ValidationError

from paceline.config.model import ModelConfig, MoEConfig
from paceline.costs.hardware import Hardware, find_hardware
from paceline.costs.layers import training_flops_per_token
from paceline.costs.profiles import find_profile
from paceline.costs.workload import INTERCONNECTS, Cluster, Precision, Recompute, Workload
from paceline.errors import ConfigError
from paceline.planner.release_recipes import with_release
from paceline.planner.run_sources import SOURCES, Source
from paceline.planner.run_tables import AT, COLUMNS, MEASURED, REQUIRED, CellError, measured_number, whole_number


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """A row that can be scored."""

    id: str
    source: Source
    model_name: str
    """What is left out together."""
    workload: Workload
    cluster: Cluster
    step_seconds: float | None
    memory_bytes: float | None
    release: str = ""
    """Of the framework, where a publication has several."""
    crashed: bool = False
    secondary: bool = False

    @property
    def measured(self) -> bool:
        """Whether there is something to compare a prediction with."""
        return self.step_seconds is not None or self.memory_bytes is not None or self.crashed


@dataclass(frozen=True, kw_only=True)
class NotScored:
    """A row that cannot be, and why."""

    id: str
    source: str
    reason: str
    """What was found first."""
    also: str = ""
    """What else the row lacks or has wrong."""
    at: str = ""
    """File and line, where it is of a table."""

    @property
    def name(self) -> str:
        """The id, and where it stands."""
        return self.id if not self.at or self.at in self.id else f"{self.id} ({self.at})"

    @property
    def reasons(self) -> str:
        return "; ".join(filter(None, (self.reason, self.also)))


def source_of(row: dict[str, str]) -> Source | None:
    """By the column `source`; where that says nothing known, by how the id begins."""
    words, row_id = row["source"].lower(), row["id"]
    told = [source for source in SOURCES if any(word in words for word in source.words)]
    told = told or [source for source in SOURCES if row_id.startswith(source.prefix)]
    by_id = [source for source in told if row_id.startswith(source.prefix)]
    return next(iter(by_id or _of_size(told, row)), None)


def _of_size(sources: Sequence[Source], row: dict[str, str]) -> list[Source]:
    """Of vTrain's two tables the one of runs on so many GPUs."""
    if len(sources) < 2:
        return list(sources)
    nodes = whole_number(row, "n_gpus") > whole_number(row, "gpus_per_node", 8)
    return [source for source in sources if source.several_nodes == nodes] or list(sources)


def _of_framework(framework: str, row: dict[str, str]) -> Source:
    """What holds for somebody's runs of a framework: what its own publication says where there is one, else today's
    defaults."""
    own = {"megatron_deepspeed": ("vtrain_single", "vtrain_multi"), "megatron_bridge": ("bridge",)}
    found = [source for source in SOURCES if source.key in own.get(framework, (framework,))]
    if found:
        return _of_size(found, row)[0]
    return Source(
        key=framework, title=find_profile(framework).title, prefix=(), profile=framework, activation="swiglu",
        norm="rmsnorm", tie_embeddings=False,
    )  # fmt: skip


def read_run(row: dict[str, str], framework: str = "") -> PublishedRun | NotScored:
    """A row as a run, or why not.

    Args:
        framework: name of a profile, for all rows, whatever their source says.
    """
    at = row.get(AT, "")
    row = dict.fromkeys(COLUMNS, "") | {name: text or "" for name, text in row.items() if name}
    key = row["source"][:40]
    try:
        source = _of_framework(framework, row) if framework else source_of(row)
        if source is None:
            return NotScored(id=row["id"], source=key, reason="a source without a profile", at=at)
        key = source.key
        return _read(with_release(row) if key == "bridge" else row, source)
    except (CellError, ConfigError, ValidationError, ValueError, ArithmeticError) as error:
        reason = _plain(error)
        return NotScored(id=row["id"], source=key, reason=reason, also=_also(row, reason), at=at)


def _plain(error: Exception) -> str:
    """In one line."""
    if isinstance(error, ValidationError):
        return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}".strip(": ") for each in error.errors())
    return str(error).split("\n", 1)[0]


def _also(row: dict[str, str], told: str) -> str:
    """What is missing beside the first fault, so that a table can be mended at once."""
    empty = [name for name in REQUIRED if not row[name].strip()]
    if row["experts"].strip() not in ("", "0") and not row["topk"].strip():
        empty.append("topk")
    empty = [name for name in empty if not told.startswith(f"{name} is")]
    faults = [f"nor {', '.join(empty)}" if "not published" in told else f"no {', '.join(empty)}"] if empty else []
    if row["gpu"].strip() and find_hardware(_GPUS.get(row["gpu"].strip(), row["gpu"].strip())) is None:
        faults += [f"{row['gpu']!r} is not in the hardware table"] if "hardware table" not in told else []
    return "; ".join(faults)


_GPUS = {
    "H100": "H100 SXM",
    "H100-80": "H100 SXM",
    "H100-96 (HBM2e,500W)": "H100 SXM 96",
    "H100-94": "H100 SXM",
    "H200": "H200 SXM",
    "A100": "A100 SXM 80",
    "A100-80": "A100 SXM 80",
    "A100-40": "A100 SXM 40",
    "B200": "B200 SXM",
    "B300": "B300 SXM",
    "V100-32": "V100 SXM 32",
}


def _gpu(row: dict[str, str]) -> Hardware:
    name = row["gpu"].strip()
    found = find_hardware(_GPUS.get(name, name))
    if found is None:
        raise CellError(f"{name!r} is not in the hardware table")
    return found


def _cluster(row: dict[str, str], source: Source) -> Cluster:
    gpu = _gpu(row)
    network = source.network
    if gpu.name in ("GB300", "B300 SXM"):
        network = "ib800"
    return Cluster(
        gpu=gpu,
        gpus=whole_number(row, "n_gpus"),
        gpus_per_node=whole_number(row, "gpus_per_node", 8),
        node_gb_per_s=INTERCONNECTS[network][0],
        fast_domain=72 if gpu.name in ("GB200", "GB300") else 0,
    )


def _model(row: dict[str, str], source: Source, seq_len: int, pp: int) -> ModelConfig:
    experts = whole_number(row, "experts", 0)
    known = _KNOWN.get(row["model"].split(" (")[0].strip(), {})
    heads = whole_number(row, "heads")
    gpt = row["model"].startswith("GPT3")
    fields: dict[str, object] = {
        "num_layers": whole_number(row, "layers"),
        "hidden_size": whole_number(row, "hidden"),
        "num_heads": heads,
        "num_kv_heads": whole_number(row, "kv_heads", heads),
        "ffn_size": whole_number(row, "ffn"),
        "vocab_size": whole_number(row, "vocab", source.vocab),
        "max_seq_len": seq_len,
        "activation": "gelu" if gpt else source.activation,
        "norm": "layernorm" if gpt else source.norm,
        "position": "learned" if gpt or source.norm == "layernorm" else "rope",
        "tie_embeddings": gpt or source.tie_embeddings,
        "head_dim": max(2, whole_number(row, "hidden") // heads // 2 * 2),
    }
    if source.key == "nanotron":
        fields["tie_embeddings"] = pp == 1 and "8B" not in row["model"]
    if experts:
        fields |= {"num_experts": experts, "top_k": whole_number(row, "topk")}
    if "w/o MTP" in row["model"]:
        known = known | {"mtp_layers": 0}
    return ModelConfig.model_validate(fields | known)


_DEEPSEEK = {
    "attention": "mla", "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "num_kv_heads": 0, "head_dim": 0,
}  # fmt: skip
_KNOWN: dict[str, dict[str, object]] = {
    "DeepSeekV3": _DEEPSEEK
    | {
        "ffn_size": 18432,
        "mtp_layers": 1,
        "moe": MoEConfig(ffn_size=2048, first_dense_layers=3, num_shared_experts=1, num_groups=8, top_k_groups=4),
    },
    "Kimi_K2": _DEEPSEEK
    | {"ffn_size": 18432, "moe": MoEConfig(ffn_size=2048, first_dense_layers=1, num_shared_experts=1)},
    "GPT OSS 120B": {
        "head_dim": 64,
        "sliding_window": 128,
        "sliding_window_period": 2,
        "qkv_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
        "vocab_size": 201088,
    },
}
"""What the tables leave out and the models' own files say (config.json on the Hugging Face hub)."""
_CLAMPED = {"GPT OSS 120B"}
"""Those whose files have a `swiglu_limit`."""


def _read(row: dict[str, str], source: Source) -> PublishedRun:
    pp = whole_number(row, "pp", 1)
    if pp > 1 and ("local batch" in row["notes"] or "vpp not printed" in row["notes"]):
        raise CellError("micro-batch or interleaving of the pipeline is not published")
    if "doubtful" in row["notes"] or "ANOMALY" in row["notes"]:
        raise CellError("the source contradicts itself")
    seq_len = whole_number(row, "seq")
    model = _model(row, source, seq_len, pp)
    if whole_number(row, "hidden") % whole_number(row, "heads"):
        raise CellError(f"{row['heads']} heads do not divide a hidden size of {row['hidden']}")
    cluster = _cluster(row, source)
    mode, modules = _recompute(row, source)
    work = Workload(
        model=model,
        seq_len=seq_len,
        micro_batch_size=whole_number(row, "mbs"),
        global_batch_size=whole_number(row, "gbs"),
        precision=_precision(row),
        tp=whole_number(row, "tp", 1),
        pp=pp,
        cp=whole_number(row, "cp", 1),
        ep=whole_number(row, "ep", 1),
        zero=_zero(row),
        stages_per_rank=whole_number(row, "vpp", 1),
        recompute=mode,
        recompute_modules=modules,
        fused_attention=source.fused_attention,
        reduce_bf16=source.reduce_bf16,
        sequence_parallel=source.sequence_parallel and "no sequence parallel" not in row["notes"],
        fp8_rowwise="f8rw" in row["notes"],
        frozen_weights="LoRA" in row["source"],
        async_tp=_async_tp(row["notes"]),
        clamped_experts=row["model"].split(" (")[0].strip() in _CLAMPED,
    )
    kernels: dict[str, Any] = {field: True for words, field in KERNELS.items() if words in row["notes"]}
    work = replace(work, **kernels)
    for name in MEASURED:  # a row with one cell that cannot be is not to be trusted in the others
        if name != "mfu_pct" or row[name].strip().strip("0."):  # of slow runs it is rounded to 0.0
            measured_number(row, name)
    dp = whole_number(row, "dp", work.dp(cluster.gpus))
    if dp * work.model_ranks != cluster.gpus:
        raise CellError(f"tp x pp x cp x dp = {dp * work.model_ranks}, on {cluster.gpus} GPUs")
    if reason := work.why_not(cluster.gpus):
        raise CellError(reason)
    measured = _step_seconds(row, source, work, cluster)
    memory = measured_number(row, "mem_GiB")
    _refuse_impossible(work, cluster, measured, memory)
    _refuse_above_peak(row, work, cluster)
    crashed = "CRASHED" in row["notes"] or "OOM" in row["notes"]
    return PublishedRun(
        id=row["id"],
        source=source,
        model_name=row["model"].split(" (")[0].strip(),
        workload=work,
        cluster=cluster,
        step_seconds=measured,
        memory_bytes=None if memory is None else (memory - source.outside_gib) * source.gigabytes,
        release=row["source"].partition("[")[2].rstrip("]"),
        crashed=crashed and measured is None,
        secondary=row.get("evidence") == "secondary",
    )


def _refuse_impossible(work: Workload, cluster: Cluster, seconds: float | None, memory_gib: float | None) -> None:
    """No run is faster than its card's datasheet, or larger than the card."""
    gpu = cluster.gpu
    if memory_gib is not None and memory_gib > 1.1 * gpu.memory_gb:
        raise CellError(f"mem_GiB = {memory_gib:g} is more than the {gpu.memory_gb:g} GB of {gpu.name}")
    peak = _peak(work, cluster)
    if seconds is None or not peak:
        return
    flops = training_flops_per_token(work.model, work.seq_len, "causal") * (2 / 3 if work.frozen_weights else 1)
    reached = flops * work.tokens / cluster.gpus / seconds / 1e12
    if reached > peak:
        raise CellError(f"{seconds:.4g} s a step are {reached:,.0f} TFLOP/s, above the {peak:,.0f} of {gpu.name}")


def _peak(work: Workload, cluster: Cluster) -> float:
    """TFLOP/s of the fastest products of that precision; 0 where the table has none."""
    gpu = cluster.gpu
    known = (gpu.bf16, gpu.fp16) if work.precision in ("bf16", "fp16", "fp32") else (gpu.fp8, gpu.fp4)
    return max((rate for rate in known if rate), default=0.0)


def _refuse_above_peak(row: dict[str, str], work: Workload, cluster: Cluster) -> None:
    """Whatever is counted, a column of speed does not exceed the card's datasheet."""
    reached, peak = measured_number(row, "tflops_per_gpu") or 0.0, _peak(work, cluster)
    if peak and reached > peak:
        raise CellError(f"tflops_per_gpu = {reached:g} is above the {peak:,.0f} of {cluster.gpu.name}")
    share = row["mfu_pct"].strip()
    if share.strip("0.") and (measured_number(row, "mfu_pct") or 0.0) > 100:
        raise CellError(f"mfu_pct = {share} is more than the peak")


KERNELS = {
    "dispatcher permutes": "dispatcher_permutes",
    "expert epilogues": "expert_epilogues",
    "experts overlapped": "overlaps_experts",
    "fp8 attention": "fp8_attention",
    "fp8 head": "fp8_head",
}
"""Words of the notes, and the field of a `Workload` that they turn on."""


def _async_tp(notes: str) -> bool:
    return "async" in notes.lower().replace("vanilla", "") and "vanilla" not in notes


def _precision(row: dict[str, str]) -> Precision:
    text = row["precision"].split("/")[0].strip().lower()
    for known in ("fp32", "fp16", "bf16", "mxfp8", "fp8", "nvfp4"):
        if text.startswith(known):
            return known
    if text:
        raise CellError(f"precision = {text!r} is none of fp32, fp16, bf16, fp8, mxfp8, nvfp4")
    return "bf16"


def _zero(row: dict[str, str]) -> Literal[0, 1, 2, 3]:
    text = row["zero"].strip()
    written: dict[str, Literal[0, 1, 2, 3]] = {"0": 0, "1": 1, "2": 2, "3": 3}
    found = written.get(text[:1], 3 if "SDP" in text else None)  # FSDP, HSDP
    if found is None and text:
        raise CellError(f"zero = {text!r} is none of 0, 1, 2, 3, FSDP, HSDP")
    return found or 0


def _recompute(row: dict[str, str], source: Source) -> tuple[Recompute, tuple[str, ...]]:
    text, _, modules = row["recompute"].strip().partition(":")
    modes: dict[str, Recompute] = {"none": "none", "full": "full", "selective": "selective"}
    mode = modes.get(text)
    if mode is None and text:
        raise CellError(f"recompute = {text!r} is none of none, selective, full")
    if mode == "selective" and not modules and source.selective:
        return mode, source.selective
    return (source.recompute, ()) if mode is None else (mode, tuple(filter(None, modules.split("+"))))


def _step_seconds(row: dict[str, str], source: Source, work: Workload, cluster: Cluster) -> float | None:
    """As printed; else from tokens/s; else from TFLOP/s by the source's own convention."""
    if (seconds := measured_number(row, "step_time_s")) is not None:
        return seconds
    if rate := measured_number(row, "tokens_per_s_per_gpu"):
        return work.tokens / cluster.gpus / rate
    if tflops := measured_number(row, "tflops_per_gpu"):
        convention = "causal" if source.convention == "causal" else "full"
        flops = training_flops_per_token(work.model, work.seq_len, convention)  # type: ignore[arg-type]
        if source.convention == "hardware":
            flops *= 4 / 3
        return flops * work.tokens / cluster.gpus / (tflops * 1e12)
    mfu, peak = measured_number(row, "mfu_pct"), cluster.gpu.peak_tflops("bf16")
    if mfu and peak:
        flops = training_flops_per_token(work.model, work.seq_len, "full")
        return flops * work.tokens / cluster.gpus / (mfu / 100 * peak * 1e12)
    return None
