"""How does a framework spend time and memory where the arithmetic leaves it free? A few named numbers for each.

Every number has a physical meaning and a unit; `planner/fitting.py` fits some of them on published runs, and
docs/accuracy.md says on which rows, and how far off rows are that it did not see.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from paceline.errors import ConfigError

Number = Any
"""A float; while a fit evaluates many layouts at once, an array."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One framework."""

    name: str
    title: str
    cut: Literal["cost", "even"] = "even"
    """How layers are cut into stages: by cost, the head counted, or the same number for each."""

    # ---- time: shares of what `costs/demand.py` calls best
    gemm_efficiency: Number = 0.88
    """Of the best large matrix product: clocks under load, cuBLAS's choices, gaps between kernels."""
    whole_head_efficiency: Number = 1.0
    """Of the other products' efficiency, in head and embedding where the vocabulary is not cut over tp."""
    attention_efficiency: Number = 0.70
    """Of the best large matrix product, at long sequences."""
    hbm_efficiency: Number = 0.75
    """Of HBM's rate over the passes counted; below 0.5 where operators are not fused and make more passes."""
    score_efficiency: Number = 0.75
    """Of HBM's rate, where scores are materialised."""
    cast_efficiency: Number = 0.7
    """Of HBM's rate in casts to 8 and 4 bits."""
    optimizer_efficiency: Number = 0.7
    """Of HBM's rate in the optimizer's update."""
    nvlink_efficiency: Number = 0.78
    """Of the links' rate in large collectives (A100 78 %, H200 82 %)."""
    network_efficiency: Number = 0.75
    """Of the cards' rate between nodes."""

    # ---- time: what a host and the network take whatever the size
    launch_us: Number = 200.0
    """Of the host, for a layer forward; backward takes as long. A step cannot be faster than its launches."""
    call_us: Number = 15.0
    """A collective of tensor or expert parallelism at size zero, per step of its tree."""
    call_launch_us: Number = 20.0
    """Of the host, for such a collective."""
    send_us: Number = 30.0
    """A send between stages at size zero."""
    micro_batch_ms: Number = 0.2
    """Of a micro-batch beside its layers: loss, batch, the schedule's bookkeeping."""
    step_ms: Number = 10.0
    """Of a step: optimizer's host work, gradient norm, logging."""
    step_latency_ms: Number = 1.0
    """Of a step, for each doubling of the data-parallel ranks."""

    # ---- time: overlap, 0 ... 1
    gradient_overlap: Number = 0.7
    """Share of a backward pass behind which gradients can be reduced."""
    parameter_overlap: Number = 0.7
    """Share of a forward pass behind which updated (or sharded) parameters can be gathered."""
    tensor_overlap: Number = 0.0
    """Share of tensor-parallel communication that hides behind products."""
    expert_overlap: Number = 0.0
    """Share of the experts' all-to-all that hides."""
    ring_overlap: Number = 0.9
    """Share of attention behind which a ring's keys and values travel."""
    send_exposed: Number = 1.0
    """Share of a send that its receiver waits for in the steady state of a pipeline."""
    jitter: Number = 0.0
    """Relative slow-down for each doubling of the nodes: every collective waits for the slowest."""


PACELINE = Profile(name="paceline", title="Paceline", cut="cost")
MEGATRON = Profile(name="megatron", title="Megatron-LM")
VTRAIN = Profile(
    name="megatron_deepspeed",
    title="Megatron-DeepSpeed of 2022 (vTrain)",
    gradient_overlap=0.0,
    parameter_overlap=0.0,
)
NANOTRON = Profile(name="nanotron", title="nanotron", cut="cost", hbm_efficiency=0.35, launch_us=1500.0)
LLM_FOUNDRY = Profile(name="llm_foundry", title="llm-foundry (FSDP)")
TORCHTITAN = Profile(name="torchtitan", title="torchtitan (FSDP2)")
MEGATRON_2021 = Profile(name="megatron_2021", title="Megatron-LM of 2021", gradient_overlap=0.0)
BRIDGE = Profile(name="megatron_bridge", title="Megatron Bridge, NeMo")

PROFILES: tuple[Profile, ...] = (
    PACELINE,
    MEGATRON,
    VTRAIN,
    NANOTRON,
    LLM_FOUNDRY,
    TORCHTITAN,
    MEGATRON_2021,
    BRIDGE,
)


def find_profile(name: str) -> Profile:
    """The profile of that name.

    Raises:
        ConfigError: there is none.
    """
    for profile in PROFILES:
        if profile.name == name:
            return profile
    raise ConfigError(
        f"there is no profile {name!r}",
        evidence=f"There are {', '.join(profile.name for profile in PROFILES)}.",
        next_step="Choose one of these.",
    )
