"""How does the model read one new token without reading everything before it again?

The attention core is a seam: a core that remembers keys and values takes the place of the plain one and hands it all of
them. Keys are stored after RoPE, at the positions they were made for, so nothing is turned twice.

Dims: B sequences, T new tokens, S tokens so far with the new ones, G key/value heads, D and E widths of a key and a
value head.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from paceline.kernels.attention import AttentionCore, AttentionMask, attention_core
from paceline.models.attention import GroupedQueryAttention, LatentAttention
from paceline.models.transformer import Transformer


class KVCache:
    """Keys and values of every layer for a batch of sequences, in memory that is allocated once.

    Latent attention (MLA) stores the keys and values of all heads, made from the latent: simple and exact, but larger
    than the latent itself.
    """

    def __init__(self, batch_size: int, max_tokens: int, core: AttentionCore | None = None) -> None:
        self.batch_size = batch_size
        self.max_tokens = max_tokens
        self.length = 0
        self.start = 0
        self.documents: Tensor | None = None
        self.core = core or attention_core("auto")
        self._layers: list[_LayerCache] = []

    @property
    def num_bytes(self) -> int:
        return sum(layer.num_bytes for layer in self._layers)

    @contextmanager
    def attached(self, model: Transformer) -> Iterator[None]:
        """Every attention layer of ``model`` reads and extends this cache; afterwards they are as they were."""
        attentions = [m for m in model.modules() if isinstance(m, GroupedQueryAttention | LatentAttention)]
        before = [attention.core for attention in attentions]
        self._layers = self._layers or [_LayerCache(self) for _ in attentions]
        for attention, layer in zip(attentions, self._layers, strict=True):
            attention.core = layer
        try:
            yield
        finally:
            for attention, core in zip(attentions, before, strict=True):
                attention.core = core

    def forward(
        self, model: Transformer, tokens_BT: Tensor, positions_BT: Tensor, documents_BT: Tensor | None = None
    ) -> Tensor:
        """Logits [B, T, V] of the next T tokens of each sequence. Call inside ``attached``.

        Args:
            documents_BT: as in the model; tokens that belong to no one (padding) are a document of their own. Given in
                every call or in none.
        """
        B, T = tokens_BT.shape
        assert self.batch_size == B and self.length + T <= self.max_tokens, "the cache is too small for these tokens"
        self.start, self.length = self.length, self.length + T
        if documents_BT is not None:
            if self.documents is None:
                assert self.start == 0, "documents must be given from the first call on"
                self.documents = documents_BT.new_zeros(B, self.max_tokens)
            self.documents[:, self.start : self.length] = documents_BT
        logits = model(tokens_BT, positions=positions_BT, documents=documents_BT).logits
        assert isinstance(logits, Tensor)
        return logits


class _LayerCache:
    """One layer's part: an ``AttentionCore`` that puts what came before in front of what it is given."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self._keys, self._values) if tensor is not None)

    def __call__(
        self,
        q_BTHD: Tensor,
        k_BSGD: Tensor,
        v_BSGE: Tensor,
        mask: AttentionMask,
        *,
        scale: float,
        softcap: float = 0.0,
        dropout: float = 0.0,
    ) -> Tensor:
        cache = self._cache
        if self._keys is None or self._values is None:
            # sizes come from the tensors: a layer that was cut over tensor-parallel ranks has fewer heads
            self._keys, self._values = (
                torch.empty(x.shape[0], cache.max_tokens, *x.shape[2:], dtype=x.dtype, device=x.device)
                for x in (k_BSGD, v_BSGE)
            )
        self._keys[:, cache.start : cache.length] = k_BSGD
        self._values[:, cache.start : cache.length] = v_BSGE
        documents = None if cache.documents is None else cache.documents[:, : cache.length]
        return cache.core(
            q_BTHD,
            self._keys[:, : cache.length],
            self._values[:, : cache.length],
            AttentionMask(causal=mask.causal, window=mask.window, documents=documents),
            scale=scale,
            softcap=softcap,
            dropout=dropout,
        )
