"""How many bytes does a rank keep for the backward pass?

What autograd keeps with fused norms and fused attention (tests/costs/test_memory.py counts the saved tensors of built
layers). How layouts change it:

| axis | on each rank |
| --- | --- |
| cp | the tokens / cp |
| tp | everything / tp: inside sublayers by heads and width, between them along the sequence (but see below) |
| ep | rows of a token are computed elsewhere, and as many of others here: no change if experts are used evenly |
| etp | the ranks of a group bring the same rows together: rows x etp, their width / etp |
| pp | a part of the layers, times the micro-batches that are in flight on that stage |

Whole on each rank of tp: latents of latent attention, key/value heads of which there are fewer than ranks (on each rank
that has them), the input of the head with the plain loss, and what a running sublayer has gathered (it keeps its part).

Sources: arXiv:2205.05198 (tensor and sequence parallel), `costs/pipeline.py` (schedules).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from paceline.config.model import AttentionSpec, BlockSpec, FeedForwardSpec, ModelConfig, MoESpec
from paceline.config.parallel import ParallelConfig
from paceline.config.run import RunConfig
from paceline.config.train import TrainConfig
from paceline.costs.adapters import adapter_activations
from paceline.costs.low_precision import KeptBytes, fp8_kept
from paceline.costs.pipeline import rank_schedule
from paceline.costs.stages import cut_stages, stages_of_rank


def compute_bytes(train: TrainConfig) -> int:
    """Bytes of a weight or an activation in the precision of matrix products (in fp8 runs bf16, but for
    what products keep of their inputs)."""
    return 4 if train.precision == "fp32" else 2


def activations_per_token(config: RunConfig, pipeline_rank: int = 0, micro_batches: int = 1) -> int:
    """Bytes that a rank keeps for each token of a micro-batch (of its part of the sequence, with cp) at the peak.

    Over the stages and micro-batches that its schedule has in flight; its largest layer counts once more, as it runs
    back.

    Args:
        pipeline_rank: position in the pipeline.
        micro_batches: those of a step.
    """
    parallel, hidden, width = config.parallel, config.model.hidden_size, compute_bytes(config.train)
    stages = cut_stages(config, parallel.stages)
    kept, whole = _kept_by_block(config)
    by_stage, largest = {}, 0
    for stage in stages_of_rank(parallel, pipeline_rank):
        first, last = stage == 0, stage == len(stages) - 1
        blocks = [*stages[stage], *(range(config.model.num_layers, len(kept)) if last else ())]
        # output of the embedding; input of the last norm, or what is sent on; the head's input
        plain_head = last and config.train.loss_kernel == "plain"
        edges = _ceil(width * hidden * (1 + first + (last and not plain_head)), parallel.tp)
        by_stage[stage] = sum(kept[index] for index in blocks) + edges + width * hidden * plain_head
        largest = max([largest, *(whole[index] for index in blocks)])
    gathered = width * hidden if parallel.tp > 1 else 0
    return peak_held(parallel, pipeline_rank, micro_batches, by_stage) + largest + gathered


def peak_held(parallel: ParallelConfig, pipeline_rank: int, micro_batches: int, by_stage: Mapping[int, int]) -> int:
    """The most that a rank of the pipeline holds at a time, with so much for a micro-batch on each of its stages.

    From a micro-batch's forward to the end of its backward, or of the weights' part where the schedule splits it.
    """
    if parallel.pp == 1:
        return sum(by_stage.values())
    name, held, peak = parallel.pipeline_schedule, 0, 0
    if name == "1f1b":
        return min(micro_batches, parallel.pp - pipeline_rank) * sum(by_stage.values())
    rounds = max(1, micro_batches // parallel.pp)
    size, longer = divmod(micro_batches, rounds)
    # first come the longer rounds, then shorter ones that repeat each other: so many of these are enough
    micro_batches = min(rounds, longer + 6) * size + longer
    for action in rank_schedule(name, parallel.pp, parallel.stages_per_rank, micro_batches, pipeline_rank):
        held += {"F": 1, "I": 0, "B": -1, "W": -1}[action.kind] * by_stage[action.stage]
        peak = max(peak, held)
    return peak


@lru_cache(maxsize=8)
def _kept_by_block(config: RunConfig) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Bytes a token of every block, those of multi-token prediction last: kept under its recompute mode; all of it."""
    model, modes = config.model, config.parallel.recompute
    blocks = (*model.blocks(), *model.mtp_blocks())
    mode_of = [modes] * model.num_layers if isinstance(modes, str) else list(modes)
    mode_of += ["none"] * model.mtp_layers  # multi-token prediction is never recomputed
    whole = tuple(block_activations(model, block, config) for block in blocks)
    kept = tuple(
        recomputed_activations(block, mode, config, all_bytes)
        for block, mode, all_bytes in zip(blocks, mode_of, whole, strict=True)
    )
    return kept, whole


def recomputed_activations(block: BlockSpec, mode: str, config: RunConfig, all_bytes: int) -> int:
    """Bytes a token that a block keeps under a recompute mode.

    none: all. full: the block's input. selective: the input and every result of a matrix product or of attention;
    norms, rotary positions, activation functions and gathers along the sequence are computed again.
    """
    width, attention, tp = compute_bytes(config.train), block.attention, config.parallel.tp
    if mode == "none":
        return all_bytes
    if mode == "full":
        return _ceil(width * attention.hidden_size, tp)
    heads = attention.num_heads
    queries = heads * attention.qk_head_dim
    keys_values = _kv_copies(attention, tp) * attention.num_kv_heads * (attention.qk_head_dim + attention.v_head_dim)
    saved = width * (3 * attention.hidden_size + queries + keys_values + heads * attention.v_head_dim) + 4 * heads
    feed_forward = block.feed_forward
    if isinstance(feed_forward, MoESpec):
        inputs = 2 if feed_forward.expert.gated else 1
        saved += width * feed_forward.top_k * inputs * feed_forward.expert.ffn_size
        # outputs of each row, or, of our kernels, of each token
        rows = feed_forward.top_k * config.parallel.etp if config.parallel.expert_kernels == "plain" else 1
        saved += width * rows * feed_forward.hidden_size
        if feed_forward.shared is not None:
            saved += width * (2 if feed_forward.shared.gated else 1) * feed_forward.shared.ffn_size
    else:
        saved += width * (2 if feed_forward.gated else 1) * feed_forward.ffn_size
    return min(_ceil(saved, tp), all_bytes)


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """Elements a token that are kept."""

    cut: int
    """Over tp, along the sequence or by heads and width."""
    gathered: int = 0
    """Whole on each rank of tp."""

    def __add__(self, other: _Kept) -> _Kept:
        return _Kept(cut=self.cut + other.cut, gathered=self.gathered + other.gathered)


def block_activations(model: ModelConfig, block: BlockSpec, config: RunConfig) -> int:
    """Bytes a token that a block keeps without recomputation, in eager mode or compiled.

    In elements of the compute precision, h hidden: each norm keeps its input, and its output is kept by what follows
    (2 h); attention keeps q, k, v and its output, and 4 bytes of logsumexp a head; a gated MLP keeps gate, up,
    activated gate and product (4 F; compiled, the activated gate is computed again: 3 F), a plain one 2 F. What fp8
    products keep in place of their inputs: `costs/low_precision.py`.
    """
    width, tp = compute_bytes(config.train), config.parallel.tp
    norms = 2 if model.post_norm else 0
    kept = _Kept(cut=norms * 2 * model.hidden_size) + _attention(block.attention, tp)
    scores = 4 * block.attention.num_heads
    if config.train.attention_kernel == "reference":
        # scores in fp32, and probabilities
        scores = (4 + width) * block.attention.num_heads * config.train.seq_len
    feed_forward = block.feed_forward
    if isinstance(feed_forward, MoESpec):
        kept += _moe(feed_forward, config.parallel)
        # router: its fp32 input, scores, and indices of the chosen
        scores += 4 * model.hidden_size + 8 * feed_forward.num_experts + 40 * feed_forward.top_k
    else:
        mlp = _mlp(feed_forward, compiled=config.parallel.compile)
        kept += _Kept(cut=2 * model.hidden_size + mlp)
    # a frozen product keeps no input; what its adapter keeps is in the compute precision
    fp8 = KeptBytes() if config.lora.on else fp8_kept(config, block)
    scores += adapter_activations(config, block, width)
    return _ceil(width * kept.cut + scores + fp8.cut, tp) + width * kept.gathered + fp8.gathered


def _attention(spec: AttentionSpec, tp: int) -> _Kept:
    """With the norm before it."""
    queries = spec.num_heads * spec.qk_head_dim
    output = spec.num_heads * spec.v_head_dim
    copies = _kv_copies(spec, tp)
    cut = queries + copies * spec.num_kv_heads * (spec.qk_head_dim + spec.v_head_dim) + output + 2 * spec.hidden_size
    if spec.qk_norm:
        cut += queries + copies * spec.num_kv_heads * spec.qk_head_dim
    if spec.kind == "mla":
        # the down projections run on the whole sequence: latents before and after their norms
        return _Kept(cut=cut, gathered=2 * (spec.q_lora_rank + spec.kv_lora_rank))
    return _Kept(cut=cut)


def _mlp(spec: FeedForwardSpec, *, compiled: bool) -> int:
    if not spec.gated:
        return 2 * spec.ffn_size
    return (3 if compiled else 4) * spec.ffn_size


def _moe(spec: MoESpec, parallel: ParallelConfig) -> _Kept:
    """The norm before it, rows brought to the experts, the experts' MLPs with the weighted product, shared experts.

    Our kernels keep the tokens as they came, from however many ranks, and what the first products make of each row
    (kernels/experts.py)."""
    rows, expert = spec.top_k * parallel.etp, _mlp(spec.expert, compiled=parallel.compile) + spec.expert.ffn_size
    if parallel.expert_kernels != "plain":
        expert = (2 if spec.expert.gated else 1) * spec.expert.ffn_size
        rows = 0
        if parallel.ep * parallel.etp > 1:
            rows = parallel.etp * (parallel.ep if parallel.expert_dispatch == "all_gather" else spec.top_k)
    routed = _Kept(cut=2 * spec.hidden_size + rows * spec.hidden_size + spec.top_k * expert)
    if spec.shared is None:
        return routed
    return routed + _Kept(cut=_mlp(spec.shared, compiled=parallel.compile))


def _kv_copies(spec: AttentionSpec, tp: int) -> int:
    """Ranks of tp that hold the same key/value head."""
    return max(1, tp // spec.num_kv_heads)


def logits_bytes(model: ModelConfig, train: TrainConfig, tokens: int, tp: int = 1, *, frozen: bool = False) -> int:
    """Head and loss of one micro-batch on a rank, with the vocabulary over ``tp`` ranks.

    plain: 12 bytes a logit (in compute precision, in fp32, and the gradients of both; about what published runs show).
    chunked: for one slice logits and gradient in fp32 and the gradient in compute precision, and, until the backward
    pass takes them, the gradients of hidden states and head. With `train.fp8_head` also the slice's gradient in fp8,
    both ways round, the same of the weights, and the gradient that a slice adds to that of the head. A ``frozen`` head
    has no gradient.
    """
    if model.has_score:
        return 0  # a number for each token
    vocab = _ceil(model.vocab_size, tp)
    if train.loss_kernel == "plain":
        return 12 * tokens * vocab
    width = compute_bytes(train)
    fp8 = 2 * (train.precision == "fp8" and train.fp8_head)
    per_logit = 8 + (width if width < 4 else 0) + fp8
    if frozen:
        return per_logit * min(train.loss_chunk_tokens, tokens) * vocab + width * model.hidden_size * tokens
    kept = width * model.hidden_size * (vocab + tokens) + (fp8 + width * bool(fp8)) * model.hidden_size * vocab
    return per_logit * min(train.loss_chunk_tokens, tokens) * vocab + kept


def _ceil(value: int, parts: int) -> int:
    return -(-value // parts)
