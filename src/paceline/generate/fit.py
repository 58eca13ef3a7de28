"""On how many cards does a model speak?

What a card holds then: its part of the weights, keys and values of every token of the batch, and the logits of the
prompt tokens that are read at a time. Counted, not measured; torch-free.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.config.model import ModelConfig
from paceline.costs.parameters import model_shapes
from paceline.costs.placement import local_box
from paceline.errors import ConfigError
from paceline.report.units import size

SAFE_SHARE = 0.92
"""Of a card's free memory: the rest is for kernels' workspaces and what the allocator cannot fill."""
CONTEXT_BYTES = 1 << 30
"""Of a process itself: CUDA's context, handles of libraries, buffers of NCCL."""


@dataclass(frozen=True, kw_only=True)
class Speech:
    """What is to be written."""

    batch_size: int = 1
    tokens: int = 2048
    """Longest sequence with its prompt."""
    tokens_at_a_time: int = 512
    """Of a prompt, when it is read."""
    element_bytes: int = 2
    """Of a weight, and of a key's or value's number."""


def speaking_bytes(model: ModelConfig, tp: int, speech: Speech) -> int:
    """Bytes of the fullest of ``tp`` cards."""
    sizes, first = {"tp": tp, "etp": tp}, {"tp": 0, "etp": 0}
    # multi-token prediction is not loaded
    shapes = model_shapes(model.model_copy(update={"mtp_layers": 0}))
    weights = sum(local_box(name, shape, model, sizes, first).numel for name, shape in shapes.items())
    cached = sum(_numbers_per_token(model, tp)) * speech.batch_size * min(speech.tokens, model.max_seq_len)
    # of the last layers: logits in the model's dtype, once more joined, and in fp32 what is drawn from
    read = speech.batch_size * min(speech.tokens_at_a_time, speech.tokens)
    logits = read * model.vocab_size * speech.element_bytes * (2 if tp > 1 else 1)
    drawn = speech.batch_size * model.vocab_size * 16
    widest = max((model.ffn_size or 4 * model.hidden_size) // tp, model.hidden_size)
    activations = read * widest * speech.element_bytes * 4
    return (weights + cached) * speech.element_bytes + logits + drawn + activations + CONTEXT_BYTES


def _numbers_per_token(model: ModelConfig, tp: int) -> Iterator[int]:
    """Of each layer: a key and a value of each head of a rank; latent attention keeps those of all its heads."""
    for block in model.blocks():
        spec = block.attention
        heads = spec.num_heads if spec.kind == "mla" else spec.num_kv_heads
        value = spec.v_head_dim if spec.kind == "mla" else spec.qk_head_dim
        yield max(1, heads // tp) * (spec.qk_head_dim + value)


def legal_degrees(model: ModelConfig, most: int) -> list[int]:
    """Numbers of cards that the heads and the vocabulary can be dealt out over, up to ``most``."""
    kv_heads = model.kv_heads if model.attention == "gqa" else model.num_heads
    return [
        tp
        for tp in range(1, most + 1)
        if model.num_heads % tp == 0 and (kv_heads % tp == 0 or tp % kv_heads == 0) and model.vocab_size >= tp
    ]


def choose_degree(model: ModelConfig, free_bytes: list[int], speech: Speech) -> int:
    """The fewest cards on which the model fits: every one more adds a meeting to each sublayer.

    Args:
        free_bytes: of each card, in order; the first so many are taken.

    Raises:
        ConfigError: it fits on none of the numbers that its heads allow.
    """
    degrees = legal_degrees(model, len(free_bytes))
    for tp in degrees:
        if speaking_bytes(model, tp, speech) <= SAFE_SHARE * min(free_bytes[:tp]):
            return tp
    best = degrees[-1]
    needed, free = speaking_bytes(model, best, speech), min(free_bytes[:best])
    more = next((tp for tp in legal_degrees(model, 1024) if speaking_bytes(model, tp, speech) <= SAFE_SHARE * free), 0)
    there = f"{len(free_bytes)} card{'s' * (len(free_bytes) > 1)}"
    raise ConfigError(
        f"the model does not fit on the {there} here: {size(needed)} on each of {best}, {size(free)} are free",
        evidence=f"Weights in {8 * speech.element_bytes} bits, and keys and values of {speech.batch_size} x "
        f"{min(speech.tokens, model.max_seq_len)} tokens; its {model.num_heads} heads can be dealt out over "
        f"{', '.join(map(str, degrees))} of them.",
        next_step=(f"It would fit on {more} such cards. " if more else "")
        + "Fewer texts at a time or a smaller --max-tokens take less; --device cpu takes none.",
    )
