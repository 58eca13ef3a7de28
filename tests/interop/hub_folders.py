"""Tiny random Transformers models of each family, saved as folders. For tests only."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.models.hf_reference import FAMILIES, VOCAB, Family

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "original_max_position_embeddings": 64,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}


def _with(name: str, **changes: Any) -> Family:
    return replace(FAMILIES[name], hf=FAMILIES[name].hf | changes)


VARIANTS: dict[str, Family] = {
    **{name: family for name, family in FAMILIES.items() if name not in ("gemma2", "qwen2_moe")},
    "gpt2_untied": _with("gpt2", tie_word_embeddings=False, activation_function="gelu", n_inner=96),
    "llama_biases": _with("llama", attention_bias=True, mlp_bias=True),
    "llama3": _with("llama", rope_parameters=LLAMA3),
    "llama_wide_heads": _with("llama", head_dim=24, vocab_size=1003),
    "qwen2_tied": _with("qwen2", tie_word_embeddings=True),
    "qwen2_window": _with("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=0),
    "qwen3_biases": _with("qwen3", attention_bias=True),
    "qwen3_moe_dense_first": _with("qwen3_moe", mlp_only_layers=[0], norm_topk_prob=False),
    "mixtral_window": _with("mixtral", sliding_window=8, tie_word_embeddings=True),
    "deepseek_v2_greedy": _with("deepseek_v2", topk_method="greedy", q_lora_rank=32, attention_bias=True),
    "deepseek_v2_yarn": _with("deepseek_v2", rope_parameters=YARN),
    "llama_yarn_factor": _with("llama", rope_parameters=YARN | {"attention_factor": 1.3, "beta_slow": 2.0}),
    "deepseek_v3_top4": _with("deepseek_v3", num_experts_per_tok=4),
    "deepseek_v3_no_lora": _with("deepseek_v3", q_lora_rank=None),
}


@lru_cache(maxsize=2)
def reference(name: str) -> nn.Module:
    return VARIANTS[name].reference()


def save(name: str, folder: Path, dtype: torch.dtype = torch.float32, shard: str = "5GB") -> Path:
    reference(name).to(dtype).save_pretrained(folder, max_shard_size=shard)
    reference(name).float()
    return folder


def tensors(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in content.items() if value != "gone"}))


def change_tensors(folder: Path, **changes: Tensor | None) -> None:
    """Keys with dots; None takes a tensor away."""
    found = tensors(folder) | changes
    save_file({name: value for name, value in found.items() if value is not None}, folder / "model.safetensors")


def tokens(length: int = 40) -> Tensor:
    return torch.randint(2, VOCAB, (2, length), generator=torch.Generator().manual_seed(1))


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[name], other[name]) and one[name].dtype == other[name].dtype for name in one
    )
