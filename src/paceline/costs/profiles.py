"""How does a framework spend time and memory where the arithmetic leaves it free? A few named numbers for each.

Every number has a physical meaning and a unit; `planner/fitting.py` fits some of them on published runs, and
docs/accuracy.md says on which rows, and how far off rows are that it did not see.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from paceline.costs.cuts import Cut
from paceline.errors import ConfigError

Number = Any
"""A float; while a fit evaluates many layouts at once, an array."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One framework."""

    name: str
    title: str
    cut: Cut = "even"
    """How layers are cut into stages (`costs/cuts.py`)."""

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
    """A collective of tensor or expert parallelism at size zero."""
    wide_call_us: Number = 30.0
    """The same, more for each further node that a group of tensor parallelism lies on."""
    call_launch_us: Number = 20.0
    """Of the host, for such a collective."""
    crowded_call_us: Number = 0.0
    """Of the host, more for each rank of the group, while sends to other nodes are under way: NCCL's threads for the
    network take the cores that launch."""
    send_us: Number = 30.0
    """A send between stages at size zero."""
    micro_batch_ms: Number = 0.2
    """Of a micro-batch beside its layers: loss, batch, the schedule's bookkeeping."""
    step_ms: Number = 10.0
    """Of a step: optimizer's host work, gradient norm, logging."""
    step_latency_ms: Number = 1.0
    """Of a step, for each doubling of the data-parallel ranks."""

    reduces_whole: bool = False
    """With zero 1 gradients are all-reduced, not reduce-scattered."""

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

    # ---- memory
    gradient_bytes: float = 4.0
    """Of a gradient as it is kept over a step."""
    shards_parameters: bool = False
    """Zero 2 is FSDP's: parameters are sharded too, and stay gathered over a step."""
    states: Number = 1.0
    """Bytes of weights, gradients and optimizer over the exact count: buckets, padding, fragmentation."""
    accumulated: Number = 0.0
    """Parts of an fp32 gradient kept beside, while micro-batches are summed."""
    kept_hidden: Number = 4.0
    """Tensors as wide as the residual stream that a layer keeps, cut over tp."""
    kept_gathered: Number = 0.0
    """The same, whole on each rank of tp."""
    kept_heads: Number = 1.0
    """Sets of q, k, v and attention's output that a layer keeps."""
    kept_ffn: Number = 3.0
    """Tensors as wide as the MLP, of a gated one (two thirds of it in a plain one)."""
    kept_scores: Number = 1.0
    """Sets of scores, dropout mask and probabilities, where they are materialised."""
    logit_bytes: Number = 12.0
    """A logit, at the peak of the loss."""
    framework_gib: Number = 1.0
    """That torch's allocator counts beside all this."""
    context_gib: float = 1.7
    """That it does not count: CUDA context, libraries, NCCL. Runs on H100s have reached 77.4 of their 79.1 GiB."""
    reported: Literal["most", "first"] = "most"
    """Whose memory published tables print: the most loaded rank's, or the first's."""


PACELINE = Profile(name="paceline", title="Paceline", cut="cost")
MEGATRON = Profile(name="megatron", title="Megatron-LM")
VTRAIN = Profile(
    name="megatron_deepspeed",
    title="Megatron-DeepSpeed of 2022 (vTrain)",
    gradient_overlap=0.0,
    parameter_overlap=0.0,
)
NANOTRON = Profile(
    name="nanotron",
    title="nanotron",
    cut="greedy",
    reduces_whole=True,
    parameter_overlap=0.0,
    hbm_efficiency=0.35,
    launch_us=1500.0,
)
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
