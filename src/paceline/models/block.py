"""One layer: attention, then a dense MLP or a mixture of experts, each behind a norm and added to the stream."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.config.model import BlockSpec, ModelConfig, MoESpec
from paceline.kernels.attention import AttentionCore, RowDocuments
from paceline.models.attention import CosSin, make_attention
from paceline.models.feed_forward import FeedForward
from paceline.models.moe import BlockExtras, MoE
from paceline.models.norm import make_norm


class Block(nn.Module):
    """Pre-norm block; with `post_norm` a second norm comes before each residual addition (Gemma 2)."""

    def __init__(
        self,
        spec: BlockSpec,
        config: ModelConfig,
        core: AttentionCore,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        self.dropout = config.dropout
        self.attention_norm = make_norm(config, dtype, device)
        self.attention = make_attention(spec.attention, config, core, dtype, device)
        self.attention_post_norm = make_norm(config, dtype, device) if config.post_norm else None
        self.feed_forward_norm = make_norm(config, dtype, device)
        self.feed_forward: FeedForward | MoE
        if isinstance(spec.feed_forward, MoESpec):
            self.feed_forward = MoE(spec.feed_forward, dtype, device)
        else:
            self.feed_forward = FeedForward(spec.feed_forward, dtype, device)
        self.feed_forward_post_norm = make_norm(config, dtype, device) if config.post_norm else None

    def forward(
        self, x_BTC: Tensor, cos_sin: CosSin | None, documents: RowDocuments | None
    ) -> tuple[Tensor, BlockExtras | None]:
        """Gives the residual stream, and what an expert layer says beside it (None for a dense one)."""
        attended_BTC = self.attention(self.attention_norm(x_BTC), cos_sin, documents)
        if self.attention_post_norm is not None:
            attended_BTC = self.attention_post_norm(attended_BTC)
        x_BTC = x_BTC + F.dropout(attended_BTC, self.dropout, self.training)

        extras: BlockExtras | None = None
        out_BTC = self.feed_forward(self.feed_forward_norm(x_BTC))
        if isinstance(out_BTC, tuple):
            out_BTC, extras = out_BTC
        if self.feed_forward_post_norm is not None:
            out_BTC = self.feed_forward_post_norm(out_BTC)
        return x_BTC + F.dropout(out_BTC, self.dropout, self.training), extras
