"""What does a layout send, over which links? Seconds at a link's full rate, counts, and the host's part.

Sources: tensor parallelism arXiv:2205.05198, sharded data parallelism arXiv:1910.02054, pipelines arXiv:2104.04473.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from paceline.config.model import MoESpec
from paceline.costs.averages import block_groups, edge_parameters, layer_parameters
from paceline.costs.comm import Group, ramped
from paceline.costs.workload import Cluster, Workload


def tensor_parallel(work: Workload, cluster: Cluster, tokens: float) -> dict[str, float]:
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
        "tp_crowd": times * work.tp * float(work.tp > 1 and work.pp > 1 and not stages_in_one_domain(work, cluster)),
        "tp_wide": times * (work.tp / group.inside - 1) if work.tp > 1 else 0.0,
        "tp_far": max(0.0, work.tp / group.inside - 2),
    }


def context_parallel(work: Workload, cluster: Cluster, tokens: float) -> dict[str, float]:
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


def expert_parallel(work: Workload, cluster: Cluster, tokens: float, layers: int) -> dict[str, float]:
    """Dispatch and combine of a forward, as an average over layers."""
    moe = [(block.feed_forward, count) for block, count in block_groups(work.model) if block.is_moe]
    if work.ep == 1 or not moe:
        return {"ep_fast": 0.0, "ep_node": 0.0, "ep_calls": 0.0, "ep_hidden": 0.0}
    group = Group.of(cluster, work.ep, work.etp)
    spec = moe[0][0]
    assert isinstance(spec, MoESpec)
    sent = 2 * 2.0 * tokens / work.tp * spec.top_k * spec.hidden_size  # two directions, two bytes
    share = sum(count for _, count in moe) / layers  # all alike; a window parts their layers into groups
    domains = work.ep / group.inside
    remote = sent * (1 - 1 / domains) if group.crosses else 0.0
    if work.dispatcher_permutes and group.crosses:
        remote *= domains_reached(spec, domains) / spec.top_k  # once to each domain, and copied there
    local = sent * group.share - remote
    fast = 1e-9 / group.fast_gb_per_s
    return {
        "ep_fast": share * ramped(local) * fast,
        "ep_node": share * ramped(remote) * 1e-9 / group.node_gb_per_s if remote else 0.0,
        "ep_calls": share * 2,
        "ep_hidden": float(work.overlaps_experts),
    }


def domains_reached(spec: MoESpec, domains: float) -> float:
    """How many of so many domains of fast links hold one of a token's experts or more, in the mean, where routing is
    even: over all experts, or over `top_k_groups` of `num_groups` (node-limited routing)."""
    groups, chosen = spec.routing.num_groups, spec.routing.top_k_groups
    if groups < domains:  # a group of experts lies on several domains
        return domains * chosen / groups * (1 - (1 - groups / (chosen * domains)) ** spec.top_k)
    here = round(groups / domains)
    hit = sum(
        math.comb(here, some) * math.comb(groups - here, chosen - some) * (1 - (1 - some / chosen) ** spec.top_k)
        for some in range(1, min(here, chosen) + 1)
    )
    return domains * hit / math.comb(groups, chosen)


def stages_in_one_domain(work: Workload, cluster: Cluster) -> bool:
    """Whether no send leaves a domain of fast links; where some do, the slower link decides."""
    return cluster.domain >= cluster.gpus // work.pp * work.pp


def pipeline_sends(work: Workload, cluster: Cluster, tokens: float) -> dict[str, float]:
    if work.pp == 1:
        return {"pp_fast": 0.0, "pp_node": 0.0, "pp_crosses": 0.0}
    fast = stages_in_one_domain(work, cluster)
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


BUCKET_BYTES = 25e6
"""Of gradients that are reduced together (the default of torch's DistributedDataParallel)."""


def data_parallel(work: Workload, cluster: Cluster, layers_by_rank: Sequence[float]) -> dict[str, float]:
    """Gradients and parameters of the fullest rank; experts over the ranks that hold the same ones."""
    dp = work.dp(cluster.gpus)
    dense, experts = layer_parameters(work.model)
    embedding, head = edge_parameters(work.model)
    both: float = embedding + (0.0 if work.model.ties_head else head)
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
    steps = 0.0
    for count, over in ((dense_here, group), (experts_here, expert_group)):
        if over.size == 1 or not count:
            continue
        wires["fast"] += ramped(gradient * count * over.share) * over.fast_wire
        wires["node"] += ramped(gradient * count * over.share) * over.node_wire
        steps += gradient * count / BUCKET_BYTES * over.size
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
        "grads_steps": steps,
        "params_fast": params["fast"],
        "params_node": params["node"],
        "copies_each": 24.0 * (dense_here + experts_here) * hbm if sharded else 0.0,
        "copies_once": (14.0 if sharded else 26.0) * (dense_here + experts_here) * hbm if work.zero >= 2 else 0.0,
        "dp_tensors": float(work.zero in (1, 2)) * 7 * fullest * math.log2(max(1, shards)),
        "sharded": float(sharded),
        "zero": float(work.zero > 0),
        "optimizer_bytes": _update_bytes(work) * updated * hbm * (work.offload == "none"),
        "optimizer_fused": float(work.reads_any_gradient),
        **_host(work, cluster, updated),
        "accumulate": (dense_here + experts_here * (not work.fused_experts)) * _accumulate_bytes(work) * hbm,
        # read and written by the product itself, beside what it computes
        "expert_accumulate": experts_here * work.fused_experts * (_accumulate_bytes(work) + 2.0) * hbm,
    }


def _update_bytes(work: Workload) -> float:
    """Read and written for a parameter by an update: masters, moments, weights, and gradients twice (norm, update)."""
    if not work.reads_any_gradient:
        return 30.0
    return 26.0 + 2 * (2.0 if work.accumulate_bf16 else 4.0)


def _accumulate_bytes(work: Workload) -> float:
    """For a parameter and micro-batch, to add its gradient to the sum. Where the product does it, it reads the sum and
    writes that in place of a gradient."""
    of_sum = 2.0 if work.accumulate_bf16 else 4.0
    return 2 * of_sum - 2.0 if work.fused_weight_gradients else 2 * of_sum + 2.0
