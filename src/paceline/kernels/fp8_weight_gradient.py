"""The gradient of fp8 linears' weights, written to where gradients are summed by the product itself.

In the first micro-batch of a step the product of all joined weights replaces what is there; in later ones it writes a
tensor of its own, which is added: `torch._scaled_mm` (torch 2.11 - 2.13) cannot add. Of n elements in bf16 that is 2n
bytes instead of 2n + 2n + 2n in the first, and as many as ever in others. Sums are the same bits as without.

Dims: N output widths of all joined layers, K input width, M tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, library

from paceline.kernels import fp8_cast
from paceline.kernels.fp8_cast import Fp8

_NAME = "paceline::accumulate_fp8_weight_gradient"

# by its schema, as in `weight_gradient`: less time a call
library.define(
    _NAME,
    "(Tensor(a!) place_NK, Tensor(b!) fresh, Tensor grad_NM, Tensor grad_scale, Tensor x_KM, Tensor x_scale) -> ()",
)


@library.impl(_NAME, "default")
def _accumulate(
    place_NK: Tensor, fresh: Tensor, grad_NM: Tensor, grad_scale: Tensor, x_KM: Tensor, x_scale: Tensor
) -> None:
    first, operands = bool(fresh.all()), (Fp8(grad_NM, grad_scale), Fp8(x_KM, x_scale))
    assert first or not bool(fresh.any()), "gradients of layers that share an input arrive together"
    if first:
        fp8_cast.product(*operands, place_NK.dtype, fast=False, out=place_NK)
        fresh.fill_(False)
    else:
        place_NK.add_(fp8_cast.product(*operands, place_NK.dtype, fast=False))


@library.register_fake(_NAME)
def _fake(place_NK: Tensor, fresh: Tensor, grad_NM: Tensor, grad_scale: Tensor, x_KM: Tensor, x_scale: Tensor) -> None:
    return None


def accumulate_fp8_weight_gradient(place_NK: Tensor, fresh: Tensor, grad_NM: Fp8, x_KM: Fp8) -> None:
    """``place_NK`` += ``grad_NM`` @ ``x_KM``.T, or becomes it, as one operator whose place a compiled graph writes
    without copying it.

    Args:
        place_NK: contiguous, in the dtype that the gradient would have.
        fresh: bool [] or one for each joined layer, in host memory: nothing has arrived in the place yet; false
            afterwards.
    """
    torch.ops.paceline.accumulate_fp8_weight_gradient.default(place_NK, fresh, *grad_NM, *x_KM)
