"""The plain single-device decoder that every family is a configuration of.

Dims: B sequences, T tokens, C hidden, V vocabulary, L expert layers, E experts.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.config.model import BlockSpec, ModelConfig
from paceline.kernels.attention import AttentionCore, RowDocuments, attention_core
from paceline.kernels.cross_entropy import IGNORE_INDEX, ChunkedHeadLoss, HeadLoss, head_logits
from paceline.kernels.log_probs import LabelLogProbs
from paceline.kernels.precision import at_least_fp32
from paceline.models.attention import CosSin, GroupedQueryAttention, LatentAttention
from paceline.models.block import Block
from paceline.models.init import WeightInit
from paceline.models.moe import BlockExtras, MoE
from paceline.models.norm import make_norm
from paceline.models.rope import Rope


class ModelOutput(NamedTuple):
    """What a forward pass gives. A tuple, so that FSDP's hooks see the tensors in it."""

    loss_sum: Tensor | None
    """fp32 scalar: sum of token losses, if there were labels; multi-token prediction in it, weighted."""
    num_tokens: Tensor | None
    """int64 scalar: labels that count (of the main head)."""
    aux_loss: Tensor | None
    """fp32 scalar: router losses summed over layers and over the B sequences, coefficients included; None if dense."""
    logits: Tensor | None
    """[B, T, V], if there were no labels."""
    stats: dict[str, Tensor]
    """Detached: "loss_sum_main", "loss_sum_mtp", "moe/load" [L, E], "moe/dropped" and "moe/entropy" [L]."""
    hidden: Tensor | None = None
    """[B, T, C], from a part of the model that is not the last."""
    log_probs: Tensor | None = None
    """[B, T], at least fp32: of each label, 0 where there is none; if asked for."""
    scores: Tensor | None = None
    """[B, T], at least fp32: of each token, from a model with a score for a head."""


class Embedding(nn.Module):
    """Token embedding, with learned positions where the config has them."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__()
        C = config.hidden_size
        self.scale = math.sqrt(C) if config.embedding_scale else 1.0
        self.dropout = config.dropout
        self.weight = nn.Parameter(torch.empty(config.vocab_size, C, dtype=dtype, device=device))
        self.position_weight: nn.Parameter | None = None
        if config.position == "learned":
            self.position_weight = nn.Parameter(torch.empty(config.max_seq_len, C, dtype=dtype, device=device))

    def forward(self, tokens_BT: Tensor, positions_BT: Tensor) -> Tensor:
        x_BTC = self.look_up(tokens_BT)
        if self.scale != 1.0:
            x_BTC = x_BTC * self.scale
        if self.position_weight is not None:
            x_BTC = x_BTC + F.embedding(positions_BT, self.position_weight)
        return F.dropout(x_BTC, self.dropout, self.training)

    def look_up(self, tokens_BT: Tensor) -> Tensor:
        """[B, T, C]: the row of each token."""
        return F.embedding(tokens_BT, self.weight)


class Head(nn.Module):
    """Hidden states to logits, or to the summed loss where labels are given. Has no weight of its own when tied."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__()
        self.logit_softcap = config.logit_softcap
        self.weight: nn.Parameter | None = None
        if not config.tie_embeddings:
            self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device))

    def forward(
        self, hidden_BTC: Tensor, labels_BT: Tensor | None, head_loss: HeadLoss, tied_weight_VC: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """(logits, None) without labels, else (loss sum, token count). FSDP has the weight whole only in here."""
        weight_VC = self.weight if self.weight is not None else tied_weight_VC
        assert weight_VC is not None
        if labels_BT is None:
            return head_logits(hidden_BTC, weight_VC, logit_softcap=self.logit_softcap), None
        return head_loss(hidden_BTC.flatten(0, 1), weight_VC, labels_BT.flatten(), logit_softcap=self.logit_softcap)


class Score(nn.Module):
    """One number for each token instead of logits: the head of a reward model."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1, config.hidden_size, dtype=dtype, device=device))

    def forward(self, hidden_BTC: Tensor) -> Tensor:
        """[B, T], at least fp32."""
        return at_least_fp32(F.linear(hidden_BTC, self.weight))[..., 0]


class MultiTokenPrediction(nn.Module):
    """One depth of DeepSeek-V3's MTP: the state of a token and the embedding of the next one predict the one after.

    The state is taken after the norm that precedes the head. Source: arXiv:2412.19437, section 2.2.
    """

    def __init__(
        self,
        spec: BlockSpec,
        config: ModelConfig,
        core: AttentionCore,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        C = config.hidden_size
        self.hidden_norm = make_norm(config, dtype, device)
        self.embed_norm = make_norm(config, dtype, device)
        self.proj = nn.Linear(2 * C, C, bias=False, dtype=dtype, device=device)
        self.block = Block(spec, config, core, dtype, device)
        self.norm = make_norm(config, dtype, device)

    def forward(
        self, hidden_BTC: Tensor, embedded_BTC: Tensor, cos_sin: CosSin | None, documents: RowDocuments | None
    ) -> tuple[Tensor, BlockExtras | None]:
        joined = torch.cat((self.embed_norm(embedded_BTC), self.hidden_norm(hidden_BTC)), dim=-1)
        x_BTC, extras = self.block(self.proj(joined), cos_sin, documents)
        return self.norm(x_BTC), extras


class Transformer(nn.Module):
    """A decoder-only language model, or a part of one (`part`). Knows nothing of ranks.

    Five seams may be given other objects: the attention core (`set_attention_core`), the dispatcher of each `MoE`, what
    its router sees of each sequence (`Router.sequences`), `head_loss` and `log_probs`.
    """

    embed: Embedding | None
    """None in a part that does not need it."""
    norm: nn.Module | None
    """None in a part that is not the last, as `head`."""
    head: Head | None
    """None also where the model has a score."""
    score: Score | None
    """None in a part that is not the last, and in a model with a head."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        core: AttentionCore | None = None,
        head_loss: HeadLoss | None = None,
        log_probs: LabelLogProbs | None = None,
    ) -> None:
        super().__init__()
        core = core or attention_core("auto")
        self.config = config
        self.is_first = self.is_last = True
        self.head_loss: HeadLoss = head_loss or ChunkedHeadLoss()
        self.log_probs = log_probs or LabelLogProbs()
        self.rope = Rope(config) if config.position == "rope" else None
        self.embed = Embedding(config, dtype, device)
        self.blocks = nn.ModuleDict(
            {str(spec.index): Block(spec, config, core, dtype, device) for spec in config.blocks()}
        )
        self.norm = make_norm(config, dtype, device)
        self.head = None if config.has_score else Head(config, dtype, device)
        self.score = Score(config, dtype, device) if config.has_score else None
        self.mtp = nn.ModuleDict(
            {
                str(depth): MultiTokenPrediction(spec, config, core, dtype, device)
                for depth, spec in enumerate(config.mtp_blocks(), start=1)
            }
        )

    def part(self, blocks: range, *, first: bool, last: bool) -> Transformer:
        """A view of consecutive blocks: the same modules under the same names, so parameters are shared, not copied.

        Args:
            first: it embeds tokens; otherwise its `forward` is given hidden states.
            last: it has norm, head and multi-token prediction; otherwise its `forward` gives hidden states. It has the
                embedding too if the head is tied to it or multi-token prediction reads it.
        """
        part = copy.copy(self)
        # containers of its own: modules, and hooks that are put on one part only
        part.__dict__.update(
            {name: copy.copy(value) for name, value in self.__dict__.items() if isinstance(value, dict)}
        )
        part.is_first, part.is_last = first, last
        # a container holds no parameters of its own
        part.blocks = nn.ModuleDict({str(index): self.blocks[str(index)] for index in blocks})
        if not (first or (last and self.needs_embedding_last)):
            part.embed = None
        if not last:
            part.norm = part.head = part.score = None
            part.mtp = nn.ModuleDict()
        return part

    @property
    def needs_embedding_last(self) -> bool:
        """Whether what comes after the last block reads the embedding's weight."""
        return self.config.ties_head or self.config.mtp_layers > 0

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        boundaries: Tensor | None = None,
        hidden: Tensor | None = None,
        log_probs: bool = False,
        noise: Tensor | None = None,
    ) -> ModelOutput:
        """Args:
        tokens: int64 [B, T].
        labels: int64 [B, T], the token after each token; IGNORE_INDEX has no loss. None asks for logits. A model with a
            score gives scores and reads no labels.
        positions: int64 [B, T]; None = 0 ... T-1.
        documents: integers [B, T]; tokens of different documents do not see each other. None = one document.
        boundaries: int32 [N + 1], where documents begin (`data/boundaries.py`): some kernels of attention want it.
        hidden: [B, T, C] from the part before; only a part that is not the first takes it.
        log_probs: asks for the log-probability of each label instead of their loss.
        noise: [B, T, C] added to the embeddings; only the first part reads it.
        """
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        cos_sin = self.rope(positions) if self.rope is not None else None
        seen = None if documents is None else RowDocuments(documents, boundaries)
        extras: list[BlockExtras] = []
        x_BTC = self._start(tokens, positions, hidden, noise)
        for block in self.blocks.values():
            x_BTC, extra = block(x_BTC, cos_sin, seen)
            if extra is not None:
                extras.append(extra)
        if not self.is_last:
            return ModelOutput(None, None, _sum_aux(extras), None, _moe_stats(extras), x_BTC)
        assert self.norm is not None
        hidden_BTC = self.norm(x_BTC)
        beside = (_sum_aux(extras), None, _moe_stats(extras))
        if self.score is not None:
            return ModelOutput(None, None, *beside, scores=self.score(hidden_BTC))
        if labels is None:
            logits, _ = self._head(hidden_BTC, None, self.head_loss)
            return ModelOutput(None, None, _sum_aux(extras), logits, _moe_stats(extras))
        if log_probs:
            found, num_tokens = self._head(hidden_BTC, labels, self.log_probs)
            return ModelOutput(None, num_tokens, *beside, log_probs=found.view(labels.shape))
        loss_sum, num_tokens = self._head(hidden_BTC, labels, self.head_loss)
        stats = {"loss_sum_main": loss_sum.detach()}
        if self.mtp:
            mtp_sum = self._mtp_loss(hidden_BTC, tokens, labels, positions, seen, cos_sin, extras)
            stats["loss_sum_mtp"] = mtp_sum.detach()
            loss_sum = loss_sum + self.config.mtp_loss_coef * mtp_sum
        return ModelOutput(loss_sum, num_tokens, _sum_aux(extras), None, stats | _moe_stats(extras))

    def _start(self, tokens: Tensor, positions: Tensor, hidden: Tensor | None, noise: Tensor | None) -> Tensor:
        assert self.is_first == (hidden is None), (
            "a part that is not the first is given hidden states, the first is not"
        )
        if hidden is not None:
            return hidden
        assert self.embed is not None
        x_BTC = self.embed(tokens, positions)
        return x_BTC if noise is None else x_BTC + noise

    def _head(self, hidden_BTC: Tensor, labels: Tensor | None, loss: HeadLoss) -> tuple[Tensor, Tensor | None]:
        assert self.head is not None
        tied_weight_VC = None
        if self.head.weight is None:
            assert self.embed is not None
            tied_weight_VC = self.embed.weight
        return self.head(hidden_BTC, labels, loss, tied_weight_VC)

    def _mtp_loss(
        self,
        hidden_BTC: Tensor,
        tokens: Tensor,
        labels: Tensor,
        positions: Tensor,
        documents: RowDocuments | None,
        cos_sin: CosSin | None,
        extras: list[BlockExtras],
    ) -> Tensor:
        """Mean over the depths of their summed losses. Extras of expert blocks are added to `extras`."""
        assert self.embed is not None
        total = torch.zeros((), dtype=torch.float32, device=hidden_BTC.device)
        for depth, module in enumerate(self.mtp.values(), start=1):
            # the last `depth` positions have no next token in this row: their output has no label and nobody sees them
            embedded_BTC = self.embed(_shift_left(tokens, depth, 0), positions)
            hidden_BTC, extra = module(hidden_BTC, embedded_BTC, cos_sin, documents)
            if extra is not None:
                extras.append(extra)
            depth_labels = _shift_left(labels, depth, IGNORE_INDEX)
            if documents is not None:
                crosses = _shift_left(documents.numbers, depth, -1) != documents.numbers
                depth_labels = depth_labels.masked_fill(crosses, IGNORE_INDEX)
            loss_sum, _ = self._head(hidden_BTC, depth_labels, self.head_loss)
            total = total + loss_sum
        return total / len(self.mtp)

    def init_weights(self, seed: int) -> None:
        """Fills parameters and buffers, also right after `to_empty()` from the meta device."""
        init = WeightInit(self.config, seed)
        for name, parameter in self.named_parameters():
            init(name, parameter.data, parameter.shape, (0,) * parameter.dim())
        self.reset_buffers()

    def reset_buffers(self) -> None:
        """Puts buffers in their first state: router biases of 0."""
        for layer in self.moe_layers():
            if layer.router.expert_bias is not None:
                layer.router.expert_bias.zero_()

    def moe_layers(self) -> list[MoE]:
        """The expert layers in order, those of multi-token prediction last: the rows of the "moe/..." stats."""
        return [module for module in self.modules() if isinstance(module, MoE)]

    def moe_layer_names(self) -> list[str]:
        """Names of the blocks that the rows of the "moe/..." stats belong to: "blocks.3", "mtp.1.block"."""
        return [name.rpartition(".")[0] for name, module in self.named_modules() if isinstance(module, MoE)]

    def update_expert_bias(self, load_LE: Tensor) -> None:
        """After an optimizer step: moves selection biases by the load of the global batch. No-op without biases."""
        if self.config.moe.bias_balance:
            for layer, load_E in zip(self.moe_layers(), load_LE.unbind(0), strict=True):
                layer.router.update_expert_bias(load_E)

    def set_attention_core(self, core: AttentionCore) -> None:
        """Puts another attention core in all layers."""
        self._each_attention(lambda attention: setattr(attention, "core", core))

    def _each_attention(self, change: Callable[[GroupedQueryAttention | LatentAttention], None]) -> None:
        for module in self.modules():
            if isinstance(module, GroupedQueryAttention | LatentAttention):
                change(module)


def _shift_left(x_BT: Tensor, steps: int, fill: int) -> Tensor:
    return F.pad(x_BT[:, steps:], (0, steps), value=fill)


def _sum_aux(extras: list[BlockExtras]) -> Tensor | None:
    return torch.stack([extra.aux_loss for extra in extras]).sum() if extras else None


def _moe_stats(extras: list[BlockExtras]) -> dict[str, Tensor]:
    if not extras:
        return {}
    return {
        "moe/load": torch.stack([extra.load for extra in extras]),
        "moe/dropped": torch.stack([extra.dropped for extra in extras]),
        "moe/entropy": torch.stack([extra.entropy for extra in extras]),
    }
