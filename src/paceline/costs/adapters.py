"""What do adapters cost, and what does freezing the rest save?

| of a frozen matrix | of its adapter, r its rank |
| --- | --- |
| forward 2 D C FLOPs a token, gradient of the input the same, none of the weight | 6 r (C + D) |
| weight in the precision that the model computes in, fp8 or NF4 | weight, gradient, master and moments as of all |
| its input is kept for the adapter's first matrix | r numbers a token; with DoRA the output too |

Parameter names and shapes are those that `models/lora.py` makes (tests/costs/test_adapters.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache

from paceline.config.lora import LoraConfig, is_adapter
from paceline.config.model import BlockSpec, ModelConfig
from paceline.config.run import RunConfig
from paceline.costs.layers import Convention, Documents, token_flops, training_flops_per_token
from paceline.costs.parameters import Shape, block_shapes, model_shapes, with_adapters

NF4_BYTES = 0.5 + (1 + 4 / 256) / 64
"""An element of NF4 with double quantisation: 4 bits, and for every 64 a scale of a byte, and for every 256 of those 4
bytes (arXiv:2305.14314, section 3)."""


def count_adapters(model: ModelConfig, lora: LoraConfig) -> int:
    """Exact: parameters of all adapters of the model."""
    shapes = with_adapters(model_shapes(model), lora)
    return sum(math.prod(shape) for name, shape in shapes.items() if is_adapter(name))


def count_learned(config: RunConfig) -> int:
    """Parameters that the optimizer updates."""
    lora, shapes = config.lora, with_adapters(model_shapes(config.model), config.lora)
    return sum(math.prod(shape) for name, shape in shapes.items() if not lora.on or lora.learns(name))


@lru_cache(maxsize=64)
def layer_channels(model: ModelConfig, lora: LoraConfig) -> float:
    """Channels a token that adapters of a layer pass through memory, over the layers' mean.

    Of a linear from C to D: its output is read, added to and written, and its gradient read for either matrix, 4 D; its
    input is read forward and for the first matrix's gradient, and its own gradient read, added to and written, 4 C.
    Linears that read the same input join their first products (`parallel/adapters.py`): its C counts once. With DoRA
    the output is scaled as well, there and back: 4 D more.
    """
    total = 0.0
    for block in model.blocks():
        inputs: dict[str, int] = {}
        for name, (outputs, width) in _matrices(model, block, lora).items():
            total += (8 if lora.dora else 4) * outputs
            inputs[_SAME_INPUT.get(name, name)] = width
        total += 4 * sum(inputs.values())
    return total / max(1, model.num_layers)


_SAME_INPUT = {"k_proj": "q_proj", "v_proj": "q_proj", "kv_down_proj": "q_down_proj", "up_proj": "gate_proj"}


def _matrices(model: ModelConfig, block: BlockSpec, lora: LoraConfig) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the linears with adapters, by name."""
    found: dict[str, tuple[int, int]] = {}
    for name, shape in block_shapes(model, block).items():
        if lora.adapts(f"blocks.0.{name}") and len(shape) == 2:
            found[name.removesuffix(".weight").rpartition(".")[2]] = (shape[0], shape[1])
    return found


def frozen_layer_bytes(config: RunConfig) -> float:
    """Bytes of an element of the layers' frozen weights, in the mean; 0 where they are kept as they are computed with.

    `lora.base` is about linears alone: norms, routers and routed experts are not rounded. fp8 lies there twice, as it
    is and transposed, which is as much as bf16.
    """
    lora = config.lora
    if not lora.on or lora.base == "bf16":
        return 0.0
    if lora.base == "fp8":
        return 2.0
    return _nf4_layer_bytes(config.model, lora, 4.0 if config.train.precision == "fp32" else 2.0)


@lru_cache(maxsize=64)
def _nf4_layer_bytes(model: ModelConfig, lora: LoraConfig, width: float) -> float:
    shapes = {name: math.prod(shape) for name, shape in model_shapes(model).items() if name.startswith("blocks.")}
    rounded = sum(count for name, count in shapes.items() if lora.adapts_linear(name))
    total = sum(shapes.values())
    return (NF4_BYTES * rounded + width * (total - rounded)) / max(1, total)


def step_flops_per_token(
    config: RunConfig, convention: Convention = "causal", documents: Documents | None = None
) -> float:
    """Model FLOPs of one token, forward and backward.

    All weights learn: three times the forward. With adapters: twice the forward of each frozen product (no gradient of
    its weight), three times that of attention itself, which has no weights, and 6 for each parameter of an adapter.
    Ignored: that the first layer's input needs no gradient, and the lengths of rows of DoRA.

    Args:
        documents: of rows in which documents do not see each other; None = attention sees whole sequences.
    """
    if not config.lora.on:
        return training_flops_per_token(config.model, config.train.seq_len, convention, documents)
    adapters = count_adapters(config.model, config.lora)
    return adapted_flops_per_token(config.model, config.train.seq_len, adapters, convention, documents)


def adapted_flops_per_token(
    model: ModelConfig,
    seq_len: float,
    adapters: int,
    convention: Convention = "causal",
    documents: Documents | None = None,
) -> float:
    """As `step_flops_per_token`, beside so many parameters of adapters."""
    flops = token_flops(model, seq_len, convention, documents)
    return 2 * (flops.forward - flops.scores) + 3 * flops.scores + 6.0 * adapters


def adapter_activations(config: RunConfig, block: BlockSpec, width: int) -> int:
    """Bytes a token that the adapters of a block keep beside what the block keeps, at ``width`` bytes a number.

    The narrow products, r of each linear; with DoRA also each linear's output. Inputs are in the block's own count, as
    those of a product that learns: of linears without an adapter that is too much.
    """
    lora = config.lora
    if not lora.on:
        return 0
    named: Mapping[str, Shape] = {
        f"blocks.0.{name}": shape for name, shape in block_shapes(config.model, block).items()
    }
    adapted = [shape for name, shape in named.items() if lora.adapts(name)]
    return width * sum(lora.rank + (shape[0] if lora.dora else 0) for shape in adapted)
