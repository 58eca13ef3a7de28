"""Which experts a token goes to, and the losses that keep experts evenly used.

Dims: B sequences, T tokens of a sequence that are here, N = B * T, E experts, K experts a token takes.

Scores, weights and losses are in fp32, or in float64 where the model is.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.config.model import MoEConfig, MoESpec
from paceline.kernels.split_product import split_product, why_not_split


class Routing(NamedTuple):
    """The router's decision for one layer."""

    experts: Tensor
    """int64 [N, K], which experts."""
    weights: Tensor
    """fp32 or wider [N, K], what each expert's output is multiplied by; 0 where the assignment was dropped."""
    kept: Tensor | None
    """bool [N, K], False where the assignment was dropped; None = all are kept."""
    aux_loss: Tensor
    """fp32 or wider, scalar: router losses with their coefficients, summed over the B sequences. Of a sequence that is
    cut over ranks each has the part of its own tokens: the sum over the ranks is the loss."""
    load: Tensor
    """int64 [E], tokens here that chose each expert, dropped ones included."""
    dropped: Tensor
    """int64 scalar, assignments of tokens here that were beyond the capacity."""
    entropy: Tensor
    """int64 scalar: the entropy of each token's probabilities in units of `ENTROPY_UNIT` nats, summed over assignments.
    An integer, so that it is counted as loads are."""


ENTROPY_UNIT = 2.0**-16


class SequenceView(Protocol):
    """The seam of cut sequences: which part of each is here, and what the tokens of the other parts chose.

    What goes through it is integers or booleans and carries no gradient.
    """

    parts: int
    """Each sequence is cut into so many parts of T tokens."""

    def sum_over_parts(self, counts_BE: Tensor) -> Tensor:
        """What is counted in the part that is here becomes what is counted in whole sequences."""
        ...

    def gather(self, experts_BTK: Tensor) -> Tensor:
        """The choices of whole sequences, [B, parts * T, K], in order of position."""
        ...

    def local(self, whole_BTK: Tensor) -> Tensor:
        """Of something about whole sequences, the part that is here: the inverse of `gather`."""
        ...


class WholeSequences:
    """Nothing is cut: every sequence is here, in order."""

    parts = 1

    def sum_over_parts(self, counts_BE: Tensor) -> Tensor:
        return counts_BE

    def gather(self, experts_BTK: Tensor) -> Tensor:
        return experts_BTK

    def local(self, whole_BTK: Tensor) -> Tensor:
        return whole_BTK


class Router(nn.Module):
    """Scores every expert for every token and takes the best K.

    What it says of a token does not depend on how sequences lie over ranks: balance and capacity are judged on whole
    sequences, which `sequences` knows.
    """

    expert_bias: Tensor | None
    split: bool = False
    """Products in fp32 are made of bf16 ones where they can be (`kernels/split_product.py`)."""

    def __init__(self, spec: MoESpec, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__()
        self.sequences: SequenceView = WholeSequences()
        self.routing = spec.routing
        self.top_k = spec.top_k
        self.weight = nn.Parameter(torch.empty(spec.num_experts, spec.hidden_size, dtype=dtype, device=device))
        bias = torch.zeros(spec.num_experts, device=device) if spec.routing.bias_balance else None
        self.register_buffer("expert_bias", bias)

    def forward(self, x_BTC: Tensor) -> Routing:
        B, T = x_BTC.shape[:2]
        logits_NE = self._logits(x_BTC.flatten(0, 1))
        scores_NE = logits_NE.softmax(-1) if self.routing.score == "softmax" else logits_NE.sigmoid()
        experts_NK, weights_NK = select(scores_NE, self.expert_bias, self.top_k, self.routing)
        num_experts, whole_len = scores_NE.shape[-1], T * self.sequences.parts
        counts_BE = whole_BE = count_per_sequence(experts_NK, B, num_experts)
        kept_NK: Tensor | None = None
        dropped = torch.zeros((), dtype=torch.int64, device=x_BTC.device)
        capacity = self._capacity(whole_len, num_experts)
        if capacity:
            whole_BTK = self.sequences.gather(experts_NK.unflatten(0, (B, T)))
            whole_BE = count_per_sequence(whole_BTK, B, num_experts)
            kept_BTK = within_capacity(whole_BTK.flatten(1), whole_BE, capacity).view_as(whole_BTK)
            kept_NK = self.sequences.local(kept_BTK).flatten(0, 1)
            weights_NK = weights_NK * kept_NK
            dropped = (~kept_NK).sum()
        elif self.routing.aux_loss_coef:
            whole_BE = self.sequences.sum_over_parts(counts_BE)
        return Routing(
            experts=experts_NK,
            weights=weights_NK,
            kept=kept_NK,
            aux_loss=self._losses(logits_NE, scores_NE, whole_BE, T, whole_len),
            load=counts_BE.sum(0),
            dropped=dropped,
            entropy=router_entropy(scores_NE.detach(), self.top_k),
        )

    def _logits(self, x_NC: Tensor) -> Tensor:
        """[N, E], fp32 or wider."""
        wide = torch.promote_types(x_NC.dtype, torch.float32)
        dtype = wide if self.routing.router_precision == "fp32" else x_NC.dtype
        jitters = self.training and self.routing.jitter > 0
        if self.split and not jitters and dtype == torch.float32 and not why_not_split(x_NC, self.weight):
            return split_product(x_NC, self.weight)
        x_NC, weight_EC = x_NC.to(dtype), self.weight.to(dtype)
        if jitters:
            x_NC = x_NC * torch.empty_like(x_NC).uniform_(1.0 - self.routing.jitter, 1.0 + self.routing.jitter)
        return F.linear(x_NC, weight_EC).to(wide)

    def _capacity(self, seq_len: int, num_experts: int) -> int:
        """Tokens of one sequence that an expert takes; 0 = all."""
        factor = self.routing.capacity_factor
        if not self.training and self.routing.eval_capacity_factor:
            factor = self.routing.eval_capacity_factor
        return max(1, int(factor * seq_len * self.top_k / num_experts)) if factor else 0

    def _losses(self, logits_NE: Tensor, scores_NE: Tensor, whole_BE: Tensor, local_len: int, whole_len: int) -> Tensor:
        """The part that the tokens here have in the losses of their sequences.

        Args:
            whole_BE: how many tokens of each whole sequence chose each expert.
            local_len, whole_len: tokens of a sequence that are here, and that there are.
        """
        aux_loss = torch.zeros((), dtype=logits_NE.dtype, device=logits_NE.device)
        if self.routing.aux_loss_coef:
            probs_NE = scores_NE
            if self.routing.score == "sigmoid":
                probs_NE = scores_NE / scores_NE.sum(-1, keepdim=True).clamp_min(1e-20)
            probs_BE = probs_NE.unflatten(0, (-1, local_len)).sum(1) / whole_len
            aux_loss = aux_loss + self.routing.aux_loss_coef * balance_loss(whole_BE, probs_BE)
        if self.routing.z_loss_coef:
            square_N = logits_NE.logsumexp(-1).square()
            aux_loss = aux_loss + self.routing.z_loss_coef * square_N.sum() / whole_len
        return aux_loss

    @torch.no_grad()
    def update_expert_bias(self, load_E: Tensor) -> None:
        """Raises the bias of experts that saw fewer tokens than the mean, lowers that of busier ones.

        Args:
            load_E: tokens per expert over the whole global batch.
        Source: auxiliary-loss-free balancing, arXiv:2408.15664.
        """
        assert self.expert_bias is not None, "this router is not balanced by a bias"
        assert self.expert_bias.dtype == torch.float32, "in bf16 the small steps of the bias would be lost"
        load_E = load_E.to(self.expert_bias.device, torch.float32)
        self.expert_bias += self.routing.bias_update_rate * torch.sign(load_E.mean() - load_E)


def select(scores_NE: Tensor, bias_E: Tensor | None, top_k: int, routing: MoEConfig) -> tuple[Tensor, Tensor]:
    """The chosen experts and their weights, both [N, K]. Bias and groups decide who is chosen, not the weight."""
    ranking_NE = scores_NE.detach()
    if bias_E is not None:
        ranking_NE = ranking_NE + bias_E
    if routing.num_groups > 1:
        ranking_NE = keep_best_groups(ranking_NE, routing)
    experts_NK = ranking_NE.topk(top_k, dim=-1).indices
    weights_NK = scores_NE.gather(-1, experts_NK)
    if routing.normalize_top_k:
        weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True).clamp_min(1e-20)
    return experts_NK, weights_NK * routing.score_scale


def keep_best_groups(ranking_NE: Tensor, routing: MoEConfig) -> Tensor:
    """Sets the scores of all experts outside each token's best groups to minus infinity."""
    grouped_NGE = ranking_NE.unflatten(-1, (routing.num_groups, -1))
    if routing.group_score == "max":
        group_NG = grouped_NGE.amax(-1)
    else:
        group_NG = grouped_NGE.topk(min(2, grouped_NGE.shape[-1]), dim=-1).values.sum(-1)
    best_NG = group_NG.topk(routing.top_k_groups, dim=-1).indices
    closed_NG = torch.ones_like(group_NG, dtype=torch.bool).scatter(-1, best_NG, False)
    return grouped_NGE.masked_fill(closed_NG[..., None], float("-inf")).flatten(-2)


def router_entropy(scores_NE: Tensor, top_k: int) -> Tensor:
    """See `Routing.entropy`. Scores that do not add up to 1 are divided by their sum."""
    probs_NE = scores_NE / scores_NE.sum(-1, keepdim=True).clamp_min(1e-20)
    return (torch.special.entr(probs_NE).sum() * (top_k / ENTROPY_UNIT)).round().long()


def count_per_sequence(experts: Tensor, num_sequences: int, num_experts: int) -> Tensor:
    """int64 [B, E]: how many tokens of each sequence chose each expert. Nothing is read by the host.

    Args:
        experts: int64 [B * T, K] or [B, T, K].
    """
    chosen = experts.reshape(num_sequences, -1)
    counts_BE = torch.zeros(num_sequences, num_experts, dtype=torch.int64, device=experts.device)
    return counts_BE.scatter_add_(1, chosen, torch.ones_like(chosen))


def within_capacity(experts_BA: Tensor, counts_BE: Tensor, capacity: int) -> Tensor:
    """Boolean [B, A]: whether an assignment is among the first `capacity` of its expert, in order of position.

    Args:
        experts_BA: the A = T * K assignments of each sequence, in order of position.
        counts_BE: assignments of each expert.
    """
    order_BA = experts_BA.argsort(dim=1, stable=True)
    start_BE = counts_BE.cumsum(1) - counts_BE
    index_BA = torch.arange(experts_BA.shape[1], device=experts_BA.device).expand_as(experts_BA)
    place_BA = index_BA - start_BE.gather(1, experts_BA.gather(1, order_BA))
    return torch.empty_like(place_BA).scatter_(1, order_BA, place_BA) < capacity


def balance_loss(counts_BE: Tensor, probs_BE: Tensor) -> Tensor:
    """E * sum over experts of (share of assignments) * (mean probability), for each sequence; summed over sequences.

    1 for a sequence that uses all experts evenly. Probabilities of some of its tokens, divided by the number of all,
    give their part of the loss. Sources: Switch Transformer, arXiv:2101.03961, eq. 4; per sequence as in DeepSeek-V3,
    arXiv:2412.19437, eq. 17-20.
    """
    share_BE = counts_BE.to(probs_BE.dtype) / counts_BE.sum(1, keepdim=True)
    return counts_BE.shape[1] * (share_BE * probs_BE).sum()
