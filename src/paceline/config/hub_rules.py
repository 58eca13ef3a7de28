"""What a Hugging Face `config.json` says in more than one word, read and written.

Readers get the config and give dotted fields of `[model]`; writers do the reverse. What our model cannot do is refused
with the key, the value and the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.config.model import Activation, ModelConfig, RopeScaling

Config = Mapping[str, Any]


class UnsayableError(ValueError):
    """A key has a value that our model has no counterpart for."""

    def __init__(self, key: str, value: Any, reason: str) -> None:
        self.key, self.value, self.reason = key, value, reason
        super().__init__(f"{key} = {value!r}: {reason}")


# ---- rotary positions

_ROPE_KEYS: dict[str, dict[str, str]] = {
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "original_max_position_embeddings": "original_max_seq_len",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
    },
    "yarn": {
        "factor": "factor",
        "original_max_position_embeddings": "original_max_seq_len",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "attention_factor",
        "mscale": "mscale",
        "mscale_all_dim": "mscale_all_dim",
    },
}
_NEEDED = {"linear": {"factor"}, "llama3": set(_ROPE_KEYS["llama3"]), "yarn": {"factor"}}
_WITHOUT_EFFECT = {"truncate": True, "partial_rotary_factor": 1.0}
"""Further keys, with the one value that says what we do anyway."""


def read_rope(config: Config) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, or Transformers 5's `rope_parameters`, which holds both."""
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = scaling.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    kind = scaling.pop("rope_type", None)
    kind = scaling.pop("type", None) or kind or "default"
    fields: dict[str, Any] = {"rope_theta": float(theta)}
    if kind not in _ROPE_KEYS:
        known = ", ".join(_ROPE_KEYS)
        raise UnsayableError("rope_scaling.rope_type", kind, f"our positions know {known}")
    for key, value in scaling.items():
        wanted = _WITHOUT_EFFECT.get(key)
        if key not in _ROPE_KEYS[kind] and value is not None and (wanted is None or value != wanted):
            raise UnsayableError(f"rope_scaling.{key}", value, f"our {kind} positions have no such setting")
    missing = sorted(key for key in _NEEDED.get(kind, ()) if scaling.get(key) is None)
    if missing:
        raise UnsayableError("rope_scaling", dict(scaling), f"{kind} needs {', '.join(missing)}")
    if kind == "yarn":
        scaling.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    if kind != "default":
        fields["rope_scaling.kind"] = kind
        for key, ours in _ROPE_KEYS[kind].items():
            if scaling.get(key) is not None:
                fields[f"rope_scaling.{ours}"] = scaling[key]
    return fields


def write_rope(model: ModelConfig) -> dict[str, Any]:
    """The form that every version reads: `rope_theta`, and `rope_scaling` or null."""
    scaling = model.rope_scaling
    if scaling.kind == "none":
        return {"rope_theta": model.rope_theta, "rope_scaling": None}
    said: dict[str, Any] = {"rope_type": scaling.kind}
    for key, ours in _ROPE_KEYS[scaling.kind].items():
        value = getattr(scaling, ours)
        # of these three, 0 means that they are not set
        if value or ours not in ("attention_factor", "mscale", "mscale_all_dim"):
            said[key] = value
    return {"rope_theta": model.rope_theta, "rope_scaling": said}


def same_scaling(one: RopeScaling, other: RopeScaling) -> bool:
    """Whether two settings stretch positions alike: only what their kind reads counts."""
    names = set(_ROPE_KEYS["default" if one.kind == "none" else one.kind].values())
    return one.kind == other.kind and all(getattr(one, name) == getattr(other, name) for name in names)


# ---- attention


def read_window(config: Config) -> dict[str, Any]:
    """Mistral, Mixtral: a window in every layer, or null."""
    if len(set(config.get("layer_types") or ())) > 1:
        raise UnsayableError(
            "layer_types", config["layer_types"], "this family has one kind of attention in all layers"
        )
    return {"sliding_window": config.get("sliding_window") or 0}


def write_window(model: ModelConfig) -> dict[str, Any]:
    return {"sliding_window": model.sliding_window or None}


def read_used_window(config: Config) -> dict[str, Any]:
    """Qwen: a window where `use_sliding_window`, in the layers from `max_window_layers` on."""
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    if not window:
        return {"sliding_window": 0}
    layers = int(config["num_hidden_layers"])
    first = int(config.get("max_window_layers", 28))
    kinds = config.get("layer_types") or ["full_attention"] * min(first, layers) + ["sliding_attention"] * (
        layers - first
    )
    if set(kinds) == {"full_attention"}:
        return {"sliding_window": 0}
    if set(kinds) == {"sliding_attention"}:
        return {"sliding_window": window}
    reason = "our windows lie in all layers, or in a repeating pattern; this model has full attention in some layers"
    raise UnsayableError("max_window_layers", first, f"{reason} ({kinds.count('full_attention')} of {layers})")


def write_used_window(model: ModelConfig) -> dict[str, Any]:
    if not model.sliding_window:
        return {"use_sliding_window": False, "sliding_window": None, "max_window_layers": model.num_layers}
    return {"use_sliding_window": True, "sliding_window": model.sliding_window, "max_window_layers": 0}


def read_attention_bias(config: Config) -> dict[str, Any]:
    """One key for the biases of all four projections."""
    bias = bool(config.get("attention_bias", False))
    return {"qkv_bias": bias, "attention_out_bias": bias}


def write_attention_bias(model: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": model.qkv_bias and model.attention_out_bias}


def read_mla_heads(config: Config) -> dict[str, Any]:
    heads, kv_heads = config["num_attention_heads"], config.get("num_key_value_heads")
    if kv_heads not in (None, heads):
        raise UnsayableError("num_key_value_heads", kv_heads, f"latent attention has as many as query heads ({heads})")
    return {}


def write_mla_heads(model: ModelConfig) -> dict[str, Any]:
    return {"num_key_value_heads": model.num_heads}


# ---- experts


def read_sparse_layers(config: Config) -> dict[str, Any]:
    """Every `decoder_sparse_step`-th layer has experts, except `mlp_only_layers`."""
    step = int(config.get("decoder_sparse_step", 1))
    dense = sorted(config.get("mlp_only_layers") or ())
    if dense != list(range(len(dense))):
        raise UnsayableError(
            "mlp_only_layers", dense, "our dense layers are the first ones, or lie in a repeating pattern"
        )
    return {"moe.layer_period": step, "moe.layer_offset": step - 1, "moe.first_dense_layers": len(dense)}


def write_sparse_layers(model: ModelConfig) -> dict[str, Any]:
    return {
        "decoder_sparse_step": model.moe.layer_period,
        "mlp_only_layers": list(range(model.moe.first_dense_layers)),
    }


def read_v2_groups(config: Config) -> dict[str, Any]:
    method = config.get("topk_method") or "greedy"
    if method == "greedy":
        return {}
    if method != "group_limited_greedy":
        raise UnsayableError("topk_method", method, "DeepSeek-V2 routes by greedy or group_limited_greedy")
    groups = {"moe.num_groups": config.get("n_group") or 1, "moe.top_k_groups": config.get("topk_group") or 1}
    return groups | {"moe.group_score": "max"}


def write_v2_groups(model: ModelConfig) -> dict[str, Any]:
    moe = model.moe
    method = "group_limited_greedy" if moe.num_groups > 1 else "greedy"
    return {"topk_method": method, "n_group": moe.num_groups, "topk_group": moe.top_k_groups}


# ---- the MLP

_ACTIVATIONS: dict[str, Activation] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
}


def read_activation(config: Config) -> dict[str, Any]:
    name = config.get("activation_function") or "gelu_new"
    if name not in _ACTIVATIONS:
        raise UnsayableError("activation_function", name, f"our plain MLP has {', '.join(_ACTIVATIONS)}")
    return {"activation": _ACTIVATIONS[name]}


def write_activation(model: ModelConfig) -> dict[str, Any]:
    return {"activation_function": next((hub for hub, ours in _ACTIVATIONS.items() if ours == model.activation), "")}
