"""Which run does a row of a published table describe? Rows of CSV files to workloads, clusters and measurements.

The columns are those of docs/accuracy.md. A row that cannot be scored says why: nothing is guessed that changes the
result by more than the accuracy claimed; what is assumed for a whole source stands in `SOURCES`.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from paceline.config.model import ModelConfig, MoEConfig
from paceline.costs.hardware import Hardware, find_hardware
from paceline.costs.layers import training_flops_per_token
from paceline.costs.profiles import find_profile
from paceline.costs.workload import INTERCONNECTS, Cluster, Precision, Recompute, Workload
from paceline.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Source:
    """What holds for all rows of a publication."""

    key: str
    title: str
    prefix: tuple[str, ...]
    """How ids of its rows begin."""
    profile: str
    """Name in `costs/profiles.py`."""
    convention: str = "causal"
    """Of its TFLOP/s: causal or full attention, or `hardware` (full attention, recomputation counted)."""
    activation: str = "gelu"
    norm: str = "layernorm"
    tie_embeddings: bool = True
    vocab: int = 51200
    """Where the table has none."""
    network: str = "ib400"
    fused_attention: bool = True
    sequence_parallel: bool = True
    recompute: Recompute = "none"
    """Where the table has none."""
    selective: tuple[str, ...] = ()
    """What "selective" means where the table does not say more."""
    reduce_bf16: bool = False
    """Gradients travel in bf16."""
    outside_gib: float = 0.0
    """What the memory column counts beside torch's allocator (nvidia-smi: context and libraries)."""
    gigabytes: float = 2**30
    """Bytes of the memory column's unit. nanotron prints GiB: its runs reach 77.4 of a card's 79.1 GiB and never more,
    and sharding 12 bytes a parameter of the 1B model over 256 ranks saves 14.9 = 12 x 1.342e9 / 2**30."""


SOURCES: tuple[Source, ...] = (
    Source(
        key="vtrain_single", title="vTrain, one node", prefix=("vtrain-single-",), profile="megatron_deepspeed",
        network="ib200", fused_attention=False, sequence_parallel=False, recompute="full",
    ),
    Source(
        key="vtrain_multi", title="vTrain, several nodes", prefix=("vtrain-multi-",), profile="megatron_deepspeed",
        network="ib100", fused_attention=False, sequence_parallel=False, recompute="full",
    ),
    Source(
        key="nanotron", title="nanotron (Ultra-Scale Playbook)", prefix=("nanotron-",), profile="nanotron",
        convention="full", activation="swiglu", norm="rmsnorm", network="efa400",
    ),
    Source(
        key="bridge", title="Megatron Bridge, NeMo", prefix=("bridge-",), profile="megatron_bridge",
        activation="swiglu", norm="rmsnorm", tie_embeddings=False, vocab=128256, reduce_bf16=True,
    ),
    Source(
        key="llm_foundry", title="llm-foundry", prefix=("mosaic-",), profile="llm_foundry", convention="full",
        network="roce400",
    ),
    Source(
        key="torchtitan", title="torchtitan", prefix=("titan-",), profile="torchtitan", convention="full",
        activation="swiglu", norm="rmsnorm", tie_embeddings=False, vocab=128256, selective=("second_linear",),
    ),
    Source(
        key="sc21", title="Megatron-LM 2021 (SC'21)", prefix=("megatron-sc21-",), profile="megatron_2021",
        convention="hardware", network="ib200", fused_attention=False, sequence_parallel=False, recompute="full",
    ),
    Source(
        key="nemo", title="NeMo 24.07", prefix=("nemo2407-",), profile="megatron_bridge", convention="full",
        reduce_bf16=True,
        activation="swiglu", norm="rmsnorm", tie_embeddings=False,
    ),
    Source(
        key="bloom", title="BLOOM's trials", prefix=("bloom-",), profile="megatron_2021", convention="hardware",
        network="opa50", outside_gib=1.7, fused_attention=False, sequence_parallel=False, recompute="full",
    ),
    Source(
        key="fms", title="fms-fsdp", prefix=("fms-",), profile="torchtitan", convention="full",
        activation="swiglu", norm="rmsnorm", tie_embeddings=False, network="ib200",
    ),
    Source(
        key="korthikanti", title="Korthikanti and others", prefix=("korthikanti-",), profile="megatron_2021",
        convention="full", network="ib200", fused_attention=False,
    ),
)  # fmt: skip


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


@dataclass(frozen=True, kw_only=True)
class NotScored:
    """A row that cannot be, and why."""

    id: str
    source: str
    reason: str
    """What was found first."""
    also: str = ""
    """What else the row lacks or has wrong."""

    @property
    def reasons(self) -> str:
        return "; ".join(filter(None, (self.reason, self.also)))


REQUIRED = ("layers", "hidden", "heads", "ffn", "seq", "gpu", "n_gpus", "mbs", "gbs")
"""Columns that a row must fill, ..."""
MEASURED = ("step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu_pct", "mem_GiB")
"""... with one of these."""
COLUMNS = (
    "id", "source", "year", "model", "params_B", "active_params_B", "layers", "hidden", "heads", "kv_heads", "ffn",
    "vocab", "experts", "topk", "seq", "gpu", "n_gpus", "gpus_per_node", "interconnect", "precision", "tp", "pp",
    "vpp", "cp", "ep", "dp", "zero", "mbs", "gbs", "recompute", "tflops_per_gpu", "mfu_pct", "tokens_per_s_per_gpu",
    "step_time_s", "mem_GiB", "notes", "evidence",
)  # fmt: skip
"""Of a table of runs; those that a table lacks are taken as empty."""


def read_rows(paths: Iterable[Path | str]) -> list[dict[str, str]]:
    """All rows of CSV files; an id that came already (the 55 nanotron rows in two files) is not read twice."""
    rows: dict[str, dict[str, str]] = {}
    for path in paths:
        with Path(path).open(newline="", encoding="utf-8") as file:
            for number, row in enumerate(csv.DictReader(file), start=2):
                row["id"] = row.get("id") or f"{Path(path).name}:{number}"
                rows.setdefault(row["id"], row)
    return list(rows.values())


def source_of(row_id: str) -> Source | None:
    return next((source for source in SOURCES if row_id.startswith(source.prefix)), None)


def read_run(row: dict[str, str], framework: str = "") -> PublishedRun | NotScored:
    """A row as a run, or why not.

    Args:
        framework: name of a profile, for rows of no known source; columns that they lack count as empty.
    """
    row = dict.fromkeys(COLUMNS, "") | {name: text or "" for name, text in row.items() if name}
    source = source_of(row["id"])
    if source is None and framework:
        source = Source(
            key=framework, title=find_profile(framework).title, prefix=(), profile=framework, activation="swiglu",
            norm="rmsnorm", tie_embeddings=False,
        )  # fmt: skip
    if source is None:
        return NotScored(id=row["id"], source=row["source"][:40], reason="a source without a profile")
    try:
        return _read(row, source)
    except (_MissingError, ConfigError, ValidationError, ValueError) as error:
        reason = str(error).split("\n", 1)[0]
        return NotScored(id=row["id"], source=source.key, reason=reason, also=_also(row, reason))


def _also(row: dict[str, str], told: str) -> str:
    """What is missing beside the first fault, so that a table can be mended at once."""
    empty = [name for name in REQUIRED if not row[name].strip()]
    if row["experts"].strip() not in ("", "0") and not row["topk"].strip():
        empty.append("topk")
    empty = [name for name in empty if not told.startswith(f"{name} is")]
    faults = [f"nor {', '.join(empty)}" if "not published" in told else f"no {', '.join(empty)}"] if empty else []
    if row["gpu"].strip() and find_hardware(_GPUS.get(row["gpu"].strip(), row["gpu"].strip())) is None:
        faults += [f"{row['gpu']!r} is not in the hardware table"] if "hardware table" not in told else []
    if not any(row[name].strip() for name in MEASURED):
        faults += ["nothing measured"] if "neither a time" not in told else []
    return "; ".join(faults)


class _MissingError(Exception):
    """A field that the row does not have."""


def _number(row: dict[str, str], name: str, default: int | None = None) -> int:
    text = row.get(name, "").strip()
    if text:
        return int(float(text))
    if default is None:
        raise _MissingError(f"{name} is not published")
    return default


def _float(row: dict[str, str], name: str) -> float | None:
    text = row.get(name, "").strip()
    return float(text) if re.fullmatch(r"[0-9.]+", text) else None


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
        raise _MissingError(f"{name!r} is not in the hardware table")
    return found


def _cluster(row: dict[str, str], source: Source) -> Cluster:
    gpu = _gpu(row)
    network = source.network
    if gpu.name in ("GB300", "B300 SXM"):
        network = "ib800"
    return Cluster(
        gpu=gpu,
        gpus=_number(row, "n_gpus"),
        gpus_per_node=_number(row, "gpus_per_node", 8),
        node_gb_per_s=INTERCONNECTS[network][0],
        fast_domain=72 if gpu.name in ("GB200", "GB300") else 0,
    )


def _model(row: dict[str, str], source: Source, seq_len: int, pp: int) -> ModelConfig:
    experts = _number(row, "experts", 0)
    known = _KNOWN.get(row["model"].split(" (")[0].strip(), {})
    heads = _number(row, "heads")
    gpt = row["model"].startswith("GPT3")
    fields: dict[str, object] = {
        "num_layers": _number(row, "layers"),
        "hidden_size": _number(row, "hidden"),
        "num_heads": heads,
        "num_kv_heads": _number(row, "kv_heads", heads),
        "ffn_size": _number(row, "ffn"),
        "vocab_size": _number(row, "vocab", source.vocab),
        "max_seq_len": seq_len,
        "activation": "gelu" if gpt else source.activation,
        "norm": "layernorm" if gpt else source.norm,
        "position": "learned" if gpt or source.norm == "layernorm" else "rope",
        "tie_embeddings": gpt or source.tie_embeddings,
        "head_dim": max(2, _number(row, "hidden") // heads // 2 * 2),
    }
    if source.key == "nanotron":
        fields["tie_embeddings"] = pp == 1 and "8B" not in row["model"]
    if experts:
        fields |= {"num_experts": experts, "top_k": _number(row, "topk")}
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


def _read(row: dict[str, str], source: Source) -> PublishedRun:
    pp = _number(row, "pp", 1)
    if pp > 1 and ("local batch" in row["notes"] or "vpp not printed" in row["notes"]):
        raise _MissingError("micro-batch or interleaving of the pipeline is not published")
    if "doubtful" in row["notes"] or "ANOMALY" in row["notes"]:
        raise _MissingError("the source contradicts itself")
    seq_len = _number(row, "seq")
    model = _model(row, source, seq_len, pp)
    cluster = _cluster(row, source)
    mode, modules = _recompute(row, source)
    work = Workload(
        model=model,
        seq_len=seq_len,
        micro_batch_size=_number(row, "mbs"),
        global_batch_size=_number(row, "gbs"),
        precision=_precision(row),
        tp=_number(row, "tp", 1),
        pp=pp,
        cp=_number(row, "cp", 1),
        ep=_number(row, "ep", 1),
        zero=_zero(row),
        stages_per_rank=_number(row, "vpp", 1),
        recompute=mode,
        recompute_modules=modules,
        fused_attention=source.fused_attention,
        reduce_bf16=source.reduce_bf16,
        sequence_parallel=source.sequence_parallel and "no sequence parallel" not in row["notes"],
        fp8_rowwise="f8rw" in row["notes"],
        frozen_weights="LoRA" in row["source"],
        async_tp=_async_tp(row["notes"]),
    )
    kernels: dict[str, Any] = {field: True for words, field in KERNELS.items() if words in row["notes"]}
    work = replace(work, **kernels)
    dp = _number(row, "dp", work.dp(cluster.gpus))
    if dp * work.model_ranks != cluster.gpus:
        raise _MissingError(f"tp x pp x cp x dp = {dp * work.model_ranks}, on {cluster.gpus} GPUs")
    if reason := work.why_not(cluster.gpus):
        raise _MissingError(reason)
    measured = _step_seconds(row, source, work, cluster)
    memory = _float(row, "mem_GiB")
    crashed = "CRASHED" in row["notes"] or "OOM" in row["notes"]
    if measured is None and memory is None and not crashed:
        raise _MissingError("neither a time nor a memory is published")
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
    return "bf16"


def _zero(row: dict[str, str]) -> Literal[0, 1, 2, 3]:
    text = row["zero"].strip()
    written: dict[str, Literal[0, 1, 2, 3]] = {"0": 0, "1": 1, "2": 2, "3": 3}
    return written.get(text[:1], 3 if "SDP" in text else 0)  # FSDP, HSDP


def _recompute(row: dict[str, str], source: Source) -> tuple[Recompute, tuple[str, ...]]:
    text, _, modules = row["recompute"].strip().partition(":")
    modes: dict[str, Recompute] = {"none": "none", "full": "full", "selective": "selective"}
    mode = modes.get(text)
    if mode == "selective" and not modules and source.selective:
        return mode, source.selective
    return (source.recompute, ()) if mode is None else (mode, tuple(filter(None, modules.split("+"))))


def _step_seconds(row: dict[str, str], source: Source, work: Workload, cluster: Cluster) -> float | None:
    """As printed; else from tokens/s; else from TFLOP/s by the source's own convention."""
    if (seconds := _float(row, "step_time_s")) is not None:
        return seconds
    if rate := _float(row, "tokens_per_s_per_gpu"):
        return work.tokens / cluster.gpus / rate
    if tflops := _float(row, "tflops_per_gpu"):
        convention = "causal" if source.convention == "causal" else "full"
        flops = training_flops_per_token(work.model, work.seq_len, convention)  # type: ignore[arg-type]
        if source.convention == "hardware":
            flops *= 4 / 3
        return flops * work.tokens / cluster.gpus / (tflops * 1e12)
    mfu, peak = _float(row, "mfu_pct"), cluster.gpu.peak_tflops("bf16")
    if mfu and peak:
        flops = training_flops_per_token(work.model, work.seq_len, "full")
        return flops * work.tokens / cluster.gpus / (mfu / 100 * peak * 1e12)
    return None
