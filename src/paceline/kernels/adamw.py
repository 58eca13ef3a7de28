"""One step of AdamW in one pass: clip, moments, weight, and the weight once more in the precision it computes in.

Bytes an element, fp32 state and bf16 compute: read gradient 4, moments 8, weight 4; write moments 8, weight 4, compute
weight 2: 30. Torch's fused kernel also writes the clipped gradient back, and its weight is then read again to be cast:
38.

Source: Decoupled weight decay, arXiv:1711.05101; in the order of operations of `torch.optim.AdamW`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.triton_found import has_triton


@dataclass(frozen=True, kw_only=True)
class StepScalars:
    """What is the same for all parameters of a step, as one tensor that stays on the device."""

    values: Tensor
    """fp64 [4]: the divisor of gradients, 1 if the step is left out else 0, 1 - beta1^t, sqrt(1 - beta2^t)."""
    rounded: Tensor
    """The same in fp32, for the kernel."""

    @classmethod
    def of(cls, step: Tensor, divisor: Tensor, found_inf: Tensor, betas: tuple[float, float]) -> StepScalars:
        """``step``: fp32 scalar on the device, this update counted."""
        count = step.double()
        corrections = (1 - betas[0] ** count, (1 - betas[1] ** count).sqrt())
        values = torch.stack((divisor.double(), found_inf.double(), *corrections))
        return cls(values=values, rounded=values.float())


def adamw_update(
    weight: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    scalars: StepScalars,
    *,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float,
    compute: Tensor | None = None,
) -> None:
    """Updates weight and moments in place, and writes the new weight to ``compute`` too; or changes nothing at all.

    Args:
        weight: [n], fp32 (or wider); moments alike.
        gradient: [n], fp32 or bf16. Only read.
        compute: [n], any float dtype.
    """
    options = {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps, "compute": compute}
    tensors = (weight, gradient, exp_avg, exp_avg_sq) + (() if compute is None else (compute,))
    if why_not_triton(weight) or not all(tensor.is_contiguous() for tensor in tensors):
        adamw_update_reference(weight, gradient, exp_avg, exp_avg_sq, scalars, **options)  # type: ignore[arg-type]
        return
    from paceline.kernels.adamw_triton import adamw_update_triton

    adamw_update_triton(weight, gradient, exp_avg, exp_avg_sq, scalars.rounded, **options)  # type: ignore[arg-type]


def adamw_update_reference(
    weight: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    scalars: StepScalars,
    *,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float,
    compute: Tensor | None = None,
) -> None:
    """The same in operations of torch."""
    divisor, left_out, correction1, correction2 = scalars.values.to(weight.dtype).unbind()
    scaled = gradient.to(weight.dtype) / divisor
    mean = betas[0] * exp_avg + (1 - betas[0]) * scaled
    square = betas[1] * exp_avg_sq + (1 - betas[1]) * scaled * scaled
    change = lr / correction1 * mean / (square.sqrt() / correction2 + eps)
    updated = weight * (1 - lr * weight_decay) - change
    for place, value in ((weight, updated), (exp_avg, mean), (exp_avg_sq, square)):
        # where, not a product: nan * 0 is nan
        place.copy_(torch.where(left_out > 0, place, value))
    if compute is not None:
        compute.copy_(weight)


def why_not_triton(weight: Tensor) -> str:
    """The reason why the kernel cannot update this weight; empty if it can."""
    if not weight.is_cuda:
        return "the kernel is for GPUs"
    if weight.dtype != torch.float32:
        return f"the kernel is for fp32 weights (these are {weight.dtype})"
    return "" if has_triton() else "Triton is not installed"
