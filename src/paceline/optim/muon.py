"""Muon: the momentum of a matrix, orthogonalised, is its update.

Source: K. Jordan and others, "Muon: an optimizer for hidden layers in neural networks", 2024 (the quintic iteration,
its coefficients and the factor for tall matrices). Decoupled weight decay as in "Muon is scalable for LLM training",
arXiv:2502.16982.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from paceline.checkpoint.pieces import ShardedValue
from paceline.config.optim import OptimConfig
from paceline.optim.clip import GradientNorm
from paceline.optim.groups import ParameterGroup
from paceline.optim.matrices import MatrixExchange
from paceline.parallel.collectives import Axis

# Chosen by the authors for the steepest slope at 0, not for convergence: singular values end in about [0.7, 1.2].
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPS = 1e-7


def orthogonalize(matrices: Tensor, steps: int) -> Tensor:
    """Nearly the closest (semi-)orthogonal matrices: all singular values become about 1; zero stays zero.

    Args:
        matrices: [..., rows, columns]; computed in its own dtype.
        steps: Newton-Schulz iterations.
    """
    tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.mT if tall else matrices
    # a spectral norm of at most 1, where the iteration is stable; the Frobenius norm bounds it
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    a, b, c = _COEFFICIENTS
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.mT if tall else x


class MuonRule:
    """Muon for the matrices of one group; stacked experts are so many matrices, gate and up each one.

    ``m = lerp(m, g, 1 - momentum)``, ``u = orthogonalize(lerp(g, m, momentum))`` (Nesterov),
    ``p = p (1 - lr decay) - lr sqrt(max(1, rows / columns)) u``.

    Works in bf16 on a GPU and in the precision of main weights (fp32) on a CPU. A skipped step changes nothing; that is
    decided on the device.

    Args:
        group: may be None on a rank that holds no part of a matrix; the rank still takes part in the exchanges.
        axes: all along which some rank has matrices to put together; none = every rank holds its matrices whole. The
            matrices of one `MainParameter.shard_axis` are exchanged together.
        device: where matrices are orthogonalised; parameters may lie elsewhere.
        dtype: of main weights, and so of what a CPU computes in; None = that of the first parameter here.
    """

    def __init__(
        self,
        config: OptimConfig,
        group: ParameterGroup | None,
        axes: Sequence[Axis],
        device: torch.device,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._config = config
        self._group = group
        self._parameters = () if group is None else group.parameters
        self._momentum = {parameter.name: torch.zeros_like(parameter.param) for parameter in self._parameters}
        self._steps = torch.zeros((), device=device)
        here = next((parameter.param.dtype for parameter in self._parameters), torch.float32)
        wire_dtype = torch.bfloat16 if device.type == "cuda" else dtype or here
        known = {axis.name: axis for axis in axes} or {p.shard_axis.name: p.shard_axis for p in self._parameters}
        assert all(parameter.shard_axis.name in known for parameter in self._parameters), list(known)
        self._exchanges = [
            MatrixExchange(
                [parameter for parameter in self._parameters if parameter.shard_axis.name == name],
                axis.group,
                device=device,
                wire_dtype=wire_dtype,
            )
            for name, axis in known.items()
        ]

    @torch.no_grad()
    def step(self, lr_factor: float, gradients: GradientNorm) -> None:
        """Uses the gradients as working memory: they hold the update afterwards."""
        momentum, steps = self._config.muon_momentum, self._config.muon_steps
        updates: dict[str, Tensor] = {}
        for parameter in self._parameters:
            gradient, kept = parameter.param.grad, self._momentum[parameter.name]
            if gradient is None:
                gradient = torch.zeros_like(parameter.param)
            finite = gradients.finite.to(gradient.device)
            gradient.div_(gradients.divisor.to(gradient.device))
            # where, not products: what is not taken may be nan
            kept.copy_(torch.where(finite, kept.lerp(gradient, 1 - momentum), kept))
            updates[parameter.name] = gradient.lerp_(kept, momentum)
        for exchange in self._exchanges:
            exchange.apply(updates, lambda whole: orthogonalize(whole, steps))
        for parameter in self._parameters:
            assert self._group is not None
            param, finite = parameter.param, gradients.finite.to(parameter.param.device)
            lr = self._group.lr * lr_factor
            rows, columns = parameter.global_shape[-2:]
            scale = math.sqrt(max(1.0, rows / columns))
            updated = (param * (1 - lr * self._group.weight_decay)).sub_(updates[parameter.name], alpha=lr * scale)
            param.copy_(torch.where(finite, updated, param))
        self._steps += gradients.finite.to(self._steps.device)

    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        return {name: {"momentum": momentum} for name, momentum in self._momentum.items()}

    def load_state(self, values: Mapping[str, ShardedValue]) -> None:
        """Nothing to do: whoever filled the pieces of `state()` wrote into the state itself."""

    @property
    def step_count(self) -> int:
        return int(self._steps.item())

    def set_step_count(self, count: int) -> None:
        self._steps.fill_(count)
