"""The model and the batch of tests/interop/peft_fixture, which PEFT's numbers are of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.config.model import ModelConfig
from tests.parallel.tiny import tiny_model

FOLDER = Path(__file__).parent / "peft_fixture"
MODEL = ModelConfig(
    num_layers=2,
    hidden_size=16,
    num_heads=2,
    num_kv_heads=1,
    ffn_size=24,
    vocab_size=32,
    max_seq_len=16,
    tie_embeddings=False,
    init_std=0.2,
)
KINDS: dict[str, dict[str, Any]] = {
    "lora": {"r": 3, "lora_alpha": 6},
    "rslora": {"r": 3, "lora_alpha": 2, "use_rslora": True},
    "dora": {"r": 2, "lora_alpha": 4, "use_dora": True},
}
LR, WEIGHT_DECAY, STEPS = 1e-2, 0.1, 3
_ROWS = torch.arange(18).view(2, 9) * 7 % 32
BATCH: tuple[Tensor, Tensor] = (_ROWS[:, :-1], _ROWS[:, 1:])
"""Tokens and labels."""


def base_weights() -> dict[str, Tensor]:
    """Under our names; the same on every machine: drawn by a CPU."""
    model = tiny_model(MODEL, device="cpu")
    model.init_weights(7)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}
