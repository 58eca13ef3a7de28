"""Which key of a Hugging Face `config.json` is which field of `[model]`, family by family, as data.

What is more than a name (rotary scaling, windows, which layers have experts) is in `hub_rules.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline.config import hub_rules as rules
from paceline.config.model import ModelConfig

REQUIRED = object()
"""Default of a key that a config must have."""


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key that says what one field says."""

    hub: str
    ours: str
    default: Any = REQUIRED
    """What a config means that leaves the key out or has null there: that family's default."""
    said_by: str = ""
    """Attribute of `ModelConfig` that has the value with zeros filled in; empty takes ``ours``."""
    also: str = ""
    """Another name that some versions give the key."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Keys that are read and written together by code."""

    read: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    """Config to fields of `[model]`, dotted. Raises ``UnsayableError``."""
    write: Callable[[ModelConfig], Mapping[str, Any]]
    keys: frozenset[str]
    """All keys that ``read`` looks at."""


@dataclass(frozen=True, kw_only=True)
class HubFamily:
    """How one `model_type` is written."""

    model_type: str
    architecture: str
    keys: tuple[Key, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ours that the family always has; dotted."""
    must: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Keys that have to have one of these values; the first is the family's default."""
    rules: tuple[Rule, ...] = ()
    ignored: frozenset[str] = frozenset()
    """Keys that do not change what the network computes in evaluation."""


def keys(text: str) -> frozenset[str]:
    """Words separated by blanks."""
    return frozenset(text.split())


EVERYWHERE = keys(
    """architectures auto_map model_type torch_dtype dtype transformers_version use_cache _name_or_path name_or_path
    bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id initializer_range
    pretraining_tp output_attentions output_hidden_states return_dict torchscript use_bfloat16 chunk_size_feed_forward
    is_decoder is_encoder_decoder id2label label2id num_labels problem_type task_specific_params tokenizer_class prefix
    gradient_checkpointing tf_legacy_loss pruned_heads keys_to_ignore_at_inference _attn_implementation
    attn_implementation _attn_implementation_autoset finetuning_task max_length min_length do_sample temperature top_k
    top_p repetition_penalty length_penalty num_beams num_return_sequences early_stopping no_repeat_ngram_size
    bad_words_ids forced_bos_token_id forced_eos_token_id remove_invalid_values suppress_tokens begin_suppress_tokens
    typical_p diversity_penalty num_beam_groups encoder_no_repeat_ngram_size exponential_decay_length_penalty
    quantization_config output_scores return_dict_in_generate cross_attention_hidden_size unsloth_version
    unsloth_fixed"""
)
"""Keys of any family that do not change logits."""

_SIZES = (
    Key(hub="num_hidden_layers", ours="num_layers"),
    Key(hub="hidden_size", ours="hidden_size"),
    Key(hub="num_attention_heads", ours="num_heads"),
    Key(hub="vocab_size", ours="vocab_size"),
    Key(hub="max_position_embeddings", ours="max_seq_len"),
    Key(hub="intermediate_size", ours="ffn_size", said_by="dense_ffn_size"),
    Key(hub="attention_dropout", ours="attention_dropout", default=0.0),
)
_KV_HEADS = Key(hub="num_key_value_heads", ours="num_kv_heads", default=0, said_by="kv_heads")
_HEAD_DIM = Key(hub="head_dim", ours="head_dim", default=0, said_by="qk_head_dim")
_AUX = Key(hub="router_aux_loss_coef", ours="moe.aux_loss_coef", default=0.001)


def _eps(default: float) -> Key:
    return Key(hub="rms_norm_eps", ours="norm_eps", default=default)


def _tied(default: bool) -> Key:
    return Key(hub="tie_word_embeddings", ours="tie_embeddings", default=default)


_SWIGLU = {"hidden_act": ("silu", "swish")}
_ROPE = Rule(read=rules.read_rope, write=rules.write_rope, keys=keys("rope_theta rope_scaling rope_parameters"))
_WINDOW = Rule(read=rules.read_window, write=rules.write_window, keys=keys("sliding_window layer_types"))
_USED_WINDOW = Rule(
    read=rules.read_used_window,
    write=rules.write_used_window,
    keys=keys("sliding_window use_sliding_window max_window_layers layer_types"),
)
_BIASES = Rule(read=rules.read_attention_bias, write=rules.write_attention_bias, keys=keys("attention_bias"))
_SPARSE = Rule(
    read=rules.read_sparse_layers, write=rules.write_sparse_layers, keys=keys("decoder_sparse_step mlp_only_layers")
)
_IGNORED_MOE = keys("output_router_logits router_jitter_noise")

LLAMA = HubFamily(
    model_type="llama",
    architecture="LlamaForCausalLM",
    keys=(
        *(*_SIZES, _KV_HEADS, _HEAD_DIM, _eps(1e-6), _tied(False)),
        Key(hub="mlp_bias", ours="mlp_bias", default=False),
    ),
    must=_SWIGLU,
    rules=(_ROPE, _BIASES),
)
MISTRAL = HubFamily(
    model_type="mistral",
    architecture="MistralForCausalLM",
    keys=(*_SIZES, _KV_HEADS, _HEAD_DIM, _eps(1e-6), _tied(False)),
    must=_SWIGLU,
    rules=(_ROPE, _WINDOW),
)
QWEN2 = HubFamily(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    keys=(*_SIZES, _KV_HEADS, _eps(1e-6), _tied(False)),
    fixed={"qkv_bias": True},
    must=_SWIGLU,
    rules=(_ROPE, _USED_WINDOW),
    ignored=keys("use_mrope"),
)
QWEN3 = HubFamily(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    keys=(
        *(*_SIZES, _KV_HEADS, _eps(1e-6), _tied(False)),
        Key(hub="head_dim", ours="head_dim", default=128, said_by="qk_head_dim"),
    ),
    fixed={"qk_norm": True},
    must=_SWIGLU,
    rules=(_ROPE, _USED_WINDOW, _BIASES),
)
QWEN3_MOE = HubFamily(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    keys=(
        *(*_SIZES, _KV_HEADS, _HEAD_DIM, _eps(1e-6), _tied(False), _AUX),
        Key(hub="num_experts", ours="num_experts", also="num_local_experts"),
        Key(hub="num_experts_per_tok", ours="top_k"),
        Key(hub="moe_intermediate_size", ours="moe.ffn_size"),
        Key(hub="norm_topk_prob", ours="moe.normalize_top_k", default=False),
    ),
    fixed={"qk_norm": True},
    must=_SWIGLU,
    rules=(_ROPE, _USED_WINDOW, _BIASES, _SPARSE),
    ignored=_IGNORED_MOE,
)
MIXTRAL = HubFamily(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    keys=(
        *(*_SIZES, _KV_HEADS, _HEAD_DIM, _eps(1e-5), _tied(False), _AUX),
        Key(hub="intermediate_size", ours="ffn_size", said_by="expert_ffn_size"),
        Key(hub="num_local_experts", ours="num_experts", also="num_experts"),
        Key(hub="num_experts_per_tok", ours="top_k"),
    ),
    must=_SWIGLU,
    rules=(_ROPE, _WINDOW),
    ignored=_IGNORED_MOE,
)

_LATENT = (
    *(*_SIZES, _tied(False)),
    Key(hub="rms_norm_eps", ours="norm_eps", default=1e-6),
    Key(hub="q_lora_rank", ours="q_lora_rank", default=0),
    Key(hub="kv_lora_rank", ours="kv_lora_rank"),
    Key(hub="qk_nope_head_dim", ours="qk_nope_head_dim"),
    Key(hub="qk_rope_head_dim", ours="qk_rope_head_dim"),
    Key(hub="v_head_dim", ours="v_head_dim"),
    Key(hub="n_routed_experts", ours="num_experts", also="num_local_experts"),
    Key(hub="num_experts_per_tok", ours="top_k"),
    Key(hub="first_k_dense_replace", ours="moe.first_dense_layers", default=0),
    Key(hub="moe_intermediate_size", ours="moe.ffn_size"),
    Key(hub="n_shared_experts", ours="moe.num_shared_experts"),
    Key(hub="norm_topk_prob", ours="moe.normalize_top_k", default=False),
    Key(hub="routed_scaling_factor", ours="moe.score_scale", default=1.0),
    Key(hub="aux_loss_alpha", ours="moe.aux_loss_coef", default=0.001),
)
_MLA = {"attention": "mla"}
# the norms of the latents have 1e-6 in the published code whatever the config says, ours have one epsilon
_MLA_MUST = {**_SWIGLU, "rms_norm_eps": (1e-6,), "moe_layer_freq": (1,), "mlp_bias": (False,)}
_MLA_IGNORED = keys("ep_size seq_aux head_dim qk_head_dim output_router_logits router_aux_loss_coef")
_LATENT_BIAS = Rule(read=rules.read_attention_bias, write=rules.write_attention_bias, keys=keys("attention_bias"))
_AS_MANY = Rule(read=rules.read_mla_heads, write=rules.write_mla_heads, keys=keys("num_key_value_heads"))

DEEPSEEK_V2 = HubFamily(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    keys=_LATENT,
    fixed=_MLA,
    must=_MLA_MUST | {"scoring_func": ("softmax",), "norm_topk_prob": (False,)},
    rules=(
        *(_ROPE, _LATENT_BIAS, _AS_MANY),
        Rule(read=rules.read_v2_groups, write=rules.write_v2_groups, keys=keys("topk_method n_group topk_group")),
    ),
    ignored=_MLA_IGNORED,
)
DEEPSEEK_V3 = HubFamily(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    keys=(
        *_LATENT,
        Key(hub="n_group", ours="moe.num_groups", default=1),
        Key(hub="topk_group", ours="moe.top_k_groups", default=1),
        Key(hub="num_nextn_predict_layers", ours="mtp_layers", default=0),
    ),
    fixed=_MLA | {"moe.score": "sigmoid", "moe.bias_balance": True, "moe.group_score": "top2_sum"},
    must=_MLA_MUST | {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "rope_interleave": (True,)},
    rules=(_ROPE, _LATENT_BIAS, _AS_MANY),
    ignored=_MLA_IGNORED,
)

GPT2 = HubFamily(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    keys=(
        Key(hub="n_layer", ours="num_layers"),
        Key(hub="n_embd", ours="hidden_size"),
        Key(hub="n_head", ours="num_heads"),
        Key(hub="vocab_size", ours="vocab_size"),
        Key(hub="n_positions", ours="max_seq_len"),
        Key(hub="n_inner", ours="ffn_size", default=0, said_by="dense_ffn_size"),
        Key(hub="layer_norm_epsilon", ours="norm_eps", default=1e-5),
        Key(hub="attn_pdrop", ours="attention_dropout", default=0.1),
        Key(hub="resid_pdrop", ours="dropout", default=0.1),
        _tied(True),
    ),
    fixed={"norm": "layernorm", "position": "learned"}
    | dict.fromkeys(("qkv_bias", "attention_out_bias", "mlp_bias"), True),
    must={
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    rules=(
        Rule(read=rules.read_activation, write=rules.write_activation, keys=keys("activation_function")),
        # one dropout of ours stands for both
        Rule(read=lambda config: {}, write=lambda model: {"embd_pdrop": model.dropout}, keys=keys("embd_pdrop")),
    ),
    ignored=keys(
        """n_ctx reorder_and_upcast_attn summary_activation summary_first_dropout summary_proj_to_labels summary_type
        summary_use_proj"""
    ),
)

FAMILIES: dict[str, HubFamily] = {
    family.model_type: family
    for family in (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE, MIXTRAL, DEEPSEEK_V2, DEEPSEEK_V3)
}
