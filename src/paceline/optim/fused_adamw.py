"""AdamW that also writes the weights the model computes with: `kernels/adamw.py` for each parameter."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from paceline.checkpoint.pieces import ShardedValue
from paceline.config.optim import OptimConfig
from paceline.kernels.adamw import StepScalars, adamw_update, why_not_triton
from paceline.optim.clip import GradientNorm
from paceline.optim.groups import ParameterGroup
from paceline.parallel.engine import MainParameter

log = logging.getLogger(__name__)


class FusedAdamWRule:
    """`AdamWRule` in one pass; see there for what a step is. State and counts are laid out alike.

    The step count is one tensor for all parameters.
    """

    def __init__(self, config: OptimConfig, groups: Sequence[ParameterGroup]) -> None:
        self._config, self._groups = config, tuple(groups)
        first = self._groups[0].parameters[0].param
        self._step = torch.zeros((), device=first.device)
        self._state = {
            parameter.name: {
                "exp_avg": torch.zeros_like(parameter.param),
                "exp_avg_sq": torch.zeros_like(parameter.param),
            }
            for group in self._groups
            for parameter in group.parameters
        }
        if reason := why_not_triton(first):
            log.info(f"optim.fused_update takes the slower path, operations of torch: {reason}")

    @torch.no_grad()
    def step(self, lr_factor: float, gradients: GradientNorm) -> None:
        device = self._step.device
        found_inf = gradients.found_inf.to(device)
        self._step += 1 - found_inf
        # after a first step that was left out the count is 0, and so are the corrections: nothing reads them
        scalars = StepScalars.of(self._step, gradients.divisor.to(device), found_inf, self._config.betas)
        for group in self._groups:
            for parameter in group.parameters:
                self._update(parameter, scalars, group.lr * lr_factor, group.weight_decay)

    def _update(self, parameter: MainParameter, scalars: StepScalars, lr: float, weight_decay: float) -> None:
        weight, state = parameter.param, self._state[parameter.name]
        if weight.grad is None:
            return
        adamw_update(
            weight.data,
            weight.grad,
            state["exp_avg"],
            state["exp_avg_sq"],
            scalars,
            lr=lr,
            weight_decay=weight_decay,
            betas=self._config.betas,
            eps=self._config.eps,
            compute=parameter.compute,
        )

    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        return self._state

    def load_state(self, values: Mapping[str, ShardedValue]) -> None:
        """Nothing to do: whoever filled the pieces of `state()` wrote into the state itself."""

    @property
    def step_count(self) -> int:
        """Updates made so far, skipped ones not counted. Waits for the device."""
        return int(self._step.item())

    def set_step_count(self, count: int) -> None:
        self._step.fill_(count)
