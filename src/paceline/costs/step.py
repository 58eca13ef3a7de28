"""How long does a step take, and what does it hold? `predict` for any layout, on any cluster, by any framework.

Torch-free, about a millisecond a layout. The seam for everything that ranks, sizes or explains layouts:

    predict(workload_or_config, cluster, profile=PACELINE) -> StepEstimate
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from paceline.config.model import ModelConfig
from paceline.config.run import RunConfig
from paceline.costs.adapters import adapted_flops_per_token
from paceline.costs.averages import layer_parameters
from paceline.costs.cuts import layers_by_rank, sum_by_rank
from paceline.costs.demand import demand_of
from paceline.costs.footprint import StageMemory, memory_by_stage
from paceline.costs.layers import training_flops_per_token
from paceline.costs.profiles import PACELINE, Profile
from paceline.costs.spend import spend
from paceline.costs.stages import block_flops
from paceline.costs.workload import Cluster, Workload
from paceline.errors import ConfigError

PARTS = (
    "gemm",
    "attention",
    "memory_bound",
    "launch",
    "recompute",
    "tp_communication",
    "cp_communication",
    "ep_communication",
    "pp_communication",
    "dp_communication",
    "bubble",
    "optimizer",
    "offload",
    "overhead",
)
"""Where a step goes, in seconds; they sum to the step. Communication is what is exposed."""


@dataclass(frozen=True, kw_only=True)
class StepEstimate:
    """One predicted step."""

    seconds: float
    parts: Mapping[str, float]
    """By name of `PARTS`: seconds, which sum to `seconds`."""
    tokens_per_second_per_gpu: float
    tflops_per_gpu: float
    """Model FLOPs, causal attention (`costs/layers.py`)."""
    mfu: float | None
    """`tflops_per_gpu` over the device's bf16 peak, or its fp8 peak where products run in fp8; None without a peak."""
    convention: str
    """What `mfu` counts, and against which peak."""
    stages: tuple[StageMemory, ...]
    """Memory by position in the pipeline."""
    fits: bool
    tight: bool
    """It fits, but above `SAFE_SHARE` of the card."""
    micro_batches: int

    @property
    def memory_bytes(self) -> float:
        """Of the most loaded rank."""
        return max(stage.total for stage in self.stages)

    @property
    def memory_gib(self) -> float:
        return self.memory_bytes / 2**30

    @property
    def bubble(self) -> float:
        """Share of the step, 0 ... 1."""
        return self.parts["bubble"] / self.seconds

    @property
    def exposed_communication(self) -> float:
        """Share of the step, 0 ... 1."""
        return sum(value for name, value in self.parts.items() if name.endswith("_communication")) / self.seconds


def rank_layers(work: Workload, profile: Profile) -> tuple[float, ...]:
    """Layers on each pipeline rank, multi-token prediction among them, as the profile's framework cuts them."""
    layers = work.model.num_layers + work.model.mtp_layers
    if work.pipeline_layout:
        return sum_by_rank(work.pipeline_layout, work.pp, v_shaped=work.is_v_shaped)
    head = head_layers(work.model)
    if profile.cut == "cost":
        head = head_blocks(work.model, work.seq_len) * (0.75 if work.recompute == "full" else 1.0)
    return layers_by_rank(layers, work.pp, profile.cut, head, work.stages_per_rank, v_shaped=work.is_v_shaped)


@lru_cache(maxsize=256)
def head_blocks(model: ModelConfig, seq_len: int) -> float:
    """How many blocks' forward the head costs as much as, attention counted: what `costs/stages.py` cuts by."""
    blocks = (*model.blocks(), *model.mtp_blocks())
    block = sum(block_flops(one, seq_len) for one in blocks) / len(blocks)
    return 2.0 * model.hidden_size * model.head_rows / block


@lru_cache(maxsize=256)
def head_layers(model: ModelConfig) -> float:
    """How many layers the head costs as much as."""
    dense, experts = layer_parameters(model)
    active = dense + experts * (model.top_k / model.num_experts if model.num_experts else 0.0)
    return model.hidden_size * model.head_rows / active


def predict(work: RunConfig | Workload, cluster: Cluster, profile: Profile = PACELINE) -> StepEstimate:
    """The step of one layout.

    Raises:
        ConfigError: the layout cannot be run on so many GPUs (`Workload.why_not`).
    """
    work = Workload.of(work) if isinstance(work, RunConfig) else work
    reason = work.why_not(cluster.gpus)
    if reason:
        raise ConfigError(reason, next_step="Change the degrees or the batch; `paceline plan` lists those that fit.")
    layers = rank_layers(work, profile)
    parts = {name: float(value) for name, value in spend(demand_of(work, cluster, layers), profile).items()}
    seconds = sum(parts.values())
    flops = _flops_per_token(work.model, work.seen_tokens, work.adapters) * work.tokens / cluster.gpus
    tflops = flops / seconds / 1e12
    in_fp8 = work.precision in ("fp8", "mxfp8", "nvfp4")
    peak = cluster.gpu.peak_tflops("fp8" if in_fp8 else "bf16") or cluster.gpu.peak_tflops("fp16")
    stages = memory_by_stage(work, cluster, layers, profile)
    most = max(stage.total for stage in stages)
    return StepEstimate(
        seconds=seconds,
        parts=parts,
        tokens_per_second_per_gpu=work.tokens / cluster.gpus / seconds,
        tflops_per_gpu=tflops,
        mfu=None if peak is None else tflops / peak,
        convention=f"causal attention, recomputation not counted, {'fp8' if in_fp8 else 'bf16'} peak",
        stages=stages,
        fits=fits(most, cluster, profile),
        tight=fits(most, cluster, profile) and most > SAFE_SHARE * cluster.gpu.memory_bytes,
        micro_batches=work.micro_batches(cluster.gpus),
    )


def fits(memory_bytes: float, cluster: Cluster, profile: Profile) -> bool:
    """Whether a rank's bytes, with what torch's allocator does not count, leave `MARGIN` of the card."""
    return memory_bytes <= room_of(cluster, profile)


def room_of(cluster: Cluster, profile: Profile) -> float:
    """Bytes of a card that an estimate may fill."""
    return (1 - MARGIN) * (cluster.gpu.memory_bytes - profile.context_gib * 2**30)


SAFE_SHARE = 0.8
"""Of what the driver leaves: estimates up to it have not been seen to run out (`costs/memory.py`); the dry run calls
what is above tight."""
MARGIN = 0.03
"""Of a card's memory that an estimate must leave: fragmentation differs from run to run by about as much."""


@lru_cache(maxsize=1024)
def _flops_per_token(model: ModelConfig, seq_len: float, adapters: int) -> float:
    if adapters:
        return adapted_flops_per_token(model, seq_len, adapters)
    return training_flops_per_token(model, seq_len)
