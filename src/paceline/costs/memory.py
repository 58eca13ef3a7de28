"""How many bytes does a rank hold, and for what?

States are exact (from parameter counts); activations are what autograd keeps with fused norms and fused attention
(tests/costs/test_memory.py counts the saved tensors of built layers). Not in it: the CUDA context and libraries (1-3
GB), communication buffers of NCCL, and fragmentation. Rule of thumb: an estimate under 80 % of the device's memory has
not been seen to run out of it (arXiv:2411.06465, 454 runs).

Data parallelism only: layouts with tp, pp, cp or ep are refused.

States, bytes of a parameter on a rank; S shards (`dp_shard`), g = 4 or 2 by `accumulate_dtype`, m = moments (AdamW 8,
8-bit AdamW about 2.06, muon's matrices 4):

| engine | weights | gradients | masters | moments |
| --- | --- | --- | --- | --- |
| flat, bf16 (zero 0: S = 1) | 2 | g (+ 4 / S if bf16) | 4 / S | m / S |
| flat, fp32 | 4 | 4 | 0 (the weights) | m / S |
| fsdp | 4 / S, and gathered units in compute precision | 4 / S | 0 (the shards) | m / S |

FSDP also holds whole: weights in compute precision (zero 2: all; zero 3: two blocks, one of them on its way, the head,
and an embedding that is used twice); and gradients that are not yet reduced (of one block, or, while several
micro-batches are accumulated, of all parameters in `reduce_dtype`).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from paceline.config.model import AttentionSpec, BlockSpec, FeedForwardSpec, ModelConfig, MoESpec
from paceline.config.optim import OptimConfig
from paceline.config.run import RunConfig
from paceline.config.train import TrainConfig
from paceline.costs.layers import attention_weights, count_parameters, feed_forward_weights
from paceline.errors import ConfigError

_EIGHT_BIT_MOMENTS = 2 * (1 + 4 / 256)
"""Two codes of a byte, and an fp32 scale for every 256 of each."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes on the most loaded rank."""

    weights: int
    """What the model computes with, or its shards."""
    gathered: int
    """FSDP: weights that are whole for a while, and gradients not yet reduced."""
    gradients: int
    masters: int
    moments: int
    activations: int
    """Kept for the backward pass of one micro-batch, and one block's more while it runs."""
    logits: int
    """Logits, their gradient, and what the loss keeps."""
    host: int
    """Offloaded states, in host memory; not in the total."""

    @property
    def total(self) -> int:
        """Bytes of device memory."""
        return sum(getattr(self, field.name) for field in fields(self) if field.name != "host")

    @property
    def states(self) -> int:
        return self.weights + self.gradients + self.masters + self.moments

    def as_dict(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(self)} | {"total": self.total}


def estimate(config: RunConfig, world_size: int) -> MemoryEstimate:
    """Device memory of a rank of `config` on `world_size` ranks.

    Raises:
        ConfigError: the degrees do not make the world size, or are not data parallelism alone.
    """
    parallel = config.parallel
    if parallel.model_ranks > 1 or parallel.ep > 1 or parallel.etp > 1:
        raise ConfigError(
            f"memory is estimated for data parallelism only, not for tp {parallel.tp}, pp {parallel.pp}, "
            f"cp {parallel.cp}, ep {parallel.ep}",
            next_step="Set parallel.tp = pp = cp = ep = 1 for an estimate.",
        )
    shards = parallel.shard_degree(world_size) if parallel.zero else 1
    tokens = config.train.micro_batch_size * config.train.seq_len
    states = _flat_states(config, shards) if parallel.engine == "flat" else _fsdp_states(config, shards, world_size)
    return MemoryEstimate(
        **states,
        activations=tokens * activations_per_token(config),
        logits=logits_bytes(config.model, config.train, tokens),
    )


# ---- states


def _flat_states(config: RunConfig, shards: int) -> dict[str, int]:
    parameters = count_parameters(config.model).total
    compute, accumulate = compute_bytes(config.train), 2 if config.parallel.accumulate_dtype == "bf16" else 4
    share = -(-parameters // shards)
    masters = 4 * share if compute < 4 else 0
    moments = moment_bytes(config.model, config.optim) // shards
    gradients, gradient_share = accumulate * parameters, 4 * share if accumulate < 4 else 0
    if config.parallel.offload == "none":
        return {
            "weights": compute * parameters,
            "gathered": 0,
            "gradients": gradients + gradient_share,
            "masters": masters,
            "moments": moments,
            "host": 0,
        }
    # offloaded: weights, gradients and moments of the shard in fp32, and staging for the way back
    staging = compute * share if compute < 4 else 0
    return {
        "weights": compute * parameters,
        "gathered": 0,
        "gradients": gradients,
        "masters": 0,
        "moments": 0,
        "host": 8 * share + staging + moments,
    }


def _fsdp_states(config: RunConfig, shards: int, world_size: int) -> dict[str, int]:
    model, parallel, train = config.model, config.parallel, config.train
    counts, compute = count_parameters(model), compute_bytes(train)
    share = -(-counts.total // shards)
    moments = moment_bytes(model, config.optim) // shards
    block = max(counts.blocks)
    whole = counts.total
    if parallel.zero == 3:
        # an embedding that is used twice (tied, or by multi-token prediction) is not given back after its first use
        kept = counts.embedding if model.tie_embeddings or model.mtp_layers else 0
        whole = min(whole, 2 * block + counts.head + kept)
    unreduced = 4 * block
    if train.global_batch_size > train.micro_batch_size * parallel.dp_degree(world_size):
        unreduced = (2 if parallel.reduce_dtype == "bf16" else 4) * counts.total
    states = {
        "weights": 4 * share,
        "gathered": compute * whole + unreduced,
        "gradients": 4 * share,
        "masters": 0,
        "moments": moments,
        "host": 0,
    }
    if parallel.offload == "none":
        return states
    on_host = {"moments": 0, "host": 8 * share + moments}
    # "optimizer": the host works on a copy of the shards
    return states | on_host | ({"weights": 0, "gradients": 0} if parallel.offload == "parameters" else {})


def compute_bytes(train: TrainConfig) -> int:
    """Bytes of a weight or an activation in the precision of matrix products (fp8 runs keep bf16 tensors)."""
    return 4 if train.precision == "fp32" else 2


def moment_bytes(model: ModelConfig, optim: OptimConfig) -> int:
    """Bytes of the optimizer's state over all shards."""
    counts = count_parameters(model)
    if optim.name == "adamw":
        return 8 * counts.total
    if optim.name == "adamw8bit":
        return int(_EIGHT_BIT_MOMENTS * counts.total)
    return 8 * counts.total - 4 * _matrix_parameters(model)


def _matrix_parameters(model: ModelConfig) -> int:
    """Elements that muon updates: the blocks' matrices, without biases and norms."""
    count = 2 * model.hidden_size**2 * model.mtp_layers
    for block in (*model.blocks(), *model.mtp_blocks()):
        count += attention_weights(block.attention)
        feed_forward = block.feed_forward
        if isinstance(feed_forward, MoESpec):
            count += feed_forward.num_experts * (feed_forward.hidden_size + feed_forward_weights(feed_forward.expert))
            count += feed_forward_weights(feed_forward.shared) if feed_forward.shared is not None else 0
        else:
            count += feed_forward_weights(feed_forward)
    return count


# ---- activations


def activations_per_token(config: RunConfig) -> int:
    """Bytes that a token's forward pass keeps, over all layers; the largest layer counts once more, as it runs back."""
    model, modes = config.model, config.parallel.recompute
    blocks = (*model.blocks(), *model.mtp_blocks())
    mode_of = [modes] * model.num_layers if isinstance(modes, str) else list(modes)
    mode_of += ["none"] * model.mtp_layers  # multi-token prediction is never recomputed
    whole = [block_activations(model, block, config) for block in blocks]
    kept = [
        recomputed_activations(block, mode, config.train, all_bytes)
        for block, mode, all_bytes in zip(blocks, mode_of, whole, strict=True)
    ]
    # embedding output, input and output of the last norm
    outside = 3 * model.hidden_size * compute_bytes(config.train)
    return sum(kept) + max(whole) + outside


def recomputed_activations(block: BlockSpec, mode: str, train: TrainConfig, all_bytes: int) -> int:
    """Bytes a token that a block keeps under a recompute mode.

    none: all. full: the block's input. selective: the input and every result of a matrix product or of attention;
    norms, rotary positions and activation functions are computed again.
    """
    width, attention = compute_bytes(train), block.attention
    if mode == "none":
        return all_bytes
    if mode == "full":
        return width * attention.hidden_size
    heads = attention.num_heads
    queries = heads * attention.qk_head_dim
    keys_values = attention.num_kv_heads * (attention.qk_head_dim + attention.v_head_dim)
    saved = width * (3 * attention.hidden_size + queries + keys_values + heads * attention.v_head_dim) + 4 * heads
    feed_forward = block.feed_forward
    if isinstance(feed_forward, MoESpec):
        inputs = 2 if feed_forward.expert.gated else 1
        saved += width * feed_forward.top_k * (inputs * feed_forward.expert.ffn_size + feed_forward.hidden_size)
        if feed_forward.shared is not None:
            saved += width * (2 if feed_forward.shared.gated else 1) * feed_forward.shared.ffn_size
    else:
        saved += width * (2 if feed_forward.gated else 1) * feed_forward.ffn_size
    return min(saved, all_bytes)


def block_activations(model: ModelConfig, block: BlockSpec, config: RunConfig) -> int:
    """Bytes a token that a block keeps without recomputation, in eager mode or compiled.

    In elements of the compute precision, h hidden: each norm keeps input and output (2 h); attention keeps q, k, v and
    its output, and 4 bytes of logsumexp a head; a gated MLP keeps gate, up, activated gate and product (4 F; compiled,
    the activated gate is computed again: 3 F), a plain one 2 F.
    """
    width, hidden = compute_bytes(config.train), model.hidden_size
    norms = (4 if model.post_norm else 2) * 2 * hidden
    attention = _attention_elements(block.attention)
    scores = 4 * block.attention.num_heads
    if config.train.attention_kernel == "reference":
        # scores in fp32, and probabilities
        scores = (4 + width) * block.attention.num_heads * config.train.seq_len
    feed_forward = block.feed_forward
    if isinstance(feed_forward, MoESpec):
        mlp = _moe_elements(feed_forward, compiled=config.parallel.compile)
        # router: its fp32 input, scores, and indices of the chosen
        scores += 4 * hidden + 8 * feed_forward.num_experts + 40 * feed_forward.top_k
    else:
        mlp = _mlp_elements(feed_forward, compiled=config.parallel.compile)
    return width * (norms + attention + mlp) + scores


def _attention_elements(spec: AttentionSpec) -> int:
    queries = spec.num_heads * spec.qk_head_dim
    output = spec.num_heads * spec.v_head_dim
    kept = queries + spec.num_kv_heads * (spec.qk_head_dim + spec.v_head_dim) + output
    if spec.qk_norm:
        kept += queries + spec.num_kv_heads * spec.qk_head_dim
    if spec.kind == "mla":
        kept += 2 * (spec.q_lora_rank + spec.kv_lora_rank)  # the latents before and after their norms
    return kept


def _mlp_elements(spec: FeedForwardSpec, *, compiled: bool) -> int:
    if not spec.gated:
        return 2 * spec.ffn_size
    return (3 if compiled else 4) * spec.ffn_size


def _moe_elements(spec: MoESpec, *, compiled: bool) -> int:
    """Rows brought to the experts, the experts' MLPs with the weighted product, and shared experts."""
    routed = spec.top_k * (spec.hidden_size + _mlp_elements(spec.expert, compiled=compiled) + spec.expert.ffn_size)
    return routed + (_mlp_elements(spec.shared, compiled=compiled) if spec.shared is not None else 0)


def logits_bytes(model: ModelConfig, train: TrainConfig, tokens: int) -> int:
    """Head and loss of one micro-batch.

    plain: 12 bytes a logit (in compute precision, in fp32, and the gradients of both; about what published runs show).
    chunked: for one slice logits and gradient in fp32 and the gradient in compute precision, and, until the backward
    pass takes them, the gradients of hidden states and head.
    """
    if train.loss_kernel == "plain":
        return 12 * tokens * model.vocab_size
    width = compute_bytes(train)
    per_logit = 8 + (width if width < 4 else 0)
    kept = width * model.hidden_size * (model.vocab_size + tokens)
    return per_logit * min(train.loss_chunk_tokens, tokens) * model.vocab_size + kept
