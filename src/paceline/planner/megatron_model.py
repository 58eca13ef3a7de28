"""What model do Megatron-LM's flags describe? As the fields of `[model]`, with Megatron's own defaults."""

from __future__ import annotations

import ast
import re
from typing import Any

from paceline.errors import ConfigError
from paceline.planner.megatron_flags import Flags

_VOCABULARIES = (
    (r"llama-?3|tiktoken", 128256),
    (r"llama|mistral|mixtral", 32000),
    (r"qwen", 151936),
    (r"deepseek-?v2", 102400),
    (r"deepseek", 129280),
    (r"gpt2|gpt-2", 50257),
)
"""By what a tokenizer is called."""


def model_fields(flags: Flags) -> dict[str, Any]:
    """The fields of `[model]`.

    Raises:
        ConfigError: a size is missing or no number.
    """
    for name in ("num-layers", "hidden-size", "num-attention-heads"):
        if not flags.on(name):
            raise ConfigError(
                f"--{name} is not given",
                evidence="Without it there is no telling what the model costs.",
                next_step=f"Add --{name}. A run that reads it from a checkpoint (--use-checkpoint-args) must be told.",
            )
    hidden, heads = flags.integer("hidden-size", 0), flags.integer("num-attention-heads", 0)
    gated = flags.on("swiglu")
    bias = not flags.on("disable-bias-linear")
    fields: dict[str, Any] = {
        "num_layers": flags.integer("num-layers", 0),
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": flags.integer("num-query-groups", 0) if flags.on("group-query-attention") else heads,
        "head_dim": flags.integer("kv-channels", 0),
        "ffn_size": flags.integer("ffn-hidden-size", int(4 * hidden * 2 / 3) // 64 * 64 if gated else 4 * hidden),
        "vocab_size": vocabulary(flags)[0],
        "norm": "rmsnorm" if flags.text("normalization") == "RMSNorm" else "layernorm",
        "norm_eps": flags.number("norm-epsilon", 1e-5),
        "activation": "swiglu" if gated else "relu" if flags.on("squared-relu") else "gelu_tanh",
        "qkv_bias": bias or flags.on("add-qkv-bias"),
        "attention_out_bias": bias,
        "mlp_bias": bias,
        "qk_norm": flags.on("qk-layernorm") and not flags.on("multi-latent-attention"),
        "tie_embeddings": not flags.on("untie-embeddings-and-output-weights"),
        "dropout": flags.number("hidden-dropout", 0.1),
        "attention_dropout": flags.number("attention-dropout", 0.1),
        "init_std": flags.number("init-method-std", 0.02),
        "rope_theta": flags.number("rotary-base", 10000.0),
        "rope_fraction": flags.number("rotary-percent", 1.0),
        "mtp_layers": flags.integer("mtp-num-layers", 0),
    }
    seq_len = flags.integer("seq-length", 0)
    fields["max_seq_len"] = max(flags.integer("max-position-embeddings", seq_len), seq_len, 2)
    fields["position"] = _position(flags)
    if flags.on("window-size") and (found := re.search(r"\d+", flags.text("window-size"))):
        fields["sliding_window"] = int(found[0])
    if flags.on("multi-latent-attention"):
        fields |= {
            "attention": "mla",
            "head_dim": 0,
            "q_lora_rank": flags.integer("q-lora-rank", 0),
            "kv_lora_rank": flags.integer("kv-lora-rank", 512),
            "qk_nope_head_dim": flags.integer("qk-head-dim", 128),
            "qk_rope_head_dim": flags.integer("qk-pos-emb-head-dim", 64),
            "v_head_dim": flags.integer("v-head-dim", 128),
            "num_kv_heads": 0,
        }
    if flags.integer("num-experts", 0) > 0:
        fields |= _experts(flags, fields)
    return fields


def _position(flags: Flags) -> str:
    kind = flags.text("position-embedding-type", "learned_absolute")
    if flags.on("use-rotary-position-embeddings") or kind in ("rope", "yarn", "mrope"):
        return "rope"
    return "learned" if kind == "learned_absolute" else "none"


def _experts(flags: Flags, fields: dict[str, Any]) -> dict[str, Any]:
    moe: dict[str, Any] = {
        "ffn_size": flags.integer("moe-ffn-hidden-size", fields["ffn_size"]),
        "aux_loss_coef": flags.number("moe-aux-loss-coeff", 0.0),
        "z_loss_coef": flags.number("moe-z-loss-coeff", 0.0),
        "score": flags.text("moe-router-score-function", "softmax"),
        "score_scale": flags.number("moe-router-topk-scaling-factor", 1.0),
        "bias_balance": flags.on("moe-router-enable-expert-bias"),
        "capacity_factor": max(0.0, flags.number("moe-expert-capacity-factor", 0.0)),
    }
    if shared := flags.integer("moe-shared-expert-intermediate-size", 0):
        moe |= {"num_shared_experts": 1, "shared_ffn_size": shared}
    groups = flags.integer("moe-router-num-groups", 1)
    if groups > 1:
        moe |= {"num_groups": groups, "top_k_groups": flags.integer("moe-router-group-topk", 1)}
    moe |= _frequency(flags.text("moe-layer-freq", "1"), fields["num_layers"])
    return {"num_experts": flags.integer("num-experts", 0), "top_k": flags.integer("moe-router-topk", 2), "moe": moe}


def _frequency(text: str, layers: int) -> dict[str, int]:
    """`--moe-layer-freq`: a period, or a list such as ``([0]*3+[1]*58)``."""
    text = text.strip("'\"")
    if text.isdigit():
        return {"layer_period": int(text)}
    pattern = _pattern(text)
    if len(pattern) != layers or set(pattern) - {0, 1}:
        raise ConfigError(
            f"--moe-layer-freq {text} names {len(pattern)} layers, the model has {layers}",
            next_step="Give a period, or a list with 0 or 1 for each layer: '([0]*3+[1]*58)'.",
        )
    first = pattern.index(1) if 1 in pattern else layers
    for period in range(1, layers + 1):
        offset = first % period
        if all(bool(kind) == (at >= first and at % period == offset) for at, kind in enumerate(pattern)):
            return {"layer_period": period, "layer_offset": offset, "first_dense_layers": first}
    raise ConfigError(
        f"--moe-layer-freq {text} has no period",
        evidence="A recipe says first_dense_layers, layer_period and layer_offset.",
        next_step="Describe the nearest model with a period.",
    )


def _pattern(text: str) -> list[int]:
    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.List):
            return [value(item) for item in node.elts]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.Add):
            left, right = value(node.left), value(node.right)
            return left * right if isinstance(node.op, ast.Mult) else left + right
        raise ValueError(ast.dump(node))

    try:
        found = value(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, TypeError) as error:
        raise ConfigError(
            f"--moe-layer-freq {text} is no period and no list", next_step="For example: 2, or '([0]*3+[1]*58)'."
        ) from error
    return found if isinstance(found, list) else [found]


def vocabulary(flags: Flags) -> tuple[int, str]:
    """(rows, who says so); the rows before Megatron pads them."""
    if flags.on("padded-vocab-size"):
        return flags.integer("padded-vocab-size", 0), "the padded size"
    if flags.on("vocab-size"):
        return flags.integer("vocab-size", 0), "--vocab-size"
    for name in ("tokenizer-model", "tokenizer-name-or-path", "tokenizer-type", "vocab-file"):
        value = " ".join(flags.given.get(name, ())).lower()
        for pattern, size in _VOCABULARIES:
            if re.search(pattern, value):
                return size, f"--{name}"
    return 50257, ""


def padded(vocab_size: int, flags: Flags, tp: int) -> int:
    """Rows of Megatron's embedding: a multiple of so many times tp."""
    if flags.on("padded-vocab-size"):
        return vocab_size
    unit = flags.integer("make-vocab-size-divisible-by", 128) * tp
    return -(-vocab_size // unit) * unit
