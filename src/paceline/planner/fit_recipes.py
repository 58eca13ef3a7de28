"""Which numbers of which profile are fitted, on whose runs, in which ranges, and where every fit starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

RANGES: Mapping[str, tuple[float, float]] = {
    "gemm_efficiency": (0.5, 1.1),
    "expert_gemm_efficiency": (0.2, 1.1),
    "expert_hbm_efficiency": (0.05, 0.95),
    "expert_bias_passes": (4.0, 400.0),
    "ultra_products": (0.8, 1.6),
    "attention_efficiency": (0.25, 1.1),
    "hopper_attention": (0.3, 1.2),
    "hbm_efficiency": (0.1, 0.95),
    "score_efficiency": (0.1, 0.95),
    "cast_efficiency": (0.1, 1.0),
    "optimizer_efficiency": (0.05, 1.0),
    "nvlink_efficiency": (0.2, 1.0),
    "network_efficiency": (0.05, 1.0),
    "data_network": (0.05, 1.5),
    "tensor_gather_us": (0.1, 500.0),
    "ring_step_us": (0.01, 50.0),
    "launch_us": (5.0, 4000.0),
    "call_us": (1.0, 500.0),
    "wide_call_us": (1.0, 10000.0),
    "far_loss": (0.0, 2.0),
    "call_launch_us": (0.5, 1000.0),
    "crowded_call_us": (0.1, 3000.0),
    "send_us": (1.0, 5000.0),
    "micro_batch_ms": (0.01, 50.0),
    "step_ms": (0.1, 100.0),
    "step_latency_ms": (0.01, 50.0),
    "gradient_overlap": (0.0, 1.0),
    "parameter_overlap": (0.0, 1.0),
    "tensor_overlap": (0.0, 0.9),
    "async_tensor_overlap": (0.0, 0.95),
    "expert_overlap": (0.0, 0.9),
    "send_exposed": (0.0, 1.5),
}
"""What is physically possible. Efficiencies above 1 only where "best" is a product that others have measured."""


START: Mapping[str, float] = {
    "gemm_efficiency": 0.9,
    "expert_gemm_efficiency": 0.5,
    "expert_hbm_efficiency": 0.5,
    "expert_bias_passes": 34.0,
    "ultra_products": 1.0,
    "attention_efficiency": 0.5,
    "hopper_attention": 0.7,
    "hbm_efficiency": 0.7,
    "score_efficiency": 0.5,
    "cast_efficiency": 0.7,
    "optimizer_efficiency": 0.7,
    "nvlink_efficiency": 0.8,
    "network_efficiency": 0.5,
    "data_network": 1.0,
    "tensor_gather_us": 10.0,
    "ring_step_us": 5.0,
    "launch_us": 500.0,
    "call_us": 20.0,
    "wide_call_us": 300.0,
    "far_loss": 0.3,
    "call_launch_us": 30.0,
    "crowded_call_us": 100.0,
    "send_us": 20.0,
    "micro_batch_ms": 0.5,
    "step_ms": 5.0,
    "step_latency_ms": 2.0,
    "gradient_overlap": 0.5,
    "parameter_overlap": 0.5,
    "tensor_overlap": 0.3,
    "async_tensor_overlap": 0.5,
    "expert_overlap": 0.3,
    "send_exposed": 0.5,
    "kept_hidden": 4.0,
    "kept_beside": 1.0,
    "kept_gathered": 1.0,
    "framework_gib": 1.0,
}
"""Where every fit of every framework starts: round numbers, so that no fit begins at what other rows have taught."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How the profile of a framework is fitted."""

    profile: str
    sources: tuple[str, ...]
    """Fitted together, each with the same weight."""
    time: tuple[str, ...]
    experts: tuple[str, ...] = ()
    """Fitted on mixtures of experts alone, after the others were fitted on dense models alone."""
    memory: tuple[str, ...] = ()
    cap: float = float("inf")
    """A row counts for no more than this log ratio: tables with runs that other causes slowed down."""
    regular: bool = False
    """Fitted without rows that `planner/irregular.py` finds; judged with them."""


RECIPES: tuple[Recipe, ...] = (
    Recipe(
        profile="megatron_deepspeed",
        sources=("vtrain_single", "vtrain_multi"),
        time=(
            "gemm_efficiency", "hbm_efficiency", "score_efficiency", "attention_efficiency",
            "launch_us", "call_us", "call_launch_us", "nvlink_efficiency", "network_efficiency", "send_us",
            "micro_batch_ms",
        ),
    ),
    Recipe(
        profile="nanotron",
        sources=("nanotron",),
        time=(
            "gemm_efficiency", "hbm_efficiency", "attention_efficiency", "launch_us", "call_us", "wide_call_us",
            "far_loss", "call_launch_us", "crowded_call_us", "nvlink_efficiency", "network_efficiency",
            "data_network", "tensor_gather_us", "ring_step_us", "gradient_overlap", "step_latency_ms",
        ),
        memory=("kept_beside", "kept_gathered", "framework_gib"),
        cap=0.6,
        regular=True,
    ),
    Recipe(
        profile="llm_foundry",
        sources=("llm_foundry",),
        time=(
            "gemm_efficiency", "hbm_efficiency", "attention_efficiency", "hopper_attention", "cast_efficiency",
            "nvlink_efficiency", "network_efficiency", "gradient_overlap", "parameter_overlap", "micro_batch_ms",
            "step_ms", "step_latency_ms",
        ),
    ),
    Recipe(
        profile="megatron_bridge",
        sources=("bridge",),
        time=(
            "gemm_efficiency", "ultra_products", "hbm_efficiency", "attention_efficiency", "cast_efficiency",
            "network_efficiency", "tensor_overlap", "send_exposed",
        ),
        experts=("expert_gemm_efficiency", "expert_bias_passes"),
    ),
    Recipe(
        profile="torchtitan",
        sources=("torchtitan",),
        time=("gemm_efficiency", "attention_efficiency", "hbm_efficiency", "cast_efficiency", "async_tensor_overlap"),
    ),
    Recipe(
        profile="megatron_2021",
        sources=("korthikanti", "sc21"),
        time=("gemm_efficiency", "score_efficiency", "send_exposed", "network_efficiency"),
    ),
)  # fmt: skip
