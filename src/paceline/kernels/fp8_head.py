"""The products of head and loss in fp8, a slice of the tokens at a time.

    logits            logits_nV      = hidden_nC @ weight_VC.T        e4m3, e4m3, fast accumulation
    input gradient    grad_nC        = grad_logits_nV @ weight_VC     gradient e5m2 (e4m3 rowwise), weight e4m3
    weight gradient   grad_weight_VC = grad_logits_nV.T @ hidden_nC   the same, hidden e4m3

As in `fp8.py`; scales of hidden states and of gradients are of a slice, never of earlier steps. Logits come out in the
dtype of the hidden states, and softmax and loss are computed from them as ever. Weights are cast once a call, 2 V C
bytes for as long as it lasts. The first slice's product for the weights' gradient writes it, those of other slices
write a tensor of their own, which is added to it: fp8 products cannot add.

Dims: n tokens of a slice, C hidden, V vocabulary (the rows of a rank, where it is cut: `Cut`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paceline.kernels.fp8 import Casting, Cut, cast_gradient
from paceline.kernels.fp8_cast import E4M3, CastKernel, Fp8, Scaling, cast_both, cast_rows, cast_weights_both, product


@dataclass(frozen=True, kw_only=True)
class Fp8Head:
    """How a head is multiplied in fp8. Sizes must fit: `why_not_fp8`."""

    scaling: Scaling
    kernel: CastKernel = "torch"
    cut: Cut | None = None

    def products(self, weight_VC: Tensor, *, wants_hidden: bool, wants_weight: bool) -> Fp8HeadProducts:
        return Fp8HeadProducts(self, weight_VC, wants_hidden=wants_hidden, wants_weight=wants_weight)


class Fp8HeadProducts:
    """Is a `HeadProducts`: `logits` of a slice, then its `gradients`."""

    def __init__(self, options: Fp8Head, weight_VC: Tensor, *, wants_hidden: bool, wants_weight: bool) -> None:
        self._options, self._wants_hidden, self._wants_weight = options, wants_hidden, wants_weight
        self._weight_dtype, parted = weight_VC.dtype, options.cut and options.cut.weight
        self._columns: Fp8 | None = None
        self._hidden: Fp8 | None = None
        if wants_hidden:
            self._rows, self._columns = cast_weights_both([weight_VC], options.scaling, parted)
        else:
            self._rows = cast_rows([weight_VC], E4M3, options.scaling, parted)

    def logits(self, hidden_nC: Tensor) -> Tensor:
        if self._wants_weight:
            rows, self._hidden = cast_both(hidden_nC, E4M3, self._options.scaling, self._options.kernel)
        else:
            rows = cast_rows([hidden_nC], E4M3, self._options.scaling)
        return product(rows, self._rows, hidden_nC.dtype, fast=True)

    def gradients(
        self,
        grad_logits_nV: Tensor,
        hidden_nC: Tensor,
        grad_hidden_nC: Tensor | None,
        grad_weight_VC: Tensor | None,
        *,
        first: bool,
    ) -> None:
        options = self._options
        how = Casting(options.scaling, options.kernel, options.cut and options.cut.gradient)
        rows, columns = cast_gradient(
            grad_logits_nV, how, rows=grad_hidden_nC is not None, columns=grad_weight_VC is not None
        )
        if rows is not None and grad_hidden_nC is not None and self._columns is not None:
            grad_hidden_nC.copy_(product(rows, self._columns, hidden_nC.dtype, fast=False))
        if columns is not None and grad_weight_VC is not None and self._hidden is not None:
            if first:
                product(columns, self._hidden, self._weight_dtype, fast=False, out=grad_weight_VC)
            else:
                grad_weight_VC.add_(product(columns, self._hidden, self._weight_dtype, fast=False))
