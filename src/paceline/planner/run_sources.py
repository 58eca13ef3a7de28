"""Whose tables of runs are known, and what holds for all rows of one."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.costs.workload import Recompute


@dataclass(frozen=True, kw_only=True)
class Source:
    """What holds for all rows of a publication."""

    key: str
    title: str
    prefix: tuple[str, ...]
    """How ids of its rows begin."""
    words: tuple[str, ...] = ()
    """What the column `source` contains, in small letters."""
    several_nodes: bool = False
    """Of two that say the same, the one whose runs take more than a node."""
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
        key="vtrain_single", words=("vtrain",),
        title="vTrain, one node", prefix=("vtrain-single-",), profile="megatron_deepspeed",
        network="ib200", fused_attention=False, sequence_parallel=False, recompute="full",
    ),
    Source(
        key="vtrain_multi", words=("vtrain",), several_nodes=True,
        title="vTrain, several nodes", prefix=("vtrain-multi-",), profile="megatron_deepspeed",
        network="ib100", fused_attention=False, sequence_parallel=False, recompute="full",
    ),
    Source(
        key="nanotron", words=("nanotron",),
        title="nanotron (Ultra-Scale Playbook)", prefix=("nanotron-",), profile="nanotron",
        convention="full", activation="swiglu", norm="rmsnorm", network="efa400",
    ),
    Source(
        key="bridge", words=("megatron-bridge", "megatron bridge"),
        title="Megatron Bridge, NeMo", prefix=("bridge-",), profile="megatron_bridge",
        activation="swiglu", norm="rmsnorm", tie_embeddings=False, vocab=128256, reduce_bf16=True,
    ),
    Source(
        key="llm_foundry", words=("llm-foundry",),
        title="llm-foundry", prefix=("mosaic-",), profile="llm_foundry", convention="full",
        network="roce400",
    ),
    Source(
        key="torchtitan", words=("torchtitan",),
        title="torchtitan", prefix=("titan-",), profile="torchtitan", convention="full",
        activation="swiglu", norm="rmsnorm", tie_embeddings=False, vocab=128256, selective=("second_linear",),
    ),
    Source(
        key="sc21", words=("sc21", "2104.04473"),
        title="Megatron-LM 2021 (SC'21)", prefix=("megatron-sc21-",), profile="megatron_2021",
        convention="hardware", network="ib200", fused_attention=False, sequence_parallel=False, recompute="full",
    ),
    Source(
        key="nemo", words=("nemo 24.07",),
        title="NeMo 24.07", prefix=("nemo2407-",), profile="megatron_bridge", convention="full",
        reduce_bf16=True,
        activation="swiglu", norm="rmsnorm", tie_embeddings=False,
    ),
    Source(
        key="bloom", words=("bigscience", "bloom"),
        title="BLOOM's trials", prefix=("bloom-",), profile="megatron_2021", convention="hardware",
        network="opa50", outside_gib=1.7, fused_attention=False, sequence_parallel=False, recompute="full",
    ),
    Source(
        key="fms", words=("fms-fsdp",),
        title="fms-fsdp", prefix=("fms-",), profile="torchtitan", convention="full",
        activation="swiglu", norm="rmsnorm", tie_embeddings=False, network="ib200",
    ),
    Source(
        key="korthikanti", words=("2205.05198", "korthikanti"),
        title="Korthikanti and others", prefix=("korthikanti-",), profile="megatron_2021",
        convention="full", network="ib200", fused_attention=False,
    ),
)  # fmt: skip
