"""What does a layout ask of the machines? Seconds at best rates, bytes and counts, before any framework has its say.

`demand_of(work, cluster, cut)` describes an average layer, the head and a pipeline rank; `costs/step.py` divides by a
profile's efficiencies and lays the pieces on a timeline. Everything is a number, so that `stacked` can put thousands of
layouts into arrays and a fit evaluates them all at once.

Sources: matrix products `costs/roofline.py`; attention arXiv:2307.08691 (backward 2.5 times forward, since the scores
are computed again); memory-bound passes counted from the operators below; communication of tensor parallelism
arXiv:2205.05198, of sharded data parallelism arXiv:1910.02054, of pipelines arXiv:2104.04473.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import groupby
from typing import Any

from paceline.config.model import AttentionSpec, BlockSpec, FeedForwardSpec, ModelConfig, MoESpec
from paceline.costs.comm import Group, ramped
from paceline.costs.layers import (
    block_parameters,
    count_parameters,
    score_flops,
)
from paceline.costs.roofline import linear_seconds
from paceline.costs.workload import Cluster, Workload

Number = Any
"""A float, or an array of them after `stacked`."""


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Of one layout. "At best" = at the device's best matrix product, HBM's or a link's full rate."""

    micro_batches: Number
    pipeline: Number
    """Ranks of the pipeline."""
    interleaved: Number
    """Stages on a rank."""
    layers: Number
    """Of the model, multi-token prediction among them."""
    layers_inside: Number
    """On the fullest pipeline rank without the head; 0 without a pipeline."""
    layers_last: Number
    """On the rank with the head."""

    gemm_forward: Number
    """Of a layer and micro-batch, seconds at best; as all that follows."""
    gemm_backward: Number
    expert_gemm_forward: Number
    """Grouped products of experts, not in `gemm_forward`."""
    expert_gemm_backward: Number
    expert_memory_forward: Number
    """Permutations and activations of routed rows, not in `memory_forward`."""
    expert_memory_backward: Number
    attention_forward: Number
    attention_backward: Number
    memory_forward: Number
    memory_backward: Number
    scores_forward: Number
    """Memory traffic of scores that are materialised."""
    scores_backward: Number
    cast_forward: Number
    """Casts to 8 or 4 bits."""
    cast_backward: Number
    gemm_again: Number
    """Recomputed."""
    attention_again: Number
    memory_again: Number
    communication_again: Number
    """Share of a forward's communication that is done again."""
    hopper: Number
    """1: Hopper or later, for which attention kernels of Ampere are slow."""
    launches: Number
    """Operators of a layer relative to those of a dense one."""

    tp_fast: Number
    """Forward; backward is the same. Seconds at best over NVLink, ..."""
    tp_node: Number
    """... over the network, ..."""
    tp_calls: Number
    """... and collectives."""
    tp_async: Number
    """1: cut up and overlapped."""
    tp_crowd: Number
    """Collectives times ranks of the group, where a pipeline's sends to other nodes go on beside them."""
    tp_wide: Number
    """Collectives times (nodes of the group - 1)."""
    tp_far: Number
    """Nodes of the group beyond the second."""
    cp_fast: Number
    """Ring: hides behind attention."""
    cp_node: Number
    ep_fast: Number
    ep_node: Number
    ep_calls: Number

    head_gemm: Number
    """Forward and backward, a micro-batch."""
    head_memory: Number
    pp_fast: Number
    """One send."""
    pp_node: Number
    pp_crosses: Number
    """1 where it goes over the network."""

    dp_size: Number
    grads_fast: Number
    """Reduce-scatter of all gradients of the fullest rank, once a step (or, zero 3, once a micro-batch)."""
    grads_node: Number
    params_fast: Number
    """Gathering of its parameters."""
    params_node: Number
    dp_tensors: Number
    """Matrices whose parameters are gathered after an update, times the steps of a tree over the ranks."""
    sharded: Number
    """1: parameters are sharded (zero 3)."""
    zero: Number
    """1: optimizer states are sharded."""
    optimizer_bytes: Number
    """Seconds at HBM's rate of one update on the fullest rank."""
    host_down: Number
    """Offloaded: gradients to host memory, once a step, seconds at PCIe's rate; ..."""
    host_up: Number
    """... weights from there, once a step; ..."""
    host_up_each: Number
    """... or sharded ones for every pass of every micro-batch; ..."""
    host_update: Number
    """... and the update by the host's processors, seconds at the rate of `Cluster.host_gb_per_s`."""
    accumulate: Number
    """Seconds at HBM's rate of adding a micro-batch's gradients to the sum."""
    nodes: Number


def stacked(demands: Sequence[Demand]) -> Demand:
    """Arrays over many layouts."""
    import numpy as np

    return Demand(**{field.name: np.array([getattr(d, field.name) for d in demands]) for field in fields(Demand)})


# ---- the model


@lru_cache(maxsize=256)
def block_groups(model: ModelConfig) -> tuple[tuple[BlockSpec, int], ...]:
    """Layers of a kind, with how many there are; those of multi-token prediction among them."""
    blocks = sorted(
        (*model.blocks(), *model.mtp_blocks()), key=lambda block: repr((block.attention, block.feed_forward))
    )
    groups = groupby(blocks, key=lambda block: (block.attention, block.feed_forward))
    return tuple((found[0], len(found)) for found in (list(group) for _, group in groups))


@lru_cache(maxsize=256)
def layer_parameters(model: ModelConfig) -> tuple[float, float]:
    """Dense and expert parameters of an average layer."""
    dense = experts = 0.0
    for block, count in block_groups(model):
        whole = block_parameters(model, block)
        inside = _expert_parameters(block)
        dense += (whole - inside) * count
        experts += inside * count
    layers = model.num_layers + model.mtp_layers
    return dense / layers, experts / layers


@lru_cache(maxsize=256)
def edge_parameters(model: ModelConfig) -> tuple[float, float]:
    """Of the embedding, and of the head as it lies on the last stage (a tied one is there too)."""
    counts = count_parameters(model)
    return float(counts.embedding), float(counts.head or model.vocab_size * model.hidden_size)


def _expert_parameters(block: BlockSpec) -> float:
    if not isinstance(block.feed_forward, MoESpec):
        return 0.0
    spec = block.feed_forward
    matrices = 3 if spec.expert.gated else 2
    return float(spec.num_experts * matrices * spec.expert.hidden_size * spec.expert.ffn_size)


# ---- a layer


@dataclass(kw_only=True)
class _Layer:
    """Sums over the operators of one layer."""

    gemm_forward: float = 0.0
    gemm_backward: float = 0.0
    expert_gemm_forward: float = 0.0
    expert_gemm_backward: float = 0.0
    expert_elements_forward: float = 0.0
    expert_elements_backward: float = 0.0
    mlp_gemm_forward: float = 0.0
    attention_forward: float = 0.0
    elements_forward: float = 0.0
    """16-bit elements read and written by memory-bound operators."""
    elements_backward: float = 0.0
    activation_elements: float = 0.0
    score_elements: float = 0.0
    cast_elements: float = 0.0
    launches: float = 1.0


@dataclass(frozen=True, kw_only=True)
class _Rates:
    linear: float
    """TFLOP/s at best of linears in their precision."""
    bf16: float
    hbm: float
    multiprocessors: int


def _rates(work: Workload, cluster: Cluster) -> _Rates:
    gpu = cluster.gpu
    bf16 = (gpu.peak_tflops("bf16") or gpu.peak_tflops("fp16") or gpu.fp32 or 10.0) * gpu.matmul_share
    linear = bf16
    if work.precision in ("fp8", "mxfp8") and gpu.fp8:
        linear = gpu.fp8 * gpu.fp8_matmul_share
    elif work.precision == "nvfp4" and gpu.fp4:
        linear = 0.85 * gpu.fp4 * gpu.fp8_matmul_share
    elif work.precision == "fp32":
        linear = bf16 = (gpu.tf32 or gpu.fp32 or bf16 / 8) * gpu.matmul_share
    return _Rates(linear=linear, bf16=bf16, hbm=gpu.memory_tb_per_s, multiprocessors=gpu.multiprocessors)


def _layer(work: Workload, block: BlockSpec, tokens: float, rates: _Rates) -> _Layer:
    """``tokens`` of a micro-batch on this rank, whole over tp."""
    layer = _Layer()
    spec, hidden, tp = block.attention, work.model.hidden_size, work.tp
    along = tp if work.sequence_parallel else 1
    _attention_linears(layer, spec, tokens, tp, rates)
    _scores(layer, work, spec, tokens, rates)
    # two norms read and write, two residual additions read two and write one
    norms = 4 if work.model.post_norm else 2
    residual = tokens * hidden * (2 * norms + 6) / along
    rotary = 2 * tokens * (spec.num_heads + spec.num_kv_heads) * spec.qk_head_dim / tp
    rotary *= 2 if spec.qk_norm else 1
    layer.elements_forward += residual + (rotary if work.model.position == "rope" else 0.0)
    layer.elements_backward += 1.6 * residual + (rotary if work.model.position == "rope" else 0.0)
    if isinstance(block.feed_forward, MoESpec):
        _experts(layer, work, block.feed_forward, tokens, rates)
    else:
        _mlp(layer, block.feed_forward, tokens, tp, rates)
    return layer


def _linear(layer: _Layer, tokens: float, inputs: float, outputs: float, rates: _Rates, *, mlp: bool = False) -> None:
    forward, backward = linear_seconds(tokens, inputs, outputs, rates.linear, rates.hbm, rates.multiprocessors)
    layer.gemm_forward += forward
    layer.gemm_backward += backward
    layer.mlp_gemm_forward += forward if mlp else 0.0
    layer.cast_elements += tokens * (inputs + outputs)


def _attention_linears(layer: _Layer, spec: AttentionSpec, tokens: float, tp: int, rates: _Rates) -> None:
    hidden, heads = spec.hidden_size, spec.num_heads / tp
    if spec.kind == "mla":
        if spec.q_lora_rank:
            _linear(layer, tokens, hidden, spec.q_lora_rank, rates)
        _linear(layer, tokens, spec.q_lora_rank or hidden, heads * spec.qk_head_dim, rates)
        _linear(layer, tokens, hidden, spec.kv_lora_rank + spec.qk_rope_head_dim, rates)
        _linear(layer, tokens, spec.kv_lora_rank, heads * (spec.qk_nope_head_dim + spec.v_head_dim), rates)
    else:
        kv_heads = max(1.0, spec.num_kv_heads / tp)
        _linear(layer, tokens, hidden, (heads + 2 * kv_heads) * spec.qk_head_dim, rates)
    _linear(layer, tokens, heads * spec.v_head_dim, hidden, rates)


def _scores(layer: _Layer, work: Workload, spec: AttentionSpec, tokens: float, rates: _Rates) -> None:
    whole = not work.fused_attention
    flops = score_flops(spec, work.seq_len, "full" if whole else "causal") * tokens / work.tp
    # short sequences and narrow heads fill a fused kernel badly: 374, 460, 522 and 547 TFLOP/s at 2k, 4k, 8k and 32k
    length = 1.0 if whole else 1.0 + 900.0 / work.seq_len
    width = 1.0 if whole or spec.v_head_dim >= 96 else 1.15
    layer.attention_forward += flops * length * width / (rates.bf16 * 1e12)
    if whole:
        layer.score_elements += tokens * work.seq_len * spec.num_heads / work.tp


def _mlp(layer: _Layer, spec: FeedForwardSpec, tokens: float, tp: float, rates: _Rates) -> None:
    inputs, width = (2 if spec.gated else 1), spec.ffn_size / tp
    _linear(layer, tokens, spec.hidden_size, inputs * width, rates, mlp=True)
    _linear(layer, tokens, width, spec.hidden_size, rates, mlp=True)
    elements = tokens * width * (inputs + 1)
    layer.elements_forward += elements
    layer.activation_elements += elements
    layer.elements_backward += tokens * width * (2 * inputs + 1)


def _experts(layer: _Layer, work: Workload, spec: MoESpec, tokens: float, rates: _Rates) -> None:
    """Rows of this rank, evenly over its experts; permutations there and back."""
    here = max(1.0, spec.num_experts / work.ep)
    rows = tokens / work.tp * work.etp * spec.top_k
    expert = spec.expert
    one = _Layer()
    _mlp(one, expert, rows / here, work.etp, rates)
    layer.expert_gemm_forward += here * one.gemm_forward
    layer.expert_gemm_backward += here * one.gemm_backward
    layer.cast_elements += here * one.cast_elements
    layer.activation_elements += here * one.activation_elements
    moved = 8 * rows * spec.hidden_size  # permute, send, receive, and back with the weighted sum
    layer.expert_elements_forward += here * one.elements_forward + moved
    layer.expert_elements_backward += here * one.elements_backward + moved
    layer.launches += 1.5
    _linear(layer, tokens / work.tp, spec.hidden_size, spec.num_experts, rates)
    if spec.shared is not None:
        _mlp(layer, spec.shared, tokens, work.tp, rates)


# ---- the layout


def demand_of(work: Workload, cluster: Cluster, layers_by_rank: Sequence[float]) -> Demand:
    """Of one layout.

    Args:
        layers_by_rank: layers on each pipeline rank, multi-token prediction among them.
    """
    rates = _rates(work, cluster)
    tokens = work.micro_batch_size * work.seq_len / work.cp
    layers = work.model.num_layers + work.model.mtp_layers
    total = _Layer(launches=0.0)
    for block, count in block_groups(work.model):
        found = _layer(work, block, tokens, rates)
        for field in fields(_Layer):
            setattr(total, field.name, getattr(total, field.name) + getattr(found, field.name) * count / layers)
    byte = 2e-12 / rates.hbm
    data_parallel = _data_parallel(work, cluster, layers_by_rank)
    again = _recomputed(work, total)
    backward_scale = 2.5 if work.fused_attention else 2.0
    wanted = 0.5 if work.frozen_weights else 1.0  # of the backward's products
    trained = 0.01 if work.frozen_weights else 1.0
    # blocks of 32 or 16 elements are scaled along both dimensions: two casts where a tensor's scale needs one
    casts = {"fp8": 1.0, "mxfp8": 2.0, "nvfp4": 2.0}.get(work.precision, 0.0)
    casts *= 3.0 if work.fp8_rowwise else 1.0
    return Demand(
        micro_batches=work.micro_batches(cluster.gpus),
        pipeline=work.pp,
        interleaved=work.stages_per_rank,
        layers=layers,
        layers_inside=max((*layers_by_rank[: work.head_rank], *layers_by_rank[work.head_rank + 1 :]), default=0.0),
        layers_last=layers_by_rank[work.head_rank],
        gemm_forward=total.gemm_forward,
        gemm_backward=wanted * total.gemm_backward,
        expert_gemm_forward=total.expert_gemm_forward,
        expert_gemm_backward=wanted * total.expert_gemm_backward,
        expert_memory_forward=total.expert_elements_forward * byte,
        expert_memory_backward=total.expert_elements_backward * byte,
        attention_forward=total.attention_forward,
        attention_backward=backward_scale * total.attention_forward,
        memory_forward=total.elements_forward * byte,
        memory_backward=total.elements_backward * byte,
        scores_forward=6.5 * total.score_elements * byte,
        scores_backward=7.0 * total.score_elements * byte,
        cast_forward=2.0 * total.cast_elements * byte * casts,
        cast_backward=2.0 * total.cast_elements * byte * casts,
        gemm_again=again[0],
        attention_again=again[1],
        memory_again=again[2] * byte,
        communication_again=again[3],
        hopper=float(cluster.gpu.fp8 is not None),
        launches=total.launches,
        **_tensor_parallel(work, cluster, tokens),
        **_context_parallel(work, cluster, tokens),
        **_expert_parallel(work, cluster, tokens, layers),
        **_head(work, tokens, rates),
        **_pipeline(work, cluster, tokens),
        **{name: value * (trained if name in _OF_WEIGHTS else 1.0) for name, value in data_parallel.items()},
        nodes=cluster.nodes,
    )


_OF_WEIGHTS = ("grads_fast", "grads_node", "optimizer_bytes", "host_down", "host_up", "host_update", "accumulate")


def _recomputed(work: Workload, layer: _Layer) -> tuple[float, float, float, float]:
    """Seconds of products and of attention, elements, and share of the forward's communication."""
    if work.recompute == "full":
        elements = layer.elements_forward + layer.expert_elements_forward + 6.5 * layer.score_elements
        return layer.gemm_forward + layer.expert_gemm_forward, layer.attention_forward, elements, 1.0
    if work.recompute == "none":
        return 0.0, 0.0, 0.0, 0.0
    modules = set(work.recompute_modules)
    if not modules:
        if not work.fused_attention:  # Megatron's selective: attention's core
            return 0.0, layer.attention_forward, 6.5 * layer.score_elements, 0.0
        return 0.0, 0.0, layer.elements_forward, 0.0
    if "second_linear" in modules:  # torchtitan: every second product, and all that is cheap
        return 0.5 * layer.gemm_forward, 0.0, layer.elements_forward, 0.5
    gemm = layer.mlp_gemm_forward + layer.expert_gemm_forward if modules & {"mlp", "moe"} else 0.0
    elements = layer.activation_elements if modules & {"mlp", "moe", "moe_act"} else 0.0
    elements += layer.elements_forward - layer.activation_elements if "layernorm" in modules else 0.0
    attention = layer.attention_forward if "core_attn" in modules else 0.0
    return gemm, attention, elements, 0.5 if modules & {"mlp", "moe"} else 0.0


def _tensor_parallel(work: Workload, cluster: Cluster, tokens: float) -> dict[str, float]:
    """Two all-reduces a layer and direction, or as many pairs of all-gather and reduce-scatter."""
    group = Group.of(cluster, work.tp, 1)
    moe = sum(count for block, count in block_groups(work.model) if block.is_moe)
    layers = work.model.num_layers + work.model.mtp_layers
    dense = 1.0 - 0.5 * moe / layers if work.etp == 1 else 1.0  # experts then need no gather
    wire = ramped(2 * group.share * 2.0 * tokens * work.model.hidden_size)
    times = 2.0 * dense
    return {
        "tp_fast": times * wire * group.fast_wire,
        "tp_node": times * wire * group.node_wire,
        "tp_calls": times * (work.tp > 1),
        "tp_async": float(work.async_tp),
        "tp_crowd": times * work.tp * float(work.tp > 1 and work.pp > 1 and not _stages_in_one_domain(work, cluster)),
        "tp_wide": times * (work.tp / group.inside - 1) if work.tp > 1 else 0.0,
        "tp_far": max(0.0, work.tp / group.inside - 2),
    }


def _context_parallel(work: Workload, cluster: Cluster, tokens: float) -> dict[str, float]:
    """Ring: keys and values of the others, once forward and twice backward; averaged here."""
    if work.cp == 1:
        return {"cp_fast": 0.0, "cp_node": 0.0}
    group = Group.of(cluster, work.cp, work.tp)
    block = block_groups(work.model)[0][0].attention
    width: float = block.num_kv_heads * (block.qk_head_dim + block.v_head_dim)
    if work.cp_method == "ulysses":
        width = (2 * block.num_heads + 2 * block.num_kv_heads) * block.qk_head_dim / work.cp
    wire = ramped(2.0 * tokens * (work.cp - 1) * width / work.tp)
    return {"cp_fast": wire * group.fast_wire, "cp_node": wire * group.node_wire}


def _expert_parallel(work: Workload, cluster: Cluster, tokens: float, layers: int) -> dict[str, float]:
    """Dispatch and combine of a forward, as an average over layers."""
    moe = [(block.feed_forward, count) for block, count in block_groups(work.model) if block.is_moe]
    if work.ep == 1 or not moe:
        return {"ep_fast": 0.0, "ep_node": 0.0, "ep_calls": 0.0}
    group = Group.of(cluster, work.ep, work.etp)
    spec, count = moe[0]
    assert isinstance(spec, MoESpec)
    sent = 2 * 2.0 * tokens / work.tp * spec.top_k * spec.hidden_size  # two directions, two bytes
    share = count / layers
    domains = work.ep / group.inside
    remote = sent * (1 - 1 / domains) if group.crosses else 0.0
    local = sent * group.share - remote
    fast = 1e-9 / group.fast_gb_per_s
    return {
        "ep_fast": share * ramped(local) * fast,
        "ep_node": share * ramped(remote) * 1e-9 / group.node_gb_per_s if remote else 0.0,
        "ep_calls": share * 2,
    }


def _head(work: Workload, tokens: float, rates: _Rates) -> dict[str, float]:
    model, vocab = work.model, work.model.vocab_size / work.tp
    forward, backward = linear_seconds(tokens, model.hidden_size, vocab, rates.bf16, rates.hbm, rates.multiprocessors)
    depth = 1 + model.mtp_layers
    # logits written, cast, read for maximum, sum and gradient; 24 bytes each, fused 8
    per_logit = 8.0 if work.chunked_loss else 24.0
    return {
        "head_gemm": depth * (forward + backward),
        "head_memory": depth * per_logit * tokens * vocab * 1e-12 / rates.hbm,
    }


def _stages_in_one_domain(work: Workload, cluster: Cluster) -> bool:
    """Whether no send leaves a domain of fast links; where some do, the slower link decides."""
    return cluster.domain >= cluster.gpus // work.pp * work.pp


def _pipeline(work: Workload, cluster: Cluster, tokens: float) -> dict[str, float]:
    if work.pp == 1:
        return {"pp_fast": 0.0, "pp_node": 0.0, "pp_crosses": 0.0}
    fast = _stages_in_one_domain(work, cluster)
    size = 2.0 * tokens * work.model.hidden_size / (work.tp if work.scattered_sends else 1)
    gpu = cluster.gpu.nvlink_gb_per_s or (cluster.gpu.pcie_gb_per_s or 16.0) * 0.5
    return {
        "pp_fast": ramped(size) * 1e-9 / gpu if fast else 0.0,
        "pp_node": 0.0 if fast else ramped(size) * 1e-9 / cluster.node_gb_per_s,
        "pp_crosses": 0.0 if fast else 1.0,
    }


MOMENT_BYTES = {"adamw": 8.0, "adamw8bit": 2.06, "muon": 4.5}
"""Of the optimizer's state for a parameter; of muon for a usual share of matrices."""


def _host(work: Workload, cluster: Cluster, updated: float) -> dict[str, float]:
    """Traffic and update of ``updated`` parameters whose masters and moments lie in host memory.

    Gradients come down in fp32. Weights go up as the engine sends them: the flat one in compute precision, FSDP's
    shards in fp32, for every gather if it is they that are offloaded. The host reads the gradient twice (norm, update),
    reads and writes masters and moments, and casts what is sent.
    """
    if work.offload == "none":
        return {"host_down": 0.0, "host_up": 0.0, "host_up_each": 0.0, "host_update": 0.0}
    wire = 1e-9 / (cluster.gpu.pcie_gb_per_s or 16.0)
    flat = work.zero <= 1 and work.precision != "fp32"
    each = work.offload == "parameters" and work.zero == 3
    touched = 8.0 + 8.0 + 2 * MOMENT_BYTES[work.optimizer] + (6.0 if flat else 0.0)
    ranks = min(cluster.gpus, cluster.gpus_per_node)
    return {
        "host_down": 4.0 * updated * wire,
        "host_up": 0.0 if each else (2.0 if flat else 4.0) * updated * wire,
        "host_up_each": 4.0 * updated * wire if each else 0.0,
        "host_update": touched * updated * ranks * 1e-9 / cluster.host_gb_per_s,
    }


def _data_parallel(work: Workload, cluster: Cluster, layers_by_rank: Sequence[float]) -> dict[str, float]:
    """Gradients and parameters of the fullest rank; experts over the ranks that hold the same ones."""
    dp = work.dp(cluster.gpus)
    dense, experts = layer_parameters(work.model)
    embedding, head = edge_parameters(work.model)
    both: float = embedding + (0.0 if work.model.tie_embeddings else head)
    fullest = max(layers_by_rank)
    if work.is_v_shaped:  # the first rank has both, and fewer layers for it
        edges = max(both - (fullest - layers_by_rank[0]) * (dense + experts), 0.0)
    else:
        edges = both if work.pp == 1 else max(embedding, head)
    dense_here = (fullest * dense + edges) / work.tp
    experts_here = fullest * experts / (work.ep * work.etp)
    shards = dp * work.cp // work.dp_replicate
    expert_shards = max(1, cluster.gpus // work.pp // (work.ep * work.etp))
    group = Group.of(cluster, shards, work.tp)
    expert_group = Group.of(cluster, expert_shards, work.ep * work.etp)
    gradient = 2.0 if work.reduce_bf16 else 4.0
    sharded = work.zero == 3
    wires = {"fast": 0.0, "node": 0.0}
    params = {"fast": 0.0, "node": 0.0}
    count: float
    for count, over in ((dense_here, group), (experts_here, expert_group)):
        if over.size == 1 or not count:
            continue
        wires["fast"] += ramped(gradient * count * over.share) * over.fast_wire
        wires["node"] += ramped(gradient * count * over.share) * over.node_wire
        if work.zero:
            params["fast"] += ramped(2.0 * count * over.share) * over.fast_wire
            params["node"] += ramped(2.0 * count * over.share) * over.node_wire
    if work.dp_replicate > 1:
        across = Group.of(cluster, work.dp_replicate, work.tp * shards)
        count = (dense_here + experts_here) / (shards if work.zero else 1)
        wires["fast"] += 2 * ramped(gradient * count * across.share) * across.fast_wire
        wires["node"] += 2 * ramped(gradient * count * across.share) * across.node_wire
    updated = dense_here / (shards if work.zero else 1) + experts_here / (expert_shards if work.zero else 1)
    hbm = 1e-12 / cluster.gpu.memory_tb_per_s
    return {
        "dp_size": dp,
        "grads_fast": wires["fast"],
        "grads_node": wires["node"],
        "params_fast": params["fast"],
        "params_node": params["node"],
        "dp_tensors": float(work.zero in (1, 2)) * 7 * fullest * math.log2(max(1, shards)),
        "sharded": float(sharded),
        "zero": float(work.zero > 0),
        "optimizer_bytes": 30.0 * updated * hbm * (work.offload == "none"),
        **_host(work, cluster, updated),
        "accumulate": (dense_here + experts_here) * 10.0 * hbm,
    }
