"""The model that a preference task compares with: frozen, spread as the policy is, with no state of an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Protocol

import torch

from paceline.config.run import RunConfig
from paceline.costs.reference import has_copy, runs_reference
from paceline.costs.stages import cut_stages
from paceline.models.init import WeightInit
from paceline.models.lora import adapters_off
from paceline.models.transformer import Transformer
from paceline.parallel.apply import parallelize
from paceline.parallel.engine import Engine
from paceline.parallel.low_precision import Fp8Options
from paceline.parallel.mesh import ParallelMesh


class Reference(Protocol):
    """What computes the reference's log-probabilities, on the pipeline of the policy."""

    def stages(self) -> AbstractContextManager[Sequence[Transformer]]:
        """This rank's parts of it, as many as the policy's, for as long as the context lasts."""
        ...


class FrozenCopy:
    """A second model beside the policy, in its layout and precision: 2 bytes a parameter of a rank in bf16.

    With `parallel.zero` 2 and 3 its weights are sharded as the policy's are. Collective to make. Its weights are those
    that a run without `model.init_from` begins with, until others are read into ``engine``.
    """

    def __init__(
        self,
        config: RunConfig,
        plain: Transformer,
        mesh: ParallelMesh,
        device: torch.device,
    ) -> None:
        # nothing of it is trained: gradients have no buckets, and nothing is computed again
        off = {"recompute": "none", "offload": "none", "fused_weight_gradients": False}
        parallel = config.parallel.model_copy(update=off)
        for parameter in plain.parameters():
            parameter.requires_grad_(False)
        spread = parallelize(
            plain,
            parallel,
            mesh,
            config.train.precision,
            device,
            cut=cut_stages(config, parallel.stages),
            fp8=replace(Fp8Options.of(config.train), history=0),  # it learns nothing, so nothing is carried over
        )
        self.engine: Engine = spread.engine
        self.engine.materialize(WeightInit(config.model, config.run.seed))
        self._stages = spread.stages
        for stage in self._stages:
            stage.eval()

    @contextmanager
    def stages(self) -> Iterator[Sequence[Transformer]]:
        yield self._stages
        # what FSDP2 has gathered, and no backward will free
        self.engine.publish_weights()


class WithoutAdapters:
    """The policy itself with its adapters switched off: no memory at all."""

    def __init__(self, stages: Sequence[Transformer], engine: Engine) -> None:
        self._stages, self._engine = tuple(stages), engine

    @contextmanager
    def stages(self) -> Iterator[Sequence[Transformer]]:
        with ExitStack() as stack:
            stack.enter_context(evaluating(self._stages))
            stack.enter_context(adapters_off(*self._stages))
            yield self._stages


@contextmanager
def evaluating(stages: Sequence[Transformer]) -> Iterator[None]:
    """Inside, there is no dropout; then stages are in the mode that they were in."""
    modes = [stage.training for stage in stages]
    for stage in stages:
        stage.eval()
    try:
        yield
    finally:
        for stage, mode in zip(stages, modes, strict=True):
            stage.train(mode)


def build_reference(
    config: RunConfig,
    *,
    stages: Sequence[Transformer],
    engine: Engine,
    plain: Callable[[], Transformer],
    mesh: ParallelMesh,
    device: torch.device,
) -> Reference | None:
    """What the recipe asks for; None where the task reads none, or its log-probabilities come with data. Collective.

    Args:
        stages: of the policy, with its ``engine``.
        plain: makes the model on the meta device, without adapters.
    """
    if not runs_reference(config):
        return None
    if not has_copy(config):
        return WithoutAdapters(stages, engine)
    return FrozenCopy(config, plain(), mesh, device)
