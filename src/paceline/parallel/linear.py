"""Matrix products of which one side is a collective: what overlaps with what is decided here.

| | forward | backward |
| --- | --- | --- |
| `column_products` | gather, products | gather again beside products for the input; scatter beside those for weights |
| `row_product` | product, scatter | gather, products |

Between forward and backward only this rank's part of the input is kept, 1 / size of what was gathered: without that,
gathered inputs would be about half of a layer's memory with 8 ranks (4 of 8.25 bytes for each token and channel).
Source of the second gather: sequence parallelism, arXiv:2205.05198, section 4.2.2.

Dims: M tokens of all ranks times sequences, C input width, D output width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from paceline.kernels.weight_gradient import accumulate_weight_gradient
from paceline.parallel.accumulate import Place, linear
from paceline.parallel.collectives import Axis
from paceline.parallel.regions import finish_gather, finish_scatter, scatter_sum, start_gather, start_scatter

Postpone = Callable[[Tensor, Callable[[], Tensor]], None]
"""Takes a weight, and what computes its gradient."""


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where the ranks of tp meet for the products of a sublayer."""

    axis: Axis
    name: str
    """Of its collectives."""
    dim: int
    """That the input is gathered along, and the output scattered."""


def column_products(
    x: Tensor,
    weights: tuple[Tensor, ...],
    biases: tuple[Tensor | None, ...],
    axis: Axis,
    name: str,
    *,
    dim: int,
    postpone: Postpone | None = None,
    places: tuple[Place | None, ...] = (),
) -> tuple[Tensor, ...]:
    """The parts of ``x`` of all ranks, joined along ``dim``, times each of this rank's [D, C] weights.

    A `TorchFunctionMode` sees this call as it sees `F.linear`.

    Args:
        postpone: is handed the products for gradients of weights in the backward, in place of autograd.
        places: one for each weight, or none: where backward adds its gradient, in place of handing it to autograd.
    """
    if not torch.compiler.is_compiling() and has_torch_function_unary(x):
        options: dict[str, Any] = {"dim": dim, "postpone": postpone, "places": places}
        seen: tuple[Tensor, ...] = handle_torch_function(
            column_products, (x,), x, weights, biases, axis, name, **options
        )
        return seen
    assert postpone is None or not any(places), "config.exclusions refuses it"
    inputs = weights if postpone is None else tuple(weight.detach() for weight in weights)
    later = None if postpone is None else (postpone, weights)
    each = places or (None,) * len(weights)
    sums = (*(place and place.gradient for place in each), *(place and place.fresh for place in each))
    outputs: tuple[Tensor, ...] = _ColumnProducts.apply(axis, name, dim, later, x, *inputs, *biases, *sums)
    return outputs


def row_product(
    x: Tensor,
    weight_DC: Tensor,
    bias_D: Tensor | None,
    axis: Axis,
    name: str,
    *,
    dim: int,
    place: Place | None = None,
) -> Tensor:
    """This rank's part along ``dim`` of the sum over ranks of ``x`` times weight.

    Args:
        place: where backward adds the weight's gradient, in place of handing it to autograd.
    """
    out = scatter_sum(linear(x, weight_DC, None, place), axis, name, dim=dim)
    # once for each token: after the sum, on this rank's tokens
    return out if bias_D is None else out + bias_D


class _ColumnProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        axis: Axis,
        name: str,
        dim: int,
        later: tuple[Postpone, tuple[Tensor, ...]] | None,
        x: Tensor,
        *matrices: Tensor | None,
    ) -> tuple[Tensor, ...]:
        number = len(matrices) // 4
        weights, biases = matrices[:number], matrices[number : 2 * number]
        ctx.axis, ctx.name, ctx.dim, ctx.later, ctx.number = axis, name, dim, later, number
        ctx.save_for_backward(x, *weights, *matrices[2 * number :])
        whole = finish_gather(start_gather(x, axis, name), axis, dim)
        return tuple(
            F.linear(whole, weight, bias) for weight, bias in zip(weights, biases, strict=True) if weight is not None
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        axis, name, dim, number = ctx.axis, ctx.name, ctx.dim, ctx.number
        x, *others = ctx.saved_tensors
        weights, places, fresh = others[:number], others[number : 2 * number], others[2 * number :]
        wants_x, wants = ctx.needs_input_grad[4], ctx.needs_input_grad[5:]
        wants_weight, wants_bias = wants[:number], wants[number : 2 * number]
        if ctx.later is not None:
            wants_weight = tuple(target.requires_grad for target in ctx.later[1])
        gathering = start_gather(x, axis, name) if any(wants_weight) else None
        grads_MD = [grad.flatten(0, -2) for grad in grads]

        scattering = None
        if wants_x:
            grad_MC = grads_MD[0] @ weights[0]
            for grad_MD, weight_DC in zip(grads_MD[1:], weights[1:], strict=True):
                grad_MC = torch.addmm(grad_MC, grad_MD, weight_DC)
            scattering = start_scatter(grad_MC.view(*grads[0].shape[:-1], -1), axis, name, dim)
        grad_weights: list[Tensor | None] = [None] * len(weights)
        if gathering is not None:
            whole_MC = finish_gather(gathering, axis, dim).flatten(0, -2)
            products = [functools.partial(_product, grad_MD, whole_MC) for grad_MD in grads_MD]
            if ctx.later is None:
                for index, product in enumerate(products):
                    if places[index] is not None:
                        accumulate_weight_gradient(places[index], fresh[index], grads_MD[index], whole_MC)
                    elif wants_weight[index]:
                        grad_weights[index] = product()
            else:
                postpone, targets = ctx.later
                for target, product in zip(targets, products, strict=True):
                    if target.requires_grad:
                        postpone(target, product)
        grad_biases = [grad_MD.sum(0) if wanted else None for grad_MD, wanted in zip(grads_MD, wants_bias, strict=True)]
        grad_x = finish_scatter(scattering) if scattering is not None else None
        return None, None, None, None, grad_x, *grad_weights, *grad_biases, *(None for _ in places + fresh)


def _product(grad_MD: Tensor, x_MC: Tensor) -> Tensor:
    return grad_MD.T @ x_MC
