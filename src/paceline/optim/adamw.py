"""AdamW on the local fp32 tensors: torch's fused kernel, which clips and skips on the device as it updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from paceline.checkpoint.pieces import ShardedValue
from paceline.config.optim import OptimConfig
from paceline.optim.clip import GradientNorm
from paceline.optim.groups import ParameterGroup


class AdamWRule:
    """AdamW for some groups: ``p -= lr * weight_decay * p``, then the bias-corrected Adam update.

    The state exists from the start, so a checkpoint can be loaded into it before the first step. With
    ``found_inf`` = 1 the kernel leaves weights and moments as they are and the step counter is taken back.
    """

    def __init__(self, config: OptimConfig, groups: Sequence[ParameterGroup]) -> None:
        self._groups = tuple(groups)
        self._optimizer = torch.optim.AdamW(
            [
                {
                    "params": [parameter.param for parameter in group.parameters],
                    "lr": group.lr,
                    "weight_decay": group.weight_decay,
                }
                for group in self._groups
            ],
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )
        for group in self._groups:
            for parameter in group.parameters:
                self._optimizer.state[parameter.param] = {
                    "step": torch.zeros((), device=parameter.param.device),
                    "exp_avg": torch.zeros_like(parameter.param),
                    "exp_avg_sq": torch.zeros_like(parameter.param),
                }

    @torch.no_grad()
    def step(self, lr_factor: float, gradients: GradientNorm) -> None:
        for group, torch_group in zip(self._groups, self._optimizer.param_groups, strict=True):
            torch_group["lr"] = group.lr * lr_factor
        # The attributes are GradScaler's protocol with optimizers that scale in their kernel: torch reads them with
        # getattr and has no keyword for them. They are removed again so that no step runs on old values.
        optimizer = self._optimizer
        device = self._device
        optimizer.grad_scale = gradients.divisor.to(device)  # type: ignore[attr-defined]
        optimizer.found_inf = gradients.found_inf.to(device)  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]

    @property
    def _device(self) -> torch.device:
        return self._groups[0].parameters[0].param.device

    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Parameter name -> state name -> tensor laid out like the parameter; the memory itself, to be loaded into."""
        return {
            parameter.name: {key: self._optimizer.state[parameter.param][key] for key in ("exp_avg", "exp_avg_sq")}
            for group in self._groups
            for parameter in group.parameters
        }

    def load_state(self, values: Mapping[str, ShardedValue]) -> None:
        """Nothing to do: whoever filled the pieces of `state()` wrote into the state itself."""

    @property
    def step_count(self) -> int:
        """Updates made so far, skipped ones not counted. Waits for the device."""
        first = self._groups[0].parameters[0].param
        return int(self._optimizer.state[first]["step"].item())

    def set_step_count(self, count: int) -> None:
        for group in self._groups:
            for parameter in group.parameters:
                self._optimizer.state[parameter.param]["step"].fill_(count)
