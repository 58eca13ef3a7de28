"""From wide numbers to fp8 ones and a scale.

Scales are dynamic, of the very tensor that is cast, and powers of two. A power of two only moves exponents, so casting
rounds once, in fp8's own mantissa, and what a number becomes does not depend on the largest one's mantissa; the price
is at most one of the 18 (e4m3) or 32 (e5m2) binades of range, at the bottom, where fp8 is denormal.

Numbers that are not finite stay visible, whatever the device's cast makes of them (some saturate inf): a tensor (a row)
with one in it gets a scale that is not finite, so everything that is computed with it is not finite either.

Where ranks hold parts of a matrix, a scale is of the whole one (`Parted`), so that every layout rounds alike.

Dims: R rows, C columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, library

from paceline.kernels.fp8_check import difference, drawn, kernel_is_right, places

Scaling = Literal["tensorwise", "rowwise"]
CastKernel = Literal["torch", "triton"]
"""Who casts a tensor that is needed both ways: operations of torch, which the compiler fuses with what is around them,
or one kernel, which it does not see into."""

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16
"""What dims of an fp8 product must divide by: 16 bytes, the alignment that the tensor cores load with."""
_SMALLEST = 2.0**-100
"""Tensors whose largest number is below this are cast as if it were this: the scale of zeros stays finite."""
_EXPONENT_BITS = 0x7F800000


class Fp8(NamedTuple):
    """A matrix of which each row was cast for a product over its columns."""

    values: Tensor
    """fp8 [R, C], contiguous."""
    scale: Tensor
    """fp32, [] of a tensor or [R, 1] of rows: ``values * scale`` is what was cast, but for rounding."""

    def wide(self) -> Tensor:
        """fp32 [R, C]: what the values stand for."""
        return self.values.float() * self.scale


class Parted(NamedTuple):
    """A matrix is one rank's part of a larger one, which is cut along ``dim``."""

    dim: int
    """0: this rank has some of the rows; 1: some of the columns."""
    widen: Callable[[Tensor], Tensor]
    """The largest numbers of the part (fp32, no nan), elementwise, to those of all parts. Collective."""


def gradient_dtype(scaling: Scaling) -> torch.dtype:
    """e5m2 where one scale serves a whole gradient: range before mantissa. A row's own scale leaves less to span."""
    return E5M2 if scaling == "tensorwise" else E4M3


def product(a: Fp8, b: Fp8, dtype: torch.dtype, *, fast: bool, out: Tensor | None = None) -> Tensor:
    """``a @ b.T``: [R of a, R of b], accumulated in fp32.

    Args:
        fast: the tensor cores' own accumulator throughout: quicker and less exact (Hopper; no difference elsewhere).
        out: where it is written, contiguous and of ``dtype``; a tensor of its own if None.
    """
    into = {} if out is None else {"out": out}
    result: Tensor = torch._scaled_mm(
        a.values, b.values.t(), a.scale, b.scale if b.scale.dim() == 0 else b.scale.t(), out_dtype=dtype,
        use_fast_accum=fast, **into,
    )  # fmt: skip
    return result


def cast_rows(parts: Sequence[Tensor], dtype: torch.dtype, scaling: Scaling, parted: Parted | None = None) -> Fp8:
    """Matrices [R, C], one under the other, for a product over C."""
    if scaling == "tensorwise":
        factor = multiplier(_of_all_ranks(_largest_of_all(parts), parted), dtype)
        return Fp8(_joined([_cast(part, factor, dtype) for part in parts]), factor.reciprocal())
    across = parted if parted is not None and parted.dim == 1 else None
    factors = [multiplier(_of_all_ranks(largest_number(part, dim=1), across), dtype) for part in parts]
    values = [_cast(part, factor, dtype) for part, factor in zip(parts, factors, strict=True)]
    return Fp8(_joined(values), _joined(factors).reciprocal())


def cast_columns(parts: Sequence[Tensor], dtype: torch.dtype, scaling: Scaling, parted: Parted | None = None) -> Fp8:
    """Matrices [R, C], one under the other, for a product over R: transposed, [C, R], R filled with zeros to a
    `MULTIPLE`."""
    if scaling == "tensorwise":
        return transposed(cast_rows(parts, dtype, scaling, parted))
    scale = column_scale(parts, dtype, scaling, parted)
    return turned(_joined([cast_by(part, scale, dtype) for part in parts]), scale)


def column_scale(parts: Sequence[Tensor], dtype: torch.dtype, scaling: Scaling, parted: Parted | None = None) -> Tensor:
    """The scale of `cast_columns`: fp32, [] or [C, 1]."""
    if scaling == "tensorwise":
        return multiplier(_of_all_ranks(_largest_of_all(parts), parted), dtype).reciprocal()
    largest = [largest_number(part, dim=0) for part in parts]
    across = parted if parted is not None and parted.dim == 0 else None
    joined = largest[0] if len(largest) == 1 else torch.cat(largest).amax(0, keepdim=True)
    return multiplier(_of_all_ranks(joined, across), dtype).reciprocal().view(-1, 1)


def cast_by(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` [..., C] by a scale of `column_scale`, as it lies."""
    factor = scale.reciprocal()  # exact: a power of two
    return _cast(x, factor if factor.dim() == 0 else factor.view(-1), dtype)


def turned(values_RC: Tensor, scale: Tensor) -> Fp8:
    """What `cast_by` gave, for a product over R."""
    return Fp8(padded_and_turned(values_RC), scale)


def transposed(rows: Fp8) -> Fp8:
    """The same numbers for a product over the other dim. Only where one scale serves the whole matrix."""
    assert rows.scale.dim() == 0, "rows have scales of their own: cast the columns"
    return Fp8(padded_and_turned(rows.values), rows.scale)


def cast_both(
    x_RC: Tensor, dtype: torch.dtype, scaling: Scaling, kernel: CastKernel = "torch", parted: Parted | None = None
) -> tuple[Fp8, Fp8]:
    """(`cast_rows`, `cast_columns`) of one matrix."""
    if scaling == "rowwise":
        return cast_rows([x_RC], dtype, scaling, parted), cast_columns([x_RC], dtype, scaling, parted)
    if kernel == "triton":
        factor = multiplier(_of_all_ranks(largest_number(x_RC), parted), dtype)
        values, values_turned = cast_transpose(x_RC, factor, dtype)
        scale = factor.reciprocal()
        return Fp8(values, scale), Fp8(values_turned, scale)
    rows = cast_rows([x_RC], dtype, scaling, parted)
    return rows, transposed(rows)


@library.custom_op("paceline::fp8_cast_transpose", mutates_args=())
def cast_transpose(x_RC: Tensor, factor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """fp8 [R, C] and [C, R filled up to a `MULTIPLE`]: ``x * factor``, as it lies and turned. One kernel on GPUs."""
    if by_triton([x_RC]):
        return _cast_joined([x_RC], factor, dtype)
    values = _cast(x_RC, factor, dtype)
    return values, padded_and_turned(values)


def cast_weights_both(parts: Sequence[Tensor], scaling: Scaling, parted: Parted | None = None) -> tuple[Fp8, Fp8]:
    """(`cast_rows`, `cast_columns`) of matrices, one under the other, in e4m3. Not for compiled code.

    Nothing is there to fuse with, so on a GPU the one kernel does it, with a third of the traffic.
    """
    if scaling == "tensorwise" and by_triton(parts):
        factor = multiplier(_of_all_ranks(_largest_of_all(parts), parted), E4M3)
        values, values_turned = _cast_joined(parts, factor, E4M3)
        return Fp8(values, factor.reciprocal()), Fp8(values_turned, factor.reciprocal())
    rows = cast_rows(parts, E4M3, scaling, parted)
    return rows, transposed(rows) if scaling == "tensorwise" else cast_columns(parts, E4M3, scaling, parted)


def by_triton(parts: Sequence[Tensor]) -> bool:
    """Whether the kernel takes them.

    Triton 3.6 mixes numbers up on an H200 where rows of the result are not aligned and those of the input are.
    """
    aligned = all(size % MULTIPLE == 0 for part in parts for size in (part.shape[1], part.stride(0)))
    return parts[0].is_cuda and aligned and _kernel_is_right(parts[0].device)


@cache
def _kernel_is_right(device: torch.device) -> bool:
    def check() -> str:
        from paceline.kernels import fp8_triton

        x, one = drawn(device), torch.ones((), device=device)
        for dtype in (E4M3, E5M2):
            values, turned = places(x, dtype)
            fp8_triton.cast_transpose(x, one, values, turned)
            if reason := difference(x.float(), values, turned):
                return reason
        return ""

    return kernel_is_right("casts", check)


def _cast_joined(parts: Sequence[Tensor], factor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    from paceline.kernels import fp8_triton

    if any(len(part) % 2 for part in parts[:-1]):  # two rows of one part are stored at a time
        parts = [_joined(parts)]
    rows, columns = sum(len(part) for part in parts), parts[0].shape[1]
    values_RC = parts[0].new_empty(rows, columns, dtype=dtype)
    turned_CP = parts[0].new_empty(columns, rows + -rows % MULTIPLE, dtype=dtype)
    start = 0
    for index, part in enumerate(parts):
        end = start + len(part)
        # the last one fills up what there is beyond the rows
        filled = end if index < len(parts) - 1 else turned_CP.shape[1]
        part = part if part.stride(1) == 1 else part.contiguous()
        fp8_triton.cast_transpose(part, factor, values_RC[start:end], turned_CP[:, start:filled])
        start = end
    return values_RC, turned_CP


@cast_transpose.register_fake
def _(x_RC: Tensor, factor: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows, columns = x_RC.shape
    padded = rows + -rows % MULTIPLE
    return x_RC.new_empty(rows, columns, dtype=dtype), x_RC.new_empty(columns, padded, dtype=dtype)


def multiplier(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32: the largest power of two that leaves numbers up to ``largest`` (fp32, not negative) within ``dtype``.

    nan of nan and 0 of inf: times any number of that tensor, or by its reciprocal, nothing finite comes out.
    """
    room = torch.finfo(dtype).max / largest.clamp(min=_SMALLEST)
    power = (room.view(torch.int32) & _EXPONENT_BITS).view(torch.float32)
    # exact: room is not rounded up to a power of two, since fp8's largest number has a mantissa (1.75) of its own
    return torch.where(largest.isnan(), largest, power)


def _cast(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    # in x's own precision: a power of two changes no mantissa of bf16 either. The result is laid out as x is
    return (x * factor.to(x.dtype)).to(dtype).contiguous()


def largest_number(x: Tensor, dim: int | None = None) -> Tensor:
    """fp32: the largest absolute value; nan if there is one."""
    # one pass without a tensor of absolute values
    largest: Tensor = torch.linalg.vector_norm(x, float("inf"), dim=dim, keepdim=dim is not None).float()
    return largest


def _largest_of_all(parts: Sequence[Tensor]) -> Tensor:
    largest = [largest_number(part) for part in parts]
    return largest[0] if len(largest) == 1 else torch.stack(largest).amax()


def _of_all_ranks(largest: Tensor, parted: Parted | None) -> Tensor:
    # a maximum over ranks may lose a nan, but not inf, which spoils the tensor as well
    return largest if parted is None else parted.widen(largest.nan_to_num(nan=torch.inf, posinf=torch.inf))


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def padded_and_turned(values_RC: Tensor) -> Tensor:
    missing = -values_RC.shape[0] % MULTIPLE
    if missing:
        # as bytes: fp8 has no padding kernel, and its zero is a zero byte
        values_RC = F.pad(values_RC.view(torch.uint8), (0, 0, 0, missing)).view(values_RC.dtype)
    return values_RC.t().contiguous()
