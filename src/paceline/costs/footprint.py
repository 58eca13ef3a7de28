"""How many bytes does a rank hold, in any framework? Bytes by kind at each position of a pipeline.

`costs/memory.py` counts Paceline's states by shape and its saved tensors by name, exactly; this counts by the
profile's few numbers, for frameworks whose tensors nobody here can list, and fast enough for a search. Both agree for
Paceline (tests/costs/test_footprint.py).

Everything is linear in the profile's numbers (`LINEAR`), so that they can be fitted by least squares.
Sources: states ZeRO, arXiv:1910.02054; activations arXiv:2205.05198; pipelines hold min(m, p - i) micro-batches on
stage i, interleaved ones (1 + (p - 1) / (p v)) p / v times a stage's (arXiv:2104.04473).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from paceline.config.model import ModelConfig, MoESpec
from paceline.costs.averages import block_groups, edge_parameters, layer_parameters
from paceline.costs.profiles import Profile
from paceline.costs.traffic import MOMENT_BYTES, stages_in_one_domain
from paceline.costs.workload import Cluster, Workload

LINEAR = (
    "states",
    "kept_hidden",
    "kept_beside",
    "kept_gathered",
    "kept_heads",
    "kept_ffn",
    "kept_scores",
    "logit_bytes",
    "logit_bytes_before",
    "framework_gib",
)
"""Fields of a `Profile` that memory is linear in."""


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes of a rank at one position of the pipeline, by kind."""

    weights: float
    gradients: float
    optimizer: float
    """Masters and moments."""
    gathered: float
    """Parameters and gradients that are whole for a while (ZeRO-3, FSDP)."""
    activations: float
    logits: float
    framework: float
    """Libraries, communicators' buffers, fragmentation: what the arithmetic does not say."""

    @property
    def states(self) -> float:
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> float:
        return self.states + self.gathered + self.activations + self.logits + self.framework

    @property
    def moments(self) -> Mapping[str, float]:
        """Bytes at start-up, forward peak, backward peak and the optimizer's step."""
        return {
            "start_up": self.states + self.framework,
            "forward_peak": self.states + self.gathered + self.activations + self.logits / 2 + self.framework,
            "backward_peak": self.total,
            "optimizer_step": self.states + self.framework,
        }


@lru_cache(maxsize=256)
def _widths(model: ModelConfig) -> tuple[float, float, float, float, float, bool]:
    """Of an average layer: heads' width, width of the MLP and of shared experts, of experts times top-k, rows' width,
    heads, gated."""
    heads = ffn = experts = rows = number = 0.0
    gated = True
    for block, count in block_groups(model):
        spec = block.attention
        heads += count * (
            spec.num_heads * (spec.qk_head_dim + spec.v_head_dim)
            + spec.num_kv_heads * (spec.qk_head_dim + spec.v_head_dim)
        )
        number += count * spec.num_heads
        feed_forward = block.feed_forward
        if isinstance(feed_forward, MoESpec):
            experts += count * feed_forward.top_k * feed_forward.expert.ffn_size
            rows += count * 2 * feed_forward.top_k * feed_forward.hidden_size
            if feed_forward.shared is not None:
                ffn += count * feed_forward.shared.ffn_size
            gated = feed_forward.expert.gated
        else:
            ffn += count * feed_forward.ffn_size
            gated = feed_forward.gated
    layers = model.num_layers + model.mtp_layers
    return heads / layers, ffn / layers, experts / layers, rows / layers, number / layers, gated


@dataclass(frozen=True, kw_only=True)
class _Parameters:
    """On one pipeline rank."""

    here: float
    """All, of this rank of tp and ep."""
    shard: float
    """Of which this rank keeps the optimizer's state."""
    largest_layer: float
    head: float
    edges: float
    """Of `here`, what is in no layer: embedding and head."""


class _Sizes(NamedTuple):
    """Of a model: looked up once for all its ranks."""

    layer: tuple[float, float]
    edges: tuple[float, float]
    widths: tuple[float, float, float, float, float, bool]

    @classmethod
    def of(cls, model: ModelConfig) -> _Sizes:
        return cls(layer_parameters(model), edge_parameters(model), _widths(model))


def _parameters(
    work: Workload, cluster: Cluster, layers: float, sizes: _Sizes, *, first: bool, last: bool
) -> _Parameters:
    (dense, experts), (embedding, head) = sizes.layer, sizes.edges
    tied = work.model.ties_head
    edges = embedding * first + head * (last and not (first and tied))
    edges += embedding * (last and not first and work.model.mtp_layers > 0)
    dense_here = (layers * dense + edges) / work.tp
    experts_here = layers * experts / (work.ep * work.etp)
    shards = max(1, work.dp(cluster.gpus) * work.cp // work.dp_replicate) if work.zero else 1
    expert_shards = max(1, cluster.gpus // work.pp // (work.ep * work.etp)) if work.zero else 1
    return _Parameters(
        here=dense_here + experts_here,
        shard=dense_here / shards + experts_here / expert_shards,
        largest_layer=dense / work.tp + experts / (work.ep * work.etp),
        head=head * last / work.tp,
        edges=edges / work.tp,
    )


def micro_batches_held(work: Workload, micro_batches: int, rank: int) -> float:
    """Whose activations of all its layers a pipeline rank holds at the peak; part of one where it is interleaved."""
    p, v = work.pp, work.stages_per_rank
    if p == 1:
        return 1.0
    if work.schedule_name == "zero_bubble":
        return float(min(micro_batches, p))
    if v > 1:
        return min(micro_batches * v, (v - 1) * p + 2 * (p - rank) - 1) / v
    return float(min(micro_batches, p - rank))


def _layers_in_flight(work: Workload, layers_by_rank: Sequence[float], micro_batches: int, rank: int) -> float:
    """Layers times the micro-batches whose activations a pipeline rank holds of them at the peak."""
    layers = layers_by_rank[rank]
    if not work.is_v_shaped:
        return layers * micro_batches_held(work, micro_batches, rank)
    # the first rank's second stage has the head, and fewer layers for it
    down = layers / 2 if rank else min(layers, max(layers_by_rank[1:]) / 2)
    on_way_down = min(micro_batches, 2 * work.pp - rank)
    on_way_up = min(micro_batches, 2 * work.pp - on_way_down)
    return down * on_way_down + (layers - down) * on_way_up


def linear_bytes(
    work: Workload, cluster: Cluster, layers_by_rank: Sequence[float], rank: int, profile: Profile
) -> dict[str, float]:
    """By field of `LINEAR`: bytes on a pipeline rank for each unit of that number."""
    return _of_rank(work, cluster, layers_by_rank, rank, profile, _Sizes.of(work.model))[0]


def _of_rank(
    work: Workload, cluster: Cluster, layers_by_rank: Sequence[float], rank: int, profile: Profile, sizes: _Sizes
) -> tuple[dict[str, float], tuple[float, float, float, float]]:
    """`linear_bytes`, and what states are made of (`_states`)."""
    first, last = rank == 0, rank == work.head_rank
    layers = layers_by_rank[rank]
    held = _parameters(work, cluster, layers, sizes, first=first, last=last)
    micro_batches = work.micro_batches(cluster.gpus)
    tokens = work.micro_batch_size * work.seq_len / work.cp
    heads, ffn, experts, rows, number, gated = sizes.widths
    if work.fused_experts:  # two of three tensors, and rows only of other ranks
        experts, rows = experts * 2 / 3, rows / 2 if work.ep * work.etp > 1 else 0.0
    along = work.tp if work.sequence_parallel else 1
    in_flight = _layers_in_flight(work, layers_by_rank, micro_batches, rank)
    width = 4.0 if work.precision == "fp32" else 2.0
    hidden = width * tokens * work.model.hidden_size
    full = in_flight + profile.working_layers if work.recompute != "full" else min(1.0, layers)
    inputs = hidden / along * in_flight if work.recompute == "full" else 0.0  # of layers that are recomputed whole
    modules = set(work.recompute_modules)
    cheap = work.recompute == "selective" and work.fused_attention and modules <= {"second_linear"}
    eager = profile.eager_ffn if gated and not (work.compile or cheap or modules) else 1.0
    experts *= 1.0 if work.fused_experts else eager
    ffn = ffn * eager * (0.1 if "mlp" in modules else 1) + experts * (0.1 if "moe" in modules else 1)
    ffn_bytes = width * tokens * ffn / work.tp * (1 if gated else 2 / 3)
    if "moe_act" in modules or cheap:
        ffn_bytes *= 2 / 3
    scores = 0.0
    if not work.fused_attention and work.recompute != "selective":
        scores = 5.0 * tokens * work.seq_len * number / work.tp * full
    if profile.keeps_eight_bits and work.precision in ("fp8", "mxfp8", "nvfp4"):
        # inputs of linears: a norm's output of its two tensors, one of five widths of heads, the product of three
        hidden, heads, ffn_bytes = 0.75 * hidden, 0.9 * heads, ffn_bytes * 5 / 6
    logits = tokens * work.model.head_rows / work.tp * last
    if work.chunked_loss:
        logits *= min(1.0, work.loss_chunk_tokens / tokens)
    else:
        logits *= profile.plain_logits
    found = {
        "kept_hidden": (hidden / along * full) * (0.75 if cheap else 1.0) + width * tokens * rows / work.tp / 4 * full,
        "kept_beside": hidden / along * full if work.tp > 1 else 0.0,
        "kept_gathered": 0.0 if _releases_gathered(work, cluster, profile) else hidden * (1 - 1 / along) * full,
        "kept_heads": width * tokens * heads / work.tp * full,
        "kept_ffn": ffn_bytes * full,
        "kept_scores": scores,
        "logit_bytes": logits,
        "logit_bytes_before": logits if micro_batches > 1 else 0.0,
        "framework_gib": 2.0**30,
    }
    kept = inputs + sum([getattr(profile, name) * value for name, value in found.items() if name != "framework_gib"])
    states = _states(work, held, profile, micro_batches, kept)
    if work.reference_copy:
        sharded = work.zero == 3 or (work.zero == 2 and profile.shards_parameters)
        of_reference = width * (held.shard if sharded else held.here)
        states = (states[0] + of_reference, *states[1:])
    return found | {"states": sum(states) + inputs}, states


def _releases_gathered(work: Workload, cluster: Cluster, profile: Profile) -> bool:
    far = work.tp > 2 * cluster.domain
    return profile.releases_gathered and (far or (work.pp == 2 and not stages_in_one_domain(work, cluster)))


def _states(
    work: Workload, held: _Parameters, profile: Profile, micro_batches: int, kept: float
) -> tuple[float, float, float, float]:
    """Weights, gradients, optimizer, and what is gathered for a while.

    FSDP's gradients of a single micro-batch take the place of the activations (``kept`` bytes) that are done with: only
    what is more of them counts.
    """
    width = work.width
    moments = MOMENT_BYTES[work.optimizer]
    offloaded = work.offload != "none"
    if work.frozen_weights:
        return _frozen_states(work, held, profile, micro_batches)
    if work.zero == 3 or (work.zero == 2 and profile.shards_parameters):
        unreduced = 4.0 * held.largest_layer
        if profile.accumulates_whole and micro_batches > 1:
            unreduced = (2.0 if work.reduce_bf16 else 4.0) * held.here
        gathered = width * (2 * held.largest_layer + held.head if work.zero == 3 else held.here) + unreduced
        shards = 0.0 if work.offload == "parameters" else 4.0 * held.shard
        turns = profile.shards_parameters and micro_batches == 1
        gradients = max(0.0, shards - kept) if turns else shards
        return shards, gradients, 0.0 if offloaded else moments * held.shard, gathered
    in_bf16 = work.accumulate_bf16 or (profile.sums_as_reduced and work.reduce_bf16)
    gradient = 2.0 if in_bf16 else profile.gradient_bytes
    gradients = gradient * (held.shard if work.zero == 2 else held.here)
    if work.accumulate_bf16 and not work.reads_any_gradient and work.zero < 2 and not offloaded:
        gradients += 4.0 * held.shard
    masters = 4.0 if width < 4 else 0.0
    weights = width * held.here * (2.0 if work.fp8_weight_cache else 1.0)
    if offloaded:
        return weights, gradients, 0.0, 0.0
    return weights, gradients, (masters + moments) * held.shard, 0.0


def _frozen_states(
    work: Workload, held: _Parameters, profile: Profile, micro_batches: int
) -> tuple[float, float, float, float]:
    """As `_states`: all is frozen but adapters, of which each rank has about its part (with tp more: one of an
    adapter's two matrices is whole on every rank)."""
    width, sharded = work.width, work.zero == 3 or (work.zero == 2 and profile.shards_parameters)
    learned = work.adapters / (work.tp * work.pp)
    share = learned * held.shard / held.here
    moments = 0.0 if work.offload != "none" else MOMENT_BYTES[work.optimizer] * share
    if sharded:
        of_layer = learned * held.largest_layer / (held.here - held.edges)
        unreduced = 4.0 * of_layer
        if profile.accumulates_whole and micro_batches > 1:
            unreduced = (2.0 if work.reduce_bf16 else 4.0) * learned
        whole = held.here + learned
        if work.zero == 3:
            whole = 2 * (held.largest_layer + of_layer) + held.head
        if work.offload == "parameters":
            return 0.0, 0.0, moments, width * whole + unreduced
        return width * held.shard + 4.0 * share, 4.0 * share, moments, width * whole + unreduced
    element = work.frozen_bytes or width * (2.0 if work.fp8_weight_cache else 1.0)
    kept = element * (held.here - held.edges) + width * held.edges
    masters = 4.0 * share if width < 4 and work.offload == "none" else 0.0
    return kept + width * learned, profile.gradient_bytes * learned, masters + moments, 0.0


def memory_by_stage(
    work: Workload, cluster: Cluster, layers_by_rank: Sequence[float], profile: Profile
) -> tuple[StageMemory, ...]:
    """At each position of the pipeline."""
    found = []
    sizes, numbers = _Sizes.of(work.model), [(name, float(getattr(profile, name))) for name in LINEAR]
    of_kept = [entry for entry in numbers if entry[0].startswith("kept_")]
    of_logits = [entry for entry in numbers if entry[0].startswith("logit_")]
    for rank in range(work.pp):
        units, states = _of_rank(work, cluster, layers_by_rank, rank, profile, sizes)
        weights, gradients, optimizer, gathered = states
        total = sum([number * units[name] for name, number in numbers])
        activations = sum([number * units[name] for name, number in of_kept])
        logits = sum([number * units[name] for name, number in of_logits])
        activations += units["states"] - sum(states)
        known = weights + gradients + optimizer + gathered + activations + logits
        found.append(
            StageMemory(
                weights=weights,
                gradients=gradients,
                optimizer=optimizer,
                gathered=gathered,
                activations=activations,
                logits=logits,
                framework=total - known,
            )
        )
    return tuple(found)
