"""What happens to the rows of experts between their matrix products, in operations of torch.

    spread             tokens -> K rows each, sorted by expert                    [N, C] -> [A, C]
    activate           act(gate) * up * the router's weight                       [A, M, F] -> [A, F]
    activate_backward  its gradients, and its output once more for the backward of the product behind it
    combine            rows -> the sum of each token's K                          [A, C] -> [N, C]

`combine` is also the backward of `spread`, and the other way round. Everything in between is in at least fp32 and is
rounded once, on its way to memory. `expert_rows_triton` does each of them in one pass.

Weighting before the last product instead of after it touches F numbers a row, not C.

Dims as in `expert_order`; C hidden, F width of an expert, M input matrices of an expert (2 if gated: gate, up).
"""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from paceline.kernels.expert_order import ExpertOrder
from paceline.kernels.precision import at_least_fp32, wide_dtype

ActivationFunction = Literal["silu", "gelu", "gelu_tanh", "relu"]
FUNCTIONS: tuple[ActivationFunction, ...] = get_args(ActivationFunction)


def spread(x_NC: Tensor, order: ExpertOrder, top_k: int) -> Tensor:
    """[A, C]: each token in its K rows."""
    return x_NC.index_select(0, order.order // top_k)


def combine(rows_AC: Tensor, order: ExpertOrder, top_k: int) -> Tensor:
    """[N, C]: the sum of each token's rows. Dropped assignments have none; without any row the sums are zero."""
    if not len(rows_AC):
        return rows_AC.new_zeros(len(order.place) // top_k, rows_AC.shape[1])
    rows = rows_AC.index_select(0, order.place.clamp(min=0))
    # not a product with 0: what lies in nobody's rows may be nan
    rows = at_least_fp32(rows).masked_fill((order.place < 0)[:, None], 0.0)
    return rows.unflatten(0, (-1, top_k)).sum(1).to(rows_AC.dtype)


def activate(hidden_AMF: Tensor, weights_NK: Tensor, order: ExpertOrder, function: ActivationFunction) -> Tensor:
    """[A, F]: the activation, times the other matrix's output where there is one, times the row's weight."""
    value_AF, _ = value_and_slope(at_least_fp32(hidden_AMF[:, 0]), function)
    if hidden_AMF.shape[1] == 2:
        value_AF = value_AF * at_least_fp32(hidden_AMF[:, 1])
    return (value_AF * _weight_of_rows(weights_NK, order)).to(hidden_AMF.dtype)


def activate_backward(
    hidden_AMF: Tensor, grad_AF: Tensor, weights_NK: Tensor, order: ExpertOrder, function: ActivationFunction
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the hidden numbers [A, M, F]; `activate` [A, F]; gradients of the weights [N, K]."""
    value_AF, slope_AF = value_and_slope(at_least_fp32(hidden_AMF[:, 0]), function)
    weight_A1, grad_wide_AF = _weight_of_rows(weights_NK, order), at_least_fp32(grad_AF)
    weighted_AF = grad_wide_AF * weight_A1
    if hidden_AMF.shape[1] == 2:
        up_AF = at_least_fp32(hidden_AMF[:, 1])
        grad_hidden = torch.stack((weighted_AF * slope_AF * up_AF, weighted_AF * value_AF), dim=1)
        value_AF = value_AF * up_AF
    else:
        grad_hidden = (weighted_AF * slope_AF)[:, None]
    by_row_A = (grad_wide_AF * value_AF).sum(1)
    by_assignment_A = by_row_A.index_select(0, order.place.clamp(min=0)).masked_fill(order.place < 0, 0.0)
    dtype = hidden_AMF.dtype
    return (
        grad_hidden.to(dtype),
        (value_AF * weight_A1).to(dtype),
        by_assignment_A.view_as(weights_NK).to(weights_NK.dtype),
    )


def _weight_of_rows(weights_NK: Tensor, order: ExpertOrder) -> Tensor:
    """[A, 1], in at least fp32."""
    return at_least_fp32(weights_NK.flatten().index_select(0, order.order))[:, None]


def value_and_slope(x: Tensor, function: ActivationFunction) -> tuple[Tensor, Tensor]:
    """The function, and its derivative. ``x`` in at least fp32."""
    assert x.dtype == wide_dtype(x.dtype)
    if function == "silu":
        sigmoid = x.sigmoid()
        return x * sigmoid, sigmoid * (1 + x * (1 - sigmoid))
    if function == "gelu":
        share = 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
        return x * share, share + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    if function == "gelu_tanh":
        scale = math.sqrt(2 / math.pi)
        tanh = torch.tanh(scale * (x + 0.044715 * x**3))
        slope = 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * scale * (1 + 3 * 0.044715 * x * x)
        return 0.5 * x * (1 + tanh), slope
    assert function == "relu", function
    return x.clamp(min=0), (x > 0).to(x.dtype)
