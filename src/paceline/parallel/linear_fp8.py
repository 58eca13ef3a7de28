"""fp8 products of which one side is a collective over tp: `linear.py` in fp8.

| | forward | backward |
| --- | --- | --- |
| `fp8_column_products` | gather, cast, products | cast, gather beside products for the input; scatter beside others |
| `fp8_row_product` | cast, product, scatter | gather, cast, products |

The gather of the first one's backward is in fp8, all others in bf16.

Scales are those of whole matrices (`kernels.fp8.Cut`): what a rank has whole it looks at alone, of what is cut over tp
the largest numbers are compared, 4 bytes each. Scales of earlier steps (`DelayedPair`) are the same on all ranks, and
nothing is compared. Ranks therefore round as one process does; sums of partial products are rounded to bf16 on their
way, as without fp8. Two kinds of gradients are rounded to fp8 in parts, each rank its own, before they are summed: of
key/value heads that several ranks hold, and of the latents of latent attention.

Between forward and backward a rank keeps its own part of the sequence in fp8, cast by the scale of all of it: 1 / size
of the input, 1 byte an element.

Dims: M tokens of all ranks times sequences, K input width, N output width on a rank, of all joined layers together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.kernels.fp8 import (
    NO_PLACE,
    CachedWeight,
    Casting,
    Cut,
    cast_gradient,
    cast_operand,
    delayed_of,
    fp8_linears,
    multiply,
    products_without_gradients,
    split_outputs,
    states_of,
    tensors_of,
    weight_columns,
    weight_gradients,
)
from paceline.kernels.fp8_cast import E4M3, CastKernel, Fp8, Scaling, cast_by, cast_rows, column_scale, product, turned
from paceline.kernels.fp8_delayed import DelayedPair
from paceline.parallel.collectives import Axis
from paceline.parallel.linear import Meeting
from paceline.parallel.regions import (
    finish_gather,
    finish_scatter,
    gather_sequence,
    max_over,
    scatter_sum,
    start_gather,
    start_scatter,
)


@dataclass(frozen=True, kw_only=True)
class WidestOver:
    """The largest numbers of parts to those of all ranks' parts."""

    axis: Axis
    name: str

    def __call__(self, largest: Tensor) -> Tensor:
        return max_over(largest, self.axis, self.name)


def fp8_column_products(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    meeting: Meeting,
    *,
    scaling: Scaling,
    cut: Cut | None,
    cached: CachedWeight | None = None,
    kernel: CastKernel = "torch",
    delayed: DelayedPair | None = None,
    place: tuple[Tensor | None, Tensor | None] = NO_PLACE,
) -> tuple[Tensor, ...]:
    """The parts of ``x`` of all ranks times each of this rank's [N, K] weights.

    Args:
        cut: `Cut` over outputs; None where every rank has all of these weights.
        delayed, place: see `fp8_linears`.
    """
    if not torch.is_grad_enabled():
        whole = gather_sequence(x, meeting.axis, meeting.name, dim=meeting.dim)
        return split_outputs(products_without_gradients(whole, weights, scaling, cached, cut), weights, biases)
    tensors = (*states_of(delayed), *tensors_of(cached, scaling), *place)
    joined = _ColumnProducts.apply(meeting, scaling, kernel, cut, *tensors, x, *weights)
    return split_outputs(joined, weights, biases)


def fp8_row_product(
    x: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None,
    meeting: Meeting,
    *,
    scaling: Scaling,
    cut: Cut | None,
    cached: CachedWeight | None = None,
    kernel: CastKernel = "torch",
    delayed: DelayedPair | None = None,
    place: tuple[Tensor | None, Tensor | None] = NO_PLACE,
) -> Tensor:
    """This rank's part of the sum over ranks of ``x`` times weight. ``cut``: over inputs."""
    options: dict[str, Any] = {"scaling": scaling, "cached": cached, "kernel": kernel, "cut": cut}
    (partial,) = fp8_linears(x, (weight_NK,), (None,), delayed=delayed, place=place, **options)
    out = scatter_sum(partial, meeting.axis, meeting.name, dim=meeting.dim)
    # once for each token: after the sum, on this rank's tokens
    return out if bias_N is None else out + bias_N


class _ColumnProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        meeting: Meeting,
        scaling: Scaling,
        kernel: CastKernel,
        cut: Cut | None,
        x_state: Tensor | None,
        x_known: Tensor | None,
        grad_state: Tensor | None,
        grad_known: Tensor | None,
        cached_rows: Tensor | None,
        rows_scale: Tensor | None,
        cached_columns: Tensor | None,
        columns_scale: Tensor | None,
        place: Tensor | None,
        fresh: Tensor | None,
        x: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        ctx.meeting, ctx.scaling, ctx.kernel, ctx.cut = meeting, scaling, kernel, cut
        ctx.is_cached = cached_rows is not None
        whole = finish_gather(start_gather(x, meeting.axis, meeting.name), meeting.axis, meeting.dim)
        x_MK, delayed = whole.flatten(0, -2), delayed_of(x_state, x_known)
        x_rows, _ = cast_operand(x_MK, E4M3, Casting(scaling, kernel, None, delayed), rows=True, columns=False)
        assert x_rows is not None
        own: tuple[Tensor | None, Tensor | None] = (None, None)
        if any(ctx.needs_input_grad[15:]):
            if delayed is not None:
                own = (_own_part(x_rows.values.view(whole.shape), meeting), x_rows.scale)
            else:
                scale = x_rows.scale if scaling == "tensorwise" else column_scale([x_MK], E4M3, scaling)
                own = (cast_by(x, scale, E4M3), scale)
        kept = (grad_state, grad_known, place, fresh, *own)
        if cached_rows is not None and rows_scale is not None:
            weight_rows = Fp8(cached_rows, rows_scale)
            ctx.save_for_backward(*kept, cached_columns, rows_scale if columns_scale is None else columns_scale)
        else:
            weight_rows = cast_rows(weights, E4M3, scaling, cut and cut.weight)
            ctx.save_for_backward(*kept, *weights)
        ctx.sizes = [weight.shape[0] for weight in weights]
        ctx.weight_dtype = weights[0].dtype
        return multiply(x_rows, weight_rows, x.dtype, whole.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        meeting, axis = ctx.meeting, ctx.meeting.axis
        state, known, place, fresh, own, x_scale, *weights = ctx.saved_tensors
        wants_x, wants_weight = ctx.needs_input_grad[14], any(ctx.needs_input_grad[15:])
        # first: scales that are compared over ranks would otherwise wait behind the gather
        how = Casting(ctx.scaling, ctx.kernel, ctx.cut and ctx.cut.gradient, delayed_of(state, known))
        rows, columns = cast_gradient(grad, how, rows=wants_x, columns=wants_weight)
        gathering = None
        if columns is not None:
            # as bytes: not every backend moves fp8
            gathering = start_gather(own.view(torch.uint8), axis, meeting.name)
        scattering = None
        if rows is not None:
            weight_KN = weight_columns(weights, ctx.scaling, ctx.cut, is_cached=ctx.is_cached)
            grad_MK = product(rows, weight_KN, grad.dtype, fast=False)
            scattering = start_scatter(grad_MK.view(*grad.shape[:-1], -1), axis, meeting.name, meeting.dim)
        grad_weights: Sequence[Tensor | None] = [None] * len(ctx.sizes)
        if columns is not None and gathering is not None:
            x_MK = finish_gather(gathering, axis, meeting.dim).flatten(0, -2).view(E4M3)
            x_KM = turned(x_MK, x_scale)
            grad_weights = weight_gradients(columns, x_KM, ctx.sizes, ctx.weight_dtype, place, fresh)
        grad_x = finish_scatter(scattering) if scattering is not None else None
        return *(None for _ in range(14)), grad_x, *grad_weights


def _own_part(whole: Tensor, meeting: Meeting) -> Tensor:
    """What this rank gave to a gathered fp8 tensor."""
    size = whole.shape[meeting.dim] // meeting.axis.size
    # as bytes: not every operation knows fp8
    part = whole.view(torch.uint8).narrow(meeting.dim, meeting.axis.index * size, size)
    return part.contiguous().view(whole.dtype)
