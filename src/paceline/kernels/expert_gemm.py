"""Matrix products of experts over rows sorted by expert, by torch's grouped kernel; no autograd in here.

    product         rows of expert e times matrix e                       [A, X] x [E, X, Y] -> [A, Y]
    weight_product  sum over the rows of expert e: grad.T times input     [A, D], [A, X] -> [E, D, X]

`expert_gemm_triton` has the same two, and one that ends in the activation. `product` also takes fp8 (`expert_fp8`).

Dims as in `expert_order`; X width in, Y width out, D width of a gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.kernels import expert_rows
from paceline.kernels.expert_order import ExpertOrder
from paceline.kernels.grouped_gemm import why_not_grouped
from paceline.kernels.precision import wide_dtype


@dataclass
class Rows:
    """[A, X] rows of experts: as they are, or the K rows of each token, which need not exist in memory."""

    values: Tensor
    """[A, X]; if ``picked`` [N, X]."""
    order: ExpertOrder
    top_k: int = 1
    picked: bool = False
    spread: Callable[[Tensor, ExpertOrder, int], Tensor] = expert_rows.spread
    scale: Tensor | None = None
    """Of fp8 values: fp32, one for each row of ``values``."""
    _dense: Tensor | None = field(default=None, repr=False)

    @property
    def width(self) -> int:
        return self.values.shape[1]

    @property
    def number(self) -> int:
        return len(self.order.place)

    def dense(self) -> Tensor:
        """[A, X] in memory: made once."""
        if not self.picked:
            return self.values
        if self._dense is None:
            # copied as bytes: fp8 has few operations of its own
            values = self.values.view(torch.uint8) if self.scale is not None else self.values
            self._dense = self.spread(values, self.order, self.top_k).view(self.values.dtype)
        return self._dense

    def dense_scale(self) -> Tensor:
        """[A] of the rows in memory."""
        assert self.scale is not None
        return self.spread(self.scale[:, None], self.order, self.top_k)[:, 0] if self.picked else self.scale


def product(rows: Rows, matrix_EXY: Tensor, scale_EY: Tensor | None = None, *, fast: bool = True) -> Tensor:
    """[A, Y]: rows of expert e, times its matrix. Nobody's rows are left undefined.

    Args:
        matrix_EXY: strided as it may be; in fp8 X lies side by side, and the product is in bf16.
        scale_EY: of an fp8 matrix: fp32, one for each of its columns.
        fast: in fp8: the tensor cores' own accumulator throughout, quicker and less exact.
    """
    if scale_EY is not None:
        return _fp8_product(rows, matrix_EXY, scale_EY, fast)
    rows_AX, ends_E = rows.dense(), rows.order.ends
    if rows.number and not why_not_grouped(rows_AX, matrix_EXY):
        return F.grouped_mm(rows_AX.contiguous(), matrix_EXY, offs=ends_E)
    out_AY = rows_AX.new_zeros(rows.number, matrix_EXY.shape[2])
    for (start, end), matrix_XY in zip(_bounds(ends_E), matrix_EXY.unbind(0), strict=True):
        out_AY[start:end] = rows_AX[start:end] @ matrix_XY
    return out_AY


def _fp8_product(rows: Rows, matrix_EXY: Tensor, scale_EY: Tensor, fast: bool) -> Tensor:
    values_AX, scale_A = rows.dense(), rows.dense_scale()
    if values_AX.is_cuda and rows.number:
        # no public name in torch 2.11 - 2.13 that takes groups by their ends and scales by rows
        out: Tensor = torch._scaled_grouped_mm(
            values_AX, matrix_EXY, scale_A.contiguous(), scale_EY, offs=rows.order.ends, out_dtype=torch.bfloat16,
            use_fast_accum=fast,
        )  # fmt: skip
        return out
    out_AY = scale_A.new_zeros(rows.number, matrix_EXY.shape[2], dtype=torch.bfloat16)
    wide_AX = values_AX.float() * scale_A[:, None]
    for e, (start, end) in enumerate(_bounds(rows.order.ends)):
        out_AY[start:end] = (wide_AX[start:end] @ (matrix_EXY[e].float() * scale_EY[e])).to(torch.bfloat16)
    return out_AY


def weight_product(grad: Rows, x: Rows, out_EDX: Tensor, *, first: bool) -> None:
    """``out_EDX`` += the sum over each expert's rows of ``grad.T @ x``, in place; with ``first`` it is replaced,
    whatever it held. An expert without rows adds zeros.
    """
    grad_AD, x_AX, ends_E = grad.dense(), x.dense(), grad.order.ends
    if grad.number and not why_not_grouped(grad_AD, out_EDX.new_empty((), dtype=x_AX.dtype).expand_as(out_EDX)):
        product_EDX = F.grouped_mm(grad_AD.contiguous().t(), x_AX.contiguous(), offs=ends_E)
        out_EDX.copy_(product_EDX) if first else out_EDX.add_(product_EDX)
        return
    wide = torch.promote_types(out_EDX.dtype, wide_dtype(x_AX.dtype))
    for (start, end), out_DX in zip(_bounds(ends_E), out_EDX.unbind(0), strict=True):
        product_DX = grad_AD[start:end].to(wide).t() @ x_AX[start:end].to(wide)
        # one rounding, as in a kernel that accumulates
        out_DX.copy_(product_DX if first else product_DX + out_DX)


def _bounds(ends_E: Tensor) -> list[tuple[int, int]]:
    """Where each expert's rows start and end. On a GPU the host waits for the device: that is the slow path."""
    ends = ends_E.tolist()
    return list(zip([0, *ends], ends, strict=False))
