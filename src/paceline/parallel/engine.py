"""The data-parallel seam: what the training step, the optimizer and checkpoints see of how a model is spread.

Order of one optimizer step, the same for every engine:

    engine.zero_gradients()
    for index, batch in enumerate(micro_batches):
        with engine.accumulate(last=index == len(micro_batches) - 1):
            output = engine.stages[0](batch.tokens, batch.labels)
            (output.loss_sum / global_tokens).backward()
    engine.reduce_gradients()             # main parameters now hold the SUM over micro-batches and ranks
    optimizer.step()                      # over engine.main_parameters(); or skipped: then nothing else is needed
    engine.publish_weights()              # the model computes with the new weights from the next forward on

Gradients are summed over the ranks that read different data or different parts of a sequence (over `edp` for experts),
and then over the axes that a parameter's `Shard.replicas` names, where each rank has the gradient of its own work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from paceline.checkpoint.pieces import ShardedValue
from paceline.models.transformer import Transformer
from paceline.parallel.collectives import Axis


class ParameterInit(Protocol):
    """Fills the part ``value`` of a parameter in place: the same numbers whatever the parts."""

    def __call__(self, name: str, value: Tensor, whole: torch.Size, offsets: tuple[int, ...]) -> None:
        """``value`` begins at ``offsets`` of the parameter ``name``, whose shape in the plain model is ``whole``."""


@dataclass(frozen=True, kw_only=True)
class MainParameter:
    """The part of one parameter that this rank's optimizer updates.

    A parameter of which this rank holds no element has no MainParameter here; `Engine.weights()` names it all the same.
    """

    name: str
    """Fully qualified name in the plain model."""
    param: nn.Parameter
    """A plain local fp32 tensor (fp64 in a model of that precision): in the flat engine a 1-D range of the flattened
    parameter, in the FSDP engine the local shard. `Engine.reduce_gradients` sets ``grad``. On the host if offloaded."""
    global_shape: torch.Size
    """In the plain model."""
    locate: Callable[[Tensor], ShardedValue]
    """See `pieces`."""
    counted: bool
    """Whether this rank's elements go into sums over all parameters (`Engine.sum_over_shards`): of the ranks that hold
    the same elements one is counted."""
    shard_axis: Axis
    """The ranks that together hold all of this rank's tensor, in parts or each of them whole: matrices whole in a stage
    (and whole experts) are put together along it."""

    compute: Tensor | None = None
    """Where the engine keeps the same elements in the precision that the model computes in, for an update that writes
    them itself; None where that is `param` itself, or out of reach."""

    def pieces(self, local: Tensor) -> ShardedValue:
        """A tensor laid out like ``param`` (a moment, for example) as pieces of a tensor of the global shape.

        The pieces are views: loading writes into ``local``.
        """
        assert local.shape == self.param.shape, f"{self.name}: {tuple(local.shape)} is not {tuple(self.param.shape)}"
        return self.locate(local)


class Engine(Protocol):
    """Owns the memory of parameters and gradients, their precision, and all data-parallel communication."""

    stages: Sequence[Transformer]
    """This rank's parts of the model, in the order of their use."""
    shapes: Mapping[str, torch.Size]
    """Every parameter of the whole model, also of other ranks' stages, in its order: name -> shape."""

    def materialize(self, init: ParameterInit) -> None:
        """Gives stages built on the meta device their memory, and weights: ``init`` is called for each part here."""

    def main_parameters(self) -> list[MainParameter]:
        """What the optimizer updates, in the order of the model's parameters. The same objects every time."""

    def accumulate(self, last: bool, stage: int = 0) -> AbstractContextManager[None]:
        """Around forward and backward of one micro-batch in a stage (around backward is enough).

        ``last``: the backward that brings the last gradients of this stage; they are sent meanwhile, and none may come
        later. A schedule that computes the gradients of weights apart says so around those of its last micro-batch.
        """

    def reduce_gradients(self) -> None:
        """After the last micro-batch: every ``grad`` of the main parameters is there, summed, never averaged."""

    def sum_over_shards(self, value: Tensor) -> Tensor:
        """Sum over all ranks of a tensor made from this rank's counted parameters: squared norms, for example.

        ``value`` may be changed in place. The result is the same on every rank. Collective, unless every rank holds and
        counts everything.
        """

    def publish_weights(self, *, cast: bool = True) -> None:
        """After the update: compute weights follow the main parameters, perhaps not before the next forward.

        ``cast``: False if the update wrote every `MainParameter.compute` that there is.
        """

    def wait_for_weights(self) -> None:
        """Compute weights are all there: before anything but the model's own forward reads them."""

    def zero_gradients(self) -> None:
        """Before the first micro-batch."""

    def weights(self) -> dict[str, ShardedValue]:
        """Main weights and persistent buffers by name: what a checkpoint stores.

        Every parameter of the whole model is there on every rank (tied ones once), perhaps without pieces, and the
        buffers of this rank's stages. Loading writes into the pieces, then calls `publish_weights`.
        """

    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes that this engine holds now, from its tensors.

        ``parameters`` (what the model computes with, or its shards), ``gradients``, ``masters`` (fp32 copies that are
        not the parameters themselves): on the model's device; ``host``: in host memory, pinned beside a GPU.
        """
