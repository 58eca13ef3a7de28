"""What does an average layer hold, and what the two ends of the model? Parameters, and layers of a kind."""

from __future__ import annotations

from functools import lru_cache
from itertools import groupby

from paceline.config.model import BlockSpec, ModelConfig, MoESpec
from paceline.costs.layers import block_parameters, count_parameters


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
    return float(counts.embedding), float(counts.head or model.head_rows * model.hidden_size)


def _expert_parameters(block: BlockSpec) -> float:
    if not isinstance(block.feed_forward, MoESpec):
        return 0.0
    spec = block.feed_forward
    matrices = 3 if spec.expert.gated else 2
    return float(spec.num_experts * matrices * spec.expert.hidden_size * spec.expert.ffn_size)
