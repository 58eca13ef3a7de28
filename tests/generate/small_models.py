"""Tiny models of every kind of attention and feed-forward layer."""

from __future__ import annotations

from paceline.config.load import resolve
from paceline.config.model import ModelConfig
from paceline.models.transformer import Transformer

SMALL = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "ffn_size": 48, "vocab_size": 61, "max_seq_len": 64}
EXPERTS = {"num_experts": 4, "top_k": 2, "moe": {"ffn_size": 24}}
LATENT = {
    "attention": "mla",
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
SHAPES = {
    "gqa": {"num_kv_heads": 2},
    "gpt2": {"position": "learned", "norm": "layernorm", "activation": "gelu", "qkv_bias": True},
    "window": {"sliding_window": 5, "sliding_window_period": 2, "num_kv_heads": 1},
    "softcap": {"attention_softcap": 5.0, "qk_norm": True},
    "mla": LATENT,
    "moe": {**EXPERTS, "num_kv_heads": 2},
    "deepseek": {**LATENT, **EXPERTS, "moe": {"ffn_size": 24, "num_shared_experts": 1, "score": "sigmoid"}},
}


def small_model(**shape: object) -> Transformer:
    config: ModelConfig = resolve({"model": {**SMALL, **shape}}).config.model
    model = Transformer(config)
    model.init_weights(3)
    # larger weights than those of a fresh model: an error in attention must show in the logits
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(5)
    return model.eval()
