"""How large is the gradient of the whole model, is it finite, and by how much is it made smaller?

Works on the local fp32 tensors of the engine. Nothing here waits for the device, so a step that is not logged is never
held up; and since the one number is summed over all ranks, each element of the model counted once, they decide alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.parallel.engine import Engine, MainParameter

_EPS = 1e-6  # the same as torch.nn.utils.clip_grads_with_norm_, so that clipped runs compare


@dataclass(frozen=True, kw_only=True)
class GradientNorm:
    """Scalars on the device. An optimizer divides gradients by `divisor`, and does nothing if `found_inf`."""

    norm: Tensor
    """fp64: the 2-norm over all parameters of the model, before clipping; inf or nan if a gradient is."""
    found_inf: Tensor
    """fp32: 1 if the norm is not finite, else 0. As fused AdamW wants it."""
    divisor: Tensor
    """fp32, at least 1: max(1, norm / max_norm); 1 without clipping or if the norm is not finite."""

    @property
    def finite(self) -> Tensor:
        """bool: whether the step is taken."""
        return self.found_inf == 0


def gradient_norm(
    parameters: Sequence[MainParameter], engine: Engine, max_norm: float, device: torch.device
) -> GradientNorm:
    """The global norm of the gradients that `engine.reduce_gradients()` has left in the main parameters.

    The gradients themselves are not touched: the update divides by `divisor` as it reads them, which saves a pass over
    memory. Each rank's part is a norm in the gradients' precision; squares are added in fp64, so that no number of
    ranks rounds the sum, and the divisor of a run does not depend on its layout.

    Args:
        max_norm: largest norm that is let through; 0 = no clipping. The norm is measured either way.
        device: where ranks talk to each other; gradients may be elsewhere (offloaded).
    """
    norm = engine.sum_over_shards(local_square_sum(parameters).to(device)).sqrt()
    finite = torch.isfinite(norm)
    divisor = torch.ones_like(norm)
    if max_norm > 0:
        # where, not a product: nan * 0 is nan
        divisor = torch.where(finite, ((norm + _EPS) / max_norm).clamp(min=1.0), divisor)
    return GradientNorm(norm=norm, found_inf=(~finite).float(), divisor=divisor.float())


def local_square_sum(parameters: Sequence[MainParameter]) -> Tensor:
    """fp64 scalar: sum of squares of the gradients that this rank counts. Those that are not there count as zero."""
    gradients = [
        parameter.param.grad for parameter in parameters if parameter.counted and parameter.param.grad is not None
    ]
    if any(gradient.dtype in (torch.bfloat16, torch.float16) for gradient in gradients):
        # a norm in half precision would have three digits
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
        return torch.stack(norms).double().square().sum()
    total: Tensor = torch.nn.utils.get_total_norm(gradients)  # a CPU zero if there are none
    return total.double().square()


def non_finite_parameters(parameters: Sequence[MainParameter]) -> list[str]:
    """Names of the parameters whose local gradient is not finite: for the message of a stop. Waits for the device."""
    return [
        parameter.name
        for parameter in parameters
        if parameter.param.grad is not None and not bool(torch.isfinite(parameter.param.grad).all())
    ]
