"""Attention layers: grouped-query attention and DeepSeek's latent attention.

Sizes are read from tensors, never from head counts, so a layer whose projections were cut over tensor-parallel ranks is
the same code.

Dims: B batch, T tokens, C hidden, H query heads, G key/value heads, D head width, L latent width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from paceline.config.model import AttentionSpec, ModelConfig
from paceline.kernels.attention import AttentionCore, RowDocuments, mask_of
from paceline.models.norm import RMSNorm
from paceline.models.rope import apply_rope, softmax_scale

CosSin = tuple[Tensor, Tensor]


class GroupedQueryAttention(nn.Module):
    """Multi-head, grouped-query or multi-query attention, with optional biases, QK-norm and sliding window."""

    def __init__(
        self,
        spec: AttentionSpec,
        config: ModelConfig,
        core: AttentionCore,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        self.core = core
        self.head_dim = spec.qk_head_dim
        self.window = spec.sliding_window
        self.scale = softmax_scale(config)
        self.softcap = config.attention_softcap
        self.dropout = config.attention_dropout
        factory: dict[str, Any] = {"dtype": dtype, "device": device}
        q_size, kv_size = spec.num_heads * self.head_dim, spec.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(spec.hidden_size, q_size, bias=spec.qkv_bias, **factory)
        self.k_proj = nn.Linear(spec.hidden_size, kv_size, bias=spec.qkv_bias, **factory)
        self.v_proj = nn.Linear(spec.hidden_size, kv_size, bias=spec.qkv_bias, **factory)
        self.o_proj = nn.Linear(q_size, spec.hidden_size, bias=spec.out_bias, **factory)
        self.q_norm = RMSNorm(self.head_dim, config, dtype, device) if spec.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config, dtype, device) if spec.qk_norm else None

    def forward(self, x_BTC: Tensor, cos_sin: CosSin | None, documents: RowDocuments | None) -> Tensor:
        q_BTHD, k_BTGD, v_BTGD = (part.unflatten(-1, (-1, self.head_dim)) for part in self.project(x_BTC))
        if self.q_norm is not None and self.k_norm is not None:
            q_BTHD, k_BTGD = self.q_norm(q_BTHD), self.k_norm(k_BTGD)
        if cos_sin is not None:
            q_BTHD, k_BTGD = apply_rope(q_BTHD, cos_sin), apply_rope(k_BTGD, cos_sin)
        o_BTHD = self.core(
            q_BTHD,
            k_BTGD,
            v_BTGD,
            mask_of(documents, window=self.window),
            scale=self.scale,
            softcap=self.softcap,
            dropout=self.dropout if self.training else 0.0,
        )
        return self.o_proj(o_BTHD.flatten(-2))

    @property
    def in_projs(self) -> tuple[nn.Linear, ...]:
        """The matrices that the layer's input is multiplied by."""
        return self.q_proj, self.k_proj, self.v_proj

    def project(self, x_BTC: Tensor) -> tuple[Tensor, ...]:
        """The input times each of `in_projs`."""
        return tuple(proj(x_BTC) for proj in self.in_projs)


class LatentAttention(nn.Module):
    """DeepSeek's MLA: keys and values are made from one small latent per token, and one rotary key serves all heads.

    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        config: ModelConfig,
        core: AttentionCore,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        self.core = core
        self.nope_dim, self.rope_dim, self.v_dim = spec.qk_nope_head_dim, spec.qk_rope_head_dim, spec.v_head_dim
        self.scale = softmax_scale(config)
        self.dropout = config.attention_dropout
        factory: dict[str, Any] = {"dtype": dtype, "device": device}
        C, H, qk_dim = spec.hidden_size, spec.num_heads, spec.qk_head_dim
        self.q_proj: nn.Linear | None = None
        self.q_down_proj: nn.Linear | None = None
        self.q_norm: RMSNorm | None = None
        self.q_up_proj: nn.Linear | None = None
        if spec.q_lora_rank:
            self.q_down_proj = nn.Linear(C, spec.q_lora_rank, bias=spec.qkv_bias, **factory)
            self.q_norm = RMSNorm(spec.q_lora_rank, config, dtype, device)
            self.q_up_proj = nn.Linear(spec.q_lora_rank, H * qk_dim, bias=False, **factory)
        else:
            self.q_proj = nn.Linear(C, H * qk_dim, bias=False, **factory)
        latent = spec.kv_lora_rank + self.rope_dim
        self.kv_down_proj = nn.Linear(C, latent, bias=spec.qkv_bias, **factory)
        self.kv_norm = RMSNorm(spec.kv_lora_rank, config, dtype, device)
        kv_size = H * (self.nope_dim + self.v_dim)
        self.kv_up_proj = nn.Linear(spec.kv_lora_rank, kv_size, bias=False, **factory)
        self.o_proj = nn.Linear(H * self.v_dim, C, bias=spec.out_bias, **factory)

    def forward(self, x_BTC: Tensor, cos_sin: CosSin | None, documents: RowDocuments | None) -> Tensor:
        assert cos_sin is not None, "latent attention needs rotary positions; the config refuses others"
        queries, latents = self.project(x_BTC)
        q_BTHD = self._queries(queries).unflatten(-1, (-1, self.nope_dim + self.rope_dim))
        q_nope_BTHD, q_rope_BTHD = q_BTHD.split([self.nope_dim, self.rope_dim], dim=-1)

        latent_BTL, k_rope_BTD = latents.split([self.kv_norm.weight.shape[0], self.rope_dim], dim=-1)
        kv_BTHD = self.kv_up_proj(self.kv_norm(latent_BTL)).unflatten(-1, (-1, self.nope_dim + self.v_dim))
        k_nope_BTHD, v_BTHE = kv_BTHD.split([self.nope_dim, self.v_dim], dim=-1)
        k_rope_BTHD = apply_rope(k_rope_BTD[:, :, None], cos_sin).expand(-1, -1, k_nope_BTHD.shape[2], -1)

        o_BTHE = self.core(
            torch.cat((q_nope_BTHD, apply_rope(q_rope_BTHD, cos_sin)), dim=-1),
            torch.cat((k_nope_BTHD, k_rope_BTHD), dim=-1),
            v_BTHE,
            mask_of(documents),
            scale=self.scale,
            dropout=self.dropout if self.training else 0.0,
        )
        return self.o_proj(o_BTHE.flatten(-2))

    @property
    def in_projs(self) -> tuple[nn.Linear, ...]:
        """The matrices that the layer's input is multiplied by: to queries or their latent, and to that of keys."""
        first = self.q_proj if self.q_down_proj is None else self.q_down_proj
        assert first is not None
        return first, self.kv_down_proj

    def project(self, x_BTC: Tensor) -> tuple[Tensor, ...]:
        """The input times each of `in_projs`."""
        return tuple(proj(x_BTC) for proj in self.in_projs)

    def _queries(self, projected: Tensor) -> Tensor:
        if self.q_up_proj is None:
            return projected
        assert self.q_norm is not None
        return self.q_up_proj(self.q_norm(projected))


Attention = GroupedQueryAttention | LatentAttention


def make_attention(
    spec: AttentionSpec,
    config: ModelConfig,
    core: AttentionCore,
    dtype: torch.dtype,
    device: torch.device | str | None,
) -> Attention:
    """The attention layer that the spec describes."""
    kind = LatentAttention if spec.kind == "mla" else GroupedQueryAttention
    return kind(spec, config, core, dtype, device)
