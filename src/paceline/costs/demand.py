"""What does a layout ask of the machines? Seconds at best rates, bytes and counts, before any framework has its say.

`demand_of(work, cluster, cut)` describes an average layer, the head and a pipeline rank; `costs/step.py` divides by a
profile's efficiencies and lays the pieces on a timeline. Everything is a number, so that `stacked` can put thousands of
layouts into arrays and a fit evaluates them all at once.

What a layer computes and moves is counted in `costs/operators.py`, what is sent in `costs/traffic.py`. Attention's
backward takes 2.5 times its forward, since the scores are computed again (arXiv:2307.08691).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from paceline.costs.averages import block_groups
from paceline.costs.operators import Layer, Rates, layer_of, rates_of, recomputed
from paceline.costs.roofline import linear_seconds
from paceline.costs.traffic import context_parallel, data_parallel, expert_parallel, pipeline_sends, tensor_parallel
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
    splits: Number
    """1: the backward pass is split (`zero_bubble`), 2: and stages go down the ranks and back (`zbv`)."""
    layers: Number
    """Of the model, multi-token prediction among them."""
    layers_inside: Number
    """On the fullest pipeline rank without the head; 0 without a pipeline."""
    layers_last: Number
    """On the rank with the head."""

    forwards: Number
    """Forward passes of a micro-batch: 2 with a reference model's."""
    gemm_forward: Number
    """Of a layer and micro-batch, seconds at best; as all that follows."""
    gemm_backward: Number
    expert_gemm_forward: Number
    """Grouped products of experts, not in `gemm_forward`."""
    expert_gemm_backward: Number
    expert_weights_backward: Number
    """Of those, gradients of weights by a kernel of their own, not in `expert_gemm_backward`."""
    expert_memory_forward: Number
    """Permutations and activations of routed rows, not in `memory_forward`."""
    expert_memory_backward: Number
    expert_biases: Number
    """One pass over the rows that experts add biases to."""
    expert_calls: Number
    """Products forward, one for each expert of the rank and each of its matrices."""
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
    ultra: Number
    """1: Blackwell Ultra."""
    eager: Number
    """1: not compiled."""
    eager_experts: Number
    """1: nor have its experts kernels of their own."""
    fused_experts: Number
    """1: they have."""
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
    ep_hidden: Number
    """1: sent while another micro-batch is computed."""

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
    grads_steps: Number
    """Steps of rings: buckets of gradients times ranks."""
    params_fast: Number
    """Gathering of its parameters."""
    params_node: Number
    copies_each: Number
    """Of FSDP, for a micro-batch, seconds at HBM's rate: shards cast, copied together, gathered and copied apart, once
    forward and once backward; ..."""
    copies_once: Number
    """... and for a step: gradients copied together and apart; with zero 2 also its one gather."""
    dp_tensors: Number
    """Matrices whose parameters are gathered after an update, times the steps of a tree over the ranks."""
    sharded: Number
    """1: parameters are sharded (zero 3)."""
    zero: Number
    """1: optimizer states are sharded."""
    optimizer_bytes: Number
    """Seconds at HBM's rate of one update on the fullest rank."""
    optimizer_fused: Number
    """1: in one kernel that reads gradients as they are."""
    host_down: Number
    """Offloaded: gradients to host memory, once a step, seconds at PCIe's rate; ..."""
    host_up: Number
    """... weights from there, once a step; ..."""
    host_up_each: Number
    """... or sharded ones for every pass of every micro-batch; ..."""
    host_update: Number
    """... and the update by the host's processors, seconds at the rate of `Cluster.host_gb_per_s`."""
    accumulate: Number
    """Seconds at HBM's rate of adding a micro-batch's gradients to the sum, ..."""
    expert_accumulate: Number
    """... and those of experts, where a kernel of their own does it."""


def stacked(demands: Sequence[Demand]) -> Demand:
    """Arrays over many layouts."""
    import numpy as np

    return Demand(**{field.name: np.array([getattr(d, field.name) for d in demands]) for field in fields(Demand)})


def demand_of(work: Workload, cluster: Cluster, layers_by_rank: Sequence[float]) -> Demand:
    """Of one layout.

    Args:
        layers_by_rank: layers on each pipeline rank, multi-token prediction among them.
    """
    rates = rates_of(work, cluster)
    tokens = work.micro_batch_size * work.seq_len / work.cp
    layers = work.model.num_layers + work.model.mtp_layers
    total = Layer(launches=0.0)
    for block, count in block_groups(work.model):
        found = layer_of(work, block, tokens, rates)
        for field in fields(Layer):
            setattr(total, field.name, getattr(total, field.name) + getattr(found, field.name) * count / layers)
    byte = 2e-12 / rates.hbm
    replicas = data_parallel(work, cluster, layers_by_rank)
    again = recomputed(work, total)
    backward_scale = 2.5 if work.fused_attention else 2.0
    wanted = 0.5 if work.frozen_weights else 1.0  # of the backward's products
    trained = 0.01 if work.frozen_weights else 1.0
    # blocks of 32 or 16 elements are scaled along both dimensions: two casts where a tensor's scale needs one
    casts = {"fp8": 1.0, "mxfp8": 2.0, "nvfp4": 2.0}.get(work.precision, 0.0)
    casts *= 3.0 if work.fp8_rowwise else 1.0
    # 4 bits read and 16 written; torchao's own passes between are not counted
    widened = 1.25 * total.weight_elements * byte if work.widens_weights else 0.0
    cast_once = _cast_share(work) * total.cast_elements + (total.weight_elements if work.casts_weights else 0.0)
    return Demand(
        micro_batches=work.micro_batches(cluster.gpus),
        pipeline=work.pp,
        interleaved=work.stages_per_rank,
        splits={"zero_bubble": 1.0, "zbv": 2.0}.get(work.schedule_name, 0.0) if work.pp > 1 else 0.0,
        layers=layers,
        layers_inside=max((*layers_by_rank[: work.head_rank], *layers_by_rank[work.head_rank + 1 :]), default=0.0),
        layers_last=layers_by_rank[work.head_rank],
        forwards=2.0 if work.reference_forward else 1.0,
        gemm_forward=total.gemm_forward + total.adapters_forward,
        gemm_backward=wanted * total.gemm_backward + total.adapters_backward,
        expert_gemm_forward=total.expert_gemm_forward,
        expert_gemm_backward=(1.0 if work.fused_experts else wanted) * total.expert_gemm_backward,
        expert_weights_backward=0.0 if work.frozen_weights else total.expert_weights_backward,
        expert_memory_forward=total.expert_elements_forward * byte,
        expert_memory_backward=total.expert_elements_backward * byte,
        expert_biases=total.expert_bias_elements * byte,
        expert_calls=total.expert_calls,
        attention_forward=total.attention_forward,
        attention_backward=backward_scale * total.attention_forward,
        memory_forward=total.elements_forward * byte + widened,
        memory_backward=total.elements_backward * byte + widened,
        scores_forward=6.5 * total.score_elements * byte,
        scores_backward=7.0 * total.score_elements * byte,
        cast_forward=2.0 * cast_once * byte * casts,
        cast_backward=2.0 * cast_once * byte * casts,
        gemm_again=again[0],
        attention_again=again[1],
        memory_again=again[2] * byte + (widened if work.recompute == "full" else 0.0),
        communication_again=again[3],
        hopper=float(cluster.gpu.fp8 is not None),
        ultra=float(cluster.gpu.is_ultra),
        eager=float(not work.compile),
        eager_experts=float(not work.compile and not work.fused_experts),
        fused_experts=float(work.fused_experts),
        launches=total.launches,
        **tensor_parallel(work, cluster, tokens),
        **context_parallel(work, cluster, tokens),
        **expert_parallel(work, cluster, tokens, layers),
        **_head(work, tokens, rates),
        **pipeline_sends(work, cluster, tokens),
        **{name: value * (trained if name in _OF_WEIGHTS else 1.0) for name, value in replicas.items()},
    )


_OF_WEIGHTS = (
    "grads_fast",
    "grads_node",
    "grads_steps",
    "optimizer_bytes",
    "host_down",
    "host_up",
    "host_update",
    "accumulate",
    "expert_accumulate",
)


def _cast_share(work: Workload) -> float:
    """Of what a cast of an input or a gradient moves, 6 bytes an element: read for its largest number, read, written,
    and written transposed for the gradient of a weight."""
    return (6.0 - 2.0 * work.fp8_delayed - 1.0 * work.frozen_weights) / 6.0


def _head_rows(work: Workload) -> float:
    """Numbers of each token's head on a rank."""
    return work.model.head_rows / (1 if work.model.has_score else work.tp)


def _head(work: Workload, tokens: float, rates: Rates) -> dict[str, float]:
    model, vocab = work.model, _head_rows(work)
    rate = rates.linear if work.fp8_head else rates.bf16
    forward, backward = linear_seconds(
        tokens, model.hidden_size, vocab, rate, rates.hbm, rates.multiprocessors, fixed_inner=rates.fixed_inner
    )
    if work.frozen_weights:
        backward *= 0.5  # no gradient of its weight
    depth = 1 + model.mtp_layers
    more = work.extra_head_forwards
    # logits written, cast, read for maximum, sum and gradient; 24 bytes each, fused 8
    per_logit = 8.0 if work.chunked_loss else 24.0
    # to 8 bits: hidden states and gradients of logits, as of any linear, read and written forward and backward
    casts = 4 * 2.0 * (model.hidden_size + vocab) * _cast_share(work) if work.fp8_head else 0.0
    return {
        "head_gemm": depth * (forward + backward) + more * forward,
        # the maximum and the sum are a third of the passes
        "head_memory": ((depth + more / 3) * per_logit * vocab + depth * casts) * tokens * 1e-12 / rates.hbm,
    }
