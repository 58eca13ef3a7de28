"""How many parameters has a model, and how many floating-point operations does a token cost?

Arithmetic over `ModelConfig.blocks()`, never over modules. Counted are matrix products (a multiply-add is 2); a
backward pass is twice its forward, and recomputation is not counted: model FLOPs, not hardware FLOPs.
Ignored: everything elementwise (softmax, norms, rotary positions, activations) and the optimizer.

Two conventions exist for attention, and published tables use either, so a figure must name its own:

- ``causal``: a token attends to half of the sequence on average, seq_len / 2 keys (the default of Paceline's metrics,
  and of Megatron Bridge);
- ``full``: seq_len keys, as if nothing were masked (PaLM appendix B, NeMo 24.07, llm-foundry).

Parameter counts equal the built model's exactly and matmul FLOPs those of torch's flop counter (tests/costs).
Sources: PaLM, arXiv:2204.02311; Narayanan and others, arXiv:2104.04473.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal

from paceline.config.model import AttentionSpec, BlockSpec, FeedForwardSpec, ModelConfig, MoESpec

Convention = Literal["causal", "full"]


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Parameters of a model. Tied weights are counted once; router biases are buffers and not counted."""

    total: int
    active: int
    """Those that a token passes: `top_k` of the experts. The embedding tables count whole."""
    embedding: int
    """Token embedding and, where positions are learned, their table."""
    head: int
    """0 where it is tied to the embedding."""
    final_norm: int
    blocks: tuple[int, ...]
    """Of each layer, all experts."""
    active_blocks: tuple[int, ...]
    mtp: int
    """Multi-token prediction, all depths."""


@dataclass(frozen=True, kw_only=True)
class TokenFlops:
    """FLOPs of one token's forward pass, by part, over all layers."""

    projections: float
    """Query, key, value and output; of latent attention, all its matrices."""
    scores: float
    """Queries times keys, and probabilities times values."""
    mlp: float
    """Dense MLPs."""
    experts: float
    """`top_k` routed experts, and shared ones with their gate."""
    router: float
    logits: float
    """The head, once more for each depth of multi-token prediction."""
    mtp_merge: float
    """The projection that joins embedding and hidden state in each depth of multi-token prediction."""

    @property
    def forward(self) -> float:
        return float(sum(getattr(self, field.name) for field in fields(self)))

    @property
    def backward(self) -> float:
        """Twice the forward: gradients of inputs and of weights."""
        return 2 * self.forward

    @property
    def training(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True, kw_only=True)
class Documents:
    """Documents that share rows and do not see each other."""

    counts: Mapping[int, int]
    """Length in tokens -> how many."""
    tokens: int
    """Of the rows, with what fills them up, which attends to nothing."""

    @property
    def tokens_around(self) -> float:
        """Length of the document that a token of them lies in, in the mean; 0 without documents."""
        inside = sum(length * count for length, count in self.counts.items())
        return sum(length**2 * count for length, count in self.counts.items()) / max(1, inside)

    def keys_per_token(self, window: int, convention: Convention) -> float:
        """Keys that a token of the rows meets on average."""
        met = sum(
            count * length * keys_per_token(length, window, convention)
            for length, count in self.counts.items()
            if length
        )
        return met / self.tokens


# ---- parameters


def count_parameters(model: ModelConfig) -> ParameterCount:
    """Exact counts of the model that `models/` builds from the same config."""
    embedding = model.vocab_size * model.hidden_size
    if model.position == "learned":
        embedding += model.max_seq_len * model.hidden_size
    head = model.hidden_size if model.has_score else 0 if model.tie_embeddings else model.vocab_size * model.hidden_size
    norm = norm_parameters(model)
    blocks = tuple(block_parameters(model, block) for block in model.blocks())
    active = tuple(block_parameters(model, block, active=True) for block in model.blocks())
    mtp = sum(mtp_parameters(model, block) for block in model.mtp_blocks())
    active_mtp = sum(mtp_parameters(model, block, active=True) for block in model.mtp_blocks())
    outside = embedding + head + norm
    return ParameterCount(
        total=outside + sum(blocks) + mtp,
        active=outside + sum(active) + active_mtp,
        embedding=embedding,
        head=head,
        final_norm=norm,
        blocks=blocks,
        active_blocks=active,
        mtp=mtp,
    )


def block_parameters(model: ModelConfig, block: BlockSpec, *, active: bool = False) -> int:
    """Of one layer: attention, MLP or experts (with ``active``, those that a token takes), and norms."""
    norms = 4 if model.post_norm else 2
    if isinstance(block.feed_forward, MoESpec):
        feed_forward = moe_parameters(block.feed_forward, active=active)
    else:
        feed_forward = feed_forward_parameters(block.feed_forward)
    return attention_parameters(block.attention) + feed_forward + norms * norm_parameters(model)


def mtp_parameters(model: ModelConfig, block: BlockSpec, *, active: bool = False) -> int:
    """One depth of multi-token prediction: a block, two norms of its inputs, their projection and a last norm.

    Embedding and head are the main model's.
    """
    return block_parameters(model, block, active=active) + 3 * norm_parameters(model) + 2 * model.hidden_size**2


def norm_parameters(model: ModelConfig) -> int:
    return model.hidden_size * (1 if model.norm == "rmsnorm" else 2)


def attention_parameters(spec: AttentionSpec) -> int:
    """Matrices, biases and inner norms of one attention layer."""
    count = attention_weights(spec)
    if spec.kind == "mla":
        latent = spec.kv_lora_rank + spec.qk_rope_head_dim
        count += spec.q_lora_rank + spec.kv_lora_rank  # the norms of both latents
        count += spec.qkv_bias * (spec.q_lora_rank + latent)
    else:
        count += spec.qkv_bias * (spec.num_heads + 2 * spec.num_kv_heads) * spec.qk_head_dim
        count += spec.qk_norm * 2 * spec.qk_head_dim
    return count + spec.out_bias * spec.hidden_size


def attention_weights(spec: AttentionSpec) -> int:
    """Elements of the matrices alone."""
    hidden, heads = spec.hidden_size, spec.num_heads
    output = heads * spec.v_head_dim * hidden
    if spec.kind == "gqa":
        return hidden * (heads + 2 * spec.num_kv_heads) * spec.qk_head_dim + output
    queries = heads * spec.qk_head_dim
    query = spec.q_lora_rank * (hidden + queries) if spec.q_lora_rank else hidden * queries
    down = hidden * (spec.kv_lora_rank + spec.qk_rope_head_dim)
    up = spec.kv_lora_rank * heads * (spec.qk_nope_head_dim + spec.v_head_dim)
    return query + down + up + output


def feed_forward_parameters(spec: FeedForwardSpec) -> int:
    inputs = 2 if spec.gated else 1
    return feed_forward_weights(spec) + spec.bias * (inputs * spec.ffn_size + spec.hidden_size)


def feed_forward_weights(spec: FeedForwardSpec) -> int:
    """Elements of the matrices alone: 3 (gated) or 2 of them."""
    return (3 if spec.gated else 2) * spec.hidden_size * spec.ffn_size


def moe_parameters(spec: MoESpec, *, active: bool = False) -> int:
    """Router, experts (with ``active``, `top_k` of them), shared experts and their gate."""
    count = spec.hidden_size * spec.num_experts
    count += (spec.top_k if active else spec.num_experts) * feed_forward_parameters(spec.expert)
    if spec.shared is not None:
        count += feed_forward_parameters(spec.shared) + spec.routing.shared_gate * spec.hidden_size
    return count


# ---- floating-point operations


def token_flops(
    model: ModelConfig, seq_len: float, convention: Convention = "causal", documents: Documents | None = None
) -> TokenFlops:
    """Forward FLOPs of one token in a sequence of `seq_len`, averaged over its positions.

    Args:
        documents: what attention sees in place of whole sequences.
    """
    blocks = (*model.blocks(), *model.mtp_blocks())
    windows = {block.attention.sliding_window for block in blocks}
    keys = {
        window: documents.keys_per_token(window, convention)
        if documents
        else keys_per_token(seq_len, window, convention)
        for window in windows
    }
    parts = {"projections": 0.0, "scores": 0.0, "mlp": 0.0, "experts": 0.0, "router": 0.0}
    for block in blocks:
        parts["projections"] += 2 * attention_weights(block.attention)
        parts["scores"] += _score_flops(block.attention, keys[block.attention.sliding_window])
        feed_forward = block.feed_forward
        if isinstance(feed_forward, MoESpec):
            parts["experts"] += expert_flops(feed_forward)
            parts["router"] += 2 * feed_forward.hidden_size * feed_forward.num_experts
        else:
            parts["mlp"] += 2 * feed_forward_weights(feed_forward)
    return TokenFlops(
        **parts,
        logits=2.0 * model.hidden_size * model.head_rows * (1 + model.mtp_layers),
        mtp_merge=2.0 * 2 * model.hidden_size**2 * model.mtp_layers,
    )


def training_flops_per_token(
    model: ModelConfig, seq_len: float, convention: Convention = "causal", documents: Documents | None = None
) -> float:
    """Model FLOPs of one token, forward and backward: three times the forward.

    Llama-3-8B at sequence 8192: 51.47e9 causal, 57.91e9 full.
    """
    return token_flops(model, seq_len, convention, documents).training


def score_flops(spec: AttentionSpec, seq_len: float, convention: Convention) -> float:
    """Forward FLOPs of the attention core for one token: 2 * keys * heads * (query-key width + value width)."""
    return _score_flops(spec, keys_per_token(seq_len, spec.sliding_window, convention))


def _score_flops(spec: AttentionSpec, keys: float) -> float:
    return 2 * keys * spec.num_heads * (spec.qk_head_dim + spec.v_head_dim)


def keys_per_token(seq_len: float, window: int, convention: Convention) -> float:
    """Keys that a token meets on average.

    causal: s / 2 (the mean of 1 ... s without its + 1/2, as is usual); in a window w < s, w (1 - w / 2s): the first w
    tokens see half a window, the rest a whole one. full: s, or w in a window.
    """
    reach = min(window, seq_len) if window else seq_len
    return reach * (1 - reach / (2 * seq_len)) if convention == "causal" else float(reach)


def expert_flops(spec: MoESpec) -> float:
    """Forward FLOPs of the experts for one token; capacity limits and dropped tokens are not counted."""
    flops = 2 * spec.top_k * feed_forward_weights(spec.expert)
    if spec.shared is not None:
        flops += 2 * feed_forward_weights(spec.shared) + 2 * spec.routing.shared_gate * spec.hidden_size
    return float(flops)
