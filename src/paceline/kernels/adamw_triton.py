"""`kernels/adamw.py` as one kernel. Imported only where it runs: Triton does not come with a CPU build of torch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048
"""Elements of a program: 8 of each tensor a thread, loads of 16 bytes. A guess, not tuned yet."""


def adamw_update_triton(
    weight: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    scalars: Tensor,
    *,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float,
    compute: Tensor | None = None,
) -> None:
    """See `adamw.adamw_update`; ``scalars`` is `StepScalars.rounded`."""
    tensors = (weight, gradient, exp_avg, exp_avg_sq, *(() if compute is None else (compute,)))
    assert all(tensor.shape == weight.shape and tensor.is_contiguous() for tensor in tensors)
    assert weight.dtype == exp_avg.dtype == exp_avg_sq.dtype == torch.float32
    size = weight.numel()
    if size == 0:
        return
    _adamw_kernel[(triton.cdiv(size, _BLOCK),)](
        weight,
        gradient,
        exp_avg,
        exp_avg_sq,
        weight if compute is None else compute,
        scalars,
        size,
        lr,
        1 - lr * weight_decay,
        betas[0],
        1 - betas[0],
        betas[1],
        1 - betas[1],
        eps,
        HAS_COMPUTE=compute is not None,
        BLOCK=_BLOCK,
        num_warps=8,
    )


@triton.jit
def _adamw_kernel(  # type: ignore[no-untyped-def]
    weight,
    gradient,
    exp_avg,
    exp_avg_sq,
    compute,
    scalars,
    size,
    lr,
    keep,
    beta1,
    rest1,
    beta2,
    rest2,
    eps,
    HAS_COMPUTE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # a step that is left out reads and writes nothing
    inside = place < tl.where(tl.load(scalars + 1) > 0, 0, size)
    scaled = tl.load(gradient + place, mask=inside, other=0.0).to(tl.float32) / tl.load(scalars)
    mean = beta1 * tl.load(exp_avg + place, mask=inside, other=0.0) + rest1 * scaled
    square = beta2 * tl.load(exp_avg_sq + place, mask=inside, other=0.0) + rest2 * scaled * scaled
    change = lr / tl.load(scalars + 2) * mean / (tl.sqrt(square) / tl.load(scalars + 3) + eps)
    updated = tl.load(weight + place, mask=inside, other=0.0) * keep - change
    tl.store(weight + place, updated, mask=inside)
    tl.store(exp_avg + place, mean, mask=inside)
    tl.store(exp_avg_sq + place, square, mask=inside)
    if HAS_COMPUTE:
        tl.store(compute + place, updated.to(compute.dtype.element_ty), mask=inside)
