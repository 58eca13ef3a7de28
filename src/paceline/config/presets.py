"""Published shapes by name: what `model.preset` stands for.

A preset is a plain mapping of `[model]` fields; fields that a recipe gives beside `preset` win. Sizes are those of the
published papers and model configurations; where a paper's own numbers do not fit each other, a comment says what was
taken. Coefficients of router losses are for losses summed over layers.

Torch-free.
"""

from __future__ import annotations

import copy
import difflib
from typing import Any, TypeAlias

from paceline.errors import ConfigError

Fields: TypeAlias = dict[str, Any]


def preset_names() -> list[str]:
    """All names, sorted. Those of plugins are in `config.plugins.Registry`."""
    return sorted(_PRESETS)


def preset(name: str) -> Fields:
    """The `[model]` fields of a preset; the caller may change what it gets.

    Raises:
        ConfigError: no such preset; names the nearest ones.
    """
    if name in _PRESETS:
        return copy.deepcopy(_PRESETS[name])
    near = difflib.get_close_matches(name, _PRESETS, n=3, cutoff=0.5)
    raise ConfigError(
        f"model.preset = '{name}' is not a known preset",
        evidence=f"Near it: {', '.join(near)}." if near else "",
        next_step="`paceline train --presets` lists all of them; without a preset, give model.num_layers and so on.",
    )


# ---- families: what their members share


def _gpt(num_layers: int, hidden_size: int, num_heads: int, *, max_seq_len: int = 2048) -> Fields:
    """GPT-2 (its released code) and GPT-3 (arXiv:2005.14165, table 2.1)."""
    return {
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "ffn_size": 4 * hidden_size,
        "vocab_size": 50257,
        "max_seq_len": max_seq_len,
        "norm": "layernorm",
        "activation": "gelu_tanh",
        "position": "learned",
        "qkv_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
        "tie_embeddings": True,
    }


def _llama(num_layers: int, hidden_size: int, num_heads: int, num_kv_heads: int, ffn_size: int, **more: Any) -> Fields:
    """RMSNorm, SwiGLU, RoPE, no biases: what most open models have in common."""
    return {
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "ffn_size": ffn_size,
        "vocab_size": 32000,
        "max_seq_len": 4096,
        "norm_eps": 1e-5,
        **more,
    }


def _llama3(*sizes: int, scaling_factor: float = 0.0, **more: Any) -> Fields:
    """Llama 3 (no scaling, 8k), 3.1 (factor 8, 128k) and 3.2 (factor 32, 128k)."""
    fields = _llama(*sizes, vocab_size=128256, max_seq_len=8192, rope_theta=500000.0, **more)
    if scaling_factor:
        fields["max_seq_len"] = 131072
        fields["rope_scaling"] = {
            "kind": "llama3",
            "factor": scaling_factor,
            "original_max_seq_len": 8192,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        }
    return fields


def _qwen2(*sizes: int, vocab_size: int = 151936, tie: bool = False, max_seq_len: int = 32768) -> Fields:
    return _llama(
        *sizes,
        vocab_size=vocab_size,
        max_seq_len=max_seq_len,
        norm_eps=1e-6,
        rope_theta=1000000.0,
        qkv_bias=True,
        tie_embeddings=tie,
    )


def _qwen3(*sizes: int, tie: bool = False, **more: Any) -> Fields:
    return _llama(
        *sizes,
        head_dim=128,
        vocab_size=151936,
        max_seq_len=40960,
        norm_eps=1e-6,
        rope_theta=1000000.0,
        qk_norm=True,
        tie_embeddings=tie,
        **more,
    )


def _qwen3_moe(*sizes: int, expert_size: int) -> Fields:
    """`sizes` as in `_llama`; 128 experts, top 8."""
    moe = {"ffn_size": expert_size, "aux_loss_coef": 0.001}
    return _qwen3(*sizes, num_experts=128, top_k=8, moe=moe)


def _mixtral(*sizes: int, max_seq_len: int) -> Fields:
    return _llama(
        *sizes,
        max_seq_len=max_seq_len,
        rope_theta=1000000.0,
        num_experts=8,
        top_k=2,
        moe={"aux_loss_coef": 0.01},
    )


def _gemma2(*sizes: int, head_dim: int, query_scalar: int) -> Fields:
    return _llama(
        *sizes,
        head_dim=head_dim,
        vocab_size=256000,
        max_seq_len=8192,
        norm_eps=1e-6,
        norm_unit_offset=True,
        post_norm=True,
        activation="geglu",
        sliding_window=4096,
        sliding_window_period=2,
        attention_softcap=50.0,
        logit_softcap=30.0,
        attention_scale=query_scalar**-0.5,
        embedding_scale=True,
        tie_embeddings=True,
    )


def _switch(num_experts: int) -> Fields:
    """Switch-Base (arXiv:2101.03961) as a decoder: the 12 + 12 layers of the encoder-decoder become 24, every second
    one with experts, with RoPE in place of relative biases; no cross-attention."""
    return {
        "num_layers": 24,
        "hidden_size": 768,
        "num_heads": 12,
        "head_dim": 64,
        "ffn_size": 3072,
        "vocab_size": 32128,
        "max_seq_len": 2048,
        "norm_eps": 1e-6,
        "activation": "relu",
        "num_experts": num_experts,
        "top_k": 1,
        "moe": {
            "layer_period": 2,
            "layer_offset": 1,
            "normalize_top_k": False,
            "capacity_factor": 1.25,
            "eval_capacity_factor": 2.0,
            "jitter": 0.01,
            "aux_loss_coef": 0.01,
            "z_loss_coef": 0.001,
        },
    }


def _deepseek(*sizes: int, vocab_size: int, mscale: float, **more: Any) -> Fields:
    """`sizes`: layers, hidden, heads, dense ffn. Latent attention, yarn from 4k by a factor of 40."""
    num_layers, hidden_size, num_heads, ffn_size = sizes
    fields = _llama(num_layers, hidden_size, num_heads, 0, ffn_size, vocab_size=vocab_size, max_seq_len=163840)
    return fields | {
        "norm_eps": 1e-6,
        "attention": "mla",
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope_scaling": {
            "kind": "yarn",
            "factor": 40.0,
            "original_max_seq_len": 4096,
            "mscale": mscale,
            "mscale_all_dim": mscale,
        },
        **more,
    }


# ---- the shapes

_PRESETS: dict[str, Fields] = {
    "gpt2": _gpt(12, 768, 12, max_seq_len=1024),
    "gpt2_medium": _gpt(24, 1024, 16, max_seq_len=1024),
    "gpt2_large": _gpt(36, 1280, 20, max_seq_len=1024),
    "gpt2_xl": _gpt(48, 1600, 25, max_seq_len=1024),
    "gpt3_125m": _gpt(12, 768, 12),
    "gpt3_350m": _gpt(24, 1024, 16),
    "gpt3_760m": _gpt(24, 1536, 16),
    # the paper prints 24 heads of 128 for a width of 2048; 16 are what fits
    "gpt3_1.3b": _gpt(24, 2048, 16),
    "gpt3_2.7b": _gpt(32, 2560, 32),
    "gpt3_6.7b": _gpt(32, 4096, 32),
    # the paper prints a width of 5140 for 40 heads of 128
    "gpt3_13b": _gpt(40, 5120, 40),
    "gpt3_175b": _gpt(96, 12288, 96),
    # the 13B of the benchmarks: a GPT width with rotary positions, RMSNorm, no biases, untied
    "gpt_13b": _llama(40, 5120, 40, 40, 20480, vocab_size=50304, max_seq_len=2048, activation="gelu"),
    "llama2_7b": _llama(32, 4096, 32, 32, 11008),
    "llama2_13b": _llama(40, 5120, 40, 40, 13824),
    "llama2_70b": _llama(80, 8192, 64, 8, 28672),
    # Llama 3.2 1B has tied embeddings; this is the untied shape of the benchmarks
    "llama3_1b": _llama3(16, 2048, 32, 8, 8192, scaling_factor=32.0),
    "llama3_3b": _llama3(28, 3072, 24, 8, 8192, scaling_factor=32.0, tie_embeddings=True),
    "llama3_8b": _llama3(32, 4096, 32, 8, 14336),
    "llama3_70b": _llama3(80, 8192, 64, 8, 28672),
    "llama3_405b": _llama3(126, 16384, 128, 8, 53248, scaling_factor=8.0),
    "mistral_7b": _llama(32, 4096, 32, 8, 14336, max_seq_len=32768, sliding_window=4096),
    "mixtral_8x7b": _mixtral(32, 4096, 32, 8, 14336, max_seq_len=32768),
    "mixtral_8x22b": _mixtral(56, 6144, 48, 8, 16384, max_seq_len=65536),
    "qwen2.5_0.5b": _qwen2(24, 896, 14, 2, 4864, tie=True),
    "qwen2.5_1.5b": _qwen2(28, 1536, 12, 2, 8960, tie=True),
    "qwen2.5_3b": _qwen2(36, 2048, 16, 2, 11008, tie=True),
    "qwen2.5_7b": _qwen2(28, 3584, 28, 4, 18944, vocab_size=152064, max_seq_len=131072),
    "qwen2.5_14b": _qwen2(48, 5120, 40, 8, 13824, vocab_size=152064, max_seq_len=131072),
    "qwen2.5_32b": _qwen2(64, 5120, 40, 8, 27648, vocab_size=152064, max_seq_len=131072),
    "qwen2.5_72b": _qwen2(80, 8192, 64, 8, 29568, vocab_size=152064, max_seq_len=131072),
    "qwen3_0.6b": _qwen3(28, 1024, 16, 8, 3072, tie=True),
    "qwen3_1.7b": _qwen3(28, 2048, 16, 8, 6144, tie=True),
    "qwen3_4b": _qwen3(36, 2560, 32, 8, 9728, tie=True),
    "qwen3_8b": _qwen3(36, 4096, 32, 8, 12288),
    "qwen3_14b": _qwen3(40, 5120, 40, 8, 17408),
    "qwen3_32b": _qwen3(64, 5120, 64, 8, 25600),
    "qwen3_30b_a3b": _qwen3_moe(48, 2048, 32, 4, 6144, expert_size=768),
    "qwen3_235b_a22b": _qwen3_moe(94, 4096, 64, 4, 12288, expert_size=1536),
    # the MoE of the benchmarks: the widths of qwen3_30b_a3b, 12 layers
    "qwen3_moe_12l": _qwen3_moe(12, 2048, 32, 4, 6144, expert_size=768),
    "gemma2_2b": _gemma2(26, 2304, 8, 4, 9216, head_dim=256, query_scalar=256),
    "gemma2_9b": _gemma2(42, 3584, 16, 8, 14336, head_dim=256, query_scalar=256),
    "gemma2_27b": _gemma2(46, 4608, 32, 16, 36864, head_dim=128, query_scalar=144),
    **{f"switch_base_{number}": _switch(number) for number in (8, 16, 32, 64, 128, 256)},
    "deepseek_v2_lite": _deepseek(
        *(27, 2048, 16, 10944),
        vocab_size=102400,
        mscale=0.707,
        num_experts=64,
        top_k=6,
        moe={
            "first_dense_layers": 1,
            "ffn_size": 1408,
            "num_shared_experts": 2,
            "normalize_top_k": False,
            "aux_loss_coef": 0.001,
        },
    ),
    "deepseek_v2": _deepseek(
        *(60, 5120, 128, 12288),
        vocab_size=102400,
        mscale=0.707,
        q_lora_rank=1536,
        num_experts=160,
        top_k=6,
        moe={
            "first_dense_layers": 1,
            "ffn_size": 1536,
            "num_shared_experts": 2,
            "normalize_top_k": False,
            "score_scale": 16.0,
            "num_groups": 8,
            "top_k_groups": 3,
            "group_score": "max",
            "aux_loss_coef": 0.003,
        },
    ),
    # without multi-token prediction (671B); model.mtp_layers = 1 trains as the paper did
    "deepseek_v3": _deepseek(
        *(61, 7168, 128, 18432),
        vocab_size=129280,
        mscale=1.0,
        q_lora_rank=1536,
        num_experts=256,
        top_k=8,
        moe={
            "first_dense_layers": 3,
            "ffn_size": 2048,
            "num_shared_experts": 1,
            "score": "sigmoid",
            "score_scale": 2.5,
            "num_groups": 8,
            "top_k_groups": 4,
            "bias_balance": True,
            "bias_update_rate": 0.001,
            "aux_loss_coef": 0.0001,
        },
    ),
    # small ones that train on a CPU
    "tiny_gpt": _gpt(4, 128, 4, max_seq_len=256) | {"vocab_size": 512},
    "tiny_llama": _llama(4, 128, 4, 2, 384, vocab_size=512, max_seq_len=512),
    "tiny_moe": _llama(4, 128, 4, 2, 384, vocab_size=512, max_seq_len=512)
    | {"num_experts": 8, "top_k": 2, "moe": {"ffn_size": 96, "aux_loss_coef": 0.01}},
    "tiny_switch": _switch(4)
    | {"num_layers": 4, "hidden_size": 128, "num_heads": 4, "head_dim": 32, "ffn_size": 256, "vocab_size": 512},
    "tiny_deepseek": _llama(4, 128, 4, 0, 384, vocab_size=512, max_seq_len=512)
    | {
        "attention": "mla",
        "q_lora_rank": 64,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "num_experts": 8,
        "top_k": 2,
        "moe": {
            "first_dense_layers": 1,
            "ffn_size": 96,
            "num_shared_experts": 1,
            "score": "sigmoid",
            "num_groups": 4,
            "top_k_groups": 2,
            "bias_balance": True,
            "aux_loss_coef": 0.0001,
        },
        "mtp_layers": 1,
    },
}
