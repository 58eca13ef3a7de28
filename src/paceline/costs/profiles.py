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
    ultra_products: Number = 1.0
    """How much faster products run on Blackwell Ultra than on Blackwell; their peaks are the same."""
    attention_efficiency: Number = 0.70
    """Of the best large matrix product, at long sequences."""
    hopper_attention: Number = 1.0
    """Of that, on Hopper and later: 0.6 or so for kernels written for Ampere."""
    expert_gemm_efficiency: Number = 0.7
    """Of the best, in grouped products of experts."""
    expert_hbm_efficiency: Number = 0.5
    """Of HBM's rate, in permutations and activations of routed rows."""
    expert_weight_efficiency: Number = 0.6
    """Of the best, in gradients of experts' weights by a kernel that adds them to the sums (`Workload.fused_experts`,
    Paceline's alone); it computes at one rate whatever the rows of an expert, and its traffic comes on top."""
    fused_expert_hbm_efficiency: Number = 0.85
    """Of HBM's rate, in such kernels: rows copied, activated and summed, and sums of gradients read and written."""
    expert_bias_passes: Number = 8.0
    """Passes over an expert's output (at 16 bits), forward and backward, where experts have biases. Megatron-Core adds
    them expert by expert in fp32, scaled, and casts back: 14 passes forward and 20 backward, by its operators."""
    expert_call_us: Number = 0.0
    """Of the host, for each product of a single expert, where grouped products are launched one by one; two in the
    backward pass for each of the forward."""
    hbm_efficiency: Number = 0.75
    """Of HBM's rate over the passes counted; below 0.5 where operators are not fused and make more passes."""
    eager_passes: Number = 1.0
    """Times the passes counted, of memory-bound operators that are not compiled."""
    score_efficiency: Number = 0.75
    """Of HBM's rate, where scores are materialised."""
    cast_efficiency: Number = 0.7
    """Of HBM's rate in casts to 8 and 4 bits."""
    optimizer_efficiency: Number = 0.7
    """Of HBM's rate in the optimizer's update."""
    fused_optimizer_efficiency: Number = 0.85
    """The same, in one kernel (28.3 ms for 4.1B parameters on an H200: docs/measured/profile_8b_fp8_14_layers.json)."""
    nvlink_efficiency: Number = 0.78
    """Of the links' rate in large collectives (A100 78 %, H200 82 %)."""
    network_efficiency: Number = 0.75
    """Of the cards' rate between nodes."""
    host_link_efficiency: Number = 0.8
    """Of PCIe's rate in copies to and from pinned host memory; assumed."""
    data_network: Number = 1.0
    """Of that, in reductions and gathers of data parallelism."""

    # ---- time: what a host and the network take whatever the size
    launch_us: Number = 200.0
    """Of the host, for a layer forward; backward takes as long. A step cannot be faster than its launches."""
    host_runs_ahead: bool = False
    """Nothing makes the host wait inside of a step: while the device is busy with a backward pass, the next forward is
    launched, so that only both together can be too short. False: each pass by itself."""
    call_us: Number = 15.0
    """A collective of tensor or expert parallelism at size zero."""
    wide_call_us: Number = 30.0
    """The same, more for each further node that a group of tensor parallelism lies on."""
    far_loss: Number = 0.0
    """By how much the network's part of it, and crowding, grow for each node beyond the second: rings get longer."""
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

    tensor_gather_us: Number = 0.0
    """Of each matrix that is gathered by itself after a sharded update, for each doubling of the ranks."""
    ring_step_us: Number = 0.0
    """A step of a ring that reduces gradients; there are as many as ranks, for each bucket."""
    reduces_whole: bool = False
    """With zero 1 gradients are all-reduced, not reduce-scattered."""
    overlaps_sharded: bool = True
    """With zero 1 gradients are reduced behind the backward pass, as without it; False: after it."""

    # ---- time: overlap, 0 ... 1
    gradient_overlap: Number = 0.7
    """Share of a backward pass behind which gradients can be reduced."""
    parameter_overlap: Number = 0.7
    """Share of a forward pass behind which updated (or sharded) parameters can be gathered."""
    tensor_overlap: Number = 0.0
    """Share of tensor-parallel communication that hides behind products."""
    async_tensor_overlap: Number = 0.6
    """The same, where products are cut up for it (asynchronous tensor parallelism)."""
    expert_overlap: Number = 0.0
    """Share of a pass behind which rows of experts are sent, where they are (`Workload.overlaps_experts`)."""
    ring_overlap: Number = 0.9
    """Share of attention behind which a ring's keys and values travel."""
    send_exposed: Number = 1.0
    """Share of a send that its receiver waits for in the steady state of a pipeline."""

    # ---- memory
    gradient_bytes: float = 4.0
    """Of a gradient as it is kept over a step."""
    sums_as_reduced: bool = False
    """Gradients are kept in the precision in which they are reduced (Megatron's `--grad-reduce-in-bf16`)."""
    keeps_eight_bits: bool = False
    """In fp8 and fp4 the inputs of linears are kept in 8 bits (Transformer Engine)."""
    accumulates_whole: bool = False
    """With zero 2 and 3 gradients are summed whole over micro-batches and reduced once a step, not for each."""
    copies_shards: bool = False
    """Zero 2 and 3 are FSDP2's, whose copies around its collectives nothing hides. (Fits of other frameworks have them
    in their other numbers.)"""
    shards_parameters: bool = False
    """Zero 2 is FSDP's: parameters are sharded too, and stay gathered over a step."""
    states: Number = 1.0
    """Bytes of weights, gradients and optimizer over the exact count: buckets, padding, fragmentation."""
    kept_hidden: Number = 4.0
    """Tensors as wide as the residual stream that a layer keeps, cut over tp."""
    kept_beside: Number = 0.0
    """The same, more where there is tp: what is cut and brought together again is copied."""
    kept_gathered: Number = 0.0
    """The same, whole on each rank of tp in place of its part: inputs that products have gathered."""
    releases_gathered: bool = False
    """Gathered inputs are not kept by two stages with a network between them, nor where tp goes over more than two
    nodes: seen in nanotron's runs, of all models, and not explained."""
    kept_heads: Number = 1.0
    """Sets of q, k, v and attention's output that a layer keeps."""
    kept_ffn: Number = 3.0
    """Tensors as wide as the MLP, of a gated one (two thirds of it in a plain one)."""
    eager_ffn: float = 1.0
    """Times that, of a gated one that is not compiled: the activated gate is kept too."""
    working_layers: float = 0.0
    """Layers that are whole for a while beside what is kept: of the one whose backward runs."""
    kept_scores: Number = 1.0
    """Sets of scores, dropout mask and probabilities, where they are materialised."""
    logit_bytes: Number = 12.0
    """A logit, at the peak of the loss."""
    logit_bytes_before: float = 0.0
    """Of a logit of the micro-batch before, which lives until the next one is assigned to its name."""
    plain_logits: float = 1.0
    """Times that, where the loss does not go over slices of tokens."""
    framework_gib: Number = 1.0
    """That torch's allocator counts beside all this."""
    context_gib: float = 1.7
    """That it does not count: CUDA context, libraries, NCCL. Runs on H100s have reached 77.4 of their 79.1 GiB."""
    reported: Literal["most", "first"] = "most"
    """Whose memory published tables print: the most loaded rank's, or the first's."""


# by hand, from runs on one and two H200s: docs/measured/foundation.json and bench_llama3_1b.jsonl
PACELINE = Profile(
    name="paceline",
    title="Paceline",
    cut="cost",
    gemm_efficiency=0.91,
    attention_efficiency=0.61,
    hbm_efficiency=0.65,
    # counted: rotary positions take five times the passes, a gated activation 5 and 9 of its width for 3 and 5
    eager_passes=1.7,
    # counted: scores pass 32 bytes an element through memory (scaled, masked, cast up, softmax, cast down), not 13
    score_efficiency=0.3,
    # kernels of two whole steps on one H200 (docs/measured/moe_one_gpu.json: profile/qwen3, profile/deepseek): products
    # of rows 532 and 592 TFLOP/s, of gradients of weights about 480 beside 4.1 TB/s of sums; rows copied, activated and
    # summed at 3.8 to 4.3 TB/s. With operations of torch: as a layer alone (docs/measured/moe_products.json: 8.4 ms)
    expert_gemm_efficiency=0.85,
    expert_weight_efficiency=0.61,
    expert_hbm_efficiency=0.37,
    fused_expert_hbm_efficiency=0.85,
    cast_efficiency=0.55,
    optimizer_efficiency=0.65,
    launch_us=1200.0,
    # 5 to 10 ms of such a step are gaps between kernels, of 380 to 560
    host_runs_ahead=True,
    micro_batch_ms=1.0,
    step_ms=3.0,
    gradient_overlap=0.85,
    parameter_overlap=0.85,
    copies_shards=True,
    shards_parameters=True,
    accumulates_whole=True,
    framework_gib=0.0,
    # as costs/activations.py counts
    eager_ffn=4 / 3,
    working_layers=1.0,
    logit_bytes=10.0,
    plain_logits=1.2,
)
# by hand: the fit of Megatron Bridge, and runs of Megatron-LM on two H200s where the two differ
MEGATRON = Profile(
    name="megatron",
    title="Megatron-LM",
    gemm_efficiency=0.93,
    attention_efficiency=0.60,
    hbm_efficiency=0.72,
    cast_efficiency=0.60,
    # as Megatron Bridge's rows have them on the same engine; a rank of 64 small experts launches them one by one: 12
    # layers of Qwen3-30B-A3B's widths, ep 2 on two H200s, took 1.73 s a step with even routing (136 TFLOP/s), while a
    # rank of one to four large experts hides it (Mixtral-8x7B, DeepSeek-V3)
    expert_gemm_efficiency=0.9,
    expert_hbm_efficiency=0.37,
    expert_call_us=82.0,
    expert_bias_passes=34.0,
    expert_overlap=0.9,
    launch_us=100.0,
    nvlink_efficiency=0.8,
    network_efficiency=0.47,
    gradient_overlap=0.85,
    parameter_overlap=0.85,
    tensor_overlap=0.53,
    send_exposed=0.1,
    kept_hidden=5.0,
    keeps_eight_bits=True,
    sums_as_reduced=True,
)
VTRAIN = Profile(
    name="megatron_deepspeed",
    title="Megatron-DeepSpeed of 2022 (vTrain)",
    gemm_efficiency=0.997,
    attention_efficiency=1.1,
    hbm_efficiency=0.95,
    score_efficiency=0.492,
    launch_us=1060.0,
    call_us=175.0,
    call_launch_us=19.5,
    nvlink_efficiency=1.0,
    network_efficiency=1.0,
    micro_batch_ms=1.78,
    step_ms=1.0,
    step_latency_ms=0.1,
    gradient_overlap=0.0,
    parameter_overlap=0.0,
    send_us=1.0,
)
NANOTRON = Profile(
    name="nanotron",
    title="nanotron",
    cut="greedy",
    gemm_efficiency=0.859,
    attention_efficiency=0.253,
    hbm_efficiency=0.676,
    launch_us=159.0,
    call_us=59.0,
    wide_call_us=1450.0,
    call_launch_us=952.0,
    crowded_call_us=555.0,
    nvlink_efficiency=0.861,
    network_efficiency=0.596,
    send_us=10.0,
    micro_batch_ms=0.1,
    step_ms=1.0,
    step_latency_ms=9.33,
    gradient_overlap=0.555,
    parameter_overlap=0.0,
    # its trainer wraps a model in DistributedDataParallel, which reduces behind the backward pass, unless gradients are
    # summed in fp32 for a sharded optimizer: those it all-reduces when all backward passes are done
    reduces_whole=True,
    overlaps_sharded=False,
    tensor_gather_us=7.15,
    gradient_bytes=6.0,
    # counted, eager: the norms' inputs and outputs; q, k, v and the output, k and v once more to be rotated, the output
    # once more to be transposed; gate and up, the activated gate, the product
    kept_hidden=4.0,
    kept_heads=1.75,
    kept_ffn=4.0,
    logit_bytes=8.0,
    logit_bytes_before=4.0,
    releases_gathered=True,
    reported="first",
    far_loss=0.4,
    data_network=1.13,
    ring_step_us=1.06,
    kept_beside=2.91,
    kept_gathered=1.13,
    framework_gib=0.207,
)
LLM_FOUNDRY = Profile(
    name="llm_foundry",
    title="llm-foundry (FSDP)",
    gemm_efficiency=0.846,
    attention_efficiency=0.406,
    hopper_attention=0.516,
    hbm_efficiency=0.95,
    nvlink_efficiency=0.348,
    network_efficiency=0.436,
    micro_batch_ms=0.01,
    step_ms=0.1,
    step_latency_ms=8.85,
    gradient_overlap=0.56,
    parameter_overlap=0.745,
    cast_efficiency=0.896,
)
TORCHTITAN = Profile(
    name="torchtitan",
    title="torchtitan (FSDP2)",
    gemm_efficiency=0.817,
    attention_efficiency=1.1,
    hopper_attention=0.8,
    hbm_efficiency=0.199,
    nvlink_efficiency=0.9,
    gradient_overlap=0.7,
    parameter_overlap=0.7,
    kept_hidden=2.7,
    kept_heads=0.7,
    kept_ffn=1.5,
    logit_bytes=8.0,
    cast_efficiency=0.643,
    async_tensor_overlap=0.284,
)
MEGATRON_2021 = Profile(
    name="megatron_2021",
    title="Megatron-LM of 2021",
    gemm_efficiency=1.1,
    attention_efficiency=0.8,
    hbm_efficiency=0.7,
    score_efficiency=0.513,
    launch_us=300.0,
    network_efficiency=0.156,
    send_exposed=0.111,
    gradient_overlap=0.0,
    parameter_overlap=0.7,
)
BRIDGE = Profile(
    name="megatron_bridge",
    title="Megatron Bridge, NeMo",
    gemm_efficiency=0.889,
    attention_efficiency=0.459,
    hbm_efficiency=0.95,
    cast_efficiency=0.926,
    expert_gemm_efficiency=1.1,
    # as Paceline's experts, measured alone (docs/measured/moe_products.json): these rows do not tell it from products
    expert_hbm_efficiency=0.37,
    launch_us=100.0,
    call_us=15.0,
    send_us=20.0,
    nvlink_efficiency=0.8,
    network_efficiency=0.656,
    gradient_overlap=0.8,
    parameter_overlap=0.8,
    tensor_overlap=0.837,
    expert_overlap=0.9,  # assumed, as of a ring's keys and values
    send_exposed=0.0452,
    step_ms=10.0,
    sums_as_reduced=True,
    keeps_eight_bits=True,
    ultra_products=1.31,
    expert_bias_passes=79.2,
)

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
