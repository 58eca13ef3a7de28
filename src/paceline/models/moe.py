"""Mixture of experts: router, dispatcher (a seam), experts as stacked matrices, shared experts.

Dims: B sequences, T tokens, N = B * T, K experts a token takes, A = N * K assignments, E experts, C hidden, F width
of an expert, M input matrices of an expert (2 if gated: gate, up).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.config.model import Activation, FeedForwardSpec, MoESpec
from paceline.kernels.expert_fp8 import Fp8Matrices
from paceline.kernels.expert_rows import ActivationFunction
from paceline.kernels.experts import ExpertKernels, GradientSum, cast_matrices, fused_experts
from paceline.kernels.grouped_gemm import grouped_gemm
from paceline.models.feed_forward import FeedForward, activation_function
from paceline.models.router import Router, Routing


class BlockExtras(NamedTuple):
    """What an expert layer says beside its output. Returned, never stored, so that a block can be recomputed."""

    aux_loss: Tensor
    """fp32 or wider, scalar, with gradient: router losses of the tokens here, summed over sequences, coefficients
    included."""
    load: Tensor
    """int64 [E], tokens here that chose each expert."""
    dropped: Tensor
    """int64 scalar, assignments of tokens here that were dropped for lack of capacity."""
    entropy: Tensor
    """int64 scalar, see `Routing.entropy`."""


class Chosen(NamedTuple):
    """Rows as they came, each with the experts it is for: the experts sort them, and add up what each row's say."""

    experts: Tensor
    """int64 [N, K]."""
    kept: Tensor | None
    """bool [N, K], False where the assignment was dropped; None = all are kept."""


class Dispatched(NamedTuple):
    """Rows brought to their experts: sorted by expert, or as they came."""

    rows: Tensor
    """[A, C]; as they came: [N, C]."""
    weights: Tensor
    """[A], in the order of the rows; as they came: [N, K]."""
    counts: Tensor
    """[E] rows of each (local) expert, where they are sorted."""
    route: Any
    """What `combine` of the same dispatcher needs to bring rows back."""
    chosen: Chosen | None = None
    """Where rows are as they came."""


class TokenDispatcher(Protocol):
    """The seam of expert parallelism: brings tokens to experts and their outputs back."""

    def dispatch(self, x_NC: Tensor, routing: Routing, *, sort: bool = True) -> Dispatched:
        """Brings the tokens here to the experts they chose, and to this rank's experts the tokens that chose them.

        Assignments that were dropped need not travel: their weight is 0.

        Args:
            sort: by expert; otherwise rows are left as they come, with their `Chosen` beside them.
        """
        ...

    def combine(self, rows_AC: Tensor, route: Any) -> Tensor:
        """Sums the K rows of each token: [N, C]. The experts have applied the weights already.

        Rows are as they were dispatched: sorted, or as they came.
        """
        ...


class LocalDispatcher:
    """All experts are here: a sort and two gathers."""

    def dispatch(self, x_NC: Tensor, routing: Routing, *, sort: bool = True) -> Dispatched:
        experts_NK = routing.experts
        if not sort:
            return Dispatched(x_NC, routing.weights, routing.load, None, Chosen(experts_NK, routing.kept))
        order_A = experts_NK.flatten().argsort(stable=True)
        inverse_A = torch.empty_like(order_A).scatter_(0, order_A, torch.arange(len(order_A), device=order_A.device))
        route = (order_A, inverse_A, experts_NK.shape[1])
        # rows of dropped assignments are computed too: leaving them out would make the host wait for their number
        rows_AC = SpreadRows.apply(x_NC, *route)
        return Dispatched(rows_AC, routing.weights.flatten().gather(0, order_A), routing.load, route)

    def combine(self, rows_AC: Tensor, route: Any) -> Tensor:
        return rows_AC if route is None else GatherRows.apply(rows_AC, *route)


def _spread(x_NC: Tensor, order_A: Tensor, top_k: int) -> Tensor:
    return x_NC.index_select(0, order_A // top_k)


def _gather(rows_AC: Tensor, inverse_A: Tensor, top_k: int) -> Tensor:
    if rows_AC.shape[0] < inverse_A.shape[0]:
        rows_AC = F.pad(rows_AC, (0, 0, 0, 1))
    return rows_AC.index_select(0, inverse_A).unflatten(0, (-1, top_k)).sum(1)


class SpreadRows(torch.autograd.Function):
    """Copies each token to its K places. The gradient is the sum of the K copies: a gather, where autograd's own
    backward of indexing adds with atomics, slowly and in no fixed order.

    Arguments after the tokens: the assignment n * K + k of each row; the row of each assignment, which is the number of
    rows where an assignment has none; K.
    """

    @staticmethod
    def forward(ctx: Any, x_NC: Tensor, order_A: Tensor, inverse_A: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(inverse_A)
        ctx.top_k = top_k
        return _spread(x_NC, order_A, top_k)

    @staticmethod
    def backward(ctx: Any, grad_AC: Tensor) -> tuple[Tensor, None, None, None]:
        return _gather(grad_AC, ctx.saved_tensors[0], ctx.top_k), None, None, None


class GatherRows(torch.autograd.Function):
    """Sums the K rows of each token: the mirror image of `SpreadRows`, with the same arguments."""

    @staticmethod
    def forward(ctx: Any, rows_AC: Tensor, order_A: Tensor, inverse_A: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(order_A)
        ctx.top_k = top_k
        return _gather(rows_AC, inverse_A, top_k)

    @staticmethod
    def backward(ctx: Any, grad_NC: Tensor) -> tuple[Tensor, None, None, None]:
        return _spread(grad_NC, ctx.saved_tensors[0], ctx.top_k), None, None, None


class Experts(nn.Module):
    """The matrices of all experts, stacked; each laid out as in `nn.Linear`.

    `up_weight` is [E, M, F, C] with the gate first, so that one grouped product makes gate and up, and cutting F
    over ranks keeps that true; `down_weight` is [E, C, F]. E may be some of the experts, F a part of their width: the
    output is then a part of a sum, to which one rank alone adds the bias (`down_bias_share`).

    With `kernels` they compute from rows as they come (`kernels/experts.py`), and may be told where backward adds the
    matrices' gradients (`aim`).
    """

    kernels: ExpertKernels | None = None
    in_fp8: bool = False
    """With kernels: products for outputs and for gradients of activations."""
    fp8: Fp8Matrices | None = None
    """The matrices as they are, cast, where somebody keeps them so; otherwise they are cast at each use."""
    up_sum: Tensor | None = None
    up_fresh: Tensor | None = None
    down_sum: Tensor | None = None
    down_fresh: Tensor | None = None

    def __init__(
        self,
        num_experts: int,
        spec: FeedForwardSpec,
        dropout: float,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        E, C, F_, M = num_experts, spec.hidden_size, spec.ffn_size, 2 if spec.gated else 1
        factory: dict[str, Any] = {"dtype": dtype, "device": device}
        self.activation = activation_function(spec.activation)
        self.function = _FUSED_FUNCTIONS[spec.activation]
        self.dropout = dropout
        self.down_bias_share = 1.0
        self.up_weight = nn.Parameter(torch.empty(E, M, F_, C, **factory))
        self.down_weight = nn.Parameter(torch.empty(E, C, F_, **factory))
        self.up_bias = nn.Parameter(torch.empty(E, M, F_, **factory)) if spec.bias else None
        self.down_bias = nn.Parameter(torch.empty(E, C, **factory)) if spec.bias else None

    def why_not_fused(self) -> str:
        """The reason why `kernels` cannot compute these experts; empty if they can."""
        if self.up_bias is not None:
            return "experts have biases (model.mlp_bias)"
        return "experts have dropout (model.moe.expert_dropout)" if self.dropout else ""

    def aim(self, attribute: str, place: Tensor | None, fresh: Tensor | None) -> None:
        """The backward of the next forward by `kernels` adds the gradient of ``up_weight`` or ``down_weight`` to
        ``place``; None: it goes to autograd, as usual."""
        side = attribute.removesuffix("_weight")
        setattr(self, f"{side}_sum", place)
        setattr(self, f"{side}_fresh", fresh)

    def forward(self, rows_AC: Tensor, weights_A: Tensor, counts_E: Tensor, chosen: Chosen | None = None) -> Tensor:
        """Output rows, already multiplied by their weights. Rows are sorted by expert, or as they came with what they
        have ``chosen``."""
        if chosen is not None:
            return self._fused(rows_AC, weights_A, chosen)
        hidden_AH = grouped_gemm(rows_AC, self.up_weight.flatten(1, 2), counts_E)
        expert_A = None
        if self.up_bias is not None:
            numbers_E = torch.arange(len(counts_E), device=rows_AC.device)
            expert_A = numbers_E.repeat_interleave(counts_E, output_size=rows_AC.shape[0])
            hidden_AH = hidden_AH + self.up_bias.flatten(1).index_select(0, expert_A)
        hidden_AMF = hidden_AH.unflatten(-1, (self.up_weight.shape[1], -1))
        hidden_AF = self.activation(hidden_AMF[:, 0])
        if hidden_AMF.shape[1] == 2:
            hidden_AF = hidden_AF * hidden_AMF[:, 1]
        # weighting before the last product instead of after it touches F numbers a row, not C
        weight_A1 = weights_A[:, None]
        hidden_AF = (hidden_AF * weight_A1).to(rows_AC.dtype)
        out_AC = grouped_gemm(F.dropout(hidden_AF, self.dropout, self.training), self.down_weight, counts_E)
        if self.down_bias is not None and expert_A is not None:
            weight_A1 = weight_A1 * self.down_bias_share
            out_AC = out_AC + (self.down_bias.index_select(0, expert_A) * weight_A1).to(out_AC.dtype)
        return out_AC

    def _fused(self, x_NC: Tensor, weights_NK: Tensor, chosen: Chosen) -> Tensor:
        assert self.kernels is not None and not self.why_not_fused()
        fp8 = self.fp8
        if self.in_fp8 and fp8 is None:
            fp8 = cast_matrices(self.up_weight, self.down_weight)
        return fused_experts(
            x_NC,
            chosen.experts,
            weights_NK,
            chosen.kept,
            self.up_weight,
            self.down_weight,
            function=self.function,
            kernels=self.kernels,
            up_sum=_sum_of(self.up_sum, self.up_fresh),
            down_sum=_sum_of(self.down_sum, self.down_fresh),
            fp8=fp8,
        )


def _sum_of(values: Tensor | None, fresh: Tensor | None) -> GradientSum | None:
    return None if values is None or fresh is None else GradientSum(values=values, fresh=fresh)


_FUSED_FUNCTIONS: dict[Activation, ActivationFunction] = {
    "swiglu": "silu",
    "geglu": "gelu_tanh",
    "gelu": "gelu",
    "gelu_tanh": "gelu_tanh",
    "relu": "relu",
}
"""What `activation_function` is called by `kernels/experts.py`."""


class MoE(nn.Module):
    """A layer of experts; every token also passes the shared experts, if there are any."""

    def __init__(self, spec: MoESpec, dtype: torch.dtype, device: torch.device | str | None) -> None:
        super().__init__()
        self.dispatcher: TokenDispatcher = LocalDispatcher()
        self.router = Router(spec, dtype, device)
        self.experts = Experts(spec.num_experts, spec.expert, spec.routing.expert_dropout, dtype, device)
        self.shared = FeedForward(spec.shared, dtype, device) if spec.shared else None
        self.shared_gate: nn.Linear | None = None
        if spec.shared and spec.routing.shared_gate:
            self.shared_gate = nn.Linear(spec.hidden_size, 1, bias=False, dtype=dtype, device=device)

    def forward(self, x_BTC: Tensor) -> tuple[Tensor, BlockExtras]:
        x_NC = x_BTC.flatten(0, 1)
        routing = self.router(x_BTC)
        out_NC = self.run_experts(x_NC, routing)
        if self.shared is not None:
            shared_NC = self.shared(x_NC)
            if self.shared_gate is not None:
                shared_NC = shared_NC * self.shared_gate(x_NC).sigmoid()
            out_NC = out_NC + shared_NC
        extras = BlockExtras(routing.aux_loss, routing.load, routing.dropped, routing.entropy)
        return out_NC.view_as(x_BTC), extras

    def run_experts(self, x_NC: Tensor, routing: Routing) -> Tensor:
        """The weighted sum of what each token's experts say."""
        sent = self.dispatcher.dispatch(x_NC, routing, sort=self.experts.kernels is None)
        out_AC = self.experts(sent.rows, sent.weights, sent.counts, sent.chosen)
        return self.dispatcher.combine(out_AC, sent.route)
