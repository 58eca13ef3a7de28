"""What does the reference model of a preference task cost? Bytes of a copy, and forward passes.

A copy has weights in compute precision and nothing else: whole with the flat engine, sharded with FSDP, cut over tp,
pp and ep as the policy is. A step runs it once over every micro-batch, forward alone; a loss over answers also computes
the logits a second time, in its backward pass.
"""

from __future__ import annotations

from paceline.config.lora import LoraConfig
from paceline.config.run import RunConfig
from paceline.costs.activations import compute_bytes
from paceline.costs.grid import RankGrid
from paceline.costs.parameters import rank_shapes
from paceline.costs.placement import is_expert, local_box


def runs_reference(config: RunConfig) -> bool:
    """Whether each step runs a reference model, be it a copy or the model without its adapters."""
    return config.task.reads_reference and not config.task.precompute_reference


def has_copy(config: RunConfig) -> bool:
    """Whether a second model is in memory."""
    itself = config.lora.on and config.task.reference == "initial"
    return runs_reference(config) and not itself


def reference_bytes(config: RunConfig, grid: RankGrid, pipeline_rank: int) -> int:
    """Of the copy, on the most loaded rank at a position of the pipeline."""
    if not has_copy(config):
        return 0
    plain, sizes = config.model_copy(update={"lora": LoraConfig()}), grid.sizes
    dense = experts = 0
    for name, shape in rank_shapes(plain, pipeline_rank).items():
        count = local_box(name, shape, config.model, sizes, {}).numel
        dense, experts = (dense, experts + count) if is_expert(name) else (dense + count, experts)
    if config.parallel.engine == "fsdp":
        dense = -(-dense // (sizes["dp_shard"] * sizes["cp"]))
        experts = -(-experts // sizes["edp"])
    return compute_bytes(config.train) * (dense + experts)


def extra_head_forwards(config: RunConfig) -> int:
    """How often a step computes the logits beyond once: again for the backward pass, and with the reference."""
    if config.model.has_score:
        return 0
    return int(config.task.learns_from_answers) + int(runs_reference(config))
