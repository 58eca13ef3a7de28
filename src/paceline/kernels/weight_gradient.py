"""A weight's gradient, added to where gradients are summed by the matrix product itself.

    before: product -> gradient (written) -> sum (read, read, written)        here: product -> sum (read, written)

For a matrix of n elements in bf16 with fp32 sums that is 2n + 2n + 4n + 4n bytes against 4n + 4n; in the first
micro-batch of a step 2n + 2n + 4n against 4n, since a product does not read what it replaces. (Always adding, to a sum
that was set to zero, would be 4n + 4n + 4n then.) The sum also gains: a product of two bf16 matrices is accumulated in
fp32, and no longer rounded to bf16 before it is added.

Dims: M tokens, D output width, C input width.
"""

from __future__ import annotations

import torch
from torch import Tensor, library

from paceline.kernels.precision import wide_dtype

_HALVES = (torch.bfloat16, torch.float16)


def accumulate_product(place_DC: Tensor, grad_MD: Tensor, x_MC: Tensor, *, first: bool) -> None:
    """``place_DC`` += ``grad_MD``.T @ ``x_MC``, in place; with ``first`` it is replaced, whatever it held.

    Args:
        place_DC: contiguous, in any float dtype.
        grad_MD: gradient of a linear layer's output.
        x_MC: its input, in the same dtype.
    """
    if not _in_one_product(place_DC, x_MC):
        accumulate_product_reference(place_DC, grad_MD, x_MC, first=first)
        return
    beta = 0 if first else 1
    if place_DC.dtype == x_MC.dtype:
        place_DC.addmm_(grad_MD.t(), x_MC, beta=beta)
    else:
        # in place, since input and out are one tensor; torch 2.10 and later take an input in the dtype of the output
        torch.addmm(place_DC, grad_MD.t(), x_MC, out_dtype=place_DC.dtype, beta=beta, out=place_DC)


def accumulate_product_reference(place_DC: Tensor, grad_MD: Tensor, x_MC: Tensor, *, first: bool) -> None:
    """The same as a product and an addition, in the wider of both precisions and at least fp32."""
    wide = torch.promote_types(place_DC.dtype, wide_dtype(x_MC.dtype))
    product_DC = grad_MD.to(wide).t() @ x_MC.to(wide)
    if not first:
        # one rounding, as in the product that accumulates
        product_DC = product_DC.add_(place_DC)
    place_DC.copy_(product_DC)


def _in_one_product(place_DC: Tensor, x_MC: Tensor) -> bool:
    """On a CPU there is nothing to gain; elsewhere cuBLAS adds to its own dtype, and from half precision to fp32."""
    if not place_DC.is_cuda:
        return False
    return place_DC.dtype == x_MC.dtype or (place_DC.dtype == torch.float32 and x_MC.dtype in _HALVES)


_NAME = "paceline::accumulate_weight_gradient"

# defined by its schema: `library.custom_op` takes 20 us more a call, for an autograd that a backward does not need
library.define(_NAME, "(Tensor(a!) place_DC, Tensor(b!) fresh, Tensor grad_MD, Tensor x_MC) -> ()")


@library.impl(_NAME, "default")
def _accumulate_weight_gradient(place_DC: Tensor, fresh: Tensor, grad_MD: Tensor, x_MC: Tensor) -> None:
    accumulate_product(place_DC, grad_MD, x_MC, first=bool(fresh))
    fresh.fill_(False)


@library.register_fake(_NAME)
def _fake(place_DC: Tensor, fresh: Tensor, grad_MD: Tensor, x_MC: Tensor) -> None:
    return None


def accumulate_weight_gradient(place_DC: Tensor, fresh: Tensor, grad_MD: Tensor, x_MC: Tensor) -> None:
    """`accumulate_product` as one operator, whose place a compiled graph writes without copying it.

    Args:
        fresh: bool scalar in host memory: nothing has arrived in the place yet; false afterwards. A tensor, so that
            one graph serves all micro-batches, and on the host, so that nobody waits for the device.
    """
    torch.ops.paceline.accumulate_weight_gradient.default(place_DC, fresh, grad_MD, x_MC)
