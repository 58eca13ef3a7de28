"""Megatron-LM's arguments, as a checkpoint keeps them, as fields of `[model]`, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from paceline.config.hub import differences, nested
from paceline.config.model import ModelConfig
from paceline.errors import ConfigError

MUST_BE_OFF = """
    rotary_interleaved qk_l2_norm attention_output_gate experimental_attention_variant hybrid_override_pattern
    hybrid_layer_pattern linear_attention_freq heterogeneous_layers_config_path no_rope_freq moe_latent_size
    multi_latent_v2 squared_relu quick_geglu fp32_residual_connection_scale nope_layer_interval use_mup
    moe_router_fusion_with_bias decoder_first_pipeline_moe glu_linear_offset activation_func_clamp_value is_hybrid_model
    mamba_state_dim spec_is_custom
""".split()  # noqa: SIM905
"""Arguments that change what the network computes, in a way that ours cannot."""


def model_of(args: Mapping[str, Any], vocab_size: int) -> ModelConfig:
    """The model that arguments describe.

    Args:
        vocab_size: rows of the embedding that is stored.

    Raises:
        ConfigError: a size is missing, or an argument asks for what our model cannot do; all are listed.
    """
    problems = [f"{name} = {args[name]!r}: ours has no counterpart" for name in MUST_BE_OFF if args.get(name)]
    softmax = args.get("softmax_type")
    if isinstance(softmax, str) and softmax != "vanilla":
        problems.append(f"softmax_type = {softmax!r}: ours computes the plain one")
    missing = [name for name in ("num_layers", "hidden_size", "num_attention_heads") if not args.get(name)]
    problems += [f"{name} is missing" for name in missing]
    fields: dict[str, Any] = {}
    if not problems:
        try:
            fields = _dense(args, vocab_size) | _positions(args)
            fields |= _latent(args) if args.get("multi_latent_attention") else {}
            fields |= _experts(args) if args.get("num_experts") else {}
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError(
            f"this Megatron-LM model cannot be built: {problems[0]}",
            evidence="\n  ".join(problems[1:]),
            next_step="Describe the model another way: `paceline convert ... --like FOLDER`, a Hugging Face folder or "
            "a run of the same shape.",
        )
    try:
        return ModelConfig.model_validate(nested(fields))
    except ValidationError as error:
        raise ConfigError(
            "Megatron-LM's arguments do not describe a model of ours",
            evidence="; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()[:3]),
            next_step="Describe the model with --like FOLDER.",
        ) from None


def _dense(args: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    bias = bool(args.get("add_bias_linear", not args.get("disable_bias_linear", False)))
    heads = args["num_attention_heads"]
    grouped = args.get("group_query_attention") or args.get("num_query_groups") not in (None, 1)
    return {
        "num_layers": args["num_layers"],
        "hidden_size": args["hidden_size"],
        "num_heads": heads,
        "num_kv_heads": (args.get("num_query_groups") or heads) if grouped else heads,
        "head_dim": args.get("kv_channels") or 0,
        "ffn_size": args.get("ffn_hidden_size") or 0,
        "vocab_size": vocab_size,
        "max_seq_len": max(args.get("max_position_embeddings") or 0, args.get("seq_length") or 0, 2),
        "norm": "rmsnorm" if args.get("normalization") == "RMSNorm" else "layernorm",
        "norm_eps": args.get("norm_epsilon") or args.get("layernorm_epsilon") or 1e-5,
        "norm_unit_offset": bool(args.get("apply_layernorm_1p")),
        "activation": _activation(args),
        "qkv_bias": bias or bool(args.get("add_qkv_bias")),
        "attention_out_bias": bias,
        "mlp_bias": bias,
        "qk_norm": bool(args.get("qk_layernorm")),
        "tie_embeddings": not args.get("untie_embeddings_and_output_weights"),
        "dropout": args.get("hidden_dropout") or 0.0,
        "attention_dropout": args.get("attention_dropout") or 0.0,
        "sliding_window": _window(args),
        "sliding_window_period": args.get("window_attn_skip_freq") or 1,
    }


def _activation(args: Mapping[str, Any]) -> str:
    if args.get("swiglu"):
        return "swiglu"
    # the fused kernel of bias and GELU computes the tanh form, plain GELU the exact one
    fused = args.get("bias_gelu_fusion", True) and args.get("add_bias_linear", True)
    return "gelu_tanh" if fused or args.get("openai_gelu") else "gelu"


def _window(args: Mapping[str, Any]) -> int:
    window = args.get("window_size")
    if not window or window in ((-1, -1), [-1, -1]):
        return 0
    if not isinstance(args.get("window_attn_skip_freq"), int | None):
        raise ValueError("window_attn_skip_freq: our windows lie in all layers, or in a repeating pattern")
    # (left, right): a token sees so many before it, beside itself
    return int(window[0]) + 1


def _positions(args: Mapping[str, Any]) -> dict[str, Any]:
    kind = args.get("position_embedding_type") or "learned_absolute"
    if args.get("use_rotary_position_embeddings"):
        kind = "rope"
    if kind in ("learned_absolute", "none"):
        return {"position": "learned" if kind == "learned_absolute" else "none"}
    if kind not in ("rope", "yarn"):
        raise ValueError(f"position_embedding_type = {kind!r}: ours are learned_absolute, rope and none")
    fields: dict[str, Any] = {
        "rope_theta": float(args.get("rotary_base") or 10000.0),
        "rope_fraction": float(args.get("rotary_percent") or 1.0),
    }
    if args.get("use_rope_scaling"):
        # Megatron fixes the other three numbers of Llama 3.1
        fields |= {"rope_scaling.kind": "llama3", "rope_scaling.factor": args.get("rope_scaling_factor") or 8.0}
    elif args.get("rotary_seq_len_interpolation_factor"):
        fields |= {"rope_scaling.kind": "linear", "rope_scaling.factor": args["rotary_seq_len_interpolation_factor"]}
    elif kind == "yarn" or (args.get("multi_latent_attention") and args.get("rope_type") == "yarn"):
        fields["rope_scaling.kind"] = "yarn"
        names = _YARN_LATENT if args.get("multi_latent_attention") else _YARN
        fields |= {f"rope_scaling.{ours}": args[name] for ours, name in names.items() if args.get(name) is not None}
    return fields


_YARN_LATENT = {
    "factor": "rotary_scaling_factor",
    "original_max_seq_len": "original_max_position_embeddings",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
}
_YARN = {ours: f"yarn_{name}" for ours, name in _YARN_LATENT.items()}


def _latent(args: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "attention": "mla",
        "head_dim": 0,
        "num_kv_heads": 0,
        "qk_norm": False,
        # its projections to latents have none
        "qkv_bias": False,
        "q_lora_rank": args.get("q_lora_rank") or 0,
        "kv_lora_rank": args.get("kv_lora_rank") or 0,
        "qk_nope_head_dim": args.get("qk_head_dim") or 0,
        "qk_rope_head_dim": args.get("qk_pos_emb_head_dim") or 0,
        "v_head_dim": args.get("v_head_dim") or 0,
    }


def _experts(args: Mapping[str, Any]) -> dict[str, Any]:
    score = args.get("moe_router_score_function") or "softmax"
    top_k = int(args.get("moe_router_topk") or 2)
    fields = {
        "num_experts": args["num_experts"],
        "top_k": top_k,
        "moe.ffn_size": args.get("moe_ffn_hidden_size") or args.get("ffn_hidden_size") or 0,
        "moe.score": score,
        "moe.score_scale": args.get("moe_router_topk_scaling_factor") or 1.0,
        # softmax over the chosen is the softmax over all, divided by the sum of the chosen
        "moe.normalize_top_k": top_k > 1 if score == "sigmoid" else not args.get("moe_router_pre_softmax"),
        "moe.bias_balance": bool(args.get("moe_router_enable_expert_bias")),
        "moe.shared_gate": bool(args.get("moe_shared_expert_gate")),
        "moe.aux_loss_coef": _first(args.get("moe_aux_loss_coeff")),
        "moe.z_loss_coef": args.get("moe_z_loss_coeff") or 0.0,
    }
    if shared := args.get("moe_shared_expert_intermediate_size"):
        fields |= {"moe.num_shared_experts": 1, "moe.shared_ffn_size": shared}
    groups = args.get("moe_router_num_groups") or 1
    if groups > 1:
        chosen = args.get("moe_router_group_topk") or 1
        kinds = {1: "max", 2: "top2_sum"}
        if top_k // chosen not in kinds:
            raise ValueError(
                f"moe_router_group_topk = {chosen} of top {top_k}: a group would be judged by its best "
                f"{top_k // chosen} experts, ours by its best one or two"
            )
        fields |= {"moe.num_groups": groups, "moe.top_k_groups": chosen, "moe.group_score": kinds[top_k // chosen]}
    return fields | _layers(args.get("moe_layer_freq", 1), int(args["num_layers"]))


def _first(value: Any) -> float:
    return float((value[0] if value else 0.0) if isinstance(value, list | tuple) else value or 0.0)


def _layers(frequency: Any, layers: int) -> dict[str, Any]:
    """A period, or a list with 0 or 1 for each layer."""
    if isinstance(frequency, int):
        return {"moe.layer_period": frequency}
    pattern = list(frequency)
    first = pattern.index(1) if 1 in pattern else layers
    for period in range(1, layers + 1):
        offset = first % period
        if all(bool(kind) == (at >= first and at % period == offset) for at, kind in enumerate(pattern)):
            return {"moe.layer_period": period, "moe.layer_offset": offset, "moe.first_dense_layers": first}
    raise ValueError(f"moe_layer_freq = {pattern}: our dense layers are the first ones, or in a repeating pattern")


# ---- the way back


def args_of(model: ModelConfig) -> dict[str, Any]:
    """Arguments that describe ``model``, with those names that a checkpoint of Megatron-LM has.

    Raises:
        ConfigError: there are none for some fields, which are listed.
    """
    moe, scaling = model.moe, model.rope_scaling
    bias = model.attention_out_bias
    args: dict[str, Any] = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.dense_ffn_size,
        "num_attention_heads": model.num_heads,
        "group_query_attention": model.kv_heads != model.num_heads,
        "num_query_groups": model.kv_heads,
        "kv_channels": model.qk_head_dim,
        "max_position_embeddings": model.max_seq_len,
        "seq_length": model.max_seq_len,
        "padded_vocab_size": model.vocab_size,
        "normalization": "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
        "norm_epsilon": model.norm_eps,
        "apply_layernorm_1p": model.norm_unit_offset,
        "swiglu": model.activation == "swiglu",
        "openai_gelu": model.activation == "gelu_tanh",
        "bias_gelu_fusion": False,
        "add_bias_linear": bias,
        "add_qkv_bias": model.qkv_bias and not bias,
        "qk_layernorm": model.qk_norm or model.attention == "mla",
        "untie_embeddings_and_output_weights": not model.tie_embeddings,
        "hidden_dropout": model.dropout,
        "attention_dropout": model.attention_dropout,
        "init_method_std": model.init_std,
        "add_position_embedding": model.position == "learned",
        "position_embedding_type": {"rope": "rope", "learned": "learned_absolute", "none": "none"}[model.position],
        "rotary_base": int(model.rope_theta) if model.rope_theta == int(model.rope_theta) else model.rope_theta,
        "rotary_percent": model.rope_fraction,
        "rotary_interleaved": False,
        "window_size": (model.sliding_window - 1, 0) if model.sliding_window else None,
        "window_attn_skip_freq": model.sliding_window_period if model.sliding_window_period > 1 else None,
        "use_rope_scaling": scaling.kind == "llama3",
        "rope_scaling_factor": scaling.factor if scaling.kind == "llama3" else 8.0,
        "rotary_seq_len_interpolation_factor": scaling.factor if scaling.kind == "linear" else None,
        "multi_latent_attention": model.attention == "mla",
    }
    if model.attention == "mla":
        args |= {
            "q_lora_rank": model.q_lora_rank or None,
            "kv_lora_rank": model.kv_lora_rank,
            "qk_head_dim": model.qk_nope_head_dim,
            "qk_pos_emb_head_dim": model.qk_rope_head_dim,
            "v_head_dim": model.v_head_dim,
            "kv_channels": model.hidden_size // model.num_heads,
            "rope_type": "yarn" if scaling.kind == "yarn" else "rope",
        }
    if scaling.kind == "yarn":
        if model.attention != "mla":
            args["position_embedding_type"] = "yarn"
        names = _YARN_LATENT if model.attention == "mla" else _YARN
        args |= {name: getattr(scaling, ours) for ours, name in names.items()}
    if model.is_moe:
        args |= {
            "num_experts": model.num_experts,
            "moe_router_topk": model.top_k,
            "moe_ffn_hidden_size": model.expert_ffn_size,
            "moe_router_score_function": moe.score,
            "moe_router_pre_softmax": moe.score == "softmax" and not moe.normalize_top_k,
            "moe_router_topk_scaling_factor": moe.score_scale,
            "moe_router_enable_expert_bias": moe.bias_balance,
            "moe_shared_expert_intermediate_size": moe.num_shared_experts
            * (moe.shared_ffn_size or model.expert_ffn_size)
            or None,
            "moe_shared_expert_gate": moe.shared_gate,
            "moe_router_num_groups": moe.num_groups if moe.num_groups > 1 else None,
            "moe_router_group_topk": moe.top_k_groups if moe.num_groups > 1 else None,
            "moe_aux_loss_coeff": moe.aux_loss_coef,
            "moe_z_loss_coeff": moe.z_loss_coef or None,
            "moe_layer_freq": 1
            if all(block.is_moe for block in model.blocks())
            else [int(block.is_moe) for block in model.blocks()],
        }
    unsaid = differences(model, model_of(args, model.vocab_size))
    if unsaid:
        raise ConfigError(
            "Megatron-LM has no arguments for what this model is",
            evidence=f"It cannot say {'; '.join(unsaid)}.",
            next_step="Keep it as a Paceline checkpoint, or convert it to a Hugging Face folder.",
        )
    return args
