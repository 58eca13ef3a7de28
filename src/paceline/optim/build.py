"""The optimizer of a run: one rule for each kind of parameter, over the engine's main parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.checkpoint.pieces import ShardedValue
from paceline.config.optim import OptimConfig
from paceline.optim.adamw import AdamWRule
from paceline.optim.clip import GradientNorm, gradient_norm
from paceline.optim.fused_adamw import FusedAdamWRule
from paceline.optim.groups import ParameterGroup, describe_groups, parameter_groups
from paceline.optim.lowbit import AdamW8bitRule
from paceline.optim.muon import MuonRule
from paceline.parallel.collectives import all_reduce
from paceline.parallel.engine import Engine, MainParameter
from paceline.parallel.mesh import ParallelMesh


class UpdateRule(Protocol):
    """How some parameters are updated. State exists from the start, laid out like the parameters."""

    def step(self, lr_factor: float, gradients: GradientNorm) -> None:
        """One update with `lr = group.lr * lr_factor`; nothing at all changes where `gradients.found_inf` is 1."""

    def state(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Parameter name -> state name -> tensor laid out like the parameter."""

    def load_state(self, values: Mapping[str, ShardedValue]) -> None:
        """Called after the pieces of `state()` were filled, with them."""

    @property
    def step_count(self) -> int: ...

    def set_step_count(self, count: int) -> None: ...


class Optimizer:
    """Updates the main parameters of an engine.

    A step of the trainer is ``engine.reduce_gradients()``, ``norm = optimizer.gradient_norm()``,
    ``optimizer.step(factor, norm)``, ``engine.publish_weights(cast=not optimizer.writes_compute_weights)``. None of it
    waits for the device (`adamw8bit` does).
    """

    def __init__(
        self,
        config: OptimConfig,
        engine: Engine,
        parameters: Sequence[MainParameter],
        groups: Sequence[ParameterGroup],
        rules: Sequence[UpdateRule],
        device: torch.device,
    ) -> None:
        self.groups = tuple(groups)
        self._config = config
        self._engine = engine
        self._parameters = tuple(parameters)
        self._rules = tuple(rules)
        self._device = device
        self.writes_compute_weights = all(isinstance(rule, FusedAdamWRule) for rule in self._rules)
        """What `step` leaves for `Engine.publish_weights` to cast is nothing."""

    def gradient_norm(self) -> GradientNorm:
        """Norm, non-finite flag and clipping divisor of the reduced gradients. A collective call."""
        return gradient_norm(self._parameters, self._engine, self._config.grad_clip, self._device)

    def step(self, lr_factor: float, gradients: GradientNorm) -> None:
        """Clips and updates, or does nothing where `gradients.found_inf` is 1: weights, moments and step count stay.

        Gradients are used as working memory. A collective call with muon.

        Args:
            lr_factor: `schedule.lr_factor` of this step; multiplies every group's peak rate.
        """
        if self.writes_compute_weights:
            self._engine.wait_for_weights()  # what is still on its way from the last update would be overwritten
        for rule in self._rules:
            rule.step(lr_factor, gradients)

    def zero_grad(self) -> None:
        self._engine.zero_gradients()

    def state(self) -> dict[str, ShardedValue]:
        """`<parameter>/<state>` -> pieces: exp_avg and exp_avg_sq (AdamW, in fp32 also for 8 bits), momentum (Muon).

        To load: fill the pieces, then call `load_state` with them and `set_step_count`.
        """
        by_name = {parameter.name: parameter for parameter in self._parameters}
        return {
            f"{name}/{key}": by_name[name].pieces(local)
            for rule in self._rules
            for name, states in rule.state().items()
            for key, local in states.items()
        }

    def load_state(self, values: Mapping[str, ShardedValue]) -> None:
        """Takes over the pieces of an earlier `state()` that were filled from a checkpoint."""
        for rule in self._rules:
            rule.load_state(values)

    @property
    def step_count(self) -> int:
        """Updates that were made, without skipped ones. Waits for the device: for checkpoints and logged steps."""
        return max((rule.step_count for rule in self._rules), default=0)

    def set_step_count(self, count: int) -> None:
        """The count that bias correction goes on from."""
        for rule in self._rules:
            rule.set_step_count(count)

    def describe(self, learns: Callable[[str], bool] = lambda name: True) -> str:
        """The groups of the whole model with their counts, the same text on every rank.

        Args:
            learns: whether a parameter is trained at all.
        """
        shapes = {name: shape for name, shape in self._engine.shapes.items() if learns(name)}
        return describe_groups(self._config, shapes)


def build_optimizer(config: OptimConfig, engine: Engine, mesh: ParallelMesh | None = None) -> Optimizer:
    """The optimizer of the recipe over `engine.main_parameters()`, its state in place. A collective call with muon.

    Args:
        mesh: the engine's; None = one process. Muon, which needs whole matrices, talks along `dp_shard_cp` and `edp`.

    Raises:
        ConfigError: `adamw8bit` without torchao.
    """
    parameters = engine.main_parameters()
    # not the device of any parameter: those may be offloaded
    device = torch.device(mesh.device_type if mesh is not None else parameters[0].param.device)
    groups = parameter_groups(config, parameters)
    rules: list[UpdateRule] = []
    if config.name == "muon":
        # also on a rank that holds no part of a matrix: it takes part in the exchange
        matrices = next((group for group in groups if group.rule == "muon"), None)
        axes = () if mesh is None else (mesh["dp_shard_cp"], mesh["edp"])
        rules.append(MuonRule(config, matrices, axes, device, _main_dtype(parameters, mesh, device)))
    rest = [group for group in groups if group.rule != "muon"]
    if rest:
        rules.append(_adamw(config, rest))
    return Optimizer(config, engine, parameters, groups, rules, device)


def _adamw(config: OptimConfig, groups: Sequence[ParameterGroup]) -> UpdateRule:
    if config.name == "adamw8bit":
        return AdamW8bitRule(config, groups)
    return FusedAdamWRule(config, groups) if config.fused_update else AdamWRule(config, groups)


def _main_dtype(parameters: Sequence[MainParameter], mesh: ParallelMesh | None, device: torch.device) -> torch.dtype:
    """Of main weights, on all ranks: one that holds none must put the same on the wire."""
    doubles = torch.tensor(
        float(any(parameter.param.dtype == torch.float64 for parameter in parameters)), device=device
    )
    if mesh is not None:
        all_reduce(doubles, mesh["world"], "world/muon/dtype", op=dist.ReduceOp.MAX)
    return torch.float64 if doubles else torch.float32
