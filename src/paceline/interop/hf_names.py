"""What are our tensors called in a Hugging Face folder? One table for each family.

Placeholders: ``{i}`` a layer, ``{e}`` an expert, ``{w}`` is ``weight`` or ``bias``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Name:
    """How one of our tensors lies in theirs."""

    theirs: str | tuple[str, ...]
    """Several: our second index (gate, up) counts through them; our first is the expert."""
    transposed: bool = False
    """Matrices are stored [in, out]."""
    part: tuple[int, int] | None = None
    """(k, n): the k-th of n equal parts of their outputs."""
    rotary: Literal["", "heads", "tail"] = ""
    """Rotary rows come in pairs there (x0 y0 x1 y1 ...) and as halves here: at the end of each head, or of all."""


Table = Mapping[str, str | Name]


def _stacked(*inputs: str, down: str) -> dict[str, Name]:
    experts = "blocks.{i}.feed_forward.experts."
    return {experts + "up_weight": Name(theirs=inputs), experts + "down_weight": Name(theirs=(down,))}


_LAYER = "model.layers.{i}."
_OUTSIDE: Table = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    "score.weight": "score.weight",
}
_BLOCK_NORMS: Table = {
    "blocks.{i}.attention_norm.weight": _LAYER + "input_layernorm.weight",
    "blocks.{i}.feed_forward_norm.weight": _LAYER + "post_attention_layernorm.weight",
}
_ATTENTION: Table = {
    **{f"blocks.{{i}}.attention.{p}_proj.{{w}}": f"{_LAYER}self_attn.{p}_proj.{{w}}" for p in "qkvo"},
    **{f"blocks.{{i}}.attention.{p}_norm.weight": f"{_LAYER}self_attn.{p}_norm.weight" for p in "qk"},
}
_MLP: Table = {
    f"blocks.{{i}}.feed_forward.{p}_proj.{{w}}": f"{_LAYER}mlp.{p}_proj.{{w}}" for p in ("gate", "up", "down")
}
_EXPERT = _LAYER + "mlp.experts.{e}."
_EXPERTS: Table = {
    "blocks.{i}.feed_forward.router.weight": _LAYER + "mlp.gate.weight",
    **_stacked(_EXPERT + "gate_proj.weight", _EXPERT + "up_proj.weight", down=_EXPERT + "down_proj.weight"),
}

LLAMA: Table = {**_OUTSIDE, **_BLOCK_NORMS, **_ATTENTION, **_MLP}
QWEN3_MOE: Table = {**LLAMA, **_EXPERTS}

_MIXTRAL_EXPERT = _LAYER + "block_sparse_moe.experts.{e}."
MIXTRAL: Table = {
    **LLAMA,
    "blocks.{i}.feed_forward.router.weight": _LAYER + "block_sparse_moe.gate.weight",
    **_stacked(_MIXTRAL_EXPERT + "w1.weight", _MIXTRAL_EXPERT + "w3.weight", down=_MIXTRAL_EXPERT + "w2.weight"),
}

_LATENT: Table = {
    "blocks.{i}.attention.q_proj.weight": Name(theirs=_LAYER + "self_attn.q_proj.weight", rotary="heads"),
    "blocks.{i}.attention.q_down_proj.{w}": _LAYER + "self_attn.q_a_proj.{w}",
    "blocks.{i}.attention.q_norm.weight": _LAYER + "self_attn.q_a_layernorm.weight",
    "blocks.{i}.attention.q_up_proj.weight": Name(theirs=_LAYER + "self_attn.q_b_proj.weight", rotary="heads"),
    "blocks.{i}.attention.kv_down_proj.{w}": Name(theirs=_LAYER + "self_attn.kv_a_proj_with_mqa.{w}", rotary="tail"),
    "blocks.{i}.attention.kv_norm.weight": _LAYER + "self_attn.kv_a_layernorm.weight",
    "blocks.{i}.attention.kv_up_proj.weight": _LAYER + "self_attn.kv_b_proj.weight",
    "blocks.{i}.attention.o_proj.{w}": _LAYER + "self_attn.o_proj.{w}",
}
_SHARED: Table = {
    f"blocks.{{i}}.feed_forward.shared.{p}_proj.weight": f"{_LAYER}mlp.shared_experts.{p}_proj.weight"
    for p in ("gate", "up", "down")
}
DEEPSEEK_V2: Table = {**_OUTSIDE, **_BLOCK_NORMS, **_LATENT, **_MLP, **_EXPERTS, **_SHARED}
DEEPSEEK_V3: Table = {
    **DEEPSEEK_V2,
    "blocks.{i}.feed_forward.router.expert_bias": _LAYER + "mlp.gate.e_score_correction_bias",
    # {i} is here the number of the layer that multi-token prediction has there: it follows the last one
    "mtp.{i}.hidden_norm.weight": _LAYER + "hnorm.weight",
    "mtp.{i}.embed_norm.weight": _LAYER + "enorm.weight",
    "mtp.{i}.proj.weight": _LAYER + "eh_proj.weight",
    "mtp.{i}.norm.weight": _LAYER + "shared_head.norm.weight",
}

_H = "transformer.h.{i}."
_GPT2_NORMS: Table = {
    "norm.{w}": "transformer.ln_f.{w}",
    "blocks.{i}.attention_norm.{w}": _H + "ln_1.{w}",
    "blocks.{i}.feed_forward_norm.{w}": _H + "ln_2.{w}",
}
GPT2: Table = {
    "embed.weight": "transformer.wte.weight",
    "embed.position_weight": "transformer.wpe.weight",
    "head.weight": "lm_head.weight",
    "score.weight": "score.weight",
    **_GPT2_NORMS,
    **{
        f"blocks.{{i}}.attention.{p}_proj.{{w}}": Name(theirs=_H + "attn.c_attn.{w}", transposed=True, part=(k, 3))
        for k, p in enumerate("qkv")
    },
    "blocks.{i}.attention.o_proj.{w}": Name(theirs=_H + "attn.c_proj.{w}", transposed=True),
    "blocks.{i}.feed_forward.up_proj.{w}": Name(theirs=_H + "mlp.c_fc.{w}", transposed=True),
    "blocks.{i}.feed_forward.down_proj.{w}": Name(theirs=_H + "mlp.c_proj.{w}", transposed=True),
}

TABLES: dict[str, Table] = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "qwen3_moe": QWEN3_MOE,
    "mixtral": MIXTRAL,
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v3": DEEPSEEK_V3,
}

PREDICTS_MORE = frozenset({"deepseek_v3"})
"""Families that have names for multi-token prediction."""

WITHOUT_MEANING: Mapping[str, tuple[str, ...]] = {
    "": (r".*\.rotary_emb\.inv_freq",),
    # the causal mask, which old versions stored as a buffer
    "gpt2": (r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias",),
}
"""Tensors that may be there and hold nothing that was learned; the family "" is every one."""
