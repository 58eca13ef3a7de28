"""The `[model]` section, and the one description of the network that everything else is derived from.

`ModelConfig.blocks()` says, layer by layer, what the network is. `models/` builds modules from it, `costs/` counts
parameters, FLOPs and bytes from it, `parallel/` cuts it into stages: no second description exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field, model_validator

from paceline.config.base import Section
from paceline.errors import ConfigError

Activation = Literal["swiglu", "geglu", "gelu", "gelu_tanh", "relu"]


class RopeScaling(Section):
    """Stretching of rotary positions beyond the trained length."""

    kind: Literal["none", "linear", "llama3", "yarn"] = "none"
    """`linear` divides positions; `llama3` and `yarn` divide by frequency band."""
    factor: float = Field(1.0, gt=0)
    """How many times longer than `original_max_seq_len`."""
    original_max_seq_len: int = Field(8192, gt=0)
    """The length the model was trained at before scaling (llama3, yarn)."""
    low_freq_factor: float = Field(1.0, gt=0)
    """llama3: wavelengths above original/low are divided by `factor`."""
    high_freq_factor: float = Field(4.0, gt=0)
    """llama3: wavelengths below original/high are kept."""
    beta_fast: float = Field(32.0, gt=0)
    """yarn: dimensions that turn more often than this over the original length are kept."""
    beta_slow: float = Field(1.0, gt=0)
    """yarn: dimensions that turn less often than this are fully interpolated."""
    attention_factor: float = Field(0.0, ge=0)
    """yarn: scale of cos and sin; 0 computes 0.1 ln(factor) + 1, or the ratio of the two mscale terms if set."""
    mscale: float = Field(0.0, ge=0)
    """yarn as in DeepSeek: numerator of the attention scale; 0 = not used."""
    mscale_all_dim: float = Field(0.0, ge=0)
    """yarn as in DeepSeek: also multiplies the softmax scale by the square of this mscale; 0 = not used."""


class MoEConfig(Section):
    """Mixture of experts. Used when `model.num_experts` > 0."""

    layer_period: int = Field(1, ge=1)
    """One block in every `layer_period` is an expert block (Switch: 2)."""
    layer_offset: int = Field(0, ge=0)
    """Within a period, which block it is: layers i with i % layer_period == layer_offset."""
    first_dense_layers: int = Field(0, ge=0)
    """The first so many blocks stay dense whatever the period says (DeepSeek)."""
    ffn_size: int = Field(0, ge=0)
    """Width of one expert; 0 takes `model.ffn_size`."""
    num_shared_experts: int = Field(0, ge=0)
    """Experts that every token passes, computed as one MLP of `num_shared_experts * shared_ffn_size`."""
    shared_ffn_size: int = Field(0, ge=0)
    """Width of one shared expert; 0 takes the width of a routed one."""
    shared_gate: bool = False
    """Multiply the shared output by a sigmoid gate (Qwen2-MoE)."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """How router logits become scores."""
    normalize_top_k: bool = True
    """Divide the chosen scores by their sum."""
    score_scale: float = Field(1.0, gt=0)
    """Multiplies the chosen scores (DeepSeek's routed scaling factor)."""
    num_groups: int = Field(1, ge=1)
    """Node-limited routing: experts lie in this many groups ..."""
    top_k_groups: int = Field(1, ge=1)
    """... and a token may go to experts of this many of them."""
    group_score: Literal["max", "top2_sum"] = "top2_sum"
    """A group's score: its best expert (DeepSeek-V2) or the sum of its best two (DeepSeek-V3)."""
    bias_balance: bool = False
    """Balance by a bias on the selection scores instead of a loss (DeepSeek-V3)."""
    bias_update_rate: float = Field(1e-3, ge=0)
    """Step of that bias after each optimizer step."""
    aux_loss_coef: float = Field(0.0, ge=0)
    """Weight of the load-balancing loss, computed for each sequence and averaged over sequences."""
    z_loss_coef: float = Field(0.0, ge=0)
    """Weight of the mean squared logsumexp of router logits."""
    capacity_factor: float = Field(0.0, ge=0)
    """0 = dropless; otherwise an expert takes at most capacity_factor * tokens * top_k / num_experts of a sequence."""
    eval_capacity_factor: float = Field(0.0, ge=0)
    """The same in evaluation; 0 takes `capacity_factor`."""
    jitter: float = Field(0.0, ge=0, lt=1)
    """Multiplies the router's input by uniform noise in [1 - jitter, 1 + jitter] while training (Switch)."""
    expert_dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout inside experts (Switch fine-tuning)."""
    router_precision: Literal["fp32", "model"] = "fp32"
    """Precision of the router's matrix product and scores."""


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """One attention layer. `kind` mla has its own projections; sizes that a kind does not use are 0."""

    kind: Literal["gqa", "mla"]
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    qk_head_dim: int
    """Width of one query or key head (for mla: nope + rope)."""
    v_head_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    sliding_window: int = 0
    """A token sees itself and the `sliding_window - 1` before it; 0 = all before it."""
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0


@dataclass(frozen=True, kw_only=True)
class FeedForwardSpec:
    """A dense MLP, an expert, or the shared experts as one."""

    hidden_size: int
    ffn_size: int
    activation: Activation
    bias: bool = False

    @property
    def gated(self) -> bool:
        """Whether there are two input matrices (gate and up)."""
        return self.activation in ("swiglu", "geglu")


@dataclass(frozen=True, kw_only=True)
class MoESpec:
    """A router, `num_experts` experts of which a token takes `top_k`, and possibly shared experts."""

    hidden_size: int
    num_experts: int
    top_k: int
    expert: FeedForwardSpec
    shared: FeedForwardSpec | None
    routing: MoEConfig


@dataclass(frozen=True, kw_only=True)
class BlockSpec:
    """One layer: attention, then a dense MLP or a mixture of experts."""

    index: int
    attention: AttentionSpec
    feed_forward: FeedForwardSpec | MoESpec

    @property
    def is_moe(self) -> bool:
        return isinstance(self.feed_forward, MoESpec)


class ModelConfig(Section):
    """What the network is. A preset fills every field; fields given beside it win."""

    preset: str = ""
    """A named published shape, such as `llama3_8b`; `paceline train --presets` lists them."""
    init_from: str = ""
    """Start from these weights: a Hugging Face folder, a run folder or a checkpoint. Fields of `[model]` that are not
    given, and have no preset, are those of the weights. Empty = random."""

    num_layers: int = Field(4, ge=1, le=10_000)
    """Blocks of the decoder."""
    hidden_size: int = Field(256, ge=1)
    """Width of the residual stream."""
    num_heads: int = Field(4, ge=1)
    """Query heads."""
    num_kv_heads: int = Field(0, ge=0)
    """Key/value heads (GQA; 1 = MQA); 0 takes `num_heads`."""
    head_dim: int = Field(0, ge=0)
    """Width of one head; 0 takes hidden_size / num_heads."""
    ffn_size: int = Field(0, ge=0)
    """Width of the dense MLP; 0 takes 4 * hidden_size."""
    vocab_size: int = Field(32000, ge=2)
    """Rows of the embedding. Must be at least the tokenizer's."""
    max_seq_len: int = Field(4096, ge=2)
    """Longest sequence the positions are made for."""

    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Which norm; `layernorm` has a bias."""
    norm_eps: float = Field(1e-5, gt=0)
    """Added to the variance before the square root."""
    norm_unit_offset: bool = False
    """Multiply by (1 + weight) instead of weight (Gemma)."""
    post_norm: bool = False
    """A second norm after attention and after the MLP, before the residual addition (Gemma 2)."""
    activation: Activation = "swiglu"
    """Of the MLP; `swiglu` and `geglu` are gated (three matrices), `gelu_tanh` is the tanh approximation."""
    position: Literal["rope", "learned", "none"] = "rope"
    """How tokens know their places."""
    rope_theta: float = Field(10000.0, gt=0)
    """Base of the rotary frequencies."""
    rope_fraction: float = Field(1.0, gt=0, le=1)
    """Share of each head that is rotated (GPT-NeoX: 0.25)."""
    rope_scaling: RopeScaling = RopeScaling()
    """Stretching of rotary positions beyond the trained length."""
    qkv_bias: bool = False
    """Biases on the query, key and value projections (GPT, Qwen2)."""
    attention_out_bias: bool = False
    """A bias on the output projection of attention (GPT)."""
    mlp_bias: bool = False
    """Biases in the MLP (GPT)."""
    qk_norm: bool = False
    """RMSNorm over each query and key head before RoPE (Qwen3)."""
    sliding_window: int = Field(0, ge=0)
    """Attention window in tokens; 0 = full causal attention (Mistral: 4096)."""
    sliding_window_period: int = Field(1, ge=1)
    """One layer in every so many has full attention instead of the window; 1 = every layer has the window."""
    attention_softcap: float = Field(0.0, ge=0)
    """Scores become cap * tanh(scores / cap); 0 = off (Gemma 2)."""
    logit_softcap: float = Field(0.0, ge=0)
    """Logits become cap * tanh(logits / cap); 0 = off (Gemma 2)."""
    attention_scale: float = Field(0.0, ge=0)
    """Softmax scale; 0 takes 1 / sqrt(head_dim)."""
    embedding_scale: bool = False
    """Multiply embeddings by sqrt(hidden_size) (Gemma)."""
    tie_embeddings: bool = False
    """The head uses the embedding's matrix."""
    head: Literal["vocabulary", "score"] = "vocabulary"
    """What the last hidden state becomes: logits, or one number, the score of a reward model (`task.kind = "reward"`).
    """
    dropout: float = Field(0.0, ge=0, lt=1)
    """After the embedding, after attention and after the MLP."""
    attention_dropout: float = Field(0.0, ge=0, lt=1)
    """On attention probabilities."""

    init_std: float = Field(0.02, gt=0)
    """Standard deviation of the initial weights."""
    scaled_residual_init: bool = True
    """Divide the standard deviation of output projections by sqrt(2 * num_layers)."""

    attention: Literal["gqa", "mla"] = "gqa"
    """`mla` is DeepSeek's latent attention, with the five sizes below."""
    q_lora_rank: int = Field(0, ge=0)
    """0 projects queries directly (DeepSeek-V2-Lite)."""
    kv_lora_rank: int = Field(0, ge=0)
    """Width of the latent that keys and values are made from."""
    qk_nope_head_dim: int = Field(0, ge=0)
    """Dimensions of a query and key head without RoPE."""
    qk_rope_head_dim: int = Field(0, ge=0)
    """Dimensions of a query and key head with RoPE; this part of the key is shared by all heads."""
    v_head_dim: int = Field(0, ge=0)
    """Dimensions of a value head."""

    num_experts: int = Field(0, ge=0)
    """0 = dense."""
    top_k: int = Field(0, ge=0)
    """Experts a token takes."""
    moe: MoEConfig = MoEConfig()
    """Everything else about experts."""

    mtp_layers: int = Field(0, ge=0, le=100)
    """Multi-token prediction: so many extra blocks, each predicting one token further (DeepSeek-V3: 1)."""
    mtp_loss_coef: float = Field(0.3, ge=0)
    """Weight of the mean multi-token-prediction loss."""

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        check_shape(self)
        return self

    # ---- derived values: never stored twice

    @property
    def kv_heads(self) -> int:
        """`num_kv_heads`, or `num_heads` where it is 0."""
        return self.num_kv_heads or self.num_heads

    @property
    def has_score(self) -> bool:
        """Whether it ends in a score instead of logits."""
        return self.head == "score"

    @property
    def head_rows(self) -> int:
        """Numbers that the head gives for each token."""
        return 1 if self.has_score else self.vocab_size

    @property
    def ties_head(self) -> bool:
        """Whether there is a head that uses the embedding's matrix."""
        return self.tie_embeddings and not self.has_score

    @property
    def qk_head_dim(self) -> int:
        if self.attention == "mla":
            return self.qk_nope_head_dim + self.qk_rope_head_dim
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def value_head_dim(self) -> int:
        return self.v_head_dim if self.attention == "mla" else self.qk_head_dim

    @property
    def dense_ffn_size(self) -> int:
        return self.ffn_size or 4 * self.hidden_size

    @property
    def expert_ffn_size(self) -> int:
        """Width of one expert."""
        return self.moe.ffn_size or self.dense_ffn_size

    @property
    def rotary_dim(self) -> int:
        """How many dimensions of a head are rotated; 0 without RoPE."""
        if self.position != "rope":
            return 0
        if self.attention == "mla":
            return self.qk_rope_head_dim
        return int(self.qk_head_dim * self.rope_fraction)

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0

    def blocks(self) -> tuple[BlockSpec, ...]:
        """The layers of the network, in order (multi-token-prediction blocks not among them)."""
        return tuple(self._block(index) for index in range(self.num_layers))

    def mtp_blocks(self) -> tuple[BlockSpec, ...]:
        """The blocks of multi-token prediction: shaped like the last layer."""
        return tuple(
            self._block(self.num_layers - 1, index=self.num_layers + depth) for depth in range(self.mtp_layers)
        )

    def _block(self, like: int, index: int | None = None) -> BlockSpec:
        return BlockSpec(
            index=like if index is None else index,
            attention=self._attention(like),
            feed_forward=self._moe() if self._is_moe_layer(like) else self._feed_forward(self.dense_ffn_size),
        )

    def _attention(self, index: int) -> AttentionSpec:
        full = self.sliding_window_period > 1 and (index + 1) % self.sliding_window_period == 0
        return AttentionSpec(
            kind=self.attention,
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads if self.attention == "mla" else self.kv_heads,
            qk_head_dim=self.qk_head_dim,
            v_head_dim=self.value_head_dim,
            qkv_bias=self.qkv_bias,
            out_bias=self.attention_out_bias,
            qk_norm=self.qk_norm,
            sliding_window=0 if full else self.sliding_window,
            q_lora_rank=self.q_lora_rank,
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_head_dim=self.qk_nope_head_dim,
            qk_rope_head_dim=self.qk_rope_head_dim,
        )

    def _is_moe_layer(self, index: int) -> bool:
        moe = self.moe
        return self.is_moe and index >= moe.first_dense_layers and index % moe.layer_period == moe.layer_offset

    def _feed_forward(self, ffn_size: int) -> FeedForwardSpec:
        return FeedForwardSpec(
            hidden_size=self.hidden_size, ffn_size=ffn_size, activation=self.activation, bias=self.mlp_bias
        )

    def _moe(self) -> MoESpec:
        expert_size = self.expert_ffn_size
        shared_size = self.moe.num_shared_experts * (self.moe.shared_ffn_size or expert_size)
        return MoESpec(
            hidden_size=self.hidden_size,
            num_experts=self.num_experts,
            top_k=self.top_k,
            expert=self._feed_forward(expert_size),
            shared=self._feed_forward(shared_size) if shared_size else None,
            routing=self.moe,
        )


def check_shape(model: ModelConfig) -> None:
    """Refuses a shape that cannot be built.

    Raises:
        ConfigError: heads, KV heads, experts or latent sizes do not fit each other.
    """
    if model.attention == "gqa" and not model.head_dim and model.hidden_size % model.num_heads:
        raise ConfigError(
            f"model.num_heads = {model.num_heads} does not divide model.hidden_size = {model.hidden_size}",
            evidence="Without model.head_dim a head has hidden_size / num_heads dimensions.",
            next_step=f"Set model.head_dim, or take num_heads from {_divisors(model.hidden_size)}.",
        )
    if model.num_heads % model.kv_heads:
        raise ConfigError(
            f"model.num_kv_heads = {model.kv_heads} does not divide model.num_heads = {model.num_heads}",
            evidence="Each key/value head serves the same number of query heads.",
            next_step=f"Take num_kv_heads from {_divisors(model.num_heads)}.",
        )
    if model.position == "rope" and (model.rotary_dim < 2 or model.rotary_dim % 2):
        raise ConfigError(
            f"RoPE would rotate {model.rotary_dim} dimensions of a head (head_dim {model.qk_head_dim}, "
            f"rope_fraction {model.rope_fraction})",
            evidence="RoPE rotates pairs of dimensions.",
            next_step="Choose an even head_dim, and a model.rope_fraction that keeps it even.",
        )
    _check_rope_scaling(model.rope_scaling)
    if model.attention == "mla":
        _check_mla(model)
    if model.is_moe:
        _check_moe(model)
    elif model.top_k:
        raise ConfigError(
            f"model.top_k = {model.top_k} without experts (model.num_experts = 0)",
            next_step="Set model.num_experts, or model.top_k = 0.",
        )


def _check_rope_scaling(scaling: RopeScaling) -> None:
    bounds = {
        "llama3": ("low_freq_factor", scaling.low_freq_factor, "high_freq_factor", scaling.high_freq_factor),
        "yarn": ("beta_slow", scaling.beta_slow, "beta_fast", scaling.beta_fast),
    }
    if scaling.kind not in bounds:
        return
    lower, low, upper, high = bounds[scaling.kind]
    if low >= high:
        raise ConfigError(
            f"model.rope_scaling.{lower} = {low} is not below model.rope_scaling.{upper} = {high}",
            evidence="Frequencies between the two are blended; there must be a range between them.",
            next_step=f"The usual values are {'1 and 4' if scaling.kind == 'llama3' else '1 and 32'}.",
        )


def _check_mla(model: ModelConfig) -> None:
    sizes = {
        name: getattr(model, name) for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    }
    missing = [name for name, value in sizes.items() if value == 0]
    if missing:
        raise ConfigError(
            f"model.attention = 'mla' needs {', '.join('model.' + name for name in missing)}",
            next_step="Give their sizes, or start from a preset: deepseek_v2_lite, deepseek_v3.",
        )
    for name, wanted in (("qk_norm", False), ("sliding_window", 0), ("attention_softcap", 0.0)):
        if getattr(model, name) != wanted:
            raise ConfigError(
                f"model.{name} = {getattr(model, name)} does not go with model.attention = 'mla'",
                evidence="Latent attention has its own norms and sees the whole sequence.",
                next_step=f"Set model.{name} = {str(wanted).lower()}, or model.attention = 'gqa'.",
            )
    if model.position != "rope":
        raise ConfigError(
            f"model.position = '{model.position}' does not go with model.attention = 'mla'",
            next_step="Set model.position = 'rope'.",
        )


def _check_moe(model: ModelConfig) -> None:
    moe = model.moe
    if not 1 <= model.top_k <= model.num_experts:
        raise ConfigError(
            f"model.top_k = {model.top_k} is not between 1 and model.num_experts = {model.num_experts}",
            next_step=f"Set model.top_k to 1 ... {model.num_experts}.",
        )
    if not any(block.is_moe for block in model.blocks()):
        raise ConfigError(
            f"model.num_experts = {model.num_experts}, but no layer of {model.num_layers} is an expert layer",
            evidence=f"first_dense_layers {moe.first_dense_layers}, layer_period {moe.layer_period}, "
            f"layer_offset {moe.layer_offset}.",
            next_step="Lower model.moe.first_dense_layers or model.moe.layer_offset.",
        )
    if model.num_experts % moe.num_groups or moe.top_k_groups > moe.num_groups:
        raise ConfigError(
            f"model.moe.num_groups = {moe.num_groups}, top_k_groups = {moe.top_k_groups} do not fit "
            f"model.num_experts = {model.num_experts}",
            next_step=f"Take num_groups from {_divisors(model.num_experts)}, and top_k_groups at most as large.",
        )
    if model.top_k > model.num_experts // moe.num_groups * moe.top_k_groups:
        raise ConfigError(
            f"model.top_k = {model.top_k} experts cannot come from {moe.top_k_groups} groups of "
            f"{model.num_experts // moe.num_groups}",
            next_step="Raise model.moe.top_k_groups.",
        )


def _divisors(number: int) -> str:
    values = [value for value in range(1, number + 1) if number % value == 0]
    shown = values if len(values) <= 12 else [*values[:6], *values[-6:]]
    return ", ".join(map(str, shown))
