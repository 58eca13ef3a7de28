"""How long does a step take, and what does it hold? `predict` for any layout, on any cluster, by any framework.

Torch-free, about a millisecond a layout. The seam for everything that ranks, sizes or explains layouts:

    predict(workload_or_config, cluster, profile=PACELINE) -> StepEstimate
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.config.run import RunConfig
from paceline.costs.layers import count_parameters, training_flops_per_token
from paceline.costs.profiles import PACELINE, Profile
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
    "overhead",
)
"""Where a step goes, in seconds; they sum to the step. Communication is what is exposed."""


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
    """CUDA context, libraries, communicators' buffers, fragmentation."""

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


def predict(work: RunConfig | Workload, cluster: Cluster, profile: Profile = PACELINE) -> StepEstimate:
    """The step of one layout.

    Raises:
        ConfigError: the layout cannot be run on so many GPUs (`Workload.why_not`).
    """
    work = Workload.of(work) if isinstance(work, RunConfig) else work
    reason = work.why_not(cluster.gpus)
    if reason:
        raise ConfigError(reason, next_step="Change the degrees or the batch; `paceline plan` lists those that fit.")
    peak = cluster.gpu.peak_tflops("bf16") or 100.0
    flops = training_flops_per_token(work.model, work.seq_len) * work.tokens / cluster.gpus
    gemm = flops / (0.5e12 * peak)
    micro_batches = work.micro_batches(cluster.gpus)
    bubble = gemm * (work.pp - 1) / (work.stages_per_rank * micro_batches)
    parts = dict.fromkeys(PARTS, 0.0) | {"gemm": gemm, "bubble": bubble}
    seconds = sum(parts.values())
    tflops = flops / seconds / 1e12
    parameters = count_parameters(work.model).total / (work.tp * work.pp)
    memory = StageMemory(
        weights=2 * parameters,
        gradients=4 * parameters,
        optimizer=12 * parameters / (work.dp(cluster.gpus) if work.zero else 1),
        gathered=0.0,
        activations=34.0 * work.micro_batch_size * work.seq_len * work.model.hidden_size * work.model.num_layers,
        logits=12.0 * work.micro_batch_size * work.seq_len * work.model.vocab_size / work.tp,
        framework=2.0 * 2**30,
    )
    return StepEstimate(
        seconds=seconds,
        parts=parts,
        tokens_per_second_per_gpu=work.tokens / cluster.gpus / seconds,
        tflops_per_gpu=tflops,
        mfu=tflops / peak,
        convention="causal attention, recomputation not counted, bf16 peak",
        stages=(memory,) * work.pp,
        fits=memory.total <= cluster.gpu.memory_bytes,
        micro_batches=micro_batches,
    )
