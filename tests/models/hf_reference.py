"""Tiny random Transformers models, and their weights under our names. For tests only.

The mapping covers the families that the parity tests build; it also maps gradients, being linear.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from paceline.config.model import ModelConfig
from paceline.models.transformer import Transformer

VOCAB = 101


@dataclass(frozen=True, kw_only=True)
class Family:
    """One family: how to build the reference, and the config of ours that says the same."""

    hf_class: str
    hf: dict[str, Any]
    ours: dict[str, Any]
    hf_attention: str = "sdpa"
    rename: Callable[[dict[str, Tensor], ModelConfig], dict[str, Tensor]] = field(
        default=lambda w, c: rename_llama(w, c)
    )

    def reference(self, seed: int = 0) -> nn.Module:
        """The reference alone, with random weights everywhere (norms and biases too)."""
        import transformers

        torch.manual_seed(seed)
        config = getattr(transformers, f"{self.hf_class}Config")(
            **self.hf, use_cache=False, bos_token_id=0, eos_token_id=1
        )
        reference = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=self.hf_attention)
        reference = reference.float().eval()
        randomize(reference)
        return reference

    def build(self, seed: int = 0) -> tuple[nn.Module, Transformer]:
        """The reference, and our model with the same weights."""
        reference = self.reference(seed)
        model = Transformer(ModelConfig(vocab_size=VOCAB, **self.ours)).eval()
        model.init_weights(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))  # a parameter that the mapping forgets shows in every logit
        model.load_state_dict(self.rename(weights_of(reference), model.config), strict=True)
        return reference, model


def weights_of(reference: nn.Module) -> dict[str, Tensor]:
    tied = bool(reference.config.tie_word_embeddings)
    state = reference.state_dict()
    return {name: value for name, value in state.items() if not (tied and name == "lm_head.weight")}


def gradients_of(reference: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}


@torch.no_grad()
def randomize(model: nn.Module) -> None:
    for name, tensor in model.state_dict().items():
        if not tensor.is_floating_point():
            continue
        noise = torch.randn_like(tensor) * 0.1
        if tensor.dim() > 1:
            tensor.copy_(noise)
        else:
            tensor.add_(noise)  # around what it was: 1 for norms, 0 for biases
        assert name


_LLAMA_NAMES = [
    (r"^model\.embed_tokens\.", "embed."),
    (r"^model\.norm\.", "norm."),
    (r"^lm_head\.", "head."),
    (r"^model\.layers\.", "blocks."),
    (r"\.self_attn\.", ".attention."),
    (r"\.q_a_proj\.", ".q_down_proj."),
    (r"\.q_a_layernorm\.", ".q_norm."),
    (r"\.q_b_proj\.", ".q_up_proj."),
    (r"\.kv_a_proj_with_mqa\.", ".kv_down_proj."),
    (r"\.kv_a_layernorm\.", ".kv_norm."),
    (r"\.kv_b_proj\.", ".kv_up_proj."),
    (r"\.input_layernorm\.", ".attention_norm."),
    (r"\.mlp\.experts\.gate_up_proj$", ".feed_forward.experts.up_weight"),
    (r"\.mlp\.experts\.down_proj$", ".feed_forward.experts.down_weight"),
    (r"\.mlp\.gate\.e_score_correction_bias$", ".feed_forward.router.expert_bias"),
    (r"\.mlp\.gate\.", ".feed_forward.router."),
    (r"\.mlp\.shared_experts?\.", ".feed_forward.shared."),
    (r"\.mlp\.shared_expert_gate\.", ".feed_forward.shared_gate."),
    (r"\.mlp\.", ".feed_forward."),
]


def rename_llama(weights: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Llama and everything whose names follow it."""
    post, pre = ("attention_post_norm", "feed_forward_norm") if config.post_norm else ("feed_forward_norm", "")
    names = [
        *_LLAMA_NAMES,
        (r"\.post_attention_layernorm\.", f".{post}."),
        (r"\.pre_feedforward_layernorm\.", f".{pre}."),
        (r"\.post_feedforward_layernorm\.", ".feed_forward_post_norm."),
    ]
    out = {}
    for name, value in weights.items():
        for pattern, replacement in names:
            name = re.sub(pattern, replacement, name)
        if name.endswith("experts.up_weight"):
            value = value.unflatten(1, (2, -1))
        out[name] = value
    return out


def rename_deepseek(weights: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """As Llama's; the rotary rows are interleaved in the published weights and half-rotated in ours."""
    out = rename_llama(weights, config)
    for name, value in out.items():
        if name.endswith(("q_proj.weight", "q_up_proj.weight")):
            heads = value.unflatten(0, (config.num_heads, -1))
            out[name] = deinterleave(heads, config.qk_rope_head_dim, dim=1).flatten(0, 1)
        elif name.endswith("kv_down_proj.weight"):
            out[name] = deinterleave(value, config.qk_rope_head_dim, dim=0)
    return out


def deinterleave(value: Tensor, rope_dim: int, dim: int) -> Tensor:
    """Rows x0 y0 x1 y1 ... at the end of `dim` become x0 x1 ... y0 y1 ..."""
    keep, rope = value.split([value.shape[dim] - rope_dim, rope_dim], dim=dim)
    even = torch.arange(0, rope_dim, 2)
    return torch.cat((keep, rope.index_select(dim, torch.cat((even, even + 1)))), dim=dim)


_GPT2_NAMES = [
    (r"^transformer\.wte\.", "embed."),
    (r"^transformer\.wpe\.weight", "embed.position_weight"),
    (r"^transformer\.ln_f\.", "norm."),
    (r"^transformer\.h\.", "blocks."),
    (r"\.ln_1\.", ".attention_norm."),
    (r"\.ln_2\.", ".feed_forward_norm."),
    (r"\.attn\.c_proj\.", ".attention.o_proj."),
    (r"\.mlp\.c_fc\.", ".feed_forward.up_proj."),
    (r"\.mlp\.c_proj\.", ".feed_forward.down_proj."),
]


def rename_gpt2(weights: dict[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """GPT-2 stores matrices as [in, out], and q, k, v as one."""
    out = {}
    for name, value in weights.items():
        for pattern, replacement in _GPT2_NAMES:
            name = re.sub(pattern, replacement, name)
        is_matrix = ".attn." in name or "_proj." in name
        value = value.T if is_matrix and value.dim() == 2 else value
        if ".attn.c_attn." in name:
            for part, chunk in zip("qkv", value.chunk(3), strict=True):
                out[name.replace(".attn.c_attn.", f".attention.{part}_proj.")] = chunk
        else:
            out[name] = value
    return out


# ---- the families

_HF = {
    "vocab_size": VOCAB,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
_OURS = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_size": 96,
    "max_seq_len": 128,
    "norm_eps": 1e-6,
}
_HF_MLA = {
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
}
_OURS_MLA = {
    "num_kv_heads": 0,
    "attention": "mla",
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "num_experts": 8,
    "top_k": 2,
}


def _rope(theta: float = 10000.0, **scaling: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **scaling}}


FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        hf_class="GPT2",
        hf={"vocab_size": VOCAB, "n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 128},
        ours=_OURS
        | {
            "num_kv_heads": 4,
            "ffn_size": 256,
            "norm": "layernorm",
            "norm_eps": 1e-5,
            "activation": "gelu_tanh",
            "position": "learned",
            "qkv_bias": True,
            "attention_out_bias": True,
            "mlp_bias": True,
            "tie_embeddings": True,
        },
        rename=rename_gpt2,
    ),
    "llama": Family(hf_class="Llama", hf=_HF | _rope(500000.0), ours=_OURS | {"rope_theta": 500000.0}),
    "llama_tied": Family(
        hf_class="Llama", hf=_HF | _rope() | {"tie_word_embeddings": True}, ours=_OURS | {"tie_embeddings": True}
    ),
    # an ignored epsilon would show: 1e-2 is large beside the mean square of these states
    "llama_eps": Family(hf_class="Llama", hf=_HF | _rope() | {"rms_norm_eps": 1e-2}, ours=_OURS | {"norm_eps": 1e-2}),
    "llama_mqa": Family(hf_class="Llama", hf=_HF | {"num_key_value_heads": 1}, ours=_OURS | {"num_kv_heads": 1}),
    "llama_linear": Family(
        hf_class="Llama",
        hf=_HF | _rope(rope_type="linear", factor=4.0),
        ours=_OURS | {"rope_scaling": {"kind": "linear", "factor": 4.0}},
    ),
    "llama_yarn": Family(
        hf_class="Llama",
        hf=_HF | _rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=32),
        ours=_OURS | {"rope_scaling": {"kind": "yarn", "factor": 4.0, "original_max_seq_len": 32}},
    ),
    "mistral": Family(hf_class="Mistral", hf=_HF | _rope() | {"sliding_window": 8}, ours=_OURS | {"sliding_window": 8}),
    "qwen2": Family(hf_class="Qwen2", hf=_HF | _rope(), ours=_OURS | {"qkv_bias": True}),
    "qwen3": Family(
        hf_class="Qwen3", hf=_HF | _rope() | {"head_dim": 32}, ours=_OURS | {"head_dim": 32, "qk_norm": True}
    ),
    "gemma2": Family(
        hf_class="Gemma2",
        hf=_HF
        | _rope()
        | {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 24, "tie_word_embeddings": True},
        ours=_OURS
        | {
            "head_dim": 16,
            "norm_unit_offset": True,
            "post_norm": True,
            "activation": "geglu",
            "sliding_window": 8,
            "sliding_window_period": 2,
            "attention_softcap": 50.0,
            "logit_softcap": 30.0,
            "attention_scale": 24**-0.5,
            "embedding_scale": True,
            "tie_embeddings": True,
        },
        hf_attention="eager",
    ),
    "mixtral": Family(
        hf_class="Mixtral",
        hf=_HF | _rope() | {"num_local_experts": 4, "num_experts_per_tok": 2, "rms_norm_eps": 1e-6},
        ours=_OURS | {"num_experts": 4, "top_k": 2},
    ),
    "qwen2_moe": Family(
        hf_class="Qwen2Moe",
        hf=_HF
        | _rope()
        | {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "norm_topk_prob": False,
        },
        ours=_OURS
        | {
            "qkv_bias": True,
            "num_experts": 8,
            "top_k": 2,
            "moe": {
                "ffn_size": 32,
                "num_shared_experts": 1,
                "shared_ffn_size": 48,
                "shared_gate": True,
                "normalize_top_k": False,
            },
        },
    ),
    "qwen3_moe": Family(
        hf_class="Qwen3Moe",
        hf=_HF
        | _rope()
        | {
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
        ours=_OURS | {"head_dim": 16, "qk_norm": True, "num_experts": 8, "top_k": 2, "moe": {"ffn_size": 32}},
    ),
    "deepseek_v2": Family(
        hf_class="DeepseekV2",
        hf=_HF
        | _HF_MLA
        | _rope()
        | {
            "q_lora_rank": None,
            "n_shared_experts": 2,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.5,
        },
        ours=_OURS
        | _OURS_MLA
        | {
            "moe": {
                "first_dense_layers": 1,
                "ffn_size": 32,
                "num_shared_experts": 2,
                "normalize_top_k": False,
                "score_scale": 1.5,
                "num_groups": 4,
                "top_k_groups": 2,
                "group_score": "max",
            }
        },
        rename=rename_deepseek,
    ),
    "deepseek_v3": Family(
        hf_class="DeepseekV3",
        hf=_HF
        | _HF_MLA
        | _rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, mscale=1.0, mscale_all_dim=0.8)
        | {"q_lora_rank": 32, "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
        ours=_OURS
        | _OURS_MLA
        | {
            "q_lora_rank": 32,
            "rope_scaling": {
                "kind": "yarn",
                "factor": 4.0,
                "original_max_seq_len": 32,
                "mscale": 1.0,
                "mscale_all_dim": 0.8,
            },
            "moe": {
                "first_dense_layers": 1,
                "ffn_size": 32,
                "num_shared_experts": 1,
                "score": "sigmoid",
                "score_scale": 2.5,
                "num_groups": 4,
                "top_k_groups": 2,
                "bias_balance": True,
            },
        },
        rename=rename_deepseek,
    ),
}
