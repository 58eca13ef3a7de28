"""A layer of experts from tokens to tokens, with a backward of its own: the fast twin of `models/moe.py`'s plain path.

    forward     order rows by expert -> x @ up -> activation, weighted -> @ down -> sum of each token's K rows
    backward    grad @ down.T -> activation's gradients, and its output again -> @ up.T -> sum of each token's K rows
                weights: grad.T @ activation's output, hidden's gradient.T @ x

Kept between forward and backward, bytes in bf16: the tokens (2 N C, which the router keeps anyway), the hidden numbers
(2 A M F) and the order (8 A). The K copies of tokens and of gradients are made again where they are wanted, or never
exist; the activation's output is made again.

Nothing is read by the host, and no sum depends on which thread comes first: repeats are bit-equal. Rows of dropped
assignments are not computed.

Who does what is an `ExpertKernels`; on a CPU everything is done by operations of torch, in any precision.

Dims: N tokens, K experts a token takes, A = N * K, E experts, C hidden, F width of an expert, M input matrices of an
expert (2 if gated: gate, up).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, library

from paceline.kernels import expert_fp8, expert_gemm, expert_rows
from paceline.kernels.expert_fp8 import Fp8Matrices, Fp8Rows
from paceline.kernels.expert_gemm import Rows
from paceline.kernels.expert_order import ExpertOrder, expert_order_reference
from paceline.kernels.expert_rows import ActivationFunction
from paceline.kernels.fp8_cast import E4M3
from paceline.kernels.triton_found import has_triton

Provider = Literal["torch", "triton"]


@dataclass(frozen=True, kw_only=True)
class ExpertKernels:
    """Who computes which part. "torch": its operations, and for products its grouped kernel (CUTLASS on Hopper), before
    which picked rows are written out; "triton": our kernels."""

    rows: Provider = "triton"
    """Order, copies, activation, sums over K."""
    forward: Provider = "torch"
    input_gradient: Provider = "torch"
    weight_gradient: Provider = "triton"
    """Only ours adds to sums itself."""

    def spelled(self) -> str:
        """As an operator takes it."""
        return " ".join((self.rows, self.forward, self.input_gradient, self.weight_gradient))

    @classmethod
    def of(cls, spelled: str) -> ExpertKernels:
        names = spelled.split()
        assert len(names) == 4 and set(names) <= {"torch", "triton"}, spelled
        providers: list[Any] = names
        return cls(rows=providers[0], forward=providers[1], input_gradient=providers[2], weight_gradient=providers[3])


GROUPED = ExpertKernels()
TRITON = ExpertKernels(forward="triton", input_gradient="triton")


@dataclass(frozen=True, kw_only=True)
class GradientSum:
    """Where backward adds the gradient of a stack of matrices, in place of handing it to autograd."""

    values: Tensor
    """In the shape of the parameter."""
    fresh: Tensor
    """Bool scalar in host memory: what `values` holds is to be replaced."""


def fused_experts(
    x_NC: Tensor,
    experts_NK: Tensor,
    weights_NK: Tensor,
    kept_NK: Tensor | None,
    up_EMFC: Tensor,
    down_ECF: Tensor,
    *,
    function: ActivationFunction,
    kernels: ExpertKernels = GROUPED,
    up_sum: GradientSum | None = None,
    down_sum: GradientSum | None = None,
    fp8: Fp8Matrices | None = None,
) -> Tensor:
    """[N, C]: the weighted sum of what each token's experts say.

    Args:
        experts_NK: integers, which experts.
        weights_NK: at least fp32, with gradient.
        kept_NK: bool, False where an assignment was dropped.
        up_EMFC: the gate first, if there is one; laid out as in `nn.Linear`, like ``down_ECF``.
        fp8: the matrices as they are, cast: products for outputs and for gradients of activations are in fp8. For bf16.
    """
    places: list[Tensor | None] = []
    for side in (up_sum, down_sum):
        places += [None, None] if side is None or not torch.is_grad_enabled() else [side.values, side.fresh]
    out: Tensor = _Experts.apply(
        x_NC, experts_NK, weights_NK, kept_NK, up_EMFC, down_ECF, function, kernels.spelled(), *places, *(fp8 or ())
    )
    return out


def cast_matrices(up_EMFC: Tensor, down_ECF: Tensor) -> Fp8Matrices:
    """What `fused_experts` multiplies in fp8: to be made once for each change of the weights."""
    return Fp8Matrices(*torch.ops.paceline.experts_cast.default(up_EMFC.detach(), down_ECF.detach()))


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_NC: Tensor,
        experts_NK: Tensor,
        weights_NK: Tensor,
        kept_NK: Tensor | None,
        up: Tensor,
        down: Tensor,
        function: str,
        kernels: str,
        *others: Tensor | None,
    ) -> Tensor:
        places, fp8 = others[:4], others[4:]
        ahead, back = (list(fp8[:2] + fp8[4:6]), list(fp8[2:4] + fp8[6:8])) if fp8 else ([], [])
        out_NC, *kept = torch.ops.paceline.experts_forward.default(
            x_NC, experts_NK, weights_NK, kept_NK, up, down, ahead, function, kernels
        )
        ctx.save_for_backward(x_NC, weights_NK, up, down, *kept, *places, *back)
        ctx.number = len(others)
        ctx.function, ctx.kernels = function, kernels
        ctx.set_materialize_grads(False)
        return out_NC

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_NC,) = grads
        if grad_NC is None:
            return (None,) * (8 + ctx.number)
        x_NC, weights_NK, up, down, hidden, *rest = ctx.saved_tensors
        order, (up_place, up_fresh, down_place, down_fresh), fp8 = rest[:3], rest[3:7], rest[7:]
        grad_x, grad_weights, grad_hidden, act, grad_rows = torch.ops.paceline.experts_backward.default(
            grad_NC, weights_NK, hidden, *order, up, down, fp8, ctx.function, ctx.kernels
        )
        top_k = weights_NK.shape[1]
        picks = len(grad_rows) == 0
        last = (grad_NC if picks else grad_rows, act, *order, top_k, picks, False, ctx.kernels)
        first = (grad_hidden, x_NC, *order, top_k, False, True, ctx.kernels)
        found: list[Tensor | None] = []
        # of the last matrix first, as autograd would
        for weight, place, fresh, operands, wanted in (
            (down, down_place, down_fresh, last, ctx.needs_input_grad[5]),
            (up, up_place, up_fresh, first, ctx.needs_input_grad[4]),
        ):
            made = None
            if place is not None:
                torch.ops.paceline.experts_add_weight_gradient.default(place, fresh, *operands)
            elif wanted:
                made = torch.ops.paceline.experts_weight_gradient.default(*operands).view_as(weight)
            found.append(made)
        grad_down, grad_up = found
        return grad_x, None, grad_weights, None, grad_up, grad_down, None, None, *(None,) * ctx.number


# ---- operators: compiled code looks into none of this

_PREFIX = "paceline::experts_"

library.define(
    _PREFIX + "forward",
    "(Tensor x, Tensor experts, Tensor weights, Tensor? kept, Tensor up, Tensor down, Tensor[] fp8,"
    " str function, str kernels) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
library.define(
    _PREFIX + "backward",
    "(Tensor grad, Tensor weights, Tensor hidden, Tensor order, Tensor place, Tensor ends, Tensor up, Tensor down,"
    " Tensor[] fp8, str function, str kernels) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
library.define(_PREFIX + "cast", f"(Tensor up, Tensor down) -> ({', '.join(['Tensor'] * 8)})")
_OPERANDS = (
    "Tensor grad, Tensor x, Tensor order, Tensor place, Tensor ends, int top_k, bool grad_picked, bool x_picked,"
    " str kernels"
)
FORWARD_OPERATION = torch.ops.paceline.experts_forward.default
"""What recomputation may store the outputs of."""
library.define(_PREFIX + "weight_gradient", f"({_OPERANDS}) -> Tensor")
library.define(_PREFIX + "add_weight_gradient", f"(Tensor(a!) sums, Tensor(b!) fresh, {_OPERANDS}) -> ()")


@library.impl(_PREFIX + "forward", "default")
def _forward(
    x_NC: Tensor,
    experts_NK: Tensor,
    weights_NK: Tensor,
    kept_NK: Tensor | None,
    up_EMFC: Tensor,
    down_ECF: Tensor,
    fp8: list[Tensor],
    function: ActivationFunction,
    kernels: str,
) -> tuple[Tensor, ...]:
    """The output, the hidden numbers [A, M, F], and the order."""
    who, top_k = ExpertKernels.of(kernels), experts_NK.shape[1]
    steps, order = row_steps(who.rows, x_NC), expert_order(experts_NK, kept_NK, len(up_EMFC), who.rows)
    rows = _operand(x_NC, order, bool(fp8), top_k=top_k, picked=True, spread=steps.spread)
    up, down = ((fp8[0].mT, fp8[1]), (fp8[2].mT, fp8[3])) if fp8 else ((up_EMFC.flatten(1, 2).mT,), (down_ECF.mT,))
    products = _products(who.forward, x_NC)
    if products is expert_gemm:
        hidden_AMF = products.product(rows, *up).unflatten(1, up_EMFC.shape[1:3])
        act_AF = steps.activate(hidden_AMF, weights_NK, order, function)
    else:
        gated = up_EMFC.shape[1] == 2
        hidden_AH, act_AF = products.product_with_activation(rows, up[0], weights_NK, function, *up[1:], gated=gated)
        hidden_AMF = hidden_AH.unflatten(1, up_EMFC.shape[1:3])
    del rows
    out_AC = products.product(_operand(act_AF, order, bool(fp8)), *down)
    return steps.combine(out_AC, order, top_k), hidden_AMF, *order


@library.register_fake(_PREFIX + "forward")
def _forward_fake(
    x_NC: Tensor,
    experts_NK: Tensor,
    weights_NK: Tensor,
    kept_NK: Tensor | None,
    up_EMFC: Tensor,
    down_ECF: Tensor,
    fp8: list[Tensor],
    function: str,
    kernels: str,
) -> tuple[Tensor, ...]:
    A = experts_NK.numel()
    by_assignment = x_NC.new_empty(A, dtype=torch.int32)
    ends_E = x_NC.new_empty(up_EMFC.shape[0], dtype=torch.int32)
    hidden_AMF = x_NC.new_empty(A, *up_EMFC.shape[1:3])
    return x_NC.new_empty(x_NC.shape), hidden_AMF, by_assignment, torch.empty_like(by_assignment), ends_E


@library.impl(_PREFIX + "backward", "default")
def _backward(
    grad_NC: Tensor,
    weights_NK: Tensor,
    hidden_AMF: Tensor,
    order_A: Tensor,
    place_A: Tensor,
    ends_E: Tensor,
    up_EMFC: Tensor,
    down_ECF: Tensor,
    fp8: list[Tensor],
    function: ActivationFunction,
    kernels: str,
) -> tuple[Tensor, ...]:
    """Gradients of tokens and of weights; the gradient of the hidden numbers [A, H] and the activation's output, which
    the gradients of the matrices are made of; the output's gradient, [A, C], where that is written out for them too."""
    who, top_k = ExpertKernels.of(kernels), weights_NK.shape[1]
    steps, order = row_steps(who.rows, grad_NC), ExpertOrder(order_A, place_A, ends_E)
    products = _products(who.input_gradient, grad_NC)
    up, down = ((fp8[0].mT, fp8[1]), (fp8[2].mT, fp8[3])) if fp8 else ((up_EMFC.flatten(1, 2),), (down_ECF,))
    picked: dict[str, Any] = {"top_k": top_k, "picked": True, "spread": steps.spread}
    grad = _operand(grad_NC.contiguous(), order, bool(fp8), **picked)
    grad_act_AF = products.product(grad, *down, fast=False)
    grad_rows = grad_NC.new_empty(0, grad_NC.shape[1])
    if not _ours(who.weight_gradient, grad_NC):
        # torch's product for the weights would write it out once more
        grad_rows = (Rows(grad_NC.contiguous(), order, **picked) if fp8 else grad).dense()
    del grad
    grad_hidden, act_AF, grad_weights = steps.activate_backward(hidden_AMF, grad_act_AF, weights_NK, order, function)
    del grad_act_AF
    grad_hidden_AH = grad_hidden.flatten(1)
    grad_x_AC = products.product(_operand(grad_hidden_AH, order, bool(fp8)), *up, fast=False)
    return steps.combine(grad_x_AC, order, top_k), grad_weights, grad_hidden_AH, act_AF, grad_rows


@library.register_fake(_PREFIX + "backward")
def _backward_fake(
    grad_NC: Tensor,
    weights_NK: Tensor,
    hidden_AMF: Tensor,
    order_A: Tensor,
    place_A: Tensor,
    ends_E: Tensor,
    up_EMFC: Tensor,
    down_ECF: Tensor,
    fp8: list[Tensor],
    function: str,
    kernels: str,
) -> tuple[Tensor, ...]:
    (A, M, F), C = hidden_AMF.shape, grad_NC.shape[1]
    picks = _ours(ExpertKernels.of(kernels).weight_gradient, grad_NC)
    return (
        grad_NC.new_empty(grad_NC.shape),
        torch.empty_like(weights_NK, memory_format=torch.contiguous_format),
        grad_NC.new_empty(A, M * F),
        grad_NC.new_empty(A, F),
        grad_NC.new_empty(0 if picks else A, C),
    )


@library.impl(_PREFIX + "cast", "default")
def _cast(up_EMFC: Tensor, down_ECF: Tensor) -> tuple[Tensor, ...]:
    up_EHC, casts = up_EMFC.flatten(1, 2), _casts(up_EMFC)
    found = (casts.cast_rows(up_EHC), casts.cast_turned(up_EHC), casts.cast_rows(down_ECF), casts.cast_turned(down_ECF))
    return tuple(tensor for rows in found for tensor in rows)


@library.register_fake(_PREFIX + "cast")
def _cast_fake(up_EMFC: Tensor, down_ECF: Tensor) -> tuple[Tensor, ...]:
    E, C, F = down_ECF.shape
    shapes = ((E, up_EMFC.shape[1] * F, C), (E, C, up_EMFC.shape[1] * F), (E, C, F), (E, F, C))
    pairs = ((down_ECF.new_empty(s, dtype=E4M3), down_ECF.new_empty(s[:2], dtype=torch.float32)) for s in shapes)
    return tuple(tensor for pair in pairs for tensor in pair)


@library.impl(_PREFIX + "weight_gradient", "default")
def _weight_gradient(
    grad: Tensor,
    x: Tensor,
    order_A: Tensor,
    place_A: Tensor,
    ends_E: Tensor,
    top_k: int,
    grad_picked: bool,
    x_picked: bool,
    kernels: str,
) -> Tensor:
    """[E, D, X], in the dtype of the operands, which are rows of experts or, if picked, tokens."""
    out_EDX = x.new_empty(len(ends_E), grad.shape[1], x.shape[1])
    order = ExpertOrder(order_A, place_A, ends_E)
    _add(out_EDX, (grad, grad_picked), (x, x_picked), order, top_k, kernels, first=True)
    return out_EDX


@library.register_fake(_PREFIX + "weight_gradient")
def _weight_gradient_fake(
    grad: Tensor,
    x: Tensor,
    order_A: Tensor,
    place_A: Tensor,
    ends_E: Tensor,
    top_k: int,
    grad_picked: bool,
    x_picked: bool,
    kernels: str,
) -> Tensor:
    return x.new_empty(ends_E.shape[0], grad.shape[1], x.shape[1])


@library.impl(_PREFIX + "add_weight_gradient", "default")
def _add_weight_gradient(
    sums: Tensor,
    fresh: Tensor,
    grad: Tensor,
    x: Tensor,
    order_A: Tensor,
    place_A: Tensor,
    ends_E: Tensor,
    top_k: int,
    grad_picked: bool,
    x_picked: bool,
    kernels: str,
) -> None:
    order = ExpertOrder(order_A, place_A, ends_E)
    sums_EDX = sums.view(len(ends_E), grad.shape[1], x.shape[1])
    _add(sums_EDX, (grad, grad_picked), (x, x_picked), order, top_k, kernels, first=bool(fresh))
    fresh.fill_(False)


@library.register_fake(_PREFIX + "add_weight_gradient")
def _add_weight_gradient_fake(
    sums: Tensor,
    fresh: Tensor,
    grad: Tensor,
    x: Tensor,
    order_A: Tensor,
    place_A: Tensor,
    ends_E: Tensor,
    top_k: int,
    grad_picked: bool,
    x_picked: bool,
    kernels: str,
) -> None:
    return None


def _add(
    out_EDX: Tensor,
    grad: tuple[Tensor, bool],
    x: tuple[Tensor, bool],
    order: ExpertOrder,
    top_k: int,
    kernels: str,
    *,
    first: bool,
) -> None:
    who = ExpertKernels.of(kernels)
    spread = row_steps(who.rows, out_EDX).spread
    operands = [Rows(values.contiguous(), order, top_k, picked=picked, spread=spread) for values, picked in (grad, x)]
    _products(who.weight_gradient, out_EDX).weight_product(*operands, out_EDX, first=first)


# ---- who does it


def _ours(provider: Provider, x: Tensor) -> bool:
    return provider == "triton" and x.is_cuda and x.dtype != torch.float64 and has_triton()


def row_steps(provider: Provider, x: Tensor) -> Any:
    """`expert_rows`, or what stands for it: the module with `spread`, `combine` and what is between."""
    if not _ours(provider, x):
        return expert_rows
    from paceline.kernels import expert_rows_triton

    return expert_rows_triton


def expert_order(
    experts_NK: Tensor, kept_NK: Tensor | None, num_experts: int, provider: Provider = "triton"
) -> ExpertOrder:
    """See `ExpertOrder`; as `expert_order_reference`. Nothing is read by the host."""
    if not _ours(provider, experts_NK):
        return expert_order_reference(experts_NK, kept_NK, num_experts)
    from paceline.kernels.expert_order_triton import expert_order_triton

    return expert_order_triton(experts_NK, kept_NK, num_experts)


def _operand(values: Tensor, order: ExpertOrder, fp8: bool, **options: Any) -> Rows:
    """Rows of a product, cast if it is in fp8."""
    if not fp8:
        return Rows(values, order, **options)
    rows: Fp8Rows = _casts(values).cast_rows(values)
    return Rows(rows.values, order, scale=rows.scale, **options)


def _casts(x: Tensor) -> Any:
    """`expert_fp8`, or what stands for it."""
    if not _ours("triton", x):
        return expert_fp8
    from paceline.kernels import expert_fp8_triton

    return expert_fp8_triton


def _products(provider: Provider, x: Tensor) -> Any:
    """`expert_gemm`, or what stands for it."""
    if not _ours(provider, x):
        return expert_gemm
    from paceline.kernels import expert_gemm_triton

    return expert_gemm_triton
